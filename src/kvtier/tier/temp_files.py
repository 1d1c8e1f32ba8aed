"""Temporary files of a directory store: owner, reserved bytes, and removal of those of dead owners.

A temporary file is named `<owner>-<number>-<reserved bytes>`. Its owner holds a flock on `<owner>.lock`; the kernel
releases it when the process dies. All operations run under the cap file's lock.
"""

# Descriptors and plain strings: this code runs for every write.
# ruff: noqa: PTH208

import errno
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvtier.layout import align_up
from kvtier.tier.safe_open import (
    MISSING,
    Descriptor,
    SuppressErrno,
    directory_at,
    make_directory,
    open_directory,
    open_file,
    rename_file,
)
from kvtier.tier.store_lock import lock_file

NAMES = re.compile(r"[0-9a-f]{16}(-[0-9]{1,20}-[0-9]{1,15}|\.lock)|probe_[0-9a-f]{16}")
"""Names of files that a store creates there. Others are neither counted nor removed."""

LOCK_DEADLINE_S = 1.0
"""Longest wait for the lock of a new lock file."""

_OWNER_DIGITS = 16
_LOCK_SUFFIX = ".lock"
_PROBE_PREFIX = "probe_"


class TempFile(NamedTuple):
    """One temporary file, open for writing."""

    name: str
    descriptor: int
    reserved_bytes: int


class TempFiles:
    """The temporary files of one owner in the directory `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.owner = os.urandom(_OWNER_DIGITS // 2).hex()
        self._numbers = itertools.count()
        self._lock: Descriptor | None = None

    def attach(self) -> None:
        """Create and lock this owner's lock file; called again after the directory was replaced.

        Raises:
            OSError: the lock file cannot be created.
        """
        with self._directory():
            pass

    def detach(self) -> None:
        """Remove this owner's lock file. Idempotent."""
        if self._lock is not None:
            with suppress(OSError), directory_at(self._path) as directory:
                os.unlink(_lock_name(self.owner), dir_fd=directory)
            self._lock.close()
            self._lock = None

    def create(self, reserved_bytes: int, *, direct_io: bool) -> TempFile:
        """A new empty temporary file, mode 0600.

        Raises:
            OSError: it cannot be created.
        """
        name = self._next_name(reserved_bytes)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct_io else 0)
        with self._directory() as directory:
            return TempFile(name, open_file(name, flags, directory)[0], reserved_bytes)

    def adopt(self, name: str, fan: int, descriptor: int, reserved_bytes: int) -> TempFile:
        """Rename the file `name` in the directory `fan`, open as `descriptor`, to a temporary file.

        Raises:
            OSError: it cannot be renamed.
        """
        draft = TempFile(self._next_name(reserved_bytes), descriptor, reserved_bytes)
        with self._directory() as directory:
            os.rename(name, draft.name, src_dir_fd=fan, dst_dir_fd=directory)
        return draft

    def publish(self, draft: TempFile, name: str, fan: int) -> None:
        """Rename the temporary file to `name` in the directory `fan`, see `rename_file`.

        Raises:
            OSError: it cannot be renamed.
        """
        with directory_at(self._path) as directory:
            rename_file(draft.name, name, directory, fan)

    def remove(self, draft: TempFile) -> int:
        """Remove the temporary file. Returns its reserved bytes, or 0 when it does not exist.

        Raises:
            OSError: it cannot be removed.
        """
        with SuppressErrno(MISSING), directory_at(self._path) as directory:
            os.unlink(draft.name, dir_fd=directory)
            return draft.reserved_bytes
        return 0

    def clear_stale(self) -> int:
        """Remove temporary files and lock files of dead owners. Returns the bytes that were reserved by them.

        Raises:
            OSError: one cannot be removed.
        """
        freed_bytes = 0
        with _names_at(self._path) as (directory, names):
            owners = {name[:_OWNER_DIGITS] for name in names if not name.startswith(_PROBE_PREFIX)}
            gone = {owner for owner in owners if not self._is_alive(owner, directory)}
            # Lock files last: while one exists, the next process repeats the removal.
            for name in sorted(names, key=_is_lock):
                if name[:_OWNER_DIGITS] in gone or name.startswith(_PROBE_PREFIX):
                    with suppress(FileNotFoundError):  # an opening process removes its probe without the lock
                        os.unlink(name, dir_fd=directory)
                        freed_bytes += _reserved_by(name)
        return freed_bytes

    def _next_name(self, reserved_bytes: int) -> str:
        return f"{self.owner}-{next(self._numbers)}-{reserved_bytes}"

    @contextmanager
    def _directory(self) -> Generator[int]:
        """A descriptor of the directory, created when missing, with this owner's locked lock file in it."""
        try:
            directory = open_directory(self._path)
        except OSError as error:
            if error.errno not in MISSING:
                raise
            make_directory(self._path, replace=True)
            directory = open_directory(self._path)
        try:
            name = _lock_name(self.owner)
            try:
                is_there = self._lock is not None and bool(os.stat(name, dir_fd=directory, follow_symlinks=False))
            except FileNotFoundError:
                is_there = False
            if not is_there:
                lock = Descriptor(open_file(name, os.O_CREAT | os.O_RDWR, directory)[0])
                # Until it is locked the owner counts as dead. A check (`_is_locked`) locks it briefly.
                is_locked = False
                try:
                    is_locked = lock_file(lock.fileno(), fcntl.LOCK_EX, LOCK_DEADLINE_S)
                finally:
                    if not is_locked:
                        lock.close()
                        os.unlink(name, dir_fd=directory)
                if not is_locked:
                    raise OSError(errno.EAGAIN, "is locked by another process", name)
                if self._lock is not None:
                    self._lock.close()
                self._lock = lock
            yield directory
        finally:
            os.close(directory)

    def _is_alive(self, owner: str, directory: int) -> bool:
        """Whether the owner's lock is held. Lock files are created and locked under the cap file's lock."""
        return self._lock is not None if owner == self.owner else _is_locked(_lock_name(owner), directory)


def reserved(path: str) -> list[int]:
    """Bytes reserved by each temporary file of any owner in the directory `path`.

    Raises:
        OSError: the directory cannot be read.
    """
    with _names_at(path) as (_, names):
        return [_reserved_by(name) for name in names if "-" in name]


def owners_alive(path: str) -> int:
    """Number of owners in the directory `path` that hold their locks.

    Raises:
        OSError: the directory cannot be read.
    """
    with _names_at(path) as (directory, names):
        return sum(_is_locked(name, directory) for name in names if _is_lock(name))


def _is_locked(name: str, directory: int) -> bool:
    """Whether a process holds an exclusive flock on the file `name`; False when it is missing.

    Raises:
        OSError: it cannot be opened.
    """
    with SuppressErrno(MISSING):
        descriptor, _ = open_file(name, os.O_RDONLY, directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


@contextmanager
def _names_at(path: str) -> Generator[tuple[int, list[str]]]:
    """A descriptor of the directory `path` and its files that match `NAMES`; none when it is missing."""
    try:
        directory = open_directory(path, is_listed=True)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        yield -1, []
        return
    try:
        names: list[str] = []
        for name in filter(NAMES.fullmatch, os.listdir(directory)):
            with suppress(FileNotFoundError):
                if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    names.append(name)
        yield directory, names
    finally:
        os.close(directory)


def _reserved_by(name: str) -> int:
    """Bytes by the name of a temporary file, in whole blocks, also when another program made the name."""
    return align_up(int(name.rpartition("-")[2])) if "-" in name else 0


def _lock_name(owner: str) -> str:
    return f"{owner}{_LOCK_SUFFIX}"


def _is_lock(name: str) -> bool:
    return name.endswith(_LOCK_SUFFIX)
