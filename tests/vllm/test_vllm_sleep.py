"""vLLM sleeps, and its weights change by calls that kvtier knows: KV is found under the weights that computed it."""

from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Expected, Start
from harness import Answer, Engine
from judge import TOLERANCE, apart
from settings import CHUNK, connector, whole
from storage import heads
from test_vllm_ranks import TWO
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

SLEEPY: dict[str, Any] = {"worker_cls": "sleepers.Worker", "weight_transfer_config": {"backend": "files"}}
WHOLE = whole(len(LONG))


def hits(engine: Engine, wanted: Answer) -> int:
    """Tokens of `LONG` that the connector brings. The answer must be right."""
    before = engine.external_hits()
    assert apart(engine.ask(LONG)[0], wanted) < TOLERANCE
    return engine.external_hits() - before


def nap(engine: Engine, level: int, path: Path | None = None) -> None:
    """Sleep, and wake up with the weights of `path`, in parts as trainers do it."""
    engine.do("sleepers:sleep", level)
    if path is None:
        assert engine.do("sleepers:wake_up")
        return
    assert not engine.do("sleepers:wake_up", "weights")
    engine.do("changes:reload", str(path))
    assert engine.do("sleepers:wake_up", "kv_cache")


@pytest.mark.vllm_core
def test_after_sleep_kv_of_the_same_weights_is_found_and_no_other(
    start: Start, expected: Expected, checkpoints: Path, other: Path, wanted: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"), **SLEEPY)
    old, new, same = expected("llama")["long"], wanted("reload")["long"], checkpoints / "llama"
    assert hits(engine, old) == 0
    nap(engine, 1)
    assert hits(engine, old) == WHOLE
    engine.do("sleepers:sleep", 1)
    nap(engine, 1)
    assert hits(engine, old) == WHOLE, "it was asked to sleep twice"
    engine.do("sleepers:sleep_later", 1)
    assert engine.do("sleepers:wake_up")
    assert hits(engine, old) == WHOLE, "it slept when its requests had ended"
    engine.do("sleepers:release_kv")
    assert engine.do("sleepers:wake_up")
    assert hits(engine, old) == WHOLE
    nap(engine, 2, same)
    assert hits(engine, old) == WHOLE
    nap(engine, 2, other)
    assert [hits(engine, new), engine.forget(), hits(engine, new)] == [0, True, WHOLE]
    nap(engine, 1)
    assert hits(engine, new) == WHOLE
    nap(engine, 1, same)
    assert hits(engine, old) == WHOLE, "the weights of the start are back"
    # What a user resets stays unreachable, before sleep or during it.
    assert engine.forget(everywhere=True)
    nap(engine, 1)
    assert hits(engine, old) == 0
    engine.do("sleepers:sleep", 1)
    assert engine.do("changes:reset", False, True, drains=False)
    assert engine.do("sleepers:wake_up")
    assert hits(engine, old) == 0
    # vLLM counts as awake after an error.
    assert "memory is short" in engine.do("sleepers:fail_to_sleep")
    engine.do("changes:reload", str(same))
    assert [hits(engine, old), engine.forget(), hits(engine, old)] == [0, True, 0], "it is off"
    assert engine.printed().count("the weights have changed, or may have (sleep() has failed)") == 1
    assert engine.forget(everywhere=True)
    assert [hits(engine, old), engine.forget(), hits(engine, old)] == [0, True, WHOLE]
    nap(engine, 1)
    assert hits(engine, old) == WHOLE


@pytest.mark.vllm_core
def test_new_weights_in_flight_name_kv_that_engines_with_them_share(
    start: Start, expected: Expected, other: Path, wanted: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"), **SLEEPY)
    old, new = expected("llama")["long"], wanted("reload")["long"]
    engine.do("changes:begin", SHORT)
    engine.do("sleepers:transfer", str(other), drains=False)
    assert engine.printed().count("KV stored with the previous weights is not used") == 1
    # The running request goes on with KV of both, and so does the next one of the same prompt.
    engine.ask(SHORT)
    assert engine.forget()
    assert engine.hits_of(SHORT) == 0
    assert [hits(engine, new), engine.forget(), hits(engine, new)] == [0, True, WHOLE]
    engine.close()
    second = start("llama", connector(tmp_path / "kv"), **SLEEPY)
    assert hits(second, old) == 0
    second.do("sleepers:transfer", str(other))
    assert second.forget()
    assert hits(second, new) == WHOLE
    assert second.ask(SHORT)[0].tokens == wanted("reload")["short"].tokens


@pytest.mark.parametrize(
    "how", [pytest.param("awake without weights", marks=pytest.mark.vllm_core), "half of other weights"]
)
def test_kv_of_lost_weights_is_not_stored_as_that_of_the_weights_around_them(
    how: str, start: Start, expected: Expected, checkpoints: Path, tmp_path: Path
) -> None:
    engine, old = start("llama", connector(tmp_path / "kv"), **SLEEPY), expected("llama")["long"]
    if how == "awake without weights":
        engine.do("sleepers:sleep", 2)
        assert engine.do("sleepers:wake_up")
    else:
        assert engine.do("sleepers:reload_half") == "the sender has failed"
    engine.ask(LONG[:700])
    engine.do("changes:reload", str(checkpoints / "llama"))
    engine.ask(LONG)  # goes on with vLLM's own KV
    assert [engine.forget(), hits(engine, old), engine.forget(), hits(engine, old)] == [True, 0, True, WHOLE]


@pytest.mark.vllm_core
def test_the_control_equal_names_of_other_weights_serve_wrong_tokens(
    start: Start, other: Path, wanted: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(None), sabotage="sleepers:undigested", **SLEEPY)
    engine.ask(LONG)
    nap(engine, 2, other)
    assert apart(engine.ask(LONG)[0], wanted("reload")["long"]) > 100 * TOLERANCE


def test_random_names_need_no_digest_and_find_nothing_of_before(
    start: Start, checkpoints: Path, expected: Expected, other: Path, wanted: Expected, tmp_path: Path
) -> None:
    kv = connector(tmp_path / "kv", vllm__weights_names="random")
    engine = start("llama", kv, sabotage="sleepers:undigested", **SLEEPY)
    old, new = expected("llama")["long"], wanted("reload")["long"]
    assert hits(engine, old) == 0
    nap(engine, 2, other)
    assert [hits(engine, new), engine.forget(), hits(engine, new)] == [0, True, WHOLE]
    nap(engine, 1)
    assert hits(engine, new) == WHOLE
    nap(engine, 2, checkpoints / "llama")
    assert hits(engine, old) == 0


@pytest.mark.vllm_core
@pytest.mark.parametrize("is_fenced", [True, False])
def test_copies_end_before_memory_goes_away(is_fenced: bool, start: Start, expected: Expected, tmp_path: Path) -> None:
    how = "sabotage:slow_copies" if is_fenced else "sleepers:unfenced"
    engine = start("llama", connector(tmp_path / "kv"), sabotage=how, **SLEEPY)
    wanted = expected("llama")["long"]
    engine.ask(LONG, count=1)
    engine.do("sleepers:sleep", 1, drains=False)
    assert engine.do("sleepers:wake_up")
    if not is_fenced:
        wait_until(lambda: len(heads(tmp_path / "kv")) == WHOLE // CHUNK, "the stores", 60.0)
        assert apart(engine.ask(LONG)[0], wanted) > 100 * TOLERANCE, "memory was read after it had gone"
        return
    assert hits(engine, wanted) == WHOLE, "open stores were waited for"
    for mode in ("abort", "keep"):
        assert engine.forget()
        engine.do("changes:interrupt", [LONG], 2)
        engine.do("sleepers:sleep", 1, mode, drains=False)
        assert engine.do("sleepers:wake_up", drains=False)
        assert apart(engine.ask(LONG)[0], wanted) < TOLERANCE, "a load was under way"
        assert engine.forget()
        assert hits(engine, wanted) == WHOLE


def test_host_memory_is_given_back_and_an_engine_may_die_asleep(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv", vllm__sleep_frees_host=True), **SLEEPY)
    wanted = expected("llama")["long"]
    engine.ask(LONG)
    assert engine.do("sleepers:held_by_host") > 0
    engine.do("sleepers:sleep", 1)
    assert engine.do("sleepers:held_by_host") == 0
    assert engine.do("sleepers:wake_up")
    assert hits(engine, wanted) == WHOLE, "the directory has it"
    assert engine.do("sleepers:held_by_host") > 0
    engine.do("sleepers:sleep", 2)
    engine.kill()
    assert hits(start("llama", connector(tmp_path / "kv")), wanted) == WHOLE


def test_two_ranks_sleep(
    start: Start, expected: Expected, checkpoints: Path, other: Path, wanted: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"), **SLEEPY, **TWO)
    old, new = expected("llama")["long"], wanted("reload")["long"]
    assert hits(engine, old) == 0
    nap(engine, 1)
    assert hits(engine, old) == WHOLE
    nap(engine, 2, checkpoints / "llama")
    assert hits(engine, old) == WHOLE
    nap(engine, 2, other)
    assert [hits(engine, new), engine.forget(), hits(engine, new)] == [0, True, WHOLE]
    assert "sleep() has failed on rank 0: TimeoutError: a KV copy did not end" in engine.do("sleepers:hang")
    for number in (1, 2):
        assert engine.do("sleepers:ask_ranks", number) == [(number, 0), (number, 1)], "each answer is of its own call"
    assert hits(engine, new) == 0, "it is off until a restart"
