"""The temporary files of a directory store, which reserve bytes and are removed if their writer is dead.

A temporary file is named `<owner>-<number>-<reserved bytes>`, where the owner is one open store. Its writer counts as
dead if the file was not written to for `TEMP_AGE_S`. All operations run under the cap file's lock.
"""

# This code uses descriptors and plain strings, because it runs for every write.
# ruff: noqa: PTH208

import itertools
import os
import re
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvtier.layout import align_up
from kvtier.tier.files.safe_open import (
    MISSING,
    SuppressErrno,
    make_directory,
    open_directory,
    open_file,
    rename_file,
)
from kvtier.tier.files.store_paths import Closing, Paths

NAMES = re.compile(r"[0-9a-f]{16}(-[0-9]{1,20}-[0-9]{1,15}|\.lock)|probe_[0-9a-f]{16}")
"""Names of files that a store creates in its drafts directory. Others stay. Earlier versions made lock files."""

TEMP_AGE_S = 900


class TempFile(NamedTuple):
    """One temporary file, open for writing."""

    name: str
    descriptor: int
    reserved_bytes: int
    size_bytes: int = 0


class TempFiles:
    """The temporary files of one owner in the store at `paths`."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._path = paths.temp_files
        self.owner = os.urandom(8).hex()
        self._numbers = itertools.count()

    def create(self, reserved_bytes: int, *, direct_io: bool) -> TempFile:
        """Create an empty temporary file with mode 0600.

        Raises:
            OSError: it cannot be created.
        """
        name = self._next_name(reserved_bytes)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct_io else 0)
        with self._made() as directory:
            return TempFile(name, open_file(name, flags, directory)[0], reserved_bytes)

    def adopt(self, name: str, fan: int, descriptor: int, reserved_bytes: int, size_bytes: int) -> TempFile:
        """Rename the file `name` of `size_bytes` in the directory `fan`, open as `descriptor`, into a temporary file.

        Raises:
            OSError: it cannot be renamed.
        """
        draft = TempFile(self._next_name(reserved_bytes), descriptor, reserved_bytes, size_bytes)
        os.utime(descriptor)  # otherwise it would count as old
        with self._made() as directory:
            os.rename(name, draft.name, src_dir_fd=fan, dst_dir_fd=directory)
        return draft

    def publish(self, draft: TempFile, name: str, fan: int) -> None:
        """Rename the temporary file to `name` in the directory `fan`, with `rename_file`.

        Raises:
            OSError: it cannot be renamed.
        """
        with self._paths.drafts() as directory:
            rename_file(draft.name, name, directory, fan)

    def remove(self, draft: TempFile) -> int:
        """Remove the temporary file. Return its reserved bytes, or 0 if it does not exist.

        Raises:
            OSError: it cannot be removed.
        """
        with SuppressErrno(MISSING), self._paths.drafts() as directory:
            os.unlink(draft.name, dir_fd=directory)
            return draft.reserved_bytes
        return 0

    def clear_stale(self, *, is_alone: bool) -> int:
        """Remove temporary files of dead writers. Return how many bytes they had reserved.

        Args:
            is_alone: whether no other process has the store open, and this one writes nothing.

        Raises:
            OSError: a file cannot be removed.
        """
        freed_bytes = 0
        with _names_at(self._path) as (directory, names):
            for name, written_s in names.items():
                if is_alone or written_s < time.time() - TEMP_AGE_S or not _reserved_by(name):
                    with suppress(FileNotFoundError):  # an opening process removes its probe without the lock
                        os.unlink(name, dir_fd=directory)
                        freed_bytes += _reserved_by(name)
        return freed_bytes

    def _next_name(self, reserved_bytes: int) -> str:
        return f"{self.owner}-{next(self._numbers)}-{reserved_bytes}"

    def _made(self) -> Closing:
        """Open the directory for a `with` block, and create it if it is missing."""
        try:
            return self._paths.drafts()
        except OSError as error:
            if error.errno not in MISSING:
                raise
            make_directory(self._path, replace=True)
            return self._paths.drafts()


def reserved(path: str) -> list[int]:
    """Return how many bytes each temporary file in the directory `path` reserves, whoever its owner is.

    Raises:
        OSError: the directory cannot be read.
    """
    with _names_at(path) as (_, names):
        return [_reserved_by(name) for name in names if "-" in name]


@contextmanager
def _names_at(path: str) -> Generator[tuple[int, dict[str, float]]]:
    """Open the directory `path`, and yield its files that match `NAMES`, with mtimes; none if it is missing."""
    try:
        directory = open_directory(path, is_listed=True)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        yield -1, {}
        return
    try:
        names: dict[str, float] = {}
        for name in filter(NAMES.fullmatch, os.listdir(directory)):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    names[name] = status.st_mtime
        yield directory, names
    finally:
        os.close(directory)


def _reserved_by(name: str) -> int:
    """Return how many bytes a temporary file's name reserves, rounded up to whole blocks."""
    return align_up(int(name.rpartition("-")[2])) if "-" in name else 0
