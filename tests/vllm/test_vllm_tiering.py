"""kvtier's tiers below vLLM's own tiering manager: equal answers, no wrong KV, no waiting.

The copies between vLLM's KV memory and its host memory are a stand-in (`tiering_on_cpu`).
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sabotage
from engines import LONG, SHORT, Expected, Start
from harness import Ask, EngineError, in_process
from judge import is_same, prompt
from models import make_checkpoint
from settings import tiering
from storage import corrupt, damage_behind, flip_a_bit, objects, truncate
from test_vllm_ranks import TWO
from tests.sealed_places import sealed_place

pytestmark = [pytest.mark.engine, pytest.mark.fleet]

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and so of a chunk."""

LOAD_NOTHING = {"action_type": "kvtier.hints", "action_version": "1", "payload": {"load": False}}

UNMAPPED = "Failed to close mmap_obj"
"""Logged by vLLM when something still refers to its host memory."""


def whole(tokens: int, chunk: int = BLOCK) -> int:
    return (tokens - 1) // chunk * chunk


@pytest.mark.parametrize(
    ("model", "chunk"),
    [
        pytest.param("llama", 1, marks=pytest.mark.vllm_core),
        ("gemma3", 1),
        ("llama", 2),
        ("qwen3-next", 1),
        ("deepseek", 8),
    ],
)
def test_an_engine_that_starts_again_answers_the_same(
    model: str, chunk: int, start: Start, expected: Expected, tmp_path: Path
) -> None:
    wanted, given = expected(model), tiering(f"directory:{tmp_path / 'kv'}", chunk=chunk)
    first = start(model, given)
    cold = first.ask_in_turn(LONG, SHORT)
    assert first.external_hits() == 0
    first.close()
    second = start(model, given)
    warm = second.ask_in_turn(LONG, SHORT)
    hits = second.external_hits()
    second.close()
    assert hits > len(LONG) // 2
    if (model, chunk) in {("llama", 1), ("gemma3", 1)}:
        assert hits == whole(len(LONG)) + whole(len(SHORT))
    for answers in (cold, warm):
        assert is_same(model, answers[0], wanted["long"])
        assert is_same(model, answers[1], wanted["short"])
    assert UNMAPPED not in first.printed() + second.printed()

    # The control of all tests here: KV of other tokens, under checksums that hold, would be noticed.
    assert corrupt(tmp_path / "kv")
    third = start(model, given)
    wrong = third.ask(LONG)[0]
    assert third.external_hits() > len(LONG) // 2
    assert not is_same(model, wrong, wanted["long"])


@pytest.mark.parametrize("kind", [pytest.param("s3", marks=pytest.mark.vllm_core), "disk", "valkey"])
def test_kv_comes_back_from_each_kind_of_tier_coded_and_sealed(
    kind: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    with sealed_place(kind, tmp_path / kind) as (settings, heads):
        given = tiering(**settings)
        start("llama", given, sabotage="sabotage:code_all").ask_and_close(LONG)
        assert len(heads()) == len(LONG) // BLOCK
        assert all(head.seal and 2 in head.codecs for head in heads())
        second = start("llama", given)
        assert is_same("llama", second.ask(LONG)[0], expected("llama")["long"])
        assert second.external_hits() == whole(len(LONG))
        second.close()


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        pytest.param(flip_a_bit, "", marks=pytest.mark.vllm_core),
        (flip_a_bit, "tiering_on_cpu:split_loads"),
        (truncate, ""),
    ],
)
def test_damaged_files_are_recomputed_and_heal(
    damage: Callable[[Path], int], how: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    for store in ("empty", "damaged", "healed"):
        given = tiering(f"directory:{tmp_path / 'kv'}")
        engine = start("llama", given, sabotage=how if store == "damaged" else "")
        assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"]), store
        assert engine.external_hits() == (whole(len(LONG)) if store == "healed" else 0)
        engine.close()
        if store == "empty":
            assert damage(tmp_path / "kv")


def test_a_load_that_fails_in_the_middle_delivers_what_came_before(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    start("llama", tiering(f"directory:{tmp_path / 'kv'}")).ask_and_close(LONG)
    assert damage_behind(tmp_path / "kv", 4)
    engine = start("llama", tiering(f"directory:{tmp_path / 'kv'}"))
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
    assert engine.external_hits() == 4 * BLOCK
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])


@pytest.mark.parametrize("method", [pytest.param("probes", marks=pytest.mark.vllm_core), "reads", "writes"])
def test_a_tier_that_hangs_keeps_no_request_and_no_reset_waiting(
    method: str, start: Start, expected: Expected, hangs: Path, tmp_path: Path
) -> None:
    """A reset ends transfers of vLLM's host memory: what comes into it later is not overwritten."""
    if method != "writes":
        start("llama", tiering(f"directory:{tmp_path / 'kv'}")).ask_and_close(LONG, SHORT)
    patience_s = 1.0
    deadlines = {
        "tiers__directory__probe_deadline_s": patience_s,
        "tiers__directory__transfer_deadline_s": 60.0,
        "limits__load_deadline_s": patience_s,
        "limits__store_deadline_s": 60.0,
    }
    engine = start(
        "llama",
        tiering(f"directory:{tmp_path / 'kv'}", **deadlines),
        sabotage=f"sabotage:hang_{method}",
        environment={sabotage.FLAG: str(hangs)},
    )
    began = time.monotonic()
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
    # The deadline, what the engine takes, and much for a machine that others use.
    assert time.monotonic() - began < 2 * patience_s + 8
    began = time.monotonic()
    assert engine.do("tiering_on_cpu:reset", drains=False)
    assert time.monotonic() - began < 7, "two seconds, and what a busy machine takes"
    hangs.unlink()
    for _ in range(2):
        assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])
        assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
        engine.forget()
    assert UNMAPPED not in engine.printed()


def test_a_cap_is_kept(start: Start, expected: Expected, tmp_path: Path) -> None:
    """Room for seven of fifteen chunks."""
    engine = start("llama", tiering(f"directory:{tmp_path / 'kv'}?capacity=1400KiB"))
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
    assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])
    engine.close()
    assert 1 <= len(objects(tmp_path / "kv")) < len(LONG) // BLOCK
    assert sum(path.stat().st_size for path in objects(tmp_path / "kv")) <= 1400 << 10
    again = start("llama", tiering(f"directory:{tmp_path / 'kv'}?capacity=1400KiB"))
    assert is_same("llama", again.ask(LONG)[0], expected("llama")["long"])
    assert is_same("llama", again.ask(SHORT)[0], expected("llama")["short"])


# ---- what must not be shared ---------------------------------------------------------------------------------------


def test_other_weights_at_the_same_path_are_another_model(start: Start, tmp_path: Path) -> None:
    model, given = tmp_path / "model", tiering(f"directory:{tmp_path / 'kv'}")
    in_process(make_checkpoint, "llama", model, 7)
    start(model, given).ask_and_close(LONG)
    in_process(make_checkpoint, "llama", model, 8)
    plain = start(model).ask(LONG)[0]
    engine = start(model, given)
    assert is_same("llama", engine.ask(LONG)[0], plain)
    assert engine.external_hits() == 0


@pytest.mark.parametrize(
    ("chunk", "environment", "fields"),
    [
        (2, {}, {}),
        (1, {"PYTHONHASHSEED": "7"}, {}),
        (1, {}, {"block_size": 64}),
    ],
)
def test_another_division_or_another_hash_shares_nothing(
    chunk: int, environment: dict[str, str], fields: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    start("llama", tiering(f"directory:{tmp_path / 'kv'}")).ask_and_close(LONG)
    given = tiering(f"directory:{tmp_path / 'kv'}", chunk=chunk)
    for hits in (False, True):
        engine = start("llama", given, environment=environment, **fields)
        engine.ask(LONG)
        assert bool(engine.external_hits()) is hits
        engine.close()


def test_a_hash_with_collisions_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="prefix_caching_hash_algo = 'xxhash'"):
        start("llama", tiering(f"directory:{tmp_path / 'kv'}"), prefix_caching_hash_algo="xxhash")


def test_random_weights_are_not_stored(start: Start, tmp_path: Path) -> None:
    engine = start("llama", tiering(f"directory:{tmp_path / 'kv'}"), load_format="dummy")
    engine.ask_and_close(LONG)
    assert engine.printed().count("kvtier stores and finds nothing in this engine: its weights are random") == 1
    assert not (tmp_path / "kv").exists()


def test_an_adapter_whose_files_change_is_another_adapter(start: Start, checkpoints: Path, tmp_path: Path) -> None:
    """Its name and its path, which are all that vLLM's block hash knows, stay the same."""
    adapter, fields = tmp_path / "adapter", {"enable_lora": True, "max_lora_rank": 8}
    given = tiering(f"directory:{tmp_path / 'kv'}")
    for number in (1, 2):
        shutil.copytree(checkpoints / f"adapter-{number}", adapter, dirs_exist_ok=True)
        plain = start("llama", **fields).ask(LONG, lora=str(adapter))[0]
        for hits in (0, whole(len(LONG))):
            engine = start("llama", given, **fields)
            assert is_same("llama", engine.ask(LONG, lora=str(adapter))[0], plain)
            assert engine.external_hits() == hits
            engine.close()


def test_files_that_change_around_vllms_read_name_nothing(start: Start, checkpoints: Path, tmp_path: Path) -> None:
    model, adapter, directory = tmp_path / "model", tmp_path / "adapter", tmp_path / "kv"
    shutil.copytree(checkpoints / "llama", model)
    shutil.copytree(checkpoints / "adapter-1", adapter)
    given = tiering(f"directory:{directory}")
    engine = start("llama", given, enable_lora=True, max_lora_rank=8)
    engine.do("changes:ask_and_replace", LONG, str(adapter), 1, str(checkpoints / "adapter-2"))
    engine.close()
    assert not objects(directory)
    engine = start(model, given, **sabotage.changing(model / "model.safetensors", "loaded", "replace"))
    engine.ask_and_close(LONG)
    assert "kvtier stores and finds nothing in this engine: " in engine.printed()
    assert "model.safetensors changed while the engine started" in engine.printed()
    assert not objects(directory)


def test_salts_share_nothing(start: Start, tmp_path: Path) -> None:
    given = tiering(f"directory:{tmp_path / 'kv'}")
    start("llama", given).ask_and_close(LONG, salt="one")
    engine = start("llama", given)
    assert [engine.hits_of(LONG, salt=it) for it in ("two", "", "one")] == [0, 0, whole(len(LONG))]


def test_of_a_request_that_opts_out_only_vllms_own_host_memory_holds_anything(start: Start, tmp_path: Path) -> None:
    """And with vLLM's own limit not even that. A request that says nothing is the control."""
    directory, count = tmp_path / "kv", whole(len(SHORT)) // BLOCK
    given = tiering(f"directory:{directory}")
    engine = start("llama", given)
    for number, hints in enumerate([{"store": False}, {"store": "no"}, {"max_offload_tokens": 0}]):
        asked = Ask(prompt(700, 40 + number), transfer=hints)
        engine.ask(asked)
        engine.forget()
        assert engine.hits_of(asked) == (0 if "max_offload_tokens" in hints else whole(700))
    engine.ask(Ask(SHORT, transfer={"store": True}))
    engine.close()
    assert len(objects(directory)) == count
    assert start("llama", given).hits_of(Ask(SHORT, transfer={"store": False})) == whole(len(SHORT))


@pytest.mark.vllm_core
def test_a_request_may_load_nothing_of_kvtier_and_kvtiers_metrics_are_vllms(start: Start, tmp_path: Path) -> None:
    given, loaded = tiering(f"directory:{tmp_path / 'kv'}"), "vllm:kvtier_transfer_bytes{link=promote,tier=directory}"
    first = start("llama", given)
    first.ask(SHORT)
    first.close()
    engine = start("llama", given)
    for hints in ({"load": False}, {"kv_hint": {"actions": [LOAD_NOTHING]}}):
        assert engine.hits_of(Ask(SHORT, transfer=hints)) == 0
        engine.do("tiering_on_cpu:empty_host_memory")
    assert engine.metrics().get(loaded, 0) == 0
    assert engine.hits_of(Ask(SHORT, transfer={"load": True})) == whole(len(SHORT)), "the control"
    for seed in range(1, 50):  # a step takes the metrics only if the last did so 0.25 s ago
        engine.ask(prompt(700, seed))
        found = engine.metrics()
        if loaded in found:
            break
    assert found[loaded] > 0
    assert found["vllm:kvtier_tier_up{tier=directory,way=read}"] == 1


@pytest.mark.vllm_core
def test_after_a_change_of_weights_nothing_is_loaded_or_stored(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    given, other = tiering(f"directory:{tmp_path / 'kv'}"), tmp_path / "other"
    in_process(make_checkpoint, "llama", other, 8)
    changed = start(other).ask_in_turn(LONG, SHORT)
    engine = start("llama", given)
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
    engine.do("changes:reload", str(other))
    for _ in range(2):
        # Without a reset of the connector, after which KV of before has other names.
        engine.do("tiering_on_cpu:empty_host_memory")
        assert is_same("llama", engine.ask(LONG)[0], changed[0])
        assert is_same("llama", engine.ask(SHORT)[0], changed[1])
    assert engine.forget(everywhere=True)
    assert is_same("llama", engine.ask(LONG)[0], changed[0])
    assert engine.external_hits() == 0
    assert engine.printed().count("the weights have changed, or may have (reload_weights())") == 1
    engine.close()

    before = start("llama", given)
    assert is_same("llama", before.ask(LONG)[0], expected("llama")["long"])
    assert before.external_hits() == whole(len(LONG)), "what was stored before the change is found"
    assert is_same("llama", before.ask(SHORT)[0], expected("llama")["short"])
    assert before.external_hits() == whole(len(LONG)), "and nothing has been stored since"


def test_the_control_an_unnoticed_change_serves_wrong_tokens(start: Start, expected: Expected, tmp_path: Path) -> None:
    given, other = tiering(f"directory:{tmp_path / 'kv'}"), tmp_path / "other"
    in_process(make_checkpoint, "llama", other, 8)
    engine = start("llama", given, sabotage="changes:overlook_calls")
    engine.do("changes:reload", str(other))
    engine.ask_and_close(LONG)
    before = start("llama", given)
    assert not is_same("llama", before.ask(LONG)[0], expected("llama")["long"])


def test_a_reset_makes_kv_of_before_unreachable_until_a_restart(start: Start, tmp_path: Path) -> None:
    given = tiering(f"directory:{tmp_path / 'kv'}")
    engine = start("llama", given)
    engine.ask(LONG)
    engine.do("changes:harmless", "")
    assert engine.forget(everywhere=True)
    assert engine.hits_of(LONG) == 0
    engine.do("tiering_on_cpu:empty_host_memory")
    assert engine.hits_of(LONG) == whole(len(LONG)), "what was stored since the reset"
    engine.close()
    assert len(objects(tmp_path / "kv")) == 2 * (len(LONG) // BLOCK)
    assert start("llama", given).hits_of(LONG) == whole(len(LONG))


# ---- the rest of the interface -------------------------------------------------------------------------------------


def test_an_internal_error_switches_kvtier_off_and_disturbs_no_request(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    engine = start("llama", tiering(f"directory:{tmp_path / 'kv'}"), sabotage="tiering_on_cpu:fail")
    for _ in range(2):
        assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
        engine.forget(everywhere=True)
    engine.close()
    assert engine.printed().count("kvtier has failed and is off until a restart") == 1
    assert "a mistake of ours" in engine.printed()
    assert objects(tmp_path / "kv") == []


def test_a_wrong_setting_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="from secondary_tiers of kv_connector_extra_config"):
        start("llama", tiering(f"directory:{tmp_path / 'kv'}", limits__load_deadline_s=-1))
    with pytest.raises(EngineError, match=r"tiers .*: none; allowed: one or more"):
        start("llama", tiering())


def test_a_class_is_refused_alone_and_beside_another_tier(start: Start, tmp_path: Path) -> None:
    given = tiering(f"directory:{tmp_path / 'kv'}", store__loss="int4")
    for others in ([], [{"type": "fs", "root_dir": str(tmp_path / "fs")}]):
        given["kv_connector_extra_config"]["secondary_tiers"] += others
        with pytest.raises(EngineError, match=r"store\.loss = int4: vLLM's offloading does not define the arrangement"):
            start("llama", given)


def own_arguments() -> None:
    """Runs where vLLM is imported: values of the entry that are no settings of kvtier."""
    from kvtier.connect.vllm.secondary_tier import KvtierSecondaryTier
    from kvtier.errors import ConfigError

    for name, value, allowed in [("locality", "local", "LOCAL, REMOTE"), ("enable_kv_events", "false", "False, True")]:
        with pytest.raises(ConfigError, match=f"{name} = '{value}' .from secondary_tiers of .*allowed: {allowed}"):
            KvtierSecondaryTier(None, memoryview(bytes(4)), "kvtier", **{name: value})  # type: ignore[arg-type]


def test_a_wrong_value_of_a_vllm_argument_is_named() -> None:
    in_process(own_arguments)


def test_stored_blocks_are_announced(start: Start, tmp_path: Path) -> None:
    given = tiering(f"directory:{tmp_path / 'kv'}", enable_kv_events=True, locality="LOCAL")
    engine = start(
        "llama",
        given,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        sabotage="tiering_on_cpu:keep_events",
    )
    engine.ask(LONG)
    engine.drain()
    assert engine.told_by("tiering_on_cpu:stored_keys") == len(LONG) // BLOCK


def test_blocks_of_before_a_reset_are_not_announced_after_it(start: Start, tmp_path: Path) -> None:
    """VLLM has published meanwhile that all is gone, and this engine does not find them any more."""
    engine = start(
        "llama",
        tiering(f"directory:{tmp_path / 'kv'}", enable_kv_events=True, locality="LOCAL"),
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        sabotage="tiering_on_cpu:keep_events_of_slow_stores",
    )
    engine.ask(LONG)
    assert engine.do("tiering_on_cpu:reset", drains=False)
    assert len(objects(tmp_path / "kv")) == len(LONG) // BLOCK
    engine.ask(LONG[:9])
    assert engine.told_by("tiering_on_cpu:stored_keys") == 0
    engine.ask(LONG)
    engine.drain()
    assert engine.told_by("tiering_on_cpu:stored_keys") == len(LONG) // BLOCK


def test_two_ranks_have_one_object(start: Start, expected: Expected, tmp_path: Path) -> None:
    given = tiering(f"directory:{tmp_path / 'kv'}")
    for hits in (0, whole(len(LONG))):
        engine = start("llama", given, **TWO)
        assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])
        assert engine.external_hits() == hits
        engine.close()
    assert len(objects(tmp_path / "kv")) == len(LONG) // BLOCK
