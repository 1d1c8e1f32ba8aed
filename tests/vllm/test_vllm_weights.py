"""Weights that change in a running engine: no KV of one is found under the other, here or in another engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import LONG, SHORT, Expected, Start
from harness import Answer
from judge import TOLERANCE, apart
from settings import connector, whole
from test_vllm_ranks import TWO

pytestmark = pytest.mark.engine

Answers = dict[str, Answer]
NOTICE = "the weights have changed, or may have"

CHANGES = {
    "call": "(_write())",
    "apply": "(apply_model())",
    "load_directly": "(load_weights of the model was called)",
    "write_directly": "(parameters were written in place)",
    "replace_directly": "(parameters were replaced)",
}
UNANNOUNCED = ("load_directly", "write_directly", "replace_directly")


@pytest.mark.parametrize(
    "change", [pytest.param(it, marks=pytest.mark.vllm_core if it == "write_directly" else ()) for it in CHANGES]
)
def test_after_a_change_of_weights_nothing_is_loaded_or_stored(
    change: str, start: Start, expected: Expected, other: Path, wanted: Callable[[str], Answers], tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    assert apart(engine.ask(LONG)[0], expected("llama")["long"]) == 0
    engine.do(f"changes:{change}", str(other))
    assert engine.forget(), "vLLM's own cache, as its documents demand; the connector's is not reset"
    assert apart(engine.ask(LONG)[0], wanted(change)["long"]) < TOLERANCE
    # The step that notices what no call has announced makes its loads fail. vLLM counts them before.
    promised = engine.external_hits()
    assert promised == (whole(len(LONG)) if change in UNANNOUNCED else 0)
    assert apart(engine.ask(SHORT)[0], wanted(change)["short"]) < TOLERANCE
    assert engine.forget()
    assert apart(engine.ask(LONG)[0], wanted(change)["long"]) < TOLERANCE
    assert engine.external_hits() == promised
    assert engine.printed().count(NOTICE) == 1
    assert f"{NOTICE} {CHANGES[change]}" in engine.printed()
    engine.close()

    before = start("llama", connector(tmp_path / "kv"))
    assert apart(before.ask(LONG)[0], expected("llama")["long"]) < TOLERANCE
    assert before.external_hits() == whole(len(LONG)), "what was stored before the change is found"
    assert apart(before.ask(SHORT)[0], expected("llama")["short"]) < TOLERANCE
    assert before.external_hits() == whole(len(LONG)), "and nothing has been stored since"


@pytest.mark.vllm_core
def test_a_request_that_ends_in_the_first_step_after_a_change_is_not_stored(
    start: Start, expected: Expected, other: Path, tmp_path: Path
) -> None:
    """vLLM ends it before it passes on what the workers have found in that step."""
    engine = start("llama", connector(tmp_path / "kv"))
    engine.do("changes:write_directly", str(other))
    engine.ask(SHORT, count=1)
    assert engine.printed().count(NOTICE) == 1
    engine.close()
    before = start("llama", connector(tmp_path / "kv"))
    assert apart(before.ask(SHORT)[0], expected("llama")["short"]) < TOLERANCE
    assert before.external_hits() == 0


def test_the_control_unnoticed_changes_serve_wrong_tokens(
    start: Start, expected: Expected, other: Path, wanted: Callable[[str], Answers], tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"), sabotage="changes:overlook")
    engine.ask(LONG)
    engine.do("changes:reload", str(other))
    engine.forget()
    assert apart(engine.ask(LONG)[0], wanted("reload")["long"]) > 100 * TOLERANCE
    engine.ask(SHORT)
    engine.close()
    before = start("llama", connector(tmp_path / "kv"))
    assert apart(before.ask(SHORT)[0], expected("llama")["short"]) > 100 * TOLERANCE


@pytest.mark.vllm_core
def test_calls_that_change_no_weights_stop_nothing(start: Start, expected: Expected, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(LONG)
    engine.do("changes:harmless", "")
    engine.forget()
    assert apart(engine.ask(LONG)[0], expected("llama")["long"]) < TOLERANCE
    assert engine.external_hits() == whole(len(LONG))
    assert NOTICE not in engine.printed()


@pytest.mark.vllm_core
def test_after_a_reset_the_new_weights_have_kv_of_their_own(
    start: Start, expected: Expected, other: Path, wanted: Callable[[str], Answers], tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(LONG)
    for change in ("write_directly", "load_directly", "call", "sleep", "reload"):
        hits = engine.external_hits()
        engine.do(f"changes:{change}", str(other))
        assert engine.forget(everywhere=True)
        assert apart(engine.ask(LONG)[0], wanted(change)["long"]) < TOLERANCE
        assert engine.external_hits() == hits
        engine.forget()
        assert apart(engine.ask(LONG)[0], wanted(change)["long"]) < TOLERANCE
        assert engine.external_hits() == hits + whole(len(LONG))
    engine.close()
    before = start("llama", connector(tmp_path / "kv"))
    assert apart(before.ask(LONG)[0], expected("llama")["long"]) < TOLERANCE


@pytest.mark.parametrize("sabotage", ["", "changes:overlook_calls"])
def test_two_ranks_stop_together(
    sabotage: str, start: Start, expected: Expected, other: Path, wanted: Callable[[str], Answers], tmp_path: Path
) -> None:
    """The call is seen before the workers get it; without that, their own looks stop the next step's stores."""
    engine = start("llama", connector(tmp_path / "kv"), sabotage=sabotage, **TWO)
    engine.ask(LONG)
    engine.do("changes:reload" if sabotage else "changes:call_reload", str(other))
    engine.forget()
    assert apart(engine.ask(SHORT)[0], wanted("reload")["short"]) < TOLERANCE
    assert apart(engine.ask(LONG)[0], wanted("reload")["long"]) < TOLERANCE
    assert engine.external_hits() == 0
    assert engine.printed().count(NOTICE) == 1
    assert engine.forget(everywhere=True)
    engine.ask(SHORT)
    engine.forget()
    assert apart(engine.ask(SHORT)[0], wanted("reload")["short"]) < TOLERANCE
    assert engine.external_hits() == whole(len(SHORT)), "it goes on after a reset"
    engine.close()
    before = start("llama", connector(tmp_path / "kv"), **TWO)
    assert apart(before.ask(SHORT)[0], expected("llama")["short"]) < TOLERANCE
    assert before.external_hits() == 0
