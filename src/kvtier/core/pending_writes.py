"""What lower tiers are owed: which copies from the engine they should have, and when, by the write policy."""

from kvtier.core.counters import Counters
from kvtier.core.host import HostMemory
from kvtier.core.limits import Limits, WritePolicy
from kvtier.core.records import HostEntry
from kvtier.core.residency import READY
from kvtier.core.tier_state import TierStates
from kvtier.types import Link


class PendingWrites:
    """Who is owed what. A debt keeps its object in host memory until it is paid or forgotten."""

    def __init__(self, host: HostMemory, tiers: TierStates, limits: Limits, counters: Counters) -> None:
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._counters = counters

    def use(self, entry: HostEntry, now_s: float, session: str | None) -> None:
        """A request of `session` uses the object; with the selective policy this may make demotions due."""
        self._host.touch(entry, session)
        if entry.is_fresh and entry.uses == self._limits.selective_uses and entry.residency is READY:
            self.mark_pending(entry, now_s)

    def mark_pending(self, entry: HostEntry, now_s: float) -> None:
        """A copy from the engine: should lower tiers have it, and is it time?"""
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
        """Queue every demotion that is owed."""
        for entry in self._host.pending_objects():
            self._queue(entry)

    def slot_for_store(self, group: int, wanted: int) -> int | None:
        """A slot of `group`, of which `wanted` could be used; None when there is none now."""
        slot = self._host.take_slot(group)
        if slot is None and self._let_leave(group, wanted):
            slot = self._host.take_slot(group)  # whoever leaves no longer shields its parents
        return slot

    def slot_for_load(self, group: int, wanted: int) -> int | None:
        """The same for a load, which does not wait for a demotion but with write-back: the demotion is forgotten."""
        slot = self.slot_for_store(group, wanted)
        if slot is None and self._limits.write_policy is not WritePolicy.BACK:
            entry = self._host.oldest_pending(group)
            if entry is not None:
                self._forget(entry)
                slot = self._host.take_slot(group)
        return slot

    def _let_leave(self, group: int, wanted: int) -> bool:
        """Write-back: victims go to their tiers first, as many as are `wanted` and as may be on their way at once.

        Returns:
            Whether one more is leaving.
        """
        if self._limits.write_policy is not WritePolicy.BACK:
            return False
        before = self._host.leaving[group]
        size_bytes = self._host.object_bytes[group]
        most = min((it.most(Link.DEMOTE, size_bytes) + it.late[Link.DEMOTE] for it in self._tiers), default=0)
        while self._host.leaving[group] < min(wanted, most):
            entry = self._host.oldest_pending(group)
            if entry is None:
                break
            self._host.leave(entry)
            self._queue(entry)
        return self._host.leaving[group] > before

    def drop_next(self, tier: str) -> None:
        """`tier` takes no writes: the first demotion in its queue will not be made."""
        entry, _ = self._tiers[tier].queue.popitem(last=False)
        self._counters.demotions_dropped += 1
        self._host.mark_written(entry, tier)

    def _queue(self, entry: HostEntry) -> None:
        for tier in sorted(entry.pending - entry.queued):
            entry.queued |= {tier}
            self._tiers[tier].queue[entry] = None

    def _forget(self, entry: HostEntry) -> None:
        self._counters.demotions_dropped += len(entry.pending)
        for tier in sorted(entry.pending):
            self._tiers[tier].queue.pop(entry, None)
            self._host.mark_written(entry, tier)
