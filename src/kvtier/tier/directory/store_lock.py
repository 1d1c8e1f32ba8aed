"""The lock of a store: each process holds a shared flock on the marker; an exclusive one proves it is alone."""

import fcntl
import os

from kvtier.errors import TierError
from kvtier.tier.cap_file import lock_file
from kvtier.tier.safe_open import Descriptor, is_at, open_file


class StoreLock:
    """A flock of this process on the marker at `path`.

    Raises:
        OSError: the marker is missing, not a regular file, or cannot be written.
    """

    def __init__(self, path: str, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._descriptor = _open(path)

    def acquire(self, deadline_s: float) -> bool:
        """Lock the store. True when the lock is exclusive: no other process can open the store until `share`.

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

    def reacquire(self, deadline_s: float) -> None:
        """Lock the file that is at the marker's path now.

        Raises:
            OSError: there is no marker.
            TierError: another process held an exclusive lock for `deadline_s` seconds.
        """
        descriptor = _open(self._path)
        self.release()
        self._descriptor = descriptor
        self.share(deadline_s)

    def is_current(self) -> bool:
        """Whether the locked file is still the one at the marker's path."""
        return self._descriptor.is_open and is_at(self._path, self._descriptor.fileno())

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._descriptor.close()


def _open(path: str) -> Descriptor:
    return Descriptor(open_file(path, os.O_RDWR)[0])  # NFS grants exclusive locks only on files open for writing
