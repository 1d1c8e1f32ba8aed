"""The interface of a codec."""

from typing import Protocol


class Codec(Protocol):
    """Encodes sections independently of each other. Stateless and thread-safe."""

    name: str
    id: int
    """The number in a stored frame; never reused for another codec. 0 is raw."""

    def bound(self, raw_bytes: int) -> int:
        """The most bytes that `encode` may need for a section of `raw_bytes`."""
        ...

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """Encode `raw` into the front of `into`; returns the bytes used."""
        ...

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Decode `stored` so that it fills `into` exactly.

        Raises:
            ValueError: `stored` is invalid or does not have the length of `into`.
        """
        ...
