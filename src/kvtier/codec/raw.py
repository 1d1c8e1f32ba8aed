"""The codec that leaves bytes as they are. Its frames are packed and unpacked in place, without a copy."""

from kvtier.layout import Element


class Raw:
    """Leaves bytes unchanged."""

    name: str = "raw"
    id: int = 0
    is_exact: bool = True

    def bound(self, raw_bytes: int) -> int:
        """Return `raw_bytes`."""
        return raw_bytes

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:  # noqa: ARG002 - part of the interface
        """Copy `raw` to the front of `into`."""
        into[: len(raw)] = raw
        return len(raw)

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:  # noqa: ARG002 - part of the interface
        """Copy `stored` to `into`.

        Raises:
            ValueError: `stored` and `into` differ in length.
        """
        if len(stored) != len(into):
            raise ValueError(f"{len(stored)} stored bytes cannot fill {len(into)} bytes")
        into[:] = stored
