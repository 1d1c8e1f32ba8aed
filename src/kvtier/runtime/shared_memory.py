"""Shares host memory among ranks with equal parts of a KV group, which then use one copy.

    exchange    Each rank sends its parts. The first rank with a part has created an unnamed memory file for it.
    map         All ranks with this part map the file. They open it by `/proc/PID/fd`, which only the same user can.
    exchange    Each rank sends how many bytes of a chunk it alone keeps. Their sum is the size of a chunk.

The first rank fills the slots and does all work for tiers. The others only scatter. A rank that cannot map the file
logs why. It keeps its own slots, as if no other rank had its part. Slots are counted after that, so the engine always
stays within its memory limit. The kernel frees a file when the last process that maps it has ended.
"""

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.layout import KvLayout, Part
from kvtier.runtime.arena import Bytes, as_bytes, chunk_bytes, slot_bytes

Exchange = Callable[[Any], list[Any]]
"""Waits for all ranks, and returns the value that each has passed, by rank."""

_CLOSED_ON_EXEC, _ALLOWS_SEALS = 1, 2
_ADD_SEALS, _SEALS = 1033, 1 | 2 | 4
"""Linux's numbers for file seals, which encrypt nothing: the file can neither shrink nor grow, and takes no further
seals. So no process can truncate memory that others have mapped. A Python built for an old system lacks these names and
`os.memfd_create`."""

_FAILURES = (OSError, OverflowError, ValueError, AttributeError)
"""Errors from the system. A C library without `memfd_create` causes the last one."""

logger = logging.getLogger(__name__)


class MemoryFile(NamedTuple):
    """The numbers by which other processes find a memory file."""

    process: int
    descriptor: int
    device: int
    inode: int


class HeldGroup(NamedTuple):
    """A rank's message to the others about one of its KV groups."""

    part: Part | None
    digest: bytes
    """Digest of the group's layout."""
    file: MemoryFile | None = None
    """The memory for the group's slots; None if another rank creates it or the system provides none."""


class SharedMemory(NamedTuple):
    """The memory on which the ranks have agreed, as one rank sees it."""

    chunk_bytes: int
    """Total host bytes of one chunk on all ranks."""
    regions: Mapping[int, Bytes] = MappingProxyType({})
    """Memory that this rank shares with others, by KV group. It is larger than the slots require."""


def share(layout: KvLayout, capacity_bytes: int, exchange: Exchange) -> SharedMemory:
    """Agree with the other ranks on shared memory. Every rank calls this at the same time.

    Args:
        layout: this rank's layout, with its parts.
        capacity_bytes: total host memory of all ranks.
        exchange: called twice. A rank that fails earlier passes None to it instead.

    Raises:
        ConfigError: another rank has failed.
    """
    made: dict[int, tuple[int, Bytes]] = {}
    regions: dict[int, Bytes] = {}
    why = ""
    try:
        for number, group in enumerate(layout.groups):
            size_bytes = capacity_bytes // chunk_bytes(layout) * slot_bytes(group)
            if size_bytes and group.part is not None and not group.copy:
                try:
                    made[number] = _made(size_bytes)
                except _FAILURES as error:
                    why = str(error)
        held = [
            HeldGroup(
                None if group.is_absent else group.part,
                layout.digest(number),
                _named(made[number][0]) if number in made else None,
            )
            for number, group in enumerate(layout.groups)
        ]
        found = exchange(held)
        if None in found:
            raise ConfigError(f"rank {found.index(None)} has failed to start; its own message says why")
        for number, group in enumerate(held):
            same = [them[number] for them in found if number < len(them) and them[number][:2] == group[:2]]
            file = next((it.file for it in same if it.file is not None), None)
            if group.part is None or len(same) < 2 or file is None:
                continue
            try:
                regions[number] = made[number][1] if number in made else _opened(file)
            except _FAILURES as error:
                why = str(error)
        if why:
            logger.warning("this rank keeps its own slots, so host memory holds fewer chunks: %s", why)
        own = (slot_bytes(it) for number, it in enumerate(layout.groups) if not it.copy or number not in regions)
        return SharedMemory(sum(exchange(sum(own))), regions)
    finally:
        for descriptor, _ in made.values():
            os.close(descriptor)


def _made(size_bytes: int) -> tuple[int, Bytes]:
    """Create a memory file. Return its descriptor and its bytes. Untouched pages use no memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.memfd_create(b"kvtier", _CLOSED_ON_EXEC | _ALLOWS_SEALS))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "the system cannot create a memory file")
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        return descriptor, as_bytes(mmap.mmap(descriptor, size_bytes))
    except BaseException:
        os.close(descriptor)
        raise


def _named(descriptor: int) -> MemoryFile:
    found = os.fstat(descriptor)
    return MemoryFile(os.getpid(), descriptor, found.st_dev, found.st_ino)


def _opened(file: MemoryFile) -> Bytes:
    """Map another process's memory file.

    Raises:
        OSError: the file cannot be opened, or it is a different file, as in another PID namespace.
    """
    path = Path(f"/proc/{file.process}/fd/{file.descriptor}")
    found = path.stat()  # checked before opening, because it may be a device
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        raise OSError(f"{path} is not the memory of the other rank; all ranks must run in one PID namespace")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return as_bytes(mmap.mmap(descriptor, found.st_size))
    finally:
        os.close(descriptor)
