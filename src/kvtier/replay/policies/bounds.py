"""Upper bounds: an infinite cache, and policies that know the future.

Belady's MIN, with bypass and ties to the deeper block, keeps whole prefixes, because an ancestor's next use is never
later than its descendant's. So no policy that keeps whole prefixes hits more.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.replay.policies.base import Policy
from kvtier.replay.policies.queues import PlainLru
from kvtier.trace.arrays import TraceArrays

NEVER = np.iinfo(np.int32).max
_REQUESTS = 1 << 12
"""Requests of one vectorized step."""


class Infinite(Policy):
    """Never evicts."""

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block."""
        self._enter(block)
        return True


class OracleLru(PlainLru):
    """LRU that never caches a block after its last use.

    Args:
        capacity: blocks that fit.
        trace: the trace, for the last use of each block.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._last_use = last_uses(trace).tolist()

    def touch(self, block: int, place: int) -> None:
        """Move the block to the end, or drop it after its last use."""
        if self._last_use[block] > self.request:
            super().touch(block, place)
        else:
            del self._queue[block]
            self._drop(block)

    def insert(self, block: int, place: int) -> bool:
        """Cache the block if it is used again."""
        return self._last_use[block] > self.request and super().insert(block, place)


class Min(Policy):
    """Belady's MIN with bypass: evicts or bypasses the block of the farthest next use; of equals, the deeper one.

    Args:
        capacity: blocks that fit.
        trace: the trace. The next use of each access takes four bytes.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._next_uses = next_uses(trace)
        self._starts = trace.starts
        self._uses: list[int] = []
        self._keys: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def begin(self, request: int, time_s: float, blocks: Sequence[int]) -> None:
        """Look up the next uses of the request's blocks."""
        super().begin(request, time_s, blocks)
        self._uses = self._next_uses[int(self._starts[request]) : int(self._starts[request + 1])].tolist()

    def touch(self, block: int, place: int) -> None:
        """Update the next use; drop the block if there is none."""
        following = self._uses[place]
        if following == NEVER:
            del self._keys[block]
            self._drop(block)
        else:
            self._put(block, following, place)

    def insert(self, block: int, place: int) -> bool:
        """Cache the block if it is used before some cached block."""
        following = self._uses[place]
        if following == NEVER:
            return False
        if self.held >= self.capacity:
            later, deeper, victim = self._worst()
            if (later, deeper) >= (-following, -place):
                return False
            heappop(self._heap)
            del self._keys[victim]
            self._evict(victim)
        self._put(block, following, place)
        self._enter(block)
        return True

    def _put(self, block: int, following: int, place: int) -> None:
        self._keys[block] = (-following, -place)
        heappush(self._heap, (-following, -place, block))

    def _worst(self) -> tuple[int, int, int]:
        while True:
            later, deeper, block = self._heap[0]
            if self._keys.get(block) == (later, deeper):
                return later, deeper, block
            heappop(self._heap)


def infinite_hit_tokens(trace: TraceArrays) -> int:
    """Hit tokens of an infinite cache: equal to a replay of `Infinite`, vectorized."""
    first = np.full(trace.block_count, NEVER, np.int32)
    starts, hit = trace.starts, 0
    for begin in range(0, len(trace), _REQUESTS):
        end = min(begin + _REQUESTS, len(trace))
        edges = np.asarray(starts[begin : end + 1])
        blocks = np.asarray(trace.ids[int(edges[0]) : int(edges[-1])])
        owner = np.repeat(np.arange(begin, end, dtype=np.int32), np.diff(edges))
        # Of repeated indices the last assignment stays, so reversed order keeps the first use.
        first[blocks[::-1]] = np.minimum(first[blocks[::-1]], owner[::-1])
        new = np.flatnonzero(first[blocks] == owner) + edges[0]
        place = np.searchsorted(new, edges[:-1])
        stop = np.append(new, edges[-1])[place]
        run = np.minimum(stop, edges[1:]) - edges[:-1]
        hit += int(np.minimum(run * trace.block_tokens, trace.input_tokens[begin:end]).sum())
    return hit


def last_uses(trace: TraceArrays) -> npt.NDArray[np.int32]:
    """For each block, the last request that has it."""
    last = np.full(trace.block_count, -1, np.int32)
    starts = trace.starts
    for first in range(0, len(trace), _REQUESTS):
        end = min(first + _REQUESTS, len(trace))
        owner = np.repeat(np.arange(first, end, dtype=np.int32), np.diff(starts[first : end + 1]))
        # Of repeated indices the last assignment stays.
        last[trace.ids[int(starts[first]) : int(starts[end])]] = owner
    return last


def next_uses(trace: TraceArrays) -> npt.NDArray[np.int32]:
    """For each access, the next request that has its block; NEVER if there is none."""
    following = np.full(trace.block_count, NEVER, np.int32)
    out = np.empty(len(trace.ids), np.int32)
    starts = trace.starts.tolist() if len(trace) < 1 << 20 else trace.starts
    for request in range(len(trace) - 1, -1, -1):
        part = slice(int(starts[request]), int(starts[request + 1]))
        blocks = trace.ids[part]
        out[part] = following[blocks]
        following[blocks] = request
    return out
