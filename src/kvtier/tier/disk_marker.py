"""The marker of a disk store, and its lock, which restricts the store to one process."""

# ruff: noqa: PTH116

import errno
import fcntl
import logging
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError, TierError
from kvtier.tier.cap_file import lock_file
from kvtier.tier.directory_marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.directory_marker import UnknownStoreError
from kvtier.tier.disk_format import STORE_ID_BYTES, VERSION, is_segment_size, pack_json, read_json
from kvtier.tier.disk_status import STATUS_NAME, TEMP_NAME
from kvtier.tier.safe_open import WRONG_KIND, Descriptor, check_private, make_root, open_file, read_file
from kvtier.tier.segment_files import SEGMENTS_NAME, newest_head
from kvtier.tier.store_root import RANK, refuse_foreign_files

MARKER_NAME = "kvtier-disk.json"

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"
ALLOWED_RANKS = "an empty or missing directory, or one with kvtier stores (rank-0 and so on)"

_MARKER_BYTES_MAX = 4096
_CREATED_LENGTH_MAX = 40
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, (MARKER_NAME, SEGMENTS_NAME, STATUS_NAME, TEMP_NAME)))})(\.aside-[0-9a-f]+)?"
)

logger = logging.getLogger(__name__)


class Marker(NamedTuple):
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
        root: the directory; created when missing. One with foreign files is refused.
        tier: name of the tier, for messages.
        deadline_s: longest wait for another process that has the store open.

    Raises:
        ConfigError: `root` has foreign files, is world-writable, or its marker is not a regular file.
        TierError: another process has it open.
        OSError: the file system fails.
    """

    def __init__(self, root: Path, tier: str, deadline_s: float) -> None:
        self.path = root / MARKER_NAME
        self._tier = tier
        self._marker: Marker | None = None
        make_root(root)
        check_private(tier, root)
        self.folder = Descriptor(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        """The root."""
        try:
            if not os.path.lexists(self.path):
                refuse_foreign_files(root, lambda name: name == MARKER_NAME, ALLOWED)
            self._file = self._locked(os.O_CREAT, deadline_s)
        except BaseException:
            self.folder.close()
            raise

    def read(self) -> Marker | None:
        """The marker's content; None when the store is new. A damaged one is recreated from the newest segment.

        Raises:
            UnknownStoreError: the version is unknown; or the marker is damaged and no segment identifies the store.
                Nothing was changed.
            OSError: the device fails.
            TierError: the marker has another hard link.
        """
        text = os.pread(self._file.fileno(), _MARKER_BYTES_MAX, 0)
        marker = parse_marker(text, self.path)
        if isinstance(marker, Marker):
            self._marker = marker
            return marker
        recovered = self._recovered(marker)
        if recovered is not None:
            logger.warning("tier %s: %s was recreated from the newest segment: %s", self._tier, self.path, marker)
            self._write(recovered)
        elif text:
            logger.warning("tier %s: the store at %s is recreated empty: %s", self._tier, self.path, marker)
        return recovered

    def write(self, segment_bytes: int) -> Marker:
        """Write the marker of a new store.

        Raises:
            OSError: the device fails.
            TierError: the marker has another hard link.
        """
        marker = Marker(os.urandom(STORE_ID_BYTES), segment_bytes, _now())
        self._write(marker)
        return marker

    def is_current(self) -> bool:
        """Whether the locked marker is still at its path. False after an unmount or a replacement."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._file.fileno()))
        except OSError:
            return False

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
        try:
            number, _ = open_file(MARKER_NAME, flags | os.O_RDWR, self.folder.fileno())
        except OSError as error:
            if error.errno not in WRONG_KIND:
                raise
            raise ConfigError(f"{self.path} is not a regular file ({error}); nothing was changed") from error
        file = Descriptor(number)
        is_locked = False
        try:
            is_locked = lock_file(number, fcntl.LOCK_EX, deadline_s)
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

    def _recovered(self, reason: str) -> Marker | None:
        """The marker recovered from the segments; None when they are empty.

        Raises:
            UnknownStoreError: the root has foreign files.
        """
        head, foreign = newest_head(self.folder.fileno())
        if head is not None:
            return Marker(head.store_id, head.segment_bytes, _now())
        root = self.path.parent
        if not foreign:
            try:
                refuse_foreign_files(root, lambda name: bool(_OURS.fullmatch(name)), ALLOWED)
            except ConfigError as error:
                raise UnknownStoreError(f"{reason}, and {error}") from error
            return None
        raise UnknownStoreError(
            f"root {str(root)!r} is not a kvtier store: {reason}, and {SEGMENTS_NAME}/{foreign} is not a segment; "
            f"nothing was changed; allowed: {ALLOWED}"
        )

    def _write(self, marker: Marker) -> None:
        members = {
            "about": "A kvtier disk store. Delete the whole directory while it is not in use, or purge it with kvtier.",
            "version": VERSION,
            "store_id": marker.store_id.hex(),
            "segment_bytes": marker.segment_bytes,
            "created": marker.created,
        }
        descriptor = self._file.fileno()
        if os.fstat(descriptor).st_nlink > 1:  # the other link may lie outside the store
            raise TierError(self._tier, f"{self.path} must be recreated but has another hard link; remove this file")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, pack_json(members), 0)
        os.fsync(descriptor)
        self._marker = marker


def refuse_foreign_ranks(path: Path) -> None:
    """Refuse a directory for ranks' stores that has foreign files.

    Raises:
        ConfigError: `path` has foreign files, and neither a rank's store nor a directory store.
        OSError: it cannot be listed.
    """
    try:
        refuse_foreign_files(path, lambda name: bool(RANK.fullmatch(name)), ALLOWED_RANKS)
    except ConfigError:
        if not any(path.glob(f"rank-*/{MARKER_NAME}")) and not (path / DIRECTORY_MARKER_NAME).exists():
            raise


def marker_in(folder: int, root: Path) -> Marker | None:
    """The marker of the store in `folder`, or recovered from its segments; None when there is none.

    Read-only; takes no lock.

    Raises:
        UnknownStoreError: it is of an unknown version.
        OSError: it cannot be read.
    """
    try:
        marker = parse_marker(read_file(MARKER_NAME, _MARKER_BYTES_MAX, folder), root / MARKER_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in {*WRONG_KIND, errno.EFBIG}:
            raise
        marker = str(error)
    if isinstance(marker, Marker):
        return marker
    head, _ = newest_head(folder)
    return None if head is None else Marker(head.store_id, head.segment_bytes, "unknown")


def parse_marker(text: bytes, path: Path) -> Marker | str:
    """The content of the marker at `path`, or the reason why it is invalid.

    Raises:
        UnknownStoreError: the version is unknown, and the checksum does not show a damaged file.
    """
    members, is_sound = read_json(text)
    version = members.get("version")
    # A version without checksums is possible; a wrong checksum means a flipped bit.
    if type(version) is int and version != VERSION and is_sound is not False:
        raise UnknownStoreError(f"{path} has version {version}; known here: {VERSION}; nothing was changed")
    if not is_sound:
        return (
            "its marker is damaged: its checksum does not match" if members else "its marker is damaged: no JSON object"
        )
    store_id, segment_bytes = members.get("store_id"), members.get("segment_bytes")
    try:
        packed_id = bytes.fromhex(store_id) if isinstance(store_id, str) else b""
    except ValueError:
        packed_id = b""
    if len(packed_id) != STORE_ID_BYTES or type(segment_bytes) is not int or not is_segment_size(segment_bytes):
        return "its marker is out of range"
    return Marker(packed_id, segment_bytes, str(members.get("created", "unknown"))[:_CREATED_LENGTH_MAX])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
