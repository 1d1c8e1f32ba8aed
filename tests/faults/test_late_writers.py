"""A tier that still uses a buffer after its call has ended keeps the slot: no other object gets it meanwhile."""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from mover_world import WAIT_S, World, WrappedTier
from tests.memory_tier import MemoryTier
from tests.system import until

from kvtier.errors import TierError
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.executor import Completion, Threads
from kvtier.tier.base import About, Read, Tier, Write
from kvtier.types import Direction, ObjectName, Outcome

ONE_THREAD = Threads(read=1, write=1)
LATE_S = 0.3
"""A transfer that ends too early has ended by then."""


def _slice(tier: "Late", view: memoryview) -> None:
    tier.keep(view[:])


def _cast(tier: "Late", view: memoryview) -> None:
    tier.keep(view.cast("B"))


def _array(tier: "Late", view: memoryview) -> None:
    tier.keep(np.frombuffer(view, np.uint8)[1:].data)


def _system_call(tier: "Late", view: memoryview) -> None:
    """A thread is in `recv_into`, with the very view that the call got."""
    ours, theirs = socket.socketpair()

    def receive(view: memoryview) -> None:
        with ours:
            tier.spoiled += ours.recv_into(view, view.nbytes, socket.MSG_WAITALL)

    def send() -> None:
        with theirs:
            assert tier.let_go.wait(6 * WAIT_S)
            theirs.sendall(bytes(size))

    size = view.nbytes
    tier.start(receive, view)
    tier.start(send)


def _coroutine(tier: "Late", view: memoryview) -> None:
    """An event loop goes on with what the caller has given up."""

    async def write(part: memoryview) -> None:
        await asyncio.to_thread(tier.let_go.wait, 6 * WAIT_S)
        tier.spoil(part)

    tier.start(lambda part: asyncio.run(write(part)), view[:])


HOLDS: dict[str, Callable[["Late", memoryview], None]] = {
    "slice": _slice, "cast": _cast, "array": _array, "system call": _system_call, "coroutine": _coroutine,
}  # fmt: skip


class Late(WrappedTier):
    """Reads end as `answer` says, and something writes to their buffers when `let_go` is set."""

    def __init__(self, inner: Tier, hold: str, answer: str) -> None:
        super().__init__(inner)
        self.hold, self.answer = HOLDS[hold], answer
        self.let_go = threading.Event()
        self.ended = threading.Semaphore(0)
        self.spoiled = 0
        self._threads: list[threading.Thread] = []

    def start(self, act: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=act, args=given, daemon=True))
        self._threads[-1].start()

    def keep(self, part: memoryview) -> None:
        def write(part: memoryview) -> None:
            assert self.let_go.wait(6 * WAIT_S)
            self.spoil(part)

        self.start(write, part)

    def spoil(self, part: memoryview) -> None:
        part[:] = bytes(part.nbytes)
        self.spoiled += part.nbytes

    def finish(self) -> None:
        self.let_go.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        try:
            count = self.inner.read(name, into, offset)
            self.hold(self, into)
            if self.answer == "error":
                raise TierError(self.name, "no answer in time")
            return count
        finally:
            self.ended.release()


class LateBatches(Late):
    takes_batches = True

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        answers: list[int | TierError | None] = []
        for each in reads:
            try:
                answers.append(self.read_one(*each))
            except TierError as error:
                answers.append(error)  # its traceback refers to the buffer
        return answers

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        return [self.write_one(*each) for each in writes]


def _there(*names: str) -> dict[str, MemoryTier]:
    return {name: MemoryTier(name, capacity_bytes=1 << 24) for name in names}


def _early(world: World, tier: Late, count: int) -> list[Completion]:
    """The answers that come before the tier has let go; the test goes on as the core would."""
    for _ in range(count):
        assert tier.ended.acquire(timeout=WAIT_S)
    time.sleep(LATE_S)
    return world.mover.take()


@pytest.mark.parametrize("answer", ["error", "count"])
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("kind", [Late, LateBatches])
def test_a_slot_has_no_other_object_before_the_tier_has_let_go(kind: type[Late], hold: str, answer: str) -> None:
    memory = _there("memory", "good")
    tier = kind(memory["memory"], hold, answer)
    with World({"memory": tier, "good": memory["good"]}, threads=ONE_THREAD) as world:
        world.stored(1, 3)
        world.stored(2, tier="good")
        is_batch = kind is not Late
        commands = [world.transfer(Direction.PROMOTE, 1, 5), world.transfer(Direction.PROMOTE, 3, 6)][: 1 + is_batch]
        world.mover.submit(*commands)
        early = _early(world, tier, len(commands))
        world.done(world.transfer(Direction.PROMOTE, 2, 3, tier="good"))  # other tiers go on
        if not early:
            tier.finish()
            early = world.take(len(commands))
        for slot in (5, 6):
            world.done(world.transfer(Direction.PROMOTE, 2, slot, tier="good"))
        tier.finish()
        assert tier.spoiled
        assert world.is_in_slot(2, 5), "a late write has spoiled the next object"
        assert world.is_in_slot(2, 6), "a late write has spoiled the next object"
        # What was written late is found when the bytes are verified.
        assert {it.outcome for it in early} == {Outcome.FAILED if answer == "error" else Outcome.CORRUPT}


def test_a_tier_that_opens_later_keeps_its_batches() -> None:
    memory, sizes, go_on = MemoryTier(capacity_bytes=1 << 24), list[int](), threading.Event()

    class Batches(WrappedTier):
        takes_batches = True

        def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
            sizes.append(len(reads))
            time.sleep(0.05)  # the next reads come together
            return [memory.read(*each) for each in reads]

        def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
            return [memory.write(*each) for each in writes]

    def make() -> Tier:
        assert go_on.wait(WAIT_S)
        return Batches(memory)

    deferred = DeferredTier("memory", make, 0.01)
    with World({"memory": deferred}, threads=ONE_THREAD) as world:
        (early,) = world.run(world.transfer(Direction.PROMOTE, 1, 5))
        assert early.outcome is Outcome.FAILED, "not open"
        go_on.set()
        deferred._thread.join(WAIT_S)
        world.stored(0, 1, 2, 3, 4)
        for number, completion in enumerate(
            world.run(*(world.transfer(Direction.PROMOTE, n, n + 1) for n in range(5)))
        ):
            assert completion.outcome is Outcome.DONE
            assert world.is_in_slot(number, number + 1)
    assert max(sizes) > 1


def test_right_bytes_that_come_late_are_accepted() -> None:
    """Verification follows the last write."""

    class Slow(Late):
        def spoil(self, part: memoryview) -> None:
            part[:] = self.frame

        def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
            count = super().read_one(name, into, offset)
            self.frame = bytes(into)
            into[:] = bytes(into.nbytes)
            return count

    tier = Slow(MemoryTier(capacity_bytes=1 << 24), "slice", "count")
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        world.stored(1)
        world.mover.submit(world.transfer(Direction.PROMOTE, 1, 5))
        _early(world, tier, 1)
        tier.finish()
        assert world.take(1)[0].outcome is Outcome.DONE
        assert world.is_in_slot(1, 5)


def test_a_view_that_nothing_uses_is_taken_back() -> None:
    """A thread that has not begun yet finds it unusable, and the transfer does not wait for it."""
    errors: list[Exception] = []

    class Forgets(Late):
        def spoil(self, part: memoryview) -> None:
            try:
                super().spoil(part)
            except ValueError as error:
                errors.append(error)

    tier = Forgets(MemoryTier(capacity_bytes=1 << 24), "slice", "error")
    tier.hold = Forgets.keep  # type: ignore[assignment]
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        world.stored(1)
        (failed,) = world.run(world.transfer(Direction.PROMOTE, 1, 5))
        world.done(world.transfer(Direction.GATHER, 2, 5))
        tier.finish()
        assert failed.outcome is Outcome.FAILED
        assert world.is_in_slot(2, 5)
        assert len(errors) == 1


@pytest.mark.parametrize("way", ["kept", "chained", "cycle", "group"])
def test_an_error_that_refers_to_the_buffer_does_not_keep_the_slot(way: str) -> None:
    def fail(part: memoryview) -> None:
        os.fstat(-len(part))

    class Raises(WrappedTier):
        def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
            try:
                fail(into[:])
            except OSError as error:
                cycle: list[object] = [error]
                if way == "cycle":
                    cycle.append(cycle)
                    raise TierError(self.name, "failed") from None
                self.errors = [error]
                self.error = TierError(self.name, "failed")
                if way != "group":
                    raise self.error from (error if way == "chained" else None)
            raise ExceptionGroup("several", self.errors)

    tier = Raises(MemoryTier(capacity_bytes=1 << 24))
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        assert [it.outcome for it in world.run(world.transfer(Direction.PROMOTE, 1, 5))] == [Outcome.FAILED]


@pytest.mark.parametrize("kind", ["plain", "batch"])
def test_what_a_tier_sends_late_is_the_object(kind: str) -> None:
    """A write that has ended still reads the slot: the object has its own bytes, not those of the next one."""

    class Sends(Late):
        def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
            def send(part: memoryview) -> None:
                assert self.let_go.wait(6 * WAIT_S)
                self.inner.write(name, part, about)

            self.start(send, frame[:])
            self.ended.release()
            return True

    class SendsBatches(Sends, LateBatches):
        pass

    tier = (Sends if kind == "plain" else SendsBatches)(MemoryTier(capacity_bytes=1 << 24), "slice", "count")
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        world.done(world.transfer(Direction.GATHER, 1, 1), world.transfer(Direction.GATHER, 2, 2))
        world.mover.submit(world.transfer(Direction.DEMOTE, 1, 1), world.transfer(Direction.DEMOTE, 2, 2))
        early = _early(world, tier, 1)
        if early:
            world.spoil(1)
        tier.finish()
        assert {it.outcome for it in early or world.take(2)} == {Outcome.DONE}
        tier.hold = lambda *_: None  # type: ignore[assignment]
        world.done(world.transfer(Direction.PROMOTE, 1, 5))
        assert world.is_in_slot(1, 5)


def test_a_tier_that_never_lets_go_is_logged_once_and_does_not_hold_up_closing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = Late(MemoryTier(capacity_bytes=1 << 24), "slice", "error")
    world = World({"memory": tier}, threads=ONE_THREAD)
    world.stored(1)
    world.mover.submit(world.transfer(Direction.PROMOTE, 1, 5))
    until(lambda: "uses its buffer" in caplog.text, "nothing is logged")
    began_s = time.monotonic()
    assert not world.mover.close(0.05)
    assert time.monotonic() - began_s < WAIT_S
    world.arena.close()
    tier.finish()
    assert world.mover.close(WAIT_S)
    assert world.take(1)[0].outcome is Outcome.FAILED
    assert [it.levelno for it in caplog.records if "uses its buffer" in it.getMessage()] == [logging.WARNING]
