"""What the disk tier's fault tests share: real frames, and a device that loses, tears and reorders writes."""

import os
import random
import shutil
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvtier.codec.frame import OPEN_SCRATCH_BYTES, frame_bytes, head_bytes, pack, unpack_in_place
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.errors import CorruptChunkError
from kvtier.layout import ALIGNMENT, GroupLayout, History
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.base import Write
from kvtier.tier.disk.segment import Segment
from kvtier.tier.disk.tier import DiskTier

LAYOUTS = tuple(GroupLayout(History(), (4096 * blocks,) * 2, "test/bytes") for blocks in (1, 2, 5))
SEGMENT_BYTES = 64 * ALIGNMENT
CAPACITY_BYTES = 6 * SEGMENT_BYTES


def group_of(number: int) -> GroupLayout:
    """The layout of object `number`."""
    return LAYOUTS[number % len(LAYOUTS)]


def identity(number: int) -> Identity:
    """Name of object `number`."""
    return Identity(object_name(number), b"f" * 16)


@lru_cache(maxsize=256)
def payload_of(number: int) -> bytes:
    """The bytes of object `number`."""
    return random.Random(number).randbytes(group_of(number).payload_bytes)


def sealed(number: int) -> memoryview:
    """The frame of object `number`."""
    group = group_of(number)
    slot = empty_frame(frame_bytes(group))
    slot[head_bytes(group) :] = payload_of(number)
    return pack(slot, group, identity(number), Raw())


def write_all(tier: DiskTier, numbers: Iterable[int]) -> None:
    """Write objects, several at once, some perhaps twice; each must be there then."""
    told = tier.write_many([Write(object_name(number), sealed(number)) for number in dict.fromkeys(numbers)])
    assert set(told) == {True}, told


def look(tier: DiskTier, number: int) -> str:
    """What a reader gets for object `number`: "right", "absent", "refused", or "wrong", which must never be."""
    group = group_of(number)
    slot = empty_frame(frame_bytes(group))
    count = tier.read(object_name(number), slot)
    if count is None:
        return "absent"
    try:
        unpack_in_place(slot, count, group, identity(number), memoryview(bytearray(OPEN_SCRATCH_BYTES)))
    except CorruptChunkError:
        return "refused"
    return "right" if slot[head_bytes(group) :] == payload_of(number) else "wrong"


class SteppedDiskTier(DiskTier):
    """A disk tier whose thread does not wake for a new segment, also after the store was opened again."""

    def _open_pool(self, marker):
        pool = super()._open_pool(marker)
        pool._on_turn = lambda: None
        return pool


def open_tier(root: Path, capacity_bytes: int = CAPACITY_BYTES, segment_bytes: int = SEGMENT_BYTES, **settings):
    """A tier of small segments, which a test syncs and prepares."""
    chosen = {"capacity_bytes": capacity_bytes, "segment_bytes": segment_bytes, "sync_interval_s": 3600.0, **settings}
    return SteppedDiskTier(root, **chosen)


def abandon(tier: DiskTier) -> None:
    """Let go of the files as the end of the process would: nothing more is written."""
    tier._guard.close()
    tier._is_closing = True
    tier._wake.set()
    tier._keeper.join(10)
    tier._pool.close()
    tier._store_lock.release()


def allocated_bytes(root: Path) -> int:
    """What the segments take on the device."""
    statuses = [path.lstat() for path in (root / "segments").iterdir()]
    return sum(status.st_blocks * 512 for status in statuses if stat.S_ISREG(status.st_mode))


def check_accounts(tier: DiskTier, root: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
    """The counts are what is there, and the cap holds."""
    scanned = list(tier.scan())
    assert tier.object_count == len(scanned) == len(dict(scanned))
    assert tier.used_bytes == allocated_bytes(root) <= capacity_bytes


class Recorder:
    """Everything that segments write, in order, to be played again with faults. A flush is an entry without bytes."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[tuple[str, int, bytes | None]] = []
        write, write_run, flush = Segment._write_file, Segment.write_run, Segment.flush

        def recorded_write(segment, frame, offset):
            write(segment, frame, offset)
            self.log.append((segment.name, offset, bytes(frame)))

        def recorded_run(segment, frames, offset):
            is_written = write_run(segment, frames, offset)
            self.log.append((segment.name, offset, b"".join(frames)))
            return is_written

        def recorded_flush(segment):
            flush(segment)
            self.log.append((segment.name, 0, None))

        monkeypatch.setattr(Segment, "_write_file", recorded_write)
        monkeypatch.setattr(Segment, "write_run", recorded_run)
        monkeypatch.setattr(Segment, "flush", recorded_flush)

    def play(self, root: Path, stop: int, segment_bytes: int, chance: random.Random) -> None:
        """Make the segments at `root` what a power loss after `stop` entries may leave.

        What a flush followed is there. Each other write is there, lost, torn at any 4 KiB, or done twice; and writes
        that overlap may have happened in any order.
        """
        flushed: dict[str, int] = {}
        for at, (file, _, content) in enumerate(self.log[:stop]):
            if content is None:
                flushed[file] = at
        images: dict[str, np.ndarray] = {}
        late: list[tuple[str, int, bytes]] = []
        for at, (file, offset, content) in enumerate(self.log[:stop]):
            image = images.setdefault(file, np.zeros(segment_bytes, np.uint8))
            if content is None:
                continue
            if at < flushed.get(file, -1):
                image[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
            else:
                late.append((file, offset, content))
        late += chance.sample(late, len(late) // 8)  # done twice
        if chance.random() < 0.5:
            chance.shuffle(late)
        for file, offset, content in late:
            fate = chance.random()
            if fate < 0.3:
                continue
            for start in range(0, len(content), ALIGNMENT):
                if fate < 0.7 or chance.random() < 0.5:
                    part = np.frombuffer(content, np.uint8)[start : start + ALIGNMENT]
                    images[file][offset + start : offset + start + ALIGNMENT] = part
        (root / "segments").mkdir(parents=True, exist_ok=True)
        for file, image in images.items():
            path = root / "segments" / file
            with open(path, "wb") as target:
                os.posix_fallocate(target.fileno(), 0, segment_bytes)
                target.write(image.tobytes())


def copy_store(source: Path, target: Path) -> None:
    """A copy that is allocated like the original."""
    shutil.copytree(source, target)
    for path in (target / "segments").iterdir():
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
