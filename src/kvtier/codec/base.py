"""The interfaces of codecs. Only kvtier's own codecs may be lossy, because each defines a class of engines."""

from typing import Protocol

from kvtier.layout import Cut, Element


class Codec(Protocol):
    """Encodes sections independently of each other. A codec is stateless and thread-safe.

    The constructor takes no arguments. One instance encodes, and another decodes each new section to verify it.
    """

    name: str
    id: int
    """Number of the codec in stored frames. It is never reused for another codec. 0 is raw."""

    is_exact: bool
    """Whether decoding restores every byte of every section. A codec is refused unless this is True."""

    def bound(self, raw_bytes: int) -> int:
        """Return the maximum number of bytes that `encode` requires for a section of `raw_bytes` bytes."""
        ...

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        """Encode `raw` into the front of `into` and return the number of bytes used.

        Args:
            raw: a section of whole elements. It is read-only, and need not be aligned in memory.
            into: `bound(len(raw))` bytes.
            element: type of the section's numbers.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        """Decode `stored` so that it fills `into` exactly.

        Args:
            stored: the bytes that `encode` wrote, or damaged bytes. They may be unaligned in memory.
            into: memory for the section.
            element: type of the section's numbers.

        Raises:
            ValueError: `stored` is invalid or does not decode to the length of `into`.
        """
        ...


class LossyCodec(Protocol):
    """Encodes sections of keys and values to fewer bytes, and restores numbers near the original ones.

    Only engines whose class (`store.loss`) is the codec's name use it, so no name of an exact object leads to its
    bytes. A codec is stateless and thread-safe.
    """

    name: str
    id: int
    is_exact: bool
    """Always False."""

    def encode(self, raw: memoryview, into: memoryview, cut: Cut, *, is_first: bool) -> int:
        """Encode `raw` into the front of `into` and return the number of bytes used.

        Args:
            raw: a section. It is read-only, and need not be aligned in memory.
            into: at least `len(raw)` bytes.
            cut: description of the section, with its axes.
            is_first: whether the section begins with the prompt's first token. Some tokens there stay exact.

        Returns:
            Number of bytes used. It is `len(raw)` if some numbers are very large or not finite, or if the section
            would not shrink. Then `into` is undefined.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview, cut: Cut) -> None:
        """Decode `stored` so that it fills `into` exactly.

        Raises:
            ValueError: `stored` is invalid or belongs to another section.
        """
        ...

    def error(self, raw: memoryview, stored: memoryview, decoded: memoryview, cut: Cut) -> str:
        """Explain how `decoded` exceeds the error that `stored` allows. Return an empty string if it does not.

        Args:
            raw: the section.
            stored: the bytes that `encode` wrote.
            decoded: the bytes that `decode` restored from `stored`.
            cut: description of the section, with its axes.
        """
        ...
