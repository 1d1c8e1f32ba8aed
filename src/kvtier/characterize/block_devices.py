"""Block devices from sysfs: which one a path means, what it is stacked on, and what its queue allows."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

SYSFS = Path("/sys")
MINOR_BITS = 20
"""The kernel's own form of a device number, in its events: the major number above twenty bits of the minor number."""
QUEUE_FACTS = (
    "max_sectors_kb", "max_hw_sectors_kb", "nr_requests", "scheduler", "logical_block_size", "rotational",
    "read_ahead_kb",
)  # fmt: skip
NO_DISKS = ("loop", "ram", "zram", "fd", "sr")
"""Names of devices without storage of their own, which are measured only when they are named."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A disk, a partition of it, or a device stacked on others."""

    name: str
    """Such as ``nvme0n1p2``."""
    number: int
    """As in the kernel's events."""
    disk: str
    """The whole disk; `name` unless this is a partition."""
    disk_number: int
    first_sector: int = 0
    sectors: int | None = None
    """Length of a partition; None is a whole disk."""
    partitions: tuple[int, ...] = ()
    """Numbers of a whole disk's partitions: bios name the partition, requests the disk."""
    below: tuple[str, ...] = ()
    """Devices that this one is stacked on (dm, md)."""

    @property
    def folder(self) -> Path:
        """The folder of the whole disk in sysfs."""
        return SYSFS / "block" / self.disk

    def exists(self) -> bool:
        """Whether the device is still there."""
        return self.folder.exists()

    def facts(self) -> dict[str, Any]:
        """What the queue allows; figures as integers, and only what the kernel tells."""
        found: dict[str, Any] = {}
        for name in QUEUE_FACTS:
            text = _read(self.folder / "queue" / name)
            if text is not None:
                selected = text.partition("[")[2].partition("]")[0]  # of the schedulers: none [mq-deadline]
                found[name] = int(text) if text.isdecimal() else selected or text
        model = _read(self.folder / "device" / "model")
        return found | ({"model": model} if model else {})


def event_number(device: int) -> int:
    """The number of `os.stat` as the kernel's events have it."""
    return os.major(device) << MINOR_BITS | os.minor(device)


def find_device(wanted: str) -> BlockDevice:
    """The device that `wanted` means: a node such as /dev/nvme0n1, its name, or a file or directory on it.

    Raises:
        ConfigError: there is no such device, or the file system has none.
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
        f"--device {wanted}: no block device lies below it (number {os.major(number)}:{os.minor(number)}: tmpfs, a "
        f"network, or a file system over several devices); allowed: the device itself, such as "
        f"/dev/{next((it.name for it in disks()), 'nvme0n1')}"
    )


def find_number(number: int) -> BlockDevice | None:
    """The device of this number of `os.stat`; None if it is not a block device."""
    folder = SYSFS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    return _device(number) if folder.exists() else None


def disks() -> list[BlockDevice]:
    """Whole disks that are stacked on no other: the lowest layer. Loop and memory devices are not among them."""
    return [
        _named(folder)
        for folder in sorted((SYSFS / "block").glob("*"))
        if folder.name.rstrip("0123456789") not in NO_DISKS and not _names(folder / "slaves")
    ]


def lowest(device: BlockDevice) -> list[BlockDevice]:
    """The disks that `device` finally lies on; itself if it is stacked on nothing."""
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
    """The number in a file of sysfs, such as ``259:1``, as the kernel's events have it."""
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
