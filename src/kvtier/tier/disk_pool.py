"""The segments of one store: where new frames go, who leaves when it is full, and what the index on the device says.

Segments are begun in order and given up in order, the oldest first. Before that, frames that were read more often than
most are copied to the segment that is being filled, so that what is hot stays. The device sees long runs of writes,
each segment as a whole, which is what flash wants.

Three locks, taken in this order. Who waits for the first two has a deadline, because I/O is done under them:
    turn    beginning, giving up, making and removing segments
    sync    writing index blocks
    lock    the table and the segments' counts; held for microseconds, never during I/O
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.direct import aligned_buffer
from kvtier.tier.disk_files import SegmentFiles
from kvtier.tier.disk_format import BLOCK_BYTES, GENERATION_MAX
from kvtier.tier.disk_segment import Segment
from kvtier.tier.disk_table import Table

logger = logging.getLogger(__name__)

SURVIVOR_SHARE = 0.25
"""Most of a segment that is copied forward when it is given up."""

SPARE_SEGMENTS_MIN = 4
"""From so many segments on one is kept empty, so that no writer waits while another is given up."""

LEAVE_DEADLINE_S = 1.0
"""How long to wait for reads from a segment that is to be given up, before another one is."""

_REMOVED_AT_ONCE = 256
_TOLD_AT_ONCE = 1 << 16
_CANDIDATES_MAX = 3
_TURNS_MAX = 8
"""Other writers may fill a segment as soon as it is begun; after so many the frame is refused."""


class Extent(NamedTuple):
    """A place for one frame; its segment is pinned, or has a writer more, until it is given back."""

    segment: Segment
    block: int
    size_bytes: int

    @property
    def offset(self) -> int:
        """Where it begins in the segment's file."""
        return self.block * ALIGNMENT


class Pool:
    """Segments, and the table of what they hold.

    Args:
        files: where they lie, and how many there may be.
        tier: name of the tier, for errors.
        store_id: 16 bytes; segments of another store hold nothing.
        rows_max: the most objects.
        deadline_s: how long an operation waits for another that is turning segments.
        turned: called when a segment was begun, so that `prepare` may be due. Must be quick.

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
        turned: Callable[[], None],
    ) -> None:
        self._files = files
        self._tier = tier
        self._store_id = store_id
        self._deadline_s = deadline_s
        self._turned = turned
        self._lock = threading.Lock()
        self._unpinned = threading.Condition(self._lock)
        self._turn = threading.Lock()
        self._sync = threading.Lock()
        self._table = Table(rows_max)
        self._segments: dict[int, Segment] = {}
        self._filling: Segment | None = None
        self._full: deque[Segment] = deque()  # the oldest first
        self._spare: list[Segment] = []
        self._generation = 0
        self.evictions = 0
        self.frame_bytes = 0
        self.copied_bytes = 0
        self.index_bytes = 0
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """What all files take on the device."""
        return self._files.used_bytes

    @property
    def object_count(self) -> int:
        """Objects held."""
        return len(self._table)

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that fits: beside it lie the header and the index, of which one block may be wasted."""
        return self._files.segment_bytes - 3 * BLOCK_BYTES

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        """For each name, whether it is held."""
        with self._lock:
            return self._table.holds(names)

    def everything(self) -> list[tuple[bytes, int]]:
        """(name, frame bytes) of all objects; those that come or go meanwhile may be left out."""
        told: list[tuple[bytes, int]] = []
        for start in range(0, self._table.used_rows, _TOLD_AT_ONCE):
            with self._lock:
                told += self._table.told(start, start + _TOLD_AT_ONCE)
        return told

    def find(self, names: Sequence[bytes]) -> list[Extent | None]:
        """Where each of `names` lies, pinned and counted as a use; `unpin` when it was read."""
        with self._lock:
            return [self._find(name) for name in names]

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Undo what `find` did to these segments."""
        with self._lock:
            for segment in segments:
                segment.pins -= 1
                if segment.is_leaving:
                    self._unpinned.notify_all()

    def take_here(self, sizes: Sequence[int]) -> list[Extent]:
        """Room for as many of these frames as the segment that is being filled has left, side by side."""
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
        """Room for a frame, giving up others where needed; None when there is none. `put` or `abandon` it afterwards.

        Raises:
            OSError: the device or the file system fails.
            TierError: segments are being turned for longer than the deadline.
        """
        if size_bytes > self.frame_bytes_max:
            return None
        if extents := self.take_here([size_bytes]):
            return extents[0]
        with self._turning():
            for _ in range(_TURNS_MAX):
                if extents := self.take_here([size_bytes]):  # somebody may have turned meanwhile
                    return extents[0]
                if self._table.is_full:
                    if not self._give_up_one():
                        return None
                    continue
                segment = self._next()
                if segment is None:
                    return None
                self._fill(segment)
                self._turned()
        return None

    def put(self, written: Iterable[tuple[Extent, bytes]]) -> list[bool]:
        """Each extent holds the frame of its name now. False where the table has no row left."""
        with self._lock:
            return [self._put(extent, name) for extent, name in written]

    def abandon(self, extents: Iterable[Extent]) -> None:
        """Nothing was written to these extents; their room comes back with their segment."""
        with self._lock:
            for extent in extents:
                self._end_write(extent.segment)

    def remove(self, name: bytes) -> None:
        """Forget `name`, on the device too. A copy of it that is written meanwhile stays.

        Raises:
            OSError: the device fails; the name is forgotten until the next start.
            TierError: the index is being written for longer than the deadline.
        """
        with self._lock:
            row = self._table.find(name)
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

    def lose(self, extent: Extent, name: bytes) -> None:
        """The bytes of `name` are not in `extent`, whose file was cut off: forget it."""
        with self._lock:
            row = self._table.find(name)
            if row is not None and self._table.place(row) == (extent.segment.number, extent.block, extent.size_bytes):
                self._table.remove(row)

    def sync(self) -> None:
        """Put on the device what was written, and the index of it: a crash after this forgets none of it.

        Raises:
            OSError: the device fails.
            TierError: the index is being written for longer than the deadline.
        """
        with self._syncing():
            with self._lock:
                segments = list(self._segments.values())
            failure: OSError | None = None
            for segment in segments:
                try:
                    self._sync_one(segment)
                except OSError as error:  # a bad block of one costs the others nothing
                    failure = error
            if failure is not None:
                raise failure

    def prepare(self) -> None:
        """Keep a segment empty ahead of the writers and the reserve free for others; forget segments that are gone.

        Raises:
            OSError: the device or the file system fails.
        """
        if not self._turn.acquire(blocking=False):
            return  # whoever turns does it now
        try:
            self._forget_lost()
            while len(self._segments) > 1 and self._files.are_too_large():
                if not self._spare and not self._give_up_one():
                    break
                self._remove(self._spare[-1])
            is_due = len(self._segments) >= SPARE_SEGMENTS_MIN and not self._spare
            if is_due and self._full and not self._files.may_grow():
                if self._copy_survivors(self._full[0]):
                    self.sync()  # or a crash could forget both copies
                self._give_up_one()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close all files, which nobody may be using. What was not synced is forgotten. Twice is fine."""
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        for segment in segments:
            segment.close()
        self._files.close()

    # ---- under the lock, for microseconds ----------------------------------------------------------------------------

    def _find(self, name: bytes) -> Extent | None:
        row = self._table.find(name)
        if row is None:
            return None
        self._table.use(row)
        number, block, size_bytes = self._table.place(row)
        segment = self._segments[number]
        segment.pins += 1
        return Extent(segment, block, size_bytes)

    def _put(self, extent: Extent, name: bytes) -> bool:
        self._end_write(extent.segment)
        self.frame_bytes += extent.size_bytes
        if self._table.find(name) is not None:
            return True  # another writer was faster
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

    # ---- turning segments: only with the turn ------------------------------------------------------------------------

    def _next(self) -> Segment | None:
        """An empty segment with a new header; None when none can be had."""
        if not self._spare:
            grown = self._grow()
            if grown is not None:
                self._spare.append(grown)
            elif not self._give_up_one():
                return None
        segment = self._spare[-1]
        # The clock keeps a number from coming again that a crash has made the device forget. A planted one may be the
        # last that there is: then the clock alone counts.
        candidates = (self._generation + 1, time.time_ns())
        self._generation = max(it for it in (1, *candidates) if it <= GENERATION_MAX)
        try:
            segment.begin(self._store_id, self._generation)
        except OSError as error:
            if error.errno == errno.EIO:
                self._remove(segment)  # another file gets other blocks of the device
            raise
        self._files.charge(segment)  # a file system may take blocks of its own for a file that fills
        self._spare.pop()
        return segment

    def _give_up_one(self) -> bool:
        """Make the oldest segment that nobody uses a spare one; whether there is one."""
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

    def _forget_lost(self) -> None:
        """Forget the segments whose files were removed or replaced."""
        with self._lock:
            segments = list(self._segments.values())
        lost = self._files.lost(segments)
        if lost:
            logger.warning("tier %s: the files of %d of %d segments are gone", self._tier, len(lost), len(segments))
        for segment in lost:
            with self._lock:
                if segment is self._filling:
                    self._full.append(segment)
                    self._filling = None
            if segment in self._full and self._empty(segment):
                self._full.remove(segment)
                self._spare.append(segment)
            if segment in self._spare:
                self._remove(segment)

    def _empty(self, segment: Segment) -> bool:
        """Forget all that `segment` holds, when nobody uses it; whether so. Its frames are lost in any case."""
        if not self._wait_until(segment, lambda: segment.writers == 0):
            return False
        with self._lock:
            rows = self._table.rows_in(segment.number, segment.rows)
        for start in range(0, len(rows), _REMOVED_AT_ONCE):
            with self._lock:
                for row in rows[start : start + _REMOVED_AT_ONCE].tolist():
                    if self._table.place(row)[0] == segment.number:
                        self._table.remove(row)
                        self.evictions += 1
        # Nobody finds it any more; those who did are waited for, and with the index of it none can follow.
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
        """Copy forward what was read at least twice as often as the average in `segment`, if it was read at all.

        Where everything is read alike nothing is copied: it would only wear the device.

        Returns:
            Whether something was copied.
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
        """Copy the object in `row` forward, if it is there still and there is room; whether so."""
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
                self.copied_bytes += frame.nbytes
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
        """From now on frames go to `segment`."""
        with self._lock:
            if self._filling is not None:
                self._full.append(self._filling)
            self._filling = segment

    def _grow(self) -> Segment | None:
        """One more segment; None when the cap or the file system has no room for it."""
        segment = self._files.make()
        if segment is not None:
            with self._lock:
                self._segments[segment.number] = segment
        return segment

    def _remove(self, segment: Segment) -> None:
        """Give a segment that holds nothing back to the file system."""
        self._files.remove(segment)
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
            self.index_bytes += (stop_number - before) * BLOCK_BYTES
        except BaseException:
            with self._lock:
                segment.pending = pending | segment.pending
                segment.index_blocks = before
            raise
        finally:
            self.unpin([segment])

    def _load(self) -> None:
        """Take over the segments that are there, in the order they were begun; the newest is filled further."""
        segments = self._files.load(self._store_id)
        self._segments = {segment.number: segment for segment in segments}
        for segment in segments:
            self._generation = max(self._generation, segment.generation)
            entries = segment.load_index()
            if not len(entries):
                self._spare.append(segment)
                continue
            names = np.ascontiguousarray(entries["name"])
            rows = self._table.put_many(names, segment.number, entries["block"], entries["size_bytes"])
            segment.rows.frombytes(rows.astype(np.uint32).tobytes())
            self._full.append(segment)
        if self._full:
            self._filling = self._full.pop()

    @contextmanager
    def _turning(self) -> Generator[None]:
        if not self._turn.acquire(timeout=self._deadline_s):
            raise TierError(self._tier, f"another thread was turning segments for {self._deadline_s} s")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _syncing(self) -> Generator[None]:
        if not self._sync.acquire(timeout=self._deadline_s):
            raise TierError(self._tier, f"another thread was writing the index for {self._deadline_s} s")
        try:
            yield
        finally:
            self._sync.release()
