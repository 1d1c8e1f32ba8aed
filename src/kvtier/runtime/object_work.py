"""What an object store has in progress: calls, and their objects on the way."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.tier_state import TierState
from kvtier.types import ObjectId, Origin, Outcome, Probe, Transfer


@dataclass(slots=True, eq=False)
class ObjectCall:
    """One call of the store, in progress."""

    wake: Callable[[], None]
    """Wakes the calling thread."""
    outcomes: list[Outcome]
    left: int
    """Objects without an outcome."""
    arrived: "list[ObjectRead]" = field(default_factory=list["ObjectRead"])
    """Reads whose bytes wait in their slots for the calling thread."""
    reads: "set[ObjectRead]" = field(default_factory=set["ObjectRead"])
    """Reads in flight."""
    is_over: bool = False

    def end(self, number: int, outcome: Outcome) -> None:
        """Object `number` has this outcome."""
        self.outcomes[number] = outcome
        self.left -= 1
        if not self.left:
            self.wake()


@dataclass(slots=True, eq=False)
class ObjectRead:
    """One object of a `get_into`."""

    call: ObjectCall
    number: int
    object: ObjectId
    origin: Origin
    tier: int = 0
    """Position of the tier that is tried, or comes next."""
    outcome: Outcome = Outcome.CANCELLED
    """The most severe outcome so far."""
    flight: "Flight | None" = None
    slot: int = -1


@dataclass(slots=True, eq=False)
class ObjectWrite:
    """One object in a slot, on its way to tiers."""

    object: ObjectId
    origin: Origin
    slot: int
    tiers: deque[TierState]
    """Tiers that come after the present one."""
    waiting: list[tuple[ObjectCall, int]] = field(default_factory=list[tuple[ObjectCall, int]])
    """Calls that wait for its outcome, with the object's position in them."""
    queue: "dict[ObjectWrite, None] | None" = None
    """The tier's queue that it waits in."""
    flights: int = 0
    is_held: bool = False
    """A tier has it."""
    source: TierState | None = None
    """A tier that persists and has it."""
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class Question:
    """One probe that a call waits for."""

    wake: Callable[[], None]
    present: Sequence[bool] | None = None
    """None: no answer, or the tier has failed."""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """One command without its completion."""

    command: Transfer | Probe
    tier: TierState
    work: ObjectRead | ObjectWrite | Question | None
    """None: a health check."""
    is_late: bool = False
