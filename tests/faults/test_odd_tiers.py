"""A tier of another package that answers nonsense or raises anything costs misses: no session, no wrong bytes."""

import logging

import pytest
from tests.memory_tier import MemoryTier
from tests.rig import CHUNK_TOKENS, Engine, load_places, local, looked_up, places_of, prefix_of, stored

from kvtier.core.limits import Limits
from kvtier.observe.metrics import Metrics
from kvtier.runtime.mover import Threads
from kvtier.runtime.observers.transfer_metrics import Gauges
from kvtier.types import LoadDone, Presence, RequestId

TOKENS = 3 * CHUNK_TOKENS


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Undecided:
    def __bool__(self):
        raise RuntimeError("neither true nor false")


class Panic(BaseException):
    """As of a client in Rust."""


class Odd(MemoryTier):
    """Answers `answer` from the method `name`, or raises it."""

    def __init__(self, name, answer):
        super().__init__("below", capacity_bytes=64 << 20)
        self.name_of_method, self.answer, self.calls = name, answer, 0

    def _odd(self, name, normal):
        if name != self.name_of_method:
            return normal()
        self.calls += 1
        if isinstance(self.answer, type) and issubclass(self.answer, BaseException):
            raise self.answer
        return self.answer(normal()) if callable(self.answer) else self.answer

    def contains(self, names):
        return self._odd("contains", lambda: MemoryTier.contains(self, names))

    def read_one(self, name, into, offset):
        return self._odd("read", lambda: MemoryTier.read_one(self, name, into, offset))

    def write_one(self, name, frame, about):
        return self._odd("write", lambda: MemoryTier.write_one(self, name, frame, about))

    def read_many(self, reads):
        return self._odd("read_many", lambda: MemoryTier.read_many(self, reads))

    def write_many(self, writes):
        return self._odd("write_many", lambda: MemoryTier.write_many(self, writes))

    def figures(self):
        return self._odd("figures", lambda: MemoryTier.figures(self))


ANSWERS = [
    None, -1, 1 << 100, 3.5, float("nan"), "text", b"", [], (), object(), Undecided(),
    lambda normal: [Undecided()] * 100 if not isinstance(normal, list) else [Undecided()] * len(normal),
    lambda normal: [None] * len(normal) if isinstance(normal, list) else [normal],
    lambda normal: [*normal, True] if isinstance(normal, list) else normal + 1 if isinstance(normal, int) else {},
    lambda normal: iter(normal) if isinstance(normal, list) else str(normal),
    lambda normal: normal - 1 if isinstance(normal, int) else normal[:-1] if isinstance(normal, list) else [1],
    UnprintableError, StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt, Panic, RecursionError, MemoryError,
]  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("name", ["contains", "read", "read_many", "write", "write_many", "figures"])
def test_nonsense_of_a_tier_costs_misses_only(name, answer, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    tier, prefix = Odd("", None), prefix_of(3)
    writer = local(Engine(12).copier(), {"below": tier})[0]
    places = places_of(range(3))
    if name.startswith("write"):
        tier.name_of_method, tier.answer = name, answer
    stored(writer, "s", prefix, places)
    monkeypatch.setattr(tier, "close", lambda: None)
    writer.close(5.0)
    assert not writer._is_broken
    tier.name_of_method, tier.answer = name, answer

    target, source = Engine(12, seed=1), Engine(12)
    session, cache, mover = local(
        target.copier(), {"below": tier}, limits=Limits(load_deadline_s=5.0), threads=Threads(read=1, write=1, probe=1),
        rules={"probe_deadline_s": 2.0, "transfer_deadline_s": 2.0},
    )  # fmt: skip
    gauges = Gauges(Metrics(), cache, [cache._layout], [mover.views])
    for number in range(3):
        request = RequestId(f"r{number}")
        lookup = looked_up(session, request, prefix)
        if lookup.presence is not Presence.ABSENT and lookup.tokens == TOKENS:
            session.load(request, prefix, TOKENS, load_places(TOKENS))
            done = next(event for _ in range(200) for event in session.poll(0.05) if isinstance(event, LoadDone))
            assert done.tokens in (0, CHUNK_TOKENS, 2 * CHUNK_TOKENS, TOKENS)
            if done.tokens == TOKENS:
                assert target.same(source, load_places(TOKENS))
        session.release(request)
        gauges.each_second()
    assert not session._is_broken
    assert tier.calls or name.startswith("read")
    session.close(5.0)
    assert not session._is_broken
