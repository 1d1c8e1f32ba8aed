"""Records the health of a session and its tiers, so that people and health checks can see why something fails.

The holder of the session's lock writes the record. Any thread reads it without the lock, so that a health check never
waits.
"""

from typing import NamedTuple

from kvtier.core.cache import Cache
from kvtier.errors import DETAIL_CHARACTERS, described
from kvtier.runtime.executor import Completion
from kvtier.types import Direction, Probe, TierNotice, Transfer, Way


class TierFaults(NamedTuple):
    """The state of a tier: whether reads and writes are allowed."""

    reads: bool
    writes: bool
    detail: str
    """Why reads or writes are not allowed, with the tier's last fault. Empty if both are allowed."""


class HealthRecord:
    """The internal error of a session, and the last faults of its tiers."""

    def __init__(self) -> None:
        self.failure = ""
        """The internal error that ended all loads and stores; empty if there is none."""
        self._faults: dict[tuple[str, Way], str] = {}
        """The last fault of each tier's reads and writes."""
        self._notices: dict[tuple[str, Way], str] = {}
        """The last change of each tier's reads and writes."""

    def failed(self, error: BaseException) -> None:
        """Record the internal error that shut the session down."""
        self.failure = described(error)

    def changed(self, notice: TierNotice) -> str:
        """Record that a tier's reads or writes have stopped or resumed. Return the log text, with their last error."""
        way = notice.tier, notice.way
        self._notices[way] = notice.detail
        fault = "" if notice.is_up or notice.is_late else self._faults.get(way)
        return f"{notice.detail}; the last error: {fault}" if fault else notice.detail

    def faulted(self, completion: Completion) -> None:
        """Record that a command has failed in its tier."""
        command = completion.command
        if isinstance(command, Transfer | Probe):
            is_write = isinstance(command, Transfer) and command.direction is Direction.DEMOTE
            self._faults[command.tier, "write" if is_write else "read"] = completion.detail[:DETAIL_CHARACTERS]

    def tiers(self, cache: Cache) -> dict[str, TierFaults]:
        """Return the state of each tier, fastest first."""
        return {name: self._of(cache, name) for name in cache.tier_names}

    def _of(self, cache: Cache, name: str) -> TierFaults:
        ways: dict[Way, bool] = {"read": cache.is_up(name), "write": cache.is_up(name, Direction.DEMOTE)}
        down: list[tuple[str, Way]] = [(name, way) for way, is_up in ways.items() if not is_up]
        reasons = [self._notices.get(way, "it has not opened yet") for way in down]
        reasons += [self._faults[way] for way in down if way in self._faults]
        return TierFaults(ways["read"], ways["write"], "; ".join(dict.fromkeys(reasons)))
