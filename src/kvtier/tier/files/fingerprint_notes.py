"""Notes: small JSON files in a store's root with the inputs of a fingerprint, for people only.

A note that is damaged, too long, or not a regular file counts as absent.
"""

import errno
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvtier.tier.files import safe_open
from kvtier.tier.files.checked_json import pack_json, read_json

NOTE = re.compile(r"\.?note-(fingerprint|model)-[0-9a-f]{16}(\.json|\.[0-9a-f]{16})")
"""Names of notes and of their temporary files. Earlier versions wrote `note-fingerprint-*`."""

BYTES_MAX = 1 << 18
NOTES_MAX = 256
"""Maximum number of notes in a store. The oldest are removed."""


def write(root: Path, model: bytes, content: Mapping[str, object]) -> None:
    """Write a note atomically, replacing one of the same name.

    Args:
        root: root of an existing store.
        model: the model id, 16 bytes. The file's name contains the first 8, which `kvtier inspect` shows.
        content: JSON values, without a member `checksum`.

    Raises:
        OSError: the note cannot be written; EFBIG if it is longer than `BYTES_MAX`.
    """
    whole = pack_json(content)
    if len(whole) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"longer than {BYTES_MAX} bytes", str(root))
    final = f"note-model-{model[:8].hex()}.json"
    draft = f".note-model-{model[:8].hex()}.{secrets.token_hex(8)}"
    with safe_open.folder_at(root) as folder:
        _make_room(folder, final)
        safe_open.write_file(final, draft, whole, folder)


def read(root: Path) -> list[dict[str, object]]:
    """Return the contents of all notes; empty if the store cannot be read."""
    found: list[dict[str, object]] = []
    with suppress(OSError), safe_open.folder_at(root) as folder:
        for name in _names(folder)[:NOTES_MAX]:
            with suppress(OSError):
                content, is_sound = read_json(safe_open.read_file(name, BYTES_MAX, folder))
                if is_sound:
                    found.append(content)
    return found


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(each.name for each in entries if NOTE.fullmatch(each.name))


def _make_room(folder: int, name: str) -> None:
    others = [each for each in _names(folder) if each != name]
    if len(others) >= NOTES_MAX:
        oldest = min(others, key=lambda each: os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
        os.unlink(oldest, dir_fd=folder)
