"""Uses of evicted names and the time of the last one, in a table of fixed size with eight bytes a name."""

import numpy as np

_HASH_BITS = 20
_TIME_BITS = 40
_TIME_MASK = (1 << _TIME_BITS) - 1
_USES_BITS = 4
USES_MAX = (1 << _USES_BITS) - 1
"""The count saturates here."""


class Ghosts:
    """A direct-mapped table: a newer name replaces the older one in its slot.

    Names are identified by a 64-bit hash. Two names in a slot are confused once in 2^20; that costs a wrong guess only.

    Args:
        places: number of slots; rounded up to a power of two.
    """

    def __init__(self, places: int) -> None:
        # `array` would write its memory at once, which is slow for large tables; numpy's zeros are lazy.
        self._table = np.zeros(1 << max(0, places - 1).bit_length(), np.uint64).data
        self._mask = len(self._table) - 1

    def __len__(self) -> int:
        return len(self._table)

    def remember(self, name_hash: int, uses: int, time: int) -> None:
        """Remember an evicted name with its number of uses and the time of the last."""
        uses = min(uses, USES_MAX)
        check = name_hash >> 64 - _HASH_BITS << _TIME_BITS
        self._table[name_hash & self._mask] = (check | time & _TIME_MASK) << _USES_BITS | uses

    def find(self, name_hash: int) -> tuple[int, int]:
        """(uses, time of the last use) of an evicted name; zeros if unknown."""
        item = self._table[name_hash & self._mask]
        if not item or item >> _TIME_BITS + _USES_BITS != name_hash >> 64 - _HASH_BITS:
            return 0, 0
        return item & USES_MAX, item >> _USES_BITS & _TIME_MASK
