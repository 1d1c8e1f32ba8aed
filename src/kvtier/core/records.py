"""Records of the core: objects in host memory, open loads, stores, probes and transfers."""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from kvtier.core.load_budget import LoadBudget
from kvtier.core.residency import Residency
from kvtier.types import ChunkKey, Outcome, Place, Prefix, RequestId, Transfer

HOST = "host"
NO_TIERS = frozenset[str]()

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
    origin: str = HOST
    """Place that the object came from: a tier, or `HOST` for the engine."""
    decided: frozenset[str] = NO_TIERS
    """Lower tiers for which it is decided whether the object is written to them, such as those that have it."""
    is_staged: bool = False
    """It is in the staging area, on its way from one lower tier to another."""
    pins: int = 0
    """Queued or running scatters, and running demotions."""
    stuck: int = 0
    """Overdue demotions among the pins."""
    pending: frozenset[str] = NO_TIERS
    """Lower tiers with a pending write of the object."""
    queued: frozenset[str] = NO_TIERS
    """Tiers among `pending` whose queue contains the object."""
    uses: int = 1
    """Number of uses, including the operation that brought the object."""
    waiters: list["Waiter"] = field(default_factory=list["Waiter"])


@dataclass(slots=True, eq=False)
class LoadOperation:
    """One load, until its LoadDone."""

    request: RequestId
    prefix: Prefix
    tokens: int
    resident_tokens: int
    deadline_s: float
    todo: deque[tuple[Place, ChunkKey]]
    """Places whose object must be promoted."""
    unsettled: int
    """Places without a result."""
    session: str | None
    budget: LoadBudget | None = None
    begun_s: float = 0.0
    is_alone: bool = False
    """No other load was open at its start."""
    has_led: bool = False
    """A usable chunk has arrived."""
    lowest_regret_s: float = 0.0
    run: int = 0
    """Leading chunks that are resident or delivered, in every group."""
    cut_s: float = inf
    """Time at which the load is cut, unless more chunks arrive."""
    was_cut: bool = False
    tried: dict[Item, set[str]] = field(default_factory=dict[Item, set[str]])
    """Tiers that failed to deliver an object to this load."""
    delivered: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """(group, chunk) -> the place its bytes came from."""
    failed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    attached: list["HostEntry"] = field(default_factory=list["HostEntry"])
    """Entries whose waiters include this load."""
    cut: int = 1 << 62
    """The first missing chunk of a history; later chunks are useless."""
    is_over: bool = False
    """Released or overdue: queued work is dropped."""

    @property
    def end_s(self) -> float:
        """Time at which the load is stopped, unless more chunks arrive."""
        return min(self.deadline_s, self.cut_s)

    def begin(self, now_s: float, budget: LoadBudget | None, *, is_alone: bool) -> None:
        """Start the clock and the budget."""
        self.begun_s, self.budget, self.is_alone = now_s, budget, is_alone
        self.run = self.resident_tokens // self.prefix.chunk_tokens
        if budget is not None:
            self.cut_s = now_s + budget.cut_s(0.0, 0.0)

    def advanced(self, groups: int, now_s: float) -> None:
        """A chunk was delivered to a load of history groups only."""
        before = self.run
        while self._has(self.run, groups):
            self.run += 1
        self.has_led |= self.run > before
        # A chunk after the cut is too late, even if no call has checked the deadline.
        if self.budget is not None and self.run > before and now_s < self.cut_s:
            saved_s = self.budget.saved_s(self.resident_tokens, self.run * self.prefix.chunk_tokens)
            regret_s = self.budget.regret_s(now_s - self.begun_s, saved_s)
            self.lowest_regret_s = min(self.lowest_regret_s, regret_s)
            self.cut_s = self.begun_s + self.budget.cut_s(self.lowest_regret_s, saved_s)

    def _has(self, chunk: int, groups: int) -> bool:
        for group in range(groups):  # noqa: SIM110  `all` would create a generator for each object
            if (group, chunk) not in self.delivered:
                return False
        return True

    def lose(self, place: Place) -> None:
        """`place` will not be delivered."""
        self.failed.append((place.group, place.chunk))
        self.unsettled -= 1


@dataclass(slots=True, eq=False)
class StoreOperation:
    """One store, until its StoreDone."""

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
    """Entries whose waiters include this store."""
    is_over: bool = False
    """Released or overdue: queued work is dropped."""


Waiter = tuple[LoadOperation | StoreOperation, Place, ChunkKey]
"""An operation that waits for an object, the object's place in it, and its key."""


@dataclass(slots=True, eq=False)
class Search:
    """One search of the tiers for objects of a request. At most one of its probes is open."""

    request: RequestId
    answers: "ProbeAnswers"
    prefix: Prefix
    missing: list[Item]
    """Objects that no place has reported yet."""
    tier: int = 0
    """Position of the tier that is asked."""
    round: int = 0
    """Round of a remote tier, see `probes`; 0 for a tier that is asked for everything at once."""
    chunks: list[int] = field(default_factory=list[int])
    """Chunks of history that were missing when the tier was asked first."""
    low: int = -1
    """Position in `chunks` of the last one that is present."""
    high: int = 0
    """Position in `chunks` of the first one that is absent."""
    sampled: list[int] = field(default_factory=list[int])
    """Positions in `chunks` that the present round asks for."""
    boundaries: list[tuple[list[Item], list[Item]]] = field(default_factory=list[tuple[list[Item], list[Item]]])
    """For each boundary: the objects of windows and states that it lacks, and those asked for."""
    is_wanted: bool = True
    """The request is not released."""


@dataclass(slots=True, eq=False)
class OpenProbe:
    """One open probe."""

    tier: str
    search: Search | None
    """None for a health check."""
    objects: tuple[Item, ...]
    ranks_left: int
    present: list[bool]
    deadline_s: float
    is_failed: bool = False


@dataclass(slots=True, eq=False)
class ProbeAnswers:
    """What lower tiers reported for one request; kept until its release."""

    compute_s: float | None
    """Expected time to compute the prompt."""
    waits_until_s: float | None = None
    """The request waits for remote tiers until this time; later answers are remembered for other requests. None: no
    remote tier has been asked."""
    prefix: Prefix | None = None
    """Prefix of the last lookup. The same prefix sends no new probes unless objects left host memory since."""
    removals: int = 0
    """`HostMemory.removals` at that lookup."""
    probed: set[Item] = field(default_factory=set[Item])
    held_by: dict[Item, str] = field(default_factory=dict[Item, str])
    """The fastest tier that reported each object."""
    searches: set[Search] = field(default_factory=set[Search])
    """Searches without a result for every object."""


@dataclass(slots=True, eq=False)
class InFlightTransfer:
    """One transfer in flight."""

    transfer: Transfer
    entry: HostEntry
    ranks_left: int
    load: LoadOperation | None = None
    store: StoreOperation | None = None
    place: Place | None = None
    relay_to: str = ""
    """Tier to which a relayed object is on its way."""
    outcome: Outcome = Outcome.DONE
    is_fault: bool = False
    is_late: bool = False
    is_cancelled: bool = False
    """A Cancel was sent; it may come too late."""


SEVERITY = {
    Outcome.DONE: 0,
    Outcome.CANCELLED: 1,
    Outcome.ABSENT: 2,
    Outcome.FAILED: 3,
    Outcome.CORRUPT: 4,
}
"""Severity of outcomes: when ranks disagree, the most severe outcome counts."""
