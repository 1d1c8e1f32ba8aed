"""The places, what they hold, and the clock. Content is a token: (key, group, rank), or garbage that equals nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from random import Random

from tests.sim.scenario import Scenario
from tests.sim.trace import Kind, Trace

from kvtier.types import ChunkKey

Item = tuple[ChunkKey, int]
"""(key, group): one object on all ranks."""
Content = tuple[ChunkKey, int, int] | int
"""(key, group, rank), or the number of a piece of garbage."""


class Violation(AssertionError):  # noqa: N818  an assertion of the simulator's, not an error of its own
    """The core broke one of its promises."""


class Condition(Enum):
    """What verification finds in a stored copy."""

    GOOD = "good"
    FLIPPED = "flipped"
    TRUNCATED = "truncated"
    OTHER_KEY = "other key"


@dataclass(slots=True)
class Copy:
    """One stored object of one rank. `content` is what its checksums vouch for: what the slot held when it was read."""

    content: Content
    condition: Condition = Condition.GOOD


class Shelf:
    """What one tier holds, by rank."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.copies: list[dict[Item, Copy]] = [{} for _ in range(ranks)]

    def fill(self, item: Item, condition: Condition) -> None:
        """Give every rank a copy; that of the first is in `condition`."""
        for rank, copies in enumerate(self.copies):
            copies[item] = Copy((*item, rank), condition if rank == 0 else Condition.GOOD)

    def holds(self, item: Item) -> bool:
        """Whether every rank has a good copy."""
        return all(item in copies and copies[item].condition is Condition.GOOD for copies in self.copies)


@dataclass(slots=True)
class Use:
    """Who touches one slot of one rank at the moment."""

    readers: int = 0
    writers: int = 0


@dataclass(slots=True)
class Blocks:
    """The engine's memory: content of each block on each rank, and which blocks a load or store may touch."""

    content: list[dict[int, Content]]
    open: set[int] = field(default_factory=set[int])
    last: int = 0


class World:
    """Clock, agenda, places and the trace."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.dice = Random(f"world {scenario.seed}")
        self.now_s = 0.0
        self.is_draining = False
        ranks = range(scenario.ranks)
        self.slots: list[list[list[Content]]] = [[[0] * count for count in scenario.slots] for _ in ranks]
        self.uses = [[[Use() for _ in range(count)] for count in scenario.slots] for _ in ranks]
        self.blocks = Blocks([{} for _ in ranks])
        self.shelves = {name: Shelf(name, scenario.ranks) for name in scenario.tiers}
        self.parked: list[Callable[[], None]] = []
        """What hangs until the end of the run."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._garbage = 0

    # ---- time ------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Let `act` happen after `delay_s` seconds."""
        self._count += 1
        heappush(self._agenda, (self.now_s + delay_s, self._count, act))

    def next_s(self) -> float | None:
        """When the next thing happens."""
        return self._agenda[0][0] if self._agenda else None

    def take(self) -> Callable[[], None]:
        """Move the clock to the next thing, and give it."""
        time_s, _, act = heappop(self._agenda)
        self.now_s = max(self.now_s, time_s)
        return act

    def release_parked(self) -> None:
        """What hung answers at last, in any order."""
        parked, self.parked = self.parked, []
        for act in parked:
            self.later(self.dice.uniform(0, 0.1), act)

    def note(self, kind: Kind, *values: object) -> None:
        """Add a record to the trace."""
        self.trace.add(self.now_s, kind, *values)

    # ---- content ---------------------------------------------------------------------------------------------------

    def garbage(self) -> Content:
        """Content that equals nothing else."""
        self._garbage += 1
        return self._garbage

    def new_block(self, item: Item | None) -> int:
        """A block that is open for transfers, with an object's content, or with garbage to be overwritten."""
        blocks = self.blocks
        blocks.last += 1
        blocks.open.add(blocks.last)
        for rank, content in enumerate(blocks.content):
            content[blocks.last] = self.garbage() if item is None else (*item, rank)
        return blocks.last

    def close_block(self, block: int) -> None:
        """The engine uses the block for something else from now on."""
        self.blocks.open.discard(block)
        for content in self.blocks.content:
            content[block] = self.garbage()

    def holds_right(self, block: int, item: Item) -> bool:
        """Whether a block has an object's content on every rank."""
        return all(content[block] == (*item, rank) for rank, content in enumerate(self.blocks.content))

    def is_in_a_tier(self, item: Item) -> bool:
        """Whether some tier has a good copy on every rank."""
        return any(shelf.holds(item) for shelf in self.shelves.values())
