"""A real language model gives the same answers to questions about texts with kvtier as without it.

A reference engine computes each text alone and whole. The engines with kvtier answer several requests at once and
compute prompts in pieces. All compute in float32.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from harness import Answer, Ask, Engine, in_process
from settings import connector, whole
from storage import corrupt
from tests.answers import ENOUGH, assert_same, compare, questions_by_text

from kvtier.tools.demo.model import PRETRAINED, missing_packages, write_pretrained

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_packages()), reason=f"{PRETRAINED} needs the packages {missing_packages()}"),
]

TOKENS = 16
"""Of an answer."""
PATIENCE_S = 1500.0
WHOLE = {"dtype": "float32", "max_model_len": 8192, "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 8192}
"""Room for 23,000 tokens of KV; the texts have 32,000."""
PIECES = WHOLE | {"max_num_batched_tokens": 512, "max_num_seqs": 8}

Rounds = list[tuple[Ask, ...]]
"""The first question about each text, then the second one about each, and so on."""


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """A directory with the checkpoint. It is removed at the end, since the store takes 2 GB."""
    in_process(write_pretrained, tmp_path / "model")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def rounds(where: Path) -> Rounds:
    from transformers import AutoTokenizer

    texts = questions_by_text(AutoTokenizer.from_pretrained(where / "model"))
    return list(zip(*([Ask(tokens, TOKENS) for tokens in prompts] for prompts in texts), strict=True))


def ask_without_kvtier(where: Path, rounds: Rounds) -> list[Answer]:
    """For the first question about a text nothing is reused; for the others the engine's own KV is."""
    texts: list[list[Answer]] = []
    with Engine(where / "model", where / "reference.log", **WHOLE) as engine:
        for first, *others in zip(*rounds, strict=True):
            engine.forget()
            texts.append(engine.ask(first) + engine.ask(*others))
            assert texts[-1][0].cached == 0
    return list(chain.from_iterable(zip(*texts, strict=True)))


def with_kvtier(where: Path, log: str) -> Engine:
    """Host memory holds a third of the texts, so most of what is restored is on disk."""
    return Engine(where / "model", where / log, connector(where / "kv", host__capacity_bytes="512MiB"), **PIECES)


@pytest.mark.timeout(3 * PATIENCE_S)
def test_fifty_questions_have_the_same_answers_together_in_pieces_and_after_a_restart(
    where: Path, rounds: Rounds
) -> None:
    questions = list(chain.from_iterable(rounds))
    with ThreadPoolExecutor(1) as pool, with_kvtier(where, "first.log") as engine:
        reference = pool.submit(ask_without_kvtier, where, rounds)
        # All wait in one queue. What an earlier one has stored is restored for a later one about the same text.
        answers = engine.ask(*questions, limit_s=PATIENCE_S)
        assert engine.external_hits()
    wanted = reference.result(PATIENCE_S)
    assert_same(answers, wanted)

    answers = []
    with with_kvtier(where, "restarted.log") as engine:
        for asked in rounds:
            answers += engine.ask(*asked, limit_s=PATIENCE_S)
            engine.forget()
        restored = engine.external_hits()
    assert_same(answers, wanted)
    # The questions of a round are about different texts, so none of this is the engine's own.
    assert restored == sum(it.cached for it in answers)
    assert all(it.cached for it in answers)
    assert restored >= ENOUGH * sum(whole(len(it.tokens)) for it in questions)

    # The control: of each text one chunk of 256 tokens is wrong, under a checksum that holds.
    assert corrupt(where / "kv", depth=1) == len(rounds[0])
    with with_kvtier(where, "wrong.log") as engine:
        assert compare(engine.ask(*rounds[0], limit_s=PATIENCE_S), wanted[: len(rounds[0])]).changed
        assert engine.external_hits()
