"""Paths of a directory store, and the walk through its objects.

root/kvtier-store.json        marker
root/ledger                   cap file: bytes in use, and the lock under which names change
root/index                    index snapshot for fast starts
root/drafts/                  temporary files and their owners' locks
root/objects/<2 hex>/<64 hex> one file per object, named by the object's name
"""

# This code uses plain strings and `os`. It runs once per object, and a walk of 100,000 files must take under 1 s.
# ruff: noqa: PTH118, PTH208

import os
import re
import stat
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.files.directory_marker import MARKER_NAME
from kvtier.tier.files.safe_open import MISSING, VANISHED, SuppressErrno, make_directory, open_directory

NAME_BYTES = 32
_PREFIX = re.compile(r"[0-9a-f]{2}")
OBJECT = re.compile(r"[0-9a-f]{64}")
"""Name of an object's file. Its directory is named by the first two digits."""


_KEPT_MAX = 64
"""Maximum number of directories that stay open (`Paths.kept`)."""


class Found(NamedTuple):
    """One object's file, found by a walk."""

    name: bytes
    size_bytes: int
    mtime_ns: int


class Paths:
    """The paths of the store at `root`, and access to its objects' files below its directory `objects`.

    Each operation opens the object's directory again, so that it notices a replacement. It follows no link. Inside
    `kept`, the calls of a thread are one operation.
    """

    def __init__(self, root: str, objects: str = "objects") -> None:
        self.root = root
        self.marker = os.path.join(root, MARKER_NAME)
        self.cap_file = os.path.join(root, "ledger")
        self.snapshot = os.path.join(root, "index")
        self.temp_files = os.path.join(root, "drafts")
        self.objects = os.path.join(root, objects)
        """For messages; the directory is opened with `_open_objects`."""
        self._steps = objects.split("/")
        self._kept = _Kept()

    def object(self, name: bytes) -> str:
        """Return the path of the object `name`, for messages."""
        spelled = name.hex()
        return f"{self.objects}/{spelled[:2]}/{spelled}"

    def make(self) -> None:
        """Create missing directories with mode 0700. Anything else with their names is renamed.

        Raises:
            OSError: a directory cannot be created.
        """
        make_directory(self.temp_files, replace=True)
        self.make_objects()

    def make_objects(self) -> None:
        """Create the objects' directory and the one that contains it, like `make`."""
        directory = _step(self.root, None, self._steps[0], is_made=True)
        for name in self._steps[1:]:
            directory = _step("", directory, name, is_made=True)
        os.close(directory)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Leave directories open in the `with` block, so that later calls of this thread need not open them again."""
        descriptors: dict[str, int] = {}
        self._kept.descriptors = descriptors
        try:
            yield
        finally:
            self._kept.descriptors = None
            for descriptor in descriptors.values():
                os.close(descriptor)

    def drafts(self) -> "Closing":
        """Open the directory of the temporary files for a `with` block.

        Raises:
            OSError: it cannot be opened, as in `open_directory`.
        """
        return self._kept.found(self.temp_files) or self._kept.keep(self.temp_files, open_directory(self.temp_files))

    def _open_objects(self, *, is_listed: bool = False) -> int:
        """Open the objects' directory and return its descriptor. No link below the root is followed.

        Raises:
            OSError: it cannot be opened, as in `open_directory`.
        """
        directory = _step(self.root, None, self._steps[0], is_listed=is_listed)
        for name in self._steps[1:]:
            directory = _step("", directory, name, is_listed=is_listed)
        return directory

    def each(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield those of `names` whose directory exists, each with that directory's descriptor.

        Each directory is opened once.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        with self._objects_open() as objects:
            for prefix, together in groupby(sorted(names), _prefix):
                with Closing(None if objects is None else _open_fan_in(objects, prefix)) as fan:
                    if fan is not None:
                        yield from ((name, fan) for name in together)

    def stat_objects(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield those of `names` that have a regular file, each with the file's status. Raises as `each` does."""
        for name, fan in self.each(names):
            status = stat_in(fan, name)
            if status is not None:
                yield name, status

    def files(self) -> Iterator[tuple[str, int, str, os.stat_result]]:
        """Yield each regular file of the objects: prefix and descriptor of its directory, its name and its status.

        Vanished files and foreign directories are skipped.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        with self._objects_open(is_listed=True) as objects:
            if objects is None:
                return
            for prefix in filter(_PREFIX.fullmatch, os.listdir(objects)):
                with Closing(_open_fan_in(objects, prefix, is_listed=True)) as fan:
                    if fan is None:
                        continue
                    with os.scandir(fan) as entries:
                        for entry in entries:
                            with SuppressErrno(VANISHED):
                                status = entry.stat(follow_symlinks=False)
                                if stat.S_ISREG(status.st_mode):
                                    yield prefix, fan, entry.name, status

    def _objects_open(self, *, is_listed: bool = False) -> "Closing":
        """Open the objects' directory for a `with` block, which gets None if it does not exist."""
        kept = None if is_listed else self._kept.found("")
        if kept is not None:
            return kept
        with SuppressErrno(MISSING):
            opened = self._open_objects(is_listed=is_listed)
            return Closing(opened) if is_listed else self._kept.keep("", opened)
        os.lstat(self.marker)
        return Closing(None)

    def found_fan(self, name: bytes) -> "Closing":
        """Open the directory of object `name` for a `with` block, which gets None if it does not exist.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        prefix = _prefix(name)
        found = self._kept.found(prefix)
        if found is not None:
            return found
        with self._objects_open() as objects:
            return self._kept.keep(prefix, None if objects is None else _open_fan_in(objects, prefix))

    @contextmanager
    def fan(self, name: bytes) -> Generator[int]:
        """Open a directory like `found_fan`, but create a missing one.

        Raises:
            OSError: it cannot be created, or the store is gone.
        """
        with self.found_fan(name) as fan:
            if fan is not None:
                yield fan
                return
        self.make_objects()
        with Closing(self._open_objects()) as objects:
            make_directory(_prefix(name), objects, replace=True)
            fan = open_directory(_prefix(name), objects)
        with self._kept.keep(_prefix(name), fan):
            yield fan

    def stat_object(self, name: bytes) -> os.stat_result | None:
        """Return the status of the object's file, or None if there is no regular file.

        Raises:
            OSError: the file system fails, or the store is gone.
        """
        with self.found_fan(name) as fan:
            return None if fan is None else stat_in(fan, name)

    def may_exist(self, name: bytes) -> bool:
        """Return whether anything has the name of the object's file, even a link. This makes one system call.

        Raises:
            OSError: the store is gone.
        """
        spelled = name.hex()
        with self._objects_open() as objects:
            return objects is not None and os.access(
                f"{spelled[:2]}/{spelled}", os.F_OK, dir_fd=objects, follow_symlinks=False
            )

    def remove_object(self, name: bytes) -> os.stat_result | None:
        """Remove the object's file. Return its status, or None if there was no regular file.

        Raises:
            OSError: it cannot be removed, the file system fails, or the whole store is gone.
        """
        with self.found_fan(name) as fan:
            status = None if fan is None else stat_in(fan, name)
            if status is not None:
                os.unlink(name.hex(), dir_fd=fan)
            return status


def _step(root: str, directory: int | None, name: str, *, is_made: bool = False, is_listed: bool = False) -> int:
    """Open `name` in `root` or in `directory`, which is then closed; `is_made` creates a missing `name`."""
    try:
        path = os.path.join(root, name)
        if is_made:
            make_directory(path, directory, replace=True)
        return open_directory(path, directory, is_listed=is_listed)
    finally:
        if directory is not None:
            os.close(directory)


class Closing:
    """Closes a directory's descriptor, if there is one, at the end of the `with` block, unless it is kept open."""

    __slots__ = ("_descriptor", "_is_kept")

    def __init__(self, descriptor: int | None, *, is_kept: bool = False) -> None:
        self._descriptor = descriptor
        self._is_kept = is_kept

    def __enter__(self) -> int | None:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None and not self._is_kept:
            os.close(self._descriptor)


class _Kept(threading.local):
    """One thread's directories that stay open, by prefix; the objects' directory has the prefix ``""``."""

    descriptors: dict[str, int] | None = None

    def found(self, prefix: str) -> Closing | None:
        """Return the directory, if it is kept open."""
        if self.descriptors is None or prefix not in self.descriptors:
            return None
        return Closing(self.descriptors[prefix], is_kept=True)

    def keep(self, prefix: str, descriptor: int | None) -> Closing:
        """Return the directory `descriptor`, which is kept open if the thread keeps directories."""
        if self.descriptors is None or descriptor is None or len(self.descriptors) >= _KEPT_MAX:
            return Closing(descriptor)
        self.descriptors[prefix] = descriptor
        return Closing(descriptor, is_kept=True)


def _prefix(name: bytes) -> str:
    """Return the name of an object's directory."""
    return name[:1].hex()


def _open_fan_in(objects: int, prefix: str, *, is_listed: bool = False) -> int | None:
    # A directory found by listing may have vanished since. Elsewhere ESTALE is a fault: the whole mount may be stale.
    with SuppressErrno(VANISHED if is_listed else MISSING):
        return open_directory(prefix, objects, is_listed=is_listed)
    return None


def stat_in(fan: int, name: bytes) -> os.stat_result | None:
    """Return the status of the object's file in its directory `fan`, or None if there is no regular file.

    Raises:
        OSError: the file system fails.
    """
    try:
        status = os.stat(name.hex(), dir_fd=fan, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def charge_bytes(size_bytes: int) -> int:
    """Return how many bytes a file of `size_bytes` counts against the cap: whole blocks of 4 KiB, at least one."""
    return max(align_up(size_bytes), ALIGNMENT)


def walk(paths: Paths) -> Iterator[Found]:
    """Yield every object of the store. Vanished files and foreign names are skipped.

    Raises:
        OSError: the device or the file system fails, or the store is gone.
    """
    for prefix, _, spelled, status in paths.files():
        if OBJECT.fullmatch(spelled) and spelled.startswith(prefix):
            yield Found(bytes.fromhex(spelled), status.st_size, status.st_mtime_ns)
