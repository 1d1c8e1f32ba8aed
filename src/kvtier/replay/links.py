"""Links and lower tiers in virtual time: who waits for whom, what passes, and what is held."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from kvtier.errors import ConfigError
from kvtier.policy.base import Evictor, Held
from kvtier.types import ChunkKey, Outcome

BIN_S = 1.0
"""Peaks are those of such windows."""


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
    """What passed over a link."""

    total_bytes: int
    mean_bytes_per_s: float
    peak_bytes_per_s: float
    """Of the busiest second; more than the link's own speed is never seen."""
    mean_depth: float
    """Transfers on the link or waiting for it, over time."""
    peak_depth: int


class Link:
    """One direction of a way between two places: first come, first served, at one speed.

    Args:
        agenda: the clock.
        bytes_per_s: its speed.
        latency_s: from a transfer's last byte to its end.
    """

    def __init__(self, agenda: Agenda, bytes_per_s: float, latency_s: float) -> None:
        self._agenda = agenda
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0
        self._bytes = 0
        self._by_bin: Counter[int] = Counter()
        self._depth = self._peak_depth = 0
        self._depth_s = self._changed_s = 0.0

    def send(self, size_bytes: int, done: Callable[[], None]) -> None:
        """Move so much, after all that was asked for before."""
        self._change(+1)
        begun_s = max(self._agenda.now_s, self._free_s)
        self._free_s = begun_s + size_bytes / self._bytes_per_s
        self._bytes += size_bytes
        self._spread(begun_s, self._free_s, size_bytes)

        def end() -> None:
            self._change(-1)
            done()

        self._agenda.at(self._free_s + self._latency_s, end)

    def use(self, duration_s: float) -> LinkUse:
        """What passed so far, over `duration_s`."""
        span_s = max(duration_s, 1e-9)
        return LinkUse(
            total_bytes=self._bytes,
            mean_bytes_per_s=self._bytes / span_s,
            peak_bytes_per_s=max(self._by_bin.values(), default=0) / BIN_S,
            mean_depth=self._depth_s / span_s,
            peak_depth=self._peak_depth,
        )

    def _change(self, step: int) -> None:
        now_s = self._agenda.now_s
        self._depth_s += self._depth * (now_s - self._changed_s)
        self._changed_s = now_s
        self._depth += step
        self._peak_depth = max(self._peak_depth, self._depth)

    def _spread(self, start_s: float, end_s: float, size_bytes: int) -> None:
        first, last = int(start_s / BIN_S), int(end_s / BIN_S)
        if first == last or end_s <= start_s:
            self._by_bin[first] += size_bytes
            return
        for place in range(first, last + 1):
            share = min(end_s, (place + 1) * BIN_S) - max(start_s, place * BIN_S)
            self._by_bin[place] += round(size_bytes * share / (end_s - start_s))


class Shelf:
    """A lower tier: what it holds, by the evictor that it has, and its two directions."""

    def __init__(self, agenda: Agenda, tier: "TierSpec", object_bytes: int, evictor: Evictor) -> None:
        self._agenda = agenda
        self._room = tier.capacity_bytes // object_bytes
        self._object_bytes = object_bytes
        self._evictor = evictor
        self._held: set[ChunkKey] = set()
        self.latency_s = tier.latency_s
        self.reads = Link(agenda, tier.read_bytes_per_s, tier.latency_s)
        self.writes = Link(agenda, tier.write_bytes_per_s, tier.latency_s)
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

    def read(self, held: Held, done: Callable[[Outcome], None]) -> None:
        """Read an object; `done` is told whether it was here to the end."""
        key = ChunkKey(held.name)
        if key not in self._held:
            self._agenda.at(self._agenda.now_s + self.latency_s, lambda: done(Outcome.ABSENT))
            return
        self._evictor.touched(held)
        self.reads.send(self._object_bytes, lambda: done(Outcome.DONE if key in self._held else Outcome.ABSENT))

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
            victim = self._evictor.victim(lambda _name: False)
            if victim is None:
                return
            self._evictor.removed(victim)
            self._held.discard(ChunkKey(victim))
            self.evictions += 1
        self._evictor.added(held)
        self._held.add(key)


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

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--tier {self.name}: {name} is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.latency_s < 60:
            raise ConfigError(f"--tier {self.name}: latency_s is {self.latency_s}; allowed: 0 to 60")
