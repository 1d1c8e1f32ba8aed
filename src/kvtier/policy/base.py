"""The interfaces of policies, and the event that they receive."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.types import NextTurn


class Held(NamedTuple):
    """One use of an object, as a policy sees it."""

    name: bytes
    """The key in host memory, the object name in a lower tier; unique within the evictor."""
    parent: bytes | None = None
    """Name of the preceding object of the prefix; None at the start, for groups without history, or if unknown."""
    conversation: str | None = None
    """The conversation that uses the object, where the engine knows it."""


class Evictor(Protocol):
    """Chooses victims. It receives every change. An instance has one owner and needs no lock.

    A policy must not evict a parent before its children: without it they are of no use and take up space. The contract
    suite does not check that, because `Fifo`, which is for comparison, ignores parents.
    """

    def added(self, held: Held) -> None:
        """`held` entered. A second call counts as a touch."""
        ...

    def touched(self, held: Held) -> None:
        """`held` was used. Unknown names are ignored."""
        ...

    def removed(self, name: bytes) -> None:
        """`name` was removed, for whatever reason. Unknown names are ignored."""
        ...

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The next victim, never a name that `is_pinned`. Does not remove it.

        Returns:
            None when all names are pinned or protected by a pinned one (a parent by its child).
        """
        ...


@runtime_checkable
class Hinted(Protocol):
    """An evictor that uses hints about the next turn of a conversation. A wrong hint costs hits only."""

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """`next_turn` is the kind of the next turn of `conversation`; None withdraws the last hint.

        Unknown conversations are ignored.
        """
        ...
