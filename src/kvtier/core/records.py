"""What the core keeps about each object, load, store and request. Plain records; the decisions are in `cache`."""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from kvtier.core.load_budget import LoadBudget
from kvtier.core.residency import Residency
from kvtier.types import ChunkKey, Outcome, Place, Prefix, RequestId, Transfer

HOST = "host"
NOBODY = frozenset[str]()

Item = tuple[ChunkKey, int]
"""(key, group): one object."""


@dataclass(slots=True, eq=False)
class HostEntry:
    """One object with a slot in host memory."""

    key: ChunkKey
    group: int
    slot: int
    parent: ChunkKey | None
    depth: int
    session: str | None
    residency: Residency = Residency.ABSENT
    source: str = HOST
    is_fresh: bool = False
    """Came from the engine, and lower tiers were not yet told to receive it."""
    pins: int = 0
    """Scatters queued or in flight, and demotions in flight."""
    stuck: int = 0
    """Of these, demotions whose deadline has passed."""
    pending: frozenset[str] = NOBODY
    """TierState tiers that the write policy still wants to receive it."""
    queued: frozenset[str] = NOBODY
    """Of these, the tiers whose queue it has entered."""
    uses: int = 1
    """The store or load that brought it counts."""
    waiters: list["Waiter"] = field(default_factory=list["Waiter"])


@dataclass(slots=True, eq=False)
class LoadOperation:
    """One load of one request, until its LoadDone."""

    request: RequestId
    prefix: Prefix
    tokens: int
    resident_tokens: int
    deadline_s: float
    todo: deque[tuple[Place, ChunkKey]]
    """Places whose object has to be promoted."""
    unsettled: int
    """Places neither delivered nor failed."""
    session: str | None
    budget: LoadBudget | None = None
    begun_s: float = 0.0
    is_alone: bool = False
    """No other load was open when it began."""
    has_led: bool = False
    """Something of use has come."""
    lowest_regret_s: float = 0.0
    run: int = 0
    """Leading chunks that are resident or delivered, in every group."""
    cut_s: float = inf
    """When the load ceases to pay, unless more comes until then."""
    was_cut: bool = False
    tried: dict[Item, set[str]] = field(default_factory=dict[Item, set[str]])
    """Tiers that have already failed to give an object to this load."""
    delivered: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """(group, chunk) -> where its bytes came from."""
    failed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    attached: list["HostEntry"] = field(default_factory=list["HostEntry"])
    """Entries it has waited on, to be found again when it is stopped."""
    cut: int = 1 << 62
    """The first chunk of a history that failed; what lies behind it is of no use."""
    is_over: bool = False
    """Released or past its deadline: what has not begun will not."""

    @property
    def end_s(self) -> float:
        """When it is over, unless more comes until then."""
        return min(self.deadline_s, self.cut_s)

    def begin(self, now_s: float, budget: LoadBudget | None, *, is_alone: bool) -> None:
        """The time and the budget count from now on."""
        self.begun_s, self.budget, self.is_alone = now_s, budget, is_alone
        self.run = self.resident_tokens // self.prefix.chunk_tokens
        if budget is not None:
            self.cut_s = now_s + budget.cut_s(0.0, 0.0)

    def advanced(self, groups: int, now_s: float) -> None:
        """Something was delivered to a load whose every chunk is of use when those before it are there."""
        before = self.run
        while self._has(self.run, groups):
            self.run += 1
        self.has_led |= self.run > before
        # What comes after the cut has come too late, though nobody may have looked at the clock since.
        if self.budget is not None and self.run > before and now_s < self.cut_s:
            saved_s = self.budget.saved_s(self.resident_tokens, self.run * self.prefix.chunk_tokens)
            regret_s = self.budget.regret_s(now_s - self.begun_s, saved_s)
            self.lowest_regret_s = min(self.lowest_regret_s, regret_s)
            self.cut_s = self.begun_s + self.budget.cut_s(self.lowest_regret_s, saved_s)

    def _has(self, chunk: int, groups: int) -> bool:
        for group in range(groups):  # noqa: SIM110  `all` would make a generator for every object that comes
            if (group, chunk) not in self.delivered:
                return False
        return True

    def lose(self, place: Place) -> None:
        """`place` will not be delivered."""
        self.failed.append((place.group, place.chunk))
        self.unsettled -= 1


@dataclass(slots=True, eq=False)
class StoreOperation:
    """One store of one request, until its StoreDone."""

    request: RequestId
    prefix: Prefix
    session: str | None
    deadline_s: float
    todo: deque[tuple[Place, ChunkKey]]
    """Places that wait for a slot."""
    unsettled: int
    held: int = 0
    dropped: int = 0
    attached: list["HostEntry"] = field(default_factory=list["HostEntry"])
    """Entries it has waited on, to be found again when it gives up."""
    is_over: bool = False
    """Released or out of budget: what has not begun will not."""


Waiter = tuple[LoadOperation | StoreOperation, Place, ChunkKey]
"""Work that an object is awaited by, where it belongs, and the object's key."""


@dataclass(slots=True, eq=False)
class OpenProbe:
    """One probe that is out."""

    tier: str
    request: RequestId
    objects: tuple[Item, ...]
    ranks_left: int
    present: list[bool]
    is_failed: bool = False


@dataclass(slots=True, eq=False)
class ProbeAnswers:
    """What lower tiers have tiers about one request's objects; lives as long as the request."""

    prefix: Prefix | None = None
    """The prefix of the last lookup: the same one again asks nothing new, unless something has left host memory."""
    departures: int = 0
    """How many objects had left host memory by then."""
    probed: set[Item] = field(default_factory=set[Item])
    held_by: dict[Item, list[str]] = field(default_factory=dict[Item, list[str]])
    open_probes: set[int] = field(default_factory=set[int])


@dataclass(slots=True, eq=False)
class InFlightTransfer:
    """One transfer that is out."""

    transfer: Transfer
    entry: HostEntry
    ranks_left: int
    load: LoadOperation | None = None
    store: StoreOperation | None = None
    place: Place | None = None
    outcome: Outcome = Outcome.DONE
    is_fault: bool = False
    is_late: bool = False
    is_cancelled: bool = False
    """A Cancel was given out; it may come too late."""


SEVERITY = {
    Outcome.DONE: 0,
    Outcome.CANCELLED: 1,
    Outcome.ABSENT: 2,
    Outcome.FAILED: 3,
    Outcome.CORRUPT: 4,
}
"""When ranks disagree, the worst answer counts for all."""
