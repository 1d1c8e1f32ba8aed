"""The file that says "this directory is a store of ours", without which we neither use nor delete anything in it."""

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
from kvtier.tier.notes import NOTE
from kvtier.tier.safe_open import WRONG_KIND, make_root, open_file, read_file, set_aside
from kvtier.tier.store_root import RANK, refuse_foreign_files

MARKER_NAME = "kvtier-store.json"
STORE_VERSION = 1
"""Version of the directory's layout. Another one is neither read nor touched."""

_DRAFT_PREFIX = f".{MARKER_NAME}."
_BYTES_MAX = 4096
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_LOCK_DEADLINE_S = 1.0

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"

BESIDE = re.compile(
    rf"ledger|secret|\.secret\.[0-9a-f]+|index(\.[0-9]+\.[0-9a-f]+)?|{NOTE.pattern}|\.{re.escape(MARKER_NAME)}\.[0-9a-f]+"
)
"""Files of a store beside its marker."""
_OURS = re.compile(rf"({BESIDE.pattern}|{re.escape(MARKER_NAME)}|objects|drafts)(\.aside-[0-9a-f]+)?|{RANK.pattern}")

logger = logging.getLogger(__name__)


class UnknownStoreError(ConfigError):
    """A store that kvtier cannot use: of another version, or with a damaged marker."""


class DamagedMarkerError(UnknownStoreError):
    """What has the marker's name is no marker. Opening the store makes it anew, where nothing else is in there."""

    WHAT_NEXT = "opening the store makes it anew, unless other things are in the directory"


@dataclass(frozen=True, slots=True)
class Marker:
    """What the marker says."""

    version: int
    store_id: str
    """Random, made with the store: two stores never share it."""
    created: str
    """UTC time, ISO 8601."""


def open_store(root: Path) -> Marker:
    """The marker of the store at `root`, which is made (mode 0700) where there is none and the directory is empty.

    Safe when several processes do it at once: all get the same marker. A damaged marker is made anew where everything
    in the directory has a name of ours: each object's frame holds its own identity.

    Raises:
        ConfigError: `root` is a file, holds other things, or an unknown store.
        OSError: it cannot be read or written.
    """
    try:
        found = read_marker(root)
    except DamagedMarkerError as error:
        return _mend_marker(root, error)
    if found is not None:
        return found
    make_root(root)
    try:
        refuse_foreign(root)
    except ConfigError:
        found = read_marker(root)  # another process may have made it since we looked
        if found is None:
            raise
        return found
    return _make_marker(root)


def refuse_foreign(root: Path) -> None:
    """Keep out of `root`, which has no marker, where it is another's.

    Raises:
        ConfigError: it holds other things.
        OSError: it cannot be listed.
    """
    # Both tiers may have one place, and the disk tier may be the first to open there.
    refuse_foreign_files(root, lambda name: name.startswith(_DRAFT_PREFIX) or bool(RANK.fullmatch(name)), ALLOWED)


def read_marker(root: Path) -> Marker | None:
    """The marker of the store at `root`; None when there is none. Changes nothing.

    Raises:
        ConfigError: `root` is a file, or its marker is damaged (`DamagedMarkerError`) or of an unknown version
            (`UnknownStoreError`).
        OSError: it cannot be read for another reason.
    """
    path = root / MARKER_NAME
    try:
        return _parse(path, read_file(str(path), _BYTES_MAX))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise ConfigError(f"root {str(root)!r} is not a directory; allowed: {ALLOWED}") from error
    except OSError as error:
        if error.errno not in WRONG_KIND | {errno.EFBIG}:
            raise
        raise _damaged(path, error.strerror) from error


def _parse(path: Path, content: bytes) -> Marker:
    try:
        fields: Any = json.loads(content)
        version, store_id, created = fields["version"], fields["store_id"], fields["created"]
        checksum = fields.get("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if type(version) is not int or checksum not in {None, _checksum(version, str(store_id), str(created))}:
        raise _damaged(path, "its checksum does not match")
    if version != STORE_VERSION:
        raise UnknownStoreError(f"{path} has store version {version}; known here: {STORE_VERSION}; nothing was changed")
    if not _STORE_ID.fullmatch(str(store_id)):
        raise _damaged(path, f"its store_id is {store_id!r}")
    return Marker(version, str(store_id), str(created))


def _damaged(path: Path, why: str | None) -> DamagedMarkerError:
    return DamagedMarkerError(f"{path} is not a store's marker ({why}); nothing was changed")


def _checksum(version: int, store_id: str, created: str) -> str:
    return f"{xxhash.xxh3_64_intdigest(f'{version} {store_id} {created}'.encode('utf-8', 'replace')):016x}"


def _new_marker() -> tuple[Marker, bytes]:
    marker = Marker(STORE_VERSION, uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"))
    fields = {
        "about": "A kvtier store. Delete it with `kvtier inspect purge`, or the whole directory when it is unused.",
        "version": marker.version,
        "store_id": marker.store_id,
        "created": marker.created,
        "checksum": _checksum(marker.version, marker.store_id, marker.created),
    }
    return marker, f"{json.dumps(fields, indent=2)}\n".encode()


def _make_marker(root: Path) -> Marker:
    draft = root / f"{_DRAFT_PREFIX}{uuid.uuid4().hex}"
    descriptor, _ = open_file(str(draft), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_new_marker()[1])
            file.flush()
            os.fsync(descriptor)
        _publish_once(draft, root / MARKER_NAME)
    finally:
        draft.unlink(missing_ok=True)
    found = read_marker(root)  # ours, or that of a process which was faster
    if found is None:
        raise ConfigError(f"root {str(root)!r} lost its marker while it was made; is something else deleting there?")
    return found


def _mend_marker(root: Path, damage: DamagedMarkerError) -> Marker:
    """Write the damaged marker anew, in its place: processes that have the store open keep their locks on the file."""
    path = root / MARKER_NAME
    try:
        refuse_foreign_files(root, lambda name: bool(_OURS.fullmatch(name)), ALLOWED)
    except ConfigError as error:
        raise DamagedMarkerError(f"{damage}; it is not made anew, because {error}") from damage
    try:
        descriptor, status = open_file(str(path), os.O_RDWR)
    except OSError as error:
        if error.errno not in WRONG_KIND:
            raise
        set_aside(str(path))
        return _make_marker(root)
    if status.st_nlink > 1:  # the file has another name, perhaps outside, and is not written to
        os.close(descriptor)
        set_aside(str(path))
        return _make_marker(root)
    try:
        is_alone = lock_file(descriptor, fcntl.LOCK_EX, _LOCK_DEADLINE_S)
        try:
            found = read_marker(root)  # another process may have done it since we looked
        except DamagedMarkerError:
            found = None
        if found is not None:
            return found
        if not is_alone:
            raise DamagedMarkerError(f"{damage}, because another process has the store open") from damage
        marker, content = _new_marker()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    logger.warning("%s was damaged and is made anew; the store's objects stay", path)
    return marker


def _publish_once(draft: Path, marker: Path) -> None:
    """Give `draft` its name unless another has it. A link does not overwrite, unlike a rename."""
    with suppress(FileExistsError):
        try:
            os.link(draft, marker)
        except PermissionError:  # a file system without hard links: the last of several makers wins
            draft.rename(marker)
