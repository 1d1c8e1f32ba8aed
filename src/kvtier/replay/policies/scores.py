"""Policies that give each block a score: LFU, LFU with decay, LRU-2, GDSF by seconds saved.

Sources: LRU-2, O'Neil et al., SIGMOD 1993; GDSF, Cherkasova, HP Labs 1998. LFU hits the same blocks as libCacheSim's.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from kvtier.replay.policies.base import Policy

Score = tuple[float, int]


class Lfu(Policy):
    """Least often used since it came; of equals, the one used longest ago."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}
        self._least = 1

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Counted."""
        uses = self._uses[block]
        equals = self._by_uses[uses]
        del equals[block]
        if not equals:
            del self._by_uses[uses]
            if self._least == uses:
                self._least = uses + 1
        self._put(block, uses + 1)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        if self.held >= self.capacity:
            equals = self._by_uses[self._least]
            victim = equals.popitem(last=False)[0]
            if not equals:
                del self._by_uses[self._least]
            del self._uses[victim]
            self._leave(victim)
        self._least = 1
        self._put(block, 1)
        self._enter(block)
        return True

    def _put(self, block: int, uses: int) -> None:
        self._uses[block] = uses
        self._by_uses.setdefault(uses, OrderedDict())[block] = None


class Scored(Policy):
    """The least score leaves first. Scores only grow while a block is here, so a heap is put right when it is read."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._scores: dict[int, Score] = {}
        self._heap: list[tuple[Score, int]] = []
        self._accesses = 0

    def score(self, block: int, place: int) -> float:
        """The score of `block`, which is used now."""
        raise NotImplementedError

    def left(self, block: int, score: float) -> None:
        """`block` was evicted."""

    def touch(self, block: int, place: int) -> None:
        """Scored anew."""
        self._accesses += 1
        self._scores[block] = (self.score(block, place), self._accesses)

    def insert(self, block: int, place: int) -> bool:
        """Always kept."""
        if self.held >= self.capacity:
            self._evict()
        self._accesses += 1
        score = self._scores[block] = (self.score(block, place), self._accesses)
        heappush(self._heap, (score, block))
        self._enter(block)
        return True

    def _evict(self) -> None:
        heap, scores = self._heap, self._scores
        while True:
            score, block = heap[0]
            now = scores[block]
            if now == score:
                heappop(heap)
                del scores[block]
                self._leave(block)
                self.left(block, score[0])
                return
            heapreplace(heap, (now, block))


class DecayingLfu(Scored):
    """Uses count half after `half_life` requests; they are remembered when a block leaves."""

    def __init__(self, capacity: int, block_count: int, half_life: float = 1000.0) -> None:
        super().__init__(capacity, block_count)
        self._half_life = half_life
        # The logarithm of a sum of powers of two, one for each use, that grow with time: no need to lower old ones.
        self._weights: dict[int, float] = {}

    def score(self, block: int, place: int) -> float:  # noqa: ARG002  the interface's arguments
        """The logarithm of its weight."""
        now = self.request / self._half_life
        weight = self._weights.get(block)
        if weight is None:
            weight = now
        else:
            most = max(weight, now)
            weight = most + math.log2(2.0 ** (weight - most) + 2.0 ** (now - most))
        self._weights[block] = weight
        return weight


class Lru2(Scored):
    """Who was used before last longest ago leaves first, and before all who was used once; uses are remembered."""

    def __init__(self, capacity: int, block_count: int) -> None:
        super().__init__(capacity, block_count)
        self._last: dict[int, int] = {}

    def score(self, block: int, place: int) -> float:  # noqa: ARG002  the interface's arguments
        """The time of the use before this one."""
        before = self._last.get(block, -1)
        self._last[block] = self._accesses
        return before


class Gdsf(Scored):
    """Uses times the seconds that a hit saves, on top of the score of who left last, so that old ones age."""

    def __init__(self, capacity: int, block_count: int, seconds_saved: Callable[[int], float]) -> None:
        super().__init__(capacity, block_count)
        self._seconds_saved = seconds_saved
        self._uses: dict[int, int] = {}
        self._age = 0.0

    def score(self, block: int, place: int) -> float:
        """Its age and worth."""
        uses = self._uses[block] = self._uses.get(block, 0) + 1
        return self._age + uses * self._seconds_saved(place)

    def left(self, block: int, score: float) -> None:
        """Its score is everybody's age."""
        self._age = score
        del self._uses[block]
