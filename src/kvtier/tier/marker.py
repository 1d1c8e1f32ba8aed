"""The file that says "this directory is a store of ours", without which we neither use nor delete anything in it."""

import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.tier.inside import make_root
from kvtier.tier.place import RANK, refuse_strangers

MARKER_NAME = "kvtier-store.json"
STORE_VERSION = 1
"""Version of the directory's layout. Another one is neither read nor touched."""

_DRAFT_PREFIX = f".{MARKER_NAME}."

ALLOWED = f"an empty or missing directory, or one with a {MARKER_NAME}"


class UnknownStoreError(ConfigError):
    """A store of ours that cannot be read: of another version, or with a damaged marker."""


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

    Safe when several processes do it at once: all get the same marker.

    Raises:
        ConfigError: `root` is a file, holds other things, or an unknown store.
        OSError: it cannot be read or written.
    """
    found = read_marker(root)
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
    refuse_strangers(root, lambda name: name.startswith(_DRAFT_PREFIX) or bool(RANK.fullmatch(name)), ALLOWED)


def read_marker(root: Path) -> Marker | None:
    """The marker of the store at `root`; None when there is none. Changes nothing.

    Raises:
        ConfigError: `root` is a file, or (`UnknownStoreError`) its marker is damaged or of an unknown version.
        OSError: it cannot be read for another reason.
    """
    try:
        text = (root / MARKER_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise ConfigError(f"root {str(root)!r} is not a directory; allowed: {ALLOWED}") from error
    try:
        told: Any = json.loads(text)
        version, store_id, created = told["version"], str(told["store_id"]), str(told["created"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownStoreError(
            f"{root / MARKER_NAME} is not a store's marker ({error!r}); nothing was changed"
        ) from error
    if version != STORE_VERSION:
        raise UnknownStoreError(
            f"{root / MARKER_NAME} has store version {version!r}; known here: {STORE_VERSION}; nothing was changed"
        )
    return Marker(STORE_VERSION, store_id, created)


def _make_marker(root: Path) -> Marker:
    marker = Marker(STORE_VERSION, uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"))
    told = {
        "about": "A kvtier store. Delete it with `kvtier inspect purge`, or the whole directory while nobody uses it.",
        "version": marker.version,
        "store_id": marker.store_id,
        "created": marker.created,
    }
    draft = root / f"{_DRAFT_PREFIX}{uuid.uuid4().hex}"
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=2)
            file.write("\n")
        _publish_once(draft, root / MARKER_NAME)
    finally:
        draft.unlink(missing_ok=True)
    found = read_marker(root)  # ours, or that of a process which was faster
    if found is None:
        raise ConfigError(f"root {str(root)!r} lost its marker while it was made; is something else deleting there?")
    return found


def _publish_once(draft: Path, marker: Path) -> None:
    """Give `draft` its name unless another has it. A link does not overwrite, unlike a rename."""
    with suppress(FileExistsError):
        try:
            os.link(draft, marker)
        except PermissionError:  # a file system without hard links: the last of several makers wins
            draft.rename(marker)
