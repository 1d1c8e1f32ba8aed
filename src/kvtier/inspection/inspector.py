"""Implements the operations of `kvtier inspect` on stores of any kind, through `tier.store_view.StoreView`.

Inspection takes no lock and writes nothing, so it may run while other processes use the store. It skips objects
that disappear meanwhile. Only operations that remove or rewrite objects open the store.
"""

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

from kvtier.codec import registry
from kvtier.codec.frame import EXTENT_BYTES_MAX, Seals, decoders_of, open_seal, open_section, reseal, verify_section
from kvtier.codec.frame_header import FIXED_BYTES, VERSION, Head, Section, head_bytes_of, opened_identity, read_head
from kvtier.errors import ConfigError, CorruptChunkError, TierError, UnreadableChunkError
from kvtier.inspection.results import (
    Listing,
    ModelShare,
    ObjectCount,
    ObjectRow,
    ObjectView,
    Outcomes,
    ReadResult,
    StoreStat,
    Verification,
)  # fmt: skip
from kvtier.keys.seal_keys import CHECK_BYTES, SealKey
from kvtier.tier.base import Tier
from kvtier.tier.files.direct import aligned_buffer
from kvtier.tier.store_view import LEFT_MAX, ObjectFile, ObjectReader, Purge, StoreView, merged
from kvtier.types import ObjectName

_Answer = TypeVar("_Answer")

MODEL_DIGITS = 12
_NO_CLASSES: Mapping[str, str] = MappingProxyType({})
_THREADS = 4
_BATCH = 16 * _THREADS
_PAGE = 1000
_WRITES = 3
"""Number of attempts to write a resealed object."""
_BAD = {"damaged", "forged", "unsealed"}
"""Outcomes of objects that a repair removes. Objects of other tenants stay, although inspection sees their names."""


def _ignore(_amount: float) -> None:
    """Show no progress."""


class StoreInspector:
    """The operations on one store, or on the stores of all ranks of a tier.

    Args:
        views: the stores.
        place: the location of the stores, for messages.
        classes: the class (`store.loss`) of each model's engines from its note, by the first digits of the model's id.
    """

    def __init__(self, views: Sequence[StoreView], place: str, classes: Mapping[str, str] = _NO_CLASSES) -> None:
        self.views = views
        self._classes = classes
        self.place = place
        self._local = threading.local()

    def objects(self, advance: Callable[[float], None] = _ignore) -> list[ObjectFile]:
        """Return all objects, sorted by name. Call `advance` with the number of objects found since the last call."""
        found: list[ObjectFile] = []
        for at, view in enumerate(self.views):
            listed = (stored._replace(store=at) for stored in view.objects())
            while page := list(islice(listed, _PAGE)):
                found += page
                advance(len(page))
        return sorted(found, key=lambda stored: (stored.name, stored.store))

    def purge(self, *, force: bool) -> Purge:
        """Remove the stores, and return what was removed in all of them. See `StoreView.purge` for `force`."""
        result = Purge(directory=self.place)
        for view in self.views:
            one = view.purge(force=force)
            result.objects += one.objects
            result.bytes += one.bytes
            result.is_emptied_only |= one.is_emptied_only
            result.left = [*result.left, *one.left][:LEFT_MAX]
        return result

    def listing(self, *, limit: int, after: str = "", advance: Callable[[float], None] = _ignore) -> Listing:
        """List at most `limit` objects with names after `after` (hexadecimal digits). See `objects` for `advance`."""
        found = self.objects(advance)
        start = bisect_right(found, after.lower(), key=lambda stored: stored.name.hex())
        page = found[start : start + limit]
        rows = [row for _, row in self._each(self.row, page) if row is not None]
        more = page[-1].name.hex() if start + limit < len(found) else None
        return Listing(directory=self.place, objects=rows, total=len(found), next=more)

    def statistics(
        self, found: Iterable[ObjectFile], advance: Callable[[float], None] = _ignore, *, reads_heads: bool = True
    ) -> StoreStat:
        """Return the totals of `found`.

        Args:
            found: objects that `objects` returned.
            advance: called with 1 after each object.
            reads_heads: whether to read every head. If False, read a head only if the object's path names no model.
        """

        def row_of(stored: ObjectFile) -> ObjectRow | None:
            is_known = stored.model and not reads_heads
            return _bare(stored) if is_known else self.row(stored)

        rows = [row for _, row in self._each(row_of, found, advance) if row is not None]
        ages = [row.age_s for row in rows if row.age_s is not None]
        usage = merged([view.usage() for view in self.views])
        return StoreStat(
            **asdict(usage),
            directory=self.place,
            objects=len(rows),
            bytes=sum(row.size_bytes for row in rows),
            unreadable=sum(row.problem is not None for row in rows),
            formats=_counts(rows, lambda row: None if row.version is None else str(row.version)),
            states=_counts(rows, lambda row: row.state),
            oldest_age_s=max(ages, default=None),
            newest_age_s=min(ages, default=None),
            models=_by_model(rows, self._classes),
        )

    def find(self, prefix: str) -> ObjectFile:
        """Return the only object whose name starts with `prefix` (hexadecimal digits).

        Raises:
            ConfigError: no object matches, several match, or `prefix` is not hexadecimal.
        """
        wanted = prefix.lower()
        if not wanted or set(wanted) - set("0123456789abcdef"):
            raise ConfigError(f"name {prefix!r} is not the beginning of an object's name; allowed: hexadecimal digits")
        matching = [stored for stored in self.objects() if stored.name.hex().startswith(wanted)]
        if not matching:
            raise ConfigError(f"name {prefix!r}: no object in {self.place} begins with it")
        if len(matching) > 1:
            some = ", ".join(stored.name.hex()[: len(wanted) + 6] for stored in matching[:5])
            raise ConfigError(f"name {prefix!r}: {len(matching)} objects in {self.place} begin with it, such as {some}")
        return matching[0]

    def view(self, stored: ObjectFile) -> ObjectView:
        """Return the head and the section table of one object.

        Raises:
            ConfigError: the object has disappeared.
        """
        row = self.row(stored)
        if row is None:
            raise ConfigError(f"object {stored.name.hex()[:12]} was removed in the meantime")
        if row.problem is not None:
            return ObjectView(object=row, path=stored.path)
        with self._opened(stored) as reader:
            head = _head(stored, reader)
        return ObjectView(
            object=row,
            path=stored.path,
            version=head.version,
            codec=row.codec,
            loss=_lossy(row) or self._classes.get((row.model or "")[:MODEL_DIGITS]),
            header_bytes=head.header_bytes,
            frame_bytes=head.frame_bytes,
            raw_bytes=head.raw_bytes,
            layers=head.layers,
            key_check=head.seal[:CHECK_BYTES].hex() or None,
            sections=[_told(section) for section in head.sections],
        )

    def verify(
        self, found: Sequence[ObjectFile], advance: Callable[[float], None], seals: Seals | None = None
    ) -> Verification:
        """Read and verify each of `found`.

        Args:
            found: objects that `objects` returned.
            advance: called with the size of each object in bytes.
            seals: the known keys. Without a frame's key, only its checksums are verified.

        Raises:
            ConfigError: the package for the seal is missing.
        """
        result = Verification(directory=self.place)
        for stored, finding in self._each(partial(self.check, seals=seals), found):
            advance(stored.size_bytes)
            if finding is not None:
                result.checked += 1
                result.with_token_ids += finding.has_token_ids
                result.bytes += stored.size_bytes
                is_bad = finding.outcome in _BAD
                result.add(stored, finding, result.bad_objects if is_bad else result.unreadable_objects)
        result.bad, result.unreadable = len(result.bad_objects), len(result.unreadable_objects)
        return result

    def repair(self, found: Sequence[ObjectFile], result: Verification, seals: Seals | None = None) -> None:
        """Remove the bad objects of `result`, after verifying each of them again.

        Raises:
            ConfigError: the store cannot be opened.
            TierError: another process has the store open, and it is not shared.
        """
        bad = {item.name for item in result.bad_objects}
        suspects = [stored for stored in found if stored.name.hex() in bad]

        def is_bad(stored: ObjectFile) -> bool:
            finding = self.check(stored, seals)
            return finding is not None and finding.outcome in _BAD

        result.dropped = len(self._removed(suspects, is_bad))

    def selected(
        self, found: Sequence[ObjectFile], is_wanted: Callable[[ObjectFile], bool], advance: Callable[[float], None]
    ) -> list[ObjectFile]:
        """Return the objects of `found` that `is_wanted` accepts. Call `advance` with 1 after each."""
        return [stored for stored, is_one in self._each(is_wanted, found, advance) if is_one]

    def free(
        self, wanted: Sequence[ObjectFile], is_wanted: Callable[[ObjectFile], bool], advance: Callable[[float], None]
    ) -> ObjectCount:
        """Remove the objects that `selected` returned. Call `advance` with 1 after each. See `repair` for errors."""
        removed = self._removed(wanted, is_wanted, advance)
        return ObjectCount(objects=len(removed), bytes=sum(stored.size_bytes for stored in removed))

    def is_old(self, stored: ObjectFile) -> bool:
        """Read an object's head and return whether its frame has an earlier format.

        A frame in the current format whose version is damaged does not count as old.
        """
        row = self.row(stored)
        return row is not None and row.version is not None and row.version < VERSION

    def is_of(self, model: str, age_s: float | None, stored: ObjectFile) -> bool:
        """Return whether an object belongs to a model and has not been used for `age_s` seconds.

        Args:
            model: first hexadecimal digits of the model id; empty accepts any. The head is read if the path names no
                model.
            age_s: None accepts any age. An object whose last use is unknown is never old enough.
            stored: the object.
        """
        bare = _bare(stored)
        if age_s is not None and (bare.age_s is None or bare.age_s < age_s):
            return False
        known = bare if bare.model or not model else self.row(stored)
        return known is not None and (known.model or "").startswith(model.lower())

    def row(self, stored: ObjectFile) -> ObjectRow | None:
        """Return the row of one object; None if the object has disappeared."""
        bare = _bare(stored)
        try:
            with self._opened(stored) as reader:
                head = _head(stored, reader)
        except FileNotFoundError:
            return None
        except UnreadableChunkError as error:
            return replace(bare, problem=error.detail, state="other_version", version=error.version)
        except CorruptChunkError as error:
            return replace(bare, problem=error.detail, state="damaged")
        except OSError as error:
            return replace(bare, problem=f"cannot be read: {error.strerror}", state="io_error")
        identity = head.identity
        codec = ", ".join(map(_codec_name, head.codecs))
        bare = replace(bare, version=head.version, state="plain", model=identity.model.hex(), codec=codec)
        if head.seal:
            return replace(bare, state="sealed")
        return replace(
            bare,
            group=identity.group,
            part=identity.part.text,
            depth=identity.depth,
            tokens=identity.tokens,
            parent=identity.parent.hex() if identity.parent else None,
        )

    def check(self, stored: ObjectFile, seals: Seals | None) -> ReadResult | None:
        """Read and verify one object; None if it has disappeared. See `verify` for `seals`."""

        def verified(reader: ObjectReader, head: Head) -> ReadResult:
            outcome = self._verify_sections(reader, head, seals)
            decoders_of(head)
            return ReadResult(outcome, has_token_ids=_has_token_ids(head, seals))

        return self._found(stored, verified)

    def _found(self, stored: ObjectFile, act: Callable[[ObjectReader, Head], ReadResult]) -> ReadResult | None:
        """Return the result of `act` on an object, or a result that states why the object could not be read.

        Return None if the object has disappeared.
        """
        try:
            with self._opened(stored) as reader:
                head = _head(stored, reader)
                if head.frame_bytes != reader.size_bytes:
                    return ReadResult(
                        "damaged", f"{reader.size_bytes} bytes are stored of a frame of {head.frame_bytes}"
                    )
                return act(reader, head)
        except FileNotFoundError:
            return None
        except UnreadableChunkError as error:
            return ReadResult("unreadable", error.detail)
        except CorruptChunkError as error:
            return ReadResult(error.reason, error.detail)
        except OSError as error:
            return ReadResult("unreadable", f"cannot be read: {error.strerror}")

    def reseal(
        self, found: Sequence[ObjectFile], seals: Seals, advance: Callable[[float], None], *, plain_too: bool = False
    ) -> Outcomes:
        """Reseal frames that were sealed with a key of an earlier epoch, with the current key of their tenant.

        A writer never replaces an object. So each object is read, sealed, deleted and written. If the write fails after
        the deletion, the object becomes a miss, and no further object is changed.

        Outcomes: `resealed`; `current` (already sealed with the current key of its tenant); `left` (no seal, or another
        key or tenant than requested); `lost` (deleted and not written again); or an outcome of `BadObject`.
        `bad_objects` lists lost, damaged, forged and unreadable objects. `bytes` counts resealed frames.

        Args:
            found: objects that `objects` returned.
            seals: the keys, and the tenant whose frames are resealed; None means all tenants that have keys.
            advance: called with the size of each of `found` in bytes.
            plain_too: also seal frames that have no seal, for `seals.tenant`.

        Raises:
            ConfigError: a store cannot be opened, or the package for the seal is missing.
            TierError: another process has an unshared store open, or deleting fails.
        """
        result, renewal = Outcomes(directory=self.place), _Renewal(seals, plain_too=plain_too)

        def renewed(tier: Tier, stored: ObjectFile) -> ReadResult | None:
            return self._found(stored, partial(renewal.run, tier))

        for stored, finding in self._opening(renewed, found):
            advance(stored.size_bytes)
            if finding is not None:
                result.bytes += stored.size_bytes * (finding.outcome == "resealed")
                result.add(stored, finding, result.bad_objects)
        return result

    def _removed(
        self,
        suspects: Sequence[ObjectFile],
        is_doomed: Callable[[ObjectFile], bool],
        advance: Callable[[float], None] = _ignore,
    ) -> list[ObjectFile]:
        """Remove the `suspects` that `is_doomed` still accepts."""

        def remove(tier: Tier, stored: ObjectFile) -> bool:
            if is_gone := is_doomed(stored):
                tier.delete(ObjectName(stored.name))
            return is_gone

        return [stored for stored, is_gone in self._opening(remove, suspects, advance) if is_gone]

    def _opening(
        self,
        act: Callable[[Tier, ObjectFile], _Answer],
        found: Sequence[ObjectFile],
        advance: Callable[[float], None] = _ignore,
    ) -> Iterator[tuple[ObjectFile, _Answer]]:
        """Run `act` on each of `found`, with its store as a tier. Open only the stores that hold some of them."""
        for at, view in enumerate(self.views):
            if mine := [stored for stored in found if stored.store == at]:
                with view.opened_tier() as tier:
                    yield from self._each(partial(act, tier), mine, advance)

    def _each(
        self,
        act: Callable[[ObjectFile], _Answer],
        found: Iterable[ObjectFile],
        advance: Callable[[float], None] = _ignore,
    ) -> Iterator[tuple[ObjectFile, _Answer]]:
        """Run `act` on each of `found` in a few threads. Call `advance` with 1 after each."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-inspect") as pool:
            # Work in batches, so that an interrupt does not wait for all objects.
            remaining = iter(found)
            while batch := list(islice(remaining, _BATCH)):
                for pair in zip(batch, pool.map(act, batch), strict=True):
                    advance(1)
                    yield pair

    def _opened(self, stored: ObjectFile) -> AbstractContextManager[ObjectReader]:
        return self.views[stored.store].opened(stored)

    def _verify_sections(self, reader: ObjectReader, head: Head, seals: Seals | None) -> str:
        """Verify tags if the key is known, otherwise checksums. Return `good`, `sealed` or `plain`.

        Raises:
            CorruptChunkError: the object is damaged or forged, or lacks the seal that is required.
        """
        is_known = seals is not None and seals.keyring.knows(head.seal[:CHECK_BYTES]) is not None
        cipher = open_seal(head, seals)[0] if is_known else None
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = bytearray(EXTENT_BYTES_MAX)
        for number, section in enumerate(head.sections):
            extent = memoryview(buffer)[: section.extent_bytes]
            extent = extent[: reader.read(extent, section.offset)]
            if cipher is None:
                verify_section(head, section, extent)
            else:
                open_section(cipher, head, number, section, extent)
        if seals is not None and seals.is_demanded and not head.seal:
            raise CorruptChunkError(head.identity.name, "it has no seal, but this tier requires one", "unsealed")
        if not head.seal:
            return "good" if seals is None else "plain"
        return "sealed" if cipher is None else "good"


class _Renewal:
    """Reseals objects until one is lost. Thread-safe.

    Args:
        seals: the keys, and the tenant whose frames are resealed; None means all tenants that have keys.
        plain_too: also seal frames that have no seal, for `seals.tenant`.
    """

    def __init__(self, seals: Seals, *, plain_too: bool) -> None:
        self._seals, self._plain_too = seals, plain_too
        self._has_lost = False

    def run(self, tier: Tier, reader: ObjectReader, head: Head) -> ReadResult:
        """Read, seal, delete and write one object.

        Raises:
            CorruptChunkError: the object is damaged, forged, or another tenant's. It is left unchanged.
            TierError: the object cannot be deleted.
        """
        key = self._key(head)
        if key is not None and head.seal[:CHECK_BYTES] == key.check:
            return ReadResult("current")
        if key is None or self._has_lost:
            return ReadResult("left")
        if head.seal:
            open_seal(head, self._seals)  # authenticate the head before trusting its sizes
        old, scratch = aligned_buffer(head.frame_bytes), aligned_buffer(head.frame_bytes)
        new = reseal(old[: reader.read(old)], self._seals.keyring, key, scratch)
        tier.delete(head.identity.name)
        why = "the tier did not accept it"
        try:
            # A shared directory may refuse a write until it has claimed the space.
            if any(tier.write(head.identity.name, new) for _ in range(_WRITES)):
                return ReadResult("resealed")
        except TierError as error:
            why = error.detail
        self._has_lost = True
        return ReadResult("lost", f"was deleted, but not written again: {why}")

    def _key(self, head: Head) -> SealKey | None:
        """Return the current key of the frame's tenant; None to leave the frame unchanged."""
        keyring, tenant, _ = self._seals
        if not head.seal:
            return keyring.sealing(tenant or "") if self._plain_too else None
        known = keyring.knows(head.seal[:CHECK_BYTES])
        if known is None or tenant not in {None, known.tenant}:
            return None
        key = keyring.sealing(known.tenant)
        return None if key is None or known.epoch > key.epoch else key


def _bare(stored: ObjectFile) -> ObjectRow:
    """Return the row of an object with only the fields that are known without reading it."""
    age_s = None if stored.used_s is None else max(time.time() - stored.used_s, 0.0)
    return ObjectRow(
        name=stored.name.hex(),
        size_bytes=stored.size_bytes,
        used=stored.used_s,
        age_s=age_s,
        model=stored.model or None,
    )


def _head(stored: ObjectFile, reader: ObjectReader) -> Head:
    fixed = _read(reader, FIXED_BYTES)
    head = read_head(_read(reader, min(head_bytes_of(fixed), stored.size_bytes)))
    if head.identity.name != stored.name:
        raise CorruptChunkError(stored.name, f"belongs to another object, {head.identity.name.hex()[:12]}")
    return head


def _read(reader: ObjectReader, count: int) -> memoryview:
    """Return the first `count` bytes, or the whole object if it is shorter."""
    into = memoryview(bytearray(count))
    return into[: reader.read(into)]


def _counts(rows: list[ObjectRow], of: Callable[[ObjectRow], str | None]) -> dict[str, ObjectCount]:
    """Count the rows by the value of `of`, and skip rows without a value."""
    counts: dict[str, ObjectCount] = defaultdict(ObjectCount)
    for row in rows:
        if (what := of(row)) is not None:
            counts[what].objects += 1
            counts[what].bytes += row.size_bytes
    return dict(sorted(counts.items()))


def _lossy(row: ObjectRow) -> str | None:
    """Return the lossy codec of an object, which is the class of its engine; None if the object has none."""
    return next((name for name in registry.lossy_names() if name in (row.codec or "").split(", ")), None)


def _by_model(rows: list[ObjectRow], classes: Mapping[str, str]) -> dict[str, ModelShare]:
    shares: dict[str, ModelShare] = defaultdict(ModelShare)
    for row in rows:
        if row.model is None or row.problem is not None:
            continue
        share = shares[row.model[:MODEL_DIGITS]]
        share.objects += 1
        share.bytes += row.size_bytes
        share.loss = _lossy(row) or share.loss or classes.get(row.model[:MODEL_DIGITS])
        if row.group is None or row.part is None:
            continue
        share.tokens += row.tokens or 0
        share.groups = sorted({*share.groups, row.group})
        share.parts = sorted({*share.parts, row.part})
        share.lengths = sorted({*share.lengths, row.tokens or 0})
    return dict(sorted(shares.items()))


def _told(section: Section) -> dict[str, int | str]:
    shown: dict[str, int | str] = section._asdict()
    texts = {"checksum": f"{section.checksum:016x}", "codec": _codec_name(section.codec), "tag": section.tag.hex()}
    return shown | texts


def _codec_name(number: int) -> str:
    try:
        return registry.own_name(number) or registry.by_id(number).name
    except ConfigError:
        return f"unknown ({number})"


def _has_token_ids(head: Head, seals: Seals | None) -> bool:
    """Return whether the sealed head of a verified frame has token ids. False if it cannot be opened here."""
    try:
        return bool(head.seal) and bool(opened_identity(head, open_seal(head, seals)[1]).text)
    except (CorruptChunkError, UnreadableChunkError):
        return False
