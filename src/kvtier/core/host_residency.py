"""Host memory: which object is in which slot, which can be evicted, and the life of a copy as a state machine.

No other module changes slots or states. A transition that is not in `TRANSITIONS` raises AssertionError, so no other
code has to forbid it. The table contains no pins, limits or waiting items.

    ABSENT --gather begins--> GATHERING --done--> READY --evicted--> ABSENT
    ABSENT --promote begins-> PROMOTING --done--> READY --leaves---> LEAVING --written--> ABSENT
    GATHERING, PROMOTING --failed--> ABSENT                LEAVING --wanted again--> READY
    PROMOTING --late--> LOST --reclaimed--> ABSENT
    ABSENT --relay begins-> RELAYING --done--> STAGED --written--> ABSENT      RELAYING --late--> LOST

LEAVING is a victim with pending writes (write-back); it can be read like a READY object. LOST is an overdue promotion
whose thread may still write to the slot. The object cannot be found, and the slot is not free until the thread ends. So
a tier that hangs causes a miss and never wrong bytes. RELAYING and STAGED objects are in the staging area, on their way
from one lower tier to another, and cannot be found.

If objects only pass through host memory (`staging_core`), each is LEAVING as soon as it has arrived. It is evicted when
its last pin and its last write have ended.

An object also has a state for its write to each lower tier (`WRITE_STEPS`), which `tier_writes` changes:

    UNDECIDED --needed--> PENDING (write-back) --its turn--> QUEUED --demotion begins--> WRITING --ended--> CLOSED
    UNDECIDED --needed--> QUEUED                          QUEUED --dropped or relayed--> CLOSED
    UNDECIDED --not needed--> CLOSED                      UNDECIDED, CLOSED --relay begins from host memory--> WRITING
    QUEUED, WRITING --tier fails--> UNDECIDED             CLOSED --copy lost--> UNDECIDED
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

from kvtier.layout import History, KvLayout
from kvtier.policy.base import Evictor, Hinted, Use
from kvtier.policy.lru import Lru
from kvtier.types import ChunkKey, NextTurn, Presence

HOST = "host"

Item = tuple[ChunkKey, int]
"""One object, as (key, group)."""

STAGING_SLOTS_MIN = 8
"""In a group with fewer slots, objects that have left host memory are not relayed."""
STAGING_SLOTS_MAX = 8
"""Maximum number of slots of a group's staging area. They suffice for a slow tier's writes in flight. More
would only take slots from other uses."""
STAGING_SHARE = 32
"""The staging area takes at most one in this many slots."""

WAY_SHARE = 0.75
"""If host memory is only a staging area, reads may take this share of a group's slots, and so may writes. Tiers that
hang in one direction therefore leave slots for the other.
"""
RELAY_SLOTS = 2
"""Number of slots of each group that relays may take if host memory is only a staging area."""

LEFT_MAX = 1024
"""Number of objects that are remembered after they left host memory, so that waiting requests ask tiers for them."""


class Residency(Enum):
    """State of the copy of an object in host memory."""

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
    """An event that changes the state of a copy."""

    GATHER = auto()
    PROMOTE = auto()
    RELAY = auto()
    ARRIVED = auto()
    FAILED = auto()
    LATE = auto()
    RECLAIMED = auto()
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
    (Residency.LOST, Change.RECLAIMED): Residency.ABSENT,
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
"""States in which the copy is complete and can be scattered and demoted."""

COMING = (Residency.GATHERING, Residency.PROMOTING)
"""States in which a transfer into the slot is in flight. Loads may wait for it."""

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
"""What a lookup reports for an object in each state."""


class WriteState(Enum):
    """State of the write of an object to one lower tier."""

    UNDECIDED = auto()
    """The next use or flush decides whether to write the object."""
    PENDING = auto()
    QUEUED = auto()
    """The object is in the tier's queue."""
    WRITING = auto()
    """The demotion is in flight."""
    CLOSED = auto()
    """The tier has the object or gets it another way, or the write was dropped."""

    __hash__ = object.__hash__


UNDECIDED, PENDING, QUEUED = WriteState.UNDECIDED, WriteState.PENDING, WriteState.QUEUED
WRITING, CLOSED = WriteState.WRITING, WriteState.CLOSED

WRITE_STEPS: dict[WriteState, tuple[WriteState, ...]] = {
    UNDECIDED: (PENDING, QUEUED, WRITING, CLOSED),
    PENDING: (QUEUED,),
    QUEUED: (WRITING, CLOSED, UNDECIDED),
    WRITING: (CLOSED, UNDECIDED),
    CLOSED: (WRITING, UNDECIDED),
}

UNWRITTEN = (PENDING, QUEUED, WRITING)
"""States in which a write keeps the object in host memory."""


def after(state: Residency, change: Change) -> Residency:
    """Return the state that follows `state` after `change`.

    Raises:
        AssertionError: the table has no such transition, which is a bug in the core.
    """
    following = TRANSITIONS.get((state, change))
    if following is None:
        raise AssertionError(f"no transition for {change.name} in {state.name}")
    return following


@dataclass(slots=True, eq=False)
class HostEntry:
    """One object with a slot in host memory."""

    key: ChunkKey
    group: int
    slot: int
    parent: ChunkKey | None
    depth: int
    conversation: str | None
    residency: Residency = Residency.ABSENT
    source: str = HOST
    origin: str = HOST
    """Source of the object: a tier, or `HOST` for the engine."""
    is_staged: bool = False
    """Whether it is in the staging area, on its way from one lower tier to another."""
    pins: int = 0
    """Number of queued or running scatters, and of running demotions."""
    stuck: int = 0
    """Number of overdue demotions among the pins."""
    writes: dict[str, WriteState] = field(default_factory=dict[str, WriteState])
    """State of the write to each lower tier, except UNDECIDED ones."""
    pending: int = 0
    """Number of these writes whose state is in `UNWRITTEN`."""
    uses: int = 1
    """Number of uses, including the operation that brought the object."""
    is_shared: bool = False
    """Whether a conversation other than the first has used it."""
    is_retained: bool = False
    """Whether a hint keeps it in host memory (`retention`)."""
    is_low: bool = False
    """Whether it is evicted before others because of a hint, until its next use."""
    is_read: bool = False
    """Whether a read took its slot. This field and those below are used only if objects just pass through."""
    is_in_tier: bool = False
    """Whether a tier has the object."""
    kept_by: str = ""
    """Name of a persistent tier that has the object; empty if none does."""
    awaited: int = 0
    """Number of puts that wait until a tier has the object."""


class HostMemory:
    """The slots of every KV group and the objects in them.

    Args:
        slots: number of slots of each group.
        evictor: creates one `Evictor` for each group.
        layout: the model's KV groups.
        has_staging: whether objects on their way between lower tiers may take slots.
        stages_only: whether host memory is only a staging area: objects pass through and do not stay.
    """

    def __init__(
        self,
        slots: Sequence[int],
        evictor: Callable[[], Evictor],
        layout: KvLayout,
        *,
        has_staging: bool = False,
        stages_only: bool = False,
    ) -> None:
        self.slots = tuple(slots)
        self.has_staging = has_staging
        self.stages_only = stages_only
        self._most = [max(1, int(count * WAY_SHARE)) for count in slots]
        self._slots_of_way = {True: [0] * len(slots), False: [0] * len(slots)}
        """Number of slots of each group that reads (True) and writes (False) have taken."""
        self.unkept: list[HostEntry] = []
        """Objects whose writes have changed while puts wait for them."""
        self.staging = [
            min(STAGING_SLOTS_MAX, max(1, count // STAGING_SHARE)) if has_staging and count >= STAGING_SLOTS_MIN else 0
            for count in slots
        ]
        """Number of slots of each group that the staging area may take in addition to those that it has."""
        if stages_only and has_staging:
            self.staging = [RELAY_SLOTS] * len(slots)
        self.staging_slots = tuple(self.staging)
        """Maximum number of slots of each group that the staging area may take."""
        self.relayed: dict[HostEntry, None] = {}
        """Objects in the staging area."""
        self.entries: list[dict[ChunkKey, HostEntry]] = [{} for _ in slots]
        self.readable: list[set[ChunkKey]] = [set() for _ in slots]
        self.lost: list[HostEntry] = []
        self.leaving = [0] * len(self.slots)
        """Number of objects of each group that are LEAVING. Their slots become free soon."""
        self.evictions = 0
        self.removals = 0
        """Number of objects that have been removed from `entries`, for any reason."""
        self._left: deque[Item] = deque(maxlen=LEFT_MAX)
        self._free = [list(range(count - 1, -1, -1)) for count in slots]
        self._evictors = [evictor() for _ in slots]
        self._low = [Lru() for _ in slots]
        """Objects that are evicted first. The evictors of their groups do not have them."""
        self.object_bytes = tuple(group.payload_bytes for group in layout.groups)
        self.is_history = tuple(isinstance(group.validity, History) and not stages_only for group in layout.groups)
        """For each group, whether every chunk requires all chunks before it."""
        self.has_history_only = all(self.is_history)
        # These counts of evictable objects avoid a search of full host memory for a victim that cannot exist.
        self._idle_clean = [0] * len(self.slots)
        self._idle_pending = [0] * len(self.slots)
        # After a search without a result, no other search is made until an object may have become evictable. Otherwise
        # each of many stores that wait for slow demotions would search at every step.
        self._has_no_victim = [False] * len(self.slots)

    def entry(self, key: ChunkKey, group: int) -> HostEntry | None:
        """Return the entry of the object, unless it is ABSENT or LOST."""
        return self.entries[group].get(key)

    def enter(self, entry: HostEntry, change: Change) -> None:
        """Put `entry` into its slot from `take_slot`. `change` is GATHER or PROMOTE."""
        entry.residency = after(entry.residency, change)
        entry.is_read = change is Change.PROMOTE
        self.entries[entry.group][entry.key] = entry

    def arrived(self, entry: HostEntry) -> None:
        """Make the object readable, because the transfer into its slot is done."""
        entry.residency = after(entry.residency, Change.ARRIVED)
        self.readable[entry.group].add(entry.key)
        if self.stages_only:
            entry.residency = after(entry.residency, Change.LEAVE)
            self.leaving[entry.group] += 1
            return
        self._count(entry, 1)
        self._evictors[entry.group].added(Use(entry.key, entry.parent, entry.conversation))

    def failed(self, entry: HostEntry) -> None:
        """Free the slot, because the transfer into it failed."""
        entry.residency = after(entry.residency, Change.FAILED)
        self._remove(entry)
        self._give_back(entry)

    def late(self, entry: HostEntry) -> None:
        """Give up an overdue promotion. Its thread may still write to the slot, which is therefore not free."""
        entry.residency = after(entry.residency, Change.LATE)
        self._remove(entry)
        self.lost.append(entry)

    def reclaim(self, entry: HostEntry) -> None:
        """Free the slot of an overdue promotion whose thread has ended."""
        entry.residency = after(entry.residency, Change.RECLAIMED)
        self.lost.remove(entry)
        self._give_back(entry)
        self.staging[entry.group] += entry.is_staged

    def stage(self, entry: HostEntry) -> None:
        """Put `entry` into its slot from `take_staging_slot`. A promotion fills the slot."""
        entry.is_staged = True
        self.staging[entry.group] -= 1
        entry.residency = after(entry.residency, Change.RELAY)
        self.relayed[entry] = None

    def staged(self, entry: HostEntry) -> None:
        """Record that the promotion into the staging area is done."""
        entry.residency = after(entry.residency, Change.ARRIVED)

    def unstage(self, entry: HostEntry, change: Change) -> None:
        """Take the object out of the staging area. `change` is FAILED, LATE or EVICTED."""
        entry.residency = after(entry.residency, change)
        del self.relayed[entry]
        if change is Change.LATE:
            self.lost.append(entry)
        else:
            self._give_back(entry)
            self.staging[entry.group] += 1

    def touch(self, entry: HostEntry, conversation: str | None) -> None:
        """Record that a request of `conversation` uses the object."""
        entry.uses += 1
        if self.stages_only:
            return
        if conversation != entry.conversation:
            entry.is_shared = True
        if entry.residency is LEAVING:
            self._stay(entry, conversation)
        elif entry.is_low:
            self._leave_evictor(entry)
            self._add_candidate(entry, conversation)
        elif entry.residency is READY:
            self._evictors[entry.group].touched(Use(entry.key, entry.parent, conversation))

    def retain(self, entry: HostEntry) -> None:
        """Keep a readable object until `end_retention`. Its evictor forgets it, and need not protect its parents."""
        if entry.residency is LEAVING:
            self._stay(entry, entry.conversation)
        self._has_no_victim[entry.group] = False
        self._leave_evictor(entry)
        self._count(entry, -1)
        entry.is_retained = True

    def end_retention(self, entry: HostEntry) -> None:
        """Let the object be evicted again, as if it had just been used."""
        entry.is_retained = False
        self._count(entry, 1)
        self._add_candidate(entry, entry.conversation)

    def lower(self, entry: HostEntry) -> None:
        """Evict the object before others, unless it is used again."""
        if entry.residency is READY and not (entry.is_low or entry.is_retained or entry.stuck):
            self._leave_evictor(entry)
            entry.is_low = True
            self._has_no_victim[entry.group] = False
            self._low[entry.group].added(Use(entry.key, entry.parent, entry.conversation))

    def pin(self, entry: HostEntry) -> None:
        """Add a pin, which prevents eviction."""
        if not entry.pins and entry.residency is READY:
            self._count(entry, -1)
        entry.pins += 1

    def unpin(self, entry: HostEntry) -> None:
        """Remove a pin. A LEAVING object that has no more pins or pending writes is evicted."""
        assert entry.pins > 0, "unpin without pin"
        entry.pins -= 1
        if not entry.pins:
            if entry.residency is READY:
                self._count(entry, 1)
            else:
                self.leave_if_written(entry)

    def write_becomes(self, entry: HostEntry, tier: str, state: WriteState) -> None:
        """Change the state of the object's write to `tier`.

        Raises:
            AssertionError: the table has no such step, which is a bug in the core.
        """
        before = entry.writes.get(tier, UNDECIDED)
        if state not in WRITE_STEPS[before]:
            raise AssertionError(f"a write has no step from {before.name} to {state.name}")
        if state is UNDECIDED:
            del entry.writes[tier]
        else:
            entry.writes[tier] = state
        if entry.awaited and state not in UNWRITTEN:
            self.unkept.append(entry)
        pending = entry.pending + (state in UNWRITTEN) - (before in UNWRITTEN)
        if entry.residency is not READY or entry.pins or bool(pending) is bool(entry.pending):
            had_pending, entry.pending = entry.pending, pending  # the counts of evictable objects stay the same
            if had_pending and not pending and entry.residency is LEAVING:
                self.leave_if_written(entry)
        else:
            self._count(entry, -1)
            entry.pending = pending
            self._count(entry, 1)

    def has_room(self, group: int) -> bool:
        """Return whether a slot of `group` is free or can be freed."""
        return bool(self._free[group] or self._idle_clean[group])

    def has_share(self, group: int, *, is_read: bool) -> bool:
        """Return whether reads (or writes, if `is_read` is false) may take one more slot of `group`.

        This limit applies only if objects just pass through.
        """
        return self._slots_of_way[is_read][group] < self._most[group]

    def read_becomes_write(self, entry: HostEntry) -> bool:
        """Count the slot of a read as one of a write, if writes may take one more. Return whether they may."""
        if not self.has_share(entry.group, is_read=False):
            return False
        self._slots_of_way[True][entry.group] -= 1
        self._slots_of_way[False][entry.group] += 1
        entry.is_read = False
        return True

    def take_slot(self, group: int, *, is_read: bool = False) -> int | None:
        """Take a free slot, or evict an object that has no pins or pending writes and take its slot; else return None.

        If objects only pass through, no object is evicted, and reads and writes each have a share.
        """
        if self.stages_only:
            if not self._free[group] or not self.has_share(group, is_read=is_read):
                return None
            self._slots_of_way[is_read][group] += 1
        elif not self._free[group]:
            if not self._idle_clean[group] or self._has_no_victim[group]:
                return None
            victim = self._victim(group, self._is_protected_in(group))
            if victim is None:
                self._has_no_victim[group] = True
                return None
            self._evict(victim)
        return self._free[group].pop()

    def take_staging_slot(self, group: int) -> int | None:
        """Take a slot for `stage`, as in `take_slot`. Also return None if the staging area may not grow."""
        return self.take_slot(group) if self.staging[group] else None

    def clear(self) -> int:
        """Evict every READY object that has no pins or pending writes and is not retained, without asking the evictor.

        Return how many were evicted.
        """
        victims = [it for entries in self.entries for it in entries.values() if _is_idle(it, may_be_pending=False)]
        for victim in victims:
            self._evict(victim)
        return len(victims)

    def oldest_pending(self, group: int) -> HostEntry | None:
        """Return the next victim among the objects that only pending writes protect."""
        if not self._idle_pending[group]:
            return None
        entries = self.entries[group]

        def is_protected(name: bytes) -> bool:
            entry = entries[ChunkKey(name)]
            return not (entry.pending and _is_idle(entry, may_be_pending=True))

        return self._victim(group, is_protected)

    def leave(self, entry: HostEntry) -> None:
        """Make `entry` a victim that is evicted as soon as its writes end."""
        self._count(entry, -1)
        entry.residency = after(entry.residency, Change.LEAVE)
        self.leaving[entry.group] += 1
        self._has_no_victim[entry.group] = False
        self._leave_evictor(entry)

    def stuck(self, entry: HostEntry) -> None:
        """Record an overdue demotion. It may take a long time, so the evictor need not protect the object's parents."""
        entry.stuck += 1
        if entry.awaited:
            self.unkept.append(entry)
        self._has_no_victim[entry.group] = False
        self._leave_evictor(entry)

    def unstuck(self, entry: HostEntry) -> None:
        """Record that the thread of an overdue demotion has ended."""
        entry.stuck -= 1
        if entry.residency is READY and not entry.is_retained:
            self._add_candidate(entry, entry.conversation)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Pass the kind of the conversation's next turn to the evictors that use such hints."""
        for evictor in self._evictors:
            if isinstance(evictor, Hinted):
                evictor.expects(conversation, next_turn)

    def used(self, group: int) -> int:
        """Return how many slots of `group` are in use."""
        return self.slots[group] - len(self._free[group])

    def pending_objects(self) -> list[HostEntry]:
        """Return every readable object with pending writes, parents before children."""
        pending = [entry for entries in self.entries for entry in entries.values() if entry.pending]
        return sorted(pending, key=lambda entry: entry.depth)

    def check(self) -> None:
        """Assert that slots, sets, pins and counts are consistent.

        Raises:
            AssertionError: they are inconsistent, which is a bug in the core.
        """
        for group, entries in enumerate(self.entries):
            slots = list(self._free[group])
            slots += [entry.slot for entry in (*self.lost, *self.relayed) if entry.group == group]
            readable = clean = pending = leaving = 0
            for key, entry in entries.items():
                slots.append(entry.slot)
                state = entry.residency
                assert entry.pins >= 0, "negative pins"
                unwritten = sum([write in UNWRITTEN for write in entry.writes.values()])
                assert unwritten == entry.pending, "pending writes miscounted"
                if state in READABLE:
                    readable += 1
                    assert key in self.readable[group], "a readable key is missing from the set"
                    clean += _is_idle(entry, may_be_pending=False)
                    pending += _is_idle(entry, may_be_pending=True) and bool(entry.pending)
                    assert state is READY or not (entry.is_retained or entry.is_low), "a leaving object has a hint"
                    assert not (entry.is_retained and entry.is_low), "a retained object is evicted first"
                    leaving += state is LEAVING
                    assert state is READY or entry.pins or entry.pending, (
                        "a leaving object has neither pins nor pending writes"
                    )
                else:
                    assert state in COMING, "an absent entry is kept"
            slots.sort()
            assert slots == list(range(self.slots[group])), "a slot is lost or shared"
            ways = [taken[group] for taken in self._slots_of_way.values()]
            if self.stages_only:
                assert sum(ways) == self.used(group), "slots of reads and writes miscounted"
                assert max(ways) <= self._most[group], "reads or writes have more than their share"
                assert all(entry.pins or entry.pending or entry.residency in COMING for entry in entries.values()), (
                    "an object that no transfer needs stays"
                )
            assert readable == len(self.readable[group]), "the set of readable keys is stale"
            assert clean == self._idle_clean[group], "the count of idle objects is wrong"
            assert pending == self._idle_pending[group], "the count of idle objects with pending writes is wrong"
            assert leaving == self.leaving[group], "the count of leaving objects is wrong"
            if self._has_no_victim[group]:
                assert self._victim(group, self._is_protected_in(group)) is None, "an evictable object is overlooked"
        assert all(count >= 0 for count in self.staging), "the staging area is too large"
        assert all(entry.residency is Residency.LOST for entry in self.lost), (
            "an entry in the list of lost ones is not LOST"
        )

    def _is_protected_in(self, group: int) -> Callable[[bytes], bool]:
        entries = self.entries[group]
        return lambda name: not _is_idle(entries[ChunkKey(name)], may_be_pending=False)

    def _victim(self, group: int, is_protected: Callable[[bytes], bool]) -> HostEntry | None:
        name = self._low[group].victim(is_protected) if len(self._low[group]) else None
        if name is None:
            name = self._evictors[group].victim(is_protected)
        return None if name is None else self.entries[group][ChunkKey(name)]

    def _evict(self, entry: HostEntry) -> None:
        self._count(entry, -1)
        self.leaving[entry.group] -= entry.residency is LEAVING
        entry.residency = after(entry.residency, Change.EVICTED)
        self._remove(entry)
        self.readable[entry.group].discard(entry.key)
        self._leave_evictor(entry)
        self._give_back(entry)
        self.evictions += not self.stages_only

    def _stay(self, entry: HostEntry, conversation: str | None) -> None:
        """Make a LEAVING object READY, because it is wanted again."""
        entry.residency = after(entry.residency, Change.WANTED)
        self.leaving[entry.group] -= 1
        self._count(entry, 1)
        self._add_candidate(entry, conversation)

    def _leave_evictor(self, entry: HostEntry) -> None:
        """Remove the object from the evictor that has it."""
        (self._low if entry.is_low else self._evictors)[entry.group].removed(entry.key)
        entry.is_low = False

    def _add_candidate(self, entry: HostEntry, conversation: str | None) -> None:
        """Make `entry` a candidate for eviction."""
        if not entry.stuck:
            self._has_no_victim[entry.group] = False
            self._evictors[entry.group].added(Use(entry.key, entry.parent, conversation))

    def _remove(self, entry: HostEntry) -> None:
        del self.entries[entry.group][entry.key]
        self._has_no_victim[entry.group] = False
        self.removals += 1
        self._left.append((entry.key, entry.group))

    def left_since(self, removals: int) -> list[Item]:
        """Return the objects that left host memory since `removals` had this value, at most the last `LEFT_MAX`."""
        return list(islice(reversed(self._left), self.removals - removals))

    def _give_back(self, entry: HostEntry) -> None:
        self._free[entry.group].append(entry.slot)
        if self.stages_only:
            self._slots_of_way[entry.is_read][entry.group] -= 1

    def leave_if_written(self, entry: HostEntry) -> None:
        """Evict `entry` if it is LEAVING and has no pins or pending writes."""
        if entry.residency is LEAVING and not entry.pins and not entry.pending:
            self._evict(entry)

    def _count(self, entry: HostEntry, step: int) -> None:
        if entry.residency is not READY or entry.pins or entry.is_retained:
            return
        if entry.pending:
            self._idle_pending[entry.group] += step
        else:
            self._idle_clean[entry.group] += step
            self._has_no_victim[entry.group] &= step < 0


def _is_idle(entry: HostEntry, *, may_be_pending: bool) -> bool:
    is_free = entry.residency is READY and not entry.pins and not entry.is_retained
    return is_free and (may_be_pending or not entry.pending)
