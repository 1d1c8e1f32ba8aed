"""The interface of a session, which is all that an engine adapter calls. It takes and returns plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.load_budget import LoadBudget
from kvtier.types import Event, Lookup, NextTurn, Place, Prefix, RequestId


@dataclass(frozen=True, slots=True)
class Closed:
    """How a session ended."""

    flushed: bool
    """Whether all pending writes reached their tiers. Writes that a tier refused earlier are not pending."""
    lost: int
    """Pending writes that did not reach their tiers before the deadline."""


class Session(Protocol):
    """Lookup, store and load. Only calls with a `wait_s` or `deadline_s` block, and no longer than that."""

    def lookup(self, request: RequestId, prefix: Prefix, *, resident_tokens: int = 0, wait_s: float = 0.0) -> Lookup:
        """How many leading tokens can be loaded. Probes lower tiers; call it again while it returns PROBING.

        Args:
            request: its name.
            prefix: of its prompt.
            resident_tokens: leading tokens that the engine holds; load options start behind them.
            wait_s: how long to wait for the lower tiers' answers.
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
        """Load the leading `tokens` into `places`. Exactly one `LoadDone` follows, also after errors.

        Args:
            request: its name.
            prefix: of its prompt.
            tokens: leading tokens to load.
            places: the engine's blocks of each chunk and group.
            resident_tokens: leading tokens that the engine holds for every group; they are not loaded.
            budget: ends the load early, with the tokens loaded so far, once waiting costs more than computing.
            session: conversation of the request, for eviction.

        Raises:
            BadCallError: the arguments do not fit. No `LoadDone` follows.
        """
        ...

    def store(self, request: RequestId, prefix: Prefix, places: Sequence[Place], session: str | None = None) -> None:
        """Store the chunks at `places`. Exactly one `StoreDone` follows; until then the engine keeps the blocks.

        Raises:
            BadCallError: a place is not in the prefix. No `StoreDone` follows.
        """
        ...

    def release(self, request: RequestId) -> None:
        """The engine is done with `request`: cancel transfers that have not begun, and end its load and stores."""
        ...

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """Declare what continues conversation `session` after a response; None withdraws it.

        Eviction policies use it. A wrong declaration costs hits only.
        """
        ...

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """Events since the last call; waits up to `wait_s` seconds for the first."""
        ...

    def close(self, deadline_s: float = 30.0) -> Closed:
        """Write pending objects to their tiers, within `deadline_s` seconds, and end all threads. Idempotent."""
        ...
