"""The interfaces of policies, and the event that they are told."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.types import NextTurn


class Held(NamedTuple):
    """One object that a place holds, as a policy sees it."""

    name: bytes
    """The key in host memory, the object name in a lower tier; unique within the evictor."""
    parent: bytes | None = None
    """Name of the preceding object of the prefix; None at the start, for groups without history, or if unknown."""
    session: str | None = None
    """The conversation that uses the object, where the engine knows it."""


class Evictor(Protocol):
    """Chooses who leaves. Told of every change; one instance belongs to one owner and needs no lock."""

    def added(self, held: Held) -> None:
        """`held` entered. Adding a name twice counts as a touch."""
        ...

    def touched(self, held: Held) -> None:
        """`held` was used. A name that was never added is ignored."""
        ...

    def removed(self, name: bytes) -> None:
        """`name` left, for whatever reason. A name that was never added is ignored."""
        ...

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Who should leave next, never one that `is_pinned`. Does not remove it.

        Returns:
            None when all are pinned, or stay for the sake of one that is (a parent for its child).
        """
        ...


@runtime_checkable
class Hinted(Protocol):
    """An evictor that can make use of what an engine or a client knows of the future. A wrong hint costs hits only."""

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """A response to `session` is over, and `next_turn` is who goes on from what it has used so far.

        None takes back what was said before. A session that nobody knows is ignored.
        """
        ...
