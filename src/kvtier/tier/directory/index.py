"""One process's index of a store directory: which names exist, and their eviction order. It may be stale."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from kvtier.policy.base import Evictor, Hinted
from kvtier.policy.name_table import NameTable
from kvtier.tier.base import UNKNOWN, About, never_pinned
from kvtier.tier.directory.snapshot import SnapshotRow, oldest_first, slices
from kvtier.tier.files.store_paths import Found, charge_bytes
from kvtier.types import NextTurn, ObjectName

RECENCY_WRITE_NS = 60 * 10**9
"""Minimum time between two writes of an object's last use to its file's mtime, which other processes see."""


class _Record:
    """One indexed object."""

    __slots__ = ("about", "mtime_ns", "size_bytes", "used_ns", "walk")

    def __init__(self, size_bytes: int, used_ns: int, mtime_ns: int, about: About, walk: int) -> None:
        self.size_bytes = size_bytes
        self.used_ns = used_ns  # last known use
        self.mtime_ns = mtime_ns  # last known mtime
        self.about = about
        self.walk = walk  # the last walk that found it or during which it was added


class DirectoryIndex:
    """Names with sizes and last uses, and the evictor that orders them. One lock protects them; no I/O runs under it.

    Work on all names holds the lock for `SLICE` names at a time.
    """

    def __init__(self, evictor: Evictor, *, is_bare: bool = False) -> None:
        self._is_bare = is_bare
        self._evictor = evictor
        self._records: NameTable[_Record] = NameTable()
        self._lock = threading.Lock()
        self._last_ns = 0
        self._walk = 0  # number of the latest walk
        self.known_bytes = 0
        """Bytes that the indexed objects count against the cap."""

    def __len__(self) -> int:
        return len(self._records)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether it is indexed."""
        with self._lock:
            return [name in self._records for name in names]

    def add(self, name: ObjectName, size_bytes: int, mtime_ns: int, about: About) -> None:
        """Record that `name` was written or offered again, with metadata `about`. This counts as a use."""
        with self._lock:
            self._enter(name, size_bytes, self._now_ns(), mtime_ns, about)

    def add_found(self, name: ObjectName, size_bytes: int, mtime_ns: int) -> None:
        """Record that `name`, written by another process, was found in the directory. This does not count as a use."""
        with self._lock:
            if name not in self._records:
                # The evictor orders by event, so the object counts as new whatever its mtime.
                self._enter(name, size_bytes, mtime_ns, mtime_ns, UNKNOWN)

    def use(self, name: ObjectName, size_bytes: int, mtime_ns: int) -> int | None:
        """Record that `name` was read. Return the time to write to the file's mtime, or None if no write is due."""
        with self._lock:
            now_ns = self._now_ns()
            record = self._records.get(name)
            if record is None:
                record = self._enter(name, size_bytes, now_ns, mtime_ns, UNKNOWN)
            else:
                record.used_ns = now_ns
                record.mtime_ns = max(record.mtime_ns, mtime_ns)
                self._evictor.touched(record.about.use(name))
            if now_ns - record.mtime_ns < RECENCY_WRITE_NS:
                return None
            record.mtime_ns = now_ns
            return now_ns

    def spare(self, name: ObjectName, mtime_ns: int) -> bool:
        """Return whether the file's mtime shows a use unknown to the index. That use then counts: keep `name`."""
        with self._lock:
            record = self._records.get(name)
            if record is None or mtime_ns <= record.used_ns:
                return False
            record.used_ns = record.mtime_ns = mtime_ns
            self._evictor.touched(record.about.use(name))
            return True

    def postpone(self, name: ObjectName) -> None:
        """Move `name`, which could not be removed, to the end of the eviction order."""
        with self._lock:
            record = self._records.get(name)
            if record is not None:
                self._evictor.touched(record.about.use(name))

    def forget(self, name: ObjectName) -> None:
        """Record that `name` no longer exists."""
        with self._lock:
            self._drop(name)

    def victim(self) -> ObjectName | None:
        """Return the next object to evict, or None if the index is empty."""
        with self._lock:
            name = self._evictor.victim(never_pinned)
            return None if name is None else ObjectName(name)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Pass a conversation's expected next turn to an evictor that takes hints."""
        if isinstance(self._evictor, Hinted):
            with self._lock:
                self._evictor.expects(conversation, next_turn)

    def load_snapshot(self, rows: Iterable[SnapshotRow]) -> None:
        """Add the rows of an index snapshot, oldest use first. A use of an object, or `merge`, corrects stale rows."""
        for some in slices(rows):
            with self._lock:
                for row in some:
                    if row.name not in self._records:
                        name, parent = ObjectName(row.name), None if row.parent is None else ObjectName(row.parent)
                        self._enter(name, row.size_bytes, row.used_ns, row.used_ns, About(parent, row.depth, row.group))

    def merge(self, found: Iterable[Found]) -> None:
        """Make the index match the result of a walk; entries added meanwhile stay. Only one call may run at a time.

        New objects are added after the walk, in the order of their mtimes. The evictor orders by event, so it treats
        all of them as newer than the indexed objects.
        """
        self._walk += 1
        missing = oldest_first(row for files in slices(found) for row in self._missing(files))
        for names in slices(self._records):
            with self._lock:
                for name in names:
                    record = self._records.get(name)
                    if record is not None and record.walk != self._walk:
                        self._drop(name)
        self.load_snapshot(missing)

    def rows(self) -> Iterator[SnapshotRow]:
        """Yield the rows of the index snapshot, in any order, without the lock. Concurrent changes may be missing.

        A bare index writes no parents, depths or groups.
        """
        for name in self._records:
            record = self._records.get(name)
            if record is not None:
                about = UNKNOWN if self._is_bare else record.about
                yield SnapshotRow(name, about.parent, record.size_bytes, record.used_ns, about.depth, about.group)

    def _missing(self, files: list[Found]) -> list[SnapshotRow]:
        """Return the `files` that are not indexed, and correct the sizes of the others."""
        missing: list[SnapshotRow] = []
        with self._lock:
            for file in files:
                record = self._records.get(file.name)
                if record is None:
                    missing.append(SnapshotRow(file.name, None, file.size_bytes, file.mtime_ns, 0, 0))
                else:
                    record.walk = self._walk
                    self.known_bytes += charge_bytes(file.size_bytes) - charge_bytes(record.size_bytes)
                    record.size_bytes = file.size_bytes
        return missing

    def _enter(self, name: ObjectName, size_bytes: int, used_ns: int, mtime_ns: int, about: About) -> _Record:
        record = self._records.get(name)
        if record is None:
            self._records[name] = record = _Record(size_bytes, used_ns, mtime_ns, about, self._walk)
            self.known_bytes += charge_bytes(size_bytes)
        else:
            self.known_bytes += charge_bytes(size_bytes) - charge_bytes(record.size_bytes)
            record.size_bytes, record.used_ns, record.mtime_ns = size_bytes, used_ns, max(mtime_ns, record.mtime_ns)
            record.walk = self._walk
            if about.parent is not None or record.about.parent is None:
                record.about = about
        self._evictor.added(about.use(name))
        return record

    def _drop(self, name: bytes) -> None:
        record = self._records.pop(name)
        if record is not None:
            self.known_bytes -= charge_bytes(record.size_bytes)
        self._evictor.removed(name)

    def _now_ns(self) -> int:
        """Return the wall-clock time, which files and other processes share, made monotonic."""
        self._last_ns = max(self._last_ns, time.time_ns())
        return self._last_ns
