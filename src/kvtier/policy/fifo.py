"""First in, first out: the smallest policy that fits the interface, and a yardstick for the others."""

from collections import OrderedDict
from collections.abc import Callable

from kvtier.policy.base import Held


class Fifo:
    """Who came first leaves first, used or not. Parents are not spared: compare with `Lru` to see what that costs."""

    def __init__(self) -> None:
        # In the order of arrival. (A plain dict keeps it too, but finding its first item slows down as items leave.)
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def added(self, held: Held) -> None:
        """`held` entered; one that is here already keeps its place."""
        self._names.setdefault(held.name, None)

    def touched(self, held: Held) -> None:
        """A use changes nothing."""

    def removed(self, name: bytes) -> None:
        """`name` left."""
        self._names.pop(name, None)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The first arrival that is not pinned; None when all are."""
        return next((name for name in self._names if not is_pinned(name)), None)
