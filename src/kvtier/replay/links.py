"""Links and lower tiers in virtual time: who waits for whom, what passes, and what is held."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvtier.errors import ConfigError
from kvtier.policy.base import Evictor, Held
from kvtier.replay.series import Series
from kvtier.types import ChunkKey, Outcome


class Agenda:
    """The clock, and what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Let `act` happen at `time_s`, or now if that is past; of equal times, the first asked for is first."""
        self._count += 1
        heappush(self._acts, (max(time_s, self.now_s), self._count, act))

    def run(self) -> None:
        """Everything, until nothing is left to happen."""
        while self._acts:
            self.now_s, _, act = heappop(self._acts)
            act()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What passed over a link, or over the same link of several nodes."""

    transfers: int
    total_bytes: int
    mean_bytes_per_s: float
    """Of all links together."""
    peak_bytes_per_s: float
    """Of the busiest second of the busiest link; more than its own speed is never seen."""
    peak_together_bytes_per_s: float
    """Of the busiest second of all links together."""
    used_share: float
    """Of what the links could have moved in the time."""
    mean_depth: float
    """Transfers on a link or waiting for it, over time."""
    peak_depth: int


class Gauge:
    """What passes over a link of all nodes together, over time."""

    __slots__ = ("depth", "moved")

    def __init__(self) -> None:
        self.moved = Series()
        """Bytes."""
        self.depth = Series()
        """Transfers on the links or waiting for them."""


class Link:
    """One direction of a way between two places: first come, first served, at one speed.

    Args:
        agenda: the clock.
        bytes_per_s: its speed.
        latency_s: from a transfer's last byte to its end.
        gauge: shared by the links that are told together.
    """

    __slots__ = (
        "_agenda",
        "_changed_s",
        "_depth",
        "_gauge",
        "_in_second",
        "_peak",
        "_second",
        "bytes_per_s",
        "depth_s",
        "free_s",
        "latency_s",
        "peak_depth",
        "total_bytes",
        "transfers",
    )

    def __init__(self, agenda: Agenda, bytes_per_s: float, latency_s: float, gauge: Gauge | None = None) -> None:
        self._agenda = agenda
        self._gauge = gauge or Gauge()
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_s = 0.0
        """When all that was asked for has passed."""
        self.transfers = self.total_bytes = 0
        self._second, self._in_second, self._peak = -1, 0.0, 0.0
        self._depth = self.peak_depth = 0
        self._changed_s = 0.0
        self.depth_s = 0.0
        """Transfers on the link or waiting for it, times how long they were that."""

    def send(self, size_bytes: int, done: Callable[[], None]) -> float:
        """Move so much, after all that was asked for before; returns when it will have arrived."""
        self._change(+1)
        begun_s = max(self._agenda.now_s, self.free_s)
        self.free_s = begun_s + size_bytes / self.bytes_per_s
        self.total_bytes += size_bytes
        self.transfers += 1
        self._spread(begun_s, self.free_s, size_bytes)

        def end() -> None:
            self._change(-1)
            done()

        self._agenda.at(self.free_s + self.latency_s, end)
        return self.free_s + self.latency_s

    def _change(self, step: int) -> None:
        now_s, depth = self._agenda.now_s, self._depth
        if depth:
            waited_s = depth * (now_s - self._changed_s)
            self.depth_s += waited_s
            self._gauge.depth.add(self._changed_s, now_s, waited_s)
        self._changed_s = now_s
        self._depth = depth + step
        self.peak_depth = max(self.peak_depth, self._depth)

    def _spread(self, start_s: float, end_s: float, size_bytes: int) -> None:
        self._gauge.moved.add(start_s, end_s, size_bytes)
        second, last = int(start_s), int(end_s)
        if second != self._second:
            self._next_second(second)
        while second < last:
            self._in_second += (second + 1 - start_s) * self.bytes_per_s
            second += 1
            start_s = second
            self._next_second(second)
        self._in_second += (end_s - start_s) * self.bytes_per_s

    def _next_second(self, second: int) -> None:
        self._peak = max(self._peak, self._in_second)
        self._second, self._in_second = second, 0.0

    @property
    def peak_bytes(self) -> float:
        """Of the busiest second."""
        return max(self._peak, self._in_second)


def link_use(links: Sequence[Link], gauge: Gauge, duration_s: float) -> LinkUse:
    """What passed over `links`, which share `gauge`, in `duration_s`, or until the last of it had passed."""
    # What is still waiting when the last request is answered would otherwise be more than a link can move.
    span_s = max(duration_s, 1e-9, *(it.free_s for it in links))
    total = sum(it.total_bytes for it in links)
    return LinkUse(
        transfers=sum(it.transfers for it in links),
        total_bytes=total,
        mean_bytes_per_s=total / span_s,
        peak_bytes_per_s=max(it.peak_bytes for it in links),
        peak_together_bytes_per_s=gauge.moved.peak,
        used_share=total / sum(it.bytes_per_s for it in links) / span_s,
        mean_depth=sum(it.depth_s for it in links) / span_s / len(links),
        peak_depth=max(it.peak_depth for it in links),
    )


class Shelf:
    """A lower tier: what it holds, by the evictor that it has, and its two directions."""

    def __init__(
        self, agenda: Agenda, tier: "TierSpec", object_bytes: int, evictor: Evictor, gauges: tuple[Gauge, Gauge]
    ) -> None:
        self._agenda = agenda
        self._room = tier.capacity_bytes // object_bytes
        self._object_bytes = object_bytes
        self._evictor = evictor
        self._held: set[ChunkKey] = set()
        self.latency_s = tier.latency_s
        self.reads = Link(agenda, tier.read_bytes_per_s, tier.latency_s, gauges[0])
        self.writes = Link(agenda, tier.write_bytes_per_s, tier.latency_s, gauges[1])
        self.evictions = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held

    @property
    def held_bytes(self) -> int:
        """What is here."""
        return len(self._held) * self._object_bytes

    def drop(self, key: ChunkKey) -> None:
        """Give an object up."""
        self._held.discard(key)
        self._evictor.removed(key)

    def read(self, held: Held, done: Callable[[Outcome], None]) -> float:
        """Read an object; `done` is told whether it was here to the end. Returns when that will be."""
        key = ChunkKey(held.name)
        if key not in self._held:
            end_s = self._agenda.now_s + self.latency_s
            self._agenda.at(end_s, lambda: done(Outcome.ABSENT))
            return end_s
        self._evictor.touched(held)
        return self.reads.send(self._object_bytes, lambda: done(Outcome.DONE if key in self._held else Outcome.ABSENT))

    def write(self, held: Held, done: Callable[[], None]) -> None:
        """Write an object, which is here when it is `done`; one that is here already is not written again."""
        if ChunkKey(held.name) in self._held:
            self._evictor.touched(held)
            self._agenda.at(self._agenda.now_s + self.latency_s, done)
            return

        def end() -> None:
            self._keep(held)
            done()

        self.writes.send(self._object_bytes, end)

    def _keep(self, held: Held) -> None:
        key = ChunkKey(held.name)
        while key not in self._held and len(self._held) >= self._room:
            victim = self._evictor.victim(_nobody_is_pinned)
            if victim is None:
                return
            self._evictor.removed(victim)
            self._held.discard(ChunkKey(victim))
            self.evictions += 1
        self._evictor.added(held)
        self._held.add(key)


def _nobody_is_pinned(name: bytes) -> bool:  # noqa: ARG001  the interface's argument
    return False


def _no_sources() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """A place of a replay."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    """For host memory: to the engine."""
    write_bytes_per_s: float
    """For host memory: from the engine."""
    latency_s: float
    is_shared: bool = False
    """One for all nodes, not one for each."""
    drive_bytes: int | None = None
    """Capacity of the drives of which KV may use `capacity_bytes`; None: that is all they have."""
    rated_writes_per_day: float | None = None
    """How often a day these drives may be filled, by their makers' rating."""
    sources: dict[str, str] = field(default_factory=_no_sources, compare=False)
    """Field to where its value comes from."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--tier {self.name}: {name} is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.latency_s < 60:
            raise ConfigError(f"--tier {self.name}: latency_s is {self.latency_s}; allowed: 0 to 60")
        if self.drive_bytes is not None and self.drive_bytes < self.capacity_bytes:
            raise ConfigError(
                f"--tier {self.name}: drives of {self.drive_bytes} bytes hold less than the {self.capacity_bytes} that "
                "KV is to use; allowed: larger drives, or more of them"
            )
