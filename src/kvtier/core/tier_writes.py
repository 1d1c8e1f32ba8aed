"""Decides which lower tiers should get each object under the write policy, and which write is next.

This module starts no transfers. `transfer_scheduler` asks it for one object at a time.

An object from the engine goes to every tier. Once a persistent tier has it, slower tiers get it by relay from there, so
their pending writes no longer take host memory. An object that a load brought from a slower tier is written to the
faster ones at its second use.

An object that only passes through host memory, on its way to or from a tier (`staging_core`), is a passing object.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvtier.core.core_output import Output
from kvtier.core.host_residency import (
    CLOSED,
    HOST,
    PENDING,
    QUEUED,
    READABLE,
    READY,
    UNDECIDED,
    UNWRITTEN,
    WRITING,
    Change,
    HostEntry,
    HostMemory,
    Item,
)
from kvtier.core.limits import Limits, WritePolicy
from kvtier.core.tier_state import TierState, TierStates
from kvtier.types import Direction

FILL_USES = 2
"""Number of uses at which an object from a slower tier is written to the faster ones."""

PROMOTED_MAX = 1 << 16
"""Maximum number of objects from slower tiers whose first use is remembered after they have left host memory."""

PUBLISHED_PART = 4
"""If other engines wait for this one's stores, one host slot in this many may hold an object that waits to be written
to a remote tier.
"""

RELAYS_MAX = 1 << 14
"""Maximum number of objects that wait to be relayed to one tier. Beyond that, the oldest are dropped."""

# Constants for hot paths, as in `host_residency`.
DEMOTE, PROMOTE = Direction.DEMOTE, Direction.PROMOTE


@dataclass(slots=True)
class WriteQueue:
    """Objects that wait to be written to one tier."""

    queued: OrderedDict[HostEntry, None] = field(default_factory=OrderedDict[HostEntry, None])
    """Objects in host memory whose write is QUEUED, oldest first."""
    relays: OrderedDict[Item, tuple[HostEntry, str]] = field(default_factory=OrderedDict[Item, tuple[HostEntry, str]])
    """Objects to be relayed, each with the name of the faster tier that holds it. They take no host memory."""
    staged: deque[HostEntry] = field(default_factory=deque[HostEntry])
    """Relayed objects in the staging area, ready to be written."""


class TierWrites:
    """Marks and queues pending writes. An object stays in host memory until they end or are dropped or relayed."""

    def __init__(self, host: HostMemory, tiers: TierStates, limits: Limits, output: Output) -> None:
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._output = output
        self._first_state = PENDING if limits.write_policy is WritePolicy.BACK else QUEUED
        self._first_uses = limits.selective_uses if limits.write_policy is WritePolicy.SELECTIVE else 1
        order = list(tiers.by_name)
        self._from = {name: dict.fromkeys(order[number:], CLOSED) for number, name in enumerate(order)}
        """For each tier, that tier and all slower ones: they need no write of an object that was loaded from it."""
        self._promoted: OrderedDict[Item, None] = OrderedDict()
        self.queues = {it.name: WriteQueue() for it in tiers.all}
        """The queue of each tier."""
        self._can_wait: list[dict[HostEntry, None]] = [{} for _ in host.slots]
        """Passing objects of each group that have only queued writes and no put that waits for them, oldest first."""

    def use(self, entry: HostEntry, now_s: float, conversation: str | None) -> None:
        """Count a use of the object by a request of `conversation`. The use may make writes pending."""
        self._host.touch(entry, conversation)
        if entry.residency is READY:
            self.mark_pending(entry, now_s)

    def promoted(self, entry: HostEntry, now_s: float) -> None:
        """Record that a load brought the object from `entry.origin`. A second promotion counts as a second use."""
        entry.writes = self._from[entry.origin].copy()
        if self._host.stages_only:
            entry.is_in_tier = True
            entry.kept_by = entry.origin if self._tiers.by_name[entry.origin].rules.persists else ""
        if len(entry.writes) == len(self.queues):
            return  # no tier is faster
        item = (entry.key, entry.group)
        if item in self._promoted:
            del self._promoted[item]
            entry.uses = max(entry.uses, FILL_USES)
            if not self._host.stages_only or self._host.read_becomes_write(entry):
                self.mark_pending(entry, now_s)
        else:
            self._promoted[item] = None
            if len(self._promoted) > PROMOTED_MAX:
                self._promoted.popitem(last=False)

    def mark_pending(self, entry: HostEntry, now_s: float) -> None:
        """Mark a write as pending for each tier that should get the object, if it has been used often enough."""
        if len(entry.writes) == len(self.queues) or entry.uses < (
            self._first_uses if entry.origin == HOST else max(FILL_USES, self._first_uses)
        ):
            return
        item = (entry.key, entry.group)
        for tier_state in self._tiers.all:
            if tier_state.name in entry.writes or not tier_state.can_write(now_s):
                continue
            queue = self.queues[tier_state.name]
            # A put promises that a tier has the object, and a remembered answer may be stale.
            is_there = tier_state.remembered(item, now_s) and not self._host.stages_only
            state = CLOSED if is_there else self._first_state
            if state is not CLOSED:
                queue.relays.pop(item, None)
            if state is QUEUED:
                queue.queued[entry] = None
            self._host.write_becomes(entry, tier_state.name, state)

    def keep(self, entry: HostEntry, now_s: float) -> None:
        """Queue the writes of an object under any write policy, because a hint says that it will be needed again."""
        entry.uses = max(entry.uses, self._first_uses)
        if entry.residency is READY:
            self.mark_pending(entry, now_s)
        self._queue(entry)

    def put_again(self, entry: HostEntry, now_s: float) -> None:
        """Repeat the ended writes of a passing object, because the tiers that had it may have lost it."""
        if entry.residency in READABLE and not entry.is_read:
            entry.is_in_tier, entry.kept_by = False, ""
            for tier in [tier for tier, state in entry.writes.items() if state is CLOSED]:
                self._host.write_becomes(entry, tier, UNDECIDED)
            entry.uses = max(entry.uses, FILL_USES)
            self.mark_pending(entry, now_s)

    def flush(self, now_s: float) -> None:
        """Queue every pending write, including the writes that tiers missed while they were down."""
        for entries in self._host.entries:
            for entry in entries.values():
                if entry.residency is READY:
                    self.mark_pending(entry, now_s)
        for entry in self._host.pending_objects():
            self._queue(entry)

    @property
    def count(self) -> int:
        """Number of objects that have pending writes or wait to be relayed between tiers that are up."""
        relays = 0
        for tier_state in self._tiers.all:
            waiting = self.queues[tier_state.name].relays
            if waiting and tier_state.breakers[DEMOTE].is_up():
                relays += sum([self._tiers.by_name[source].breakers[PROMOTE].is_up() for _, source in waiting.values()])
        return len(self._host.pending_objects()) + len(self._host.relayed) + relays

    def relays_waiting(self) -> dict[str, int]:
        """Return how many objects wait to be relayed to each tier."""
        return {name: len(queue.relays) for name, queue in self.queues.items()}

    # ---- the next write of a tier ----------------------------------------------------------------------------------

    def next_write(self, tier_state: TierState, now_s: float) -> HostEntry | None:
        """Take the next object that is queued for the tier, and pin it. Return None if no write may start now.

        If the tier accepts no writes, all writes that are queued for it are dropped.
        """
        queued = self.queues[tier_state.name].queued
        if tier_state.breakers[DEMOTE].trial:  # the rest waits for the result of a trial
            return None
        if not tier_state.can_write(now_s):
            self._output.counters.demotions_dropped += len(queued)
            while queued:
                entry, _ = queued.popitem(last=False)
                self._host.write_becomes(entry, tier_state.name, UNDECIDED)
                if self._host.stages_only:
                    self.relay_missed(entry)
                    self.can_wait(entry)
            return None
        entry = next(iter(queued))
        if not tier_state.has_room(DEMOTE, self._host.object_bytes[entry.group]):
            return None
        del queued[entry]
        self._begin(entry, tier_state.name)
        return entry

    def _begin(self, entry: HostEntry, tier: str) -> None:
        self._can_wait[entry.group].pop(entry, None)
        self._host.pin(entry)
        self._host.write_becomes(entry, tier, WRITING)

    def next_relay(
        self, tier_state: TierState, now_s: float, *, is_loading: bool
    ) -> tuple[HostEntry, TierState | None] | None:
        """Take the next object to relay to `tier_state`, from host memory if it is still there.

        Args:
            tier_state: the slower tier.
            now_s: the time.
            is_loading: whether a load wants promotions, which go first.

        Returns:
            The entry to demote, with None; or an entry of the staging area, with the tier to promote it from.
        """
        queue = self.queues[tier_state.name]
        self._drop_stranded(queue, now_s)
        if not (queue.staged or queue.relays) or tier_state.breakers[DEMOTE].trial:
            return None
        if not tier_state.can_write(now_s):  # a relay that waits for the tier takes no slot
            while queue.staged:
                entry = queue.staged.pop()
                self._host.unstage(entry, Change.EVICTED)
                self._relay(entry, entry.origin, tier_state.name)
            return None
        if queue.staged:
            has_room = tier_state.has_room(DEMOTE, self._host.object_bytes[queue.staged[0].group])
            return (queue.staged.popleft(), None) if has_room else None
        item, (entry, source) = next(iter(queue.relays.items()))
        size_bytes = self._host.object_bytes[entry.group]
        if not tier_state.has_room(DEMOTE, size_bytes):
            return None
        current, faster = self._host.entry(*item), self._tiers.by_name[source]
        if current is not None and current.residency in READABLE:
            if self._host.stages_only and current.is_read and not self._host.read_becomes_write(current):
                return None
            del queue.relays[item]
            self._begin(current, tier_state.name)
            return current, None
        is_idle = 2 * faster.out[PROMOTE] < faster.limit[PROMOTE] and not is_loading
        can_read = is_idle and faster.can_read(now_s) and faster.has_room(PROMOTE, size_bytes)
        slot = self._host.take_staging_slot(entry.group) if current is None and can_read else None
        if slot is None:
            return None
        del queue.relays[item]
        staged = HostEntry(entry.key, entry.group, slot, entry.parent, entry.depth, entry.conversation)
        staged.origin = source
        self._host.stage(staged)
        return staged, faster

    def _drop_stranded(self, queue: WriteQueue, now_s: float) -> None:
        """Drop the first relays of `queue` whose objects have left host memory and cannot be staged or read.

        They would delay the relays behind them.
        """
        while queue.relays:
            item, (_, source) = next(iter(queue.relays.items()))
            can_stage = self._host.staging_slots[item[1]] and not self._tiers.by_name[source].is_left_alone(item, now_s)
            if can_stage or self._host.entry(*item) is not None:
                return
            del queue.relays[item]
            self._output.counters.relays_dropped += 1

    def staged(self, entry: HostEntry, tier: str) -> None:
        """Record that a relayed object has reached the staging area, on its way to `tier`."""
        self._host.staged(entry)
        self.queues[tier].staged.append(entry)

    def unstaged(self, entry: HostEntry, change: Change) -> None:
        """Drop a relayed object that the faster tier did not deliver. `change` is FAILED or LATE."""
        self._output.counters.relays_dropped += 1
        self._host.unstage(entry, change)

    def lost(self, item: Item, tier: str) -> None:
        """Record that `tier` has no good copy. If host memory has one, its next use or flush may write it again."""
        entry = self._host.entry(*item)
        if entry is not None and entry.writes.get(tier) is CLOSED:
            self._host.write_becomes(entry, tier, UNDECIDED)

    def ended(
        self, entry: HostEntry, tier_state: TierState, now_s: float, *, is_done: bool, is_late: bool, is_fault: bool
    ) -> None:
        """Record the end of a write. If a persistent tier now has the object, slower tiers get it from there by relay.

        Writes to slower tiers that have already begun go on.
        """
        self._output.counters.demotions_dropped += not is_done
        if is_done:
            tier_state.remember((entry.key, entry.group), now_s, is_present=True)
        if entry.is_staged:
            self._host.unstage(entry, Change.EVICTED)
            return
        if is_late:
            self._host.unstuck(entry)
        if self._host.stages_only:
            self._note_in_tier(entry, tier_state, is_done=is_done)
        elif is_done and tier_state.rules.persists:
            for slower in self._tiers.all[tier_state.number + 1 :]:
                queue = self.queues[slower.name]
                if entry in queue.queued and not self._publishes(slower, queue):
                    del queue.queued[entry]
                    self._host.write_becomes(entry, slower.name, CLOSED)
                    self._relay(entry, tier_state.name, slower.name)
        self._host.write_becomes(entry, tier_state.name, UNDECIDED if is_fault else CLOSED)
        self._host.unpin(entry)

    def _note_in_tier(self, entry: HostEntry, tier_state: TierState, *, is_done: bool) -> None:
        """Record that a tier has a passing object, unless the copy may be bad: a tier does not overwrite a bad copy."""
        if is_done and not tier_state.is_suspect((entry.key, entry.group)):
            entry.is_in_tier = True
            keeper = self._tiers.by_name.get(entry.kept_by)
            if tier_state.rules.persists and (keeper is None or tier_state.number < keeper.number):
                entry.kept_by = tier_state.name

    def can_wait(self, entry: HostEntry) -> None:
        """Check again whether this passing object's queued writes may wait, after a transfer or put of it ended."""
        self._can_wait[entry.group].pop(entry, None)
        if entry.pending and not (entry.pins or entry.awaited):
            self._can_wait[entry.group][entry] = None

    def relay_missed(self, entry: HostEntry) -> None:
        """Queue relays of a passing object that leaves, from the tier that keeps it to slower tiers that missed it."""
        if entry.kept_by and not (entry.pins or entry.pending):
            for slower in self._tiers.all[self._tiers.by_name[entry.kept_by].number + 1 :]:
                if slower.name not in entry.writes:
                    self._relay(entry, entry.kept_by, slower.name)

    def _publishes(self, tier_state: TierState, queue: WriteQueue) -> bool:
        """Return whether objects stay in the queue of `tier_state`, and so in host memory, instead of being relayed.

        Relays begin when the queue is empty, so a relayed object could arrive after objects that were stored later.
        """
        is_short = PUBLISHED_PART * len(queue.queued) <= sum(self._host.slots)
        return self._limits.publishes and tier_state.rules.is_remote and is_short

    def _relay(self, entry: HostEntry, source: str, tier: str) -> None:
        """Queue a relay of an object from `source` to `tier`, unless host memory still has to write it to `tier`."""
        queue, current = self.queues[tier], self._host.entry(entry.key, entry.group)
        if current is not None and current.writes.get(tier) in UNWRITTEN:
            return
        queue.relays.pop((entry.key, entry.group), None)
        queue.relays[entry.key, entry.group] = entry, source
        if len(queue.relays) > RELAYS_MAX:
            queue.relays.popitem(last=False)
            self._output.counters.relays_dropped += 1

    # ---- slots -----------------------------------------------------------------------------------------------------

    def slot_for_store(self, group: int, wanted: int) -> int | None:
        """Take a slot of `group`, or return None.

        Under write-back, if no slot is free, the next victims are written, so that up to `wanted` slots become free.
        """
        slot = self._host.take_slot(group)
        if slot is None and (self._relay_one(group) if self._host.stages_only else self._write_victims(group, wanted)):
            slot = self._host.take_slot(group)  # an object that is LEAVING no longer protects its parents
        return slot

    def slot_for_load(self, group: int, wanted: int) -> int | None:
        """Take a slot of `group`, or return None. Except under write-back, a pending write may be dropped for it."""
        slot = self._host.take_slot(group, is_read=True)
        if slot is not None:
            return slot
        if self._host.stages_only:
            is_free = self._host.has_share(group, is_read=True) and self._relay_one(group)
            return self._host.take_slot(group, is_read=True) if is_free else None
        slot = self.slot_for_store(group, wanted)
        if slot is None and self._limits.write_policy is not WritePolicy.BACK:
            entry = self._host.oldest_pending(group)
            if entry is not None:
                self._drop(entry)
                slot = self._host.take_slot(group)
        return slot

    def _relay_one(self, group: int) -> bool:
        """Free the slot of an object whose queued writes can wait. Return whether there was one."""
        waiting = self._can_wait[group]
        while waiting:
            entry = next(iter(waiting))
            del waiting[entry]
            if not (entry.pins or entry.awaited or self._owes_faster(entry)):  # else its next transfer adds it again
                self._relay_later(entry)
                return True
        return False

    def _owes_faster(self, entry: HostEntry) -> bool:
        """Return whether a tier faster than the one that keeps an object of a put has yet to get it.

        No relay would bring it there, because relays go only to slower tiers.
        """
        keeper = self._tiers.by_name.get(entry.kept_by)
        if keeper is None or entry.origin != HOST:
            return False
        return any(entry.writes.get(faster.name) is QUEUED for faster in self._tiers.all[: keeper.number])

    def _relay_later(self, entry: HostEntry) -> None:
        """Remove a passing object from the queues. Slower tiers get it from the tier that keeps it."""
        keeper = self._tiers.by_name.get(entry.kept_by)
        for tier, state in list(entry.writes.items()):
            if state is QUEUED:
                del self.queues[tier].queued[entry]
                self._host.write_becomes(entry, tier, CLOSED)
                if keeper is not None and keeper.number < self._tiers.by_name[tier].number:
                    self._relay(entry, keeper.name, tier)
                else:
                    self._output.counters.relays_dropped += 1

    def _write_victims(self, group: int, wanted: int) -> bool:
        """Queue writes under write-back until `wanted` victims are leaving, or as many as the tiers can write.

        Returns:
            Whether more objects are leaving than before.
        """
        if self._limits.write_policy is not WritePolicy.BACK:
            return False
        before = self._host.leaving[group]
        size_bytes = self._host.object_bytes[group]
        limit = min((it.limit_for(DEMOTE, size_bytes) + it.late[DEMOTE] for it in self._tiers.all), default=0)
        while self._host.leaving[group] < min(wanted, limit):
            entry = self._host.oldest_pending(group)
            if entry is None:
                break
            self._host.leave(entry)
            self._queue(entry)
        return self._host.leaving[group] > before

    def _queue(self, entry: HostEntry) -> None:
        for tier, state in entry.writes.items():
            if state is PENDING:
                self._host.write_becomes(entry, tier, QUEUED)
                self.queues[tier].queued[entry] = None

    def _drop(self, entry: HostEntry) -> None:
        self._output.counters.demotions_dropped += entry.pending
        for tier, state in entry.writes.items():
            if state is QUEUED:
                del self.queues[tier].queued[entry]
                self._host.write_becomes(entry, tier, CLOSED)

    def check(self, writing: set[tuple[HostEntry, str]]) -> None:
        """Assert that each write is where its state says. `writing` holds the writes in flight from host memory.

        Raises:
            AssertionError: a write is elsewhere, which is a bug in the core.
        """
        entries = [entry for entries in self._host.entries for entry in entries.values()]
        for name, queue in self.queues.items():
            queued = {entry for entry in entries if entry.writes.get(name) is QUEUED}
            assert queued == set(queue.queued), "a queued write is lost, or its object is not in host memory"
            assert all(entry.residency in READABLE for entry in queued), "an object that is not readable is queued"
            began = {entry for entry in entries if entry.writes.get(name) is WRITING}
            assert began == {entry for entry, tier in writing if tier == name}, "a write has no demotion in flight"
            assert all(
                entry.writes.get(name) not in UNWRITTEN for entry in entries if (entry.key, entry.group) in queue.relays
            ), "an object is relayed and written"
            assert len(queue.relays) <= RELAYS_MAX, "too many objects wait to be relayed"
        waiting = {entry for waiting in self._can_wait for entry in waiting}
        assert waiting <= {entry for entry in entries if entry.pending}, "an object that has left is kept"
        if self._host.stages_only:
            idle = {entry for entry in entries if entry.pending and not (entry.pins or entry.awaited)}
            assert {entry for entry in idle if not self._owes_faster(entry)} <= waiting, (
                "an object that can leave its slot is not listed"
            )
