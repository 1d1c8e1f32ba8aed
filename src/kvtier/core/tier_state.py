"""The lower tiers as the core sees them: health, and what is on the way to and from each."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from kvtier.core.circuit_breaker import CircuitBreaker
from kvtier.core.limits import Limits
from kvtier.core.records import HostEntry, Item
from kvtier.core.residency import READABLE
from kvtier.types import Event, Link, TierNotice, Way

# Names of their own, as in `traffic`.
DEMOTE, PROMOTE = Link.DEMOTE, Link.PROMOTE
WAYS: dict[Link, Way] = {PROMOTE: "read", DEMOTE: "write"}

DOUBTED_MAX = 1 << 16
"""Objects of a tier that are doubted at once; of more, the oldest are trusted again."""


class TierState:
    """One lower tier: its breakers, its budgets and its queue of demotions."""

    def __init__(self, name: str, limits: Limits, in_flight_max: int) -> None:
        self.name = name
        self.breakers = {link: CircuitBreaker(limits.tier_failures, limits.tier_retry_s) for link in WAYS}
        """PROMOTE: of reads, which are promotions and probes. DEMOTE: of writes. A full disk still reads."""
        self.queue: OrderedDict[HostEntry, None] = OrderedDict()
        """What waits for a demotion, in order; each owes this tier."""
        self.out = {PROMOTE: 0, DEMOTE: 0}
        self.out_bytes = {PROMOTE: 0, DEMOTE: 0}
        self.late = {PROMOTE: 0, DEMOTE: 0}
        """Of those, the ones whose deadline has passed: their threads are stuck and their budget with them."""
        self._doubted: dict[Item, None] = {}
        self.limit = {
            PROMOTE: min(limits.promotes, in_flight_max),
            DEMOTE: min(limits.demotes, in_flight_max),
        }
        """Of whatever size; small objects may be more."""
        self._most = in_flight_max
        self._small_bytes = limits.small_bytes

    def has_room(self, link: Link, size_bytes: int) -> bool:
        """Whether one more transfer, of `size_bytes`, may go out."""
        out = self.out[link]
        return out < self.limit[link] or (out < self._most and self.out_bytes[link] + size_bytes <= self._small_bytes)

    def most(self, link: Link, size_bytes: int) -> int:
        """How many transfers of `size_bytes` each may be out at once."""
        return max(self.limit[link], min(self._most, self._small_bytes // size_bytes))

    def can_read(self, now_s: float) -> bool:
        """Whether to give it reads now: they are healthy or due for a trial, and not all of their budget is stuck."""
        return self.late[PROMOTE] < self.limit[PROMOTE] and self.breakers[PROMOTE].allows(now_s)

    def can_write(self, now_s: float) -> bool:
        """Whether to give it writes now: the same of writes."""
        return self.late[DEMOTE] < self.limit[DEMOTE] and self.breakers[DEMOTE].allows(now_s)

    def doubt(self, items: Iterable[Item]) -> None:
        """What the tier holds of `items` may be bad: reading failed, or it lies behind a bad copy and was not read."""
        self._doubted.update(dict.fromkeys(items))
        while len(self._doubted) > DOUBTED_MAX:
            del self._doubted[next(iter(self._doubted))]

    def end_doubt(self, item: Item) -> bool:
        """The copy of `item` was read, or is to be replaced; returns whether it was doubted."""
        return bool(self._doubted) and self._doubted.pop(item, item) is None

    def began(self, link: Link, size_bytes: int) -> None:
        """One transfer, of `size_bytes`, goes out."""
        self.breakers[link].attempted()
        self.out[link] += 1
        self.out_bytes[link] += size_bytes

    def ended(self, link: Link, size_bytes: int, *, is_late: bool) -> None:
        """It has been answered."""
        self.out[link] -= 1
        self.out_bytes[link] -= size_bytes
        self.late[link] -= is_late

    def check(self) -> None:
        """Assert that budgets hold.

        Raises:
            AssertionError: they do not, which is a mistake in the core.
        """
        for link, limit in self.limit.items():
            out, out_bytes = self.out[link], self.out_bytes[link]
            assert self.late[link] <= out, f"more {link.value}s are late than are out"
            assert out <= limit or out_bytes <= self._small_bytes, f"{link.value}s over budget"
            assert out <= self._most, f"{link.value}s take more than their share of host memory"
            assert bool(out) == bool(out_bytes), f"bytes of {link.value}s miscounted"


class TierStates:
    """All lower tiers, fastest first."""

    def __init__(
        self, names: Sequence[str], limits: Limits, slots_min: int, events: list[Event], down: Collection[str]
    ) -> None:
        # A quarter of the slots for the promotions of all tiers, a quarter for their demotions: though all of them
        # hang, half of host memory goes on.
        in_flight_max = max(1, slots_min // (4 * max(1, len(names))))
        self.by_name = {name: TierState(name, limits, in_flight_max) for name in names}
        self.all = tuple(self.by_name.values())
        for name in down:
            for breaker in self.by_name[name].breakers.values():
                breaker.open_now()
        self._events = events

    def __iter__(self) -> Iterator[TierState]:
        return iter(self.all)

    def __getitem__(self, name: str) -> TierState:
        return self.by_name[name]

    def __len__(self) -> int:
        return len(self.by_name)

    def judge(self, name: str, link: Link, now_s: float, *, is_fault: bool) -> None:
        """A read (`link` PROMOTE) or a write (DEMOTE) of a tier has ended; a change of health is a notice."""
        tier_state, way = self.by_name[name], WAYS[link]
        breaker = tier_state.breakers[link]
        if is_fault:
            if breaker.failed(now_s):
                detail = (
                    f"{way}s failed {breaker.failures} times in a row; the next try is in {breaker.retry_delay_s:g} s"
                )
                self._events.append(TierNotice(name, way, is_up=False, detail=detail))
        elif breaker.succeeded():
            self._events.append(TierNotice(name, way, is_up=True, detail=f"{way}s succeed again"))
            for other in tier_state.breakers.values():
                other.retry_now(now_s)  # what made both fail may be over

    def check(self, out: dict[Link, int]) -> None:
        """Assert that budgets hold and that only what is owed waits; `out` are the transfers in flight by link.

        Raises:
            AssertionError: that is not so, which is a mistake in the core.
        """
        for link in (PROMOTE, DEMOTE):
            assert out[link] == sum([tier_state.out[link] for tier_state in self]), f"{link.value}s miscounted"
        for tier_state in self:
            tier_state.check()
            for entry in tier_state.queue:
                assert tier_state.name in entry.pending, "a demotion waits that is not owed"
                assert entry.residency in READABLE, "a demotion waits for what is not whole"
