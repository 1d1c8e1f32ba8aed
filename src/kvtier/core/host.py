"""HostMemory memory as the core sees it: which object is in which slot, and who may leave.

The only place that changes either.
"""

from collections.abc import Callable, Sequence

from kvtier.core.records import HostEntry
from kvtier.core.residency import COMING, LEAVING, READABLE, READY, Change, Residency, after
from kvtier.layout import KvLayout
from kvtier.policy.base import Evictor, Held, Hinted
from kvtier.types import ChunkKey, NextTurn


class HostMemory:
    """The slots of every KV group and the objects in them.

    Args:
        slots: number of slots of each group.
        evictor: makes one `Evictor` for each group.
        layout: the model's KV groups.
    """

    def __init__(
        self,
        slots: Sequence[int],
        evictor: Callable[[], Evictor],
        layout: KvLayout,
    ) -> None:
        self.slots = tuple(slots)
        self.entries: list[dict[ChunkKey, HostEntry]] = [{} for _ in slots]
        self.readable: list[set[ChunkKey]] = [set() for _ in slots]
        self.lost: list[HostEntry] = []
        self.leaving = [0] * len(self.slots)
        """Objects of each group that are LEAVING: slots that will be free soon."""
        self.evictions = 0
        self.departures = 0
        """How often an object that could be found was there no more, for whatever reason."""
        self._free = [list(range(count - 1, -1, -1)) for count in slots]
        self._evictors = [evictor() for _ in slots]
        self.object_bytes = tuple(group.payload_bytes for group in layout.groups)
        # Counting who could leave keeps a full house cheap: no search for a victim that cannot exist.
        self._idle_clean = [0] * len(self.slots)
        self._idle_pending = [0] * len(self.slots)
        # A search that found nobody is not made again before somebody may have become free to leave: while many stores
        # wait for slots whose demotions are slow, each of them asks at every step.
        self._is_searched = [False] * len(self.slots)

    def find(self, key: ChunkKey, group: int) -> HostEntry | None:
        """The object's entry, unless it is absent or lost."""
        return self.entries[group].get(key)

    def enter(self, entry: HostEntry, change: Change) -> None:
        """Put `entry` into its slot, which `take_slot` gave; `change` is GATHER or PROMOTE."""
        entry.residency = after(entry.residency, change)
        self.entries[entry.group][entry.key] = entry

    def arrived(self, entry: HostEntry) -> None:
        """The bytes are in the slot."""
        entry.residency = after(entry.residency, Change.ARRIVED)
        self.readable[entry.group].add(entry.key)
        self._count(entry, 1)
        self._evictors[entry.group].added(Held(entry.key, entry.parent, entry.session))

    def failed(self, entry: HostEntry) -> None:
        """The bytes did not come; the slot is free again."""
        entry.residency = after(entry.residency, Change.FAILED)
        self._depart(entry)
        self._free[entry.group].append(entry.slot)

    def late(self, entry: HostEntry) -> None:
        """Nobody waits any more, but a thread may still write: nobody finds it, the slot is not free."""
        entry.residency = after(entry.residency, Change.LATE)
        self._depart(entry)
        self.lost.append(entry)

    def settled(self, entry: HostEntry) -> None:
        """The thread behind a late promotion has answered at last."""
        entry.residency = after(entry.residency, Change.SETTLED)
        self.lost.remove(entry)
        self._free[entry.group].append(entry.slot)

    def touch(self, entry: HostEntry, session: str | None) -> None:
        """A request of `session` uses the object."""
        entry.uses += 1
        if entry.residency is LEAVING:
            entry.residency = after(entry.residency, Change.WANTED)
            self.leaving[entry.group] -= 1
            self._count(entry, 1)
            self._option(entry, session)
        elif entry.residency is READY:
            self._evictors[entry.group].touched(Held(entry.key, entry.parent, session))

    def pin(self, entry: HostEntry) -> None:
        """Forbid eviction once more."""
        if not entry.pins:
            self._count(entry, -1)
        entry.pins += 1

    def unpin(self, entry: HostEntry) -> None:
        """Take one pin back."""
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        if not entry.pins:
            self._count(entry, 1)
            self._leave_if_written(entry)

    def mark_pending(self, entry: HostEntry, tiers: frozenset[str]) -> None:
        """`tiers` are still to receive the object, which is here or about to be."""
        self._count(entry, -1)
        entry.pending |= tiers
        self._count(entry, 1)

    def mark_written(self, entry: HostEntry, tier: str) -> None:
        """`tier` has received the object, or will not."""
        self._count(entry, -1)
        entry.pending -= {tier}
        self._count(entry, 1)
        self._leave_if_written(entry)

    def has_room(self, group: int) -> bool:
        """Whether a slot of `group` is free, or may be."""
        return bool(self._free[group] or self._idle_clean[group])

    def take_slot(self, group: int) -> int | None:
        """A free slot, evicting an object that is neither pinned nor pending to a tier; None when there is none."""
        if not self._free[group]:
            if not self._idle_clean[group] or self._is_searched[group]:
                return None
            victim = self._victim(group, self._must_stay(group))
            if victim is None:
                self._is_searched[group] = True
                return None
            self._evict(victim)
        return self._free[group].pop()

    def oldest_pending(self, group: int) -> HostEntry | None:
        """The object that would leave next, of those that only a debt to a tier keeps."""
        if not self._idle_pending[group]:
            return None
        entries = self.entries[group]

        def stays(name: bytes) -> bool:
            entry = entries[ChunkKey(name)]
            return not (entry.pending and _is_idle(entry, may_be_pending=True))

        return self._victim(group, stays)

    def leave(self, entry: HostEntry) -> None:
        """`entry` is a victim that leaves as soon as its tiers have received it."""
        self._count(entry, -1)
        entry.residency = after(entry.residency, Change.LEAVE)
        self.leaving[entry.group] += 1
        self._is_searched[entry.group] = False
        self._evictors[entry.group].removed(entry.key)

    def stuck(self, entry: HostEntry) -> None:
        """A late demotion reads the slot, nobody knows how long: until then the evictor need not spare its parents."""
        entry.stuck += 1
        self._is_searched[entry.group] = False
        self._evictors[entry.group].removed(entry.key)

    def unstuck(self, entry: HostEntry) -> None:
        """The thread behind a late demotion has answered at last."""
        entry.stuck -= 1
        if entry.residency is READY:
            self._option(entry, entry.session)

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """Who goes on with `session`, for evictors that take hints."""
        for evictor in self._evictors:
            if isinstance(evictor, Hinted):
                evictor.expects(session, next_turn)

    def used(self, group: int) -> int:
        """Slots of `group` that hold something."""
        return self.slots[group] - len(self._free[group])

    def pending_objects(self) -> list[HostEntry]:
        """Every readable object that some tier is still to receive, parents before children."""
        pending = [entry for entries in self.entries for entry in entries.values() if entry.pending]
        return sorted(pending, key=lambda entry: entry.depth)

    def check(self) -> None:
        """Assert that slots, sets, pins and counts agree.

        Raises:
            AssertionError: they do not, which is a mistake in the core.
        """
        for group, entries in enumerate(self.entries):
            slots = self._free[group] + [entry.slot for entry in self.lost if entry.group == group]
            readable = clean = pending = leaving = 0
            for key, entry in entries.items():
                slots.append(entry.slot)
                state = entry.residency
                assert entry.pins >= 0, "negative pins"
                if state in READABLE:
                    readable += 1
                    assert key in self.readable[group], "the set of readable keys lacks one"
                    clean += state is READY and not entry.pins and not entry.pending
                    pending += state is READY and not entry.pins and bool(entry.pending)
                    leaving += state is LEAVING
                    assert state is READY or entry.pins or entry.pending, "nothing keeps what is leaving"
                else:
                    assert state in COMING, "an absent entry was kept"
            slots.sort()
            assert slots == list(range(self.slots[group])), "a slot is lost or shared"
            assert readable == len(self.readable[group]), "the set of readable keys is stale"
            assert clean == self._idle_clean[group], "the count of idle objects is wrong"
            assert pending == self._idle_pending[group], "the count of idle pending objects is wrong"
            assert leaving == self.leaving[group], "the count of leaving objects is wrong"
            if self._is_searched[group]:
                assert self._victim(group, self._must_stay(group)) is None, "somebody who could leave is not looked for"
        assert all(entry.residency is Residency.LOST for entry in self.lost), "a lost entry is not lost"

    def _must_stay(self, group: int) -> Callable[[bytes], bool]:
        entries = self.entries[group]
        return lambda name: not _is_idle(entries[ChunkKey(name)], may_be_pending=False)

    def _victim(self, group: int, is_pinned: Callable[[bytes], bool]) -> HostEntry | None:
        name = self._evictors[group].victim(is_pinned)
        return None if name is None else self.entries[group][ChunkKey(name)]

    def _evict(self, entry: HostEntry) -> None:
        self._count(entry, -1)
        self.leaving[entry.group] -= entry.residency is LEAVING
        entry.residency = after(entry.residency, Change.EVICTED)
        self._depart(entry)
        self.readable[entry.group].discard(entry.key)
        self._evictors[entry.group].removed(entry.key)
        self._free[entry.group].append(entry.slot)
        self.evictions += 1

    def _option(self, entry: HostEntry, session: str | None) -> None:
        """The evictor may choose `entry` (again)."""
        if not entry.stuck:
            self._is_searched[entry.group] = False
            self._evictors[entry.group].added(Held(entry.key, entry.parent, session))

    def _depart(self, entry: HostEntry) -> None:
        del self.entries[entry.group][entry.key]
        self._is_searched[entry.group] = False
        self.departures += 1

    def _leave_if_written(self, entry: HostEntry) -> None:
        if entry.residency is LEAVING and not entry.pins and not entry.pending:
            self._evict(entry)

    def _count(self, entry: HostEntry, step: int) -> None:
        if entry.residency is not READY or entry.pins:
            return
        if entry.pending:
            self._idle_pending[entry.group] += step
        else:
            self._idle_clean[entry.group] += step
            self._is_searched[entry.group] &= step < 0


def _is_idle(entry: HostEntry, *, may_be_pending: bool) -> bool:
    return entry.residency is READY and not entry.pins and (may_be_pending or not entry.pending)
