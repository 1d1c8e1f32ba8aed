"""Where a store's files lie, and the walk through them.

root/kvtier-store.json        marker: this is a store of ours
root/ledger                   bytes in use, and the lock under which names come and go
root/index                    hint for fast starts
root/drafts/                  what is being written, and whose it is
root/objects/<2 hex>/<64 hex> one file per object, named by the object's name
"""

# Plain strings and `os` instead of `pathlib`: these functions run once per object, and a walk through 100,000 files
# must take well under a second.
# ruff: noqa: PTH118, PTH208

import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.marker import MARKER_NAME
from kvtier.tier.safe_open import MISSING, make_directory, open_directory

NAME_BYTES = 32
_PREFIX = re.compile(r"[0-9a-f]{2}")


class Found(NamedTuple):
    """One object's file, as the walk sees it."""

    name: bytes
    size_bytes: int
    mtime_ns: int


class Paths:
    """The paths of the store at `root`, as strings, and the way to its objects.

    An object's directory is opened anew for each operation, so one that was replaced is seen, and no link is followed.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.marker = os.path.join(root, MARKER_NAME)
        self.ledger = os.path.join(root, "ledger")
        self.hint = os.path.join(root, "index")
        self.drafts = os.path.join(root, "drafts")
        self.objects = os.path.join(root, "objects")

    def object(self, name: bytes) -> str:
        """Where the object `name` lies, for people."""
        spelled = name.hex()
        return f"{self.objects}/{spelled[:2]}/{spelled}"

    def make(self) -> None:
        """Make the directories that are missing, mode 0700. What has their names and is no directory is renamed.

        Raises:
            OSError: they cannot be made.
        """
        for path in (self.drafts, self.objects):
            make_directory(path, replace=True)

    def open_fan(self, name: bytes) -> int | None:
        """A descriptor of the directory in which the object `name` lies; None when there is none.

        Raises:
            OSError: the file system fails, or the whole store is gone.
        """
        with self._objects_open() as objects:
            return None if objects is None else _open_fan_in(objects, name)

    def stat_objects(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
        """Those of `names` that have a regular file, and its status. Each directory is opened once.

        Raises:
            OSError: the file system fails, or the whole store is gone.
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
        """A descriptor of the directory of all objects; None when there is none."""
        try:
            objects = open_directory(self.objects)
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
        """As `open_fan`, but the directory is made where it is missing, as `make` does.

        Raises:
            OSError: it cannot be made, or the whole store is gone.
        """
        fan = self.open_fan(name)
        if fan is None:
            make_directory(self.objects, replace=True)
            objects = open_directory(self.objects)
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
        """The status of the object's file; None when there is no regular file.

        Raises:
            OSError: the file system fails, or the whole store is gone.
        """
        fan = self.open_fan(name)
        if fan is None:
            return None
        try:
            return stat_in(fan, name)
        finally:
            os.close(fan)

    def remove_object(self, name: bytes) -> os.stat_result | None:
        """Remove the object's file; its status, or None when there was no regular file.

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
    """The status of the object's file in its directory `fan`; None when there is no regular file.

    Raises:
        OSError: the file system fails.
    """
    try:
        status = os.stat(name.hex(), dir_fd=fan, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def charge_bytes(size_bytes: int) -> int:
    """What a file of `size_bytes` counts against the cap: whole blocks of 4 KiB, and one at least."""
    return max(align_up(size_bytes), ALIGNMENT)


def walk(objects: str) -> Iterator[Found]:
    """Every object under the directory `objects`; files that vanish meanwhile and files that are not ours are left out.

    Raises:
        OSError: the device or the file system fails.
    """
    top = _listed(objects)
    if top is None:
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
                yield Found(name, status.st_size, status.st_mtime_ns)


def _listed(name: str, directory: int | None = None) -> int | None:
    try:
        return open_directory(name, directory, is_listed=True)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return None
