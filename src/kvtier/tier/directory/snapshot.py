"""The index snapshot of a directory store, which keeps names, sizes, last uses and parents for fast starts.

It may be stale: it may list names that no longer exist, and lack others that do. A damaged file or one of another
version counts as absent. FORMAT.md describes the layout.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from kvtier.tier.files.safe_open import open_file, write_file

_HEADER = struct.Struct("<8sIIQQ")  # magic, version, bytes of a row, rows, checksum of the rows
_MAGIC = b"kvtindex"
_VERSION = 1
_ROW = np.dtype(
    [
        ("name", "V32"),
        ("parent", "V32"),
        ("size_bytes", "<u8"),
        ("used_ns", "<i8"),
        ("depth", "<u4"),
        ("group", "<u2"),
        ("has_parent", "<u2"),
    ]
)
_NO_PARENT = bytes(32)
SLICE = 64
"""Number of objects handled in one step. More would hold a lock, or the interpreter lock, for too long."""
_CHECKSUM_BYTES = 1 << 22
_ROWS_MAX = 1 << 22
"""Maximum number of rows written or read, 352 MiB in all."""
_NS_MAX = (1 << 63) - 1
_DEPTH_MAX = (1 << 32) - 1
_GROUP_MAX = (1 << 16) - 1


class SnapshotRow(NamedTuple):
    """One object of the snapshot."""

    name: bytes
    parent: bytes | None
    size_bytes: int
    used_ns: int
    """Last known use, in nanoseconds since 1970."""
    depth: int
    group: int


_T = TypeVar("_T")


def slices(items: Iterable[_T], count: int = SLICE) -> Iterator[list[_T]]:
    """Yield `items` in lists of at most `count`."""
    iterator = iter(items)
    while piece := list(islice(iterator, count)):
        yield piece


def oldest_first(rows: Iterable[SnapshotRow]) -> Iterator[SnapshotRow]:
    """Yield `rows` in the order of their last uses. All of them are read first, and each takes 88 bytes."""
    return _rows(_by_use(rows))


def pack_snapshot(rows: Iterable[SnapshotRow]) -> memoryview:
    """Pack `rows`, given in any order, into the file's bytes, oldest use first. Keep the `_ROWS_MAX` last used."""
    newest = _by_use(rows)[-_ROWS_MAX:]
    content = np.empty(_HEADER.size + newest.nbytes, np.uint8)
    body = content[_HEADER.size :]
    body[:] = newest.view(np.uint8)
    _HEADER.pack_into(content.data, 0, _MAGIC, _VERSION, _ROW.itemsize, len(newest), _checksum(body.data))
    return content.data


def unpack_snapshot(content: bytes | memoryview) -> Iterator[SnapshotRow] | None:
    """Return the rows, oldest use first, or None if `content` is damaged or of another version."""
    if len(content) != _size_of(content[: _HEADER.size]):
        return None
    *_, checksum = _HEADER.unpack_from(content)
    body = memoryview(content)[_HEADER.size :]
    if _checksum(body) != checksum:
        return None
    return _rows(np.frombuffer(body, _ROW))


def save_snapshot(path: str, rows: Iterable[SnapshotRow]) -> None:
    """Write the snapshot of `rows`, given in any order, to `path` atomically, with mode 0600.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    write_file(path, f"{path}.{os.getpid()}.{os.urandom(8).hex()}", pack_snapshot(rows))


def load_snapshot(path: str) -> Iterator[SnapshotRow] | None:
    """Return the rows at `path`, oldest use first.

    Return None if the file is absent, unreadable, too long, damaged or of another version.
    """
    try:
        descriptor, status = open_file(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            header = file.read(_HEADER.size)
            # The length is checked before reading, because a sparse file may have any length.
            if status.st_size != _size_of(header):
                return None
            content = np.empty(status.st_size, np.uint8).data
            content[: len(header)] = header
            file.readinto(content[len(header) :])  # a short read fails the checksum
            return unpack_snapshot(content)
    except OSError:
        return None


def _size_of(header: bytes | memoryview) -> int | None:
    """Return the file length that `header` implies, or None if it is not a header of this version."""
    if len(header) != _HEADER.size:
        return None
    magic, version, row_bytes, row_count, _ = _HEADER.unpack(header)
    if (magic, version, row_bytes) != (_MAGIC, _VERSION, _ROW.itemsize) or row_count > _ROWS_MAX:
        return None
    return _HEADER.size + row_count * row_bytes


def _checksum(body: memoryview) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, len(body), _CHECKSUM_BYTES):
        digest.update(body[at : at + _CHECKSUM_BYTES])
    return digest.intdigest()


def _by_use(rows: Iterable[SnapshotRow]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Sort rows by use. Python objects are handled in slices; NumPy releases the interpreter lock for the rest."""
    table = bytearray()
    for some in slices(rows):
        table += _packed(some).tobytes()  # a single copy of everything would keep the lock
    found = np.frombuffer(table, _ROW)
    return np.take(found, np.argsort(found["used_ns"], kind="stable"), mode="clip")


def _packed(rows: list[SnapshotRow]) -> np.ndarray[Any, np.dtype[np.void]]:
    table = np.zeros(len(rows), _ROW)
    table["name"] = _names([row.name for row in rows])
    table["parent"] = _names([row.parent or _NO_PARENT for row in rows])
    table["size_bytes"] = [row.size_bytes for row in rows]
    # An mtime may lie in any year.
    table["used_ns"] = [min(max(row.used_ns, -_NS_MAX), _NS_MAX) for row in rows]
    table["depth"] = [min(row.depth, _DEPTH_MAX) for row in rows]
    table["group"] = [min(row.group, _GROUP_MAX) for row in rows]
    table["has_parent"] = [row.parent is not None for row in rows]
    return table


def _rows(table: np.ndarray[Any, np.dtype[np.void]]) -> Iterator[SnapshotRow]:
    for at in range(0, len(table), SLICE):
        part = table[at : at + SLICE]
        parents = [
            parent if has_parent else None
            for parent, has_parent in zip(_split(part["parent"]), part["has_parent"].tolist(), strict=True)
        ]
        numbers = [part[column].tolist() for column in ("size_bytes", "used_ns", "depth", "group")]
        yield from map(SnapshotRow, _split(part["name"]), parents, *numbers)


def _names(names: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.frombuffer(b"".join(names), "V32")


def _split(names: np.ndarray[Any, np.dtype[np.void]]) -> list[bytes]:
    joined = names.tobytes()
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]
