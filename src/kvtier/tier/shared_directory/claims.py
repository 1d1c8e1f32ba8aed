"""The claims of a shared directory, in which each writer declares the bytes it may have written, without a lock.

A claim file contains two counts of one writer (one open store) since it was opened. `written` counts the bytes of
finished writes, and `claimed` is the most that it may have written. A sweep walks the store. It records the bytes that
it found, with `written` of every claim from before the walk. So, at any time, the store holds at most

    bytes of the record + sum over claims of (claimed - written at the record)

A writer first raises its claim and then adds up all claims. At least one of two writers that do this at the same time
sees the other's claim. So the cap holds at every moment on a coherent file system. Where attributes are cached, the cap
is exceeded by at most the bytes claimed within the caching time.
"""

# This code uses plain strings, because paths below the root are single components.
# ruff: noqa: PTH118, PTH208

import errno
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

from kvtier.tier.files.checked_json import pack_json, read_json
from kvtier.tier.files.directory_marker import MARKER_NAME
from kvtier.tier.files.safe_open import VANISHED, directory_at, make_directory, open_file, read_file, write_file

CLAIMS = "usage"
"""The directory of claims and of the sweep's record, in the root."""

RECORD_NAME = "sweep"
_OWNER_DIGITS = 16
_OWNER = re.compile(r"[0-9a-f]{16}")
_DRAFT = re.compile(r"draft_[0-9a-f]{16}_[0-9]{1,20}")
_COUNT_MAX = 1 << 62
_BYTES_MAX = 1 << 20
"""Longest record or claim that is read, enough for some 20,000 writers."""


class Claim(NamedTuple):
    """The counts of one writer."""

    written: int
    claimed: int
    mtime_ns: int
    """Time at which the file system received the claim."""


class SweepRecord(NamedTuple):
    """The record that a sweep left."""

    used_bytes: int
    written: Mapping[str, int]
    """`Claim.written` of each owner before the walk."""
    mtime_ns: int


class Declared(NamedTuple):
    """All that writers and sweeps have declared."""

    record: SweepRecord | None
    claims: Mapping[str, Claim]

    def bound(self, owner: str = "", claimed: int = 0) -> int | None:
        """Return how many bytes the store may hold if `owner` claims `claimed` bytes, or None without a record."""
        if self.record is None:
            return None
        totals = {name: claim.claimed for name, claim in self.claims.items()}
        if owner:
            totals[owner] = max(claimed, totals.get(owner, 0))
        counted = self.record.written
        return self.record.used_bytes + sum(max(0, total - counted.get(name, 0)) for name, total in totals.items())


class Claims:
    """The directory of claims below the root `root`, and the claim of one writer. Not thread-safe."""

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, CLAIMS)
        self._marker = os.path.join(root, MARKER_NAME)
        self.owner = os.urandom(_OWNER_DIGITS // 2).hex()
        """16 hexadecimal digits, unique to this open store."""
        self._drafts = 0

    def declare(self, written: int, claimed: int) -> int:
        """Replace this writer's claim. Return its mtime, which is the store's clock in nanoseconds.

        Raises:
            OSError: the claim cannot be written.
        """
        self._write(self.owner, {"written": written, "claimed": claimed})
        with directory_at(self._path) as directory:
            descriptor, status = open_file(self.owner, os.O_RDONLY, directory)
            os.close(descriptor)  # opening for reading gives up exclusive use of the file (`_share_use` of the tier)
            return status.st_mtime_ns

    def usage(self) -> Declared:
        """Read all claims and the record of the last sweep. Damaged and vanished ones are skipped.

        Raises:
            OSError: the directory cannot be read.
        """
        claims: dict[str, Claim] = {}
        with directory_at(self._path, is_listed=True) as directory:
            for name in filter(_OWNER.fullmatch, os.listdir(directory)):
                found = _content(name, directory)
                if found is not None and _are_counts(found[0], "written", "claimed"):
                    claims[name] = Claim(found[0]["written"], found[0]["claimed"], found[1])
            found = _content(RECORD_NAME, directory)
        record = None
        if found is not None and _are_counts(found[0], "used_bytes"):
            counts: Any = found[0].get("written")
            if isinstance(counts, dict):
                record = SweepRecord(found[0]["used_bytes"], _counts(cast("dict[str, Any]", counts)), found[1])
        return Declared(record, claims)

    def record(self, used_bytes: int, before: Declared, expired_ns: int) -> None:
        """Record a sweep that found `used_bytes`, and remove claims and drafts that are not newer than `expired_ns`.

        Args:
            used_bytes: bytes of the store after the sweep.
            before: the claims before the sweep's walk.
            expired_ns: time on the store's clock.

        Raises:
            OSError: the record cannot be written.
        """
        gone = {name for name, claim in before.claims.items() if claim.mtime_ns <= expired_ns} - {self.owner}
        kept = {name: claim.written for name, claim in before.claims.items() if name not in gone}
        self._write(RECORD_NAME, {"used_bytes": used_bytes, "written": kept})
        with directory_at(self._path, is_listed=True) as directory:
            for name in os.listdir(directory):
                if name in gone or (_DRAFT.fullmatch(name) and _is_old(name, directory, expired_ns)):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        self._drafts += 1
        draft = f"draft_{self.owner}_{self._drafts}"
        os.lstat(self._marker)  # if the store's file system is not mounted, the path leads to this machine's drive
        make_directory(self._path, replace=True)
        with directory_at(self._path) as directory:
            write_file(name, draft, pack_json(fields), directory)


def _content(name: str, directory: int) -> tuple[dict[str, Any], int] | None:
    """Read the fields and mtime of a claim or record. Return None if it is damaged or gone."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        fields, is_sound = read_json(read_file(name, _BYTES_MAX, directory))
    except OSError as error:
        if error.errno not in VANISHED | {errno.EFBIG}:
            raise
        return None
    return (fields, status.st_mtime_ns) if is_sound else None


def _are_counts(fields: Mapping[str, Any], *keys: str) -> bool:
    return all(type(fields.get(key)) is int and 0 <= fields[key] <= _COUNT_MAX for key in keys)


def _counts(fields: Mapping[str, Any]) -> dict[str, int]:
    return {name: count for name, count in fields.items() if _are_counts(fields, name)}


def _is_old(name: str, directory: int, expired_ns: int) -> bool:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns <= expired_ns
    except FileNotFoundError:
        return False
