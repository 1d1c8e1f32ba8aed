"""Least recently used first, children before their parents.

A chunk is useless without the chunks before it, but not without those after it. So a name with a present child is never
the victim. Among the others (the leaves) the least recently used one is. The chunks of a prompt may be touched in any
order.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from kvtier.policy.base import Held

_HEAP_SLACK = 64
"""Stale heap items that are tolerated before a clean-up."""


class _Entry:
    """A present name. `sequence` is the number of its last use; `is_queued` tells whether the heap contains it."""

    __slots__ = ("is_present", "is_queued", "name", "parent", "sequence")

    def __init__(self, name: bytes, parent: bytes | None, sequence: int) -> None:
        self.name = name
        self.parent = parent
        self.sequence = sequence
        self.is_present = True
        self.is_queued = False


class Lru:
    """Exact LRU over leaves. Each event costs O(log n) amortised.

    The heap is lazy: it contains each leaf once, with the sequence number at the time of queueing. A use changes only
    the entry. An item at the top with an old number is requeued, and one that is not a leaf any more is removed. When
    stale items are in the majority, the heap is rebuilt.

    A pinned leaf at the top counts as used at that moment, because its reader uses it. So pinned names are not examined
    again and again.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}  # number of present children, by name, whether or not the name is present
        self._heap: list[tuple[int, _Entry]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, held: Held) -> None:
        """`held` entered. A second call counts as a touch, and adds the parent if it was unknown."""
        self._sequence += 1
        entry = self._entries.get(held.name)
        if entry is not None:
            entry.sequence = self._sequence
            if entry.parent is None and held.parent is not None:
                self._link(entry, held.parent)
            return
        entry = _Entry(held.name, None, self._sequence)
        self._entries[held.name] = entry
        if held.parent is not None:
            self._link(entry, held.parent)
        if held.name not in self._children:
            self._queue(entry)

    def touched(self, held: Held) -> None:
        """`held` was used. Unknown names are ignored."""
        entry = self._entries.get(held.name)
        if entry is not None:
            self._sequence += 1
            entry.sequence = self._sequence

    def removed(self, name: bytes) -> None:
        """`name` was removed, for whatever reason. Unknown names are ignored."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.is_present = False
        if entry.parent is not None:
            self._unlink(entry.parent)
        if len(self._heap) > 2 * len(self._entries) + _HEAP_SLACK:
            self._compact()

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The least recently used unpinned leaf; None when all leaves are pinned. Does not remove it."""
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
        """The oldest unpinned name when all names have children, which only a cycle of parents makes possible.

        A damaged index may contain such links; without this method nothing could be evicted again.
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
