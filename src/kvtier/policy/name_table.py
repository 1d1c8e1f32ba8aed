"""A dictionary of names in which no operation takes long, regardless of the number of names."""

from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")
_PARTS = 256


class NameTable(Generic[_T]):
    """Maps names to values, with one dictionary for each last byte of a name.

    Names are usually digests, but need not be. Growing or listing a single dictionary of 10^7 names takes longer than
    a lock may be held. Each of the 256 parts has 39,000 of these names.
    """

    def __init__(self) -> None:
        self._parts: list[dict[bytes, _T]] = [{} for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, name: bytes) -> bool:
        return name in self._parts[name[-1]]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the names, in any order. Other threads may change the table meanwhile: copying a part is atomic."""
        for part in self._parts:
            yield from list(part)

    def values(self) -> Iterator[_T]:
        """Yield the values, in any order. Other threads may change the table meanwhile."""
        for part in self._parts:
            yield from list(part.values())

    def __setitem__(self, name: bytes, value: _T) -> None:
        self._parts[name[-1]][name] = value

    def get(self, name: bytes) -> _T | None:
        """Return the value of `name`; None if it has none."""
        return self._parts[name[-1]].get(name)

    def pop(self, name: bytes) -> _T | None:
        """Remove `name` and return its value; None if it had none."""
        return self._parts[name[-1]].pop(name, None)
