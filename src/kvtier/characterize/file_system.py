"""What a file system says of its device: where the files of a directory lie, and its allocation groups.

See `Documentation/filesystems/fiemap.rst` of the kernel, and `ioctl_xfs_fsgeometry(2)`.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from kvtier.characterize.block_devices import BlockDevice, event_number, find_number
from kvtier.characterize.events import SECTOR_BYTES, IoLayer
from kvtier.probe.facts import read_mounts
from kvtier.tier.safe_open import folder_at, open_file

FIEMAP, FIEMAP_SYNC = 0xC020660B, 1
HEADER = struct.Struct("=QQIIII")
EXTENT = np.dtype([("file", "u8"), ("begin", "u8"), ("bytes", "u8"), ("_", "u8", 2), ("flags", "u4"), ("__", "u4", 3)])
EXTENTS = 512
"""Extents that one call returns."""
NO_ADDRESS = 0x2 | 0x4 | 0x200
"""Flags of what has no address of its own yet: unknown, delayed, or inside of the inode."""
GEOMETRY, GEOMETRY_BYTES = 0x80705864, 112
"""``XFS_IOC_FSGEOMETRY_V1``."""


class Spans(NamedTuple):
    """Parts of a disk, in bytes."""

    begin: np.ndarray
    """Sorted; parts may overlap."""
    reach: np.ndarray
    """The end of all parts up to this one."""

    def hold(self, position: np.ndarray) -> np.ndarray:
        """Which positions lie in a part."""
        place = np.searchsorted(self.begin, position, side="right") - 1
        reach = np.append(self.reach, np.uint64(0))  # -1: before the first part
        return position < reach[place]


def spans_of(directory: Path, device: BlockDevice) -> Spans:
    """The parts of the disk that hold the files below `directory`; of files that cannot be read, none."""
    found = [np.zeros(0, EXTENT)]
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                descriptor, status = open_file(f"{folder}/{name}", os.O_RDONLY)
                with os.fdopen(descriptor) as file:  # which another device, mounted below the directory, may hold
                    found += _extents(file) if event_number(status.st_dev) == device.number else ()
    extents = np.concatenate(found)
    extents = np.sort(extents[extents["flags"] & NO_ADDRESS == 0], order="begin")
    begin = extents["begin"] + np.uint64(device.first_sector * SECTOR_BYTES)
    return Spans(begin, np.maximum.accumulate(begin + extents["bytes"]))


def within(requests: np.ndarray, spans: list[Spans]) -> np.ndarray:
    """The rows of `requests` that begin in one of `spans`, and all of the application, which has no addresses."""
    kept = requests["layer"] == IoLayer.APPLICATION
    for each in spans:
        kept |= each.hold(requests["position"])
    return requests[kept]


def allocation_groups(disk: str) -> dict[str, list[dict[str, int]]]:
    """Number, size and begin of the allocation groups of each XFS on a disk, as a fact; else empty."""
    found: dict[int, dict[str, int]] = {}
    for mount in read_mounts():
        device = find_number(os.makedev(*map(int, mount.device.split(":")))) if mount.kind == "xfs" else None
        if device is not None and device.disk == disk:
            geometry = bytearray(GEOMETRY_BYTES)
            with suppress(OSError), folder_at(Path(mount.point)) as root:
                fcntl.ioctl(root, GEOMETRY, geometry)
                block_bytes, _, blocks, count = struct.unpack_from("=4I", geometry)
                begin = device.first_sector * SECTOR_BYTES
                found[begin] = {"count": count, "bytes": blocks * block_bytes, "begin": begin}
    return {"allocation_groups": [found[begin] for begin in sorted(found)]} if found else {}


def _extents(file: TextIO) -> Iterator[np.ndarray]:
    begin = 0
    while True:
        buffer = bytearray(HEADER.pack(begin, (1 << 64) - 1 - begin, FIEMAP_SYNC, 0, EXTENTS, 0))
        buffer += bytes(EXTENTS * EXTENT.itemsize)
        fcntl.ioctl(file, FIEMAP, buffer)
        found = np.frombuffer(buffer, EXTENT, HEADER.unpack_from(buffer)[3], HEADER.size)
        yield found
        if len(found) < EXTENTS:
            return
        begin = int(found["file"][-1] + found["bytes"][-1])
