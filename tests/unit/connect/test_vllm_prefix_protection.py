"""Waiting requests keep their cached prefixes: blocks that no waiting request needs are handed out first."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import opened_by
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Pool, Request

from kvtier.config.sections import VllmConfig
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.scheduler import prefix_protection as module
from kvtier.connect.vllm.scheduler.block_pool import BlockContent, BlockPins
from kvtier.connect.vllm.scheduler.prefix_protection import PrefixProtection

TOP = Path(__file__).parents[3]
ARMS = ("protected", "kvtier")
"""The arms of the record with the setting and without it."""

TOKENS, BLOCK, USERS, ROOM = 640, 32, 8, 5
"""Of each prompt, of a block; how many there are, and for how many there is room."""


@pytest.fixture
def start() -> Iterator[Callable[..., SmallEngine]]:
    yield from opened_by(partial(SmallEngine, blocks=1 + ROOM * (TOKENS // BLOCK + 1)))


def prompts(engine: SmallEngine, count: int = USERS) -> list[list[int]]:
    return [[engine.draw.randrange(1000) for _ in range(TOKENS)] for _ in range(count)]


def found(engine: SmallEngine, asked: list[list[int]]) -> list[int]:
    """Tokens that each of `asked`, which wait all at once, finds in vLLM's own cache."""
    before: dict[str, int] = {}
    matched = engine.scheduler.matched

    def look(request, resident_tokens):
        before[request.request_id] = resident_tokens
        return matched(request, resident_tokens)

    engine.scheduler.matched = look
    requests = [engine.add(prompt, 1) for prompt in asked]
    engine.run()
    engine.scheduler.matched = matched
    return [before[request.request_id] for request in requests]


def in_turn(engine: SmallEngine) -> list[int]:
    """Cached tokens of users that return all at once, in the order of their first prompts."""
    asked = prompts(engine)
    for prompt in asked:
        engine.ask(prompt, 1)
        engine.settle()
        engine.idle()
    return found(engine, asked)


def test_blocks_that_no_request_waits_for_go_first(start):
    engine = start()
    first, *others, new = prompts(engine, ROOM + 1)
    for prompt in (first, *others):
        engine.ask(prompt, 1)
    # The oldest blocks belong to the first request, which waits again behind a new one.
    assert found(engine, [new, first])[1] >= TOKENS - BLOCK


def test_the_control_the_oldest_go_first(start):
    test = test_blocks_that_no_request_waits_for_go_first
    with pytest.raises(AssertionError):
        test(lambda: start(is_protected=False))


def test_what_two_share_goes_last(start):
    engine = start()
    common, *others = prompts(engine, ROOM)
    for prompt in (common, *others):
        engine.ask(prompt, 1)
    tails = [[engine.draw.randrange(1000) for _ in range(BLOCK)] for _ in range(2)]
    asked = [prompts(engine, 1)[0], [*common, *tails[0]], *others, [*common, *tails[1]]]
    tokens = found(engine, asked)
    assert tokens[1] == TOKENS  # although the last request in the queue needs it, too


def test_a_queue_that_has_emptied_leaves_nothing_behind(start):
    engine = start()
    in_turn(engine)
    gone = [engine.add(prompt, 40) for prompt in prompts(engine)]
    for _ in range(3):
        engine.step()
    for request in gone:
        engine.abort(request)
    engine.run()
    line = engine.scheduler._protection
    assert not line._waiting
    assert not line._needed
    assert not line._need_counts


class Watched(BlockPins):
    """Counts the blocks that are examined."""

    looks = 0

    def free(self) -> Iterator[BlockContent]:
        for content in super().free():
            self.looks += 1
            yield content

    def is_free(self, content: BlockContent) -> bool:
        self.looks += 1
        return super().is_free(content)


class Blocks:
    """The part of a geometry that prefix protection uses."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK)


def long_line(count: int, blocks: int) -> tuple[PrefixProtection, Watched, list[TrackedRequest]]:
    """`count` waiting requests that need `blocks` blocks each. All blocks are free."""
    pool = Pool(1 + count * blocks, has_caching=True)
    for block in pool.get_new_blocks(count * blocks):
        pool.cache(block, (block.block_id,))
        pool.free_blocks([block])
    pins = Watched(pool, lambda _block: None)  # type: ignore[arg-type]
    mine = {f"r{it}": list(range(1 + it * blocks, 1 + (it + 1) * blocks)) for it in range(count)}
    line = PrefixProtection(Blocks(), pins, lambda request: [mine[request.request_id]])  # type: ignore[arg-type]
    tracked = [TrackedRequest(Request(name, [0] * blocks * BLOCK, blocks * BLOCK, 0), 0, None) for name in mine]
    for each in tracked:
        line.joined(each)
    return line, pins, tracked


def most_looks(count: int = 200, blocks: int = 10) -> tuple[int, int]:
    """Most blocks examined in a step in which half of the queue is allocated, and most blocks remembered."""
    line, pins, tracked = long_line(count, blocks)
    most = held = 0
    for _ in range(20):
        pins.looks = 0
        for each in tracked[: count // 2]:
            line.make_room(each, blocks * BLOCK)
        line.step_ends()
        most = max(most, pins.looks)
        held = max(held, sum(map(len, line._needed.values())))
    assert len(list(pins.free())) == count * blocks
    return most, held


def test_a_step_examines_a_limited_number_of_blocks_however_long_the_queue_is(monkeypatch):
    unlimited, all_held = most_looks()
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 500)
    monkeypatch.setattr(module, "LOOKED_UP_MAX", 100)
    monkeypatch.setattr(module, "NEEDED_MAX", 600)
    most, held = most_looks()
    # An iterator that is cut off has read one more.
    assert most <= 500 + 200 < 2000 < unlimited
    assert held == 600 < all_held


def test_lookups_follow_the_queue_a_few_in_each_step(monkeypatch):
    monkeypatch.setattr(module, "LOOKED_UP_MAX", 20)
    line, _, tracked = long_line(10, 10)
    for step in range(1, 4):
        line.make_room(tracked[0], 3 * BLOCK)
        line.make_room(tracked[1], 3 * BLOCK)
        assert list(line._needed) == [each.id for each in tracked[: 2 * step]]
        line.step_ends()


def test_the_last_requests_blocks_are_handed_out_first():
    line, pins, tracked = long_line(10, 10)
    line.make_room(tracked[0], 3 * BLOCK)
    assert [it.block for it in pins.free()][:4] == [100, 99, 98, 1]


def test_the_default_is_what_the_record_pays_for():
    """vLLM's free list is reordered only while the committed record shows a gain in every run."""
    record = json.loads((TOP / "bench/records/vllm.json").read_text(encoding="utf-8"))
    runs = {name: [it for it in record["samples"] if it["part"] == "talk" and it["arm"] == name] for name in ARMS}
    with_it, without = ([runs[name][at]["s"] for at in range(5)] for name in ARMS)
    gains = all(ours < theirs for ours, theirs in zip(with_it, without, strict=True))
    results = record["results"]["talk"]
    saved = [results[name]["cached_tokens"] for name in ARMS]
    assert VllmConfig().prefix_protection == (gains and saved[0] > saved[1])
    text = (TOP / "docs/internals/vllm-inside.md").read_text(encoding="utf-8")
    rates = [f"{results[name]['requests_per_s']:.2f}" for name in ARMS]
    assert f"{rates[0]} instead of {rates[1]} requests/s, {saved[0]:,} instead of {saved[1]:,} tokens" in text
