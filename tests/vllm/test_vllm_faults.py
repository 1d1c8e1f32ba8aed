"""Whatever happens to the store: answers stay right, no request waits for long, and it works again afterwards."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sabotage
from engines import LONG, SHORT, Expected, Start
from harness import EngineError, in_process
from judge import TOLERANCE, apart, is_same
from models import make_checkpoint
from settings import connector, whole
from storage import damage_behind, flip_a_bit, objects, truncate

pytestmark = pytest.mark.engine

HYBRIDS = ("llama", "gemma3", "qwen3-next")


@pytest.mark.parametrize(
    ("model", "damage"),
    [
        pytest.param("llama", flip_a_bit, marks=pytest.mark.vllm_core),
        *((model, flip_a_bit) for model in HYBRIDS[1:]),
        *((model, truncate) for model in HYBRIDS),
    ],
)
def test_damaged_files_are_recomputed_and_heal(
    model: str, damage: Callable[[Path], int], start: Start, expected: Expected, tmp_path: Path
) -> None:
    wanted = expected(model)["long"]
    for store in ("empty", "damaged", "healed"):
        engine = start(model, connector(tmp_path / "kv"))
        assert is_same(model, engine.ask(LONG)[0], wanted), store
        if store == "healed":
            assert engine.external_hits() == whole(len(LONG), engine.chunk_tokens)
        engine.close()
        if store == "empty":
            assert damage(tmp_path / "kv")


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.vllm_core), "gemma3", "qwen3-next"])
def test_a_load_that_fails_in_the_middle_is_completed_by_computing(
    model: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    """The look-up has promised five chunks; three of them turn out to be damaged when they are read."""
    start(model, connector(tmp_path / "kv")).ask_and_close(LONG)
    assert damage_behind(tmp_path / "kv", 2)
    engine = start(model, connector(tmp_path / "kv"))
    assert is_same(model, engine.ask(LONG)[0], expected(model)["long"])
    # Neither do the blocks that vLLM keeps hold anything else than they should.
    assert is_same(model, engine.ask(LONG)[0], expected(model)["long"])
    assert is_same(model, engine.ask(SHORT)[0], expected(model)["short"])


@pytest.mark.parametrize("method", [pytest.param("reads", marks=pytest.mark.vllm_core), "probes"])
def test_a_directory_that_hangs_costs_a_deadline_and_then_nothing(
    method: str, start: Start, expected: Expected, hangs: Path, tmp_path: Path
) -> None:
    start("llama", connector(tmp_path / "kv")).ask_and_close(LONG, SHORT)
    patience_s = 1.0
    engine = start(
        "llama",
        connector(
            tmp_path / "kv",
            limits__load_deadline_s=patience_s,
            tiers__directory__probe_deadline_s=patience_s,
            tiers__directory__transfer_deadline_s=patience_s,
            tiers__directory__failures=1,
            tiers__directory__retry_s=0.5,
        ),
        sabotage=f"sabotage:hang_{method}",
        environment={sabotage.FLAG: str(hangs)},
    )
    began = time.monotonic()
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
    # The deadline, what the engine takes, and much for a machine that others use.
    assert time.monotonic() - began < patience_s + 10
    assert engine.external_hits() in (0, whole(len(LONG))), "promised and then recomputed, or not promised"
    engine.forget()
    # What has been stored meanwhile is in host memory, which does not hang.
    assert engine.hits_of(LONG) == whole(len(LONG))
    hangs.unlink()
    deadline = time.monotonic() + 120
    while True:  # the tier is tried again after a while
        engine.forget()
        if engine.hits_of(SHORT) == whole(len(SHORT)):
            break
        assert time.monotonic() < deadline, "the directory works, and is not used again"


@pytest.mark.vllm_core
def test_a_directory_that_hangs_does_not_keep_the_engine_from_ending(start: Start, hangs: Path, tmp_path: Path) -> None:
    engine = start(
        "llama",
        connector(tmp_path / "kv", limits__close_deadline_s=1.0, tiers__directory__transfer_deadline_s=1.0),
        sabotage="sabotage:hang_writes",
        environment={sabotage.FLAG: str(hangs)},
    )
    engine.ask(LONG)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 20
    assert objects(tmp_path / "kv") == []


def test_a_full_disk_stores_what_fits_and_disturbs_no_request(
    small_disk: Path, start: Start, expected: Expected
) -> None:
    wanted = expected("llama")
    first = start("llama", connector(small_disk / "kv"))
    assert is_same("llama", first.ask(LONG)[0], wanted["long"])
    assert is_same("llama", first.ask(SHORT)[0], wanted["short"])
    first.forget()
    assert is_same("llama", first.ask(LONG)[0], wanted["long"])
    assert first.external_hits() == whole(len(LONG)), "from host memory"
    first.close()
    assert 0 < len(objects(small_disk / "kv")) < 7
    second = start("llama", connector(small_disk / "kv"))
    assert is_same("llama", second.ask(LONG)[0], wanted["long"])
    assert is_same("llama", second.ask(SHORT)[0], wanted["short"])


@pytest.mark.vllm_core
def test_an_engine_that_was_killed_leaves_a_store_that_works(start: Start, expected: Expected, tmp_path: Path) -> None:
    first = start("llama", connector(tmp_path / "kv"))
    first.ask_in_turn(LONG, SHORT)
    first.kill()
    second = start("llama", connector(tmp_path / "kv"))
    for _ in range(2):
        assert is_same("llama", second.ask(LONG)[0], expected("llama")["long"])
        assert is_same("llama", second.ask(SHORT)[0], expected("llama")["short"])
    second.close()
    assert start("llama", connector(tmp_path / "kv")).hits_of(LONG) == whole(len(LONG))


@pytest.mark.vllm_core
def test_other_weights_at_the_same_path_are_another_model(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    in_process(make_checkpoint, "llama", model, 7)
    start(model, connector(tmp_path / "kv")).ask_and_close(LONG)
    in_process(make_checkpoint, "llama", model, 8)
    plain = start(model).ask(LONG)[0]
    second = start(model, connector(tmp_path / "kv"))
    assert apart(second.ask(LONG)[0], plain) == 0
    assert second.external_hits() == 0
    second.close()
    in_process(make_checkpoint, "llama", model, 7)
    assert start(model, connector(tmp_path / "kv")).hits_of(LONG) == whole(len(LONG)), (
        "the first weights are known again"
    )


@pytest.mark.vllm_core
def test_a_wrong_setting_is_refused_with_its_name(start: Start, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"host\.capacity_byte.*did you mean.*capacity_bytes"):
        start("llama", connector(tmp_path / "kv", host__capacity_byte="64MiB"))


@pytest.mark.vllm_core
def test_a_class_is_refused_with_a_cpus_packed_pages(start: Start, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"store\.loss = k8v4: the engine does not define the arrangement of kv"):
        start("llama", connector(tmp_path / "kv", store__loss="k8v4"))


@pytest.mark.vllm_core
def test_the_tolerance_is_one_that_tells_models_apart(start: Start, expected: Expected, tmp_path: Path) -> None:
    """The control of the test of other weights: what would be served if their KV were taken for this model's."""
    in_process(make_checkpoint, "llama", tmp_path / "model", 8)
    assert apart(start(tmp_path / "model").ask(LONG)[0], expected("llama")["long"]) > 100 * TOLERANCE
