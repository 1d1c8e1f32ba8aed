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
from kvtier.types import Drop, Outcome, Probe, Transfer


class Counting:
    """The session's observer. Belongs to the session's owner thread.

    Args:
        metrics: where to count.
        other: told of everything, too.
    """

    def __init__(self, metrics: Metrics, other: Observer | None = None) -> None:
        self._metrics = metrics
        self._other = other
        self._in_flight: dict[str, int] = {}

    def submitted(self, command: Work) -> None:
        """See `Observer`."""
        if isinstance(command, Transfer):
            self._fly(command.link.value, 1)
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
            self._transfer(command, settled)
        elif isinstance(command, Probe):
            result = "answered" if settled.outcome is Outcome.DONE else "failed"
            self._metrics.add(table.PROBES, tier=command.tier, result=result)
            self._metrics.observe(table.PROBE_SECONDS, settled.seconds + settled.waited_s, tier=command.tier)
        elif isinstance(command, Drop) and settled.outcome is Outcome.DONE:
            self._metrics.add(table.DROPS, place=command.tier, reason="corrupt")

    def _transfer(self, transfer: Transfer, settled: Settled) -> None:
        link = transfer.link.value
        self._fly(link, -1)
        self._metrics.add(table.TRANSFERS, link=link, outcome=settled.outcome.value)
        if settled.outcome is Outcome.DONE:
            self._metrics.add(table.TRANSFER_BYTES, settled.size_bytes, link=link)
            self._metrics.observe(table.TRANSFER_SECONDS, settled.seconds, link=link)
            self._metrics.observe(table.TRANSFER_WAIT_SECONDS, settled.waited_s, link=link)

    def _fly(self, link: str, step: int) -> None:
        self._in_flight[link] = self._in_flight.get(link, 0) + step
        self._metrics.set(table.TRANSFERS_IN_FLIGHT, self._in_flight[link], link=link)


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
