"""The interfaces of policies, and the `Use` of an object that policies receive."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.types import NextTurn


class Use(NamedTuple):
    """One use of an object, as a policy sees it."""

    name: bytes
    """The key in host memory, or the object name in a lower tier. It is unique within the evictor."""
    parent: bytes | None = None
    """Name of the preceding object of the prefix; None at the start, for groups without history, or if unknown."""
    conversation: str | None = None
    """The conversation that uses the object, if the engine knows it."""


class Evictor(Protocol):
    """Chooses victims. It is notified of every change. An instance has one owner and requires no lock.

    A policy must not evict a parent before its children, which are useless without it and take up space. The contract
    suite does not check that, because `Fifo`, a baseline, ignores parents. Names whose parents form a
    cycle, as in a damaged index, must also be evicted.
    """

    def added(self, use: Use) -> None:
        """Record the use that added a name. A second call counts as a touch."""
        ...

    def touched(self, use: Use) -> None:
        """Record a further use. Ignore unknown names."""
        ...

    def removed(self, name: bytes) -> None:
        """Record that `name` was removed, for any reason. Ignore unknown names."""
        ...

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the next victim without removing it; never a pinned name.

        Returns:
            None if every name is pinned or has a pinned descendant.
        """
        ...


@runtime_checkable
class Hinted(Protocol):
    """An evictor that uses hints about the next turn of a conversation. A wrong hint costs only hits."""

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Use `next_turn` as a hint about the next turn of `conversation`; None withdraws the last hint.

        Ignore unknown conversations.
        """
        ...
