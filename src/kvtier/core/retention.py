"""Objects that hints keep in host memory until a given time, within a share of its slots.

A retained object is READY, and no evictor has it. When its retention ends, it is a candidate for eviction again. When
the share is used up, the oldest retention of the lowest priority ends early, its deepest chunk first. One hint of a
request is also limited to a share of its own (`hint_share`).

If several hints retain an object, only the one of the highest priority counts, and among equals the longest. So a
client's hint cannot prolong a retention that the operator requested.
"""

from collections import OrderedDict
from collections.abc import Collection
from heapq import heappop, heappush

from kvtier.core.host_residency import READABLE, HostEntry, HostMemory
from kvtier.types import Prefix, Priority

SLACK = 64
"""Number of stale end times in the heap that are tolerated before a clean-up."""


class Retention:
    """The retained objects of every group.

    Args:
        host: host memory.
        share: share of each group's slots that may be retained, at least 0 and less than 1.
        hint_share: share of each group's slots that one hint of a request may retain, at most `share`. It may always
            retain one object of a group of which anything may be retained.
        refused: counts, as ``retained``, the hints of requests that did not retain every object they named.
    """

    def __init__(self, host: HostMemory, share: float, hint_share: float, refused: dict[str, int]) -> None:
        self._host, self._refused = host, refused
        self.most = [min(int(count * share), count - 1) for count in host.slots]
        """Number of objects of each group that may be retained."""
        self._most_of_hint = [
            min(most, max(1, int(count * hint_share))) for most, count in zip(self.most, host.slots, strict=True)
        ]
        self.counts = [0] * len(host.slots)
        """Number of objects of each group that are retained."""
        self._ends: dict[HostEntry, tuple[Priority, float]] = {}
        """Priority and end time of each retained object."""
        self._by_age = [[OrderedDict[HostEntry, None]() for _ in Priority] for _ in host.slots]
        """Retained objects of each group and priority, the oldest retention first, and within it children before
        parents. If several hints retain an object, the newest hint sets its age, and the highest priority counts."""
        self._by_end: dict[float, dict[HostEntry, None]] = {}
        self._deadlines: list[float] = []
        """Heap of end times."""

    def most_of(self, priority: Priority) -> list[int]:
        """Return how many objects of each group one hint may retain."""
        return self.most if priority is Priority.OPERATOR else self._most_of_hint

    def retain(self, prefix: Prefix, until_s: float, priority: Priority) -> list[HostEntry]:
        """Retain those objects of `prefix` that are in host memory, leading chunks first. Return the retained ones."""
        if len(self._deadlines) > 2 * len(self._ends) + SLACK:
            self._deadlines = sorted(self._by_end)
        kept: dict[HostEntry, None] = {}
        named = 0
        for group, entries in enumerate(self._host.entries):
            found = [
                entry for entry in map(entries.get, prefix.keys) if entry is not None and entry.residency in READABLE
            ]
            named += len(found)
            for entry in found[: self.most_of(priority)[group]]:
                if not self._retain(entry, until_s, kept, priority):
                    break
                kept[entry] = None
            assert self.counts[group] <= self.most[group], "too many objects are retained"
        self._refused["retained"] += named > len(kept) and priority is not Priority.OPERATOR
        for entry in reversed(kept):
            self._by_age[entry.group][self._ends[entry][0]].move_to_end(entry)
        return [*kept]

    def _retain(self, entry: HostEntry, until_s: float, kept: Collection[HostEntry], priority: Priority) -> bool:
        group, known = entry.group, self._ends.get(entry)
        if known is not None:
            self._take_out(entry)
            priority, until_s = max(known, (priority, until_s))
        elif self.counts[group] >= self.most[group] and not self._end_oldest(group, kept, priority):
            return False
        else:
            self._host.retain(entry)
            self.counts[group] += 1
        self._ends[entry] = priority, until_s
        self._by_age[group][priority][entry] = None
        if until_s not in self._by_end:
            heappush(self._deadlines, until_s)
        self._by_end.setdefault(until_s, {})[entry] = None
        return True

    def end(self, prefix: Prefix) -> None:
        """End the retention of the objects of `prefix` in host memory."""
        for entries in self._host.entries:
            for entry in [entries[key] for key in prefix.keys if key in entries]:
                if entry in self._ends:
                    self._end(entry)

    def expire(self, now_s: float) -> bool:
        """End the retentions whose time has come. Return whether there were any."""
        has_ended = False
        while self._deadlines and self._deadlines[0] <= now_s:
            for entry in [*self._by_end.get(heappop(self._deadlines), ())]:
                self._end(entry)
                has_ended = True
        return has_ended

    def next_deadline(self) -> float | None:
        """Return when the next retention ends."""
        return self._deadlines[0] if self._deadlines else None

    def end_all(self) -> None:
        """End every retention."""
        if self._deadlines:
            self.expire(max(self._deadlines))

    def _end_oldest(self, group: int, kept: Collection[HostEntry], priority: Priority) -> bool:
        """End one retention early: the oldest of the lowest priority, up to `priority`, but none in `kept`.

        Return whether there was one.
        """
        for by_age in self._by_age[group][: 1 + priority]:
            oldest = next(iter(by_age), None)
            if oldest is not None and oldest not in kept:
                self._end(oldest)
                return True
        return False

    def _take_out(self, entry: HostEntry) -> None:
        priority, until_s = self._ends.pop(entry)
        del self._by_age[entry.group][priority][entry]
        del self._by_end[until_s][entry]
        if not self._by_end[until_s]:
            del self._by_end[until_s]

    def _end(self, entry: HostEntry) -> None:
        self._take_out(entry)
        self.counts[entry.group] -= 1
        self._host.end_retention(entry)

    def check(self) -> None:
        """Assert that host memory retains exactly the objects with an end time, and that the counts are right.

        Raises:
            AssertionError: a retention or count is wrong, which is a bug in the core.
        """
        retained = {entry for entries in self._host.entries for entry in entries.values() if entry.is_retained}
        assert retained == set(self._ends), "a retained object has no end"
        by_age = [entry for of_group in self._by_age for entries in of_group for entry in entries]
        assert set(by_age) == retained, "a retention cannot end early"
        assert self._by_end.keys() <= set(self._deadlines), "a retention does not end"
        for group, most in enumerate(self.most):
            assert sum([entry.group == group for entry in retained]) == self.counts[group] <= most, (
                "retained miscounted"
            )
