"""Interface of a device: streams of copies, and events that order them.

`device.cuda` implements it for a GPU. `tests/thread_streams.py` implements it with threads that tests can pause, so
that races of the code above are tested without a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.device.copy_descriptors import CopyDescriptors


class Event(Protocol):
    """A position in a stream."""

    def query(self) -> bool:
        """Whether all work before it is complete. Never blocks."""
        ...

    def hold(self) -> None:
        """Order later device work of the calling thread behind this event. On a GPU this does not block."""
        ...


class BusCopy(NamedTuple):
    """One transfer over the bus."""

    payload: memoryview
    address: int
    """Address in device memory."""


class Stream(Protocol):
    """Work that a device does in order. Methods return before the work is done. One thread at a time calls them."""

    def to_device(self, copies: Sequence[BusCopy]) -> None:
        """Copy each payload to its address."""
        ...

    def to_host(self, copies: Sequence[BusCopy]) -> None:
        """Copy to each payload from its address."""
        ...

    def copy(self, descriptors: CopyDescriptors) -> None:
        """Copy rows of (source, target, bytes) between addresses of the device."""
        ...

    def wait(self, event: Event) -> None:
        """Order later work of this stream behind `event`, of any stream."""
        ...

    def record(self) -> Event:
        """An event behind all work queued so far."""
        ...

    def settle(self) -> None:
        """Block until all work queued so far is complete. Used after an error."""
        ...


class Streams(Protocol):
    """One device."""

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def stage(self, size_bytes: int, stream: Stream) -> int:
        """Address of `size_bytes` of device memory, aligned to 256 bytes, first used by `stream`. Never freed."""
        ...

    def now(self) -> Event:
        """An event behind all device work that the calling thread has queued."""
        ...
