"""Batches of the disk tier: neighbours take one system call, and one bad block costs one object."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from disk_world import SEGMENT_BYTES, check_accounts, look, open_tier, sealed

from kvtier.errors import TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import Read, Write
from kvtier.tier.disk.tier import DiskTier

NUMBERS = range(8)


class Device:
    """Counts the calls to segments' data, and fails those that touch `bad` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.bad: tuple[int, int] | None = None
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


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(open_tier(tmp_path / "s")) as tier:
        yield tier


def _write_all(tier: DiskTier, numbers: Sequence[int] = NUMBERS) -> list[bool | TierError]:
    return tier.write_many([Write(object_name(number), sealed(number)) for number in numbers])


def _read_all(tier: DiskTier, numbers: Sequence[int] = NUMBERS) -> list[int | TierError | None]:
    return tier.read_many([Read(object_name(number), empty_frame(1 << 17)) for number in numbers])


def test_neighbours_take_one_call_in_whatever_order(tmp_path: Path, device: Device, tier: DiskTier) -> None:
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


def test_one_bad_block_costs_one_object_on_the_way_up(device: Device, tier: DiskTier) -> None:
    assert _write_all(tier) == [True] * len(NUMBERS)
    (extent,) = tier._pool.locate([object_name(3)])
    assert extent is not None
    tier._pool.unpin([extent.segment])
    device.bad = (extent.offset, extent.offset + BLOCK_BYTES)
    answers = _read_all(tier)
    assert [number for number, answer in zip(NUMBERS, answers, strict=True) if isinstance(answer, TierError)] == [3]
    assert "planned" in str(answers[3])
    assert all(segment.pins == 0 for segment in tier._pool._segments.values())
    device.bad = None
    assert _read_all(tier) == [sealed(number).nbytes for number in NUMBERS]


SCATTERED = (6, 1, 4, 7, 0)
"""Not all of them neighbours of one another."""


def _right(tier: DiskTier, numbers: Sequence[int]) -> bool:
    reads = [Read(object_name(number), empty_frame(1 << 17)) for number in numbers]
    answers = tier.read_many(reads)
    return all(
        answer == sealed(number).nbytes and read.into[:answer] == sealed(number)
        for number, read, answer in zip(numbers, reads, answers, strict=True)
    )


def test_scattered_frames_take_a_call_for_each_run(device: Device, tier: DiskTier) -> None:
    assert _write_all(tier) == [True] * len(NUMBERS)
    device.calls.clear()
    assert _right(tier, SCATTERED)
    assert device.calls == ["preadv"] * 3, "0 and 1, 4, 6 and 7"


@pytest.mark.parametrize("spoilt", range(3))
@pytest.mark.parametrize("answer", [None, 0, BLOCK_BYTES])
def test_what_was_not_read_with_the_others_is_read_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch, spoilt: int, answer: int | None, tier: DiskTier
) -> None:
    """The call of one run ends with an error, or with fewer bytes."""
    assert _write_all(tier) == [True] * len(NUMBERS)
    device.calls.clear()
    preadv = os.preadv

    def spoil(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        if len(device.calls) != 1 + spoilt:
            return count
        if answer is None:
            raise OSError(errno.EIO, "planned")
        return answer

    monkeypatch.setattr(os, "preadv", spoil)
    is_alone = spoilt == 1
    assert _right(tier, SCATTERED) == (not is_alone or answer == BLOCK_BYTES)
    assert len(device.calls) == 3 + (2 if not is_alone else answer == BLOCK_BYTES)


def test_memory_that_the_device_does_not_take_is_filled_all_the_same(tier: DiskTier) -> None:
    """A caller's own, which is not aligned; or too small for the whole frame."""
    assert _write_all(tier) == [True] * len(NUMBERS)
    odd = [memoryview(bytearray(1 + sealed(number).nbytes))[1:] for number in SCATTERED]
    answers = tier.read_many([Read(object_name(number), into) for number, into in zip(SCATTERED, odd, strict=True)])
    assert answers == [sealed(number).nbytes for number in SCATTERED]
    assert all(into == sealed(number) for number, into in zip(SCATTERED, odd, strict=True))
    short = [empty_frame(BLOCK_BYTES) for _ in SCATTERED]
    answers = tier.read_many([Read(object_name(number), into) for number, into in zip(SCATTERED, short, strict=True)])
    assert answers == [BLOCK_BYTES] * len(SCATTERED)
    assert all(into == sealed(number)[:BLOCK_BYTES] for number, into in zip(SCATTERED, short, strict=True))


def test_one_bad_block_costs_one_object_on_the_way_down(tmp_path: Path, device: Device, tier: DiskTier) -> None:
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


def test_a_batch_goes_on_in_the_next_segment(tmp_path: Path, tier: DiskTier) -> None:
    size = SEGMENT_BYTES // 6 // BLOCK_BYTES * BLOCK_BYTES
    writes = [Write(object_name(number), frame_of(number, size)) for number in range(14)]
    assert tier.write_many(writes) == [True] * len(writes)
    reads = [Read(object_name(number), empty_frame(size)) for number in range(14)]
    assert tier.read_many(reads) == [size] * len(reads)
    assert all(read.into == write.frame for read, write in zip(reads, writes, strict=True))
    check_accounts(tier, tmp_path / "s")


def test_a_file_that_was_cut_off_costs_what_lay_behind(tmp_path: Path, open_disk: Callable[..., DiskTier]) -> None:
    tier = open_disk(tmp_path / "s", direct_io="off")
    assert _write_all(tier) == [True] * len(NUMBERS)
    (extent,) = tier._pool.locate([object_name(5)])
    assert extent is not None
    tier._pool.unpin([extent.segment])
    os.truncate(tmp_path / "s" / "segments" / extent.segment.name, extent.offset + BLOCK_BYTES)
    answers = _read_all(tier)
    assert answers == [sealed(number).nbytes if number < 5 else None for number in NUMBERS]
    assert [look(tier, number) for number in NUMBERS] == ["right"] * 5 + ["absent"] * 3


def test_the_budget_admits_one_by_one(tmp_path: Path, open_disk: Callable[..., DiskTier]) -> None:
    size = frame_of(0).nbytes
    tier = open_disk(tmp_path / "s", write_bytes_per_day=24 * 6 * size)  # an hour's savings are six frames
    writes = [Write(object_name(number), frame_of(number)) for number in range(8)]
    answers = tier.write_many(writes)
    assert True in answers
    assert False in answers
    assert tier.contains([write.name for write in writes]) == answers
    assert tier.write_bytes["avoided"] == answers.count(False) * size
