"""Maintains the metrics of commands, of host memory and of the tiers."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import get_args

from kvtier.codec.frame import frame_bytes
from kvtier.core.cache import Cache
from kvtier.core.host_residency import HOST
from kvtier.layout import KvLayout, of_all_ranks
from kvtier.observe import metric_definitions as table
from kvtier.observe.metric_definitions import Metric
from kvtier.observe.metrics import Bound, Metrics
from kvtier.runtime.executor import Completion, TierView, Work
from kvtier.runtime.observers.guards import Observer
from kvtier.types import Direction, Drop, Outcome, Probe, Transfer, Way


def start_series(metrics: Metrics, tiers: Iterable[str], down: Container[str]) -> None:
    """Start the tiers' event counters at 0. Otherwise a rate would miss the first event of a new series.

    Args:
        metrics: receives the counters.
        tiers: names of the tiers.
        down: names of the tiers that are not open yet.
    """
    metrics.add(table.LOAD_TOKENS, 0.0, place=HOST)
    for name in tiers:
        metrics.add(table.LOAD_TOKENS, 0.0, place=name)
        metrics.add(table.TIER_FAILURES, 0.0, tier=name)
        metrics.add(table.DROPS, 0.0, place=name, reason="corrupt")
        for way in get_args(Way):
            metrics.set(table.TIER_UP, float(name not in down), tier=name, way=way)
        for reason in table.REFUSALS:
            metrics.add(table.REFUSED_OBJECTS, 0.0, tier=name, reason=reason)


class CommandCounters(Observer):
    """Counts commands by outcome, and transfers in flight."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.in_flight: dict[tuple[Direction, str], int] = {}
        """Transfers in flight by direction and tier."""
        self._outcomes = {
            direction: {
                each: metrics.bind(table.TRANSFERS, link=direction.value, outcome=each.value) for each in Outcome
            }
            for direction in Direction
        }
        self._moved: dict[tuple[Direction, str], tuple[Bound, Bound, Bound]] = {}
        """Bytes, duration and waiting time of transfers, by direction and tier."""

    def submitted(self, command: Work) -> None:
        """Count a submitted transfer as in flight."""
        if isinstance(command, Transfer):
            way = command.direction, command.tier
            self.in_flight[way] = self.in_flight.get(way, 0) + 1

    def completed(self, completion: Completion) -> None:
        """Count a completed command."""
        command, outcome = completion.command, completion.outcome
        if completion.is_tier_fault:
            self._metrics.add(table.TIER_FAILURES, tier=command.tier)
        if isinstance(command, Transfer):
            direction = command.direction
            self.in_flight[direction, command.tier] -= 1
            counts = [(self._outcomes[direction][outcome], 1.0)]
            if completion.reason:
                self._metrics.add(table.REFUSED_OBJECTS, tier=command.tier, reason=completion.reason)
            if outcome is Outcome.DONE:
                moved = self._moved.get((direction, command.tier)) or self._bind(direction, command.tier)
                counts += zip(moved, (completion.size_bytes, completion.seconds, completion.waited_s), strict=True)
            self._metrics.count(counts)
        elif isinstance(command, Probe):
            if not command.objects:
                return  # a health check, not a lookup's probe
            result = "answered" if outcome is Outcome.DONE else "failed"
            self._metrics.add(table.PROBES, tier=command.tier, result=result)
            self._metrics.observe(table.PROBE_SECONDS, completion.seconds + completion.waited_s, tier=command.tier)
        elif isinstance(command, Drop) and outcome is Outcome.DONE:
            self._metrics.add(table.DROPS, place=command.tier, reason="corrupt")

    def each_second(self) -> None:
        """Refresh the gauge of transfers in flight."""
        for (direction, tier), count in self.in_flight.items():
            self._metrics.set(table.TRANSFERS_IN_FLIGHT, count, link=direction.value, tier=tier or HOST)

    def _bind(self, direction: Direction, tier: str) -> tuple[Bound, Bound, Bound]:
        place = {"link": direction.value, "tier": tier or HOST}
        bound = (
            self._metrics.bind(table.TRANSFER_BYTES, **place),
            self._metrics.bind(table.TRANSFER_SECONDS, **place),
            self._metrics.bind(table.TRANSFER_WAIT_SECONDS, **place),
        )
        self._moved[direction, tier] = bound
        return bound


class TierGauges:
    """Sets the fill level, evictions, written bytes and stuck queues of each tier, from the tiers' views on all ranks.

    A gauge is the sum over the ranks that have reported it. Ranks that share one cap each report the whole store; then
    the highest fill level and the lowest cap count.

    Args:
        metrics: receives the gauges.
        views: each rank's tier views, by name.
        is_up: returns whether the session reads a tier; it does not after failures.
        of_one_cap: names of tiers for which every rank reports the fill level of the whole store.
    """

    def __init__(
        self,
        metrics: Metrics,
        views: Iterable[Mapping[str, TierView]],
        is_up: Callable[[str], bool],
        of_one_cap: Container[str] = (),
    ) -> None:
        self._metrics = metrics
        self._views: dict[str, list[TierView]] = {}
        for rank in views:
            for name, view in rank.items():
                self._views.setdefault(name, []).append(view)
        self._is_up = is_up
        self._of_one_cap = of_one_cap
        self._counts: dict[tuple[str, int, str], int] = {}
        """The latest count for each tier, rank and kind of event."""

    def __call__(self) -> None:
        """Refresh the gauges."""
        for name, views in self._views.items():
            is_up = self._is_up(name)
            held: list[int] = []
            capacity: list[int] = []
            for rank, view in enumerate(views):
                view.is_up = is_up
                used_bytes, capacity_bytes, evictions, written, _ = view.figures
                if used_bytes is not None and capacity_bytes is not None and evictions is not None:
                    held.append(used_bytes)
                    capacity.append(capacity_bytes)
                    self._metrics.add(table.EVICTIONS, self._more(name, rank, "evictions", evictions), place=name)
                for what, count in written.items():
                    self._metrics.add(table.WRITE_BYTES, self._more(name, rank, what, count), tier=name, what=what)
            self._metrics.set(table.STUCK_QUEUES, sum(view.stuck_queues() for view in views), tier=name)
            if held:
                is_one = name in self._of_one_cap
                self.set_fill(name, max(held) if is_one else sum(held), min(capacity) if is_one else sum(capacity))

    def set_fill(self, place: str, held_bytes: int, capacity_bytes: int) -> None:
        """Set the fill level of `place`: of host memory or of a tier."""
        self._metrics.set(table.HELD_BYTES, held_bytes, place=place)
        self._metrics.set(table.CAPACITY_BYTES, capacity_bytes, place=place)

    def _more(self, tier: str, rank: int, what: str, count: int) -> int:
        """Return how much a count has grown since the last call. A reopened tier counts from 0."""
        before = self._counts.get((tier, rank, what), 0)
        self._counts[tier, rank, what] = count
        return max(0, count - before)


class Gauges(Observer):
    """Sets the fill level, evictions and written bytes of host memory and each tier.

    Host memory is summed over all ranks, and `layouts` has one layout for each. If a rank's part is a copy, it lies in
    another rank's slots and adds no bytes.
    """

    def __init__(
        self,
        metrics: Metrics,
        cache: Cache,
        layouts: Sequence[KvLayout],
        views: Iterable[Mapping[str, TierView]],
        of_one_cap: Container[str] = (),
    ) -> None:
        self._metrics = metrics
        self._cache = cache
        self._sizes = of_all_ranks(layouts, lambda group: 0 if group.copy else frame_bytes(group))
        self._tiers = TierGauges(metrics, views, cache.is_up, of_one_cap)

    def each_second(self) -> None:
        """Refresh the gauges."""
        host = self._cache.host
        sizes = list(enumerate(self._sizes))
        held = sum(host.used(group) * size for group, size in sizes)
        capacity = sum(host.slots[group] * size for group, size in sizes)
        self._tiers.set_fill(HOST, held, capacity)
        retained = self._cache.hints.retention.counts
        self._metrics.set(table.RETAINED_BYTES, sum(retained[group] * size for group, size in sizes))
        counters = self._cache.counters
        self._count_up(table.EVICTIONS, host.evictions, place=HOST)
        self._count_up(table.RELAYS_DROPPED, counters.relays_dropped)
        for reason, count in counters.refused_hints.items():
            self._count_up(table.REFUSED_HINTS, count, reason=reason)
        for name, count in self._cache.relays_waiting().items():
            self._metrics.set(table.RELAYS_WAITING, count, tier=name)
        self._tiers()

    def _count_up(self, metric: Metric, total: int, **labels: str) -> None:
        """Increase a counter to `total`. Only this object counts it."""
        self._metrics.add(metric, total - self._metrics.get(metric, **labels), **labels)
