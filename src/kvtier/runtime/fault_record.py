"""What a session knows of its own health, and of its tiers', for people and probes: why something does not work.

The holder of the session's lock writes it, and any thread reads it without the lock, so that a health check never
waits.
"""

from typing import NamedTuple

from kvtier.core.cache import Cache
from kvtier.runtime.executor import Completion
from kvtier.types import Direction, Probe, TierNotice, Transfer, Way

DETAIL_CHARACTERS = 500
"""A longer text of an error is cut."""


class TierFaults(NamedTuple):
    """Whether reads and writes of a tier are allowed."""

    reads: bool
    writes: bool
    detail: str
    """Why not, and the tier's last fault; empty when both are allowed."""


class FaultRecord:
    """The internal error of a session, and the last faults of its tiers."""

    def __init__(self) -> None:
        self.failure = ""
        """The internal error after which nothing is stored or loaded; empty without one."""
        self._faults: dict[str, str] = {}
        """The last fault of each tier."""
        self._notices: dict[tuple[str, Way], str] = {}
        """The last change of each way of each tier."""

    def failed(self, error: BaseException) -> None:
        """An internal error has shut the session down."""
        self.failure = f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]

    def changed(self, notice: TierNotice) -> None:
        """A tier has stopped or resumed."""
        self._notices[notice.tier, notice.way] = notice.detail

    def faulted(self, completion: Completion) -> None:
        """A tier has failed a command."""
        if isinstance(completion.command, Transfer | Probe):
            self._faults[completion.command.tier] = completion.detail[:DETAIL_CHARACTERS]

    def tiers(self, cache: Cache) -> dict[str, TierFaults]:
        """The state of each tier, fastest first."""
        return {name: self._of(cache, name) for name in cache.tier_names}

    def _of(self, cache: Cache, name: str) -> TierFaults:
        ways: dict[Way, bool] = {"read": cache.is_up(name), "write": cache.is_up(name, Direction.DEMOTE)}
        reasons = [self._notices.get((name, way), "it has not opened yet") for way, is_up in ways.items() if not is_up]
        if reasons and (fault := self._faults.get(name)):
            reasons.append(fault)
        return TierFaults(ways["read"], ways["write"], "; ".join(dict.fromkeys(reasons)))
