"""What lies in a store's directory, seen from outside: no lock is kept, nothing is written, nobody is disturbed.

Objects may come and go while one looks. What vanishes between two looks is left out.
"""

import errno
import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import disk_usage

from kvtier.codec import registry
from kvtier.codec.head import FIXED_BYTES, Head, head_bytes_told, read_head
from kvtier.errors import ConfigError, CorruptChunkError
from kvtier.tier.cap_file import read_cap_file
from kvtier.tier.disk_marker import MARKER_NAME as DISK_MARKER_NAME
from kvtier.tier.marker import MARKER_NAME, DamagedMarkerError, Marker, read_marker
from kvtier.tier.safe_open import open_file
from kvtier.tier.store_paths import Found, Paths, charge_bytes, walk
from kvtier.tier.temp_files import owners_alive, reserved

FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRow:
    """One object, as its file and the head of its frame tell."""

    name: str
    size_bytes: int
    used: float
    """Last known use, seconds since 1970; other processes note theirs about once a minute."""
    age_s: float
    group: int | None = None
    rank: int | None = None
    depth: int | None = None
    tokens: int | None = None
    fingerprint: str | None = None
    parent: str | None = None
    problem: str | None = None
    """Why the head cannot be read; then all that it would have told is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A page of a store's objects, by name."""

    directory: str
    objects: list[ObjectRow]
    total: int
    next: str | None
    """Where the next page begins: give it to ``--after``. None on the last page."""


@dataclass(slots=True, kw_only=True)
class FingerprintShare:
    """What one fingerprint (weights, revision, attention and RoPE settings, dtype) takes in a store."""

    objects: int = 0
    bytes: int = 0
    tokens: int = 0
    groups: list[int] = field(default_factory=list[int])
    ranks: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat:
    """The totals of a store."""

    directory: str
    store_id: str
    version: int
    created: str
    objects: int
    bytes: int
    """Of the objects' files."""
    charged_bytes: int
    """What they count against the cap: each in whole blocks of 4 KiB."""
    ledger_bytes: int | None
    """What the ledger says is in use, drafts included; None where it cannot be told."""
    capacity_bytes: int | None
    """The cap, where the settings are about this directory."""
    drafts: int
    draft_bytes: int
    """Reserved for what is being written."""
    open_in: int
    """Tiers, of whatever processes, that have the store open now."""
    free_bytes: int
    """Of the file system."""
    unreadable: int
    """Objects whose head cannot be read."""
    oldest_age_s: float | None
    newest_age_s: float | None
    fingerprints: dict[str, FingerprintShare]
    """By the first digits of the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRow:
    """One line of a section table."""

    layer: int
    payload_offset: int
    raw_bytes: int
    offset: int
    stored_bytes: int
    checksum: str
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """One object's head and section table."""

    object: ObjectRow
    path: str
    version: int | None = None
    codec: str | None = None
    header_bytes: int | None = None
    frame_bytes: int | None = None
    raw_bytes: int | None = None
    layers: int | None = None
    layout: str | None = None
    sections: list[SectionRow] = field(default_factory=list[SectionRow])


def marker_of(root: Path) -> Marker:
    """The marker of the store at `root`.

    Raises:
        ConfigError: there is no store of ours.
    """
    try:
        marker = read_marker(root)
    except DamagedMarkerError as error:
        raise ConfigError(f"{error}; {error.WHAT_NEXT}") from error
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}; allowed: a store's directory") from error
    if marker is None:
        why = f"holds no {MARKER_NAME}" if root.is_dir() else "does not exist"
        if (root / "rank-0" / DISK_MARKER_NAME).exists():
            raise ConfigError(f"{root} is of the disk tier; allowed here: one of its stores, such as {root / 'rank-0'}")
        raise ConfigError(f"{root} {why}, so it is no store of ours; allowed here: a store's directory")
    return marker


def listing(root: Path, *, limit: int, after: str = "") -> Listing:
    """At most `limit` objects whose names come after `after` (hexadecimal digits), in the order of names."""
    marker_of(root)
    paths = Paths(str(root))
    found = sorted(walk(paths.objects))
    start = bisect_right(found, after.lower(), key=lambda file: file.name.hex())
    page = found[start : start + limit]
    rows = [row for row in (_row(paths, file) for file in page) if row is not None]
    more = page[-1].name.hex() if start + limit < len(found) else None
    return Listing(directory=str(root), objects=rows, total=len(found), next=more)


def statistics(root: Path, capacity_bytes: int | None, advance: Callable[[float], None]) -> StoreStat:
    """The totals of the store at `root`; reads every head, and calls `advance` with 1 for each."""
    marker, paths = marker_of(root), Paths(str(root))
    rows: list[ObjectRow] = []
    for file in list(walk(paths.objects)):
        row = _row(paths, file)
        if row is not None:
            rows.append(row)
        advance(1)
    drafts = reserved(paths.temp_files)
    return StoreStat(
        directory=str(root),
        store_id=marker.store_id,
        version=marker.version,
        created=marker.created,
        objects=len(rows),
        bytes=sum(row.size_bytes for row in rows),
        charged_bytes=sum(charge_bytes(row.size_bytes) for row in rows),
        ledger_bytes=read_cap_file(paths.cap_file),
        capacity_bytes=capacity_bytes,
        drafts=len(drafts),
        draft_bytes=sum(drafts),
        open_in=owners_alive(paths.temp_files),
        free_bytes=disk_usage(root).free,
        unreadable=sum(row.problem is not None for row in rows),
        oldest_age_s=max((row.age_s for row in rows), default=None),
        newest_age_s=min((row.age_s for row in rows), default=None),
        fingerprints=by_fingerprint(rows),
    )


def find(root: Path, prefix: str) -> Found:
    """The one object whose name begins with `prefix` (hexadecimal digits).

    Raises:
        ConfigError: there is none, or more than one, or `prefix` is no such thing.
    """
    marker_of(root)
    wanted = prefix.lower()
    if not wanted or set(wanted) - set("0123456789abcdef"):
        raise ConfigError(f"name {prefix!r}: not the beginning of an object's name; allowed: hexadecimal digits")
    matching = sorted(file for file in walk(Paths(str(root)).objects) if file.name.hex().startswith(wanted))
    if not matching:
        raise ConfigError(f"name {prefix!r}: no object in {root} begins with it")
    if len(matching) > 1:
        some = ", ".join(file.name.hex()[: len(wanted) + 6] for file in matching[:5])
        raise ConfigError(f"name {prefix!r}: {len(matching)} objects in {root} begin with it, such as {some}")
    return matching[0]


def view(root: Path, file: Found) -> ObjectView:
    """The head and the section table of one object.

    Raises:
        ConfigError: it has vanished.
    """
    paths = Paths(str(root))
    path = paths.object(file.name)
    row = _row(paths, file)
    if row is None:
        raise ConfigError(f"object {file.name.hex()[:12]} has just been removed")
    if row.problem is not None:
        return ObjectView(object=row, path=path)
    return viewed(row, path, head_of(paths, file.name))


def viewed(row: ObjectRow, path: str, head: Head) -> ObjectView:
    """What `head` tells of the object of `row`."""
    return ObjectView(
        object=row,
        path=path,
        version=head.version,
        codec=_codec(head.codec),
        header_bytes=head.header_bytes,
        frame_bytes=head.frame_bytes,
        raw_bytes=head.raw_bytes,
        layers=head.layers,
        layout=head.identity.layout_digest.hex(),
        sections=[
            SectionRow(
                layer=section.layer,
                payload_offset=section.payload_offset,
                raw_bytes=section.raw_bytes,
                offset=section.offset,
                stored_bytes=section.stored_bytes,
                checksum=f"{section.checksum:016x}",
                codec=_codec(section.codec),
            )
            for section in head.sections
        ],
    )


@contextmanager
def opened_object(paths: Paths, name: bytes) -> Generator[tuple[int, os.stat_result]]:
    """A descriptor of the object's file, for reading, and its status.

    Raises:
        FileNotFoundError: it has vanished.
        OSError: it cannot be opened, or is no regular file.
    """
    fan = paths.open_fan(name)
    if fan is None:
        raise FileNotFoundError(errno.ENOENT, "has vanished", paths.object(name))
    try:
        descriptor, status = open_file(name.hex(), os.O_RDONLY, fan)
    finally:
        os.close(fan)
    try:
        yield descriptor, status
    finally:
        os.close(descriptor)


def head_in(descriptor: int) -> Head:
    """The head of the frame in the open file `descriptor`.

    Raises:
        CorruptChunkError: it is damaged, cut off, or no frame.
        OSError: it cannot be read.
    """
    needed = head_bytes_told(os.pread(descriptor, FIXED_BYTES, 0))
    return read_head(os.pread(descriptor, needed, 0))


def head_of(paths: Paths, name: bytes) -> Head:
    """The head of the object's frame; raises what `opened_object` and `head_in` do."""
    with opened_object(paths, name) as (descriptor, _):
        return head_in(descriptor)


def _row(paths: Paths, file: Found) -> ObjectRow | None:
    """The row of one object; None when it has vanished."""
    age_s = max(time.time() - file.mtime_ns / 1e9, 0.0)
    bare = ObjectRow(name=file.name.hex(), size_bytes=file.size_bytes, used=file.mtime_ns / 1e9, age_s=age_s)
    try:
        head = head_of(paths, file.name)
    except FileNotFoundError:
        return None
    except CorruptChunkError as error:
        return replace(bare, problem=error.detail)
    except OSError as error:
        return replace(bare, problem=f"cannot be read: {error.strerror}")
    return with_head(bare, head)


def with_head(bare: ObjectRow, head: Head) -> ObjectRow:
    """`bare` with what the head of its frame tells."""
    identity = head.identity
    return replace(
        bare,
        group=identity.group,
        rank=identity.rank,
        depth=identity.depth,
        tokens=identity.tokens,
        fingerprint=identity.fingerprint.hex(),
        parent=identity.parent.hex() if identity.parent else None,
    )


def by_fingerprint(rows: list[ObjectRow]) -> dict[str, FingerprintShare]:
    """What each fingerprint takes, by its first digits."""
    shares: dict[str, FingerprintShare] = defaultdict(FingerprintShare)
    for row in rows:
        if row.fingerprint is None or row.group is None or row.rank is None:
            continue
        share = shares[row.fingerprint[:FINGERPRINT_DIGITS]]
        share.objects += 1
        share.bytes += row.size_bytes
        share.tokens += row.tokens or 0
        share.groups = sorted({*share.groups, row.group})
        share.ranks = sorted({*share.ranks, row.rank})
    return dict(sorted(shares.items()))


def _codec(number: int) -> str:
    try:
        return registry.by_id(number).name
    except ConfigError:
        return f"unknown ({number})"
