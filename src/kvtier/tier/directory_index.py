"""One process's index of a store directory: which names exist, and their eviction order. It may be stale."""

import threading
import time
from collections.abc import Iterable, Sequence

from kvtier.policy.base import Evictor, Held, Hinted
from kvtier.tier.base import UNKNOWN, About, never_pinned
from kvtier.tier.index_snapshot import SnapshotRow
from kvtier.tier.store_paths import Found, charge_bytes
from kvtier.types import NextTurn, ObjectName

RECENCY_WRITE_NS = 60 * 10**9
"""Shortest time between two writes of an object's last use to its file's mtime, which other processes see."""


class _Record:
    """One indexed object."""

    __slots__ = ("about", "mtime_ns", "size_bytes", "used_ns")

    def __init__(self, size_bytes: int, used_ns: int, mtime_ns: int, about: About) -> None:
        self.size_bytes = size_bytes
        self.used_ns = used_ns  # last known use
        self.mtime_ns = mtime_ns  # last known mtime
        self.about = about


class DirectoryIndex:
    """Names with sizes and last uses, and the evictor that orders them. One lock; no I/O under it."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._records: dict[bytes, _Record] = {}
        self._lock = threading.Lock()
        self._last_ns = 0
        self.known_bytes = 0
        """Bytes that the indexed objects count against the cap."""

    def __len__(self) -> int:
        return len(self._records)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether it is indexed."""
        with self._lock:
            records = self._records
            return [name in records for name in names]

    def add(self, name: ObjectName, size_bytes: int, mtime_ns: int, about: About) -> None:
        """`name` was written, or offered again: a use now, with metadata `about`."""
        with self._lock:
            self._enter(name, size_bytes, self._now_ns(), mtime_ns, about)

    def add_found(self, name: ObjectName, size_bytes: int, mtime_ns: int) -> None:
        """`name` was found in the directory, written by another process. Not a use."""
        with self._lock:
            if name not in self._records:
                # The evictor orders by event, so the object counts as new whatever its mtime is.
                self._enter(name, size_bytes, mtime_ns, mtime_ns, UNKNOWN)

    def use(self, name: ObjectName, size_bytes: int, mtime_ns: int) -> int | None:
        """`name` was read. Returns the time to write to the file's mtime when that is due, else None."""
        with self._lock:
            now_ns = self._now_ns()
            record = self._records.get(name)
            if record is None:
                self._enter(name, size_bytes, now_ns, mtime_ns, UNKNOWN)
                record = self._records[name]
            else:
                record.used_ns = now_ns
                record.mtime_ns = max(record.mtime_ns, mtime_ns)
                self._evictor.touched(record.about.held(name))
            if now_ns - record.mtime_ns < RECENCY_WRITE_NS:
                return None
            record.mtime_ns = now_ns
            return now_ns

    def spare(self, name: ObjectName, mtime_ns: int) -> bool:
        """True when the file's mtime shows an unknown use. It counts as a use now, and `name` is not evicted."""
        with self._lock:
            record = self._records.get(name)
            if record is None or mtime_ns <= record.used_ns:
                return False
            record.used_ns = record.mtime_ns = mtime_ns
            self._evictor.touched(record.about.held(name))
            return True

    def postpone(self, name: ObjectName) -> None:
        """`name` could not be removed: move it to the end of the eviction order."""
        with self._lock:
            record = self._records.get(name)
            if record is not None:
                self._evictor.touched(record.about.held(name))

    def forget(self, name: ObjectName) -> None:
        """`name` no longer exists."""
        with self._lock:
            self._drop(name)

    def victim(self) -> ObjectName | None:
        """The next object to evict; None when the index is empty."""
        with self._lock:
            name = self._evictor.victim(never_pinned)
            return None if name is None else ObjectName(name)

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """Pass a session's expected next turn to an evictor that takes hints."""
        if isinstance(self._evictor, Hinted):
            with self._lock:
                self._evictor.expects(session, next_turn)

    def load_snapshot(self, rows: Iterable[SnapshotRow]) -> None:
        """Add the rows of an index snapshot. Stale rows are corrected on use, or by the next `replace`."""
        with self._lock:
            self._enter_past(
                (row.name, row.size_bytes, row.used_ns, About(_parent(row), row.depth, row.group))
                for row in sorted(rows, key=_used_ns)
                if row.name not in self._records
            )

    def replace(self, found: Sequence[Found]) -> None:
        """Make the index exactly what a walk `found`. New objects are added in the order of their mtimes."""
        present = {file.name: file.size_bytes for file in found}
        with self._lock:
            for name in [name for name in self._records if name not in present]:
                self._drop(name)
            for name, record in self._records.items():
                size_bytes = present[name]
                if size_bytes != record.size_bytes:
                    self.known_bytes += charge_bytes(size_bytes) - charge_bytes(record.size_bytes)
                    record.size_bytes = size_bytes
        self.add_missing(found)

    def add_missing(self, found: Iterable[Found]) -> None:
        """Add those of `found` that are not indexed, in the order of their mtimes.

        The evictor orders by event, so it treats all of them as newer than the indexed objects.
        """
        with self._lock:
            newcomers = [file for file in found if file.name not in self._records]
            newcomers.sort(key=_mtime_ns)
            self._enter_past((name, size_bytes, mtime_ns, UNKNOWN) for name, size_bytes, mtime_ns in newcomers)

    def rows(self) -> list[SnapshotRow]:
        """The rows of the index snapshot, least recently used first."""
        with self._lock:
            rows = [
                SnapshotRow(
                    name, record.about.parent, record.size_bytes, record.used_ns, record.about.depth, record.about.group
                )
                for name, record in self._records.items()
            ]
        return sorted(rows, key=_used_ns)

    def _enter(self, name: ObjectName, size_bytes: int, used_ns: int, mtime_ns: int, about: About) -> None:
        record = self._records.get(name)
        if record is None:
            self._records[name] = _Record(size_bytes, used_ns, mtime_ns, about)
            self.known_bytes += charge_bytes(size_bytes)
        else:
            self.known_bytes += charge_bytes(size_bytes) - charge_bytes(record.size_bytes)
            record.size_bytes, record.used_ns, record.mtime_ns = size_bytes, used_ns, max(mtime_ns, record.mtime_ns)
            if about.parent is not None or record.about.parent is None:
                record.about = about
        self._evictor.added(about.held(name))

    def _enter_past(self, uses: Iterable[tuple[bytes, int, int, About]]) -> None:
        """Add many (name, bytes, last use, about), oldest first. Inlined: it runs 100,000 times at a start."""
        records, added = self._records, self._evictor.added
        for name, size_bytes, used_ns, about in uses:
            records[name] = _Record(size_bytes, used_ns, used_ns, about)
            self.known_bytes += charge_bytes(size_bytes)
            added(Held(name, about.parent))

    def _drop(self, name: bytes) -> None:
        record = self._records.pop(name, None)
        if record is not None:
            self.known_bytes -= charge_bytes(record.size_bytes)
        self._evictor.removed(name)

    def _now_ns(self) -> int:
        """The wall clock, which files and other processes share, made monotonic."""
        self._last_ns = max(self._last_ns, time.time_ns())
        return self._last_ns


def _parent(row: SnapshotRow) -> ObjectName | None:
    return None if row.parent is None else ObjectName(row.parent)


def _used_ns(row: SnapshotRow) -> int:
    return row.used_ns


def _mtime_ns(file: Found) -> int:
    return file.mtime_ns
