"""Objects that hints keep in host memory until a time, within a share of its slots.

A retained object is READY, and no evictor has it. When its retention ends, it is a candidate for eviction again. Where
the share is used up, the oldest retention ends early, its deepest chunk first. High priority outlasts the others.
"""

from collections import OrderedDict
from heapq import heappop, heappush

from kvtier.core.host_memory import READABLE, HostEntry, HostMemory
from kvtier.types import Prefix

SLACK = 64
"""Times without a retention that are tolerated before a clean-up."""

Retained = OrderedDict[float, dict[HostEntry, None]]
"""Objects by the end of their retention, oldest first; of one end, parents before children."""


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
        self._by_end: list[dict[bool, Retained]] = [{False: OrderedDict(), True: OrderedDict()} for _ in host.slots]
        self._deadlines: list[float] = []
        """Ends, as a heap."""

    def retain(self, prefix: Prefix, until_s: float, *, is_high: bool) -> list[HostEntry]:
        """Retain what host memory has of `prefix`, its start first. Returns the objects that are retained now."""
        if len(self._deadlines) > 2 * len(self._ends) + SLACK:
            self._deadlines = sorted({end for _, end in self._ends.values()})
        kept: list[HostEntry] = []
        for group, entries in enumerate(self._host.entries):
            for key in prefix.keys:
                entry = entries.get(key)
                if entry is None or entry.residency not in READABLE:
                    continue
                if not self._retain(entry, until_s, is_high=is_high):
                    break
                kept.append(entry)
            assert self.counts[group] <= self.most[group], "too many objects are retained"
        return kept

    def _retain(self, entry: HostEntry, until_s: float, *, is_high: bool) -> bool:
        group, known = entry.group, self._ends.get(entry)
        if known is not None:
            end = known[0] or is_high, max(known[1], until_s)
            self._take_out(entry, known)
        else:
            end = is_high, until_s
            if self.counts[group] >= self.most[group] and not self._end_oldest(group, end):
                return False
            self._host.hold(entry)
            self.counts[group] += 1
        self._ends[entry] = end
        retained = self._by_end[group][end[0]]
        if end[1] not in retained:
            heappush(self._deadlines, end[1])
        retained.setdefault(end[1], {})[entry] = None
        return True

    def end(self, prefix: Prefix) -> None:
        """End the retention of what host memory has of `prefix`."""
        for entries in self._host.entries:
            for entry in [entries[key] for key in prefix.keys if key in entries]:
                if known := self._ends.get(entry):
                    self._take_out(entry, known)
                    self._end(entry)

    def expire(self, now_s: float) -> bool:
        """End the retentions whose time has come; whether there were any."""
        has_ended = False
        while self._deadlines and self._deadlines[0] <= now_s:
            until_s = heappop(self._deadlines)
            for by_end in self._by_end:
                for retained in by_end.values():
                    for entry in retained.pop(until_s, ()):
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

    def _end_oldest(self, group: int, end: tuple[bool, float]) -> bool:
        """End the retention of one object, of those that are not newer or of higher priority; whether there was one."""
        for is_high in (False, True)[: 1 + end[0]]:
            retained = self._by_end[group][is_high]
            oldest = next(iter(retained), None)
            if oldest is not None and (is_high, oldest) != end:
                entry = next(reversed(retained[oldest]))
                self._take_out(entry, (is_high, oldest))
                self._end(entry)
                return True
        return False

    def _take_out(self, entry: HostEntry, end: tuple[bool, float]) -> None:
        retained = self._by_end[entry.group][end[0]]
        del retained[end[1]][entry]
        if not retained[end[1]]:
            del retained[end[1]]

    def _end(self, entry: HostEntry) -> None:
        del self._ends[entry]
        self.counts[entry.group] -= 1
        self._host.let_go(entry)

    def check(self) -> None:
        """Assert that exactly these objects are held.

        Raises:
            AssertionError: others are, which is a bug in the core.
        """
        held = {entry for entries in self._host.entries for entry in entries.values() if entry.is_retained}
        assert held == set(self._ends), "an object is retained without an end"
        ends = [end for by_end in self._by_end for retained in by_end.values() for end in retained]
        assert set(ends) <= set(self._deadlines), "a retention does not end"
        for group, most in enumerate(self.most):
            assert sum([entry.group == group for entry in held]) == self.counts[group] <= most, "retained miscounted"
