"""Routers: choose the node of a request."""

from collections.abc import Sequence
from random import Random

import numpy as np

from kvtier.replay.node import ReplayNode
from kvtier.trace.arrays import TraceArrays

BUSY_S = 2.0
"""load-and-prefix skips a node whose backlog exceeds the least by more than this."""
_SAMPLES = 4
"""Nodes compared by their backlog: nearly as good as all (Mitzenmacher, 2001), at constant cost."""
ROUTERS = ("random", "round-robin", "session", "prefix", "load-and-prefix")


class Router:
    """One router for all nodes; it remembers where each block was served last."""

    def __init__(self, name: str, trace: TraceArrays, nodes: Sequence[ReplayNode], seed: int) -> None:
        self._name = name
        self._sessions = trace.session
        self._nodes = nodes
        self._random = Random(seed)  # noqa: S311  seeded on purpose
        self._served = np.full(trace.block_count, -1, np.int32)
        self._next = 0
        self._of_session: dict[int, int] = {}

    def choose(self, request: int, blocks: Sequence[int]) -> int:
        """The node of a request with these blocks."""
        if len(self._nodes) == 1:
            return 0
        chosen = self._choose(request, blocks)
        self._served[list(blocks)] = chosen
        return chosen

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        if self._name == "random":
            return self._random.randrange(len(self._nodes))
        if self._name == "round-robin":
            return self._round_robin()
        session = int(self._sessions[request])
        if self._name == "session" and session >= 0:
            if session not in self._of_session:
                self._of_session[session] = self._round_robin()
            return self._of_session[session]
        chosen = self._by_prefix(blocks)
        if self._name == "load-and-prefix":
            least = self._least_busy()
            if self._nodes[chosen].backlog_s() > self._nodes[least].backlog_s() + BUSY_S:
                return least
        return chosen

    def _by_prefix(self, blocks: Sequence[int]) -> int:
        """The node of the longest known prefix; the first block alone does not count, unrelated requests share it."""
        for block in reversed(blocks[1:]):
            if self._served[block] >= 0:
                return int(self._served[block])
        return self._least_busy() if self._name == "load-and-prefix" else self._round_robin()

    def _round_robin(self) -> int:
        self._next = (self._next + 1) % len(self._nodes)
        return self._next

    def _least_busy(self) -> int:
        count = len(self._nodes)
        seen = range(count) if count <= _SAMPLES else [self._random.randrange(count) for _ in range(_SAMPLES)]
        return min(seen, key=lambda it: self._nodes[it].backlog_s())
