"""The disk tier: frames in preallocated segment files on a local drive, under a hard byte cap.

Unlike the directory tier, which keeps a file per object for several processes, a store belongs to one process. In
return an object costs one `pwritev` or `preadv`, a lookup no system call, and a million objects about 0.2 GB of memory.

A written object is readable at once. Every `sync_interval_s` frames are made durable, then the index blocks that name
them. A crash loses later writes, or frame verification finds them damaged. No read or write of a frame waits for a
sync.

FORMAT.md describes the bytes on the device, docs/adr/0008 the design.
"""

import logging
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvtier.errors import ConfigError, TierError
from kvtier.tier.base import Figures, Read, Write
from kvtier.tier.direct import DirectIo, choose_direct
from kvtier.tier.disk import batch as disk_batch
from kvtier.tier.disk.format import SEGMENT_BYTES_MAX, segment_bytes_for
from kvtier.tier.disk.marker import ALLOWED, MARKER_NAME, DiskMarker, open_marker, replace_marker
from kvtier.tier.disk.pool import Counts, Pool
from kvtier.tier.disk.segment_files import SegmentFiles
from kvtier.tier.disk.status import FAULT_LENGTH_MAX, STATUS_INTERVAL_S, DiskStatus, write_status
from kvtier.tier.disk.write_budget import WriteBudget
from kvtier.tier.safe_open import check_private, make_root
from kvtier.tier.store_lock import StoreLock
from kvtier.tier.store_root import opening
from kvtier.tier.store_tier import CLOSE_DEADLINE_S, StoreTier
from kvtier.tier.store_view import UNBOUNDED_BYTES
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

SEGMENTS_MAX = 4096
"""A store with more segments, after a large increase of its capacity, is recreated with larger ones, if there are."""

ROW_SHARE_BYTES = 16 << 10
ROWS_MIN = 1 << 16
ROWS_MAX = 1 << 24
"""Rows of the table: one per 16 KiB of capacity, within these bounds."""


class DiskTier(StoreTier):
    """Frames in segment files under `root`, used by this process alone.

    Args:
        root: the directory; created when missing. One with foreign files is refused.
        capacity_bytes: cap for the segment files on the device. The marker (4 KiB) is not counted.
        name: the tier's name in metrics and errors.
        segment_bytes: of each segment file; a frame must fit in one. None: the existing store's, and for a new store
            1/64 of the capacity, from 64 MiB (or a quarter of a small capacity) to 1 GiB.
        direct_io: "auto" uses direct I/O where the file system supports it, "on" requires it, "off" disables it.
        sync_interval_s: seconds of writes that a crash may lose, approximately.
        reserve_bytes: free space left to other programs; segments are removed to keep it free.
        write_bytes_per_day: limit for flash wear (`WriteBudget`); 0 means no limit.
        lock_deadline_s: longest wait for another operation that makes space.
        open_deadline_s: longest wait for another process that has the store open.
        any_owner: see `StoreTier`.

    Raises:
        ConfigError: a setting is invalid.
        DamagedStoreError: what is at `root` cannot be used; nothing was changed.
        TierError: the storage failed while it was opened, or another process has the store open.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        capacity_bytes: int,
        name: str = "disk",
        segment_bytes: int | None = None,
        direct_io: DirectIo = "auto",
        sync_interval_s: float = 1.0,
        reserve_bytes: int = 0,
        write_bytes_per_day: int = 0,
        lock_deadline_s: float = 5.0,
        open_deadline_s: float = 5.0,
        any_owner: bool = False,
    ) -> None:
        super().__init__(root, name, capacity_bytes, any_owner=any_owner)
        self._segment_bytes = segment_bytes
        self._wants_direct = direct_io
        self._reserve_bytes = reserve_bytes
        self._lock_deadline_s = lock_deadline_s
        self._sync_interval_s = sync_interval_s
        self._budget = WriteBudget(write_bytes_per_day, time.monotonic())
        self._write_bytes_per_day = write_bytes_per_day
        self._reopening = threading.Lock()
        self._is_suspect = False
        self._wake = threading.Event()
        self._is_closing = False
        self._avoided_bytes = 0
        self._counts = Counts()
        self._faults = 0
        self._last_fault = ""
        self._last_fault_s: float | None = None
        self._is_up: bool | None = None
        with opening(name, self.root, ALLOWED):
            self._store_lock, self._pool = self._open_store(open_deadline_s)
        self._write_status()
        self._keeper = threading.Thread(target=self._maintain, name=f"kvtier {name} keeper", daemon=True)
        self._keeper.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments on the device, filled or not."""
        return self._pool.files.used_bytes

    @property
    def object_count(self) -> int:
        """Objects held."""
        return self._pool.object_count

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that fits in a segment."""
        return self._pool.frame_bytes_max

    @property
    def evictions(self) -> int:
        """Objects evicted since the start."""
        return self._counts.evictions

    @property
    def write_bytes(self) -> dict[str, int]:
        """Counters of bytes since the start: `frames` and `upkeep` (copies, index) written, `avoided` by the budget.

        Write amplification is (frames + upkeep) / frames.
        """
        counts = self._counts
        return {"frames": counts.frame_bytes, "upkeep": counts.upkeep_bytes, "avoided": self._avoided_bytes}

    def figures(self) -> Figures:
        """See `Tier`."""
        return Figures(self.used_bytes, self.limit_bytes, self.evictions, self.write_bytes, self.direct_io)

    def note_use(self, *, is_up: bool) -> None:
        """Record in the status file whether the session uses this tier or backs off."""
        self._is_up = is_up

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether it is held. No system call."""
        with self._operation("look for objects"):
            return self._pool.contains(names)

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """See `Tier`. Adjacent frames take one system call."""
        return self._read_many(reads, is_use=True)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """See `Tier`."""
        return self._read_many(reads, is_use=False)

    def _read_many(self, reads: Sequence[Read], *, is_use: bool) -> list[int | TierError | None]:
        with self._operation("read objects"):
            answers = disk_batch.read_many(self._pool, reads, is_use=is_use)
        return [self._told("read", read.name, answer) for read, answer in zip(reads, answers, strict=True)]

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """See `Tier`. Frames lie adjacent to each other as far as a segment goes; the oldest segment is evicted.

        False when a frame is larger than a segment, the write budget is spent, or every segment is in use.
        """
        with self._operation("write objects"):
            pool = self._pool
            results: list[bool | TierError] = [*pool.contains([write.name for write in writes])]
            wanted = [
                at for at, write in enumerate(writes) if not results[at] and self._admits(write.name, write.frame)
            ]
            answers = disk_batch.write_many(pool, [writes[at] for at in wanted])
        for at, answer in zip(wanted, answers, strict=True):
            results[at] = self._told("write", writes[at].name, answer)
        return results

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, on the device too."""
        with self._operation("delete", name):
            self._pool.remove(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) held."""
        with self._operation("scan"):
            return iter([(ObjectName(name), size_bytes) for name, size_bytes in self._pool.everything()])

    def newest(self, most: int, until_s: float) -> list[ObjectName]:
        """See `Tier`. No system call."""
        del until_s
        with self._operation("list the newest"):
            return [ObjectName(name) for name in self._pool.newest(most)]

    def sync(self) -> None:
        """Make all writes so far durable now."""
        with self._operation("sync"):
            self._pool.sync()

    def close(self) -> None:
        """Wait for running operations, write the index and release the store. Idempotent."""
        if not self._guard.close():
            return
        self._is_closing = True
        self._wake.set()
        is_empty = self._guard.wait_empty(CLOSE_DEADLINE_S)
        self._keeper.join(CLOSE_DEADLINE_S)
        if not is_empty or self._keeper.is_alive():
            # Files stay open: a thread may still use their descriptors.
            logger.warning("tier %s: closed while an operation still ran after %s s", self.name, CLOSE_DEADLINE_S)
            return
        try:
            self._pool.sync()
        except (OSError, TierError) as error:
            logger.warning("tier %s: the index could not be written, so the last writes are lost: %s", self.name, error)
        self._write_status(is_open=False)
        self._pool.close()
        self._store_lock.release()

    def _admits(self, name: ObjectName, frame: memoryview) -> bool:
        """Whether a frame fits in a segment and the write budget; then its bytes are spent."""
        if not 0 < frame.nbytes <= self._pool.frame_bytes_max:
            return False
        is_admitted = self._budget.admits(name, frame.nbytes, time.monotonic())
        if not is_admitted:
            self._avoided_bytes += frame.nbytes
        return is_admitted

    def _open_store(self, deadline_s: float, lock: StoreLock | None = None) -> tuple[StoreLock, Pool]:
        """Lock the store, which is made if there is none, and open its segments.

        Args:
            deadline_s: longest wait for the lock.
            lock: the lock that this process has, if it is still that of the store.

        Raises:
            UnusableStoreError: what is there cannot be used; nothing was changed.
            TierError: another process has the store open.
            OSError: the file system fails.
        """
        wanted = self._segment_bytes or segment_bytes_for(self.capacity_bytes)
        make_root(self.root)
        check_private(self.name, self.root, any_owner=self._any_owner)
        open_marker(self.root, wanted)
        taken = lock or StoreLock(str(self.root / MARKER_NAME), self.name)
        try:
            taken.exclude(deadline_s)
            marker = open_marker(self.root, wanted)
            if not self._may_keep(marker.segment_bytes):
                marker = replace_marker(self.root, wanted)
                taken.move()
                taken.exclude(0.0)
            self.direct_io = choose_direct(self.name, str(self.root), self._wants_direct)
            self._home = self.root.stat()
            return taken, self._open_pool(marker)
        except BaseException:
            if taken is not lock:
                taken.release()
            raise

    def _open_pool(self, marker: DiskMarker) -> Pool:
        files = SegmentFiles(
            self.root,
            self.name,
            capacity_bytes=self.capacity_bytes,
            effective_cap=self._effective_cap,
            segment_bytes=marker.segment_bytes,
            reserve_bytes=self._reserve_bytes,
            direct_io=self.direct_io,
        )
        return Pool(
            files,
            self.name,
            marker.store_id,
            rows_max=min(max(self.capacity_bytes // ROW_SHARE_BYTES, ROWS_MIN), ROWS_MAX),
            deadline_s=self._lock_deadline_s,
            counts=self._counts,
            on_turn=self._wake.set,
        )

    def _may_keep(self, segment_bytes: int) -> bool:
        """Whether an existing store keeps segments of this size."""
        if self._segment_bytes is not None:
            return segment_bytes == self._segment_bytes
        is_real = segment_bytes != SEGMENT_BYTES_MAX  # which a repair writes where no segment tells the size
        # Of the largest caps every store has more segments; recreated at each start, it would keep nothing.
        least = min(self.capacity_bytes // SEGMENTS_MAX, segment_bytes_for(self.capacity_bytes))
        return is_real and least <= segment_bytes <= self.capacity_bytes

    def _maintain(self) -> None:
        """Maintenance thread: sync at intervals, keep a segment empty, and write the status."""
        synced_s = told_s = time.monotonic()
        logged = ""
        while True:
            next_s = min(synced_s + self._sync_interval_s, told_s + STATUS_INTERVAL_S)
            self._wake.wait(max(0.0, next_s - time.monotonic()))
            self._wake.clear()
            if self._is_closing:
                return
            try:
                if time.monotonic() >= told_s + STATUS_INTERVAL_S:
                    told_s = time.monotonic()
                    self._write_status()
                self._upkeep()
                if time.monotonic() >= synced_s + self._sync_interval_s:
                    synced_s = time.monotonic()
                    self.sync()
            except TierError as error:
                synced_s = time.monotonic()  # retry after the interval
                logger.info("tier %s: %s", self.name, error)
            except Exception as error:
                synced_s = time.monotonic()
                if logged != (logged := repr(error)):
                    logger.exception("tier %s: upkeep failed and is tried again", self.name)

    def _upkeep(self) -> None:
        """Check that the store was not replaced, and keep a segment empty."""
        self._is_suspect |= not self._is_current()
        with self._operation("prepare a segment"):
            self._pool.prepare()

    def _write_status(self, *, is_open: bool = True) -> None:
        """Write the status file. A failure is logged only."""
        try:
            # Without its disk mounted the path leads to another one. A tool has no cap: the status stays the engine's.
            if self.capacity_bytes < UNBOUNDED_BYTES and self._store_lock.is_current():
                write_status(self.root, self._current_status(is_open=is_open))
        except OSError as error:
            logger.debug("tier %s: its status cannot be written: %s", self.name, error)

    def _current_status(self, *, is_open: bool) -> DiskStatus:
        file_system = os.statvfs(self.root)
        written = self.write_bytes
        return DiskStatus(
            time_s=time.time(),
            pid=os.getpid(),
            is_open=is_open,
            is_up=self._is_up,
            faults=self._faults,
            last_fault=self._last_fault,
            last_fault_s=self._last_fault_s,
            objects=self.object_count,
            used_bytes=self.used_bytes,
            capacity_bytes=self.capacity_bytes,
            limit_bytes=self.limit_bytes,
            free_bytes=file_system.f_bavail * file_system.f_frsize,
            reserve_bytes=self._reserve_bytes,
            frame_bytes=written["frames"],
            upkeep_bytes=written["upkeep"],
            avoided_bytes=written["avoided"],
            write_bytes_per_day=self._write_bytes_per_day,
            direct_io=self.direct_io,
        )

    def _is_current(self) -> bool:
        """Whether the marker and the segments are still at their paths."""
        return self._store_lock.is_current() and self._pool.files.is_current

    def _check_store(self) -> None:
        """The store may be gone: continue with it, or open what is there now."""
        if not self._reopening.acquire(timeout=self._lock_deadline_s):
            raise TierError(self.name, "is being reopened")
        try:
            if self._is_suspect and not self._is_current():
                self._reopen()
            self._is_suspect = False
        finally:
            self._reopening.release()

    def _reopen(self) -> None:
        """Open what is at the store's path now. The former pool's files are closed when no thread uses them."""
        former = self._store_lock
        try:
            is_home = os.path.samestat(self.root.stat(), self._home)
        except FileNotFoundError:
            is_home = False
        if not is_home and not os.path.lexists(self.root / MARKER_NAME):
            # Not recreated: without its disk mounted, the path leads to another one.
            raise TierError(self.name, f"{self.root / MARKER_NAME} is gone")
        try:
            self._store_lock, self._pool = self._open_store(0.0, former if former.is_current() else None)
        except (ConfigError, OSError) as error:
            raise TierError(self.name, f"cannot be reopened: {error}") from error
        if self._store_lock is not former:
            former.release()

    @contextmanager
    def _operation(self, what: str, name: ObjectName | None = None) -> Generator[None]:
        """As in `StoreTier`. After an OSError the next operation checks the store first, and may find another pool."""
        with super()._operation(what, name):
            if self._is_suspect:
                self._check_store()
            yield

    def _failed(self, what: str, name: ObjectName | None, error: OSError) -> TierError:
        self._is_suspect = True
        failure = super()._failed(what, name, error)
        self._faults += 1
        self._last_fault, self._last_fault_s = failure.detail[:FAULT_LENGTH_MAX], time.time()
        return failure

    def _told(self, what: str, name: ObjectName, answer: _Answer | OSError) -> _Answer | TierError:
        """The answer for one object of a batch."""
        return self._failed(what, name, answer) if isinstance(answer, OSError) else answer
