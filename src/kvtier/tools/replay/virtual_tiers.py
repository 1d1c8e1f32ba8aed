"""Models links and lower tiers in virtual time."""

from array import array
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.policy.base import Evictor, Use
from kvtier.tier.base import never_pinned
from kvtier.tools.replay.results import LinkStats, TierSpec
from kvtier.types import ChunkKey, Outcome

SPAN_MAX_S = 10_000_000
"""Last second of a series. It includes all later amounts, because a series takes eight bytes per second."""

INDEX_S = 100e-6
"""Longest time of a lookup in a local tier, which has an index in memory."""


class EventQueue:
    """The virtual clock, with events in order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call `act` at `time_s`, or now if that time has passed. Equal times keep the order of the calls."""
        self._count += 1
        heappush(self._events, (max(time_s, self.now_s), self._count, act))

    def run(self) -> None:
        """Run all events, including those that events add."""
        while self._events:
            self.now_s, _, act = heappop(self._events)
            act()


class SecondSums:
    """A sum for each second, from second 0 on."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = array("d")

    def add(self, start_s: float, end_s: float, amount: float) -> None:
        """Spread `amount` evenly from `start_s` to `end_s`."""
        first, last = int(start_s), int(end_s)
        sums = self._sums
        if last >= len(sums):
            if last >= SPAN_MAX_S:
                first, last, end_s = min(first, SPAN_MAX_S - 1), SPAN_MAX_S - 1, start_s
            sums.frombytes(bytes(8 * max(0, last + 1 - len(sums))))
        if first == last or end_s <= start_s:
            sums[first] += amount
            return
        rate = amount / (end_s - start_s)
        for second in range(first, last + 1):
            sums[second] += (min(end_s, second + 1) - max(start_s, second)) * rate

    @property
    def span_s(self) -> float:
        """The end of the last second with an amount."""
        return float(len(self._sums))

    @property
    def peak(self) -> float:
        """The largest sum."""
        return max(self._sums, default=0.0)

    def means(self, span_s: float, count: int) -> npt.NDArray[np.float64]:
        """Return the mean per second in each of `count` equal parts of the time from 0 to `span_s`."""
        total = np.concatenate([[0.0], np.cumsum(np.frombuffer(self._sums, np.float64))])
        edges = np.linspace(0.0, span_s, count + 1)
        within = np.interp(edges, np.arange(len(total)), total)
        return np.diff(within) * (count / max(span_s, 1e-9))


class LinkSeries:
    """Bytes and queue depth of a link over time, summed over all nodes."""

    __slots__ = ("depth", "moved")

    def __init__(self) -> None:
        self.moved = SecondSums()
        """Bytes moved in each second."""
        self.depth = SecondSums()
        """Mean number of active and queued transfers in each second."""


class ReplayLink:
    """One direction of a link: a FIFO queue with constant bandwidth.

    Args:
        events: the clock.
        bytes_per_s: bandwidth.
        latency_s: time from a transfer's last byte to its end.
        series: the series that the corresponding links of all nodes share.
    """

    __slots__ = (
        "_changed_s",
        "_depth",
        "_events",
        "_in_second",
        "_second",
        "_series",
        "bytes_per_s",
        "depth_s",
        "free_s",
        "latency_s",
        "peak_bytes",
        "peak_depth",
        "total_bytes",
        "transfers",
    )

    def __init__(self, events: EventQueue, bytes_per_s: float, latency_s: float, series: LinkSeries) -> None:
        self._events = events
        self._series = series
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_s = 0.0
        """Time at which the queue will be empty."""
        self.transfers = self.total_bytes = 0
        self._second, self._in_second = -1, 0.0
        self.peak_bytes = 0.0
        """Bytes in the busiest second."""
        self._depth = self.peak_depth = 0
        self._changed_s = 0.0
        self.depth_s = 0.0
        """Integral of the depth over time."""

    def send(self, size_bytes: int, done: Callable[[], None]) -> float:
        """Queue a transfer. Return the time at which it ends."""
        self._change(+1)
        begun_s = max(self._events.now_s, self.free_s)
        self.free_s = begun_s + size_bytes / self.bytes_per_s
        self.total_bytes += size_bytes
        self.transfers += 1
        self._series.moved.add(begun_s, self.free_s, size_bytes)
        self._count_bytes(begun_s, self.free_s)

        def end() -> None:
            self._change(-1)
            done()

        self._events.at(self.free_s + self.latency_s, end)
        return self.free_s + self.latency_s

    def _change(self, step: int) -> None:
        now_s, depth = self._events.now_s, self._depth
        if depth:
            waited_s = depth * (now_s - self._changed_s)
            self.depth_s += waited_s
            self._series.depth.add(self._changed_s, now_s, waited_s)
        self._changed_s = now_s
        self._depth = depth + step
        self.peak_depth = max(self.peak_depth, self._depth)

    def _count_bytes(self, start_s: float, end_s: float) -> None:
        """Update the busiest second. Transfers must come in the order of their starts."""
        for second in range(int(start_s), int(end_s) + 1):
            if second != self._second:
                self._second, self._in_second = second, 0.0
            self._in_second += (min(end_s, second + 1) - max(start_s, second)) * self.bytes_per_s
            self.peak_bytes = max(self.peak_bytes, self._in_second)


def link_stats(links: Sequence[ReplayLink], series: LinkSeries, duration_s: float) -> LinkStats:
    """Return statistics of `links`, which share `series`, over `duration_s`, or over the busy time if it is longer."""
    # Transfers may outlast the last request. Without the time after it, the mean could exceed the bandwidth.
    span_s = max(duration_s, 1e-9, *(it.free_s for it in links))
    total = sum(it.total_bytes for it in links)
    return LinkStats(
        transfers=sum(it.transfers for it in links),
        total_bytes=total,
        mean_bytes_per_s=total / span_s,
        peak_bytes_per_s=max(it.peak_bytes for it in links),
        peak_together_bytes_per_s=series.moved.peak,
        used_share=total / sum(it.bytes_per_s for it in links) / span_s,
        mean_depth=sum(it.depth_s for it in links) / span_s / len(links),
        peak_depth=max(it.peak_depth for it in links),
    )


class ReplayTier:
    """A lower tier, with objects, an evictor, and a link for each direction."""

    def __init__(
        self,
        events: EventQueue,
        spec: TierSpec,
        object_bytes: int,
        evictor: Evictor,
        series: tuple[LinkSeries, LinkSeries],
    ) -> None:
        self._events = events
        self._capacity = spec.capacity_bytes // object_bytes
        self._object_bytes = object_bytes
        self._evictor = evictor
        self._held: set[ChunkKey] = set()
        self.latency_s = spec.latency_s
        self.lookup_s = spec.latency_s if spec.is_remote else min(INDEX_S, spec.latency_s)
        self.reads = ReplayLink(events, spec.read_bytes_per_s, spec.latency_s, series[0])
        self.writes = ReplayLink(events, spec.write_bytes_per_s, spec.latency_s, series[1])
        self.evictions = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held

    @property
    def held_bytes(self) -> int:
        """Bytes of all objects."""
        return len(self._held) * self._object_bytes

    def drop(self, key: ChunkKey) -> None:
        """Remove an object."""
        self._held.discard(key)
        self._evictor.removed(key)

    def read(self, use: Use, done: Callable[[Outcome], None]) -> float:
        """Read an object. Return the time at which the read ends. `done` gets ABSENT if the object is gone by then."""
        key = ChunkKey(use.name)
        if key not in self._held:
            end_s = self._events.now_s + self.latency_s
            self._events.at(end_s, lambda: done(Outcome.ABSENT))
            return end_s
        self._evictor.touched(use)
        return self.reads.send(self._object_bytes, lambda: done(Outcome.DONE if key in self._held else Outcome.ABSENT))

    def write(self, use: Use, done: Callable[[], None]) -> None:
        """Write an object, unless the tier already has it."""
        if ChunkKey(use.name) in self._held:
            self._evictor.touched(use)
            self._events.at(self._events.now_s + self.latency_s, done)
            return

        def end() -> None:
            self._keep(use)
            done()

        self.writes.send(self._object_bytes, end)

    def _keep(self, use: Use) -> None:
        key = ChunkKey(use.name)
        while key not in self._held and len(self._held) >= self._capacity:
            victim = self._evictor.victim(never_pinned)
            if victim is None:
                return
            self.drop(ChunkKey(victim))
            self.evictions += 1
        self._evictor.added(use)
        self._held.add(key)
