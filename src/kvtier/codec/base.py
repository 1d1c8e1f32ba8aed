"""The interface of a codec."""

from typing import Protocol

from kvtier.layout import Element


class Codec(Protocol):
    """Encodes sections independently of each other. Stateless and thread-safe.

    A class without constructor arguments: one instance writes, and another one proves each section that was written.
    """

    name: str
    id: int
    """The number in a stored frame; never reused for another codec. 0 is raw."""

    is_exact: bool
    """True: decoding restores every byte of every section. Others are refused."""

    def bound(self, raw_bytes: int) -> int:
        """The most bytes that `encode` may need for a section of `raw_bytes`."""
        ...

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        """Encode `raw` into the front of `into`; returns the bytes used.

        Args:
            raw: a section, a multiple of the element's bytes. It is read-only, and need not be aligned in memory.
            into: `bound(len(raw))` bytes.
            element: type of the section's numbers.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        """Decode `stored` so that it fills `into` exactly.

        Args:
            stored: what `encode` wrote, or damaged bytes. Not aligned in memory.
            into: the section.
            element: as for `encode`.

        Raises:
            ValueError: `stored` is invalid or does not have the length of `into`.
        """
        ...
