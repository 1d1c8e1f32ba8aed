"""A real language model gives the same answers to questions about texts with kvtier as without it.

All computes in float32, and each set of answers in a new process.
"""

import inspect
import os
import shutil
from asyncio import base_events
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.answers import ENOUGH, QUESTIONS, TEXTS, assert_same, compare, questions_by_text
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvtier.connect.transformers import attach
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.tools.demo.model import PRETRAINED, missing_packages

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_packages()), reason=f"{PRETRAINED} needs the packages {missing_packages()}"),
]

CHUNK = 256
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
LOGITS: dict[str, Any] = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
PATIENCE_S = 1500.0

Texts = Sequence[Sequence[list[int]]]
"""Prompts of the questions about each text."""


class Reply(NamedTuple):
    """An answer, and the tokens of its prompt that kvtier restored, by place."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    restored: dict[str, int]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """A directory that is removed at the end, since a store takes up to 2 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def in_new_process(function: Callable[..., Any], *given: Any) -> Any:
    # Beside other tests a second thread makes each step wait for the slower one.
    threads = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *given).result(PATIENCE_S)


def plain(directory: Path, texts: Texts) -> list[Reply]:
    """Answers of the library alone. It computes a text once; the first question about it reuses nothing."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    replies: list[Reply] = []
    for prompts in texts:
        cache = DynamicCache(config=model.config)
        for tokens in prompts:
            replies.append(reply(model.generate(torch.tensor([tokens]), past_key_values=cache, **LOGITS), tokens, {}))
            cache.crop(shared_tokens(prompts) - cache.get_seq_length())
    return replies


def with_kvtier(directory: Path, texts: Texts, store: Path, is_wrong: bool = False) -> list[Reply]:
    """Answers with kvtier. If `is_wrong`, all that it restores is 100 bytes away from its place."""
    if is_wrong:
        scatter = CacheCopier.scatter
        CacheCopier.scatter = lambda self, request, group, blocks, payload: scatter(  # type: ignore[method-assign]
            self, request, group, blocks, memoryview(np.roll(np.frombuffer(payload, np.uint8), 100))
        )
    replies: list[Reply] = []
    with attach(
        AutoModelForCausalLM.from_pretrained(directory), store, host__capacity_bytes="512MiB", store__chunk_tokens=CHUNK
    ) as kv:
        for tokens in (tokens for prompts in texts for tokens in prompts):
            output = kv.generate(torch.tensor([tokens]), **LOGITS)
            replies.append(reply(output, tokens, kv.last.restored_by_source))
    return replies


def shared_tokens(prompts: Sequence[list[int]]) -> int:
    return next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)


def reply(output: Any, tokens: list[int], restored: dict[str, int]) -> Reply:
    best = torch.stack(output.logits)[:, 0].log_softmax(-1).topk(5)
    rows = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return Reply(output.sequences[0, len(tokens) :].tolist(), rows, restored)


def restored(replies: list[Reply]) -> int:
    """Tokens."""
    return sum(sum(it.restored.values()) for it in replies)


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("numbers", [(0,), range(TEXTS)], ids=["five", "fifty"])
def test_questions_have_the_same_answers_from_memory_and_from_disk(
    numbers: Sequence[int], where: Path, pretrained: Path
) -> None:
    model, store = pretrained, where / "kv"
    texts = questions_by_text(AutoTokenizer.from_pretrained(model))
    texts = [texts[number] for number in numbers]
    wanted = in_new_process(plain, model, texts)
    shared = [shared_tokens(prompts) // CHUNK * CHUNK for prompts in texts]
    whole = [(len(tokens) - 1) // CHUNK * CHUNK for prompts in texts for tokens in prompts]

    cold = in_new_process(with_kvtier, model, texts, store)
    assert_same(cold, wanted)
    assert not any(it.restored for it in cold[::QUESTIONS])
    assert restored(cold) >= ENOUGH * sum(shared) * (QUESTIONS - 1)

    warm = in_new_process(with_kvtier, model, texts, store)
    assert_same(warm, wanted)
    assert all(set(it.restored) == {"directory"} for it in warm[::QUESTIONS])
    assert all(it.restored for it in warm)
    assert restored(warm) >= ENOUGH * sum(whole)

    first = [prompts[:1] for prompts in texts]
    wrong = in_new_process(with_kvtier, model, first, store, True)
    assert compare(wrong, wanted[::QUESTIONS]).changed, "the control: wrong KV is noticed"


def next_tokens(directory: Path, tokens: list[int], store: Path) -> tuple[dict[str, int], torch.Tensor]:
    """Return what the first of some prompts restored, and the log probabilities of the token after each of them.

    The prompts are the first two chunks of `tokens`, and up to 24 more tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    settings = {"host__capacity_bytes": "128MiB", "store__chunk_tokens": CHUNK, "store__loss": "int4"}
    rows: list[torch.Tensor] = []
    restored: list[dict[str, int]] = []
    with attach(model, store, **settings) as kv:
        for end in range(2 * CHUNK + 1, 2 * CHUNK + 25, 3):
            output = kv.generate(torch.tensor([tokens[:end]]), **(LOGITS | {"max_new_tokens": 1}))
            rows.append(output.logits[0][0].float().log_softmax(-1))
            restored.append(kv.last.restored_by_source)
    return restored[0], torch.stack(rows)


@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_class_restores_near_answers_in_another_process(where: Path, pretrained: Path) -> None:
    """The first process computes all, so that its numbers are exact."""
    tokens = AutoTokenizer.from_pretrained(pretrained)(inspect.getsource(base_events))["input_ids"][: 3 * CHUNK]
    nothing, exact = in_new_process(next_tokens, pretrained, tokens, where / "kv")
    assert nothing == {}
    stored = sum(path.stat().st_size for path in (where / "kv").rglob("*") if path.is_file())
    raw = 2 * CHUNK * 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, channels, bytes
    assert stored / raw < 0.31  # one chunk of two has exact tokens

    found, near = in_new_process(next_tokens, pretrained, tokens, where / "kv")
    assert found == {"directory": 2 * CHUNK}
    divergence = (exact.exp() * (exact - near)).sum(-1)
    assert 0 < divergence.mean() < 0.03
    # Twelve tokens later it is another text.
    assert (exact.exp() * (exact - near.roll(4, 0))).sum(-1).mean() > 1, "the control"


def test_an_answer_is_changed_unless_two_tokens_are_equally_likely() -> None:
    wanted = Reply([5, 6], [[(5, -0.1), (7, -0.1001)], [(6, -0.1), (8, -0.2)]], {})
    replies = [Reply(tokens, [], {}) for tokens in ([5, 6], [7, 6], [5, 8], [5, 9], [5])]
    assert compare(replies, [wanted] * len(replies)) == (1, [1], [2, 3, 4])
