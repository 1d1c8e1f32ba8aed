"""The lock of a store: a flock on its marker, exclusive or shared by all processes that have the store open."""

import errno
import fcntl
import os
import time
from contextlib import suppress

from kvtier.errors import TierError
from kvtier.tier.files.safe_open import Descriptor, is_at, open_file

RETRY_FIRST_S = 0.0001
RETRY_LONGEST_S = 0.005
REPAIR_WAIT_S = 1.0
"""Longest wait for a repair to end, including a repair's wait for another repair."""
_BUSY = {errno.EWOULDBLOCK, errno.EACCES}


def lock_file(descriptor: int, mode: int, deadline_s: float) -> bool:
    """Take the flock `mode` (LOCK_SH or LOCK_EX). Return False if it is not free within `deadline_s` seconds.

    This polls instead of blocking in the kernel, because the holder may be a stopped process.

    Raises:
        OSError: the file system cannot lock.
    """
    end_s = time.monotonic() + deadline_s
    pause_s = RETRY_FIRST_S
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        else:
            return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_LONGEST_S)


class StoreLock:
    """This process's flock on the marker at `path`.

    Raises:
        OSError: the marker is missing, not a regular file, or cannot be written.
    """

    def __init__(self, path: str, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._descriptor, self._root = _open(path)

    def acquire(self, deadline_s: float) -> bool:
        """Lock the store. Return True if the lock is exclusive. No other process can then open the store until `share`.

        Raises:
            TierError: another process held an exclusive lock for `deadline_s` seconds.
        """
        if lock_file(self._descriptor.fileno(), fcntl.LOCK_EX, 0.0):
            return True
        self.share(deadline_s)
        return False

    def share(self, deadline_s: float) -> None:
        """Take a shared lock, or downgrade an exclusive one.

        Raises:
            TierError: another process held an exclusive lock for `deadline_s` seconds.
        """
        if not lock_file(self._descriptor.fileno(), fcntl.LOCK_SH, deadline_s):
            raise TierError(self._tier, f"another process held an exclusive lock on {self._path} for {deadline_s} s")

    def exclude(self, deadline_s: float) -> None:
        """Take an exclusive lock and keep it, so that only this process uses the store.

        Raises:
            TierError: another process has the store open, or may have it open under a marker that replaced this one.
        """
        if not lock_file(self._descriptor.fileno(), fcntl.LOCK_EX, deadline_s) or not self.is_current():
            raise TierError(
                self._tier,
                f"root {os.path.dirname(self._path)!r} is in use by another process; "  # noqa: PTH120
                "allowed: a separate directory for each process",
            )

    def move(self) -> None:
        """Release the lock, and switch to the file that is now at the marker's path.

        Raises:
            OSError: there is no marker.
        """
        descriptor, root = _open(self._path)
        self.release()
        self._descriptor, self._root = descriptor, root

    def is_current(self) -> bool:
        """Return whether the locked file is still the one at the marker's path."""
        return self._descriptor.is_open and is_at(self._path, self._descriptor.fileno())

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._descriptor.close()
        self._root.close()


def is_locked(marker: str) -> int | None:
    """Return 1 if a process has the store of this marker open, 0 if none has, and None if unknown."""
    with suppress(OSError):
        descriptor, _ = open_file(marker, os.O_RDONLY)
        try:
            return int(not lock_file(descriptor, fcntl.LOCK_EX, 0.0))
        finally:
            os.close(descriptor)
    return None


def _open(path: str) -> tuple[Descriptor, Descriptor]:
    """Open the marker, and its directory with a shared lock that a repair of a lost marker detects."""
    marker = Descriptor(open_file(path, os.O_RDWR)[0])  # NFS grants exclusive locks only on files open for writing
    root = Descriptor(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # noqa: PTH120
    with suppress(OSError):  # NFS cannot lock a directory
        lock_file(root.fileno(), fcntl.LOCK_SH, REPAIR_WAIT_S)
    return marker, root
