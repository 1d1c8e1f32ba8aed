"""Parts cross as they should whatever order the device's queues run in; what does not wait is found out."""

import itertools
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.thread_streams import ThreadStreams

from kvtier.device import staged_copy as module
from kvtier.device.copy_descriptors import table
from kvtier.device.staged_copy import PayloadPart, StagedCopy
from kvtier.device.streams import Event

PIECE = 96
PARTS = 12
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that two parts fill one."""
    monkeypatch.setattr(module, "STAGE_BYTES", 2 * 8 * PIECE + 256)


@pytest.fixture
def streams() -> Iterator[ThreadStreams]:
    made = ThreadStreams()
    yield made
    made.close()


class Engine:
    """Memory in which the runs of each part are scattered."""

    def __init__(self, seed: int = 1, parts: int = PARTS, piece: int = PIECE) -> None:
        rng = np.random.default_rng(seed)
        self.piece = piece
        self.memory = rng.integers(1, 255, parts * 8 * piece * 2, np.uint8)
        self.places = rng.permutation(parts * 8).reshape(parts, 8) * 2 * piece
        self.slots = [bytearray(rng.integers(1, 255, 8 * piece, np.uint8).tobytes()) for _ in range(parts)]

    def parts(self) -> list[PayloadPart]:
        address = int(self.memory.ctypes.data)
        return [
            PayloadPart(memoryview(slot), table(np.arange(8) * self.piece, address + places, self.piece))
            for slot, places in zip(self.slots, self.places, strict=True)
        ]

    def holds(self, part: int) -> bytes:
        return b"".join(self.memory[place : place + self.piece].tobytes() for place in self.places[part])


def finish(event: Event) -> None:
    until = time.monotonic() + WAIT_S
    while not event.query():
        assert time.monotonic() < until, "a copy never ends"
        time.sleep(1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_what_crosses_arrives_and_comes_back_at_any_pace(seed: int) -> None:
    rng = random.Random(seed)
    streams = ThreadStreams(lambda: rng.choice([0.0, 0.0, 0.0, 3e-4]))
    staged, engine = StagedCopy(streams), Engine(seed)
    finish(staged.scatter(engine.parts()))
    assert [engine.holds(part) for part in range(PARTS)] == [bytes(slot) for slot in engine.slots]
    stored = [bytes(slot) for slot in engine.slots]
    gathered = Engine(seed + 9)
    gathered.memory[:] = engine.memory
    gathered.places = engine.places
    finish(staged.gather(gathered.parts()))
    assert [bytes(slot) for slot in gathered.slots] == stored
    streams.close()


def test_both_ways_at_once(streams: ThreadStreams) -> None:
    staged, loaded, stored = StagedCopy(streams), Engine(1), Engine(2)
    events = [
        event
        for there, back in zip(loaded.parts(), stored.parts(), strict=True)
        for event in (staged.scatter([there]), staged.gather([back]))
    ]
    for event in events:
        finish(event)
    for part in range(PARTS):
        assert loaded.holds(part) == bytes(loaded.slots[part])
        assert stored.holds(part) == bytes(stored.slots[part])


@pytest.mark.parametrize("number", range(4))
def test_a_stage_is_not_used_again_before_it_is_free(number: int) -> None:
    """Any queue may stand still for as long as it likes."""
    streams = ThreadStreams()
    staged, engine, back = StagedCopy(streams), Engine(5), Engine(6)
    streams.streams[number].may_run.clear()
    events = [staged.scatter([part]) for part in engine.parts()] + [staged.gather([part]) for part in back.parts()]
    time.sleep(0.02)
    assert not all(event.query() for event in events)
    streams.streams[number].may_run.set()
    for event in events:
        finish(event)
    assert all(engine.holds(part) == bytes(engine.slots[part]) for part in range(PARTS))
    assert all(back.holds(part) == bytes(back.slots[part]) for part in range(PARTS))
    streams.close()


@pytest.mark.parametrize(("way", "held"), [("in", 1), ("out", 2)])
def test_without_the_events_of_the_ring_bytes_are_lost(way: str, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same race without the guard."""

    class Careless(module._Stage):
        @property
        def free(self) -> None:
            return None

        @free.setter
        def free(self, event: Event) -> None:
            pass

    monkeypatch.setattr(module, "_Stage", Careless)
    streams = ThreadStreams()
    staged, engine = StagedCopy(streams), Engine(5)
    streams.streams[held].may_run.clear()
    begin = staged.scatter if way == "in" else staged.gather
    events = [begin([part]) for part in engine.parts()]
    until = time.monotonic() + WAIT_S
    while streams.streams[held ^ 1].moved_bytes < PARTS * 8 * PIECE:  # the other queue runs ahead
        assert time.monotonic() < until
        time.sleep(1e-3)
    streams.streams[held].may_run.set()
    for event in events:
        finish(event)
    assert any(engine.holds(part) != bytes(engine.slots[part]) for part in range(PARTS))
    streams.close()


def test_nothing_is_touched_before_the_engine_is_ready(streams: ThreadStreams) -> None:
    staged, engine = StagedCopy(streams), Engine(7, parts=3)
    old, slots = engine.memory.copy(), [bytes(slot) for slot in engine.slots]
    streams.engine.may_run.clear()
    scattered = staged.scatter(engine.parts(), streams.now())
    gathered = staged.gather(Engine(8, parts=3).parts(), streams.now())
    time.sleep(0.02)
    assert not scattered.query()
    assert not gathered.query()
    assert (engine.memory == old).all()
    streams.engine.may_run.set()
    finish(scattered)
    assert [engine.holds(part) for part in range(3)] == slots


def test_a_slot_is_free_once_the_event_has_come(streams: ThreadStreams) -> None:
    """The memory may be reused at once."""
    staged, engine = StagedCopy(streams), Engine(9)
    slots = [bytes(slot) for slot in engine.slots]
    events = [staged.scatter([part]) for part in engine.parts()]
    for slot, event in zip(engine.slots, events, strict=True):
        finish(event)
        slot[:] = bytes([0xDB]) * len(slot)
    assert [engine.holds(part) for part in range(PARTS)] == slots


def test_an_incomplete_part_is_not_gathered(streams: ThreadStreams) -> None:
    staged, engine = StagedCopy(streams), Engine(10)
    whole = engine.parts()[0]
    slot = bytes(engine.slots[0])
    for descriptors in (
        whole.descriptors[:-1],
        whole.descriptors[1:],
        np.concatenate([whole.descriptors, whole.descriptors[:1]]),
    ):
        with pytest.raises(ValueError, match="do not cover its 768 bytes"):
            staged.gather([PayloadPart(whole.payload, descriptors)])
    assert bytes(engine.slots[0]) == slot
    finish(staged.scatter([PayloadPart(whole.payload, whole.descriptors[::2])]))
    pairs = list(itertools.batched(engine.holds(0), PIECE)) if hasattr(itertools, "batched") else []
    assert all((bytes(pair) == slot[n * PIECE : (n + 1) * PIECE]) is (n % 2 == 0) for n, pair in enumerate(pairs))
    finish(staged.scatter([]))


def test_queued_copies_have_ended_when_an_error_is_raised(
    streams: ThreadStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, engine = StagedCopy(streams), Engine(11)
    kernel = staged._in.kernel
    calls = itertools.count()

    def failing(descriptors: np.ndarray) -> None:
        if next(calls) == 1:
            raise RuntimeError("planned")
        type(kernel).copy(kernel, descriptors)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "copy", failing)
    with pytest.raises(RuntimeError, match="planned"):
        staged.scatter(engine.parts())
    assert all(stream._jobs.empty() for stream in streams.streams)
    monkeypatch.undo()
    monkeypatch.setattr(module, "STAGE_BYTES", 2 * 8 * PIECE + 256)
    finish(staged.scatter(engine.parts()))
    assert all(engine.holds(part) == bytes(engine.slots[part]) for part in range(PARTS))
