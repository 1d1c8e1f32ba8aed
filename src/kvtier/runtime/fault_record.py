"""What a session knows of its own health, and of its tiers', for people and probes: why something does not work.

The holder of the session's lock writes it, and any thread reads it without the lock, so that a health check never
waits.
"""

import re
from typing import NamedTuple

from kvtier.core.cache import Cache
from kvtier.errors import KvError
from kvtier.runtime.executor import Completion
from kvtier.types import Direction, Probe, TierNotice, Transfer, Way

DETAIL_CHARACTERS = 500
"""A longer text of an error is cut."""

_LOGIN = re.compile(r"\A(?:[^/\s:@]*:.*@|[^/\s]*@)", re.DOTALL)
"""A user name and password behind the ``://`` of a URL, in the text of another package's error."""

# Each search ends after a bounded number of characters or consumes what it has read: time grows with the text only.
_SECRET = re.compile(
    r"((?:passw(?:or)?d|passphrase|(?<![a-z])pass|secret(?:_?access)?(?:_?key)?)['\"]? ?[=:])(?! ?\(hidden\)).*"
    r"|((?:pass|secret|token|credential|auth|api.?key)[A-Za-z_-]{0,20}['\"]? ?"
    r"(?:= ?|: ?(?:(?:basic|bearer) +|(?=['\"]|\S{5,64}?[\d+=~])))|(?:basic|bearer) +(?=\S{5,64}?[\d+=~]))"
    r"(?:\"[^\"]*\"|'[^']*'|\S+)",
    re.DOTALL | re.IGNORECASE,
)
"""All after ``password=``, and a value after ``token=``. After ``token:`` a reason may follow: it is in plain words."""


def described(error: BaseException) -> str:
    """The text of an error for people, with its type unless it is kvtier's; cut, and without what may be a secret."""
    text = str(error) if isinstance(error, KvError) else f"{type(error).__name__}: {error}"
    head, *urls = text.split("://")
    text = "://".join([head, *(_LOGIN.sub("(hidden)@", url) for url in urls)])
    return _SECRET.sub(r"\1\2(hidden)", text)[:DETAIL_CHARACTERS]


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
        self._faults: dict[tuple[str, Way], str] = {}
        """The last fault of each way of each tier."""
        self._notices: dict[tuple[str, Way], str] = {}
        """The last change of each way of each tier."""

    def failed(self, error: BaseException) -> None:
        """An internal error has shut the session down."""
        self.failure = f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]

    def changed(self, notice: TierNotice) -> str:
        """A tier has stopped or resumed; returns what the log says of it, with the last error of that way."""
        way = notice.tier, notice.way
        self._notices[way] = notice.detail
        fault = "" if notice.is_up or notice.is_late else self._faults.get(way)
        return f"{notice.detail}; the last error: {fault}" if fault else notice.detail

    def faulted(self, completion: Completion) -> None:
        """A tier has failed a command."""
        command = completion.command
        if isinstance(command, Transfer | Probe):
            is_write = isinstance(command, Transfer) and command.direction is Direction.DEMOTE
            self._faults[command.tier, "write" if is_write else "read"] = completion.detail[:DETAIL_CHARACTERS]

    def tiers(self, cache: Cache) -> dict[str, TierFaults]:
        """The state of each tier, fastest first."""
        return {name: self._of(cache, name) for name in cache.tier_names}

    def _of(self, cache: Cache, name: str) -> TierFaults:
        ways: dict[Way, bool] = {"read": cache.is_up(name), "write": cache.is_up(name, Direction.DEMOTE)}
        down: list[tuple[str, Way]] = [(name, way) for way, is_up in ways.items() if not is_up]
        reasons = [self._notices.get(way, "it has not opened yet") for way in down]
        reasons += [self._faults[way] for way in down if way in self._faults]
        return TierFaults(ways["read"], ways["write"], "; ".join(dict.fromkeys(reasons)))
