"""The interface of a copier."""

from typing import Protocol

from kvtier.types import RequestId


class Fence(Protocol):
    """A copy that was started. Copiers that copy at once return None instead."""


class Copier(Protocol):
    """Moves the bytes of one chunk of one group. Called from mover threads, several at once for different slots.

    `payload` is the slot's payload: a writable, page-aligned view of `GroupLayout.payload_bytes` bytes, of which each
    layer fills its own part and padding stays as it is. `blocks` is an address that only the copier understands.
    Errors are exceptions of any kind; the mover turns them into a failed transfer.
    """

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying engine blocks into `payload`; None when the copy is complete on return."""
        ...

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying `payload` into engine blocks; None when the copy is complete on return."""
        ...

    def done(self, fence: Fence) -> bool:
        """Whether the copy behind `fence` is complete. Never blocks."""
        ...
