"""Where an object stands in host memory, as a table.

Two rules for whoever edits this file. A move that is not in `TRANSITIONS` does not exist: it raises, and needs no code
that forbids it. And the table says nothing about pins, budgets or waiters: it only says what a copy *is*.

    ABSENT --gather begins--> GATHERING --done--> READY --evicted--> ABSENT
    ABSENT --promote begins-> PROMOTING --done--> READY --leaves---> LEAVING --written--> ABSENT
    GATHERING, PROMOTING --failed--> ABSENT                LEAVING --wanted again--> READY
    PROMOTING --late--> LOST --settled--> ABSENT

LEAVING is a victim that some tier must still receive (write-back); it can be read like a READY one. LOST is a promotion
whose deadline passed while a thread may still write into the slot: nobody finds the object any more, but the slot is
not free before the thread has answered. That is what makes a hanging tier a miss instead of wrong bytes.
"""

from enum import Enum, auto

from kvtier.types import Presence


class Residency(Enum):
    """What the host copy of one object is."""

    ABSENT = auto()
    GATHERING = auto()
    PROMOTING = auto()
    READY = auto()
    LEAVING = auto()
    LOST = auto()

    __hash__ = object.__hash__  # a member is one object; the hash that Enum brings runs in Python


READY, LEAVING = Residency.READY, Residency.LEAVING
"""For those who ask often: up to Python 3.11, finding a member on its class costs as much as two calls."""


class Change(Enum):
    """What happened to it."""

    GATHER = auto()
    PROMOTE = auto()
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
}

READABLE = (READY, LEAVING)
"""The copy is whole: it may be scattered and demoted."""

COMING = (Residency.GATHERING, Residency.PROMOTING)
"""The copy will be whole soon: a load may wait for it."""

PRESENCE: dict[Residency, Presence] = {
    Residency.ABSENT: Presence.ABSENT,
    Residency.LOST: Presence.ABSENT,
    Residency.GATHERING: Presence.ARRIVING,
    Residency.PROMOTING: Presence.ARRIVING,
    Residency.READY: Presence.READY,
    Residency.LEAVING: Presence.READY,
}
"""What a lookup answers for it."""


def after(state: Residency, change: Change) -> Residency:
    """The state that follows.

    Raises:
        AssertionError: the table has no such move, which is a mistake in the core.
    """
    following = TRANSITIONS.get((state, change))
    if following is None:
        raise AssertionError(f"no transition for {change.name} in {state.name}")
    return following
