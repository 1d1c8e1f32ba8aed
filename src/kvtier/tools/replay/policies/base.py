"""The interface between a replay and a policy. A policy is a cache of equal-sized blocks that sees every access."""

from collections.abc import Sequence

from kvtier.tools.trace.arrays import TraceArrays


class Policy:
    """A cache of `capacity` blocks. Subclasses define `touch` and `insert`, or `access`.

    Args:
        capacity: number of blocks that fit.
        trace: the trace.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        self.capacity = capacity
        self.present = bytearray(trace.block_count)
        """1 for each cached block, 0 for every other block."""
        self.held = 0
        """Number of cached blocks."""
        self.evictions = 0

    def begin(self, request: int) -> None:
        """Start a request. The replay counts the request's hits after this call and before `access`."""

    def access(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Access the request's blocks from the last to the first. Return the numbers of hits and of inserts."""
        present, touch, insert = self.present, self.touch, self.insert
        hits = inserted = 0
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            if present[block]:
                hits += 1
                touch(block, place)
            elif insert(block, place):
                inserted += 1
        return hits, inserted

    def touch(self, block: int, place: int) -> None:
        """Record the use of a cached block. `place` is its index in the prompt."""

    def insert(self, block: int, place: int) -> bool:
        """Offer a block that missed. Return whether the policy has cached it."""
        raise NotImplementedError

    def _enter(self, block: int) -> None:
        self.present[block] = 1
        self.held += 1

    def _evict(self, block: int) -> None:
        self._drop(block)
        self.evictions += 1

    def _drop(self, block: int) -> None:
        """Remove a block without counting an eviction."""
        self.present[block] = 0
        self.held -= 1
