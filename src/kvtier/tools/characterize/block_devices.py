"""Finds the block devices that I/O requests name on this machine, and where files and allocation groups are on them.

A block device has a path, lower devices on which it is stacked, and limits of its queue. The kernel's
`Documentation/filesystems/fiemap.rst` describes extents of files, and `ioctl_xfs_fsgeometry(2)` allocation groups.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tier.files.safe_open import folder_at, open_file
from kvtier.tools.characterize.io_trace import SECTOR_BYTES, IoLayer
from kvtier.tools.machine_facts import read_mounts

SYSFS = Path("/sys")
MINOR_BITS = 20
"""Bits of the minor number in a device number of the kernel's events. The major number is above them."""
QUEUE_FACTS = (
    "max_sectors_kb", "max_hw_sectors_kb", "nr_requests", "scheduler", "logical_block_size", "rotational",
    "read_ahead_kb",
)  # fmt: skip
NO_DISKS = ("loop", "ram", "zram", "fd", "sr")
"""Names, without numbers, of devices that have no storage of their own or are removable.

They are measured only if the user names them."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A disk, a partition of a disk, or a device that is stacked on others."""

    name: str
    """The device's name in sysfs, such as ``nvme0n1p2``."""
    number: int
    """Device number in the form of the kernel's events."""
    disk: str
    """Name of the whole disk. It equals `name` unless this is a partition."""
    disk_number: int
    first_sector: int = 0
    sectors: int | None = None
    """Length of a partition in sectors; None for a whole disk."""
    partitions: tuple[int, ...] = ()
    """Numbers of a whole disk's partitions. A bio names the partition, but a request names the disk."""
    below: tuple[str, ...] = ()
    """Devices on which this one is stacked (dm, md)."""

    @property
    def folder(self) -> Path:
        """The folder of the whole disk in sysfs."""
        return SYSFS / "block" / self.disk

    def exists(self) -> bool:
        """Return whether the device still exists."""
        return self.folder.exists()

    def facts(self) -> dict[str, Any]:
        """Return the limits of the queue, as far as the kernel reports them. Figures are integers."""
        found: dict[str, Any] = {}
        for name in QUEUE_FACTS:
            text = _read(self.folder / "queue" / name)
            if text is not None:
                selected = text.partition("[")[2].partition("]")[0]  # schedulers are listed as: none [mq-deadline]
                found[name] = int(text) if text.isdecimal() else selected or text
        model = _read(self.folder / "device" / "model")
        return found | ({"model": model} if model else {})


def event_number(device: int) -> int:
    """Convert a device number of `os.stat` to the form of the kernel's events."""
    return os.major(device) << MINOR_BITS | os.minor(device)


def find_device(wanted: str) -> BlockDevice:
    """Find the device that `wanted` means: a node such as /dev/nvme0n1, its name, or a file or directory on the device.

    Raises:
        ConfigError: there is no such device, or the file system is on no device.
    """
    path = Path(wanted)
    if "/" not in wanted:
        node = Path("/dev") / wanted
        path = node if node.is_block_device() else path
    try:
        if not wanted:
            raise FileNotFoundError(errno.ENOENT, "no name")
        status = path.stat()
    except OSError as error:
        names = ", ".join(it.name for it in disks()) or "none"
        raise ConfigError(
            f"--device {wanted}: {error.strerror or error}; allowed: a block device or a path on one; disks: {names}"
        ) from error
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    found = find_number(number)
    if found is not None:
        return found
    raise ConfigError(
        f"--device {wanted}: it is on no block device (number {os.major(number)}:{os.minor(number)}: tmpfs, a "
        f"network, or a file system over several devices); allowed: the device itself, such as "
        f"/dev/{next((it.name for it in disks()), 'nvme0n1')}"
    )


def find_number(number: int) -> BlockDevice | None:
    """Find the device with this number of `os.stat`, or return None if it is not a block device."""
    folder = SYSFS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    return _device(number) if folder.exists() else None


def disks() -> list[BlockDevice]:
    """Return the whole disks that are neither stacked on other devices nor one of `NO_DISKS`."""
    return [
        _named(folder)
        for folder in sorted((SYSFS / "block").glob("*"))
        if folder.name.rstrip("0123456789") not in NO_DISKS and not _names(folder / "slaves")
    ]


def lowest(device: BlockDevice) -> list[BlockDevice]:
    """Return the disks at the bottom of `device`, or `device` itself if it is not stacked on others."""
    if not device.below:
        return [device]
    found: dict[str, BlockDevice] = {}
    for name in device.below:
        found |= {it.name: it for it in lowest(_named(SYSFS / "class" / "block" / name))}
    return list(found.values())


def _named(folder: Path) -> BlockDevice:
    number = _number(folder / "dev")
    return _device(os.makedev(number >> MINOR_BITS, number & ((1 << MINOR_BITS) - 1)))


def _number(path: Path) -> int:
    """Read a number such as ``259:1`` from a file of sysfs, and return it in the form of the kernel's events."""
    major, _, minor = (_read(path) or "0:0").partition(":")
    return int(major) << MINOR_BITS | int(minor)


def _device(number: int) -> BlockDevice:
    folder = (SYSFS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve()
    is_partition = (folder / "partition").exists()
    disk = folder.parent if is_partition else folder
    return BlockDevice(
        name=folder.name,
        number=event_number(number),
        disk=disk.name,
        disk_number=_number(disk / "dev"),
        first_sector=int(_read(folder / "start") or 0) if is_partition else 0,
        sectors=int(_read(folder / "size") or 0) if is_partition else None,
        partitions=() if is_partition else tuple(_number(it.parent / "dev") for it in folder.glob("*/partition")),
        below=tuple(_names(disk / "slaves")),
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(it.name for it in folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


FIEMAP, FIEMAP_SYNC = 0xC020660B, 1
HEADER = struct.Struct("=QQIIII")
EXTENT = np.dtype([("file", "u8"), ("begin", "u8"), ("bytes", "u8"), ("_", "u8", 2), ("flags", "u4"), ("__", "u4", 3)])
EXTENTS = 512
"""Most extents that one call returns."""
NO_ADDRESS = 0x2 | 0x4 | 0x200
"""Flags of extents without their own address: unknown, delayed, or inside the inode."""
GEOMETRY, GEOMETRY_BYTES = 0x80705864, 112
"""Number and size of ``XFS_IOC_FSGEOMETRY_V1``."""


class Spans(NamedTuple):
    """Parts of a disk, in bytes."""

    begin: np.ndarray
    """Starts of the parts, sorted. Parts may overlap."""
    reach: np.ndarray
    """The largest end among each part and all earlier ones."""

    def hold(self, position: np.ndarray) -> np.ndarray:
        """Return whether each position lies in a part."""
        place = np.searchsorted(self.begin, position, side="right") - 1
        reach = np.append(self.reach, np.uint64(0))  # index -1 stands for positions before the first part
        return position < reach[place]


def spans_of(directory: Path, device: BlockDevice) -> Spans:
    """Return the parts of the disk that hold the files below `directory`. Files that cannot be read are left out."""
    found = [np.zeros(0, EXTENT)]
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                descriptor, status = open_file(f"{folder}/{name}", os.O_RDONLY)
                with os.fdopen(descriptor) as file:  # may be on another device that is mounted below the directory
                    found += _extents(file) if event_number(status.st_dev) == device.number else ()
    extents = np.concatenate(found)
    extents = np.sort(extents[extents["flags"] & NO_ADDRESS == 0], order="begin")
    begin = extents["begin"] + np.uint64(device.first_sector * SECTOR_BYTES)
    return Spans(begin, np.maximum.accumulate(begin + extents["bytes"]))


def within(requests: np.ndarray, spans: list[Spans]) -> np.ndarray:
    """Return the `requests` that start in one of `spans`, and all of the application, which have no address."""
    kept = requests["layer"] == IoLayer.APPLICATION
    for each in spans:
        kept |= each.hold(requests["position"])
    return requests[kept]


def allocation_groups(disk: str) -> dict[str, list[dict[str, int]]]:
    """Return the number, the size and the start of the allocation groups of each XFS on a disk, if any."""
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
