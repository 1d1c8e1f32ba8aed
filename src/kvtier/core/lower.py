"""The lower tiers as the core sees them: health, and what is on the way to and from each."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from kvtier.core.health import Health
from kvtier.core.limits import Limits
from kvtier.core.residency import READABLE
from kvtier.core.work import Entry
from kvtier.types import Event, Link, TierNotice

# Names of their own, as in `traffic`.
DEMOTE, PROMOTE = Link.DEMOTE, Link.PROMOTE


class Lower:
    """One lower tier: its breaker, its budgets and its queue of demotions."""

    def __init__(self, name: str, limits: Limits, in_flight_max: int) -> None:
        self.name = name
        self.health = Health(limits.tier_failures, limits.tier_retry_s)
        self.queue: OrderedDict[Entry, None] = OrderedDict()
        """What waits for a demotion, in order; each owes this tier."""
        self.out = {PROMOTE: 0, DEMOTE: 0}
        self.out_bytes = {PROMOTE: 0, DEMOTE: 0}
        self.late = {PROMOTE: 0, DEMOTE: 0}
        """Of those, the ones whose deadline has passed: their threads are stuck and their budget with them."""
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

    def may_ask(self, now_s: float) -> bool:
        """Whether to give it reads now: it is healthy or due for a trial, and not all of its budget is stuck."""
        return self.late[PROMOTE] < self.limit[PROMOTE] and self.health.may_ask(now_s)

    def may_tell(self, now_s: float) -> bool:
        """Whether to give it writes now; as `may_ask`."""
        return self.late[DEMOTE] < self.limit[DEMOTE] and self.health.may_ask(now_s)

    def began(self, link: Link, size_bytes: int) -> None:
        """One transfer, of `size_bytes`, goes out."""
        self.health.asked()
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


class Lowers:
    """All lower tiers, fastest first."""

    def __init__(
        self, names: Sequence[str], limits: Limits, slots_min: int, events: list[Event], down: Collection[str]
    ) -> None:
        # A quarter of the slots for the promotions of all tiers, a quarter for their demotions: though all of them
        # hang, half of host memory goes on.
        in_flight_max = max(1, slots_min // (4 * max(1, len(names))))
        self.by_name = {name: Lower(name, limits, in_flight_max) for name in names}
        self.all = tuple(self.by_name.values())
        for name in down:
            self.by_name[name].health.begin_down()
        self._events = events

    def __iter__(self) -> Iterator[Lower]:
        return iter(self.all)

    def __getitem__(self, name: str) -> Lower:
        return self.by_name[name]

    def __len__(self) -> int:
        return len(self.by_name)

    def judge(self, name: str, now_s: float, *, is_fault: bool) -> None:
        """A tier has answered, or has failed to; says so when that changes its health."""
        health = self.by_name[name].health
        if is_fault:
            if health.failed(now_s):
                detail = f"failed {health.failures} times in a row; left alone for {health.rest_s:g} s"
                self._events.append(TierNotice(name, is_up=False, detail=detail))
        elif health.succeeded():
            self._events.append(TierNotice(name, is_up=True, detail="answers again"))

    def check(self, out: dict[Link, int]) -> None:
        """Assert that budgets hold and that only what is owed waits; `out` are the transfers in flight by link.

        Raises:
            AssertionError: that is not so, which is a mistake in the core.
        """
        for link in (PROMOTE, DEMOTE):
            assert out[link] == sum([lower.out[link] for lower in self]), f"{link.value}s miscounted"
        for lower in self:
            lower.check()
            for entry in lower.queue:
                assert lower.name in entry.owed, "a demotion waits that is not owed"
                assert entry.residency in READABLE, "a demotion waits for what is not whole"
