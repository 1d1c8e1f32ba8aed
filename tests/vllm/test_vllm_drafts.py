"""Draft models with KV of their own, whose KV at a position depends on the next token."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sabotage
from engines import ARGUMENTS, Start
from harness import Answer, Engine, EngineError
from judge import TOLERANCE, apart, prompt
from models import DRAFTED
from settings import CHUNK, connector, tiering, whole
from storage import heads

pytestmark = [pytest.mark.engine, pytest.mark.fleet]

SHARED = prompt(2 * CHUNK, 1)
ONE, TWO = ([*SHARED, token, *prompt(187, 5)] for token in (7, 9))
"""Prompts that differ in one token alone: the one after their second chunk."""
COUNT = 64

Pages = dict[str, list[str]]


@pytest.fixture
def draft(start: Start, drafts: Path) -> Callable[..., Engine]:
    """Starts engines with a draft model, and without vLLM's own prefix cache."""

    def begin(given: dict[str, Any] | None = None, method: str = "eagle", head: str = "", **fields: Any) -> Engine:
        settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
        if method == "mtp":
            settings["attention_backend"] = ARGUMENTS["deepseek"]["attention_backend"]  # the draft selects its own
        else:
            settings["model"] = str(drafts / (head or method))
        known = {"speculative_config": settings, "enable_prefix_caching": False}
        model = method if method == "mtp" else DRAFTED[method]
        engine = start(drafts / model, given, **known | (ARGUMENTS["deepseek"] if method == "mtp" else {}) | fields)
        engine.do("draft_pages:watch")
        return engine

    return begin


def test_vllms_tiering_refuses_drafts(draft: Callable[..., Engine], tmp_path: Path) -> None:
    """Its names are vLLM's block hashes, which do not cover the next token."""
    with pytest.raises(EngineError, match="which vLLM's block hash does not cover"):
        draft(tiering(f"directory:{tmp_path / 'kv'}"))


def ask(engine: Engine, tokens: list[int]) -> tuple[Answer, Pages, tuple[float, float]]:
    """The answer; digests of the pages of the prompt's full blocks; drafted and accepted tokens."""
    before = guesses(engine)
    answer = engine.ask(tokens, count=COUNT)[0]
    after = guesses(engine)
    return answer, engine.do("draft_pages:last", len(tokens)), (after[0] - before[0], after[1] - before[1])


def guesses(engine: Engine) -> tuple[float, float]:
    """Tokens that were drafted, and that were accepted, so far."""
    metrics = engine.metrics()
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{it}_tokens"] for it in ("draft", "accepted"))
    return drafted, accepted


def blocks_of(tokens: list[int], pages: Pages) -> int:
    """Full blocks of the leading `tokens`; all pages are of a prompt of fewer than 1,024."""
    return len(tokens) // (128 if len(next(iter(pages.values()))) < 10 else 16)


def differ(pages: Pages, wanted: Pages, blocks: int) -> tuple[list[int], list[int]]:
    """Of the leading `blocks`: those that differ in the model's layers, and in the draft model's, which is the last."""
    *target, draft = ([at for at in range(blocks) if pages[it][at] != wanted[it][at]] for it in sorted(wanted))
    return sorted({at for layer in target for at in layer}), draft


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.vllm_core), "eagle3", "mtp"])
def test_restored_drafts_are_those_of_the_same_next_token(
    method: str, draft: Callable[..., Engine], tmp_path: Path
) -> None:
    prompts = {"one": ONE, "two": TWO, "short": ONE[:600], "exact": SHARED}
    engine = draft(None, method)
    wanted = {name: ask(engine, tokens) for name, tokens in prompts.items()}
    drafted, accepted = guesses(engine)
    if method != "eagle3":
        assert 0.1 < accepted / drafted < 0.9, "some guesses are right, and depend on the draft layer's KV"
    engine.close()
    blocks = blocks_of(SHARED, wanted["one"][1])
    target, last = differ(wanted["one"][1], wanted["two"][1], blocks)
    assert target == []
    assert last == [blocks - 1], "the token after the second chunk is in the KV of its last position"

    stored: dict[str, Pages] = {}
    for hits in ({"one": 0, "two": CHUNK}, {name: whole(len(it)) for name, it in prompts.items()}):
        engine = draft(connector(tmp_path / "kv"), method)
        for name, tokens in hits.items():
            before = engine.external_hits()
            answer, pages, guessed = ask(engine, prompts[name])
            assert apart(answer, wanted[name][0]) < TOLERANCE
            assert engine.external_hits() - before == tokens, name
            assert guessed == wanted[name][2], name
            first = stored.setdefault(name, pages if name in ("one", "two") else stored["one"])
            assert differ(pages, first, blocks_of(prompts[name][:tokens], pages)) == ([], []), name
            if method != "mtp":  # whose last bits depend on the length of the batch, on a CPU
                assert differ(pages, wanted[name][1], blocks) == ([], []), name
        engine.close()


def test_the_control_a_key_without_the_next_token_restores_other_drafts(
    draft: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = draft()
    wanted = ask(engine, TWO)
    engine.close()
    engine = draft(connector(tmp_path / "kv"), sabotage="draft_pages:look_at_no_next_token")
    engine.ask(ONE)
    answer, pages, _ = ask(engine, TWO)
    assert engine.external_hits() == len(SHARED)
    assert apart(answer, wanted[0]) < TOLERANCE, "the model verifies every guess"
    blocks = blocks_of(SHARED, pages)
    assert differ(pages, wanted[1], blocks) == ([], [blocks - 1])


def test_the_control_without_draft_pages_fewer_guesses_are_right(draft: Callable[..., Engine], tmp_path: Path) -> None:
    engine = draft()
    wanted = ask(engine, ONE)
    engine.close()
    engine = draft(connector(tmp_path / "kv"), sabotage="draft_pages:restore_no_drafts")
    engine.ask(ONE)
    answer, _, (drafted, accepted) = ask(engine, ONE)
    assert engine.external_hits() == len(SHARED)
    assert apart(answer, wanted[0]) < TOLERANCE
    assert accepted / drafted < 0.9 * wanted[2][1] / wanted[2][0]


def test_generated_tokens_and_vllms_own_cache(draft: Callable[..., Engine], tmp_path: Path) -> None:
    """Most guesses are wrong: their KV is in the blocks for a step. Chunks of accepted tokens are restored."""
    engine = draft()
    first = engine.ask(ONE, count=300)[0]
    turn = [*ONE, *first.tokens, *prompt(50, 3)]
    wanted = ask(engine, turn)
    engine.close()
    engine = draft(connector(tmp_path / "kv"), enable_prefix_caching=True)
    assert engine.ask(ONE, count=300)[0].tokens == first.tokens
    engine.close()
    for chunks in (3, 4):
        engine = draft(connector(tmp_path / "kv"))
        answer, pages, guessed = ask(engine, turn)
        assert apart(answer, wanted[0]) < TOLERANCE
        assert engine.external_hits() == chunks * CHUNK
        # Generated tokens were computed in other batches, which changes the last bits.
        assert differ(pages, wanted[1], blocks_of(SHARED, pages)) == ([], [])
        assert abs(guessed[1] / guessed[0] - wanted[2][1] / wanted[2][0]) < 0.05
        engine.close()


def test_another_draft_model_has_kv_of_its_own(draft: Callable[..., Engine], tmp_path: Path) -> None:
    engine = draft(connector(tmp_path / "kv"))
    engine.ask(ONE)
    engine.close()
    engine = draft(connector(tmp_path / "kv"), head="eagle-2")
    engine.ask(ONE)
    assert engine.external_hits() == 0


def test_a_step_without_the_draft_model_stores_nothing(draft: Callable[..., Engine], tmp_path: Path) -> None:
    """Close to the longest request vLLM drafts for none of a step's requests."""
    longest = 1024
    engine = draft(connector(tmp_path / "kv"), max_model_len=longest)
    before = guesses(engine)
    engine.ask(prompt(longest - 2, 6), count=1)
    assert guesses(engine) == before
    engine.forget()
    engine.ask(prompt(longest - 2, 6), count=1)
    assert engine.external_hits() == 0
    engine.ask(prompt(longest - 100, 6), count=1)
    engine.forget()
    engine.ask(prompt(longest - 2, 6), count=1)
    assert engine.external_hits() == 3 * CHUNK


def test_a_draft_model_that_changes_after_vllm_has_read_it_names_no_kv(
    draft: Callable[..., Engine], drafts: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "eagle" / "model.safetensors"
    shutil.copytree(drafts / "eagle", weights.parent)
    settings = {"method": "eagle", "num_speculative_tokens": 3, "model": str(weights.parent)}
    fields = sabotage.changing(weights, "loaded", "rewrite")
    engine = draft(connector(tmp_path / "kv"), speculative_config=settings, **fields)
    engine.ask_and_close(ONE)
    assert engine.private() == [f"KV is kept in host memory only: {weights} changed while the engine started"]
    assert not heads(tmp_path / "kv")
