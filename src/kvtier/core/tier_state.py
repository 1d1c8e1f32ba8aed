"""State of the lower tiers in the core: circuit breakers, and transfers in flight and queued."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from kvtier.core.circuit_breaker import CircuitBreaker
from kvtier.core.limits import TierRules
from kvtier.core.records import HostEntry, Item
from kvtier.core.residency import READABLE
from kvtier.types import Event, Link, TierNotice, Way

# Constants for hot paths, as in `transfer_scheduler`.
DEMOTE, PROMOTE = Link.DEMOTE, Link.PROMOTE
WAYS: dict[Link, Way] = {PROMOTE: "read", DEMOTE: "write"}

SUSPECT_MAX = 1 << 16
"""Suspect objects per tier; of more, the oldest are trusted again."""


class TierState:
    """One lower tier: its circuit breakers, its limits and its queue of demotions."""

    def __init__(self, rules: TierRules, in_flight_max: int) -> None:
        self.name = rules.name
        self.rules = rules
        self.breakers = {link: CircuitBreaker(rules.failures, rules.retry_s) for link in WAYS}
        """PROMOTE: for promotions and probes. DEMOTE: for demotions. A tier on a full disk can still be read."""
        self.queue: OrderedDict[HostEntry, None] = OrderedDict()
        """Demotions that wait, in order; each entry has a pending write to this tier."""
        self.out = {PROMOTE: 0, DEMOTE: 0}
        self.out_bytes = {PROMOTE: 0, DEMOTE: 0}
        self.late = {PROMOTE: 0, DEMOTE: 0}
        """Overdue transfers in flight: their threads are stuck, and count against the limit."""
        self._suspect: dict[Item, None] = {}
        self.limit = {
            PROMOTE: min(rules.promotes, in_flight_max),
            DEMOTE: min(rules.demotes, in_flight_max),
        }
        """Limit for objects of any size; small objects may exceed it."""
        self._share = in_flight_max
        self._small_bytes = rules.small_bytes

    def has_room(self, link: Link, size_bytes: int) -> bool:
        """Whether one more transfer of `size_bytes` may start."""
        out = self.out[link]
        return out < self.limit[link] or (out < self._share and self.out_bytes[link] + size_bytes <= self._small_bytes)

    def limit_for(self, link: Link, size_bytes: int) -> int:
        """How many transfers of `size_bytes` each may be in flight."""
        return max(self.limit[link], min(self._share, self._small_bytes // size_bytes))

    def can_read(self, now_s: float) -> bool:
        """Whether to start a read: the breaker allows it, and not all reads in flight are stuck."""
        return self.late[PROMOTE] < self.limit[PROMOTE] and self.breakers[PROMOTE].allows(now_s)

    def can_write(self, now_s: float) -> bool:
        """Whether to start a write, by the same rule."""
        return self.late[DEMOTE] < self.limit[DEMOTE] and self.breakers[DEMOTE].allows(now_s)

    def mark_suspect(self, items: Iterable[Item]) -> None:
        """The tier's copies of `items` may be bad: a read failed, or an earlier chunk of the prefix was corrupt."""
        self._suspect.update(dict.fromkeys(items))
        while len(self._suspect) > SUSPECT_MAX:
            del self._suspect[next(iter(self._suspect))]

    def clear_suspect(self, item: Item) -> bool:
        """The copy of `item` was read or will be replaced; returns whether it was suspect."""
        return bool(self._suspect) and self._suspect.pop(item, item) is None

    def began(self, link: Link, size_bytes: int) -> None:
        """A transfer of `size_bytes` starts."""
        self.breakers[link].attempted()
        self.out[link] += 1
        self.out_bytes[link] += size_bytes

    def ended(self, link: Link, size_bytes: int, *, is_late: bool) -> None:
        """A transfer of `size_bytes` has ended."""
        self.out[link] -= 1
        self.out_bytes[link] -= size_bytes
        self.late[link] -= is_late

    def check(self) -> None:
        """Assert that the limits hold.

        Raises:
            AssertionError: they do not, which is a bug in the core.
        """
        for link, limit in self.limit.items():
            out, out_bytes = self.out[link], self.out_bytes[link]
            assert self.late[link] <= out, f"more {link.value}s are late than in flight"
            assert out <= limit or out_bytes <= self._small_bytes, f"more {link.value}s in flight than allowed"
            assert out <= self._share, f"{link.value}s use more than their share of host memory"
            assert bool(out) == bool(out_bytes), f"bytes of {link.value}s miscounted"


class TierStates:
    """All lower tiers, fastest first."""

    def __init__(self, tiers: Sequence[TierRules], slots_min: int, events: list[Event], down: Collection[str]) -> None:
        # A quarter of the slots for promotions of all tiers, a quarter for demotions: when all tiers hang, half of host
        # memory is still usable.
        in_flight_max = max(1, slots_min // (4 * max(1, len(tiers))))
        self.by_name = {rules.name: TierState(rules, in_flight_max) for rules in tiers}
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

    def record(self, name: str, link: Link, now_s: float, *, is_fault: bool) -> None:
        """Record the end of a read (`link` PROMOTE) or write (DEMOTE); a change of the breaker gives a notice."""
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
                other.retry_now(now_s)  # the other way may have had the same cause

    def check(self, out: dict[Link, int]) -> None:
        """Assert that the limits hold and that queued demotions are pending; `out` counts transfers in flight by link.

        Raises:
            AssertionError: they do not, which is a bug in the core.
        """
        for link in (PROMOTE, DEMOTE):
            assert out[link] == sum([tier_state.out[link] for tier_state in self]), f"{link.value}s miscounted"
        for tier_state in self:
            tier_state.check()
            for entry in tier_state.queue:
                assert tier_state.name in entry.pending, "a queued demotion is not pending"
                assert entry.residency in READABLE, "a queued demotion is of an object that is not readable"
