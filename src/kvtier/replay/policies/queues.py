"""Published policies to compare with: LRU, S3-FIFO, ARC.

Sources: S3-FIFO, Yang et al., SOSP 2023; ARC, Megiddo and Modha, FAST 2003. LRU and ARC hit the same blocks as
libCacheSim's.
"""

from collections import OrderedDict, deque

from kvtier.replay.policies.base import Policy
from kvtier.trace.arrays import TraceArrays

Queue = OrderedDict[int, None]


class PlainLru(Policy):
    """LRU. Since a prompt's last block is accessed first, a prefix outlives its continuations."""

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
    """A small FIFO for new blocks, a main FIFO for blocks used twice in it, and ghosts of the small one's victims."""

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
        """Count the use, up to `USES_MAX`."""
        if self._uses[block] < self.USES_MAX:
            self._uses[block] += 1

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Cache the block; a ghost goes to the main queue."""
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
    """Two LRU queues, for recency and frequency; hits on their ghosts move the boundary between them."""

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
        """Cache the block; a ghost goes to the frequent queue."""
        capacity, recent_ghosts, frequent_ghosts = self.capacity, self._recent_ghosts, self._frequent_ghosts
        is_full = self.held >= capacity
        if block in recent_ghosts:
            step = max(1, len(frequent_ghosts) / len(recent_ghosts))
            self._recent_target = min(capacity, self._recent_target + step)
            del recent_ghosts[block]
            if is_full:
                self._replace(is_frequent=False)
            self._frequent[block] = None
        elif block in frequent_ghosts:
            step = max(1, len(recent_ghosts) / len(frequent_ghosts))
            self._recent_target = max(0, self._recent_target - step)
            del frequent_ghosts[block]
            if is_full:
                self._replace(is_frequent=True)
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
