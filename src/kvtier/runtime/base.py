"""The session: all that an engine adapter holds. Plain values in, plain values out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.load_budget import LoadBudget
from kvtier.types import Event, Lookup, NextTurn, Place, Prefix, RequestId


@dataclass(frozen=True, slots=True)
class Closed:
    """How a session ended."""

    flushed: bool
    """Whether everything that lower tiers were still owed when closing began has reached them.

    What a tier had refused before, because it was full or left alone, is no longer owed.
    """
    lost: int
    """Objects that were owed and have not reached them when the deadline passed."""


class Session(Protocol):
    """Lookup, store and load, without ever blocking but in `poll` and `close`, which have deadlines."""

    def lookup(self, request: RequestId, prefix: Prefix, *, resident_tokens: int = 0, wait_s: float = 0.0) -> Lookup:
        """How many leading tokens can be given. No effect but to ask lower tiers; repeat it while it says PROBING.

        What it offers does without the leading `resident_tokens`, which the engine holds. It waits up to `wait_s`
        seconds for the answers of lower tiers.
        """
        ...

    def load(
        self,
        request: RequestId,
        prefix: Prefix,
        tokens: int,
        places: Sequence[Place],
        *,
        resident_tokens: int = 0,
        budget: LoadBudget | None = None,
        session: str | None = None,
    ) -> None:
        """Bring the leading `tokens` to `places`; exactly one `LoadDone` follows, whatever happens.

        `resident_tokens` are leading tokens that the engine holds already, for every group: nothing is asked for them.
        A load that no longer pays by its `budget` ends early, with what has come.

        Raises:
            BadCallError: the arguments do not fit; then no `LoadDone` follows.
        """
        ...

    def store(self, request: RequestId, prefix: Prefix, places: Sequence[Place], session: str | None = None) -> None:
        """Keep the chunks at `places`; exactly one `StoreDone` follows. Until then the engine keeps the blocks.

        Raises:
            BadCallError: a place is not in the prefix; then no `StoreDone` follows.
        """
        ...

    def release(self, request: RequestId) -> None:
        """The engine has no further interest in `request`: cancel what has not begun, and end its load and stores."""
        ...

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """Who goes on with `session` after a response; None: nobody knows any more.

        Kept for what evictors learn from it; a wrong word costs hits only.
        """
        ...

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """What has ended since the last call; waits up to `wait_s` seconds for the first."""
        ...

    def close(self, deadline_s: float = 30.0) -> Closed:
        """Flush what was acknowledged, within `deadline_s` seconds, and end all threads. Twice is fine."""
        ...
