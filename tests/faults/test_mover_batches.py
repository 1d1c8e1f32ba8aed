"""Small objects that wait for one tier form a batch; a failure of one object does not fail the others."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from mover_world import HangingTier, ManualClock, NthCallTier, World, WrappedTier, codec_of
from tests.memory_tier import MemoryTier

from kvtier.errors import TierError
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.mover import CANCELLED, TOO_LATE
from kvtier.tier.base import Read, Tier, Write
from kvtier.tier.disk.tier import DiskTier
from kvtier.types import Cancel, Direction, Outcome

ONE_THREAD = Threads(read=1, write=1)
CHUNKS = (1, 2, 3, 4, 5)


class Batched(WrappedTier):
    """A tier that answers batches by asking `inner` for each object. It keeps the sizes of the batches."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.batches: list[int] = []

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        self.batches.append(len(reads))
        return super().read_many(reads)

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        self.batches.append(len(writes))
        return super().write_many(writes)


class Held(HangingTier):
    """The first call by itself waits for `release`; what comes meanwhile waits in the queue and goes together then."""

    takes_batches = True

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        if len(reads) == 1:
            self._call("read")
        return self.inner.read_many(reads)

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        if len(writes) == 1:
            self._call("write")
        return self.inner.write_many(writes)


def _gathered(world: World) -> None:
    for chunk in (0, *CHUNKS):
        world.done(world.transfer(Direction.GATHER, chunk, chunk))


def _together(world: World, tier: Held, direction: Direction) -> list[Completion]:
    """Move chunk 0, and while that hangs ask for the others; the answers of those."""
    tier.release.clear()
    commands = [world.transfer(direction, chunk, chunk) for chunk in (0, *CHUNKS)]
    world.mover.submit(commands[0])
    tier.wait_begun()
    for command in commands[1:]:
        world.mover.submit(command)
    tier.release.set()
    answers = {completion.command: completion for completion in world.take(len(commands))}
    return [answers[command] for command in commands[1:]]


def _there_and_back(world: World, tier: Held) -> tuple[list[Completion], list[Completion]]:
    """Five chunks are demoted and promoted as batches; a chunk that is DONE has the right bytes."""
    _gathered(world)
    down = _together(world, tier, Direction.DEMOTE)
    for slot in (0, *CHUNKS):
        world.spoil(slot)
    up = _together(world, tier, Direction.PROMOTE)
    for chunk, completion in zip(CHUNKS, up, strict=True):
        assert completion.outcome is not Outcome.DONE or world.is_in_slot(chunk, chunk), "wrong bytes are DONE"
    return down, up


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_waits_goes_together(codec: str) -> None:
    inner = Batched(MemoryTier(capacity_bytes=1 << 24))
    tier = Held(inner, "read", "write")
    with World({"memory": tier}, threads=ONE_THREAD, codec=codec_of(codec)) as world:
        down, up = _there_and_back(world, tier)
        assert {completion.outcome for completion in down + up} == {Outcome.DONE}
        assert all(completion.size_bytes and not completion.is_tier_fault for completion in down + up)
        assert inner.batches == [1, 5, 1, 5]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_drive_of_ones_own_takes_them_together(tmp_path: Path, codec: str) -> None:
    disk = DiskTier(tmp_path / "store", capacity_bytes=8 << 20, segment_bytes=1 << 20)
    tier = Held(disk, "read", "write")
    with World({"memory": tier}, threads=ONE_THREAD, codec=codec_of(codec)) as world:
        down, up = _there_and_back(world, tier)
        assert {completion.outcome for completion in down + up} == {Outcome.DONE}
    disk.close()


@pytest.mark.parametrize("way", NthCallTier.WAYS)
def test_one_that_goes_wrong_costs_the_others_nothing(way: str) -> None:
    """Each of the calls for one object in turn; whatever else was in the batch ends DONE."""
    for n in range(1, 13):
        tier = Held(Batched(NthCallTier(MemoryTier(capacity_bytes=1 << 24), n, way)), "read", "write")
        with World({"memory": tier}, threads=ONE_THREAD) as world:
            down, up = _there_and_back(world, tier)
        failures = [completion for completion in down + up if completion.outcome is not Outcome.DONE]
        if way in {"bug", "exit"}:  # a tier that breaks the interface: the batch is lost, but answered
            assert all(completion.detail for completion in failures)
            continue
        assert len({completion.command.key for completion in failures}) <= 1, failures
        for completion in failures:
            assert completion.detail
            assert completion.is_tier_fault == (way == "raise" and "planned" in completion.detail)


def test_what_concerns_all_fails_all_and_is_one_tiers_fault() -> None:
    class Broken(Batched):
        def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
            raise TierError(self.name, f"no {len(writes)} objects today")

        def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
            return [None] * (len(reads) - 1)

    tier = Held(Broken(MemoryTier(capacity_bytes=1 << 24)), "read", "write")
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        down, up = _there_and_back(world, tier)
    for answers, detail in ((down, "no 5 objects today"), (up, "5 objects returned 4 results")):
        assert all(detail in completion.detail for completion in answers)
        assert {(completion.outcome, completion.is_tier_fault) for completion in answers} == {(Outcome.FAILED, True)}


def test_what_is_late_or_cancelled_does_not_go_with_the_others() -> None:
    clock = ManualClock()
    inner = Batched(MemoryTier(capacity_bytes=1 << 24))
    tier = Held(inner, "write")
    with World({"memory": tier}, threads=ONE_THREAD, clock=clock) as world:
        _gathered(world)
        deadlines = {1: 100.0, 2: 1.0, 3: 100.0, 4: 100.0, 5: 1.0}
        commands = [world.transfer(Direction.DEMOTE, chunk, chunk, deadline_s=at) for chunk, at in deadlines.items()]
        world.mover.submit(world.transfer(Direction.DEMOTE, 0, 0))
        tier.wait_begun()
        for command in commands:
            world.mover.submit(command)
        world.mover.submit(Cancel((commands[3].id,)))
        clock.now_s = 2.0
        tier.release.set()
        answers = {completion.command: completion for completion in world.take(6)}
        assert [answers[command].detail for command in commands] == ["", TOO_LATE, "", CANCELLED, TOO_LATE]
        assert inner.batches == [1, 2]


def test_a_drop_keeps_its_place_between_batches() -> None:
    """What comes after the drop of a name must not be written before it."""
    inner = Batched(MemoryTier(capacity_bytes=1 << 24))
    tier = Held(inner, "write")
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        _gathered(world)
        world.mover.submit(world.transfer(Direction.DEMOTE, 0, 0))
        tier.wait_begun()
        demote = [world.transfer(Direction.DEMOTE, chunk, chunk) for chunk in (1, 2, 1)]
        for command in (*demote[:2], world.drop(1), demote[2]):
            world.mover.submit(command)
        tier.release.set()
        assert {completion.outcome for completion in world.take(5)} == {Outcome.DONE}
        assert inner.batches == [1, 2, 1]
        assert inner.contains([world.name(1), world.name(2)]) == [True, True]


def test_large_objects_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them keeps the device busy, and the others would only wait for it."""
    monkeypatch.setattr("kvtier.runtime.command_runner.BATCH_BYTES", 4096)
    inner = Batched(MemoryTier(capacity_bytes=1 << 24))
    tier = Held(inner, "read", "write")
    with World({"memory": tier}, threads=ONE_THREAD) as world:
        down, up = _there_and_back(world, tier)
        assert {completion.outcome for completion in down + up} == {Outcome.DONE}
        assert inner.batches == [1] * 12
