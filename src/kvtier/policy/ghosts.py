"""How often names that left had been used, and when last: eight bytes each, in a table of fixed size."""

import numpy as np

_MARK_BITS = 20
_TIME_BITS = 40
_TIME_MASK = (1 << _TIME_BITS) - 1
_USES_BITS = 4
USES_MAX = (1 << _USES_BITS) - 1
"""More uses than that count as that."""


class Ghosts:
    """A table with one place for each remainder of a mark; who comes later takes the place.

    A name is known by its mark, a 64-bit hash. Two names may be taken for one another, once in 2^20 at the same place;
    that costs a bad guess, nothing else.

    Args:
        places: how many names can be remembered; rounded up to a power of two.
    """

    def __init__(self, places: int) -> None:
        # Not an array of its own: this one's memory is zero without being written, which takes long when it is large.
        self._table = np.zeros(1 << max(0, places - 1).bit_length(), np.uint64).data
        self._mask = len(self._table) - 1

    def __len__(self) -> int:
        return len(self._table)

    def remember(self, mark: int, uses: int, time: int) -> None:
        """A name left after so many uses, the last of them at `time`."""
        uses = min(uses, USES_MAX)
        check = mark >> 64 - _MARK_BITS << _TIME_BITS
        self._table[mark & self._mask] = (check | time & _TIME_MASK) << _USES_BITS | uses

    def find(self, mark: int) -> tuple[int, int]:
        """Uses of the name before it left, and the time of the last; zeros if it is not remembered."""
        item = self._table[mark & self._mask]
        if not item or item >> _TIME_BITS + _USES_BITS != mark >> 64 - _MARK_BITS:
            return 0, 0
        return item & USES_MAX, item >> _USES_BITS & _TIME_MASK
