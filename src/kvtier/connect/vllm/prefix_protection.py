"""The requests that wait for vLLM, and the blocks that it still has of their prompts.

VLLM hands out free blocks in the order in which they were used last. When users come back in turn that is the worst
there is: the head of the line takes the blocks of the next one, who takes those of the one behind, and nobody finds its
own although there was room for most. But who comes next is known here. So before a request gets its blocks, those that
it may take are put to the front: first what nobody in the line wants, in vLLM's order, then what the last one wants,
the deepest first. Nobody's turn changes, and all blocks stay free.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvtier.connect.vllm.block_pool import Held, Pins
from kvtier.connect.vllm.geometry import NULL_BLOCK, Geometry
from kvtier.connect.vllm.tracked import Tracked
from kvtier.connect.vllm.vllm_types import BlockTables, Request

LOOKED_AT_MAX = 1 << 14
"""Blocks that are looked at in one step, for all requests together; about 0.5 microseconds each. After these vLLM's
order holds: no step waits long for an order that saves others time."""
FREE_MAX = 4096
"""Free blocks among which those are sought that nobody wants."""
LOOKED_UP_MAX = 1024
"""Blocks of prompts that are looked up in one step, about 4 microseconds each; a longer prompt is looked up alone."""
HELD_MAX = 1 << 16
"""Blocks that are remembered, as often as somebody wants them; who is farther behind counts as wanting nothing."""


class PrefixProtection:
    """The line of one engine. Belongs to the scheduler's thread.

    Args:
        geometry: where chunks lie in block tables.
        pins: vLLM's block pool.
        resident: the block ids in vLLM's own cache that a request would be given now; None: vLLM's order stays.
    """

    def __init__(self, geometry: Geometry, pins: Pins, resident: Callable[[Request], BlockTables] | None) -> None:
        self._geometry = geometry
        self._pins = pins
        self._resident = resident
        self._waiting: OrderedDict[str, Tracked] = OrderedDict()
        self._held: dict[str, list[Held]] = {}
        """What vLLM has of those who wait, the deepest first; looked up once, when something is in danger."""
        self._wanted: Counter[Held] = Counter()
        """By how many of them."""
        self._made_for: str | None = None
        """For whom there is room, as far as nothing has changed since."""
        self._held_count = 0
        self._looked_at = self._looked_up = 0
        """In this step."""
        self._has_unwanted = True
        """As far as is known in this step."""

    def step_ends(self) -> None:
        """Those who came in this step have got their blocks."""
        self._looked_at = self._looked_up = 0
        self._has_unwanted = True

    def joined(self, tracked: Tracked) -> None:
        """A request has arrived."""
        self._waiting[tracked.id] = tracked
        self._made_for = None

    def rejoined(self, tracked: Tracked) -> None:
        """A request had to give back its blocks; it is the next."""
        self.left(tracked.id)
        self.joined(tracked)
        self._waiting.move_to_end(tracked.id, last=False)

    def left(self, name: str) -> None:
        """A request has got its blocks, has given them back, or is gone."""
        self._waiting.pop(name, None)
        blocks = self._held.pop(name, ())
        self._held_count -= len(blocks)
        for held in blocks:
            self._wanted[held] -= 1
            if not self._wanted[held]:
                del self._wanted[held]
        self._made_for = None

    def make_room(self, tracked: Tracked, tokens: int) -> None:
        """A request may be given blocks for `tokens` now: let them be those that the others want least."""
        if self._resident is None or self._made_for == tracked.id or len(self._waiting) < 2:
            return
        count = self._geometry.blocks(tokens)
        first = list(islice(self._some(self._pins.free()), count))
        if not any(held.hash for held in first):
            return
        self._look_up(self._resident)
        victims: list[Held] = []
        if self._has_unwanted:
            free = islice(self._some(self._pins.free()), FREE_MAX)
            victims += islice((held for held in free if held not in self._wanted), len(first))
            self._has_unwanted = len(victims) == len(first)
        victims += islice(self._wanted_last(tracked.id), len(first) - len(victims))
        if victims != first:
            self._pins.hand_out_first(victims)
        self._made_for = tracked.id

    def _some(self, blocks: Iterable[Held]) -> Iterator[Held]:
        """Those of `blocks` that may still be looked at in this step."""
        for held in blocks:
            if self._looked_at >= LOOKED_AT_MAX:
                return
            self._looked_at += 1
            yield held

    def _look_up(self, resident: Callable[[Request], BlockTables]) -> None:
        if len(self._held) == len(self._waiting):
            return
        for name, tracked in self._waiting.items():
            if name in self._held:
                continue
            if self._looked_up >= LOOKED_UP_MAX or self._held_count >= HELD_MAX:
                break
            self._looked_up += self._geometry.blocks(tracked.request.num_tokens)
            blocks: dict[int, None] = {}
            tables = resident(tracked.request)
            for number in range(max(map(len, tables), default=0)):
                blocks.update((table[number], None) for table in tables if number < len(table))
            blocks.pop(NULL_BLOCK, None)
            self._held[name] = self._pins.held(reversed(blocks))
            self._held_count += len(blocks)
            self._wanted.update(self._held[name])

    def _wanted_last(self, asking: str) -> Iterator[Held]:
        """What only the last one wants, then what only the last two want, and so on."""
        seen: Counter[Held] = Counter()
        for name in reversed(self._waiting):
            if name == asking:
                continue
            for held in self._some(self._held.get(name, ())):
                seen[held] += 1
                if seen[held] == self._wanted[held] and self._pins.is_free(held):
                    yield held
