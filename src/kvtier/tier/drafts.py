"""Files that are being written: whose they are, what they have reserved, and how those of the dead are cleared away.

A draft is called `<owner>-<number>-<reserved bytes>`. Its owner keeps `<owner>.lock` locked for as long as it lives;
the kernel lets go of that lock when the process dies, however it dies. All of this happens under the ledger's lock.
"""

# Plain strings on a path that runs for every write.
# ruff: noqa: PTH108, PTH208

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from kvtier.tier.inside import Descriptor, open_file

_LOCK_SUFFIX = ".lock"


class Draft(NamedTuple):
    """One file that is being written."""

    path: str
    descriptor: int
    reserved_bytes: int


class Drafts:
    """The drafts of one owner in the directory `path`, and the means to clear away those of dead ones."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.owner = os.urandom(8).hex()
        self._numbers = itertools.count()
        self._lock: Descriptor | None = None

    def attach(self) -> None:
        """Say that this owner lives; again after the directory was replaced.

        Raises:
            OSError: the lock file cannot be made.
        """
        self.detach()
        self._lock = Descriptor(open_file(self._lock_path(self.owner), os.O_CREAT | os.O_RDWR)[0])
        fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def detach(self) -> None:
        """Say that this owner has gone. Twice is fine."""
        if self._lock is not None:
            with suppress(OSError):
                os.unlink(self._lock_path(self.owner))
            self._lock.close()
            self._lock = None

    def next_path(self, reserved_bytes: int) -> str:
        """The path of a draft that does not exist yet."""
        return f"{self._path}/{self.owner}-{next(self._numbers)}-{reserved_bytes}"

    def create(self, reserved_bytes: int, *, direct_io: bool) -> Draft:
        """A new empty draft, open for writing, mode 0600.

        Raises:
            OSError: it cannot be made.
        """
        path = self.next_path(reserved_bytes)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0)
        return Draft(path, os.open(path, flags, 0o600), reserved_bytes)

    def reserved_bytes(self) -> int:
        """What all drafts of all owners have reserved.

        Raises:
            OSError: the directory cannot be read.
        """
        return sum(reserved for _, _, reserved in self._all())

    def clear(self) -> None:
        """Remove everything. Only for who is alone in the store.

        Raises:
            OSError: something cannot be removed.
        """
        for name in os.listdir(self._path):
            os.unlink(f"{self._path}/{name}")

    def clear_stale(self) -> bool:
        """Remove the drafts and locks of owners that are gone; whether there were any.

        Raises:
            OSError: one cannot be removed.
        """
        drafts = list(self._all())
        locks = {name.removesuffix(_LOCK_SUFFIX) for name in os.listdir(self._path) if name.endswith(_LOCK_SUFFIX)}
        gone = {owner for owner in {*locks, *(owner for _, owner, _ in drafts)} if not self._is_alive(owner)}
        for name, owner, _ in drafts:
            if owner in gone:
                os.unlink(f"{self._path}/{name}")
        for owner in gone & locks:  # last: as long as it is there, somebody will look again
            os.unlink(self._lock_path(owner))
        return bool(gone)

    def _all(self) -> Iterator[tuple[str, str, int]]:
        """(file name, owner, reserved bytes) of every draft."""
        for name in os.listdir(self._path):
            parts = name.split("-")
            if len(parts) == 3 and parts[2].isdecimal():
                yield name, parts[0], int(parts[2])

    def _is_alive(self, owner: str) -> bool:
        """Whether somebody keeps the owner's lock. A lock file is made and locked in one go under the ledger's lock."""
        if owner == self.owner:
            return self._lock is not None
        try:
            descriptor = os.open(self._lock_path(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def _lock_path(self, owner: str) -> str:
        return f"{self._path}/{owner}{_LOCK_SUFFIX}"
