"""Closing in every state: every command is completed once, and none begins."""

import pytest
from mover_world import WAIT_S, HangingTier, World
from tests.memory_tier import MemoryTier

from kvtier.runtime.executor import Threads, Work
from kvtier.runtime.mover import CLOSED
from kvtier.types import Cancel, Direction, Outcome


def _world(*hanging: str) -> tuple[World, HangingTier]:
    tier = HangingTier(MemoryTier(capacity_bytes=1 << 24))
    world = World({"memory": tier}, threads=Threads(device=1, read=1, write=1))
    world.stored(1, 2)
    tier.hanging = set(hanging)
    return world, tier


def test_unused() -> None:
    world, _ = _world()
    assert world.mover.close(WAIT_S)
    assert world.mover.take(0.0) == []
    assert world.mover.close(WAIT_S), "twice is fine"


def test_submitted_but_not_begun() -> None:
    world, tier = _world("read")
    first, *rest = (world.transfer(Direction.PROMOTE, 1, slot) for slot in range(4))
    world.mover.submit(first)
    tier.wait_begun()
    for command in rest:
        world.mover.submit(command)
    assert not world.mover.close(0.0)
    assert [(completion.command, completion.outcome) for completion in world.take(3)] == [
        (command, Outcome.CANCELLED) for command in rest
    ]
    tier.release.set()
    assert world.mover.close(WAIT_S)
    assert [(completion.command, completion.outcome) for completion in world.take(1)] == [(first, Outcome.DONE)]


def test_running_work_is_waited_for() -> None:
    world, tier = _world("read")
    command = world.transfer(Direction.PROMOTE, 1, 3)
    world.mover.submit(command)
    tier.wait_begun()
    tier.release.set()
    assert world.mover.close(WAIT_S)
    (completion,) = world.mover.take()
    assert (completion.command, completion.outcome) == (command, Outcome.DONE)
    assert world.is_in_slot(1, 3)


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
