"""Objects that hints keep in host memory until a time, within a share of its slots.

A retained object is READY, and no evictor has it. When its retention ends, it is a candidate for eviction again. Where
the share is used up, the oldest retention ends early, its deepest chunk first. High priority outlasts the others.
"""

from collections import OrderedDict
from collections.abc import Collection
from heapq import heappop, heappush

from kvtier.core.host_memory import READABLE, HostEntry, HostMemory
from kvtier.types import Prefix

SLACK = 64
"""Times without a retention that are tolerated before a clean-up."""


class Retention:
    """The retained objects of every group.

    Args:
        host: host memory.
        share: share of each group's slots that may be retained, at least 0 and less than 1.
    """

    def __init__(self, host: HostMemory, share: float) -> None:
        self._host = host
        self.most = [min(int(count * share), count - 1) for count in host.slots]
        """Most retained objects of each group."""
        self.counts = [0] * len(host.slots)
        """Retained objects of each group."""
        self._ends: dict[HostEntry, tuple[bool, float]] = {}
        """Whether its priority is high, and the end, of each retained object."""
        self._by_age = [(OrderedDict[HostEntry, None](), OrderedDict[HostEntry, None]()) for _ in host.slots]
        """Retained objects of each group, of normal and of high priority: the oldest retention first, in it children
        before parents. An object that several retain counts for the newest."""
        self._by_end: dict[float, dict[HostEntry, None]] = {}
        self._deadlines: list[float] = []
        """Ends, as a heap."""

    def retain(self, prefix: Prefix, until_s: float, *, is_high: bool) -> list[HostEntry]:
        """Retain what host memory has of `prefix`, its start first. Returns the objects that are retained now."""
        if len(self._deadlines) > 2 * len(self._ends) + SLACK:
            self._deadlines = sorted(self._by_end)
        kept: dict[HostEntry, None] = {}
        for group, entries in enumerate(self._host.entries):
            for key in prefix.keys:
                entry = entries.get(key)
                if entry is None or entry.residency not in READABLE:
                    continue
                if not self._retain(entry, until_s, kept, is_high=is_high):
                    break
                kept[entry] = None
            assert self.counts[group] <= self.most[group], "too many objects are retained"
        for entry in reversed(kept):
            self._by_age[entry.group][self._ends[entry][0]].move_to_end(entry)
        return [*kept]

    def _retain(self, entry: HostEntry, until_s: float, kept: Collection[HostEntry], *, is_high: bool) -> bool:
        group, known = entry.group, self._ends.get(entry)
        if known is not None:
            self._take_out(entry)
            is_high, until_s = known[0] or is_high, max(known[1], until_s)
        elif self.counts[group] >= self.most[group] and not self._end_oldest(group, kept, is_high=is_high):
            return False
        else:
            self._host.hold(entry)
            self.counts[group] += 1
        self._ends[entry] = is_high, until_s
        self._by_age[group][is_high][entry] = None
        if until_s not in self._by_end:
            heappush(self._deadlines, until_s)
        self._by_end.setdefault(until_s, {})[entry] = None
        return True

    def end(self, prefix: Prefix) -> None:
        """End the retention of what host memory has of `prefix`."""
        for entries in self._host.entries:
            for entry in [entries[key] for key in prefix.keys if key in entries]:
                if entry in self._ends:
                    self._end(entry)

    def expire(self, now_s: float) -> bool:
        """End the retentions whose time has come; whether there were any."""
        has_ended = False
        while self._deadlines and self._deadlines[0] <= now_s:
            for entry in [*self._by_end.get(heappop(self._deadlines), ())]:
                self._end(entry)
                has_ended = True
        return has_ended

    def next_deadline(self) -> float | None:
        """The end of the next retention."""
        return self._deadlines[0] if self._deadlines else None

    def end_all(self) -> None:
        """End every retention."""
        if self._deadlines:
            self.expire(max(self._deadlines))

    def _end_oldest(self, group: int, kept: Collection[HostEntry], *, is_high: bool) -> bool:
        """End the oldest retention of one object, of no higher priority and not of `kept`; whether there was one."""
        for by_age in self._by_age[group][: 1 + is_high]:
            oldest = next(iter(by_age), None)
            if oldest is not None and oldest not in kept:
                self._end(oldest)
                return True
        return False

    def _take_out(self, entry: HostEntry) -> None:
        is_high, until_s = self._ends.pop(entry)
        del self._by_age[entry.group][is_high][entry]
        del self._by_end[until_s][entry]
        if not self._by_end[until_s]:
            del self._by_end[until_s]

    def _end(self, entry: HostEntry) -> None:
        self._take_out(entry)
        self.counts[entry.group] -= 1
        self._host.let_go(entry)

    def check(self) -> None:
        """Assert that exactly these objects are held.

        Raises:
            AssertionError: others are, which is a bug in the core.
        """
        held = {entry for entries in self._host.entries for entry in entries.values() if entry.is_retained}
        assert held == set(self._ends), "an object is retained without an end"
        by_age = [entry for of_group in self._by_age for entries in of_group for entry in entries]
        assert set(by_age) == held, "a retention cannot end early"
        assert self._by_end.keys() <= set(self._deadlines), "a retention does not end"
        for group, most in enumerate(self.most):
            assert sum([entry.group == group for entry in held]) == self.counts[group] <= most, "retained miscounted"
