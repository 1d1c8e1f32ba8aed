"""Decides when to ask a rank which chunks each tier holds: once per tier, when it is up. The module is pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.types import Outcome, Recall

POLL_S = 0.5
"""Interval between commands while the rank is still reading."""

RETRY_S = 30.0
"""Pause after a failure. It doubles with each further failure."""

ATTEMPTS_MAX = 4
"""After this many failures without new records in between, a tier is not asked again."""


@dataclass(slots=True)
class _TierRecall:
    """The current recall of one tier."""

    number: int = 1
    position: int = 0
    """Number of records that have been taken."""
    furthest: int = 0
    """Largest number of records that an attempt has brought."""
    failures: int = 0
    next_s: float = 0.0
    is_wanted: bool = True
    is_asked: bool = False
    """Whether a command is waiting for its answer."""


class Recalls:
    """The recalls of all tiers whose objects may carry the token ids of their chunks.

    Args:
        tiers: names of these tiers.
        group: index of the KV group.
    """

    def __init__(self, tiers: Iterable[str], group: int) -> None:
        self._group = group
        self._tiers = {name: _TierRecall() for name in tiers}

    def due(self, is_up: Callable[[str], bool], now_s: float) -> list[Recall]:
        """Return the commands to send now. A tier that is not up, or not open yet, is not asked."""
        return [
            self._ask(name)
            for name, it in self._tiers.items()
            if it.is_wanted and not it.is_asked and now_s >= it.next_s and is_up(name)
        ]

    def answered(self, command: Recall, outcome: Outcome, taken: int, now_s: float, *, is_last: bool) -> list[Recall]:
        """Record that a command completed with `taken` records, and return the commands to send next.

        Args:
            command: a command from `due`, or from an earlier call of this method.
            outcome: its outcome.
            taken: number of its records.
            now_s: the time.
            is_last: whether no more records follow.
        """
        it = self._tiers[command.tier]
        it.is_asked = False
        if outcome is not Outcome.DONE:
            it.failures += 1
            it.next_s = now_s + RETRY_S * 2 ** (it.failures - 1)
            it.is_wanted = outcome is Outcome.FAILED and it.failures < ATTEMPTS_MAX
            it.number, it.position = it.number + 1, 0
            return []
        it.position += taken
        if it.position > it.furthest:
            it.furthest, it.failures = it.position, 0
        it.is_wanted = not is_last
        it.next_s = now_s if taken else now_s + POLL_S
        return [self._ask(command.tier)] if taken and not is_last else []

    def _ask(self, tier: str) -> Recall:
        it = self._tiers[tier]
        it.is_asked = True
        return Recall(tier, self._group, it.number, it.position)
