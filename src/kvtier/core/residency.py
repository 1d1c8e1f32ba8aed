"""The life cycle of an object's copy in host memory, as a state machine.

A transition that is not in `TRANSITIONS` raises, so no other code has to forbid it. The table contains no pins, limits
or waiters.

    ABSENT --gather begins--> GATHERING --done--> READY --evicted--> ABSENT
    ABSENT --promote begins-> PROMOTING --done--> READY --leaves---> LEAVING --written--> ABSENT
    GATHERING, PROMOTING --failed--> ABSENT                LEAVING --wanted again--> READY
    PROMOTING --late--> LOST --settled--> ABSENT
    ABSENT --relay begins-> RELAYING --done--> STAGED --written--> ABSENT      RELAYING --late--> LOST

LEAVING is a victim with pending writes (write-back); it can be read like a READY object. LOST is an overdue promotion
whose thread may still write to the slot. The object cannot be found, and the slot is not free until the thread ends. So
a tier that hangs causes a miss and never wrong bytes. RELAYING and STAGED objects are in the staging area, on their way
from one lower tier to another, and cannot be found.
"""

from enum import Enum, auto

from kvtier.types import Presence


class Residency(Enum):
    """State of the copy."""

    ABSENT = auto()
    GATHERING = auto()
    PROMOTING = auto()
    READY = auto()
    LEAVING = auto()
    LOST = auto()
    RELAYING = auto()
    STAGED = auto()

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash runs in Python


READY, LEAVING = Residency.READY, Residency.LEAVING
"""Constants for hot paths: up to Python 3.11, a member lookup on the class costs as much as two calls."""


class Change(Enum):
    """A transition."""

    GATHER = auto()
    PROMOTE = auto()
    RELAY = auto()
    ARRIVED = auto()
    FAILED = auto()
    LATE = auto()
    SETTLED = auto()
    LEAVE = auto()
    WANTED = auto()
    EVICTED = auto()

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[Residency, Change], Residency] = {
    (Residency.ABSENT, Change.GATHER): Residency.GATHERING,
    (Residency.ABSENT, Change.PROMOTE): Residency.PROMOTING,
    (Residency.GATHERING, Change.ARRIVED): Residency.READY,
    (Residency.GATHERING, Change.FAILED): Residency.ABSENT,
    (Residency.PROMOTING, Change.ARRIVED): Residency.READY,
    (Residency.PROMOTING, Change.FAILED): Residency.ABSENT,
    (Residency.PROMOTING, Change.LATE): Residency.LOST,
    (Residency.LOST, Change.SETTLED): Residency.ABSENT,
    (Residency.READY, Change.LEAVE): Residency.LEAVING,
    (Residency.READY, Change.EVICTED): Residency.ABSENT,
    (Residency.LEAVING, Change.WANTED): Residency.READY,
    (Residency.LEAVING, Change.EVICTED): Residency.ABSENT,
    (Residency.ABSENT, Change.RELAY): Residency.RELAYING,
    (Residency.RELAYING, Change.ARRIVED): Residency.STAGED,
    (Residency.RELAYING, Change.FAILED): Residency.ABSENT,
    (Residency.RELAYING, Change.LATE): Residency.LOST,
    (Residency.STAGED, Change.EVICTED): Residency.ABSENT,
}

READABLE = (READY, LEAVING)
"""The copy is complete and can be scattered and demoted."""

COMING = (Residency.GATHERING, Residency.PROMOTING)
"""A transfer into the slot is in flight; loads may wait for it."""

PRESENCE: dict[Residency, Presence] = {
    Residency.ABSENT: Presence.ABSENT,
    Residency.LOST: Presence.ABSENT,
    Residency.RELAYING: Presence.ABSENT,
    Residency.STAGED: Presence.ABSENT,
    Residency.GATHERING: Presence.ARRIVING,
    Residency.PROMOTING: Presence.ARRIVING,
    Residency.READY: Presence.READY,
    Residency.LEAVING: Presence.READY,
}
"""What a lookup returns for each state."""


def after(state: Residency, change: Change) -> Residency:
    """The next state.

    Raises:
        AssertionError: the table has no such transition, which is a bug in the core.
    """
    following = TRANSITIONS.get((state, change))
    if following is None:
        raise AssertionError(f"no transition for {change.name} in {state.name}")
    return following
