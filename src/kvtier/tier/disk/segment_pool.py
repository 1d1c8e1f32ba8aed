"""Manages the segments of one disk store: allocates frames, evicts by segment, and writes the index to the device.

Segments are filled and evicted in order, oldest first. Frames that are read more often than most are copied to the
current segment before eviction. Long sequential writes and the removal of whole segments suit flash.

Three locks are taken in this order. I/O runs under the first two, so waiting for them has a deadline:
    turn    starting, evicting, creating and removing segments
    sync    writing index blocks
    lock    the table and the segments' counters; held for microseconds, never during I/O
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.disk.format import BLOCK_BYTES, GENERATION_MAX, names_in
from kvtier.tier.disk.object_table import ObjectTable
from kvtier.tier.disk.segment import Segment
from kvtier.tier.disk.segment_files import SegmentFiles
from kvtier.tier.files.direct import aligned_buffer

logger = logging.getLogger(__name__)

SURVIVOR_SHARE = 0.25
"""Maximum share of a segment that is copied to the current segment when it is evicted."""

SPARE_SEGMENTS_MIN = 4
"""Pools of at least this many segments keep one empty, so that no write waits for an eviction."""

LEAVE_DEADLINE_S = 1.0
"""Longest wait for reads from a segment that is to be evicted, before another segment is tried."""

_REMOVED_AT_ONCE = 256
_ROWS_AT_ONCE = 1 << 16
_CANDIDATES_MAX = 3
_TURNS_MAX = 8
"""A frame is refused after this many attempts, because concurrent writers may fill each new segment."""


class Extent(NamedTuple):
    """Space for one frame. Its segment is pinned, or counts a writer, until the extent is released."""

    segment: Segment
    block: int
    size_bytes: int

    @property
    def offset(self) -> int:
        """Byte offset in the segment's file."""
        return self.block * ALIGNMENT


@dataclass(slots=True)
class Counts:
    """The counters of a tier, which may open its store several times."""

    evictions: int = 0
    frame_bytes: int = 0
    """Bytes that callers wrote."""
    upkeep_bytes: int = 0
    """Bytes written as copies and index."""


class Pool:
    """The segments of a store and the table of their objects.

    Args:
        files: the segment files.
        tier: name of the tier, for errors.
        store_id: 16 bytes; segments of another store count as empty.
        rows_max: maximum number of objects.
        deadline_s: longest wait for another operation that starts or evicts segments.
        counts: counters of writes and evictions.
        on_turn: called when a segment has been started, so that `prepare` may be due. It must be quick.

    Raises:
        OSError: the files cannot be listed or read.
    """

    def __init__(
        self,
        files: SegmentFiles,
        tier: str,
        store_id: bytes,
        *,
        rows_max: int,
        deadline_s: float,
        counts: Counts,
        on_turn: Callable[[], None],
    ) -> None:
        self.files = files
        self._tier = tier
        self._store_id = store_id
        self._deadline_s = deadline_s
        self._counts = counts
        self._on_turn = on_turn
        self._lock = threading.Lock()
        self._unpinned = threading.Condition(self._lock)
        self._turn = threading.Lock()
        self._sync = threading.Lock()
        self._table = ObjectTable(rows_max)
        self._segments: dict[int, Segment] = {}
        self._filling: Segment | None = None
        self._full: deque[Segment] = deque()  # oldest first
        self._spare: list[Segment] = []
        self._generation = 0
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def object_count(self) -> int:
        """Number of stored objects."""
        return len(self._table)

    @property
    def frame_bytes_max(self) -> int:
        """Size of the largest frame that fits with the header and two index blocks, one of which may be wasted."""
        return self.files.segment_bytes - 3 * BLOCK_BYTES

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        """Return for each name whether it is stored."""
        with self._lock:
            return self._table.contains(names)

    def everything(self) -> list[tuple[bytes, int]]:
        """Return the names and frame sizes of all objects. Concurrent changes may be missing."""
        listed: list[tuple[bytes, int]] = []
        for start in range(0, self._table.used_rows, _ROWS_AT_ONCE):
            with self._lock:
                listed += self._table.items(start, start + _ROWS_AT_ONCE)
        return listed

    def newest(self, most: int) -> list[bytes]:
        """Return the names of the `most` objects written last, newest first. Concurrent changes may be missing."""
        with self._lock:
            segments = [it for it in self._segments.values() if it.header is not None and it.rows]
        listed: list[bytes] = []
        for segment in sorted(segments, key=_generation, reverse=True):
            with self._lock:
                rows = self._table.rows_in(segment.number, segment.rows)[::-1]
                listed += [self._table.name(row) for row in rows[: most - len(listed)].tolist()]
        return listed

    def locate(self, names: Sequence[bytes], *, is_use: bool = True) -> list[Extent | None]:
        """Return the extent of each name, or None if it is not stored. Count a use if `is_use`.

        The extents' segments are pinned. Call `unpin` after the read.
        """
        with self._lock:
            return [self._locate(name, is_use=is_use) for name in names]

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Release the pins of `locate`."""
        with self._lock:
            for segment in segments:
                segment.pins -= 1
                if segment.is_leaving:
                    self._unpinned.notify_all()

    def take_here(self, sizes: Sequence[int]) -> list[Extent]:
        """Take adjacent extents for as many of these frames as fit in the current segment."""
        with self._lock:
            segment, extents = self._filling, list[Extent]()
            if segment is None or len(self._table) + len(sizes) > self._table.rows_max:
                return extents
            for size_bytes in sizes:
                block = segment.take(size_bytes)
                if block is None:
                    break
                extents.append(Extent(segment, block, size_bytes))
            return extents

    def take(self, size_bytes: int) -> Extent | None:
        """Take an extent for a frame, evicting if necessary. Return None if there is no space.

        The caller must `put` or `abandon` the extent.

        Raises:
            OSError: the device or the file system fails.
            TierError: another thread held the turn lock for longer than the deadline.
        """
        if size_bytes > self.frame_bytes_max:
            return None
        if extents := self.take_here([size_bytes]):
            return extents[0]
        with self._turning():
            for _ in range(_TURNS_MAX):
                if extents := self.take_here([size_bytes]):  # another thread may have started a segment
                    return extents[0]
                if self._table.is_full:
                    if not self._evict_segment():
                        return None
                    continue
                segment = self._next()
                if segment is None:
                    return None
                self._fill(segment)
                self._on_turn()
        return None

    def put(self, written: Iterable[tuple[Extent, bytes]]) -> list[bool]:
        """Record that each extent contains its frame. The result is False if the table is full."""
        with self._lock:
            return [self._put(extent, name) for extent, name in written]

    def abandon(self, extents: Iterable[Extent]) -> None:
        """Release extents that were not written; their space is reclaimed with the segment."""
        with self._lock:
            for extent in extents:
                self._end_write(extent.segment)

    def remove(self, name: bytes) -> None:
        """Delete `name`, also on the device. A copy that is written during the call stays.

        Raises:
            OSError: the device fails; the object may reappear at the next start.
            TierError: another thread wrote the index for longer than the deadline.
        """
        with self._lock:
            row = self._table.row(name)
            if row is None:
                return
            number, *place = self._table.place(row)
            segment = self._segments[number]
            self._table.remove(row)
            segment.pins += 1
        try:
            with self._syncing():
                with self._lock:
                    is_pending = segment.pending.get(name) == tuple(place)
                    if is_pending:
                        del segment.pending[name]
                if not is_pending:
                    segment.blank(name, place[0])
        finally:
            self.unpin([segment])

    def sync(self) -> None:
        """Make all written frames and their index durable.

        Raises:
            OSError: the device fails.
            TierError: another thread wrote the index for longer than the deadline.
        """
        with self._syncing():
            with self._lock:
                segments = list(self._segments.values())
            failure: OSError | None = None
            for segment in segments:
                try:
                    self._sync_one(segment)
                except OSError as error:  # a bad block affects one segment
                    failure = error
            if failure is not None:
                raise failure

    def prepare(self) -> None:
        """Keep one segment empty, and keep the reserve free.

        Raises:
            OSError: the device or the file system fails.
        """
        if not self._turn.acquire(blocking=False):
            return  # the holder of the lock does this work
        try:
            with self._lock:
                segments = list(self._segments.values())
            self.files.update(segments)
            while len(self._segments) > 1 and self.files.are_too_large():
                if not self._spare and not self._evict_segment():
                    break
                self._remove(self._spare[-1])
            is_due = len(self._segments) >= SPARE_SEGMENTS_MIN and not self._spare
            if is_due and self._full and not self.files.may_grow():
                if self._copy_survivors(self._full[0]):
                    self.sync()  # a crash must not lose both copies
                self._evict_segment()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close all files, which must not be in use. Unsynced writes are lost. Idempotent."""
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        for segment in segments:
            segment.close()
        self.files.close()

    # ---- under the lock, for microseconds ----------------------------------------------------------------------------

    def _locate(self, name: bytes, *, is_use: bool) -> Extent | None:
        row = self._table.row(name)
        if row is None:
            return None
        if is_use:
            self._table.use(row)
        number, block, size_bytes = self._table.place(row)
        segment = self._segments[number]
        segment.pins += 1
        return Extent(segment, block, size_bytes)

    def _put(self, extent: Extent, name: bytes) -> bool:
        self._end_write(extent.segment)
        self._counts.frame_bytes += extent.size_bytes
        if self._table.row(name) is not None:
            return True  # a concurrent write came first
        if self._table.is_full:
            return False
        row = self._table.put(name, extent.segment.number, extent.block, extent.size_bytes)
        extent.segment.rows.append(row)
        extent.segment.pending[name] = (extent.block, extent.size_bytes)
        return True

    def _end_write(self, segment: Segment) -> None:
        segment.writers -= 1
        if segment.is_leaving:
            self._unpinned.notify_all()

    # ---- starting and evicting segments: under the turn lock ---------------------------------------------------------

    def _next(self) -> Segment | None:
        """Return an empty segment with a new header, or None if no space can be made."""
        if not self._spare:
            grown = self._grow()
            if grown is not None:
                self._spare.append(grown)
            elif not self._evict_segment():
                return None
        segment = self._spare[-1]
        # The clock keeps a generation from repeating after a crash. If a planted header has the largest generation,
        # only the clock counts.
        candidates = (self._generation + 1, time.time_ns())
        self._generation = max(it for it in (1, *candidates) if it <= GENERATION_MAX)
        try:
            segment.begin(self._store_id, self._generation)
        except OSError as error:
            if error.errno == errno.EIO:
                self._remove(segment)  # a new file gets other blocks of the device
            raise
        self._spare.pop()
        return segment

    def _evict_segment(self) -> bool:
        """Evict the oldest segment that is not in use, or one whose uses end in time. Return False if there is none."""
        with self._lock:
            if not self._full and self._filling is not None:
                self._full.append(self._filling)
                self._filling = None
            busy = [segment for segment in self._full if segment.pins or segment.writers]
            candidates = [segment for segment in self._full if segment not in busy] + busy
        for segment in candidates[:_CANDIDATES_MAX]:
            if self._empty(segment):
                self._full.remove(segment)
                self._spare.append(segment)
                return True
        return False

    def _empty(self, segment: Segment) -> bool:
        """Remove all objects of `segment` and wait until it is unused. Return False if that takes too long.

        The objects may be gone even if it returns False.
        """
        if not self._wait_until(segment, lambda: segment.writers == 0):
            return False
        with self._lock:
            rows = self._table.rows_in(segment.number, segment.rows)
        for start in range(0, len(rows), _REMOVED_AT_ONCE):
            with self._lock:
                for row in rows[start : start + _REMOVED_AT_ONCE].tolist():
                    if self._table.place(row)[0] == segment.number:
                        self._table.remove(row)
                        self._counts.evictions += 1
        # New lookups no longer find its objects, but earlier readers may still use them.
        with self._lock:
            segment.pending = {}
        return self._wait_until(segment, lambda: segment.pins == 0)

    def _wait_until(self, segment: Segment, is_so: Callable[[], bool]) -> bool:
        with self._lock:
            segment.is_leaving = True
            try:
                return self._unpinned.wait_for(is_so, timeout=LEAVE_DEADLINE_S)
            finally:
                segment.is_leaving = False

    def _copy_survivors(self, segment: Segment) -> bool:
        """Copy to the current segment the objects read at least twice as often as average. Return whether any were.

        Uniformly read objects are not copied, because that would only wear the device.
        """
        with self._lock:
            rows = self._table.rows_in(segment.number, segment.rows)
            hits = self._table.hits(rows).astype(np.int64)
            sizes = self._table.sizes(rows).astype(np.int64)
            if not len(rows):
                return False
            segment.pins += 1
        try:
            order = np.argsort(-hits, kind="stable")
            order = order[hits[order] >= max(1.0, 2 * float(hits.mean()))]
            order = order[np.cumsum(sizes[order]) <= SURVIVOR_SHARE * segment.size_bytes]
            scratch = aligned_buffer(align_up(int(sizes[order].max(initial=1))))
            copied = [self._copy(row, segment, scratch) for row in rows[np.sort(order)].tolist()]
            return any(copied)
        finally:
            self.unpin([segment])

    def _copy(self, row: int, segment: Segment, scratch: memoryview) -> bool:
        """Copy the object in `row` to the current segment. Return False if it is gone or there is no space."""
        with self._lock:
            number, block, size_bytes = self._table.place(row)
        extents = self.take_here([size_bytes]) if number == segment.number else []
        if not extents:
            return False
        (extent,) = extents
        frame = scratch[: align_up(size_bytes)]
        try:
            is_whole = segment.read(frame, block * ALIGNMENT) == frame.nbytes
            if is_whole:
                extent.segment.write(frame, extent.offset)
                self._counts.upkeep_bytes += frame.nbytes
        except BaseException:
            self.abandon(extents)
            raise
        with self._lock:
            self._end_write(extent.segment)
            if is_whole and self._table.place(row) == (number, block, size_bytes):
                self._table.move(row, extent.segment.number, extent.block, size_bytes)
                extent.segment.rows.append(row)
                extent.segment.pending[self._table.name(row)] = (extent.block, size_bytes)
        return is_whole

    def _fill(self, segment: Segment) -> None:
        """Make `segment` the current segment."""
        with self._lock:
            if self._filling is not None:
                self._full.append(self._filling)
            self._filling = segment

    def _grow(self) -> Segment | None:
        """Create a new segment. Return None if the cap or the file system has no space."""
        segment = self.files.make()
        if segment is not None:
            with self._lock:
                self._segments[segment.number] = segment
        return segment

    def _remove(self, segment: Segment) -> None:
        """Remove the file of an empty segment."""
        self.files.remove(segment)
        self._spare.remove(segment)
        with self._lock:
            del self._segments[segment.number]

    # ---- index on the device -----------------------------------------------------------------------------------------

    def _sync_one(self, segment: Segment) -> None:
        with self._lock:
            before = segment.index_blocks
            pending = segment.take_pending()
            stop_number = segment.index_blocks
            if not pending:
                return
            segment.pins += 1
        try:
            segment.write_index(pending, stop_number)
            self._counts.upkeep_bytes += (stop_number - before) * BLOCK_BYTES
        except BaseException:
            with self._lock:
                segment.pending = pending | segment.pending
                segment.index_blocks = before
            raise
        finally:
            self.unpin([segment])

    def _load(self) -> None:
        """Load existing segments in order; writing continues in the newest."""
        segments = self.files.load(self._store_id)
        self._segments = {segment.number: segment for segment in segments}
        for segment in segments:
            self._generation = max(self._generation, segment.generation)
            entries = segment.load_index()
            if not len(entries):
                self._spare.append(segment)
                continue
            places = entries["block"].tolist(), entries["size_bytes"].tolist()
            segment.rows.extend(self._table.put_many(names_in(entries), segment.number, *places))
            self._full.append(segment)
        if self._full:
            self._filling = self._full.pop()

    @contextmanager
    def _turning(self) -> Generator[None]:
        if not self._turn.acquire(timeout=self._deadline_s):
            raise TierError(self._tier, f"another thread held the turn lock for {self._deadline_s} s")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _syncing(self) -> Generator[None]:
        if not self._sync.acquire(timeout=self._deadline_s):
            raise TierError(self._tier, f"another thread wrote the index for {self._deadline_s} s")
        try:
            yield
        finally:
            self._sync.release()


def _generation(segment: Segment) -> int:
    return 0 if segment.header is None else segment.header.generation
