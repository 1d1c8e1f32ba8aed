"""Which node a request goes to."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.arrays import TraceArrays

BUSY_S = 2.0
"""With load and prefix, a node is left alone when its backlog is so much longer than that of the least busy one."""
_LOOKS = 2


class Busy(Protocol):
    """What a router may know of a node."""

    def backlog_s(self) -> float:
        """How long a prompt would wait there now."""
        ...


class Router:
    """Chooses; one for all nodes, so it knows where each block was served last."""

    def __init__(self, name: str, packed: TraceArrays, nodes: Sequence[Busy], seed: int) -> None:
        self._name = name
        self._sessions = packed.session
        self._nodes = nodes
        self._dice = Random(seed)  # noqa: S311  seeded on purpose
        self._served = np.full(packed.block_count, -1, np.int32)
        self._next = 0
        self._of_session: dict[int, int] = {}

    def choose(self, request: int, blocks: Sequence[int]) -> int:
        """The number of the node for a request with these blocks."""
        if len(self._nodes) == 1:
            return 0
        chosen = self._choose(request, blocks)
        self._served[list(blocks)] = chosen
        return chosen

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        if self._name == "random":
            return self._dice.randrange(len(self._nodes))
        if self._name == "round-robin":
            return self._turn()
        if self._name == "session":
            session = int(self._sessions[request])
            # Without a name, a conversation is known by what it continues: its last block but the shared first.
            return self._turn_for(session) if session >= 0 else self._by_prefix(blocks)
        chosen = self._by_prefix(blocks)
        if self._name == "load-and-prefix":
            least = self._least_busy()
            if self._nodes[chosen].backlog_s() > self._nodes[least].backlog_s() + BUSY_S:
                return least
        return chosen

    def _by_prefix(self, blocks: Sequence[int]) -> int:
        """Where most of the prefix was served last; strangers share the first block, so that alone does not count."""
        for block in reversed(blocks[1:]):
            if self._served[block] >= 0:
                return int(self._served[block])
        return self._least_busy() if self._name == "load-and-prefix" else self._turn()

    def _turn(self) -> int:
        self._next = (self._next + 1) % len(self._nodes)
        return self._next

    def _turn_for(self, session: int) -> int:
        chosen = self._of_session.get(session)
        if chosen is None:
            chosen = self._of_session[session] = self._turn()
        return chosen

    def _least_busy(self) -> int:
        """Of a few at random: nearly as good as of all (Mitzenmacher, 2001), and does not grow with their number."""
        count = len(self._nodes)
        seen = range(count) if count <= 2 * _LOOKS else [self._dice.randrange(count) for _ in range(2 * _LOOKS)]
        return min(seen, key=lambda it: self._nodes[it].backlog_s())


ROUTERS = ("random", "round-robin", "session", "prefix", "load-and-prefix")


def make_router(name: str, packed: TraceArrays, nodes: Sequence[Busy], seed: int) -> Router:
    """The router `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ROUTERS:
        raise ConfigError(f"--router {name!r}; allowed: {', '.join(ROUTERS)}")
    return Router(name, packed, nodes, seed)
