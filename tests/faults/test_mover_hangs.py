"""A tier or device that hangs delays neither other work, nor closing, nor the exit; each command is completed once."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from mover_world import CHUNKS, WAIT_S, FencedCopier, HangingTier, ManualClock, World
from tests.memory_tier import MemoryTier
from tests.system import until

from kvtier.runtime import mover as mover_module
from kvtier.runtime.executor import Threads, TierView, Work
from kvtier.runtime.mover import CLOSED, DROPS_BOUND, TOO_LATE, FiguresSampler
from kvtier.runtime.worker_queues import STALL_SHARE, STUCK_S
from kvtier.tier.base import Figures
from kvtier.types import Cancel, Direction, Outcome

METHODS = ("read", "write", "contains", "delete")


def _memory(name: str = "memory") -> MemoryTier:
    return MemoryTier(name, capacity_bytes=1 << 24)


@pytest.mark.parametrize("method", METHODS)
def test_other_tiers_and_other_queues_go_on(method: str) -> None:
    bad, good = HangingTier(_memory("bad")), _memory("good")
    with World({"bad": bad, "good": good}, threads=Threads(device=1, read=1, write=1)) as world:
        world.stored(1, 2, tier="bad")
        world.stored(1, 2, tier="good")
        bad.hanging = {method}
        stuck = {
            "read": world.transfer(Direction.PROMOTE, 1, 6, tier="bad"),
            "write": world.transfer(Direction.DEMOTE, 2, 0, tier="bad"),
            "contains": world.probe([(1, 0)], tier="bad"),
            "delete": world.drop(2, tier="bad"),
        }
        world.mover.submit(stuck[method])
        bad.wait_begun()
        world.done(world.transfer(Direction.PROMOTE, 1, 3, tier="good"))
        world.done(world.transfer(Direction.SCATTER, 1, 3, place=CHUNKS))
        world.done(world.transfer(Direction.GATHER, 3, 4))
        world.done(world.transfer(Direction.DEMOTE, 3, 4, tier="good"), world.drop(3, tier="good"))
        assert world.run(world.probe([(2, 0)], tier="good"))[0].present == (True,)
        # Nor do the other queues of the same tier; delete and write share one.
        if method != "read":
            world.done(world.transfer(Direction.PROMOTE, 1, 5, tier="bad"))
        if method != "contains":
            assert world.run(world.probe([(1, 0)], tier="bad"))[0].present == (True,)
        if method in ("read", "contains"):
            world.done(world.transfer(Direction.DEMOTE, 3, 4, tier="bad"))
        assert world.is_at(1, CHUNKS)
        bad.release.set()
        (completion,) = world.take(1)
        assert completion.command is stuck[method]
        assert completion.outcome is Outcome.DONE


@pytest.mark.parametrize(("method", "queue"), [("read", "read"), ("write", "write"), ("contains", "probe")])
def test_a_lane_that_is_stuck_is_logged_once_and_counted(
    method: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier, clock = HangingTier(_memory()), ManualClock()
    with World({"memory": tier}, threads=Threads(device=1, read=2, write=2, probe=2), clock=clock) as world:
        world.stored(1, 2)
        stuck_queues = world.mover.views["memory"].stuck_queues
        tier.hanging = {method}
        commands = {
            "read": [world.transfer(Direction.PROMOTE, 1, 6), world.transfer(Direction.PROMOTE, 2, 7)],
            "write": [world.transfer(Direction.DEMOTE, 1, 0), world.transfer(Direction.DEMOTE, 2, 0)],
            "contains": [world.probe([(1, 0)]), world.probe([(2, 0)])],
        }[method]
        world.mover.submit(commands[0])
        tier.wait_begun()
        clock.now_s += 2 * STUCK_S
        assert stuck_queues() == 0, "another thread is free"
        world.mover.submit(commands[1])
        tier.wait_begun()
        assert stuck_queues() == 0, "it has only just begun"
        for _ in range(3):
            clock.now_s += STUCK_S
            assert stuck_queues() == 1
            world.mover.submit(world.transfer(Direction.GATHER, 3, 4))
            world.mover.flush()
            world.take(1)  # or the device's thread would be in this call when the clock jumps
        seen = [record.getMessage() for record in caplog.records if "stuck" in record.getMessage()]
        assert seen == [f"the memory {queue} queue is stuck: all of its threads have been in a call for {STUCK_S:g} s"]
        tier.release.set()
        world.take(2)
        until(lambda: not stuck_queues())


def test_jobs_behind_threads_that_hang_get_as_many_further_threads() -> None:
    tier, clock = HangingTier(_memory()), ManualClock()
    with World({"memory": tier}, threads=Threads(device=1, read=1, write=1), clock=clock) as world:
        world.stored(1, 2, 3)

        def threads() -> int:
            return sum(each.name == "kvtier memory read" for each in threading.enumerate()) - before

        def flushed_after(seconds: float) -> None:
            clock.now_s += seconds
            world.mover.flush()

        tier.hanging, before = {"read"}, 0
        before = threads() - 1
        world.mover.submit(world.transfer(Direction.PROMOTE, 1, 5))
        tier.wait_begun()
        patience_s = STALL_SHARE * STUCK_S
        flushed_after(0.3 * patience_s)
        for chunk in (2, 3):
            world.mover.submit(world.transfer(Direction.PROMOTE, chunk, 4 + chunk))
        flushed_after(0.6 * patience_s)
        assert threads() == 1, "its call has begun not long ago"
        flushed_after(STUCK_S)
        tier.wait_begun()
        for _ in range(3):
            flushed_after(STUCK_S)
        assert threads() == 2, "twice as many at most"
        tier.release.set()
        assert [each.outcome for each in world.take(3)] == [Outcome.DONE] * 3


def test_figures_are_left_by_the_tiers_threads_and_one_at_a_time() -> None:
    """A call for the tier's figures that hangs costs one thread, and no thread that decides."""
    callers: list[threading.Thread] = []
    go_on = threading.Event()

    class Slow(MemoryTier):
        is_used: bool | None = None

        @property
        def used_bytes(self) -> int:
            callers.append(threading.current_thread())
            assert go_on.wait(WAIT_S)
            return super().used_bytes

        def note_use(self, *, is_up: bool) -> None:
            self.is_used = is_up

    tier, clock = Slow(capacity_bytes=1 << 24), ManualClock()
    with World({"memory": tier}, threads=Threads(read=1, write=2), clock=clock) as world:
        view = world.mover.views["memory"]
        view.is_up = True
        for chunk in range(3):
            world.stored(chunk)
            clock.now_s += 1.5
        assert view.figures.used_bytes is None
        go_on.set()
        world.done(world.transfer(Direction.PROMOTE, 1, 6))
        until(lambda: view.figures.used_bytes is not None)
        assert view.figures.capacity_bytes == 1 << 24
        assert tier.is_used
    assert {thread.name for thread in callers} <= {"kvtier memory write", "kvtier memory read"}


def test_figures_that_are_none_are_not_believed() -> None:
    """A tier of another package may return anything; the thread that draws the gauges never sees it."""

    class Wrong(MemoryTier):
        given: object = None

        def figures(self) -> Figures:
            return self.given  # type: ignore[return-value]

    tier, view = Wrong(capacity_bytes=1 << 20), TierView()
    sampler = FiguresSampler(tier, view)
    for number, given in enumerate(
        (None, (1, 2, 3), Figures("a"), Figures(1, 2, 3, {"frames": None}), Figures(1, 2, 3, 4))
    ):  # type: ignore[arg-type]
        tier.given = given
        sampler.sample(float(10 * number))
        assert view.figures == Figures()
    tier.given = Figures(1, 2, 3, {"x": 5, "frames": 7})
    sampler.sample(500.0)
    assert view.figures == Figures(1, 2, 3, {"frames": 7}), "a kind of write that no metric has is left out"
    tier.given = Figures(1.0, 2, None, {"frames": 7})  # type: ignore[arg-type]
    sampler.sample(1000.0)
    assert view.figures == Figures(1, 2, None, {"frames": 7})


def test_tiers_have_threads_of_their_own_number() -> None:
    slow, fast = MemoryTier("slow", capacity_bytes=1 << 20), MemoryTier("fast", capacity_bytes=1 << 20)
    with World({"slow": slow, "fast": fast}, threads=Threads(read=1), tier_threads={"fast": Threads(read=3)}):
        running = [thread.name for thread in threading.enumerate()]
    assert (running.count("kvtier slow read"), running.count("kvtier fast read")) == (1, 3)


def test_a_hanging_device_does_not_hold_up_the_tiers() -> None:
    with World(wrap=FencedCopier) as world:
        for chunk in range(3):
            world.mover.submit(world.transfer(Direction.GATHER, chunk, chunk))
        world.done(world.transfer(Direction.DEMOTE, 5, 5), world.transfer(Direction.PROMOTE, 5, 6))
        world.copier.release.set()
        assert {completion.outcome for completion in world.take(3)} == {Outcome.DONE}


def test_what_waits_behind_a_hanging_tier_is_answered_once_it_is_late() -> None:
    clock = ManualClock()
    tier = HangingTier(_memory(), "read")
    with World({"memory": tier}, threads=Threads(read=1), clock=clock) as world:
        stuck, waiting, later = (
            world.transfer(Direction.PROMOTE, chunk, chunk, deadline_s=deadline_s)
            for chunk, deadline_s in ((1, 1.0), (2, 2.0), (3, 30.0))
        )
        world.mover.submit(stuck)
        tier.wait_begun()
        world.mover.submit(waiting)
        clock.now_s = 5.0
        world.mover.submit(later)
        (completion,) = world.take(1)
        assert completion.command is waiting
        assert (completion.outcome, completion.detail, completion.is_tier_fault) == (Outcome.FAILED, TOO_LATE, True)
        tier.release.set()
        assert {completion.command for completion in world.take(2)} == {stuck, later}


def test_drops_do_not_pile_up_behind_a_hanging_tier() -> None:
    tier = HangingTier(_memory(), "delete")
    with World({"memory": tier}, threads=Threads(write=1)) as world:
        world.mover.submit(world.drop(0))
        tier.wait_begun()
        for chunk in range(1, DROPS_BOUND + 4):
            world.mover.submit(world.drop(chunk))
        refused = world.take(3)
        assert {completion.outcome for completion in refused} == {Outcome.FAILED}
        assert not any(completion.is_tier_fault for completion in refused)
        tier.release.set()
        assert {completion.outcome for completion in world.take(DROPS_BOUND + 1)} == {Outcome.DONE}


@pytest.mark.parametrize("method", METHODS)
def test_close_returns_by_its_deadline_and_a_late_thread_does_no_harm(method: str) -> None:
    tier = HangingTier(_memory())
    world = World({"memory": tier}, threads=Threads(read=1, write=1))
    world.stored(1)
    tier.hanging = {method}
    commands = {
        "read": [world.transfer(Direction.PROMOTE, 1, slot) for slot in (1, 2)],
        "write": [world.transfer(Direction.DEMOTE, 2, slot) for slot in (1, 2)],
        "contains": [world.probe([(chunk, 0)]) for chunk in (1, 2)],
        "delete": [world.drop(chunk) for chunk in (1, 2)],
    }[method]
    for command in commands:
        world.mover.submit(command)
    tier.wait_begun()
    began_s = time.monotonic()
    assert not world.mover.close(0.05)
    assert time.monotonic() - began_s < WAIT_S
    (cancelled,) = world.take(1)
    assert (cancelled.command, cancelled.outcome, cancelled.detail) == (commands[1], Outcome.CANCELLED, CLOSED)
    world.arena.close()
    tier.release.set()
    assert world.mover.close(WAIT_S), "the thread ends once its call does"
    (late,) = world.take(1)
    assert late.command is commands[0]
    # Where the slot was needed only to begin with, the work is whole; nothing was freed under it.
    assert late.outcome is Outcome.DONE


def test_memory_stays_while_a_stuck_thread_has_it_and_goes_with_it() -> None:
    tier = HangingTier(_memory(), "read")
    world = World({"memory": tier}, threads=Threads(read=1))
    world.mover.submit(world.transfer(Direction.PROMOTE, 1, 1))
    tier.wait_begun()
    region = weakref.ref(world.arena._views[0].obj)
    assert not world.mover.close(0.01)
    world.arena.close()
    gc.collect()
    assert region() is not None
    tier.release.set()
    assert world.mover.close(WAIT_S)
    gc.collect()
    assert region() is None


_PROCESS = """
import sys, threading
sys.path[:0] = [{folder!r}, {top!r}]
from mover_world import HangingTier, World
from tests.memory_tier import MemoryTier
from kvtier.tier.base import Figures
from kvtier.types import Direction
tier = HangingTier(MemoryTier(capacity_bytes=1 << 24), "read", "contains", "write")
world = World({{"memory": tier}})
for slot in range(6):
    world.mover.submit(world.transfer(Direction.PROMOTE, 1, slot))
    world.mover.submit(world.transfer(Direction.DEMOTE, 1, slot, group=1))
world.mover.submit(world.probe([(1, 0)]))
tier.wait_begun(4 + 2 + 1)
if {closes}:
    assert not world.mover.close(0.05)
    world.arena.close()
print("over", flush=True)
"""


@pytest.mark.parametrize("closes", [True, False])
def test_the_process_ends_while_a_tier_hangs(closes: bool) -> None:
    folder = Path(__file__).parent
    script = _PROCESS.format(folder=str(folder), top=str(folder.parents[1]), closes=closes)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


def test_a_demotion_does_not_begin_before_an_earlier_drop_of_its_object_has_ended() -> None:
    tier = HangingTier(_memory(), "delete")
    with World({"memory": tier}, threads=Threads(write=4)) as world:
        world.stored(1, 2)
        world.done(world.transfer(Direction.GATHER, 1, 1))
        drop, demote = world.drop(1), world.transfer(Direction.DEMOTE, 1, 1)
        world.mover.submit(drop, demote)
        tier.wait_begun()
        world.done(world.transfer(Direction.DEMOTE, 2, 0))  # other objects do not wait
        (again,) = world.run(world.drop(1))
        assert again.outcome is Outcome.CANCELLED
        assert not world.mover.take(0.1)
        tier.release.set()
        answers = {id(completion.command): completion.outcome for completion in world.take(2)}
        assert answers == {id(drop): Outcome.DONE, id(demote): Outcome.DONE}
        assert tier.contains([world.name(1)]) == [True], "the copy that was written after the drop"


def test_a_demotion_waits_for_a_drop_that_hangs_until_its_own_deadline() -> None:
    tier = HangingTier(_memory(), "delete")
    with World({"memory": tier}, threads=Threads(write=2)) as world:
        world.stored(1)
        world.mover.submit(world.drop(1))
        tier.wait_begun()
        (completion,) = world.run(world.transfer(Direction.DEMOTE, 1, 0, deadline_s=time.monotonic() + 0.05))
        assert (completion.outcome, completion.detail, completion.is_tier_fault) == (Outcome.FAILED, TOO_LATE, True)
        tier.release.set()
        world.take(1)


# ---- closing --------------------------------------------------------------------------------------------------------


def _world(*hanging: str) -> tuple[World, HangingTier]:
    tier = HangingTier(MemoryTier(capacity_bytes=1 << 24))
    world = World({"memory": tier}, threads=Threads(device=1, read=1, write=1))
    world.stored(1, 2)
    tier.hanging = set(hanging)
    return world, tier


def test_finished_but_not_taken() -> None:
    world, tier = _world("contains", "read")
    promote, probe = world.transfer(Direction.PROMOTE, 1, 3), world.probe([(1, 0)])
    world.mover.submit(promote)
    world.mover.submit(probe)
    tier.wait_begun(2)
    tier.release.set()
    assert world.mover.close(WAIT_S)
    assert {completion.command: completion.outcome for completion in world.take(2)} == {
        promote: Outcome.DONE,
        probe: Outcome.DONE,
    }


@pytest.mark.parametrize("closes", [1, 2])
def test_after_it_nothing_begins(closes: int) -> None:
    world, _ = _world()
    for _ in range(closes):
        assert world.mover.close(WAIT_S)
    world.spoil(3)
    commands: list[Work] = [
        world.transfer(Direction.PROMOTE, 1, 3),
        world.transfer(Direction.GATHER, 1, 3),
        world.transfer(Direction.DEMOTE, 1, 3),
        world.transfer(Direction.SCATTER, 1, 3),
        world.probe([(1, 0)]),
        world.drop(1),
    ]
    for completion in world.run(*commands):
        assert (completion.outcome, completion.detail, completion.is_tier_fault) == (Outcome.CANCELLED, CLOSED, False)
    assert world.mover.take(0.0) == []
    world.mover.submit(Cancel((1,)))


def test_nothing_that_was_answered_done_is_undone() -> None:
    world, _ = _world()
    for chunk in range(6):
        world.mover.submit(world.transfer(Direction.GATHER, chunk, chunk))
    gathered = {completion.command.slot for completion in world.take(6) if completion.outcome is Outcome.DONE}  # type: ignore[union-attr]
    for slot in gathered:
        world.mover.submit(world.transfer(Direction.DEMOTE, slot, slot))
    world.mover.close(WAIT_S)
    answers = world.take(6)
    held = world.tiers["memory"].contains([world.name(chunk) for chunk in range(6)])
    for completion in answers:
        chunk = completion.command.slot  # type: ignore[union-attr]
        assert completion.outcome in (Outcome.DONE, Outcome.CANCELLED)
        if completion.outcome is Outcome.DONE:
            assert held[chunk]


# ---- threads and bounds ---------------------------------------------------------------------------------------------


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
