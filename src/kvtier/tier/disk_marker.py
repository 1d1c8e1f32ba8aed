"""The file that says "this is a disk store of ours", and the lock that keeps it to one process."""

# Descriptors.
# ruff: noqa: PTH116

import fcntl
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError, TierError
from kvtier.tier.disk_format import STORE_ID_BYTES, VERSION
from kvtier.tier.ledger import lock_file
from kvtier.tier.marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.place import RANK, refuse_strangers

MARKER_NAME = "kvtier-disk.json"
SEGMENTS_NAME = "segments"

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"
ALLOWED_RANKS = "an empty or missing directory, or one with stores of ours (rank-0 and so on)"

_MARKER_BYTES_MAX = 4096

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
        ConfigError: `root` holds other things.
        TierError: another process has it.
        OSError: the file system fails.
    """

    def __init__(self, root: Path, tier: str, deadline_s: float) -> None:
        self.path = root / MARKER_NAME
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            refuse_strangers(root, lambda name: name == MARKER_NAME, ALLOWED)
        except ConfigError:
            if not self.path.exists():
                raise
        self._tier = tier
        self._descriptor: int | None = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not lock_file(self._descriptor, fcntl.LOCK_EX, deadline_s):
            self.release()
            raise TierError(
                tier,
                f"root {str(root)!r} is in use by another process; allowed: a directory of its own for each process",
            )

    def read(self) -> Marker | None:
        """What the marker says; None when it is new, damaged or of another version: then the store is empty.

        Raises:
            OSError: the device fails.
        """
        text = os.pread(self._live(), _MARKER_BYTES_MAX, 0)
        marker, reason = _parse(text)
        if marker is None and text:
            logger.warning("tier %s: the store at %s begins anew: %s", self._tier, self.path, reason)
        return marker

    def write(self, segment_bytes: int) -> Marker:
        """Make the marker of a new store.

        Raises:
            OSError: the device fails.
        """
        marker = Marker(os.urandom(STORE_ID_BYTES), segment_bytes, datetime.now(UTC).isoformat(timespec="seconds"))
        told = {
            "about": "A kvtier disk store. Delete the whole directory while nobody uses it, or purge it with kvtier.",
            "version": VERSION,
            "store_id": marker.store_id.hex(),
            "segment_bytes": segment_bytes,
            "created": marker.created,
        }
        descriptor = self._live()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(told, indent=2)}\n".encode(), 0)
        os.fsync(descriptor)
        return marker

    def is_there(self) -> bool:
        """Whether the marker that we hold is the one at its path: false when the disk was taken away or replaced."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._live()))
        except OSError:
            return False

    def release(self) -> None:
        """Let go. Twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _live(self) -> int:
        if self._descriptor is None:
            raise OSError("the store is released")
        return self._descriptor


def refuse_foreign_ranks(path: Path) -> None:
    """Keep out of `path`, in which each rank is to have its store, where it is another's.

    Raises:
        ConfigError: `path` holds other things, and neither a rank's store nor the directory tier's.
        OSError: it cannot be looked into.
    """
    try:
        refuse_strangers(path, lambda name: bool(RANK.fullmatch(name)), ALLOWED_RANKS)
    except ConfigError:
        if not any(path.glob(f"rank-*/{MARKER_NAME}")) and not (path / DIRECTORY_MARKER_NAME).exists():
            raise


def read_marker(root: Path) -> Marker | None:
    """The marker of the store at `root`; None when there is none that we know. Changes nothing, takes no lock.

    Raises:
        OSError: it cannot be read.
    """
    try:
        text = (root / MARKER_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parse(text)[0]


def _parse(text: bytes) -> tuple[Marker | None, str]:
    try:
        told: Any = json.loads(text)
        version, store_id, segment_bytes = told["version"], bytes.fromhex(told["store_id"]), told["segment_bytes"]
    except (ValueError, KeyError, TypeError) as error:
        return None, f"its marker is damaged ({error!r})"
    if version != VERSION:
        return None, f"its version is {version!r}, known here: {VERSION}"
    if len(store_id) != STORE_ID_BYTES or not isinstance(segment_bytes, int) or segment_bytes < 1:
        return None, "its marker is damaged"
    return Marker(store_id, segment_bytes, str(told.get("created", "unknown"))), ""
