"""Which alignment direct I/O wants at a path, found by trying: the smallest that a read accepts."""

import errno
import os
from pathlib import Path

from kvtier.tier.direct import aligned_buffer

CANDIDATES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def direct_alignment(directory: Path) -> int | None:
    """The smallest alignment of offset, length and memory, in bytes; None where the file system has no direct I/O.

    Makes a file in `directory` that has no name by then.

    Raises:
        OSError: the directory cannot be written.
    """
    largest = CANDIDATES[-1]
    path = directory / "alignment"
    path.write_bytes(os.urandom(2 * largest))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise
    finally:
        path.unlink()
    buffer = aligned_buffer(2 * largest)
    try:
        return next((size for size in CANDIDATES if _accepts(descriptor, buffer[size : 2 * size], size)), None)
    finally:
        os.close(descriptor)


def _accepts(descriptor: int, into: memoryview, offset: int) -> bool:
    """Whether memory, length and offset that are multiples of `offset` and of nothing larger are fine."""
    try:
        return os.preadv(descriptor, [into], offset) == len(into)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
