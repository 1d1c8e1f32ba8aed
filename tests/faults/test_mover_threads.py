"""If the system cannot start a thread, the mover does not start. Commands beyond a queue's bound fail."""

import threading

import pytest
from mover_world import HangingTier, World
from tests.memory_tier import MemoryTier

from kvtier.runtime import mover as mover_module
from kvtier.runtime.executor import Threads
from kvtier.types import Direction, Outcome


def _start_only(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) >= count:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("count", range(5))
def test_a_mover_that_cannot_start_leaves_no_thread(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    _start_only(monkeypatch, count)
    with pytest.raises(RuntimeError, match="can't start"):
        World(threads=Threads(device=2, read=1, write=1, probe=1))
    assert set(threading.enumerate()) == before


def test_commands_beyond_the_queue_bound_fail_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "QUEUE_BOUND", 2)
    tier = HangingTier(MemoryTier(capacity_bytes=1 << 24), "read")
    with World({"memory": tier}, threads=Threads(read=1)) as world:
        world.mover.submit(world.transfer(Direction.PROMOTE, 1, 0))
        tier.wait_begun()
        for slot in (1, 2):
            world.mover.submit(world.transfer(Direction.PROMOTE, 1, slot))
        too_many = world.transfer(Direction.PROMOTE, 1, 3)
        with pytest.raises(AssertionError, match="the core has let 2 commands wait in the memory read queue"):
            world.mover.submit(too_many)
        (completion,) = world.take(1)
        assert (completion.command, completion.outcome) == (too_many, Outcome.FAILED)
        tier.release.set()
        world.take(3)
