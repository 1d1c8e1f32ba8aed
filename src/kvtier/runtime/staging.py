"""Slots for objects on their way between a caller's memory and the tiers."""

from collections.abc import Sequence

SHARE = 0.75
"""Most of a group's slots that reads may take, and most that writes may take. So tiers that hang in one way leave slots
for the other."""


class StagingSlots:
    """Which slots of each group are free. Not thread-safe.

    Args:
        slots: slots of each group.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self._free = [list(range(count)) for count in slots]
        self._most = [max(1, int(count * SHARE)) for count in slots]
        self._reading = [0] * len(slots)
        self._writing = [0] * len(slots)

    def used(self, group: int) -> int:
        """How many slots are taken."""
        return self._reading[group] + self._writing[group]

    def take_for_read(self, group: int) -> int | None:
        """A free slot for a read, or None."""
        return self._take(group, self._reading)

    def take_for_write(self, group: int) -> int | None:
        """A free slot for a write, or None."""
        return self._take(group, self._writing)

    def give_from_read(self, group: int, slot: int) -> None:
        """Return the slot of a read."""
        self._reading[group] -= 1
        self._free[group].append(slot)

    def give_from_write(self, group: int, slot: int) -> None:
        """Return the slot of a write."""
        self._writing[group] -= 1
        self._free[group].append(slot)

    def read_becomes_write(self, group: int) -> bool:
        """Count a slot of a read as one of a write, if writes may take one more."""
        if self._writing[group] >= self._most[group]:
            return False
        self._reading[group] -= 1
        self._writing[group] += 1
        return True

    def _take(self, group: int, taken: list[int]) -> int | None:
        if not self._free[group] or taken[group] >= self._most[group]:
            return None
        taken[group] += 1
        return self._free[group].pop()  # the last one returned, whose memory is in the processor's cache
