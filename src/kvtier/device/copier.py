"""The interface of a copier, which copies chunks between an engine's blocks and host slots."""

from typing import Protocol

from kvtier.types import RequestId


class Fence(Protocol):
    """A copy in progress."""


class Copier(Protocol):
    """Copies one chunk of one KV group. Mover threads call it concurrently for different slots.

    A thread may begin several copies before it asks whether the first is done.

    `payload` is the slot's payload: a writable, page-aligned view of `GroupLayout.payload_bytes` bytes. A copier fills
    each layer's part and leaves padding alone. `blocks` is an address that only the copier interprets. A copier may
    raise any exception, which the mover turns into a failed transfer.
    """

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying engine blocks into `payload`. Return None if the copy is already complete."""
        ...

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying `payload` into engine blocks. Return None if the copy is already complete."""
        ...

    def done(self, fence: Fence) -> bool:
        """Return whether the copy of `fence` is complete. Never block."""
        ...
