"""Records of the core: objects in host memory, and open probes."""

from dataclasses import dataclass, field

from kvtier.core.residency import Residency
from kvtier.types import ChunkKey, Outcome, Prefix, RequestId

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


SEVERITY = {
    Outcome.DONE: 0,
    Outcome.CANCELLED: 1,
    Outcome.ABSENT: 2,
    Outcome.FAILED: 3,
    Outcome.CORRUPT: 4,
}
"""Severity of outcomes: when ranks disagree, the most severe outcome counts."""
