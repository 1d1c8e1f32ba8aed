"""Protects prefixes: allocation does not evict the cached prefixes of waiting requests.

Free blocks leave vLLM's pool in LRU order. When users return in turn, LRU is the worst order. It evicts the next
waiting request's prefix, then the prefix after that. Every request misses, although most prefixes would fit. But the
scheduler knows the waiting queue. So before a request gets blocks, the least valuable free blocks move to the front of
the free list. First come the blocks that no waiting request needs, in vLLM's order. Then come the blocks of the last
request in the queue, deepest first. The order of requests does not change, and every block can still be allocated.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvtier.connect.vllm.geometry import NULL_BLOCK, Geometry
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.scheduler.block_pool import BlockContent, BlockPins
from kvtier.connect.vllm.vllm_types import BlockTables, Request

LOOKED_AT_MAX = 1 << 14
"""Maximum number of blocks examined in one step, for all requests together, at about 0.5 microseconds each. Beyond
that, vLLM's order stays."""
FREE_MAX = 4096
"""Maximum number of free blocks searched for those that no waiting request needs."""
LOOKED_UP_MAX = 1024
"""Maximum number of prompt blocks looked up in one step, at about 4 microseconds each. The last prompt of a step may
exceed it."""
NEEDED_MAX = 1 << 16
"""Maximum number of blocks remembered, counted once for each request that needs them. Beyond that, a request counts as
needing nothing."""


class PrefixProtection:
    """The waiting queue of one engine. Only the scheduler's thread uses it.

    Args:
        geometry: locates chunks in block tables.
        pins: vLLM's block pool.
        resident: returns the block ids in vLLM's own cache that match a request. If None, vLLM's order stays.
    """

    def __init__(self, geometry: Geometry, pins: BlockPins, resident: Callable[[Request], BlockTables] | None) -> None:
        self._geometry = geometry
        self._pins = pins
        self._resident = resident
        self._waiting: OrderedDict[str, TrackedRequest] = OrderedDict()
        self._needed: dict[str, list[BlockContent]] = {}
        """Cached blocks of each waiting request, deepest first. They are looked up once, when an allocation might
        evict one."""
        self._need_counts: Counter[BlockContent] = Counter()
        """Number of waiting requests that need a block."""
        self._done_for: str | None = None
        """The request for which the free list was last ordered, if nothing has changed since."""
        self._needed_total = 0
        self._looked_at = self._looked_up = 0
        """Blocks examined and looked up in this step."""
        self._has_unneeded = True
        """Whether free blocks that no request needs may remain in this step."""

    def step_ends(self) -> None:
        """Reset the budgets of a step."""
        self._looked_at = self._looked_up = 0
        self._has_unneeded = True

    def joined(self, tracked: TrackedRequest) -> None:
        """Append a new request to the queue."""
        self._waiting[tracked.id] = tracked
        self._done_for = None

    def rejoined(self, tracked: TrackedRequest) -> None:
        """Put a preempted request at the head of the queue."""
        self.left(tracked.id)
        self.joined(tracked)
        self._waiting.move_to_end(tracked.id, last=False)

    def left(self, name: str) -> None:
        """Remove a request that started, was preempted, or ended."""
        self._waiting.pop(name, None)
        blocks = self._needed.pop(name, ())
        self._needed_total -= len(blocks)
        for content in blocks:
            self._need_counts[content] -= 1
            if not self._need_counts[content]:
                del self._need_counts[content]
        self._done_for = None

    def make_room(self, tracked: TrackedRequest, tokens: int) -> None:
        """Order the free list before vLLM allocates blocks for `tokens` tokens of a request."""
        if self._resident is None or self._done_for == tracked.id or len(self._waiting) < 2:
            return
        count = self._geometry.blocks(tokens)
        first = list(islice(self._within_budget(self._pins.free()), count))
        if not any(content.hash for content in first):
            return
        self._look_up(self._resident)
        victims: list[BlockContent] = []
        if self._has_unneeded:
            free = islice(self._within_budget(self._pins.free()), FREE_MAX)
            victims += islice((content for content in free if content not in self._need_counts), len(first))
            self._has_unneeded = len(victims) == len(first)
        victims += islice(self._needed_last(tracked.id), len(first) - len(victims))
        if victims != first:
            self._pins.hand_out_first(victims)
        self._done_for = tracked.id

    def _within_budget(self, blocks: Iterable[BlockContent]) -> Iterator[BlockContent]:
        for content in blocks:
            if self._looked_at >= LOOKED_AT_MAX:
                return
            self._looked_at += 1
            yield content

    def _look_up(self, resident: Callable[[Request], BlockTables]) -> None:
        if len(self._needed) == len(self._waiting):
            return
        for name, tracked in self._waiting.items():
            if name in self._needed:
                continue
            if self._looked_up >= LOOKED_UP_MAX or self._needed_total >= NEEDED_MAX:
                break
            self._looked_up += self._geometry.blocks(tracked.request.num_tokens)
            blocks: dict[int, None] = {}
            tables = resident(tracked.request)
            for number in range(max(map(len, tables), default=0)):
                blocks.update((table[number], None) for table in tables if number < len(table))
            blocks.pop(NULL_BLOCK, None)
            self._needed[name] = self._pins.contents(reversed(blocks))
            self._needed_total += len(blocks)
            self._need_counts.update(self._needed[name])

    def _needed_last(self, asking: str) -> Iterator[BlockContent]:
        """Yield free blocks that only the last request needs, then those that only the last two need, and so on."""
        seen: Counter[BlockContent] = Counter()
        for name in reversed(self._waiting):
            if name == asking:
                continue
            for content in self._within_budget(self._needed.get(name, ())):
                seen[content] += 1
                if seen[content] == self._need_counts[content] and self._pins.is_free(content):
                    yield content
