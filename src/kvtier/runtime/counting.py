"""What happens below a session, as rows of the metrics table."""

from collections.abc import Callable, Mapping

from kvtier.codec.frame import frame_bytes
from kvtier.core.cache import Cache
from kvtier.core.work import HOST
from kvtier.layout import KvLayout
from kvtier.observe import table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.jobs import Observer, Settled, Work
from kvtier.tier.base import Tier
from kvtier.types import Drop, Link, Outcome, Probe, Transfer


class Counting:
    """The session's observer. Belongs to the session's owner thread.

    Args:
        metrics: where to count.
        other: told of everything, too.
    """

    def __init__(self, metrics: Metrics, other: Observer | None = None) -> None:
        self._metrics = metrics
        self._other = other
        self._links = {link: _Link(metrics, link) for link in Link}

    def submitted(self, command: Work) -> None:
        """See `Observer`."""
        if isinstance(command, Transfer):
            self._links[command.link].began()
        if self._other is not None:
            self._other.submitted(command)

    def settled(self, settled: Settled) -> None:
        """See `Observer`."""
        if self._other is not None:
            self._other.settled(settled)
        command = settled.command
        if settled.is_tier_fault:
            self._metrics.add(table.TIER_FAILURES, tier=command.tier)
        if isinstance(command, Transfer):
            self._links[command.link].ended(settled)
        elif isinstance(command, Probe):
            result = "answered" if settled.outcome is Outcome.DONE else "failed"
            self._metrics.add(table.PROBES, tier=command.tier, result=result)
            self._metrics.observe(table.PROBE_SECONDS, settled.seconds + settled.waited_s, tier=command.tier)
        elif isinstance(command, Drop) and settled.outcome is Outcome.DONE:
            self._metrics.add(table.DROPS, place=command.tier, reason="corrupt")


class _Link:
    """The series of one link."""

    def __init__(self, metrics: Metrics, link: Link) -> None:
        self._outcomes = {each: metrics.bind(table.TRANSFERS, link=link.value, outcome=each.value) for each in Outcome}
        self._bytes = metrics.bind(table.TRANSFER_BYTES, link=link.value)
        self._seconds = metrics.bind(table.TRANSFER_SECONDS, link=link.value)
        self._wait_seconds = metrics.bind(table.TRANSFER_WAIT_SECONDS, link=link.value)
        self._gauge = metrics.bind(table.TRANSFERS_IN_FLIGHT, link=link.value)
        self._in_flight = 0

    def began(self) -> None:
        self._in_flight += 1
        self._gauge.set(self._in_flight)

    def ended(self, settled: Settled) -> None:
        self._in_flight -= 1
        self._gauge.set(self._in_flight)
        self._outcomes[settled.outcome].add()
        if settled.outcome is Outcome.DONE:
            self._bytes.add(settled.size_bytes)
            self._seconds.observe(settled.seconds)
            self._wait_seconds.observe(settled.waited_s)


class Gauges:
    """How full each place is, and what it wrote.

    Tiers that tell (`used_bytes`, `capacity_bytes`, `evictions`; `write_bytes`) are asked, and those that want to know
    (`note_use`) are told whether the session uses them.
    """

    def __init__(self, metrics: Metrics, cache: Cache, layout: KvLayout, tiers: Mapping[str, Tier]) -> None:
        self._metrics = metrics
        self._cache = cache
        self._sizes = [frame_bytes(group) for group in layout.groups]
        self._tiers = dict(tiers)
        self._evictions: dict[str, int] = {}
        self._written: dict[tuple[str, str], int] = {}

    def __call__(self) -> None:
        """Refresh them."""
        host = self._cache.host
        sizes = list(enumerate(self._sizes))
        held = sum(host.used(group) * size for group, size in sizes)
        capacity = sum(host.slots[group] * size for group, size in sizes)
        self._tell(HOST, held, capacity, host.evictions)
        for name, tier in self._tiers.items():
            told = [getattr(tier, what, None) for what in ("used_bytes", "capacity_bytes", "evictions")]
            if all(isinstance(value, int) for value in told):
                self._tell(name, *(value for value in told if value is not None))
            note_use: Callable[..., None] | None = getattr(tier, "note_use", None)
            if note_use is not None:
                note_use(is_up=self._cache.is_up(name))
            written: dict[str, int] = getattr(tier, "write_bytes", {})
            for what, count in written.items():
                self._metrics.add(table.WRITE_BYTES, count - self._written.get((name, what), 0), tier=name, what=what)
                self._written[name, what] = count

    def _tell(self, place: str, held_bytes: int, capacity_bytes: int, evictions: int) -> None:
        self._metrics.set(table.HELD_BYTES, held_bytes, place=place)
        self._metrics.set(table.CAPACITY_BYTES, capacity_bytes, place=place)
        self._metrics.add(table.EVICTIONS, evictions - self._evictions.get(place, 0), place=place)
        self._evictions[place] = evictions
