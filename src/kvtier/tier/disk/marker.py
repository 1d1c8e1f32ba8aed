"""The marker of a disk store, whose lock restricts the store to one process."""

import os
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import other_version
from kvtier.tier.disk.format import (
    SEGMENT_BYTES_MAX,
    STORE_ID_BYTES,
    VERSION,
    is_segment_size,
)  # fmt: skip
from kvtier.tier.disk.segment_files import SEGMENTS_NAME, newest_head
from kvtier.tier.disk.status import FILES as STATUS_FILES
from kvtier.tier.files import store_root
from kvtier.tier.files.checked_json import pack_json, read_json
from kvtier.tier.files.directory_marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.files.safe_open import UnusableStoreError, folder_at
from kvtier.tier.files.store_root import RANK, read_marker

MARKER_NAME = "kvtier-disk.json"

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"
ALLOWED_RANKS = "an empty or missing directory, or one with kvtier stores (rank-0 and so on)"

_CREATED_LENGTH_MAX = 40
_OURS = re.compile(rf"{re.escape(MARKER_NAME)}|{SEGMENTS_NAME}|{STATUS_FILES.pattern}")


class DiskMarker(NamedTuple):
    """Content of the marker."""

    store_id: bytes
    """Random, unique to the store."""
    segment_bytes: int
    """Size of each segment."""
    created: str
    """UTC time, ISO 8601."""


def open_marker(root: Path, segment_bytes: int) -> DiskMarker:
    """Open the disk store's marker at `root`. A missing or empty directory becomes a store with `segment_bytes`.

    Raises the errors of `store_root.open_marker`.
    """
    return store_root.open_marker(
        root / MARKER_NAME, parse_marker, _is_new, ALLOWED, _packed(new_marker(segment_bytes))
    )


def replace_marker(root: Path, segment_bytes: int) -> DiskMarker:
    """Replace the store at `root` with a new, empty one. Call this only under the exclusive lock of the old marker.

    Raises:
        OSError: the marker cannot be written.
    """
    marker = new_marker(segment_bytes)
    # This makes a new file, because the old one may have another hard link outside the store at any time.
    store_root.write_marker(root / MARKER_NAME, _packed(marker), replaces=True)
    return marker


def new_marker(segment_bytes: int) -> DiskMarker:
    """Make the marker of a new store."""
    return DiskMarker(os.urandom(STORE_ID_BYTES), segment_bytes, _now())


def _is_new(_name: str) -> bool:
    return False


def find_marker(root: Path) -> DiskMarker | None:
    """Read the marker of the disk store at `root`. Return None if `open_marker` would make one.

    Raises:
        UnusableStoreError: the marker is damaged, of an unknown version, or missing next to other files.
        OSError: the marker cannot be read.
    """
    return store_root.find_marker(root / MARKER_NAME, parse_marker, _is_new, ALLOWED)


def repair_marker(root: Path) -> list[str]:
    """Give the disk store at `root` a new marker if its own is missing or damaged. Return what was done, in sentences.

    The newest segment identifies the store. If no segment is valid, the store becomes empty.

    Raises:
        UnusableStoreError: `root` has foreign files or a marker of another version, or a process has it open.
        OSError: the marker cannot be read or written.
    """
    path = root / MARKER_NAME
    return store_root.repair_marker(path, partial(read_marker, path, parse_marker), lambda: _packed(_recovered(root)))


def _recovered(root: Path) -> DiskMarker:
    """Make a marker from the newest segment. If no segment is valid, opening the store will replace the segment size.

    Raises:
        UnusableStoreError: nothing identifies the store, and the directory has foreign files.
    """
    with folder_at(root) as folder:
        head, foreign = newest_head(folder)
    if head is not None:
        return DiskMarker(head.store_id, head.segment_bytes, _now())
    if foreign:
        raise UnusableStoreError(
            f"root {str(root)!r} is not a kvtier store: {SEGMENTS_NAME}/{foreign} is not a segment; nothing was changed"
        )
    store_root.refuse_foreign_files(root, lambda name: bool(_OURS.fullmatch(name)), "files of a kvtier store only")
    return new_marker(SEGMENT_BYTES_MAX)


def _packed(marker: DiskMarker) -> bytes:
    return pack_json(
        {
            "about": "A kvtier disk store. Delete the whole directory while it is not in use, or purge it with kvtier.",
            "version": VERSION,
            "store_id": marker.store_id.hex(),
            "segment_bytes": marker.segment_bytes,
            "created": marker.created,
        }
    )


def holds_store(root: Path) -> bool:
    """Return whether `root` has file names of a disk store, whatever its marker says."""
    return any(os.path.lexists(root / name) for name in (MARKER_NAME, SEGMENTS_NAME))


def refuse_foreign_ranks(path: Path) -> None:
    """Refuse a directory for the ranks' stores if it has foreign files.

    Raises:
        UnusableStoreError: `path` has foreign files, and neither a rank's store nor a directory store.
        OSError: `path` cannot be listed.
    """
    try:
        store_root.refuse_foreign_files(path, lambda name: bool(RANK.fullmatch(name)), ALLOWED_RANKS)
    except UnusableStoreError:
        if not any(path.glob(f"rank-*/{MARKER_NAME}")) and not (path / DIRECTORY_MARKER_NAME).exists():
            raise


def parse_marker(text: bytes, path: Path) -> DiskMarker:
    """Parse the content of the marker at `path`.

    Raises:
        UnusableStoreError: the version is unknown.
        ValueError: the marker is damaged.
    """
    members, is_sound = read_json(text)
    version, segment_bytes = members.get("version"), members.get("segment_bytes")
    # A version without checksums is possible; a wrong checksum means a flipped bit.
    if type(version) is int and version != VERSION and is_sound is not False:
        raise UnusableStoreError(f"{path} has {other_version(version, VERSION)}; nothing was changed")
    if not is_sound:
        raise ValueError("its checksum does not match" if members else "it is not a JSON object")
    store_id = bytes.fromhex(members["store_id"])
    if len(store_id) != STORE_ID_BYTES or type(segment_bytes) is not int or not is_segment_size(segment_bytes):
        raise ValueError("a field is out of range")
    return DiskMarker(store_id, segment_bytes, str(members.get("created", "unknown"))[:_CREATED_LENGTH_MAX])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
