"""Evicts the least recently used name first, and children before their parents.

A chunk is useless without the chunks before it, but not without those after it. So a name whose child is present is
never the victim. The victim is the least recently used of the other names, the leaves. The chunks of a prompt may be
touched in any order.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from kvtier.policy.base import Use

_HEAP_SLACK = 64
"""Number of stale heap items that are tolerated before a cleanup."""


class _Entry:
    """A name that is present. `sequence` numbers its last use. `is_queued` says whether the heap contains it."""

    __slots__ = ("is_present", "is_queued", "name", "parent", "sequence")

    def __init__(self, name: bytes, parent: bytes | None, sequence: int) -> None:
        self.name = name
        self.parent = parent
        self.sequence = sequence
        self.is_present = True
        self.is_queued = False


class Lru:
    """Exact LRU over leaves. Each event costs O(log n) amortized.

    The heap is lazy: it contains each leaf once, with the sequence number at the time of queueing. A use changes only
    the entry. An item at the top with an old number is requeued, and one that is no longer a leaf is removed. When most
    items are stale, the heap is rebuilt.

    A pinned leaf at the top counts as used at that moment, because its reader uses it. So pinned names are not examined
    repeatedly.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}  # number of children present, by name, even if the name is not present
        self._heap: list[tuple[int, _Entry]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, use: Use) -> None:
        """Record the use that added a name. A second call counts as a touch, and adds the parent if it was unknown."""
        self._sequence += 1
        entry = self._entries.get(use.name)
        if entry is not None:
            entry.sequence = self._sequence
            if entry.parent is None and use.parent is not None:
                self._link(entry, use.parent)
            return
        entry = _Entry(use.name, None, self._sequence)
        self._entries[use.name] = entry
        if use.parent is not None:
            self._link(entry, use.parent)
        if use.name not in self._children:
            self._queue(entry)

    def touched(self, use: Use) -> None:
        """Record a further use. Ignore unknown names."""
        entry = self._entries.get(use.name)
        if entry is not None:
            self._sequence += 1
            entry.sequence = self._sequence

    def removed(self, name: bytes) -> None:
        """Record that `name` was removed, for any reason. Ignore unknown names."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.is_present = False
        if entry.parent is not None:
            self._unlink(entry.parent)
        if len(self._heap) > 2 * len(self._entries) + _HEAP_SLACK:
            self._compact()

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the least recently used unpinned leaf without removing it; None when all leaves are pinned."""
        heap = self._heap
        last = self._sequence  # entries requeued by this call are not examined again
        saw_leaf = False
        while heap and heap[0][0] <= last:
            sequence, entry = heap[0]
            if not entry.is_present or entry.name in self._children:
                entry.is_queued = False
                heappop(heap)
            elif entry.sequence != sequence:
                heapreplace(heap, (entry.sequence, entry))
            elif is_pinned(entry.name):
                saw_leaf = True
                self._sequence += 1
                entry.sequence = self._sequence
                heapreplace(heap, (entry.sequence, entry))
            else:
                return entry.name
        return None if saw_leaf else self._oldest_in_ring(is_pinned)

    def _oldest_in_ring(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the oldest unpinned name, in case every name has a child.

        Only a cycle of parents makes that possible. A damaged index may contain such links, and without this method
        nothing could be evicted again.
        """
        free = [entry for entry in self._entries.values() if not is_pinned(entry.name)]
        return min(free, key=lambda entry: entry.sequence).name if free else None

    def _link(self, entry: _Entry, parent: bytes) -> None:
        if parent == entry.name:
            return
        entry.parent = parent
        self._children[parent] = self._children.get(parent, 0) + 1

    def _unlink(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        entry = self._entries.get(parent)
        if entry is not None and not entry.is_queued:
            self._queue(entry)

    def _queue(self, entry: _Entry) -> None:
        entry.is_queued = True
        heappush(self._heap, (entry.sequence, entry))

    def _compact(self) -> None:
        for _, entry in self._heap:
            entry.is_queued = False
        leaves = [entry for name, entry in self._entries.items() if name not in self._children]
        for entry in leaves:
            entry.is_queued = True
        self._heap = [(entry.sequence, entry) for entry in leaves]
        heapify(self._heap)
