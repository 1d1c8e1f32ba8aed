"""Workloads of `kvtier bench serve`: what is equal text, and what is not."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.tools.bench.serve.workload import (
    PRESETS,
    TEMPLATE_TOKENS,
    ConversationSizes,
    Pace,
    SingleShotSizes,
    draw,
    recorded,
    text_of,
)
from kvtier.tools.trace.arrays import TraceArrays, read_arrays
from kvtier.tools.trace.formats.base import open_trace

SIZES = ConversationSizes(
    users=3, rounds=4, system_tokens=30, history_tokens=100, question_tokens=8, answer_tokens=6, requests_per_s=2.0
)
BLOCK = 512
MINISWE = Path(__file__).parents[2] / "golden" / "traces" / "lmcache_miniswe_b64.jsonl.gz"


def texts(workload) -> list[str]:
    return [text_of(turn.question) for it in workload.conversations for turn in it.turns]


def a_trace(tmp_path, rows: list[tuple[float, int, int, list[int]]]) -> TraceArrays:
    """Rows of milliseconds, prompt tokens, answer tokens and block ids, as Mooncake writes them."""
    path = tmp_path / "trace.jsonl.gz"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_bytes(
        gzip.compress("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows).encode())
    )
    return read_arrays(open_trace(path))


@pytest.mark.parametrize("name", PRESETS)
def test_a_seed_gives_the_same_texts_and_another_one_other_texts(name):
    first, again, other, later = (
        draw(PRESETS[name].here, seed=seed, number=number) for seed, number in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert text_of(first.system) == text_of(again.system)
    assert texts(first) == texts(again)
    for different in (other, later):  # no text is in both, or the first run would warm the second
        assert not set(texts(first)) & set(texts(different))
        assert not len(first.system) or text_of(first.system) != text_of(different.system)


def test_conversations_have_the_sizes_that_are_asked_for():
    workload = draw(SIZES, seed=1, number=0, seconds=20.0, warm_up=2)
    counted = [it for it in workload.conversations if not it.is_warm_up]
    assert [it.is_warm_up for it in workload.conversations[:3]] == [True, True, False]
    assert len(workload.system) == 30
    assert [len(turn.question) for turn in counted[0].turns] == [108, 8, 8, 8]
    assert {turn.answer_tokens for it in counted for turn in it.turns} == {6}
    assert workload.context_tokens == 30 + 100 + 4 * 14
    # As many as can begin: a conversation takes 4 of 40 requests, and 3 are there at the start.
    assert len(counted) >= 3 + 40 / 4
    assert len({it.user for it in workload.conversations}) == len(workload.conversations)
    assert len({tuple(it.turns[0].question[:4]) for it in workload.conversations}) == len(workload.conversations)


def test_sub_agents_fork_from_the_first_question_and_nine_tenths_of_the_prompts_can_be_reused():
    sizes = PRESETS["agent"].here
    workload = draw(sizes, seed=1, number=0, seconds=60.0, warm_up=2)
    counted = [it for it in workload.conversations if not it.is_warm_up]
    assert {len(it.turns) for it in counted[: sizes.users]} == {sizes.rounds}
    assert [len(it.turns) for it in counted[sizes.users :]][:4] == [sizes.sub_rounds, sizes.rounds] * 2
    opening = sizes.history_tokens + sizes.question_tokens
    forks = range(sizes.users, len(counted), 2)
    for parent, forked in ((counted[place - 1], counted[place]) for place in forks):
        first = forked.turns[0].question
        assert first[:opening].tolist() == parent.turns[0].question.tolist()
        assert len(first) == opening + sizes.question_tokens
    asked = fresh = 0
    for place, talk in enumerate(counted):
        prompt = len(workload.system)
        known = prompt + (opening if place in forks else 0)
        for turn in talk.turns:
            prompt += len(turn.question)
            asked, fresh, known = asked + prompt, fresh + prompt - known, prompt
            prompt += turn.answer_tokens
    assert 0.9 < 1 - fresh / asked < 0.97
    assert len(counted) >= sizes.users + 60 * sizes.requests_per_s / sizes.rounds


def test_real_lengths_vary_around_the_mean():
    sizes = replace(SIZES, rounds=20, question_tokens=50, answer_tokens=40)
    workload = draw(sizes, seed=1, number=0, seconds=200.0, has_real_lengths=True)
    answers = [turn.answer_tokens for it in workload.conversations for turn in it.turns]
    assert np.mean(answers) == pytest.approx(40, rel=0.1)
    assert min(answers) >= 1
    assert max(answers) <= 4 * 40
    assert len(set(answers)) > 10


def test_a_single_shot_comes_again_after_other_prompts():
    workload = draw(SingleShotSizes(prompt_tokens=(10, 20), between_tokens=45), seed=1, number=0, warm_up=1)
    assert workload.pace is Pace.ONE_BY_ONE
    drawn = [(len(it.turns[0].question), it.first_turn, it.is_warm_up) for it in workload.conversations]
    assert drawn == [
        (20, 0, True),
        (10, 0, False), (20, 0, False),
        (20, 0, True), (20, 0, True), (20, 0, True),
        (10, 1, False), (20, 1, False),
    ]  # fmt: skip
    counted = [it for it in workload.conversations if not it.is_warm_up]
    assert texts(workload)[1:3] == texts(workload)[6:]
    assert [it.user for it in counted] == [0, 1, 0, 1]
    assert len(set(texts(workload))) == 6


ROWS = [
    (0, 1500, 80, [0, 1, 2]),
    (3000, 1700, 8, [0, 1, 3, 4]),
    (3000, 600, 40, [5, 6]),
    (9000, 1500, 16, [0, 1, 2]),
]


def prompts(workload) -> list[list[int]]:
    return [it.turns[0].question.tolist() for it in workload.conversations if not it.is_warm_up]


def test_equal_blocks_of_a_trace_are_equal_text_and_others_differ(tmp_path):
    trace = a_trace(tmp_path, ROWS)
    workload = recorded(trace, seed=1, number=0, seconds=60.0)
    found = prompts(workload)
    assert [len(it) for it in found] == [1500, 1700, 600, 1500]
    blocks: dict[int, set[tuple[int, ...]]] = {}
    for (_, _, _, ids), prompt in zip(ROWS, found, strict=True):
        for place, block in enumerate(ids):
            blocks.setdefault(block, set()).add(tuple(prompt[place * BLOCK : (place + 1) * BLOCK]))
    assert all(len(it) == 1 for it in blocks.values())
    openings = [next(iter(it))[:2] for it in blocks.values()]
    assert len(set(openings)) == 7  # two words of a block are enough to tell it from all others
    assert found[0] == found[3]
    assert prompts(recorded(trace, seed=1, number=1, seconds=60.0))[0][:BLOCK] != found[0][:BLOCK]


def test_every_block_of_a_real_trace_has_a_text_of_its_own():
    """Blocks of the least length, where words drawn at random would often be equal."""
    trace = read_arrays(open_trace(MINISWE))
    two = 2 / trace.block_tokens
    workload = recorded(trace, seed=1, number=0, seconds=200.0, length_factor=two, warm_up=0)
    texts_of: dict[int, tuple[int, int]] = {}
    for request, prompt in enumerate(prompts(workload)):
        ids = trace.blocks(request)[: len(prompt) // 2].tolist()
        for place, block in enumerate(ids):
            text = (prompt[2 * place], prompt[2 * place + 1])
            assert texts_of.setdefault(block, text) == text
    assert len(texts_of) > 1000
    assert len(set(texts_of.values())) == len(texts_of)


def test_a_trace_is_scaled_in_time_and_length_and_cut(tmp_path):
    trace = a_trace(tmp_path, ROWS)
    workload = recorded(trace, seed=1, number=0, seconds=2.0, time_factor=0.5, length_factor=0.25)
    counted = [it for it in workload.conversations if not it.is_warm_up]
    assert [it.turns[0].at_s for it in counted] == [0.0, 1.5, 1.5]
    assert [len(it) for it in prompts(workload)] == [375, 425, 150]
    assert [it.turns[0].answer_tokens for it in counted] == [20, 2, 10]
    first, second, _ = prompts(workload)
    assert first[:256] == second[:256]
    assert first[256:260] != second[256:260]


def test_a_trace_longer_than_the_context_says_how_to_cut_it(tmp_path):
    trace = a_trace(tmp_path, ROWS)
    cut = {"seed": 1, "number": 0, "seconds": 60.0, "context_tokens": 1000}
    with pytest.raises(
        ConfigError,
        match=r"request 1: .*936 tokens are usable; the longest in the trace has 1708 tokens.*at most 0\.5449,",
    ):
        recorded(trace, **cut)
    assert recorded(trace, **cut, length_factor=0.5449).context_tokens <= 1000 - TEMPLATE_TOKENS
    left = recorded(trace, **cut, is_longer_skipped=True)
    assert [len(it) for it in prompts(left)] == [600]
    with pytest.raises(ConfigError, match="are too long"):
        recorded(trace, **(cut | {"context_tokens": 500}), is_longer_skipped=True)


def test_blocks_too_short_to_differ_are_refused(tmp_path):
    rows = [(0, 3000 * BLOCK, 1, list(range(3000)))]
    with pytest.raises(ConfigError, match="a factor that leaves at least 2 tokens"):
        recorded(a_trace(tmp_path, rows), seed=1, number=0, seconds=60.0, length_factor=1 / BLOCK)


def test_a_workload_longer_than_the_context_is_refused():
    workload = draw(SIZES, seed=1, number=0)
    workload.check_context(186 + TEMPLATE_TOKENS, "the model")
    with pytest.raises(ConfigError, match=r"186 tokens, but the model holds 249.* by at most 0\.994"):
        workload.check_context(185 + TEMPLATE_TOKENS, "the model")


@pytest.mark.parametrize(
    ("name", "value"),
    [("users", 0), ("rounds", 1), ("answer_tokens", 0), ("system_tokens", -1), ("requests_per_s", 0.0)],
)
def test_bad_sizes_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        replace(SIZES, **{name: value})
