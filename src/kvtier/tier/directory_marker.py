"""The marker that identifies a directory store. Without it kvtier neither uses nor deletes anything there."""

import errno
import fcntl
import json
import logging
import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from kvtier.errors import ConfigError
from kvtier.tier.cap_file import lock_file
from kvtier.tier.safe_open import WRONG_KIND, make_root, open_file, read_file, set_aside
from kvtier.tier.store_notes import NOTE
from kvtier.tier.store_root import RANK, refuse_foreign_files

MARKER_NAME = "kvtier-store.json"
STORE_VERSION = 1
"""Version of the directory's layout. A store of another version is neither read nor changed."""
SHARED_VERSION = 2
"""Version of the layout of a directory that many nodes share (`shared_directory`)."""

_KINDS = {STORE_VERSION: "directory", SHARED_VERSION: "shared_directory"}
_DRAFT_PREFIX = f".{MARKER_NAME}."
_BYTES_MAX = 4096
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_LOCK_DEADLINE_S = 1.0

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"

BESIDE = re.compile(
    rf"ledger|secret|\.secret\.[0-9a-f]+|index(\.[0-9]+\.[0-9a-f]+)?|{NOTE.pattern}|\.{re.escape(MARKER_NAME)}\.[0-9a-f]+"
)
"""Names of a store's other files in its root."""
_OURS = re.compile(
    rf"({BESIDE.pattern}|{re.escape(MARKER_NAME)}|objects|drafts|usage|[0-9a-f]{{32}})(\.aside-[0-9a-f]+)?|{RANK.pattern}"
)

logger = logging.getLogger(__name__)


class UnknownStoreError(ConfigError):
    """A store of another version, or with a damaged marker."""


class DamagedMarkerError(UnknownStoreError):
    """The marker is damaged. Opening the store recreates it unless the directory has foreign files."""

    WHAT_NEXT = "opening the store recreates it, unless the directory has other files"


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of the marker."""

    version: int
    store_id: str
    """Random, unique to the store."""
    created: str
    """UTC time, ISO 8601."""


def open_store(root: Path, version: int = STORE_VERSION) -> Marker:
    """The marker of the store at `root`. A store of `version` is created (mode 0700) in a missing or empty directory.

    Concurrent processes all get the same marker. A damaged marker is recreated when every name in the directory is
    kvtier's; that is safe because each frame holds its own identity.

    Raises:
        ConfigError: `root` is a file, has foreign files, or an unknown store.
        OSError: it cannot be read or written.
    """
    try:
        found = read_marker(root, version)
    except DamagedMarkerError as error:
        return _mend_marker(root, error, version)
    if found is not None:
        return found
    make_root(root)
    try:
        refuse_foreign(root)
    except ConfigError:
        found = read_marker(root, version)  # another process may have created it meanwhile
        if found is None:
            raise
        return found
    return _make_marker(root, version)


def refuse_foreign(root: Path) -> None:
    """Refuse a directory without a marker that has foreign files.

    Raises:
        ConfigError: it has foreign files.
        OSError: it cannot be listed.
    """
    # Both tiers may share a root, and the disk tier may open first.
    refuse_foreign_files(root, lambda name: name.startswith(_DRAFT_PREFIX) or bool(RANK.fullmatch(name)), ALLOWED)


def read_marker(root: Path, version: int = STORE_VERSION) -> Marker | None:
    """The marker of the store at `root`; None when it has none. Read-only.

    Raises:
        ConfigError: `root` is a file, or its marker is damaged (`DamagedMarkerError`) or of another version
            than `version` (`UnknownStoreError`).
        OSError: it cannot be read for another reason.
    """
    path = root / MARKER_NAME
    try:
        return _parse(path, read_file(str(path), _BYTES_MAX), version)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise ConfigError(f"root {str(root)!r} is not a directory; allowed: {ALLOWED}") from error
    except OSError as error:
        if error.errno not in WRONG_KIND | {errno.EFBIG}:
            raise
        raise _damaged(path, error.strerror) from error


def _parse(path: Path, content: bytes, expected: int) -> Marker:
    try:
        fields: Any = json.loads(content)
        version, store_id, created = fields["version"], fields["store_id"], fields["created"]
        checksum = fields.get("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if type(version) is not int or checksum not in {None, _checksum(version, str(store_id), str(created))}:
        raise _damaged(path, "its checksum does not match")
    if version != expected:
        hint = f" ({version} is of the kind {_KINDS[version]})" if version in _KINDS else ""
        raise UnknownStoreError(
            f"{path} has store version {version}; known here: {expected}{hint}; nothing was changed"
        )
    if not _STORE_ID.fullmatch(str(store_id)):
        raise _damaged(path, f"its store_id is {store_id!r}")
    return Marker(version, str(store_id), str(created))


def _damaged(path: Path, why: str | None) -> DamagedMarkerError:
    return DamagedMarkerError(f"{path} is not a valid marker ({why}); nothing was changed")


def _checksum(version: int, store_id: str, created: str) -> str:
    return f"{xxhash.xxh3_64_intdigest(f'{version} {store_id} {created}'.encode('utf-8', 'replace')):016x}"


def _new_marker(version: int) -> tuple[Marker, bytes]:
    marker = Marker(version, uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"))
    fields = {
        "about": "A kvtier store. Delete it with `kvtier inspect purge`, or the whole directory when it is unused.",
        "version": marker.version,
        "store_id": marker.store_id,
        "created": marker.created,
        "checksum": _checksum(marker.version, marker.store_id, marker.created),
    }
    return marker, f"{json.dumps(fields, indent=2)}\n".encode()


def _make_marker(root: Path, version: int) -> Marker:
    draft = root / f"{_DRAFT_PREFIX}{uuid.uuid4().hex}"
    descriptor, _ = open_file(str(draft), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_new_marker(version)[1])
            file.flush()
            os.fsync(descriptor)
        _publish_once(draft, root / MARKER_NAME)
    finally:
        draft.unlink(missing_ok=True)
    found = read_marker(root, version)  # ours, or that of a concurrent process
    if found is None:
        raise ConfigError(
            f"root {str(root)!r} lost its marker while it was created; another program may delete files there"
        )
    return found


def _mend_marker(root: Path, damage: DamagedMarkerError, version: int) -> Marker:
    """Rewrite the damaged marker in place, so that locks of other processes on the file stay valid.

    A shared store has no locks: its damaged marker is renamed, and of several new ones the first is kept.
    """
    path = root / MARKER_NAME
    try:
        refuse_foreign_files(root, lambda name: bool(_OURS.fullmatch(name)), ALLOWED)
    except ConfigError as error:
        raise DamagedMarkerError(f"{damage}; it was not recreated: {error}") from damage
    if version == SHARED_VERSION:
        with suppress(FileNotFoundError):
            set_aside(str(path))
        return _make_marker(root, version)
    try:
        descriptor, status = open_file(str(path), os.O_RDWR)
    except OSError as error:
        if error.errno not in WRONG_KIND:
            raise
        set_aside(str(path))
        return _make_marker(root, version)
    if status.st_nlink > 1:  # the other hard link may lie outside the store
        os.close(descriptor)
        set_aside(str(path))
        return _make_marker(root, version)
    try:
        is_alone = lock_file(descriptor, fcntl.LOCK_EX, _LOCK_DEADLINE_S)
        try:
            found = read_marker(root, version)  # another process may have done it meanwhile
        except DamagedMarkerError:
            found = None
        if found is not None:
            return found
        if not is_alone:
            raise DamagedMarkerError(f"{damage}; another process has the store open") from damage
        marker, content = _new_marker(version)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    logger.warning("%s was damaged and was recreated; the store's objects are kept", path)
    return marker


def _publish_once(draft: Path, marker: Path) -> None:
    """Give `draft` the marker's name if it is free. Unlike a rename, a link does not overwrite."""
    with suppress(FileExistsError):
        try:
            os.link(draft, marker)
        except PermissionError:  # no hard links: the last of several creators wins
            draft.rename(marker)
