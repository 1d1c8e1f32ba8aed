"""Every command with the real copier, arena, frame and memory tier: right bytes and completions."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from mover_world import (
    CHUNKS,
    FINGERPRINT,
    WAIT_S,
    FencedCopier,
    HangingTier,
    ManualClock,
    World,
    WrappedTier,
    codec_of,
)
from tests.memory_tier import MemoryTier
from tests.waiting import wait_until

from kvtier.codec.frame import verify_frame
from kvtier.config.sections import Mode
from kvtier.errors import DETAIL_CHARACTERS, KvError
from kvtier.layout import Part
from kvtier.policy.lru import Lru
from kvtier.runtime.command_runner import NOT_ADMITTED
from kvtier.runtime.executor import Threads, Work
from kvtier.runtime.mover import TOO_LATE
from kvtier.tier.base import About
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.types import Cancel, Direction, NextTurn, ObjectName, Outcome, Tell


class RecordingTier(WrappedTier):
    def __init__(self) -> None:
        super().__init__(MemoryTier(capacity_bytes=1 << 24))
        self.written: list[tuple[ObjectName, bytes, About]] = []

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        self.written.append((name, bytes(frame), about))
        return super().write_one(name, frame, about)


@pytest.mark.parametrize(("codec", "writes_all"), [("raw", True), ("raw", False), ("zstd", True)])
def test_a_chunk_goes_down_and_comes_back_to_other_blocks(codec: str, writes_all: bool) -> None:
    with World(codec=codec_of(codec), writes_all=writes_all) as world:
        for group in (0, 1):
            world.done(
                world.transfer(Direction.GATHER, 1, 2, group=group), world.transfer(Direction.DEMOTE, 1, 2, group=group)
            )
            world.spoil(2, group)
            world.done(
                world.transfer(Direction.PROMOTE, 1, 5, group=group),
                world.transfer(Direction.SCATTER, 1, 5, group=group, place=CHUNKS + 3),
            )
            assert world.is_in_slot(1, 5, group)
            assert world.is_at(1, CHUNKS + 3, group)
            assert world.is_at(1, 1, group)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_files_written_by_one_mover_are_read_by_the_next(tmp_path: Path, codec: str, direct_io: Mode) -> None:
    def directory() -> DirectoryTier:
        return DirectoryTier(tmp_path / "store", capacity_bytes=1 << 24, direct_io=direct_io)

    with closing(directory()) as tier, World({"disk": tier}, codec=codec_of(codec)) as world:
        world.stored(0, 1, 2, tier="disk")
    with closing(directory()) as tier, World({"disk": tier}) as world:  # whatever it writes itself
        for chunk in (0, 1, 2):
            for group in (0, 1):
                world.done(
                    world.transfer(Direction.PROMOTE, chunk, 5, group=group, tier="disk"),
                    world.transfer(Direction.SCATTER, chunk, 5, group=group, place=CHUNKS + chunk),
                )
                assert world.is_at(chunk, CHUNKS + chunk, group)
        assert world.run(world.transfer(Direction.PROMOTE, 3, 5, tier="disk"))[0].outcome is Outcome.ABSENT
        (probed,) = world.run(world.probe([(0, 0), (3, 0), (2, 1)], tier="disk"))
        assert probed.present == (True, False, True)


def test_a_compressed_object_reports_fewer_bytes() -> None:
    with World(codec=codec_of("zstd")) as world:
        gather = world.transfer(Direction.GATHER, 0, 0, place=CHUNKS)  # all zeros
        world.done(gather)
        down, up = (
            world.run(world.transfer(Direction.DEMOTE, 0, 0))[0],
            world.run(world.transfer(Direction.PROMOTE, 0, 0))[0],
        )
        assert down.size_bytes == up.size_bytes < len(world.arena.frame(0, 0))


def test_the_frame_carries_the_identity_of_the_object() -> None:
    tier = RecordingTier()
    with World({"memory": tier}, rank=3) as world:
        world.done(world.transfer(Direction.GATHER, 2, 0), world.transfer(Direction.DEMOTE, 2, 0))
        ((name, frame, about),) = tier.written
        identity = verify_frame(frame).identity
        assert name == identity.name == world.name(2)
        assert identity.model == FINGERPRINT[:16]
        assert identity.parent == about.parent == world.name(1)
        assert (identity.depth, identity.tokens, identity.group) == (2, 64, 0)
        assert identity.part == Part(0, 3, rank=3, ranks=4)
        assert (about.depth, about.group) == (2, 0)


def test_completions_have_bytes_and_times() -> None:
    with World() as world:
        gathered, *_ = world.run(world.transfer(Direction.GATHER, 0, 0))
        demoted, *_ = world.run(world.transfer(Direction.DEMOTE, 0, 0))
        promoted, *_ = world.run(world.transfer(Direction.PROMOTE, 0, 0))
        assert gathered.size_bytes == sum(world.layout.groups[0].layer_bytes)
        assert demoted.size_bytes == promoted.size_bytes == len(world.arena.frame(0, 0))
        for completion in (gathered, demoted, promoted):
            assert completion.outcome is Outcome.DONE
            assert completion.seconds > 0 <= completion.waited_s
            assert completion.detail == ""
            assert not completion.is_tier_fault


@pytest.mark.parametrize("length", [0, DETAIL_CHARACTERS - 40])
@pytest.mark.parametrize("act", ["promote", "demote", "probe", "drop"])
def test_the_first_failure_of_each_kind_names_its_error_and_no_login(
    caplog, monkeypatch, act: str, length: int
) -> None:
    """Another package's error shows the address that it used, perhaps where a long text is cut."""
    begin = "x" * length
    tier = MemoryTier(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        world.stored(1)
        commands = {
            "promote": world.transfer(Direction.PROMOTE, 1, 1),
            "demote": world.transfer(Direction.DEMOTE, 2, 0),
            "probe": world.probe([(1, 0)]),
            "drop": world.drop(1),
        }

        def refuse(*_: object) -> None:
            raise ConnectionError(f"{begin}https://user:hunter2@host/x answers 500")

        for method in ("read_many", "write_many", "contains", "delete"):
            monkeypatch.setattr(tier, method, refuse)
        for _ in range(2):
            (completion,) = world.run(commands[act])
            assert completion.outcome is Outcome.FAILED
    why = f"ConnectionError: {begin}https://(hidden)@host/x answers 500"[:DETAIL_CHARACTERS]
    assert [it.getMessage() for it in caplog.records] == [f"{act} of tier 'memory' failed: {why}"]


def test_a_probe_answers_object_by_object_in_its_own_order() -> None:
    with World() as world:
        world.done(
            world.transfer(Direction.GATHER, 1, 0), world.transfer(Direction.DEMOTE, 1, 0),
            world.transfer(Direction.GATHER, 2, 0, group=1), world.transfer(Direction.DEMOTE, 2, 0, group=1),
        )  # fmt: skip
        (completion,) = world.run(world.probe([(2, 1), (1, 0), (1, 1), (2, 0), (1, 0)]))
        assert completion.outcome is Outcome.DONE
        assert completion.present == (True, True, False, False, True)
        (empty,) = world.run(world.probe([]))
        assert empty.outcome is Outcome.DONE
        assert empty.present == ()


class Heard(Lru):
    """An evictor that takes hints."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, NextTurn | None]] = []

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        self.said.append((conversation, next_turn))


def test_what_a_session_expects_reaches_a_directorys_evictor_and_is_no_fault_of_others(tmp_path: Path) -> None:
    received = Heard()
    directory = DirectoryTier(tmp_path / "kv", capacity_bytes=1 << 22, evictor=received)
    deaf = DirectoryTier(tmp_path / "deaf", capacity_bytes=1 << 22)
    memory = MemoryTier(capacity_bytes=1 << 22)
    with closing(directory), closing(deaf), World({"directory": directory, "deaf": deaf, "memory": memory}) as world:
        for tier in ("directory", "deaf", "memory"):
            world.done(Tell(tier, "a", NextTurn.USER), Tell(tier, "a", None))
    assert received.said == [("a", NextTurn.USER), ("a", None)]


def test_a_refused_write_is_no_tier_fault() -> None:
    with World({"memory": MemoryTier(capacity_bytes=100)}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        (completion,) = world.run(world.transfer(Direction.DEMOTE, 1, 0))
        assert (completion.outcome, completion.detail, completion.is_tier_fault) == (
            Outcome.FAILED,
            NOT_ADMITTED,
            False,
        )
        world.tiers["memory"].close()
        (completion,) = world.run(world.transfer(Direction.DEMOTE, 1, 0))
        assert (completion.outcome, completion.is_tier_fault) == (Outcome.FAILED, True)
        assert "closed" in completion.detail


def test_two_tiers_receive_one_slot_at_the_same_time_while_it_is_read() -> None:
    tiers = {"a": RecordingTier(), "b": RecordingTier()}
    with World(tiers, threads=Threads(write=1)) as world:
        world.done(world.transfer(Direction.GATHER, 2, 0))
        for _ in range(40):
            commands: list[Work] = [
                world.transfer(Direction.DEMOTE, 2, 0, tier="a"),
                world.transfer(Direction.SCATTER, 2, 0, place=CHUNKS),
                world.transfer(Direction.DEMOTE, 2, 0, tier="b"),
                world.transfer(Direction.SCATTER, 2, 0, place=CHUNKS + 1),
            ]
            assert all(completion.outcome is Outcome.DONE for completion in world.run(*commands))
        frames = {frame for tier in tiers.values() for _, frame, _ in tier.written}
        assert len(frames) == 1
        verify_frame(frames.pop())
        assert world.is_at(2, CHUNKS)
        assert world.is_at(2, CHUNKS + 1)


def test_a_slot_that_changes_between_gather_and_write_is_corrupt() -> None:
    with World() as world:
        world.done(world.transfer(Direction.GATHER, 1, 2))
        world.spoil(2)
        world.done(world.transfer(Direction.DEMOTE, 1, 2))
        (answer,) = world.run(world.transfer(Direction.PROMOTE, 1, 5))
        assert answer.outcome is Outcome.CORRUPT


def test_each_payload_of_a_slot_has_checksums_of_its_own() -> None:
    with World({name: MemoryTier(capacity_bytes=1 << 24) for name in ("memory", "slower")}) as world:
        for chunk in (1, 3):
            world.done(world.transfer(Direction.GATHER, chunk, 2), world.transfer(Direction.DEMOTE, chunk, 2))
        for slot in (2, 5):
            world.done(
                world.transfer(Direction.PROMOTE, 1, 2),
                world.transfer(Direction.DEMOTE, 1, 2, tier="slower"),
                world.transfer(Direction.PROMOTE, 1, slot, tier="slower"),
            )
            assert world.is_in_slot(1, slot)


def test_an_invalid_slot_group_or_block_fails_its_command_only() -> None:
    with World() as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        wrong = [
            world.transfer(Direction.GATHER, 1, 8),
            world.transfer(Direction.GATHER, 1, -1),
            world.transfer(Direction.PROMOTE, 1, 8),
            world.transfer(Direction.DEMOTE, 1, -1),
            world.transfer(Direction.GATHER, 1, 0, group=0)._replace(group=2),
            world.transfer(Direction.GATHER, 1, 0)._replace(blocks=(1000, 1001, 1002, 1003)),
            world.transfer(Direction.DEMOTE, 1, 0)._replace(key=b"short"),
        ]
        for completion in world.run(*wrong):
            assert completion.outcome is Outcome.FAILED
            assert completion.detail
            assert not completion.is_tier_fault
        assert world.is_in_slot(1, 0)


def test_an_unknown_tier_is_refused_at_once() -> None:
    with World() as world:
        with pytest.raises(ValueError, match="no tier 'tape'; the tiers are memory"):
            world.mover.submit(world.transfer(Direction.DEMOTE, 1, 0, tier="tape"))
        assert world.mover.take() == []


def test_a_transfer_is_not_done_before_its_fence() -> None:
    with World(wrap=FencedCopier) as world:
        copier = world.copier
        world.mover.submit(world.transfer(Direction.GATHER, 1, 0))
        for _ in range(5):
            assert copier.asked.acquire(timeout=WAIT_S)
        assert world.mover.take() == []
        assert not world.is_in_slot(1, 0)
        copier.release.set()
        (completion,) = world.take(1)
        assert completion.outcome is Outcome.DONE
        assert world.is_in_slot(1, 0)


def test_a_device_gets_all_copies_of_a_batch_before_one_is_waited_for() -> None:
    """One copy cannot begin, and the fence of another fails: the others are done, and each has its own outcome."""
    begun: list[int] = []
    asked: list[list[int]] = []
    gate = threading.Event()

    class Device:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def gather(self, request: str, group: int, blocks: tuple[int, ...], payload: memoryview) -> int:
            assert gate.wait(WAIT_S)
            if blocks[0] == 4:
                raise KvError("it cannot begin")
            begun.append(blocks[0])
            return blocks[0]

        def done(self, fence: object) -> bool:
            asked.append(begun.copy())
            if fence == 8:
                raise KvError("the device has failed")
            return True

    with World(wrap=Device, threads=Threads(device=1)) as world:  # type: ignore[arg-type]
        first = world.transfer(Direction.GATHER, 0, 0)
        world.mover.submit(first)
        wait_until(lambda: not world.mover._routes[Direction.GATHER, ""].queue.jobs, "the first copy to begin")
        batch = [world.transfer(Direction.GATHER, chunk, chunk) for chunk in (1, 2, 3)]
        world.mover.submit(*batch)
        gate.set()
        completions = {it.command: it for it in world.take(4)}
    assert [completions[it].outcome for it in batch] == [Outcome.FAILED, Outcome.FAILED, Outcome.DONE]
    assert "it cannot begin" in completions[batch[0]].detail
    assert "the device has failed" in completions[batch[1]].detail
    assert asked == [[0], [0, 8, 12], [0, 8, 12]]


def test_a_batch_that_ends_early_waits_for_the_copies_that_the_device_has_begun() -> None:
    """Otherwise their slots could be reused while the device still writes."""

    class PanicError(BaseException):
        pass

    class Device:
        def __init__(self, inner: object) -> None:
            self.inner = inner
            self.gate, self.polls = threading.Event(), 0

        def gather(self, request: str, group: int, blocks: tuple[int, ...], payload: memoryview) -> int:
            assert self.gate.wait(WAIT_S)
            if blocks[0] == 8:
                raise PanicError
            return blocks[0]

        def done(self, fence: object) -> bool:
            self.polls += fence == 4
            return fence != 4 or self.polls == 3

    with World(wrap=Device, threads=Threads(device=1)) as world:  # type: ignore[arg-type]
        world.mover.submit(world.transfer(Direction.GATHER, 0, 0))
        wait_until(lambda: not world.mover._routes[Direction.GATHER, ""].queue.jobs, "the first copy to begin")
        world.mover.submit(*(world.transfer(Direction.GATHER, chunk, chunk) for chunk in (1, 2)))
        world.copier.gate.set()
        first, *batch = world.take(3)
    assert first.outcome is Outcome.DONE
    assert [it.outcome for it in batch] == [Outcome.FAILED] * 2
    assert world.copier.polls == 3


def test_a_late_fence_is_waited_for_because_the_device_still_writes(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    with World(wrap=FencedCopier, clock=clock) as world:
        copier = world.copier
        world.mover.submit(world.transfer(Direction.GATHER, 1, 0, deadline_s=5.0))
        assert copier.asked.acquire(timeout=WAIT_S)
        clock.now_s = 6.0
        for _ in range(20):
            assert copier.asked.acquire(timeout=WAIT_S)
        assert world.mover.take() == []
        copier.release.set()
        assert world.take(1)[0].outcome is Outcome.DONE
    (record,) = caplog.records
    assert "a gather of slot 0 is past its deadline" in record.message


def test_what_is_late_before_it_begins_does_not_begin() -> None:
    clock = ManualClock()
    with World(clock=clock) as world:
        world.stored(1)
        world.spoil(0)
        clock.now_s = 10.0
        late = [
            (world.transfer(Direction.PROMOTE, 1, 0, deadline_s=10.0), True),
            (world.transfer(Direction.DEMOTE, 1, 0, deadline_s=9.0), True),
            (world.probe([(1, 0)], deadline_s=9.0), True),
            (world.transfer(Direction.GATHER, 1, 0, deadline_s=9.0), False),
            (world.transfer(Direction.SCATTER, 1, 0, deadline_s=9.0), False),
        ]
        for command, is_tier_fault in late:
            (completion,) = world.run(command)
            assert (completion.outcome, completion.detail) == (Outcome.FAILED, TOO_LATE)
            assert completion.is_tier_fault is is_tier_fault
        assert bytes(world.arena.frame(0, 0)) == b"\xee" * len(world.arena.frame(0, 0))
        world.done(world.transfer(Direction.PROMOTE, 1, 0, deadline_s=10.5))


def test_loads_go_before_stores_on_the_device() -> None:
    order: list[str] = []
    gate, begun = threading.Event(), threading.Event()

    class OrderedCopier:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def gather(self, request: str, group: int, blocks: tuple[int, ...], payload: memoryview) -> None:
            begun.set()
            assert gate.wait(WAIT_S)
            order.append(f"gather {blocks[0]}")

        def scatter(self, request: str, group: int, blocks: tuple[int, ...], payload: memoryview) -> None:
            order.append(f"scatter {blocks[0]}")

        def done(self, fence: object) -> bool:
            return True

    with World(wrap=OrderedCopier, threads=Threads(device=1)) as world:  # type: ignore[arg-type]
        world.mover.submit(world.transfer(Direction.GATHER, 0, 0))
        assert begun.wait(WAIT_S)
        for direction, chunk in (
            (Direction.GATHER, 1),
            (Direction.SCATTER, 2),
            (Direction.GATHER, 3),
            (Direction.SCATTER, 4),
        ):
            world.mover.submit(world.transfer(direction, chunk, chunk))
        gate.set()
        world.take(5)
    assert order == ["gather 0", "scatter 8", "scatter 16", "gather 4", "gather 12"]


def test_what_has_not_begun_can_be_cancelled_and_what_has_goes_on() -> None:
    tier = HangingTier(MemoryTier(capacity_bytes=1 << 24), "read")
    with World({"memory": tier}, threads=Threads(read=1)) as world:
        world.stored(1, 2, 3)
        running, second, third = (world.transfer(Direction.PROMOTE, chunk, chunk) for chunk in (1, 2, 3))
        world.mover.submit(running)
        tier.wait_begun()
        world.mover.submit(second)
        world.mover.submit(third)
        world.mover.submit(Cancel((running.id, second.id, 10**9)))
        (cancelled,) = world.take(1)
        assert (cancelled.command, cancelled.outcome) == (second, Outcome.CANCELLED)
        assert cancelled.seconds == 0
        world.mover.submit(Cancel((second.id,)))  # twice is fine
        tier.release.set()
        answers = {completion.command: completion.outcome for completion in world.take(2)}
        assert answers == {running: Outcome.DONE, third: Outcome.DONE}
