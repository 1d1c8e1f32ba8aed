"""The operations of `kvtier inspect` on a store of either kind; `directory` and `disk` know the layouts.

Inspection takes no lock and writes nothing, so it may run while other processes use the store. Objects that disappear
meanwhile are left out. Only a repair, a purge and a compaction open the store.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

from kvtier.codec import registry
from kvtier.codec.frame import verify_section
from kvtier.codec.head import FIXED_BYTES, Head, head_bytes_of, read_head
from kvtier.errors import ConfigError, CorruptChunkError
from kvtier.layout import SECTION_BYTES_MAX
from kvtier.tier.base import Tier
from kvtier.tier.direct import forget_cached, read_part
from kvtier.types import ObjectName

FINGERPRINT_DIGITS = 12
UNBOUNDED_BYTES = 1 << 62
"""Cap of a tier that must not evict."""

_THREADS = 4
_BATCH = 16 * _THREADS


class ObjectFile(NamedTuple):
    """Location of an object's frame. Sorts by name."""

    name: bytes
    size_bytes: int
    used_s: float
    """Last known use, seconds since 1970; in a disk store the start of its segment."""
    path: str
    number: int = 0
    """Number of the segment, in a disk store."""
    offset: int = 0
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRow:
    """One object, by its file and the head of its frame."""

    name: str
    size_bytes: int
    used: float
    """Last known use, seconds since 1970; other processes record theirs about once a minute."""
    age_s: float
    group: int | None = None
    part: str | None = None
    """Layers and heads of the group, and the rank if the heads are not known."""
    depth: int | None = None
    tokens: int | None = None
    fingerprint: str | None = None
    parent: str | None = None
    problem: str | None = None
    """Why the head is invalid; the fields from the head are None then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A page of a store's objects, by name."""

    directory: str
    objects: list[ObjectRow]
    total: int
    next: str | None
    """Argument of ``--after`` for the next page; None on the last page."""


@dataclass(slots=True, kw_only=True)
class FingerprintShare:
    """Objects of one fingerprint (weights, revision, attention and RoPE settings, dtype) in a store."""

    objects: int = 0
    bytes: int = 0
    tokens: int = 0
    groups: list[int] = field(default_factory=list[int])
    parts: list[str] = field(default_factory=list[str])


class Usage(NamedTuple):
    """Identity of a store, and what its own files record."""

    store_id: str
    version: int
    created: str
    charged_bytes: int
    open_in: int
    recorded_bytes: int | None = None
    capacity_bytes: int | None = None
    temp_files: int = 0
    temp_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat:
    """The totals of a store."""

    directory: str
    store_id: str
    version: int
    created: str
    objects: int
    bytes: int
    """Sum of the objects' frames."""
    charged_bytes: int
    """Counted against the cap: whole blocks of 4 KiB per object, or whole segments."""
    recorded_bytes: int | None
    """Bytes in use by the cap file, temporary files included; None without a valid cap file."""
    capacity_bytes: int | None
    """The cap, where it is known."""
    temp_files: int
    temp_bytes: int
    """Reserved by temporary files."""
    open_in: int
    """Tiers of running processes that have the store open."""
    free_bytes: int
    """Free space of the file system."""
    unreadable: int
    """Objects with an invalid head."""
    oldest_age_s: float | None
    newest_age_s: float | None
    fingerprints: dict[str, FingerprintShare]
    """Share of each fingerprint, by its first digits."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """An object that fails verification."""

    name: str
    size_bytes: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Verification:
    """Result of reading all objects."""

    directory: str
    checked: int = 0
    bad: int = 0
    bytes: int = 0
    """Read and verified."""
    dropped: int = 0
    """Bad objects removed by a repair."""
    bad_objects: list[BadObject] = field(default_factory=list[BadObject])


@dataclass(slots=True, kw_only=True)
class Purge:
    """Result of removing a store."""

    directory: str
    objects: int = 0
    bytes: int = 0
    """Sum of the objects."""
    is_emptied_only: bool = False
    """Other processes had the store open: its objects were removed, the store was not."""
    left: list[str] = field(default_factory=list[str])
    """Foreign files that were kept (the first hundred)."""


class StoreInspector(ABC):
    """The store at `root`.

    Raises:
        ConfigError: `root` has no store of this kind.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._local = threading.local()

    @abstractmethod
    def objects(self) -> list[ObjectFile]:
        """All objects, by name."""

    @abstractmethod
    def usage(self) -> Usage:
        """Usage as the store's own files record it."""

    @abstractmethod
    def opened(self, stored: ObjectFile) -> AbstractContextManager[int]:
        """A descriptor of the object's file, closed at the end of the block.

        Raises:
            FileNotFoundError: the object disappeared.
            OSError: it cannot be opened.
        """

    @abstractmethod
    def open_tier(self) -> Tier:
        """The store, opened as a tier.

        Raises:
            ConfigError: it cannot be opened.
            TierError: another process has it open, and it is not shared.
        """

    @abstractmethod
    def purge(self, *, force: bool) -> Purge:
        """Remove the store; the directory itself and foreign files are kept.

        Args:
            force: when other processes have a shared store open, remove its objects and keep the store.

        Raises:
            ConfigError: other processes have it open.
            OSError: a file cannot be removed; earlier ones are gone.
        """

    def stored_bytes(self, stored: ObjectFile, descriptor: int) -> int:  # noqa: ARG002 - directory stores need it
        """Bytes of the frame, by the file that holds it."""
        return stored.size_bytes

    def listing(self, *, limit: int, after: str = "") -> Listing:
        """List at most `limit` objects with names after `after` (hexadecimal digits)."""
        found = self.objects()
        start = bisect_right(found, after.lower(), key=lambda stored: stored.name.hex())
        page = found[start : start + limit]
        rows = [row for row in map(self.row, page) if row is not None]
        more = page[-1].name.hex() if start + limit < len(found) else None
        return Listing(directory=str(self.root), objects=rows, total=len(found), next=more)

    def statistics(self, found: Sequence[ObjectFile], advance: Callable[[float], None]) -> StoreStat:
        """The totals. Reads the head of each of `found`, and calls `advance` with 1 after each."""
        rows: list[ObjectRow] = []
        for stored in found:
            row = self.row(stored)
            if row is not None:
                rows.append(row)
            advance(1)
        usage = self.usage()
        return StoreStat(
            directory=str(self.root),
            store_id=usage.store_id,
            version=usage.version,
            created=usage.created,
            objects=len(rows),
            bytes=sum(row.size_bytes for row in rows),
            charged_bytes=usage.charged_bytes,
            recorded_bytes=usage.recorded_bytes,
            capacity_bytes=usage.capacity_bytes,
            temp_files=usage.temp_files,
            temp_bytes=usage.temp_bytes,
            open_in=usage.open_in,
            free_bytes=disk_usage(self.root).free,
            unreadable=sum(row.problem is not None for row in rows),
            oldest_age_s=max((row.age_s for row in rows), default=None),
            newest_age_s=min((row.age_s for row in rows), default=None),
            fingerprints=_by_fingerprint(rows),
        )

    def find(self, prefix: str) -> ObjectFile:
        """The only object whose name begins with `prefix` (hexadecimal digits).

        Raises:
            ConfigError: none or several match, or `prefix` is not hexadecimal.
        """
        wanted = prefix.lower()
        if not wanted or set(wanted) - set("0123456789abcdef"):
            raise ConfigError(f"name {prefix!r} is not the beginning of an object's name; allowed: hexadecimal digits")
        matching = [stored for stored in self.objects() if stored.name.hex().startswith(wanted)]
        if not matching:
            raise ConfigError(f"name {prefix!r}: no object in {self.root} begins with it")
        if len(matching) > 1:
            some = ", ".join(stored.name.hex()[: len(wanted) + 6] for stored in matching[:5])
            raise ConfigError(f"name {prefix!r}: {len(matching)} objects in {self.root} begin with it, such as {some}")
        return matching[0]

    def view(self, stored: ObjectFile) -> ObjectView:
        """The head and the section table of one object.

        Raises:
            ConfigError: the object disappeared.
        """
        row = self.row(stored)
        if row is None:
            raise ConfigError(f"object {stored.name.hex()[:12]} was removed meanwhile")
        if row.problem is not None:
            return ObjectView(object=row, path=stored.path)
        with self.opened(stored) as descriptor:
            head = self._head(stored, descriptor)
        return ObjectView(
            object=row,
            path=stored.path,
            version=head.version,
            codec=_codec_name(head.codec),
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
                    codec=_codec_name(section.codec),
                )
                for section in head.sections
            ],
        )

    def verify(self, found: Sequence[ObjectFile], advance: Callable[[float], None]) -> Verification:
        """Read and verify each of `found`; calls `advance` with the bytes of each."""
        result = Verification(directory=str(self.root))
        for stored, reason in self._problems(found):
            advance(stored.size_bytes)
            if reason is None:
                continue
            result.checked += 1
            result.bytes += stored.size_bytes
            if reason:
                result.bad += 1
                name = stored.name.hex()
                result.bad_objects.append(BadObject(name=name, size_bytes=stored.size_bytes, reason=reason))
        return result

    def repair(self, found: Sequence[ObjectFile], result: Verification) -> None:
        """Remove the bad objects of `result`, after verifying each of them again.

        Raises:
            ConfigError: the store cannot be opened.
            TierError: another process has it open, and it is not shared.
        """
        bad = {item.name for item in result.bad_objects}
        if not bad:
            return
        with closing(self.open_tier()) as tier:
            for stored in found:
                if stored.name.hex() in bad and self.problem(stored):
                    tier.delete(ObjectName(stored.name))
                    result.dropped += 1

    def row(self, stored: ObjectFile) -> ObjectRow | None:
        """The row of one object; None when it disappeared."""
        age_s = max(time.time() - stored.used_s, 0.0)
        bare = ObjectRow(name=stored.name.hex(), size_bytes=stored.size_bytes, used=stored.used_s, age_s=age_s)
        try:
            with self.opened(stored) as descriptor:
                identity = self._head(stored, descriptor).identity
        except FileNotFoundError:
            return None
        except CorruptChunkError as error:
            return replace(bare, problem=error.detail)
        except OSError as error:
            return replace(bare, problem=f"cannot be read: {error.strerror}")
        return replace(
            bare,
            group=identity.group,
            part=identity.part.text,
            depth=identity.depth,
            tokens=identity.tokens,
            fingerprint=identity.fingerprint.hex(),
            parent=identity.parent.hex() if identity.parent else None,
        )

    def problem(self, stored: ObjectFile) -> str | None:
        """Why the object fails verification: "" when it passes, None when it disappeared."""
        try:
            with self.opened(stored) as descriptor:
                head = self._head(stored, descriptor)
                size_bytes = self.stored_bytes(stored, descriptor)
                if head.frame_bytes != size_bytes:
                    return f"{size_bytes} bytes stored of a frame of {head.frame_bytes}"
                self._verify_sections(stored, descriptor, head)
                forget_cached(descriptor, stored.offset, size_bytes)
        except FileNotFoundError:
            return None
        except CorruptChunkError as error:
            return error.detail
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return ""

    def _problems(self, found: Sequence[ObjectFile]) -> Iterator[tuple[ObjectFile, str | None]]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-verify") as pool:
            # In batches, so that an interrupt does not wait for all objects.
            remaining = iter(found)
            while batch := list(islice(remaining, _BATCH)):
                yield from zip(batch, pool.map(self.problem, batch), strict=True)

    def _head(self, stored: ObjectFile, descriptor: int) -> Head:
        needed = min(head_bytes_of(os.pread(descriptor, FIXED_BYTES, stored.offset)), stored.size_bytes)
        head = read_head(os.pread(descriptor, needed, stored.offset))
        if head.identity.name != stored.name:
            raise CorruptChunkError(stored.name, f"belongs to another object, {head.identity.name.hex()[:12]}")
        return head

    def _verify_sections(self, stored: ObjectFile, descriptor: int, head: Head) -> None:
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = bytearray(SECTION_BYTES_MAX)
        for section in head.sections:
            extent = memoryview(buffer)[: section.extent_bytes]
            count = read_part(descriptor, extent, stored.offset + section.offset)
            verify_section(head, section, extent[:count])


def _by_fingerprint(rows: list[ObjectRow]) -> dict[str, FingerprintShare]:
    shares: dict[str, FingerprintShare] = defaultdict(FingerprintShare)
    for row in rows:
        if row.fingerprint is None or row.group is None or row.part is None:
            continue
        share = shares[row.fingerprint[:FINGERPRINT_DIGITS]]
        share.objects += 1
        share.bytes += row.size_bytes
        share.tokens += row.tokens or 0
        share.groups = sorted({*share.groups, row.group})
        share.parts = sorted({*share.parts, row.part})
    return dict(sorted(shares.items()))


def _codec_name(number: int) -> str:
    try:
        return registry.by_id(number).name
    except ConfigError:
        return f"unknown ({number})"
