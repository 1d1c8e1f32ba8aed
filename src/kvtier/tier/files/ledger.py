"""The cap file, with the byte count of a shared directory and the lock under which its names change.

The count is at least the bytes of all objects and temporary files while the lock is held. It is exact unless a process
was killed during a change. A change that adds bytes writes the count first; one that removes bytes writes it last. So,
at worst, a crash leaves the count too high, and a recount corrects it.
"""

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT
from kvtier.tier.files.safe_open import WRONG_KIND, Descriptor, open_file, read_file, set_aside
from kvtier.tier.files.store_lock import lock_file

_COUNT = struct.Struct("<8sQQ")  # magic, bytes in use, bytes in use with all bits flipped
_MAGIC = b"kvledger"
_ALL_BITS = (1 << 64) - 1

_REPLACED_MAX = 3


class Ledger:
    """The file `path`, with 24 bytes and a lock. Safe for several threads and processes.

    Args:
        path: the file, created with mode 0600 if missing. Anything else with that name is renamed.
        tier: name of the tier, for errors.
        deadline_s: longest wait for the lock.
        is_current: returns whether the store around the file is still the one that was opened. Otherwise a
            missing file is not created again, because the path leads to another disk if the store's is not mounted.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str, tier: str, deadline_s: float, is_current: Callable[[], bool]) -> None:
        self._path = path
        self._tier = tier
        self.deadline_s = deadline_s
        self._is_current = is_current
        self._threads = threading.Lock()  # a flock belongs to the open file, so it does not exclude threads
        self._descriptor = self._open(makes=True)
        self._last_bytes = 0
        self._written_bytes: int | None = None
        """Number of bytes in use, as last read or written under the current hold of the lock; None before that."""

    @contextmanager
    def locked(self) -> Generator[bool]:
        """Hold the lock. Yield whether the file was replaced since the last call, for example by a remount.

        Raises:
            TierError: the lock was not free within the deadline, or the file is gone.
        """
        if not self._threads.acquire(timeout=self.deadline_s):
            raise TierError(self._tier, f"another thread locked the cap file for {self.deadline_s} s")
        try:
            try:
                is_replaced = self._take()
            except OSError as error:
                raise TierError(self._tier, f"cap file: {error}") from error
            try:
                yield is_replaced
            finally:
                if self._descriptor.is_open:
                    fcntl.flock(self._descriptor.fileno(), fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def read(self) -> int | None:
        """Return the number of bytes in use, or None if the file is new or damaged. Call this only under the lock."""
        self._written_bytes = used_bytes = _unpacked(os.pread(self._descriptor.fileno(), _COUNT.size, 0))
        if used_bytes is not None:
            self._last_bytes = used_bytes
        return used_bytes

    def write(self, used_bytes: int) -> None:
        """Set the number of bytes in use. Call this only under the lock."""
        if used_bytes != self._written_bytes:  # a victim and its replacement often have the same size
            self._written_bytes = None
            os.pwrite(self._descriptor.fileno(), _COUNT.pack(_MAGIC, used_bytes, used_bytes ^ _ALL_BITS), 0)
            self._last_bytes = self._written_bytes = used_bytes

    def peek(self) -> int:
        """Return the number of bytes in use, possibly stale. This never waits."""
        if self._threads.acquire(blocking=False):
            try:
                if self._descriptor.is_open:
                    self.read()
            except OSError:
                pass  # the next operation under the lock reports the error
            finally:
                self._threads.release()
        return self._last_bytes

    def close(self) -> None:
        """Close the file. It stays open if a thread holds the lock beyond the deadline. Idempotent."""
        if self._threads.acquire(timeout=self.deadline_s):
            try:
                self._descriptor.close()
            finally:
                self._threads.release()

    def _take(self) -> bool:
        """Lock the file that is now at the path. Return whether it differs from the file of the last call."""
        is_replaced = False
        self._written_bytes = None
        for _ in range(_REPLACED_MAX):
            descriptor = self._descriptor.fileno()
            if not lock_file(descriptor, fcntl.LOCK_EX, self.deadline_s):
                raise TierError(self._tier, f"another process held the lock of {self._path} for {self.deadline_s} s")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self._path), os.fstat(descriptor)):
                    return is_replaced
            newer = self._open(makes=self._is_current())
            self._descriptor.close()
            self._descriptor = newer
            is_replaced = True
        raise TierError(self._tier, f"{self._path} was replaced {_REPLACED_MAX} times while it was locked")

    def _open(self, *, makes: bool) -> Descriptor:
        flags = os.O_RDWR | (os.O_CREAT if makes else 0)
        try:
            descriptor, status = open_file(self._path, flags)
        except OSError as error:
            if not makes or error.errno not in WRONG_KIND:
                raise
        else:
            if status.st_nlink <= 1:
                return Descriptor(descriptor)
            os.close(descriptor)  # the other link may lie outside the store
            if not makes:
                raise OSError(errno.EMLINK, "has another hard link", self._path)
        set_aside(self._path)
        return Descriptor(open_file(self._path, flags)[0])


def read_ledger(path: str) -> int | None:
    """Read the number of bytes in use from the cap file `path`, without a lock; None if it is missing or damaged."""
    try:
        # The check of the flipped bits detects a torn read.
        return _unpacked(read_file(path, _COUNT.size))
    except OSError:
        return None


def _unpacked(content: bytes) -> int | None:
    if len(content) != _COUNT.size:
        return None
    magic, used_bytes, flipped = _COUNT.unpack(content)
    is_count = magic == _MAGIC and flipped == used_bytes ^ _ALL_BITS and used_bytes % ALIGNMENT == 0
    return used_bytes if is_count else None
