"""Pending writes: which lower tiers should get each copy from the engine, and when, by the write policy."""

from kvtier.core.counters import Counters
from kvtier.core.host_memory import HostMemory
from kvtier.core.limits import Limits, WritePolicy
from kvtier.core.records import HostEntry
from kvtier.core.residency import READY
from kvtier.core.tier_state import TierStates
from kvtier.types import Link


class PendingWrites:
    """Marks and queues pending writes. An object stays in host memory until its writes end or are dropped."""

    def __init__(self, host: HostMemory, tiers: TierStates, limits: Limits, counters: Counters) -> None:
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._counters = counters

    def use(self, entry: HostEntry, now_s: float, session: str | None) -> None:
        """Count a use by a request of `session`; under the selective policy this may make writes pending."""
        self._host.touch(entry, session)
        if entry.is_fresh and entry.uses == self._limits.selective_uses and entry.residency is READY:
            self.mark_pending(entry, now_s)

    def mark_pending(self, entry: HostEntry, now_s: float) -> None:
        """Make writes pending for a copy from the engine, if the write policy says so."""
        policy = self._limits.write_policy
        if policy is WritePolicy.SELECTIVE and entry.uses < self._limits.selective_uses:
            return
        entry.is_fresh = False
        tiers = frozenset([tier_state.name for tier_state in self._tiers.all if tier_state.can_write(now_s)])
        if tiers:
            self._host.mark_pending(entry, tiers)
            if policy is not WritePolicy.BACK:
                self._queue(entry)

    def flush(self) -> None:
        """Queue every pending write."""
        for entry in self._host.pending_objects():
            self._queue(entry)

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
