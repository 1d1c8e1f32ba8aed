"""First in, first out: the smallest policy, and a baseline for the others."""

from collections import OrderedDict
from collections.abc import Callable

from kvtier.policy.base import Use


class Fifo:
    """Evicts in order of arrival. Unlike `Lru`, it does not protect parents."""

    def __init__(self) -> None:
        # Ordered by arrival. A plain dict is ordered too, but finding its first item slows down after removals.
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def added(self, use: Use) -> None:
        """Record the use that added a name. A name that is present keeps its place."""
        self._names.setdefault(use.name, None)

    def touched(self, use: Use) -> None:
        """Do nothing, because uses do not change the order."""

    def removed(self, name: bytes) -> None:
        """Record that `name` was removed."""
        self._names.pop(name, None)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the first unpinned name; None when all are pinned."""
        return next((name for name in self._names if not is_pinned(name)), None)
