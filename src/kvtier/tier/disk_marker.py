"""The file that says "this is a disk store of ours", and the lock that keeps it to one process."""

# Descriptors.
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
from kvtier.tier.disk_files import SEGMENTS_NAME, newest_head
from kvtier.tier.disk_format import STORE_ID_BYTES, VERSION, is_segment_size, pack_json, read_json
from kvtier.tier.disk_status import DRAFT_NAME, STATUS_NAME
from kvtier.tier.marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.marker import UnknownStoreError
from kvtier.tier.safe_open import WRONG_KIND, Descriptor, check_private, make_root, open_file, read_file
from kvtier.tier.store_root import RANK, refuse_foreign_files

MARKER_NAME = "kvtier-disk.json"

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"
ALLOWED_RANKS = "an empty or missing directory, or one with stores of ours (rank-0 and so on)"

_MARKER_BYTES_MAX = 4096
_CREATED_LENGTH_MAX = 40
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, (MARKER_NAME, SEGMENTS_NAME, STATUS_NAME, DRAFT_NAME)))})(\.aside-[0-9a-f]+)?"
)

logger = logging.getLogger(__name__)


class Marker(NamedTuple):
    """What the marker says."""

    store_id: bytes
    """Random, made with the store."""
    segment_bytes: int
    """Of each segment."""
    created: str
    """UTC time, ISO 8601."""


class Claim:
    """The store at `root`, which nobody else has while this is open. It is made where there is none.

    Args:
        root: the directory; made when it is missing, refused when it holds other things.
        tier: name of the tier, for messages.
        deadline_s: how long to wait for another process that has the store.

    Raises:
        ConfigError: `root` holds other things, every user may write to it, or its marker is no regular file.
        TierError: another process has it.
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
        """The marker's content; None when the store is new. A damaged one is made anew from the newest segment's head.

        Raises:
            UnknownStoreError: it is of an unknown version; or it is damaged, and nothing proves that the directory is
                ours. Nothing was changed.
            OSError: the device fails.
            TierError: the marker's file has another name.
        """
        text = os.pread(self._file.fileno(), _MARKER_BYTES_MAX, 0)
        marker = parse_marker(text, self.path)
        if isinstance(marker, Marker):
            self._marker = marker
            return marker
        recovered = self._recovered(marker)
        if recovered is not None:
            logger.warning("tier %s: %s was made anew from the newest segment: %s", self._tier, self.path, marker)
            self._write(recovered)
        elif text:
            logger.warning("tier %s: the store at %s begins anew: %s", self._tier, self.path, marker)
        return recovered

    def write(self, segment_bytes: int) -> Marker:
        """Make the marker of a new store.

        Raises:
            OSError: the device fails.
            TierError: the marker's file has another name.
        """
        marker = Marker(os.urandom(STORE_ID_BYTES), segment_bytes, _now())
        self._write(marker)
        return marker

    def is_there(self) -> bool:
        """Whether the marker that we hold is the one at its path: false when the disk was taken away or replaced."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def restore(self) -> bool:
        """Make the marker anew that was removed from its directory; False when the directory is gone or replaced.

        Raises:
            OSError: the file system fails.
        """
        try:
            is_home = os.path.samestat(os.stat(self.path.parent), os.fstat(self.folder.fileno()))
        except FileNotFoundError:
            return False
        if not is_home or self._marker is None or os.path.lexists(self.path):
            return False
        former, self._file = self._file, self._locked(os.O_CREAT | os.O_EXCL, 0.0)
        former.close()
        self._write(self._marker)
        logger.warning("tier %s: %s was removed and is made anew", self._tier, self.path)
        return True

    def release(self) -> None:
        """Let go. Twice is fine."""
        self._file.close()
        self.folder.close()

    def _locked(self, flags: int, deadline_s: float) -> Descriptor:
        """The marker, opened and locked."""
        try:
            number, _ = open_file(MARKER_NAME, flags | os.O_RDWR, self.folder.fileno())
        except OSError as error:
            if error.errno not in WRONG_KIND:
                raise
            raise ConfigError(f"{self.path} is no regular file ({error}); nothing was changed") from error
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
            "allowed: a directory of its own for each process",
        )

    def _recovered(self, reason: str) -> Marker | None:
        """The marker by the segments; None when these hold nothing.

        Raises:
            UnknownStoreError: something below the root was not made by a disk tier.
        """
        head, strange = newest_head(self.folder.fileno())
        if head is not None:
            return Marker(head.store_id, head.segment_bytes, _now())
        root = self.path.parent
        if not strange:
            try:
                refuse_foreign_files(root, lambda name: bool(_OURS.fullmatch(name)), ALLOWED)
            except ConfigError as error:
                raise UnknownStoreError(f"{reason}, and {error}") from error
            return None
        raise UnknownStoreError(
            f"root {str(root)!r} is no store of ours: {reason}, and {SEGMENTS_NAME}/{strange} is no segment; "
            f"nothing was changed; allowed: {ALLOWED}"
        )

    def _write(self, marker: Marker) -> None:
        told = {
            "about": "A kvtier disk store. Delete the whole directory while it is not in use, or purge it with kvtier.",
            "version": VERSION,
            "store_id": marker.store_id.hex(),
            "segment_bytes": marker.segment_bytes,
            "created": marker.created,
        }
        descriptor = self._file.fileno()
        if os.fstat(descriptor).st_nlink > 1:  # the other one is perhaps outside, and is not written to
            raise TierError(self._tier, f"{self.path} has to be made anew and has another name; remove this one")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, pack_json(told), 0)
        os.fsync(descriptor)
        self._marker = marker


def refuse_foreign_ranks(path: Path) -> None:
    """Keep out of `path`, in which each rank is to have its store, where it is another's.

    Raises:
        ConfigError: `path` holds other things, and neither a rank's store nor the directory tier's.
        OSError: it cannot be looked into.
    """
    try:
        refuse_foreign_files(path, lambda name: bool(RANK.fullmatch(name)), ALLOWED_RANKS)
    except ConfigError:
        if not any(path.glob(f"rank-*/{MARKER_NAME}")) and not (path / DIRECTORY_MARKER_NAME).exists():
            raise


def marker_in(folder: int, root: Path) -> Marker | None:
    """The marker of the store in the directory `folder`, by its segments where it is damaged; None when there is none.

    Changes nothing, takes no lock.

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
    """The content of the marker at `path`, or why it has none.

    Raises:
        UnknownStoreError: it is of an unknown version. A damaged version is none: its checksum does not match.
    """
    told, is_sound = read_json(text)
    version = told.get("version")
    # Without a checksum it may be of a version that has none; with a wrong one this is a flipped bit.
    if type(version) is int and version != VERSION and is_sound is not False:
        raise UnknownStoreError(f"{path} has version {version}; known here: {VERSION}; nothing was changed")
    if not is_sound:
        return "its marker is damaged: its checksum does not match" if told else "its marker is damaged: no JSON object"
    store_id, segment_bytes = told.get("store_id"), told.get("segment_bytes")
    try:
        packed_id = bytes.fromhex(store_id) if isinstance(store_id, str) else b""
    except ValueError:
        packed_id = b""
    if len(packed_id) != STORE_ID_BYTES or type(segment_bytes) is not int or not is_segment_size(segment_bytes):
        return "its marker is out of range"
    return Marker(packed_id, segment_bytes, str(told.get("created", "unknown"))[:_CREATED_LENGTH_MAX])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
