"""Pending writes: which lower tiers should get each object, and when, by the write policy.

An object from the engine goes to every tier. Once a faster tier that persists has it, it is relayed to slower tiers:
its writes to them no longer hold host memory. An object that a load brought from a slower tier fills the faster ones
at its second use.
"""

from collections import OrderedDict

from kvtier.core.counters import Counters
from kvtier.core.host_memory import HostMemory
from kvtier.core.limits import Limits, WritePolicy
from kvtier.core.records import HOST, HostEntry, Item
from kvtier.core.residency import READY
from kvtier.core.tier_state import TierState, TierStates
from kvtier.types import Link

FILL_USES = 2
"""Uses after which an object from a slower tier enters the faster ones."""

PROMOTED_MAX = 1 << 16
"""Objects from slower tiers whose first use is remembered after they have left host memory."""


class PendingWrites:
    """Marks and queues pending writes. An object stays in host memory until its writes end, are dropped or relayed."""

    def __init__(self, host: HostMemory, tiers: TierStates, limits: Limits, counters: Counters) -> None:
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._counters = counters
        self._first_uses = limits.selective_uses if limits.write_policy is WritePolicy.SELECTIVE else 1
        self._names = frozenset(tiers.by_name)
        self._promoted: OrderedDict[Item, None] = OrderedDict()

    def use(self, entry: HostEntry, now_s: float, session: str | None) -> None:
        """Count a use by a request of `session`, which may make writes pending."""
        self._host.touch(entry, session)
        if entry.residency is READY:
            self.mark_pending(entry, now_s)

    def promoted(self, entry: HostEntry, now_s: float) -> None:
        """A load brought the object from `entry.origin`; its second promotion counts as a second use."""
        source = self._tiers[entry.origin]
        entry.decided = frozenset([it.name for it in self._tiers.all[source.number :]])
        if not source.number:
            return
        item = (entry.key, entry.group)
        if item in self._promoted:
            del self._promoted[item]
            entry.uses = max(entry.uses, FILL_USES)
            self.mark_pending(entry, now_s)
        else:
            self._promoted[item] = None
            if len(self._promoted) > PROMOTED_MAX:
                self._promoted.popitem(last=False)

    def mark_pending(self, entry: HostEntry, now_s: float) -> None:
        """Decide for each tier that its object has been used often enough for, and make writes pending."""
        decided = entry.decided
        if len(decided) == len(self._names) or entry.uses < (
            self._first_uses if entry.origin == HOST else max(FILL_USES, self._first_uses)
        ):
            return
        entry.decided = self._names
        item = (entry.key, entry.group)
        names = [
            it.name
            for it in self._tiers.all
            if it.name not in decided and it.can_write(now_s) and not it.remembered(item, now_s)
        ]
        if names:
            tiers = self._names if len(names) == len(self._names) else frozenset(names)
            if self._host.has_staging:
                for name in names:
                    self._tiers[name].relays.pop(item, None)
            self._host.mark_pending(entry, tiers)
            if self._limits.write_policy is not WritePolicy.BACK:
                self._queue(entry)

    def flush(self) -> None:
        """Queue every pending write."""
        for entry in self._host.pending_objects():
            self._queue(entry)

    def written(self, entry: HostEntry, tier_state: TierState, now_s: float) -> None:
        """`tier_state` holds the object now: its waiting writes to slower tiers are relayed if the tier persists."""
        if tier_state.rules.is_remote:
            tier_state.remember((entry.key, entry.group), now_s, is_present=True)
        if tier_state is self._tiers.all[-1] or not tier_state.rules.persists:
            return
        for slower in self._tiers.all[tier_state.number + 1 :]:
            if entry in slower.queue:
                del slower.queue[entry]
                self._counters.relays_dropped += slower.relay(entry, tier_state.name)
                self._host.mark_written(entry, slower.name)

    def slot_for_store(self, group: int, wanted: int) -> int | None:
        """A free slot of `group`, or None. The caller could use `wanted` of them."""
        slot = self._host.take_slot(group)
        if slot is None and self._write_victims(group, wanted):
            slot = self._host.take_slot(group)  # an object that is LEAVING no longer protects its parents
        return slot

    def slot_for_load(self, group: int, wanted: int) -> int | None:
        """A free slot of `group`, or None. Except under write-back, a pending write is dropped if that frees a slot."""
        slot = self.slot_for_store(group, wanted)
        if slot is None and self._limits.write_policy is not WritePolicy.BACK:
            entry = self._host.oldest_pending(group)
            if entry is not None:
                self._drop(entry)
                slot = self._host.take_slot(group)
        return slot

    def _write_victims(self, group: int, wanted: int) -> bool:
        """Write-back: start the writes of the next victims, as many as are `wanted` and the tiers accept at once.

        Returns:
            Whether there are more of them than before.
        """
        if self._limits.write_policy is not WritePolicy.BACK:
            return False
        before = self._host.leaving[group]
        size_bytes = self._host.object_bytes[group]
        limit = min((it.limit_for(Link.DEMOTE, size_bytes) + it.late[Link.DEMOTE] for it in self._tiers), default=0)
        while self._host.leaving[group] < min(wanted, limit):
            entry = self._host.oldest_pending(group)
            if entry is None:
                break
            self._host.leave(entry)
            self._queue(entry)
        return self._host.leaving[group] > before

    def drop_next(self, tier: str) -> None:
        """Drop the first write in the queue of `tier`, which cannot be written."""
        entry, _ = self._tiers[tier].queue.popitem(last=False)
        self._counters.demotions_dropped += 1
        self._host.mark_written(entry, tier)

    def _queue(self, entry: HostEntry) -> None:
        for tier in sorted(entry.pending - entry.queued):
            entry.queued |= {tier}
            self._tiers[tier].queue[entry] = None

    def _drop(self, entry: HostEntry) -> None:
        self._counters.demotions_dropped += len(entry.pending)
        for tier in sorted(entry.pending):
            self._tiers[tier].queue.pop(entry, None)
            self._host.mark_written(entry, tier)
