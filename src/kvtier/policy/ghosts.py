"""How often names that left had been used: four bytes each, in a table of fixed size."""

from array import array

_MARK_BITS = 28
_USES_MAX = 15


class Ghosts:
    """A table with one place for each remainder of a mark; who comes later takes the place.

    A name is known by its mark, a 64-bit hash. Two names may be taken for one another, once in 2^28 at the same place;
    that costs a bad guess, nothing else.

    Args:
        places: how many names can be remembered; rounded up to a power of two.
    """

    def __init__(self, places: int) -> None:
        self._table = array("I", bytes(4 << max(0, places - 1).bit_length()))

    def __len__(self) -> int:
        return len(self._table)

    def remember(self, mark: int, uses: int) -> None:
        """A name left after so many uses."""
        self._table[mark % len(self._table)] = (mark >> 64 - _MARK_BITS) << 4 | min(uses, _USES_MAX)

    def uses(self, mark: int) -> int:
        """Uses of the name before it left; 0 if it is not remembered."""
        item = self._table[mark % len(self._table)]
        return item & _USES_MAX if item >> 4 == mark >> 64 - _MARK_BITS else 0
