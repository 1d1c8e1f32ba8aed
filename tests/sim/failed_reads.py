"""An independent record of failed reads, which knows the copies that the core must or may leave alone."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tests.sim.world import Item, Violation

from kvtier.core import tier_state
from kvtier.types import Direction, Outcome, Transfer

Which = tuple[str, Item]
"""(tier, object)."""


@dataclass(slots=True)
class FailedReads:
    """Reads of one copy that failed or were late since the last one that was answered in time."""

    count: int = 0
    until_s: float = 0.0
    """Until this time the core surely leaves the object alone."""
    may_last: bool = True
    """Whether the core may leave it alone."""
    is_replaced: bool = False


class ReadRecord:
    """The failed reads of all copies.

    Args:
        doubt: called with each copy that a late read has made doubtful.
    """

    def __init__(self, doubt: Callable[[Which], None] = lambda _which: None) -> None:
        self._doubt = doubt
        self._failed: dict[Which, FailedReads] = {}
        self._stuck: set[int] = set()
        """Promotions whose lateness the core must have noticed."""

    def begins(self, promote: Transfer, now_s: float) -> None:
        """Check that a promotion reads no copy that must be left alone."""
        failed = self._failed.get(_which(promote))
        if failed is not None and now_s < failed.until_s:
            raise Violation(f"promote {promote.id}, of an object whose last {failed.count} reads have failed")

    def is_surely_read(self, tier: str, item: Item) -> bool:
        """Whether the core asks the tier for the object, if it reads the tier."""
        failed = self._failed.get((tier, item))
        return failed is None or not failed.may_last

    def is_late(self, promote: Transfer, now_s: float, lateness_s: float) -> None:
        """Note that a promotion is past its deadline, which the core notices within `lateness_s`."""
        which = _which(promote)
        self._doubt(which)
        self._failed.setdefault(which, FailedReads()).may_last = True
        if now_s > promote.deadline_s + lateness_s and promote.id not in self._stuck:
            self._failed_at(promote, now_s)
            self._stuck.add(promote.id)
            self._failed[which].until_s = inf

    def written(self, which: Which, *, is_doubted: bool) -> None:
        """Note that a demotion was done. Only the first one ends the pause, unless the copy is doubted again."""
        failed = self._failed.get(which)
        if failed is not None:
            failed.may_last = failed.is_replaced or is_doubted
            failed.until_s = failed.until_s if failed.is_replaced else 0.0
            failed.is_replaced = True

    def read(self, promote: Transfer, outcome: Outcome, now_s: float, *, is_fault: bool) -> None:
        """Note that a promotion has ended."""
        which, is_stuck = _which(promote), promote.id in self._stuck
        is_cancelled = outcome is Outcome.CANCELLED
        if is_fault:
            self._failed_at(promote, now_s)
        elif is_stuck and not is_cancelled:
            failed = self._failed[which]
            failed.until_s = now_s + tier_state.PAUSE_S_MIN if failed.until_s == inf else failed.until_s
        elif now_s >= promote.deadline_s and which in self._failed and not is_stuck:
            self._failed[which].until_s = 0.0  # the core may not have noticed its lateness, and forgets the failures
        elif is_stuck or not is_cancelled:
            self._failed.pop(which, None)

    def is_back(self, tier: str) -> None:
        """Note that reads of a tier succeed again, which ends some pauses."""
        for (of_tier, _), failed in self._failed.items():
            if of_tier == tier and failed.until_s != inf:
                failed.until_s = 0.0

    def _failed_at(self, promote: Transfer, now_s: float) -> None:
        """Note that a read has failed or is late."""
        which = _which(promote)
        self._doubt(which)
        is_stuck = promote.id in self._stuck
        failed = self._failed.setdefault(which, FailedReads())
        failed.count += not is_stuck
        failed.may_last = True
        if not is_stuck or failed.until_s == inf:
            pause_s = tier_state.PAUSE_S_MIN * 2 ** (failed.count - 1)
            failed.until_s = now_s + min(pause_s, tier_state.PAUSE_S_MAX)


def _which(transfer: Transfer) -> Which:
    return transfer.tier, (transfer.key, transfer.group)


def is_read(transfer: Transfer) -> bool:
    """Whether a transfer reads a tier."""
    return transfer.direction is Direction.PROMOTE
