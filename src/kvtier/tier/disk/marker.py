"""The marker of a disk store, and its lock, which restricts the store to one process."""

# ruff: noqa: PTH116

import fcntl
import logging
import os
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import TierError, other_version
from kvtier.tier import store_root
from kvtier.tier.cap_file import lock_file
from kvtier.tier.checked_json import pack_json, read_json
from kvtier.tier.directory_marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.disk.format import (
    SEGMENT_BYTES_MAX,
    STORE_ID_BYTES,
    VERSION,
    is_segment_size,
)  # fmt: skip
from kvtier.tier.disk.segment_files import SEGMENTS_NAME, newest_head
from kvtier.tier.disk.status import SILENT_S, STATUS_NAME, TEMP_NAME, read_status
from kvtier.tier.safe_open import Descriptor, UnusableStoreError, check_private, folder_at, is_at, make_root, open_file
from kvtier.tier.store_root import RANK, read_marker

MARKER_NAME = "kvtier-disk.json"

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"
ALLOWED_RANKS = "an empty or missing directory, or one with kvtier stores (rank-0 and so on)"

_CREATED_LENGTH_MAX = 40
_OURS = frozenset({MARKER_NAME, SEGMENTS_NAME, STATUS_NAME, TEMP_NAME})

logger = logging.getLogger(__name__)


class DiskMarker(NamedTuple):
    """Content of the marker."""

    store_id: bytes
    """Random, unique to the store."""
    segment_bytes: int
    """Size of each segment."""
    created: str
    """UTC time, ISO 8601."""


class DiskStoreLock:
    """Exclusive lock of the disk store at `root`, through its marker. Creates both when missing.

    Args:
        root: the directory; created when missing. One without a marker that is not empty is refused.
        tier: name of the tier, for messages.
        deadline_s: longest wait for another process that has the store open.

    Raises:
        UnusableStoreError: `root` has files and no marker, is world-writable, or its marker is not a regular file.
        TierError: another process has it open.
        OSError: the file system fails.
    """

    def __init__(self, root: Path, tier: str, deadline_s: float) -> None:
        self.path = root / MARKER_NAME
        self._tier = tier
        self._marker: DiskMarker | None = None
        make_root(root)
        check_private(tier, root)
        self.folder = Descriptor(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        """The root."""
        try:
            find_marker(root)
            self._file = self._locked(os.O_CREAT, deadline_s)
        except BaseException:
            self.folder.close()
            raise

    def read(self) -> DiskMarker | None:
        """The marker's content; None when the store is new.

        Raises:
            UnusableStoreError: the version is unknown, or the marker is damaged. Nothing was changed.
            OSError: the device fails.
        """
        self._marker = find_marker(self.path.parent)
        return self._marker

    def write(self, segment_bytes: int) -> DiskMarker:
        """Write the marker of a new store.

        Raises:
            OSError: the device fails.
            TierError: another process has replaced the marker and locked it.
        """
        marker = DiskMarker(os.urandom(STORE_ID_BYTES), segment_bytes, _now())
        self._write(marker)
        return marker

    def is_current(self) -> bool:
        """Whether the locked marker is still at its path. False after an unmount or a replacement."""
        return self._file.is_open and is_at(self.path, self._file.fileno())

    def restore(self) -> bool:
        """Recreate a removed marker. False when the directory is gone or was replaced.

        Raises:
            OSError: the file system fails.
        """
        try:
            is_home = os.path.samestat(os.stat(self.path.parent), os.fstat(self.folder.fileno()))
        except FileNotFoundError:
            return False
        if not is_home or self._marker is None or os.path.lexists(self.path):
            return False
        old, self._file = self._file, self._locked(os.O_CREAT | os.O_EXCL, 0.0)
        old.close()
        self._write(self._marker)
        logger.warning("tier %s: %s was removed and was recreated", self._tier, self.path)
        return True

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()
        self.folder.close()

    def _locked(self, flags: int, deadline_s: float) -> Descriptor:
        """Open and lock the marker."""
        number, _ = open_file(MARKER_NAME, flags | os.O_RDWR, self.folder.fileno())
        file = Descriptor(number)
        is_locked = False
        try:
            # A repair or a purge may have replaced it meanwhile, and then another process has that file.
            is_locked = lock_file(number, fcntl.LOCK_EX, deadline_s) and is_at(self.path, number)
        finally:
            if not is_locked:
                file.close()
        if is_locked:
            return file
        raise TierError(
            self._tier,
            f"root {str(self.path.parent)!r} is in use by another process; "
            "allowed: a separate directory for each process",
        )

    def _write(self, marker: DiskMarker) -> None:
        # A new file: the locked one may have another hard link, outside the store, at any time.
        store_root.write_marker(self.path, _packed(marker), replaces=True)
        old, self._file = self._file, self._locked(0, 0.0)
        old.close()
        self._marker = marker


def find_marker(root: Path) -> DiskMarker | None:
    """The marker of the disk store at `root`; None where `DiskStoreLock` makes one. Read-only.

    An empty marker in an empty directory is that of a process that was killed while it made the store.

    Raises:
        UnusableStoreError: the marker is damaged or of an unknown version, or is missing next to other files.
        OSError: it cannot be read.
    """
    return store_root.find_marker(root / MARKER_NAME, parse_marker, MARKER_NAME.__eq__, ALLOWED)


def repair_marker(root: Path) -> list[str]:
    """Give the disk store at `root` a new marker if its own is missing or damaged. What was done, in sentences.

    The newest segment tells the store's identity. Without a valid segment the store is empty.

    Raises:
        UnusableStoreError: `root` has foreign files or a marker of another version, or a process has it open.
        OSError: it cannot be read or written.
    """
    path = root / MARKER_NAME
    return store_root.repair_marker(
        path, partial(read_marker, path, parse_marker), lambda: _packed(_recovered(root)), lambda: _refuse_living(root)
    )


def _refuse_living(root: Path) -> bool:
    """False unless the status is that of a process that has the store open.

    Raises:
        UnusableStoreError: it is.
    """
    status = read_status(root)
    if status is not None and status.is_open and time.time() - status.time_s <= SILENT_S:
        raise UnusableStoreError(
            f"{root}: a running process has the store open, by its status; end it first. After a kill the status "
            f"counts for {SILENT_S:g} s"
        )
    return False


def _recovered(root: Path) -> DiskMarker:
    """The marker by the newest segment; without a valid one of a size that opening replaces.

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
    store_root.refuse_foreign_files(root, _OURS.__contains__, "files of a kvtier store only")
    return DiskMarker(os.urandom(STORE_ID_BYTES), SEGMENT_BYTES_MAX, _now())


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
    """Whether `root` has names of a disk store, whatever its marker says."""
    return any(os.path.lexists(root / name) for name in (MARKER_NAME, SEGMENTS_NAME))


def refuse_foreign_ranks(path: Path) -> None:
    """Refuse a directory for ranks' stores that has foreign files.

    Raises:
        UnusableStoreError: `path` has foreign files, and neither a rank's store nor a directory store.
        OSError: it cannot be listed.
    """
    try:
        store_root.refuse_foreign_files(path, lambda name: bool(RANK.fullmatch(name)), ALLOWED_RANKS)
    except UnusableStoreError:
        if not any(path.glob(f"rank-*/{MARKER_NAME}")) and not (path / DIRECTORY_MARKER_NAME).exists():
            raise


def parse_marker(text: bytes, path: Path) -> DiskMarker | None:
    """The content of the marker at `path`; None when it is empty.

    Raises:
        UnusableStoreError: the version is unknown.
        ValueError: it is damaged.
    """
    if not text:
        return None
    members, is_sound = read_json(text)
    version, segment_bytes = members.get("version"), members.get("segment_bytes")
    # A version without checksums is possible; a wrong checksum means a flipped bit.
    if type(version) is int and version != VERSION and is_sound is not False:
        raise UnusableStoreError(f"{path} has {other_version(version, VERSION)}; nothing was changed")
    if not is_sound:
        raise ValueError("its checksum does not match" if members else "no JSON object")
    store_id = bytes.fromhex(members["store_id"])
    if len(store_id) != STORE_ID_BYTES or type(segment_bytes) is not int or not is_segment_size(segment_bytes):
        raise ValueError("out of range")
    return DiskMarker(store_id, segment_bytes, str(members.get("created", "unknown"))[:_CREATED_LENGTH_MAX])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
