"""Paths of a directory store, and the walk through its objects.

root/kvtier-store.json        marker
root/ledger                   cap file: bytes in use, and the lock under which names change
root/index                    index snapshot for fast starts
root/drafts/                  temporary files and their owners' locks
root/objects/<2 hex>/<64 hex> one file per object, named by the object's name
"""

# Plain strings and `os`: this code runs once per object, and a walk of 100,000 files must take under a second.
# ruff: noqa: PTH118, PTH208

import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.directory_marker import MARKER_NAME
from kvtier.tier.safe_open import MISSING, make_directory, open_directory

NAME_BYTES = 32
_PREFIX = re.compile(r"[0-9a-f]{2}")


class Found(NamedTuple):
    """One object's file, found by a walk."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    inode: int = 0


class Paths:
    """The paths of the store at `root`, and access to its objects' files below its directory `objects`.

    Each operation opens the object's directory again, so a replaced one is noticed, and no link is followed.
    """

    def __init__(self, root: str, objects: str = "objects") -> None:
        self.root = root
        self.marker = os.path.join(root, MARKER_NAME)
        self.cap_file = os.path.join(root, "ledger")
        self.snapshot = os.path.join(root, "index")
        self.temp_files = os.path.join(root, "drafts")
        self.objects = os.path.join(root, objects)
        """For messages; `open_objects` opens it."""
        self._steps = objects.split("/")

    def object(self, name: bytes) -> str:
        """Path of the object `name`, for messages."""
        spelled = name.hex()
        return f"{self.objects}/{spelled[:2]}/{spelled}"

    def make(self) -> None:
        """Create missing directories, mode 0700. Anything else of their names is renamed.

        Raises:
            OSError: one cannot be created.
        """
        make_directory(self.temp_files, replace=True)
        self.make_objects()

    def make_objects(self) -> None:
        """Create the objects' directory, as `make`, also the one that it lies in."""
        directory = _step(self.root, None, self._steps[0], is_made=True)
        for name in self._steps[1:]:
            directory = _step("", directory, name, is_made=True)
        os.close(directory)

    def open_objects(self, *, is_listed: bool = False) -> int:
        """A descriptor of the objects' directory. No link below the root is followed.

        Raises:
            OSError: it cannot be opened, see `open_directory`.
        """
        directory = _step(self.root, None, self._steps[0], is_listed=is_listed)
        for name in self._steps[1:]:
            directory = _step("", directory, name, is_listed=is_listed)
        return directory

    def open_fan(self, name: bytes) -> int | None:
        """A descriptor of the directory of object `name`; None when it does not exist.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        with self._objects_open() as objects:
            return None if objects is None else _open_fan_in(objects, name)

    def stat_objects(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
        """(name, status) for those of `names` that have a regular file. Each directory is opened once.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        with self._objects_open() as objects:
            for _, together in groupby(sorted(names), _first_byte):
                of_fan = list(together)
                fan = None if objects is None else _open_fan_in(objects, of_fan[0])
                if fan is None:
                    continue
                try:
                    for name in of_fan:
                        status = stat_in(fan, name)
                        if status is not None:
                            yield name, status
                finally:
                    os.close(fan)

    @contextmanager
    def _objects_open(self) -> Generator[int | None]:
        """A descriptor of the objects' directory; None when it does not exist."""
        try:
            objects = self.open_objects()
        except OSError as error:
            if error.errno not in MISSING:
                raise
            os.lstat(self.marker)
            yield None
            return
        try:
            yield objects
        finally:
            os.close(objects)

    @contextmanager
    def fan(self, name: bytes) -> Generator[int]:
        """Open a directory like `open_fan`; a missing one is created.

        Raises:
            OSError: it cannot be created, or the store is gone.
        """
        fan = self.open_fan(name)
        if fan is None:
            self.make_objects()
            objects = self.open_objects()
            try:
                make_directory(name[:1].hex(), objects, replace=True)
                fan = open_directory(name[:1].hex(), objects)
            finally:
                os.close(objects)
        try:
            yield fan
        finally:
            os.close(fan)

    def stat_object(self, name: bytes) -> os.stat_result | None:
        """Status of the object's file; None when there is no regular file.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        fan = self.open_fan(name)
        if fan is None:
            return None
        try:
            return stat_in(fan, name)
        finally:
            os.close(fan)

    def remove_object(self, name: bytes) -> os.stat_result | None:
        """Remove the object's file. Returns its status, or None when there was no regular file.

        Raises:
            OSError: it cannot be removed, the file system fails, or the whole store is gone.
        """
        fan = self.open_fan(name)
        if fan is None:
            return None
        try:
            status = stat_in(fan, name)
            if status is not None:
                os.unlink(name.hex(), dir_fd=fan)
            return status
        finally:
            os.close(fan)


def _step(root: str, directory: int | None, name: str, *, is_made: bool = False, is_listed: bool = False) -> int:
    """A descriptor of `name` in `root` or in `directory`, which is closed; `is_made` creates it when it is missing."""
    try:
        path = os.path.join(root, name)
        if is_made:
            make_directory(path, directory, replace=True)
        return open_directory(path, directory, is_listed=is_listed)
    finally:
        if directory is not None:
            os.close(directory)


def _first_byte(name: bytes) -> bytes:
    return name[:1]


def _open_fan_in(objects: int, name: bytes) -> int | None:
    try:
        return open_directory(name[:1].hex(), objects)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return None


def stat_in(fan: int, name: bytes) -> os.stat_result | None:
    """Status of the object's file in its directory `fan`; None when there is no regular file.

    Raises:
        OSError: the file system fails.
    """
    try:
        status = os.stat(name.hex(), dir_fd=fan, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def charge_bytes(size_bytes: int) -> int:
    """Bytes that a file of `size_bytes` counts against the cap: whole blocks of 4 KiB, at least one."""
    return max(align_up(size_bytes), ALIGNMENT)


def walk(paths: Paths) -> Iterator[Found]:
    """Every object of the store. Vanished files and foreign names are skipped.

    Raises:
        OSError: the device or the file system fails.
    """
    try:
        top = paths.open_objects(is_listed=True)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return
    try:
        for prefix in os.listdir(top):
            if not _PREFIX.fullmatch(prefix):
                continue
            fan = _listed(prefix, top)
            if fan is None:
                continue
            try:
                yield from _walk_fan(fan, prefix)
            finally:
                os.close(fan)
    finally:
        os.close(top)


def _walk_fan(fan: int, prefix: str) -> Iterator[Found]:
    with os.scandir(fan) as entries:
        for entry in entries:
            spelled = entry.name
            if len(spelled) != 2 * NAME_BYTES or spelled[:2] != prefix:
                continue
            try:
                name = bytes.fromhex(spelled)
                status = entry.stat(follow_symlinks=False)
            except (ValueError, FileNotFoundError):
                continue
            if stat.S_ISREG(status.st_mode) and name.hex() == spelled:
                yield Found(name, status.st_size, status.st_mtime_ns, status.st_ino)


def _listed(name: str, directory: int) -> int | None:
    try:
        return open_directory(name, directory, is_listed=True)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return None
