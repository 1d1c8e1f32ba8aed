"""Reads and writes whole buffers, with direct I/O if the buffer, offset and file system allow it.

Direct I/O moves bytes between the device and the caller's memory without a copy in the page cache. Such a copy would
duplicate host memory.
"""

# Paths are plain strings here.
# ruff: noqa: PTH118

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT

DirectIo = Literal["auto", "on", "off"]


def is_aligned(view: memoryview, offset: int) -> bool:
    """Return whether direct I/O works for `view` (C-contiguous bytes) at `offset`."""
    if view.nbytes == 0 or view.nbytes % ALIGNMENT or offset % ALIGNMENT:
        return False
    import numpy as np  # noqa: PLC0415 - commands that only check settings do not need it

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT == 0


def can_direct(directory: str, descriptor: int | None = None) -> bool:
    """Return whether the file system of `directory` supports direct I/O, tested with one block.

    Args:
        directory: a name relative to `descriptor`, or a path.
        descriptor: descriptor of a directory.

    Raises:
        OSError: the directory cannot be written.
    """
    path = os.path.join(directory, f"probe_{os.urandom(8).hex()}")
    block = aligned_buffer(ALIGNMENT)
    block[:] = os.urandom(ALIGNMENT)
    returned = aligned_buffer(ALIGNMENT)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    try:
        opened = os.open(path, flags | os.O_DIRECT, 0o600, dir_fd=descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _unlink_if_there(path, descriptor)  # some file systems create the file before they fail to open it
        return False
    try:
        _unlink_if_there(path, descriptor)  # before the write, so that the block never counts as stored
        os.pwritev(opened, [block], 0)
        return os.preadv(opened, [returned], 0) == ALIGNMENT and returned == block
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return False
        raise
    finally:
        os.close(opened)


def choose_direct(tier: str, place: str, direct_io: str, descriptor: int | None = None) -> bool:
    """Decide, by a trial, whether the tier uses direct I/O in the directory `place`, or in `descriptor` if given.

    Raises:
        ConfigError: `direct_io` is "on", but direct I/O is impossible.
        OSError: the directory cannot be written.
    """
    if direct_io == "off":
        return False
    is_possible = can_direct(place if descriptor is None else ".", descriptor)
    if direct_io == "on" and not is_possible:
        raise ConfigError(
            f"tier {tier!r}: direct_io is 'on', but the file system of {place!r} has no direct I/O; "
            "allowed there: 'auto', 'off'"
        )
    return is_possible


def aligned_buffer(byte_count: int) -> memoryview:
    """Return `byte_count` writable bytes, aligned to `ALIGNMENT`."""
    return memoryview(mmap.mmap(-1, max(byte_count, 1)))[:byte_count]


def write_all(descriptor: int, frame: memoryview, *, is_sized: bool = False) -> None:
    """Make `frame` the whole content of the file `descriptor`, which may be open with O_DIRECT.

    Args:
        descriptor: descriptor of the file.
        frame: all bytes of the file.
        is_sized: whether the file has this length. It is also True for an empty file on a network file system, where
            setting the length costs a round trip.

    Raises:
        OSError: the write fails, for example because the disk is full.
    """
    if not is_sized:  # set the length first, so that the file system allocates the file in one step
        os.ftruncate(descriptor, frame.nbytes)
    done = 0
    while done < frame.nbytes:
        if done % ALIGNMENT:
            _leave_direct(descriptor)
        try:
            done += os.pwritev(descriptor, [frame[done:]], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise


def read_part(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from `offset` until `into` is full or the file ends, and return the number of bytes read.

    Raises:
        OSError: the device or the file system fails.
    """
    done = 0
    while done < into.nbytes:
        if done % ALIGNMENT:  # usually the end of the file; a buffered read decides
            _leave_direct(descriptor)
        try:
            count = os.preadv(descriptor, [into[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise
            continue
        if count == 0:
            break
        done += count
    return done


def forget_cached(descriptor: int, offset: int, byte_count: int) -> None:
    """Drop bytes just read or written from the page cache."""
    os.posix_fadvise(descriptor, offset, byte_count, os.POSIX_FADV_DONTNEED)


def _leave_direct(descriptor: int) -> bool:
    """Switch to buffered I/O. Return whether direct I/O was on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def _unlink_if_there(path: str, directory: int | None) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=directory)
