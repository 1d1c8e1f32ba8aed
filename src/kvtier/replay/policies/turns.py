"""Eviction by how far a conversation has come: blocks of late turns come back more often, and sooner, than of first.

The idea is that of "KVCache Cache in the Wild" (USENIX ATC 2025): classes of blocks with a probability of reuse and a
time scale each, measured while running. Classes here are the turn of the last request that used a block and, if wanted,
how often it was used.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.replay.policies.base import Policy
from kvtier.trace.packed import Packed

TURNS_MAX = 8
USES_MAX = 4


class ByTurn(Policy):
    """The oldest block of the class from which a reuse is least to be expected leaves first.

    Args:
        capacity: blocks that fit.
        packed: the trace; where it names no sessions, turns are told by what a prompt continues.
        by_uses: whether classes also tell how often a block was used.
    """

    def __init__(self, capacity: int, packed: Packed, *, by_uses: bool) -> None:
        super().__init__(capacity, packed.block_count)
        self._turns = turns(packed).tolist()
        self._uses_max = USES_MAX if by_uses else 1
        count = TURNS_MAX * self._uses_max
        self._queues: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(count)]
        """The blocks of each class in the order of their last use, with its time."""
        self._class_of: dict[int, int] = {}
        self._history: dict[int, tuple[int, float, int]] = {}
        """Of each block ever seen: its class, the time of its last use, and its uses."""
        self._entered = [1.0] * count
        self._returned = [0.5] * count
        self._pauses_s = [30.0] * count
        self._value = [0.0] * count
        self._rate = [0.0] * count
        self._now_s = 0.0
        self._turn = 0
        self._chosen, self._next_least = -1, math.inf
        """The class whose oldest block is worth least, and what those of the others are worth at least."""

    def begin(self, request: int, time_s: float, blocks: Sequence[int]) -> None:
        """What a reuse is worth in each class, as of now."""
        super().begin(request, time_s, blocks)
        self._now_s = time_s
        self._chosen = -1
        self._turn = min(self._turns[request], TURNS_MAX - 1)
        for place in range(len(self._queues)):
            pause_s = max(self._pauses_s[place] / self._returned[place], 1e-3)
            share = min(self._returned[place] / self._entered[place], 1.0)
            self._rate[place] = 1.0 / pause_s
            self._value[place] = math.log(share / pause_s)

    def touch(self, block: int, place: int) -> None:  # noqa: ARG002  the interface's arguments
        """Into the class of this request."""
        del self._queues[self._class_of[block]][block]
        self._put(block)

    def insert(self, block: int, place: int) -> bool:  # noqa: ARG002  the interface's arguments
        """Always kept."""
        if self.held >= self.capacity:
            self._evict()
        self._put(block)
        self._enter(block)
        return True

    def _put(self, block: int) -> None:
        before = self._history.get(block)
        uses = 1
        if before is not None:
            old, used_s, uses = before
            uses += 1
            self._returned[old] += 1
            self._pauses_s[old] += self._now_s - used_s
        new = self._turn * self._uses_max + min(uses, self._uses_max) - 1
        self._entered[new] += 1
        self._history[block] = (new, self._now_s, uses)
        self._class_of[block] = new
        if not self._queues[new]:
            self._chosen = -1
        self._queues[new][block] = self._now_s

    def _evict(self) -> None:
        # During a request no time passes: who was chosen stays chosen until others are worth less.
        if self._chosen < 0 or self._worth(self._chosen) > self._next_least:
            worth = sorted((self._worth(place), place) for place, queue in enumerate(self._queues) if queue)
            self._chosen = worth[0][1]
            self._next_least = worth[1][0] if len(worth) > 1 else math.inf
        victim = self._queues[self._chosen].popitem(last=False)[0]
        del self._class_of[victim]
        self._leave(victim)

    def _worth(self, place: int) -> float:
        """Of the oldest block of a class; without one, nothing is to be had there."""
        queue = self._queues[place]
        if not queue:
            return math.inf
        return self._value[place] - (self._now_s - next(iter(queue.values()))) * self._rate[place]


def turns(packed: Packed) -> npt.NDArray[np.int32]:
    """For each request, its number in its conversation, from 0.

    Where the trace names no session, a request continues the one that last used its deepest block that was seen before,
    unless that is only the very first one, which strangers share.
    """
    if len(packed) and int(packed.session[0]) >= 0:
        return np.asarray(packed.turn)
    out = np.zeros(len(packed), np.int32)
    of_block = np.full(packed.block_count, -1, np.int32)
    starts = packed.starts
    for request in range(len(packed)):
        blocks = packed.ids[int(starts[request]) : int(starts[request + 1])]
        seen = int((of_block[blocks] >= 0).sum())  # whole prefixes are seen, so these are the leading ones
        if seen > 1:
            out[request] = of_block[blocks[seen - 1]] + 1
        of_block[blocks] = out[request]
    return out
