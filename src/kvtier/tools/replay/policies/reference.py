"""Policies for comparison, which are not shipped: LRU, S3-FIFO, ARC and upper bounds.

Sources: S3-FIFO, Yang et al., SOSP 2023; ARC, Megiddo and Modha, FAST 2003. LRU and ARC hit the same blocks as in
libCacheSim. Belady's MIN may bypass a block here, that is, not cache it. Among blocks with the same next use, it evicts
the one deepest in its prompt. It keeps whole prefixes, because an ancestor's next use is never later than a
descendant's. So no policy that keeps whole prefixes has more hits.
"""

from collections import OrderedDict, deque
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.tools.replay.policies.base import Policy
from kvtier.tools.trace.arrays import TraceArrays

Queue = OrderedDict[int, None]
NEVER = np.iinfo(np.int32).max
_REQUESTS = 1 << 12
"""Number of requests in one vectorized step."""


class PlainLru(Policy):
    """LRU. A prompt's last block is accessed first, so a prefix outlives its continuations."""

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._queue: Queue = OrderedDict()

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Move the block to the end."""
        self._queue.move_to_end(block)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block."""
        if self.held >= self.capacity:
            self._evict(self._queue.popitem(last=False)[0])
        self._queue[block] = None
        self._enter(block)
        return True


class S3Fifo(Policy):
    """S3-FIFO: a small FIFO queue for new blocks, a main one for reused blocks, and a list of ghosts.

    Ghosts are the blocks most recently evicted from the small queue.
    """

    SMALL_SHARE = 0.1
    USES_MAX = 3
    USES_TO_STAY = 2

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: Queue = OrderedDict()
        self._uses = bytearray(trace.block_count)
        self._small_max = int(capacity * self.SMALL_SHARE)
        self._main_max = capacity - self._small_max
        self._ghosts_max = int(capacity * (1 - self.SMALL_SHARE))

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Count the use, up to `USES_MAX` uses."""
        if self._uses[block] < self.USES_MAX:
            self._uses[block] += 1

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block. A ghost goes to the main queue."""
        if self.held >= self.capacity:
            self._make_room()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._uses[block] = 0
        self._enter(block)
        return True

    def _make_room(self) -> None:
        if len(self._small) >= max(1, self._small_max) or not self._main:
            while self._small:
                block = self._small.popleft()
                if self._uses[block] < self.USES_TO_STAY:
                    self._ghosts[block] = None
                    if len(self._ghosts) > self._ghosts_max:
                        self._ghosts.popitem(last=False)
                    self._evict(block)
                    return
                self._uses[block] = 0
                self._main.append(block)
                if len(self._main) > self._main_max:
                    break
        while True:
            block = self._main.popleft()
            if not self._uses[block]:
                self._evict(block)
                return
            self._uses[block] -= 1
            self._main.append(block)


class Arc(Policy):
    """ARC: two LRU queues, for recency and frequency. Ghosts are the blocks most recently evicted from each.

    An access to a ghost moves the boundary between the queues.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._recent: Queue = OrderedDict()
        self._frequent: Queue = OrderedDict()
        self._recent_ghosts: Queue = OrderedDict()
        self._frequent_ghosts: Queue = OrderedDict()
        self._recent_target = 0.0

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Move the block to the end of the frequent queue."""
        if block in self._recent:
            del self._recent[block]
            self._frequent[block] = None
        else:
            self._frequent.move_to_end(block)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block. A ghost goes to the frequent queue."""
        recent_ghosts, frequent_ghosts, is_full = self._recent_ghosts, self._frequent_ghosts, self.held >= self.capacity
        is_recent = block in recent_ghosts
        if is_recent or block in frequent_ghosts:
            own, other = (recent_ghosts, frequent_ghosts) if is_recent else (frequent_ghosts, recent_ghosts)
            step = max(1, len(other) / len(own))
            target = self._recent_target + (step if is_recent else -step)
            self._recent_target = min(self.capacity, max(0, target))
            del own[block]
            if is_full:
                self._replace(is_frequent=not is_recent)
            self._frequent[block] = None
        else:
            self._make_room(is_full=is_full)
            self._recent[block] = None
        self._enter(block)
        return True

    def _make_room(self, *, is_full: bool) -> None:
        recent = len(self._recent) + len(self._recent_ghosts)
        if recent == self.capacity:
            if len(self._recent) == self.capacity:
                self._evict(self._recent.popitem(last=False)[0])
                return
            self._recent_ghosts.popitem(last=False)
        elif recent + len(self._frequent) + len(self._frequent_ghosts) >= 2 * self.capacity:
            self._frequent_ghosts.popitem(last=False)
        if is_full:
            self._replace(is_frequent=False)

    def _replace(self, *, is_frequent: bool) -> None:
        recent = len(self._recent)
        if recent and (recent > self._recent_target or (is_frequent and recent == self._recent_target)):
            block = self._recent.popitem(last=False)[0]
            self._recent_ghosts[block] = None
        else:
            block = self._frequent.popitem(last=False)[0]
            self._frequent_ghosts[block] = None
        self._evict(block)


class Infinite(Policy):
    """A cache that never evicts."""

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block."""
        self._enter(block)
        return True


class _Clairvoyant(Policy):
    """A policy that knows the next use of each block of a request.

    Args:
        capacity: blocks that fit.
        trace: the trace. The next uses take four bytes per access.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._next_uses = next_uses(trace)
        self._starts = trace.starts
        self._uses: list[int] = []

    def begin(self, request: int) -> None:
        """Look up the next uses of the request's blocks."""
        self._uses = self._next_uses[int(self._starts[request]) : int(self._starts[request + 1])].tolist()


class OracleLru(_Clairvoyant, PlainLru):
    """LRU that never caches a block after its last use."""

    def touch(self, block: int, place: int) -> None:
        """Move the block to the end, or drop it after its last use."""
        if self._uses[place] != NEVER:
            super().touch(block, place)
        else:
            del self._queue[block]
            self._drop(block)

    def insert(self, block: int, place: int) -> bool:
        """Cache the block if the trace uses it again."""
        return self._uses[place] != NEVER and super().insert(block, place)


class Min(_Clairvoyant):
    """Belady's MIN with bypass: evicts or bypasses the block with the farthest next use.

    Among blocks with the same next use, it takes the one deepest in its prompt.
    """

    def __init__(self, capacity: int, trace: TraceArrays) -> None:
        super().__init__(capacity, trace)
        self._keys: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def touch(self, block: int, place: int) -> None:
        """Update the next use of the block, or drop the block if there is none."""
        following = self._uses[place]
        if following == NEVER:
            del self._keys[block]
            self._drop(block)
        else:
            self._put(block, following, place)

    def insert(self, block: int, place: int) -> bool:
        """Cache the block if it is used again, and there is room or a cached block whose next use is later."""
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
    """Return how many tokens hit in an infinite cache. The result is that of a replay of `Infinite`, but vectorized."""
    first = np.full(trace.block_count, NEVER, np.int32)
    starts, hit = trace.starts, 0
    for begin in range(0, len(trace), _REQUESTS):
        end = min(begin + _REQUESTS, len(trace))
        edges = np.asarray(starts[begin : end + 1])
        blocks = np.asarray(trace.ids[int(edges[0]) : int(edges[-1])])
        owner = np.repeat(np.arange(begin, end, dtype=np.int32), np.diff(edges))
        # The last assignment to an index wins, so reversed order keeps the first use.
        first[blocks[::-1]] = np.minimum(first[blocks[::-1]], owner[::-1])
        new = np.flatnonzero(first[blocks] == owner) + edges[0]
        place = np.searchsorted(new, edges[:-1])
        run = np.minimum(np.append(new, edges[-1])[place], edges[1:]) - edges[:-1]
        hit += int(np.minimum(run * trace.block_tokens, trace.input_tokens[begin:end]).sum())
    return hit


def next_uses(trace: TraceArrays) -> npt.NDArray[np.int32]:
    """Return for each access the next request with the same block, or NEVER if there is none."""
    following = np.full(trace.block_count, NEVER, np.int32)
    out = np.empty(len(trace.ids), np.int32)
    starts = trace.starts.tolist() if len(trace) < 1 << 20 else trace.starts
    for request in range(len(trace) - 1, -1, -1):
        part = slice(int(starts[request]), int(starts[request + 1]))
        blocks = trace.ids[part]
        out[part] = following[blocks]
        following[blocks] = request
    return out
