"""The disk tier, which keeps frames in preallocated segment files on a local drive, under a hard byte cap.

Unlike the directory tier, which keeps a file per object for several processes, a store belongs to one process. In
return, an object costs one `pwritev` or `preadv`, and a lookup makes no system call. A million objects cost about
0.2 GB of memory.

A written object is immediately readable. Once per `sync_interval_s`, frames are made durable, then the index blocks
that name them. A crash loses later writes, or frame verification finds them damaged. No read or write of a frame waits
for a sync.

FORMAT.md describes the bytes on the device, and docs/adr/0008 the design.
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
from kvtier.tier.disk import batch as disk_batch
from kvtier.tier.disk.format import SEGMENT_BYTES_MAX, segment_bytes_for
from kvtier.tier.disk.marker import ALLOWED, MARKER_NAME, DiskMarker, open_marker, replace_marker
from kvtier.tier.disk.segment_files import SegmentFiles
from kvtier.tier.disk.segment_pool import Counts, Pool
from kvtier.tier.disk.status import FAULT_LENGTH_MAX, STATUS_INTERVAL_S, DiskStatus, write_status
from kvtier.tier.disk.write_budget import WriteBudget
from kvtier.tier.files.base import CLOSE_DEADLINE_S, FileSystemTier
from kvtier.tier.files.direct import DirectIo, choose_direct
from kvtier.tier.files.safe_open import check_private, make_root
from kvtier.tier.files.store_lock import StoreLock
from kvtier.tier.files.store_root import opening
from kvtier.tier.store_view import UNBOUNDED_BYTES
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

SEGMENTS_MAX = 4096
"""Intended maximum number of segments. A store that would have more, after a large increase of its capacity, is
recreated with larger segments if possible."""

ROW_SHARE_BYTES = 16 << 10
ROWS_MIN = 1 << 16
ROWS_MAX = 1 << 24
"""The table has one row per 16 KiB of capacity, within these bounds."""


class DiskTier(FileSystemTier):
    """Keeps frames in segment files under `root`, which only this process uses.

    Args:
        root: the directory, created if missing. A directory with foreign files is refused.
        capacity_bytes: cap for the segment files on the device. The marker (4 KiB) is not counted.
        name: the tier's name in metrics and errors.
        segment_bytes: size of each segment file; a frame must fit in one. None means the existing store's size. A new
            store uses 1/64 of the capacity, from 64 MiB (or a quarter of a small capacity) to 1 GiB.
        direct_io: "auto" uses direct I/O where the file system supports it, "on" requires it, "off" disables it.
        sync_interval_s: about how many seconds of writes a crash may lose.
        reserve_bytes: free space to leave to other programs; segments are removed to keep it free.
        write_bytes_per_day: limit for flash wear (`WriteBudget`); 0 means no limit.
        lock_deadline_s: longest wait for another operation that makes space.
        open_deadline_s: longest wait for another process that has the store open.
        any_owner: as in `FileSystemTier`.

    Raises:
        ConfigError: a setting is invalid.
        DamagedStoreError: the content of `root` cannot be used; nothing was changed.
        TierError: the storage failed while the tier was opened, or another process has the store open.
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
        """Number of stored objects."""
        return self._pool.object_count

    @property
    def frame_bytes_max(self) -> int:
        """Size of the largest frame that fits in a segment."""
        return self._pool.frame_bytes_max

    @property
    def evictions(self) -> int:
        """Number of objects evicted since the start."""
        return self._counts.evictions

    @property
    def write_bytes(self) -> dict[str, int]:
        """Bytes since the start, written as `frames` and `upkeep` (copies, index) or refused by the budget (`avoided`).

        Write amplification is (frames + upkeep) / frames.
        """
        counts = self._counts
        return {"frames": counts.frame_bytes, "upkeep": counts.upkeep_bytes, "avoided": self._avoided_bytes}

    def figures(self) -> Figures:
        """Return the current figures."""
        return Figures(self.used_bytes, self.limit_bytes, self.evictions, self.write_bytes, self.direct_io)

    def note_use(self, *, is_up: bool) -> None:
        """Record in the status file whether the session uses this tier or backs off."""
        self._is_up = is_up

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether it is stored. This makes no system call."""
        with self._operation("look for objects"):
            return self._pool.contains(names)

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer. Adjacent frames take one system call."""
        return self._read_many(reads, is_use=True)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read like `read_many`, but without counting as a use."""
        return self._read_many(reads, is_use=False)

    def _read_many(self, reads: Sequence[Read], *, is_use: bool) -> list[int | TierError | None]:
        with self._operation("read objects"):
            answers = disk_batch.read_many(self._pool, reads, is_use=is_use)
        return [self._told("read", read.name, answer) for read, answer in zip(reads, answers, strict=True)]

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Write frames of different names, each atomically.

        Frames lie next to each other, as far as a segment has room. The oldest segment is evicted to make space.

        The result is False if a frame exceeds a segment, the write budget is spent, or every segment is in use.
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
        """Delete `name`, also on the device."""
        with self._operation("delete", name):
            self._pool.remove(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Return the names and frame sizes of all objects."""
        with self._operation("scan"):
            return iter([(ObjectName(name), size_bytes) for name, size_bytes in self._pool.everything()])

    def newest(self, most: int, until_s: float) -> list[ObjectName]:
        """Return at most `most` names, newest first. This makes no system call."""
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
            # Files stay open because a thread may still use their descriptors.
            logger.warning("tier %s: closed while an operation still ran after %s s", self.name, CLOSE_DEADLINE_S)
            return
        try:
            self._pool.sync()
        except (OSError, TierError) as error:
            logger.warning(
                "tier %s: the index could not be written, so the most recent writes are lost: %s", self.name, error
            )
        self._write_status(is_open=False)
        self._pool.close()
        self._store_lock.release()

    def _admits(self, name: ObjectName, frame: memoryview) -> bool:
        """Return whether a frame fits in a segment and the write budget, which is then charged for it."""
        if not 0 < frame.nbytes <= self._pool.frame_bytes_max:
            return False
        is_admitted = self._budget.admits(name, frame.nbytes, time.monotonic())
        if not is_admitted:
            self._avoided_bytes += frame.nbytes
        return is_admitted

    def _open_store(self, deadline_s: float, lock: StoreLock | None = None) -> tuple[StoreLock, Pool]:
        """Lock the store, which is created if missing, and open its segments.

        Args:
            deadline_s: longest wait for the lock.
            lock: this process's lock, if it still belongs to the store.

        Raises:
            UnusableStoreError: the content of `root` cannot be used; nothing was changed.
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
        """Return whether an existing store keeps segments of this size."""
        if self._segment_bytes is not None:
            return segment_bytes == self._segment_bytes
        is_real = segment_bytes != SEGMENT_BYTES_MAX  # a repair writes this size if no segment shows the real one
        # With the largest caps, every store exceeds `SEGMENTS_MAX`. A store recreated at each start would keep nothing.
        least = min(self.capacity_bytes // SEGMENTS_MAX, segment_bytes_for(self.capacity_bytes))
        return is_real and least <= segment_bytes <= self.capacity_bytes

    def _maintain(self) -> None:
        """Run the maintenance thread: sync at intervals, keep one segment empty, and write the status."""
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
                    logger.exception("tier %s: upkeep failed and will be retried", self.name)

    def _upkeep(self) -> None:
        """Check that the store was not replaced, and keep a segment empty."""
        self._is_suspect |= not self._is_current()
        with self._operation("prepare a segment"):
            self._pool.prepare()

    def _write_status(self, *, is_open: bool = True) -> None:
        """Write the status file. A failure is only logged."""
        try:
            # If the store's disk is not mounted, the path leads to another disk. A tool's tier has no cap, and must not
            # replace the engine's status.
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
        """Return whether the marker and the segments are still at their paths."""
        return self._store_lock.is_current() and self._pool.files.is_current

    def _check_store(self) -> None:
        """Check whether the store is still there. If not, open the store that is there now."""
        if not self._reopening.acquire(timeout=self._lock_deadline_s):
            raise TierError(self.name, "is being reopened")
        try:
            if self._is_suspect and not self._is_current():
                self._reopen()
            self._is_suspect = False
        finally:
            self._reopening.release()

    def _reopen(self) -> None:
        """Open the store that is now at the path. The former pool's files are closed when no thread uses them."""
        former = self._store_lock
        try:
            is_home = os.path.samestat(self.root.stat(), self._home)
        except FileNotFoundError:
            is_home = False
        if not is_home and not os.path.lexists(self.root / MARKER_NAME):
            # The store is not recreated, because its disk may not be mounted, and the path then leads to another one.
            raise TierError(self.name, f"{self.root / MARKER_NAME} is gone")
        try:
            self._store_lock, self._pool = self._open_store(0.0, former if former.is_current() else None)
        except (ConfigError, OSError) as error:
            raise TierError(self.name, f"cannot be reopened: {error}") from error
        if self._store_lock is not former:
            former.release()

    @contextmanager
    def _operation(self, what: str, name: ObjectName | None = None) -> Generator[None]:
        """Run an operation as in the base class. After an OSError, the next one first checks or reopens the store."""
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
        """Return the answer for one object of a batch. An OSError becomes a `TierError`."""
        return self._failed(what, name, answer) if isinstance(answer, OSError) else answer
