"""What a copier needs of a device: queues of copies that run in order, each at its own pace, and events between them.

`device.cuda` is a GPU. `kvtier.testing.streams` is a twin in threads, whose queues can be held up on purpose, so that
everything above this line is tested, races too, where there is no GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.device.pieces import Pieces


class Event(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """Whether everything before it has ended. Never blocks."""
        ...

    def hold(self) -> None:
        """Let what the calling thread gives the device from now on run after it. On a GPU this does not block."""
        ...


class Crossing(NamedTuple):
    """Bytes that cross the bus in one piece."""

    payload: memoryview
    address: int
    """In the device's memory."""


class Stream(Protocol):
    """A queue of a device. Its methods return before the work is done; one thread at a time calls them."""

    def to_device(self, crossings: Sequence[Crossing]) -> None:
        """Copy each payload to its address."""
        ...

    def to_host(self, crossings: Sequence[Crossing]) -> None:
        """Copy to each payload from its address."""
        ...

    def copy(self, pieces: Pieces) -> None:
        """Copy rows of (source, target, bytes) between addresses of the device."""
        ...

    def wait(self, event: Event) -> None:
        """Let what comes after run after `event`, which may belong to another queue."""
        ...

    def record(self) -> Event:
        """An event behind everything so far."""
        ...

    def settle(self) -> None:
        """Wait until everything so far has ended; for the case that something failed."""
        ...


class Streams(Protocol):
    """One device."""

    def stream(self) -> Stream:
        """A new queue."""
        ...

    def stage(self, size_bytes: int, stream: Stream) -> int:
        """Address of so much memory of the device, aligned to 256 bytes, first used by `stream`. Kept for ever."""
        ...

    def now(self) -> Event:
        """An event behind all that the calling thread has given the device so far."""
        ...
