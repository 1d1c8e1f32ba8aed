"""Who may enter a place. Flash wears, and most of what is written once is never read."""

from collections import OrderedDict

from kvtier.errors import ConfigError
from kvtier.policy.base import Held

MEMORY_COUNT_DEFAULT = 1 << 17
"""Names that `SecondSight` remembers unless told otherwise: about 20 MB of host memory."""


class AdmitAll:
    """Everything may enter."""

    def admit(self, held: Held, place: str) -> bool:  # noqa: ARG002  the interface's arguments
        """Always True."""
        return True


class SecondSight:
    """A name may enter a place the second time it is offered there, so that what is seen once is never written.

    Args:
        memory_count: how many (name, place) pairs are remembered; the one offered longest ago is forgotten first.

    Raises:
        ConfigError: `memory_count` is below 1.
    """

    def __init__(self, memory_count: int = MEMORY_COUNT_DEFAULT) -> None:
        if memory_count < 1:
            raise ConfigError(f"admission memory_count must be at least 1, got {memory_count}")
        self._memory_count = memory_count
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # in the order of the last offer

    def __len__(self) -> int:
        return len(self._seen)

    def admit(self, held: Held, place: str) -> bool:
        """Whether `held.name` was offered to `place` before, as far as is remembered."""
        offer = (place, held.name)
        was_seen = offer in self._seen
        self._seen[offer] = None
        self._seen.move_to_end(offer)
        if len(self._seen) > self._memory_count:
            self._seen.popitem(last=False)
        return was_seen
