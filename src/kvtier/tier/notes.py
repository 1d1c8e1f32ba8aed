"""Small JSON files beside what a store keeps: for people and for checks at start, never for the way of a chunk.

A note that is damaged, too long, or no regular file counts as absent.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import xxhash

from kvtier.tier import inside

NOTE = re.compile(r"\.?note-(fingerprint|selftest)-[0-9a-f]{16}(\.json|\.[0-9a-f]{16})")
"""Names of notes, and of those that are being written."""

BYTES_MAX = 1 << 18
NOTES_MAX = 256
"""Notes of one kind; the oldest go."""

Kind = Literal["fingerprint", "selftest"]


def write(root: Path, kind: Kind, name: bytes, content: Mapping[str, object]) -> None:
    """Write a note, whole or not at all; an older one of the same name is replaced.

    Args:
        root: of a store, which is there.
        kind: what it is about.
        name: at least 8 bytes; the first 8 are in the file's name.
        content: what `json` takes.

    Raises:
        OSError: it cannot be written; EFBIG when it is longer than `BYTES_MAX`.
    """
    whole = json.dumps({"checksum": xxhash.xxh3_64_hexdigest(_text(content)), "content": content}).encode()
    if len(whole) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"longer than {BYTES_MAX} bytes", str(root))
    final = f"note-{kind}-{name[:8].hex()}.json"
    draft = f".note-{kind}-{name[:8].hex()}.{secrets.token_hex(8)}"
    with inside.directory_at(os.path.realpath(root), is_listed=True) as folder:
        _make_room(folder, kind, final)
        descriptor, _ = inside.open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(whole)
            os.replace(draft, final, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


def read(root: Path, kind: Kind) -> list[dict[str, object]]:
    """The contents of all notes of one kind; none where the store cannot be read."""
    found: list[dict[str, object]] = []
    with suppress(OSError), inside.directory_at(os.path.realpath(root), is_listed=True) as folder:
        for name in _names(folder, kind)[:NOTES_MAX]:
            with suppress(OSError, ValueError, RecursionError):
                found.append(_content(inside.read_file(name, BYTES_MAX, folder)))
    return found


def _names(folder: int, kind: Kind) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(each.name for each in entries if (match := NOTE.fullmatch(each.name)) and match[1] == kind)


def _make_room(folder: int, kind: Kind, name: str) -> None:
    others = [each for each in _names(folder, kind) if each != name]
    if len(others) >= NOTES_MAX:
        oldest = min(others, key=lambda each: os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
        os.unlink(oldest, dir_fd=folder)


def _content(whole: bytes) -> dict[str, object]:
    """The content of a note.

    Raises:
        ValueError: it is damaged.
    """
    told = _object(json.loads(whole))
    content = _object(told.get("content"))
    if told.get("checksum") != xxhash.xxh3_64_hexdigest(_text(content)):
        raise ValueError("damaged")
    return content


def _object(told: object) -> dict[str, object]:
    return cast("dict[str, object]", told) if isinstance(told, dict) else {}


def _text(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
