"""Plain files as a `RawClient`, for comparison with tiers that keep files."""

# This code uses plain strings and descriptors, as the tiers do.
# ruff: noqa: PTH118

import os
import threading
from pathlib import Path

from kvtier.tier.files.direct import can_direct, forget_cached, read_part, write_all
from kvtier.tier.files.safe_open import make_root
from kvtier.types import ObjectName


class RawFiles:
    """Keeps a file per object, written under another name and then renamed.

    Args:
        root: an empty directory, created if missing.
        direct: bypass the page cache if the file system allows it.
        syncs: sync a file before its rename, which a file system shared by several nodes requires.
    """

    def __init__(self, root: Path, *, direct: bool, syncs: bool = False) -> None:
        make_root(root)
        self._root, self._syncs = str(root), syncs
        self._direct = os.O_DIRECT if direct and can_direct(self._root) else 0

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        path = self._path(name)
        descriptor = os.open(f"{path}.draft", os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._direct, 0o600)
        try:
            write_all(descriptor, frame)
            if self._syncs:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(f"{path}.draft", path)  # noqa: PTH104

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        descriptor = os.open(self._path(name), os.O_RDONLY | self._direct)
        try:
            _read(descriptor, into, 0)
            if not self._direct:
                forget_cached(descriptor, 0, into.nbytes)
        finally:
            os.close(descriptor)

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        return os.path.exists(self._path(name))  # noqa: PTH110

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        os.unlink(self._path(name))  # noqa: PTH108

    def close(self) -> None:
        """Release all resources."""

    def _path(self, name: ObjectName) -> str:
        return os.path.join(self._root, name.hex())


class RawSegment:
    """Keeps all objects in one file, reusing the offsets of deleted objects of equal size.

    Args:
        root: an empty directory, created if missing.
        direct: bypass the page cache if the file system allows it.
    """

    def __init__(self, root: Path, *, direct: bool) -> None:
        make_root(root)
        flags = os.O_DIRECT if direct and can_direct(str(root)) else 0
        self._descriptor = os.open(root / "raw", os.O_CREAT | os.O_RDWR | flags, 0o600)
        self._lock = threading.Lock()
        self._places: dict[ObjectName, tuple[int, int]] = {}
        """Offset and bytes of each object."""
        self._free: dict[int, list[int]] = {}
        """Offsets of deleted objects, by their bytes."""
        self._end = 0

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        with self._lock:
            free = self._free.get(frame.nbytes)
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + frame.nbytes)
        done = 0
        while done < frame.nbytes:
            done += os.pwrite(self._descriptor, frame[done:], offset + done)
        self._places[name] = (offset, frame.nbytes)

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        _read(self._descriptor, into, self._places[name][0])

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        return name in self._places

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        with self._lock:
            offset, size_bytes = self._places.pop(name)
            self._free.setdefault(size_bytes, []).append(offset)

    def close(self) -> None:
        """Release all resources."""
        os.close(self._descriptor)


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    count = read_part(descriptor, into, offset)
    if count != into.nbytes:
        raise OSError(None, f"only {count} of {into.nbytes} bytes were read")
