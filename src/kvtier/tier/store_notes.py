"""Notes: small JSON files in a store's root, for people and for checks at start. Transfers do not use them.

A note that is damaged, too long, or not a regular file counts as absent.
"""

import errno
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvtier.tier import safe_open
from kvtier.tier.checked_json import pack_json, read_json

NOTE = re.compile(r"\.?note-(fingerprint|selftest)-[0-9a-f]{16}(\.json|\.[0-9a-f]{16})")
"""Names of notes and of their temporary files."""

BYTES_MAX = 1 << 18
NOTES_MAX = 256
"""Most notes of one kind; the oldest are removed."""

Kind = Literal["fingerprint", "selftest"]


def write(root: Path, kind: Kind, name: bytes, content: Mapping[str, object]) -> None:
    """Write a note atomically, replacing one of the same name.

    Args:
        root: of an existing store.
        kind: of the note.
        name: at least 8 bytes; the file's name has the first 8.
        content: JSON values, without a member `checksum`.

    Raises:
        OSError: it cannot be written; EFBIG when it is longer than `BYTES_MAX`.
    """
    whole = pack_json(content)
    if len(whole) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"longer than {BYTES_MAX} bytes", str(root))
    final = f"note-{kind}-{name[:8].hex()}.json"
    draft = f".note-{kind}-{name[:8].hex()}.{secrets.token_hex(8)}"
    with safe_open.folder_at(root) as folder:
        _make_room(folder, kind, final)
        safe_open.write_file(final, draft, whole, folder)


def read(root: Path, kind: Kind) -> list[dict[str, object]]:
    """The contents of all notes of one kind; empty when the store cannot be read."""
    found: list[dict[str, object]] = []
    with suppress(OSError), safe_open.folder_at(root) as folder:
        for name in _names(folder, kind)[:NOTES_MAX]:
            with suppress(OSError):
                content, is_sound = read_json(safe_open.read_file(name, BYTES_MAX, folder))
                if is_sound:
                    found.append(content)
    return found


def _names(folder: int, kind: Kind) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(each.name for each in entries if (match := NOTE.fullmatch(each.name)) and match[1] == kind)


def _make_room(folder: int, kind: Kind, name: str) -> None:
    others = [each for each in _names(folder, kind) if each != name]
    if len(others) >= NOTES_MAX:
        oldest = min(others, key=lambda each: os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
        os.unlink(oldest, dir_fd=folder)
