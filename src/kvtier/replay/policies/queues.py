"""Policies that are queues: FIFO, LRU, SIEVE, S3-FIFO, ARC, MQ, and admission on second sight.

Sources: SIEVE, Zhang et al., NSDI 2024; S3-FIFO, Yang et al., SOSP 2023; ARC, Megiddo and Modha, FAST 2003; MQ, Zhou et
al., USENIX ATC 2001. FIFO, LRU, SIEVE and ARC hit the same blocks as libCacheSim's, to the block.
"""

from collections import OrderedDict, deque

from kvtier.replay.policies.base import Policy

Queue = OrderedDict[int, None]


class PlainFifo(Policy):
    """Who came first leaves first."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._queue: deque[int] = deque()

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        if self.held >= self.capacity:
            self._leave(self._queue.popleft())
        self._queue.append(block)
        self._enter(block)
        return True


class PlainLru(Policy):
    """Least recently used first; the order of accesses alone makes it leaf first."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._queue: Queue = OrderedDict()

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """To the end."""
        self._queue.move_to_end(block)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        if self.held >= self.capacity:
            self._leave(self._queue.popitem(last=False)[0])
        self._queue[block] = None
        self._enter(block)
        return True


class SecondSightLru(PlainLru):
    """LRU that keeps a block only when it was computed before, however long ago."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._seen = bytearray(block_count)

    def insert(self, block: int, place: int) -> bool:
        """Kept from the second time on."""
        if not self._seen[block]:
            self._seen[block] = 1
            return False
        return super().insert(block, place)


class Ttl(PlainLru):
    """LRU of which a block leaves at the latest so many seconds after its last use."""

    def __init__(self, capacity: int, block_count: int, ttl_s: float) -> None:
        super().__init__(capacity, block_count)
        self._ttl_s = ttl_s
        self._used_s: dict[int, float] = {}
        self._now_s = 0.0

    def begin(self, request: int, time_s: float, blocks: "object") -> None:  # noqa: ARG002  the interface's arguments
        """What was used too long ago leaves."""
        self.request, self._now_s = request, time_s
        while self._queue:
            block = next(iter(self._queue))
            if time_s - self._used_s[block] <= self._ttl_s:
                return
            del self._queue[block]
            self._leave(block)

    def touch(self, block: int, place: int) -> None:
        """Its time begins again."""
        super().touch(block, place)
        self._used_s[block] = self._now_s

    def insert(self, block: int, place: int) -> bool:
        """Always kept."""
        self._used_s[block] = self._now_s
        return super().insert(block, place)


class Sieve(Policy):
    """FIFO whose hand spares, once, what was used since it last came by."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._was_used = bytearray(block_count)
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._head = self._tail = self._hand = -1

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Marked."""
        self._was_used[block] = 1

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        if self.held >= self.capacity:
            self._evict()
        self._was_used[block] = 0
        self._older[block], self._newer[block] = self._head, -1
        if self._head >= 0:
            self._newer[self._head] = block
        self._head = block
        if self._tail < 0:
            self._tail = block
        self._enter(block)
        return True

    def _evict(self) -> None:
        block = self._hand if self._hand >= 0 else self._tail
        while self._was_used[block]:
            self._was_used[block] = 0
            block = self._newer[block]
            if block < 0:
                block = self._tail
        newer, older = self._newer.pop(block), self._older.pop(block)
        self._hand = newer
        if newer < 0:
            self._head = older
        else:
            self._older[newer] = older
        if older < 0:
            self._tail = newer
        else:
            self._newer[older] = newer
        self._leave(block)


class S3Fifo(Policy):
    """A small queue for newcomers, a main one for what was used twice in it, and a memory of who left the small one."""

    SMALL_SHARE = 0.1
    USES_MAX = 3
    USES_TO_STAY = 2

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: Queue = OrderedDict()
        self._uses = bytearray(block_count)
        self._small_max = int(capacity * self.SMALL_SHARE)
        self._main_max = capacity - self._small_max
        self._ghosts_max = int(capacity * (1 - self.SMALL_SHARE))

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Counted, up to three."""
        if self._uses[block] < self.USES_MAX:
            self._uses[block] += 1

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept; in the main queue if it left the small one not long ago."""
        if self.held >= self.capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._uses[block] = 0
        self._enter(block)
        return True

    def _evict(self) -> None:
        if len(self._small) >= max(1, self._small_max) or not self._main:
            while self._small:
                block = self._small.popleft()
                if self._uses[block] < self.USES_TO_STAY:
                    self._ghosts[block] = None
                    if len(self._ghosts) > self._ghosts_max:
                        self._ghosts.popitem(last=False)
                    self._leave(block)
                    return
                self._uses[block] = 0
                self._main.append(block)
                if len(self._main) > self._main_max:
                    break
        while True:
            block = self._main.popleft()
            if not self._uses[block]:
                self._leave(block)
                return
            self._uses[block] -= 1
            self._main.append(block)


class Arc(Policy):
    """Recency and frequency side by side; hits on what left either of them move the border."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._once: Queue = OrderedDict()
        self._often: Queue = OrderedDict()
        self._once_left: Queue = OrderedDict()
        self._often_left: Queue = OrderedDict()
        self._border = 0.0

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """It is used often from now on."""
        if block in self._once:
            del self._once[block]
            self._often[block] = None
        else:
            self._often.move_to_end(block)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        capacity, once_left, often_left = self.capacity, self._once_left, self._often_left
        is_full = self.held >= capacity
        if block in once_left:
            self._border = min(capacity, self._border + max(1, len(often_left) / len(once_left)))
            del once_left[block]
            if is_full:
                self._replace(is_often=False)
            self._often[block] = None
        elif block in often_left:
            self._border = max(0, self._border - max(1, len(once_left) / len(often_left)))
            del often_left[block]
            if is_full:
                self._replace(is_often=True)
            self._often[block] = None
        else:
            self._make_room(is_full=is_full)
            self._once[block] = None
        self._enter(block)
        return True

    def _make_room(self, *, is_full: bool) -> None:
        once = len(self._once) + len(self._once_left)
        if once == self.capacity:
            if len(self._once) == self.capacity:
                self._leave(self._once.popitem(last=False)[0])
                return
            self._once_left.popitem(last=False)
        elif once + len(self._often) + len(self._often_left) >= 2 * self.capacity:
            self._often_left.popitem(last=False)
        if is_full:
            self._replace(is_often=False)

    def _replace(self, *, is_often: bool) -> None:
        once = len(self._once)
        if once and (once > self._border or (is_often and once == self._border)):
            block = self._once.popitem(last=False)[0]
            self._once_left[block] = None
        else:
            block = self._often.popitem(last=False)[0]
            self._often_left[block] = None
        self._leave(block)


class Mq(Policy):
    """Queues by the logarithm of uses; what is not used for `life` cache sizes of accesses goes one queue down.

    Made for caches below another cache. Uses are remembered for four cache sizes of blocks that left.
    """

    QUEUES = 8
    GHOSTS = 4

    def __init__(self, capacity: int, block_count: int, life: float = 2.0) -> None:
        super().__init__(capacity, block_count)
        self._queues: list[Queue] = [OrderedDict() for _ in range(self.QUEUES)]
        self._level: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._expires: dict[int, int] = {}
        self._life = int(life * capacity)
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._accesses = 0
        self._quiet_until = 0
        """Nothing expires before so many accesses."""

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Counted; to the end of the queue for so many uses."""
        self._accesses += 1
        del self._queues[self._level[block]][block]
        self._put(block, self._uses[block] + 1)
        self._lower()

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept, with the uses that are remembered of it."""
        self._accesses += 1
        if self.held >= self.capacity:
            queue = next(it for it in self._queues if it)
            victim = queue.popitem(last=False)[0]
            self._ghosts[victim] = self._uses.pop(victim)
            del self._level[victim], self._expires[victim]
            if len(self._ghosts) > self.GHOSTS * self.capacity:
                self._ghosts.popitem(last=False)
            self._leave(victim)
        self._put(block, self._ghosts.pop(block, 0) + 1)
        self._enter(block)
        self._lower()
        return True

    def _put(self, block: int, uses: int) -> None:
        level = min(uses.bit_length() - 1, self.QUEUES - 1)
        self._uses[block], self._level[block] = uses, level
        self._queues[level][block] = None
        self._expires[block] = self._accesses + self._life

    def _lower(self) -> None:
        if self._accesses <= self._quiet_until:
            return
        for level in range(1, self.QUEUES):
            queue = self._queues[level]
            if queue:
                block = next(iter(queue))
                if self._expires[block] < self._accesses:
                    del queue[block]
                    self._level[block] = level - 1
                    self._queues[level - 1][block] = None
                    self._expires[block] = self._accesses + self._life
        # What comes later expires later than all that is here.
        heads = [next(iter(queue)) for queue in self._queues[1:] if queue]
        self._quiet_until = min([self._expires[block] for block in heads] or [self._accesses + self._life])
