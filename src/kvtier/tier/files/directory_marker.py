"""The marker that identifies a directory store. kvtier neither uses nor deletes anything in a directory without it."""

import json
import re
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from kvtier.errors import other_version
from kvtier.tier.files import store_root
from kvtier.tier.files.fingerprint_notes import NOTE
from kvtier.tier.files.safe_open import UnusableStoreError
from kvtier.tier.files.store_root import RANK, refuse_foreign_files

MARKER_NAME = "kvtier-store.json"
STORE_VERSION = 1
"""Version of the directory's layout. A store of another version is neither read nor changed."""
SHARED_VERSION = 2
"""Version of the layout of a directory that many nodes share (`shared_directory`)."""

_KINDS = {STORE_VERSION: "directory", SHARED_VERSION: "shared_directory"}
_DRAFT_PREFIX = f".{MARKER_NAME}."
_STORE_ID = re.compile(r"[0-9a-f]{32}")

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"

BESIDE = re.compile(
    rf"ledger|secret|\.secret\.[0-9a-f]+|index(\.[0-9]+\.[0-9a-f]+)?|{NOTE.pattern}|\.{re.escape(MARKER_NAME)}\.[0-9a-f]+"
)
"""Names of the files beside the marker in a store's root."""
_SHARED = re.compile(r"usage|[0-9a-f]{32}")
_OURS = {
    STORE_VERSION: re.compile(rf"{BESIDE.pattern}|{re.escape(MARKER_NAME)}|objects|drafts|{RANK.pattern}"),
    SHARED_VERSION: re.compile(rf"\.?{re.escape(MARKER_NAME)}(\.[0-9a-f]+)?|{_SHARED.pattern}"),
}
"""All names that kvtier creates in a store's root, by version."""


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of the marker."""

    version: int
    store_id: str
    """Random, unique to the store."""
    created: str
    """UTC time, ISO 8601."""


def open_store(root: Path, version: int = STORE_VERSION) -> Marker:
    """Open the marker of the store at `root`. A missing or empty directory becomes a store of `version`.

    The directory gets mode 0700. Raises the errors of `store_root.open_marker`.
    """
    path = root / MARKER_NAME
    return store_root.open_marker(path, partial(_parse, expected=version), _is_new, ALLOWED, _new_marker(version))


def find_marker(root: Path, version: int) -> Marker | None:
    """Return the marker of the store at `root`, or None if `open_store` would make one. Raises the same errors."""
    return store_root.find_marker(root / MARKER_NAME, partial(_parse, expected=version), _is_new, ALLOWED)


def _is_new(name: str) -> bool:
    # Both tiers may share a root, and the disk tier may open first.
    return name.startswith(_DRAFT_PREFIX) or bool(RANK.fullmatch(name))


def read_marker(root: Path, version: int = STORE_VERSION) -> Marker | None:
    """Read the marker of the store at `root`. Return None if it has none.

    Raises:
        UnusableStoreError: it is damaged (`store_root.DamagedMarkerError`), or its version is not `version`.
        OSError: it cannot be read.
    """
    return store_root.read_marker(root / MARKER_NAME, partial(_parse, expected=version))


def _parse(content: bytes, path: Path, expected: int) -> Marker:
    fields: Any = json.loads(content)
    marker = Marker(fields["version"], str(fields["store_id"]), str(fields["created"]))
    if type(marker.version) is not int or fields.get("checksum") not in (None, _checksum(marker)):
        raise ValueError("its checksum does not match")
    if marker.version != expected:
        kind = _KINDS.get(marker.version)
        found = other_version(marker.version, expected) if kind is None else f"version {marker.version}, of kind {kind}"
        raise UnusableStoreError(f"{path} has store {found}; nothing was changed")
    if not _STORE_ID.fullmatch(marker.store_id):
        raise ValueError(f"its store_id is {marker.store_id!r}")
    return marker


def _checksum(marker: Marker) -> str:
    text = f"{marker.version} {marker.store_id} {marker.created}"
    return f"{xxhash.xxh3_64_intdigest(text.encode('utf-8', 'replace')):016x}"


def _new_marker(version: int) -> bytes:
    marker = Marker(version, uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"))
    about = "A kvtier store. Delete it with `kvtier inspect purge`, or the whole directory when it is unused."
    fields = {"about": about, **asdict(marker), "checksum": _checksum(marker)}
    return f"{json.dumps(fields, indent=2)}\n".encode()


def layout_of(root: Path) -> int | None:
    """Return the store version that the names in `root` indicate, whatever its marker says, or None without a store.

    Raises:
        OSError: `root` cannot be listed.
    """
    names = {path.name for path in root.iterdir()}
    if any(map(_SHARED.fullmatch, names)):
        return SHARED_VERSION
    return STORE_VERSION if names & {MARKER_NAME, "objects", "drafts", "ledger"} else None


def repair_marker(root: Path, version: int) -> list[str]:
    """Give the store at `root` a new marker if its own is missing or damaged. Return what was done, in sentences.

    The objects stay, because each frame contains its own identity.

    Raises:
        UnusableStoreError: `root` has foreign files or a marker of another version, or a process has it open.
        OSError: the marker cannot be read or written.
    """

    def content() -> bytes:
        refuse_foreign_files(root, lambda name: bool(_OURS[version].fullmatch(name)), "files of a kvtier store only")
        return _new_marker(version)

    return store_root.repair_marker(root / MARKER_NAME, partial(read_marker, root, version), content)
