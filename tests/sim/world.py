"""Simulated memory, tiers, clock and event queue. Content is (key, group), or garbage that equals nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from random import Random

from tests.sim.scenario import Outage, Scenario
from tests.sim.trace import RecordKind, RunTrace

from kvtier.types import ChunkKey

Item = tuple[ChunkKey, int]
"""(key, group): one object."""
Content = Item | int
"""(key, group), or a number for garbage."""


class Violation(AssertionError):  # noqa: N818
    """The core broke one of its promises."""


class Condition(Enum):
    """Result of verifying a stored copy."""

    GOOD = "good"
    FLIPPED = "flipped"
    TRUNCATED = "truncated"
    OTHER_KEY = "other key"


@dataclass(slots=True)
class StoredCopy:
    """One stored object. `content` is what the slot held when it was written."""

    content: Content
    condition: Condition = Condition.GOOD
    death: Outage | None = None
    """How every read of it fails."""


class SimTier:
    """Copies in one tier."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copies: dict[Item, StoredCopy] = {}

    def fill(self, item: Item, condition: Condition) -> None:
        """Store a copy in `condition`."""
        self.copies[item] = StoredCopy(item, condition)

    def holds(self, item: Item) -> bool:
        """Whether the tier has a good copy that can be read."""
        copy = self.copies.get(item)
        return copy is not None and copy.condition is Condition.GOOD and copy.death is None


@dataclass(slots=True)
class SlotUse:
    """Current readers and writers of one slot."""

    readers: int = 0
    writers: int = 0


@dataclass(slots=True)
class BlockMemory:
    """Engine memory: content of each block, and the blocks that transfers may touch."""

    content: dict[int, Content] = field(default_factory=dict[int, Content])
    open: set[int] = field(default_factory=set[int])
    last: int = 0


class World:
    """Clock, event queue, memory, tiers and trace."""

    def __init__(self, scenario: Scenario, trace: RunTrace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.dice = Random(f"world {scenario.seed}")
        self.now_s = 0.0
        self.is_draining = False
        self.slots: list[list[Content]] = [[0] * count for count in scenario.slots]
        self.uses = [[SlotUse() for _ in range(count)] for count in scenario.slots]
        self.blocks = BlockMemory()
        self.tiers = {name: SimTier(name) for name in scenario.tiers}
        self.parked: list[Callable[[], None]] = []
        """Events that wait for the end of the run: operations that hang."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._garbage = 0

    # ---- time ------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule `act` in `delay_s` seconds."""
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def next_s(self) -> float | None:
        """Time of the next event."""
        return self._queue[0][0] if self._queue else None

    def take(self) -> Callable[[], None]:
        """Advance the clock to the next event and return it."""
        time_s, _, act = heappop(self._queue)
        self.now_s = max(self.now_s, time_s)
        return act

    def release_parked(self) -> None:
        """Schedule everything that hangs, in any order."""
        parked, self.parked = self.parked, []
        for act in parked:
            self.later(self.dice.uniform(0, 0.1), act)

    def note(self, kind: RecordKind, *values: object) -> None:
        """Add a record to the trace."""
        self.trace.add(self.now_s, kind, *values)

    # ---- content ---------------------------------------------------------------------------------------------------

    def garbage(self) -> Content:
        """Content that equals nothing else."""
        self._garbage += 1
        return self._garbage

    def new_block(self, item: Item | None) -> int:
        """Allocate a block for a transfer, holding an object's content, or garbage."""
        blocks = self.blocks
        blocks.last += 1
        blocks.open.add(blocks.last)
        blocks.content[blocks.last] = self.garbage() if item is None else item
        return blocks.last

    def close_block(self, block: int) -> None:
        """Let the engine overwrite the block."""
        self.blocks.open.discard(block)
        self.blocks.content[block] = self.garbage()

    def holds_right(self, block: int, item: Item) -> bool:
        """Whether a block holds the object."""
        return self.blocks.content[block] == item

    def is_in_a_tier(self, item: Item) -> bool:
        """Whether some tier has a good copy."""
        return any(tier.holds(item) for tier in self.tiers.values())
