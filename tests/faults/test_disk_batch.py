"""Batches of the disk tier: neighbours take one system call, and one bad block costs one object."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_world import SEGMENT_BYTES, check_accounts, look, open_tier, sealed

from kvtier.errors import TierError
from kvtier.testing.tier import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier import disk_batch
from kvtier.tier.aio import ReadQueue, ReadRun, begin_runs
from kvtier.tier.base import Read, Write, ended
from kvtier.tier.direct import can_direct
from kvtier.tier.disk import DiskTier

NUMBERS = range(8)


class Device:
    """Counts the calls to segments' data, and fails those that touch `bad` bytes. There is no asynchronous I/O here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.bad: tuple[int, int] | None = None
        monkeypatch.setattr(disk_batch, "begin_runs", lambda _runs: None)
        for kind in ("preadv", "pwritev"):
            monkeypatch.setattr(os, kind, self._instead(kind, getattr(os, kind)))

    def _instead(self, kind: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.calls.append(kind)
            stop = offset + sum(buffer.nbytes for buffer in buffers)
            if self.bad is not None and offset < self.bad[1] and self.bad[0] < stop:
                raise OSError(errno.EIO, "planned")
            return real(descriptor, buffers, offset)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def _write_all(tier: DiskTier, numbers: Sequence[int] = NUMBERS) -> list[bool | TierError]:
    return tier.write_many([Write(object_name(number), sealed(number)) for number in numbers])


def _read_all(tier: DiskTier, numbers: Sequence[int] = NUMBERS) -> list[int | TierError | None]:
    return tier.read_many([Read(object_name(number), empty_frame(1 << 17)) for number in numbers])


def test_neighbours_take_one_call_in_whatever_order(tmp_path: Path, device: Device) -> None:
    tier = open_tier(tmp_path / "s")
    assert tier.write(object_name(100), sealed(100))
    device.calls.clear()
    assert _write_all(tier) == [True] * len(NUMBERS)
    assert device.calls == ["pwritev"]
    device.calls.clear()
    assert _read_all(tier, [*reversed(NUMBERS)]) == [sealed(number).nbytes for number in reversed(NUMBERS)]
    assert device.calls == ["preadv"]
    assert {look(tier, number) for number in NUMBERS} == {"right"}
    assert tier.write_bytes["frames"] == sum(sealed(number).nbytes for number in (*NUMBERS, 100))
    check_accounts(tier, tmp_path / "s")
    tier.close()


def test_one_bad_block_costs_one_object_on_the_way_up(tmp_path: Path, device: Device) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    (extent,) = tier._pool.find([object_name(3)])
    assert extent is not None
    tier._pool.unpin([extent.segment])
    device.bad = (extent.offset, extent.offset + BLOCK_BYTES)
    answers = _read_all(tier)
    assert [number for number, answer in zip(NUMBERS, answers, strict=True) if isinstance(answer, TierError)] == [3]
    assert "planned" in str(answers[3])
    assert all(segment.pins == 0 for segment in tier._pool._segments.values())
    device.bad = None
    assert _read_all(tier) == [sealed(number).nbytes for number in NUMBERS]
    tier.close()


SCATTERED = (6, 1, 4, 7, 0)
"""Not all of them neighbours of one another."""


class Together:
    """Stands before the reads that are asked for at the same time: what they were, and what becomes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[int]] = []
        self.spoil: Callable[[list[int]], list[int]] | None = list
        monkeypatch.setattr(disk_batch, "begin_runs", self._begin)

    def _begin(self, runs: Sequence[ReadRun]) -> Callable[[], list[int]] | None:
        spoil = self.spoil
        wait = None if spoil is None else begin_runs(runs)
        if wait is None or spoil is None:
            return None
        self.asked.append([len(run.views) for run in runs])
        return lambda: spoil(wait())


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Together:
    if not can_direct(str(tmp_path)):
        pytest.skip("no direct I/O here")
    try:
        ReadQueue().close()
    except OSError as error:
        pytest.skip(f"no asynchronous I/O here: {error}")
    return Together(monkeypatch)


def _right(tier: DiskTier, numbers: Sequence[int]) -> bool:
    reads = [Read(object_name(number), empty_frame(1 << 17)) for number in numbers]
    answers = tier.read_many(reads)
    return all(
        answer == sealed(number).nbytes and read.into[:answer] == sealed(number)
        for number, read, answer in zip(numbers, reads, answers, strict=True)
    )


def test_neighbours_are_asked_for_as_one(tmp_path: Path, together: Together) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    assert _right(tier, [*reversed(NUMBERS)])
    assert together.asked == [[len(NUMBERS)]]
    tier.close()


def _pins(tier: DiskTier) -> int:
    return sum(segment.pins for segment in tier._pool._segments.values())


def test_between_asking_and_having_its_thread_may_do_other_things(tmp_path: Path, together: Together) -> None:
    """Even read from the same tier. Closing waits for it, and a frame that is deleted meanwhile still comes."""
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    reads = [Read(object_name(number), empty_frame(1 << 17)) for number in SCATTERED]
    steps = tier.reading(reads)
    next(steps)
    assert _pins(tier) == len(SCATTERED)
    assert _right(tier, SCATTERED)
    assert len(together.asked) == 1, "the queue was in use"
    tier.delete(reads[0].name)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(tier.close)
        while not tier._guard.is_closed:
            time.sleep(0.001)
        assert not closing.done()
        assert ended(steps) == [sealed(number).nbytes for number in SCATTERED]
        closing.result(20.0)
    assert all(read.into[: len(sealed(n))] == sealed(n) for n, read in zip(SCATTERED, reads, strict=True))
    assert _pins(tier) == 0


def test_who_leaves_in_between_waits_for_the_device(tmp_path: Path, together: Together) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    waited: list[list[int]] = []
    together.spoil = lambda answers: waited.append(answers) or answers
    steps = tier.reading([Read(object_name(number), empty_frame(1 << 17)) for number in SCATTERED])
    next(steps)
    assert not waited
    steps.close()
    assert len(waited) == 1
    assert _pins(tier) == 0
    assert _right(tier, SCATTERED), "and the queue is free"
    assert len(together.asked) == 2
    tier.close()


def test_scattered_frames_are_asked_for_together(tmp_path: Path, device: Device, together: Together) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    device.calls.clear()
    assert _right(tier, SCATTERED)
    assert device.calls == []
    assert together.asked == [[2, 1, 2]], "0 and 1, 4, 6 and 7"
    tier.close()


@pytest.mark.parametrize("spoilt", range(3))
@pytest.mark.parametrize("answer", [-errno.EIO, 0, BLOCK_BYTES])
def test_what_was_not_read_with_the_others_is_read_alone(
    tmp_path: Path, device: Device, together: Together, spoilt: int, answer: int
) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    device.calls.clear()
    together.spoil = lambda answers: [answer if at == spoilt else told for at, told in enumerate(answers)]
    assert _right(tier, SCATTERED)
    assert device.calls == ["preadv"] * [2, 1, 2][spoilt]
    tier.close()


def test_a_system_that_cannot_read_together_reads_one_after_the_other(
    tmp_path: Path, device: Device, together: Together
) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    device.calls.clear()
    together.spoil = None
    assert _right(tier, SCATTERED)
    assert device.calls == ["preadv"] * 3
    tier.close()


def test_memory_that_the_device_does_not_take_is_filled_all_the_same(tmp_path: Path, together: Together) -> None:
    """A caller's own, which is not aligned; or too small for the whole frame."""
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    odd = [memoryview(bytearray(1 + sealed(number).nbytes))[1:] for number in SCATTERED]
    answers = tier.read_many([Read(object_name(number), into) for number, into in zip(SCATTERED, odd, strict=True)])
    assert answers == [sealed(number).nbytes for number in SCATTERED]
    assert all(into == sealed(number) for number, into in zip(SCATTERED, odd, strict=True))
    short = [empty_frame(BLOCK_BYTES) for _ in SCATTERED]
    answers = tier.read_many([Read(object_name(number), into) for number, into in zip(SCATTERED, short, strict=True)])
    assert answers == [BLOCK_BYTES] * len(SCATTERED)
    assert all(into == sealed(number)[:BLOCK_BYTES] for number, into in zip(SCATTERED, short, strict=True))
    assert together.asked
    tier.close()


def test_one_bad_block_costs_one_object_on_the_way_down(tmp_path: Path, device: Device) -> None:
    tier = open_tier(tmp_path / "s")
    assert tier.write(object_name(100), sealed(100))
    # The batch is tried where it was to lie; then each goes alone, behind that.
    first = 1 + sealed(100).nbytes // BLOCK_BYTES
    whole = sum(sealed(number).nbytes for number in NUMBERS) // BLOCK_BYTES
    device.bad = ((first + whole - 1) * BLOCK_BYTES, (first + whole + 1) * BLOCK_BYTES)
    answers = _write_all(tier)
    assert [number for number, answer in zip(NUMBERS, answers, strict=True) if answer is not True] == [0]
    assert isinstance(answers[0], TierError)
    assert [look(tier, number) for number in NUMBERS] == ["absent", *["right"] * (len(NUMBERS) - 1)]
    assert all(segment.writers == 0 for segment in tier._pool._segments.values())
    check_accounts(tier, tmp_path / "s")
    tier.close()


def test_a_batch_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "s")
    size = SEGMENT_BYTES // 6 // BLOCK_BYTES * BLOCK_BYTES
    writes = [Write(object_name(number), frame_of(number, size)) for number in range(14)]
    assert tier.write_many(writes) == [True] * len(writes)
    reads = [Read(object_name(number), empty_frame(size)) for number in range(14)]
    assert tier.read_many(reads) == [size] * len(reads)
    assert all(read.into == write.frame for read, write in zip(reads, writes, strict=True))
    check_accounts(tier, tmp_path / "s")
    tier.close()


def test_a_file_that_was_cut_off_costs_what_lay_behind(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "s", direct_io="off")
    assert _write_all(tier) == [True] * len(NUMBERS)
    (extent,) = tier._pool.find([object_name(5)])
    assert extent is not None
    tier._pool.unpin([extent.segment])
    os.truncate(tmp_path / "s" / "segments" / extent.segment.name, extent.offset + BLOCK_BYTES)
    answers = _read_all(tier)
    assert answers == [sealed(number).nbytes if number < 5 else None for number in NUMBERS]
    assert [look(tier, number) for number in NUMBERS] == ["right"] * 5 + ["absent"] * 3
    tier.close()


def test_the_budget_admits_one_by_one(tmp_path: Path) -> None:
    size = frame_of(0).nbytes
    tier = open_tier(tmp_path / "s", write_bytes_per_day=24 * 6 * size)  # an hour's savings are six frames
    writes = [Write(object_name(number), frame_of(number)) for number in range(8)]
    answers = tier.write_many(writes)
    assert True in answers
    assert False in answers
    assert tier.contains([write.name for write in writes]) == answers
    assert tier.write_bytes["avoided"] == answers.count(False) * size
    tier.close()


def test_a_batch_survives_a_crash_once_it_was_synced(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "s")
    assert _write_all(tier) == [True] * len(NUMBERS)
    tier.close()
    tier = open_tier(tmp_path / "s")
    assert [look(tier, number) for number in NUMBERS] == ["right"] * len(NUMBERS)
    tier.close()
