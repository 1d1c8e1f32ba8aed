"""The index snapshot of a directory store, for fast starts: names, sizes, last uses and parents.

It may be stale: names may be gone or missing. A damaged file or one of another version counts as absent. FORMAT.md
describes the layout.
"""

import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvtier.tier.safe_open import open_file, write_file

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
_ROWS_MAX = 1 << 22
"""Most rows written or read: 352 MiB."""
_NS_MAX = (1 << 63) - 1
_DEPTH_MAX = (1 << 32) - 1
_GROUP_MAX = (1 << 16) - 1


class SnapshotRow(NamedTuple):
    """One object of the snapshot."""

    name: bytes
    parent: bytes | None
    size_bytes: int
    used_ns: int
    """Last known use, nanoseconds since 1970."""
    depth: int
    group: int


def pack_snapshot(rows: Iterable[SnapshotRow]) -> bytes:
    """The file's bytes. `rows` are ordered by use, oldest first; only the last `_ROWS_MAX` are kept."""
    listed = list(rows)[-_ROWS_MAX:]
    table = np.zeros(len(listed), _ROW)
    table["name"] = _names([row.name for row in listed])
    table["parent"] = _names([row.parent or _NO_PARENT for row in listed])
    table["size_bytes"] = [row.size_bytes for row in listed]
    # An mtime may lie in any year.
    table["used_ns"] = [min(max(row.used_ns, -_NS_MAX), _NS_MAX) for row in listed]
    table["depth"] = [min(row.depth, _DEPTH_MAX) for row in listed]
    table["group"] = [min(row.group, _GROUP_MAX) for row in listed]
    table["has_parent"] = [row.parent is not None for row in listed]
    body = table.tobytes()
    return _HEADER.pack(_MAGIC, _VERSION, _ROW.itemsize, len(listed), xxhash.xxh3_64_intdigest(body)) + body


def unpack_snapshot(content: bytes) -> list[SnapshotRow] | None:
    """The rows; None when `content` is damaged or of another version."""
    if len(content) != _size_of(content[: _HEADER.size]):
        return None
    *_, checksum = _HEADER.unpack_from(content)
    body = memoryview(content)[_HEADER.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    table = np.frombuffer(body, _ROW)
    parents = [
        parent if has_parent else None
        for parent, has_parent in zip(_split(table["parent"]), table["has_parent"].tolist(), strict=True)
    ]
    numbers = [table[column].tolist() for column in ("size_bytes", "used_ns", "depth", "group")]
    return list(map(SnapshotRow, _split(table["name"]), parents, *numbers))


def save_snapshot(path: str, rows: Iterable[SnapshotRow]) -> None:
    """Write the snapshot to `path` atomically, mode 0600.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    write_file(path, f"{path}.{os.getpid()}.{os.urandom(8).hex()}", pack_snapshot(rows))


def load_snapshot(path: str) -> list[SnapshotRow] | None:
    """The rows at `path`; None when absent, unreadable, too long, damaged or of another version."""
    try:
        descriptor, status = open_file(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            header = file.read(_HEADER.size)
            # Checked before reading: a sparse file may have any length.
            if status.st_size != _size_of(header):
                return None
            return unpack_snapshot(header + file.read(status.st_size - len(header)))
    except OSError:
        return None


def _size_of(header: bytes) -> int | None:
    """File length by `header`; None when it is not a header of this version."""
    if len(header) != _HEADER.size:
        return None
    magic, version, row_bytes, row_count, _ = _HEADER.unpack(header)
    if (magic, version, row_bytes) != (_MAGIC, _VERSION, _ROW.itemsize) or row_count > _ROWS_MAX:
        return None
    return _HEADER.size + row_count * row_bytes


def _names(names: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.frombuffer(b"".join(names), "V32")


def _split(names: np.ndarray[Any, np.dtype[np.void]]) -> list[bytes]:
    joined = names.tobytes()
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]
