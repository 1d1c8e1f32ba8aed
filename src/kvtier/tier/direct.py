"""Whole-buffer reads and writes, with direct I/O where buffer, offset and file system allow it.

Direct I/O moves bytes between the device and the caller's memory without a copy in the page cache, which would only
hold a second time what the host tier is there to hold.
"""

# Descriptors and plain strings.
# ruff: noqa: PTH118

import errno
import fcntl
import mmap
import os
from contextlib import suppress

import numpy as np

from kvtier.layout import ALIGNMENT


def is_aligned(view: memoryview, offset: int) -> bool:
    """Whether `view` (C-contiguous bytes) may be read from or written to `offset` with direct I/O."""
    if view.nbytes == 0 or view.nbytes % ALIGNMENT or offset % ALIGNMENT:
        return False
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT == 0


def can_direct(directory: str, descriptor: int | None = None) -> bool:
    """Whether files in `directory` can be written and read with direct I/O, tried with one block.

    Args:
        directory: relative to `descriptor`, or a path.
        descriptor: of a directory.

    Raises:
        OSError: the directory cannot be written at all.
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
        _unlink_if_there(path, descriptor)  # some file systems make the file and then refuse to open it
        return False
    try:
        _unlink_if_there(path, descriptor)  # first, so that the block never counts as part of the store
        os.pwritev(opened, [block], 0)
        return os.preadv(opened, [returned], 0) == ALIGNMENT and returned == block
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return False
        raise
    finally:
        os.close(opened)


def aligned_buffer(byte_count: int) -> memoryview:
    """`byte_count` writable bytes that begin at a multiple of `ALIGNMENT`."""
    return memoryview(mmap.mmap(-1, max(byte_count, 1)))[:byte_count]


def write_all(descriptor: int, frame: memoryview) -> None:
    """Make `frame` all that is in the file `descriptor`, which may have been opened with O_DIRECT.

    Raises:
        OSError: the file system refuses, for example because the disk is full.
    """
    # With the length known first, the file system lays the file out in one go.
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
    """Read from `offset` on until `into` is full or the file ends; returns the bytes read.

    Raises:
        OSError: the device or the file system fails.
    """
    done = 0
    while done < into.nbytes:
        if done % ALIGNMENT:  # the end of the file, as a rule; only a buffered read can tell
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
    """Tell the kernel that what was just read or written through the page cache is not needed there."""
    os.posix_fadvise(descriptor, offset, byte_count, os.POSIX_FADV_DONTNEED)


def _leave_direct(descriptor: int) -> bool:
    """Go on with buffered I/O; whether that is a change."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def _unlink_if_there(path: str, directory: int | None) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=directory)
