"""The codec that changes nothing. A frame of it is built and opened in place, so that no byte is copied."""


class Raw:
    """Bytes as they are."""

    name: str = "raw"
    id: int = 0

    def bound(self, raw_bytes: int) -> int:
        """Exactly `raw_bytes`."""
        return raw_bytes

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """Copy `raw` to the front of `into`."""
        into[: len(raw)] = raw
        return len(raw)

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Copy `stored` to `into`.

        Raises:
            ValueError: they differ in length.
        """
        if len(stored) != len(into):
            raise ValueError(f"{len(stored)} stored bytes cannot fill {len(into)}")
        into[:] = stored
