"""Simulates memory, tiers, clock and event queue. Content is (key, group), or garbage that equals nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from random import Random

from tests.sim.scenario import Outage, RankTraits, Scenario
from tests.sim.trace import RecordKind, RunTrace

from kvtier.types import ChunkKey

Item = tuple[ChunkKey, int]
"""One object, as (key, group)."""
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
    """One stored object. `content` is the content of the slot when it was written."""

    content: Content
    condition: Condition = Condition.GOOD
    death: Outage | None = None
    """How every read of it fails. None: reads work."""


class SimTier:
    """Copies in one tier, without the groups that it `lacks`."""

    def __init__(self, name: str, lacks: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.lacks = lacks
        self.copies: dict[Item, StoredCopy] = {}

    def fill(self, item: Item, condition: Condition) -> None:
        """Store a copy in `condition`."""
        self.copies[item] = StoredCopy(item, condition)

    def holds(self, item: Item) -> bool:
        """Whether the tier has a good copy that can be read."""
        copy = self.copies.get(item)
        return copy is not None and copy.condition is Condition.GOOD and copy.death is None


class SharedTier:
    """One tier as the core sees it. It has an object when every rank with the object's group has its own part of it.

    Args:
        parts: the tier of each rank.
        dice: chooses the rank whose part is in a bad condition.
    """

    def __init__(self, parts: list[SimTier], dice: Random) -> None:
        self.name = parts[0].name
        self._parts = parts
        self._dice = dice

    @property
    def copies(self) -> set[Item]:
        """The objects of which every rank has a copy, good or bad."""
        some = set[Item].union(*(set(part.copies) for part in self._parts))
        return {item for item in some if all(item in part.copies for part in self._of(item))}

    def fill(self, item: Item, condition: Condition) -> None:
        """Store a copy of each rank, one of them in `condition`."""
        bad = self._dice.choice(self._of(item))
        for part in self._of(item):
            part.fill(item, condition if part is bad else Condition.GOOD)

    def holds(self, item: Item) -> bool:
        """Whether every rank has a good copy that can be read."""
        return all(part.holds(item) for part in self._of(item))

    def _of(self, item: Item) -> list[SimTier]:
        return [part for part in self._parts if item[1] not in part.lacks]


@dataclass(slots=True)
class SlotUse:
    """Current readers and writers of one slot."""

    readers: int = 0
    writers: int = 0


class RankMemory:
    """One rank's slots, its part of the engine's blocks, and its objects in the tiers.

    Args:
        scenario: scenario of the run.
        traits: traits of the rank.
        first: the rank that fills its slots. None: it fills them itself.
    """

    def __init__(self, scenario: Scenario, traits: RankTraits, first: "RankMemory | None" = None) -> None:
        self.traits = traits
        counts = [0 if group in traits.lacks else count for group, count in enumerate(scenario.slots)]
        self.slots: list[list[Content]] = [[0] * count for count in counts]
        self.uses = [[SlotUse() for _ in range(count)] for count in counts]
        self.blocks: dict[int, Content] = {}
        self.tiers = {name: SimTier(name, traits.lacks) for name in scenario.tiers}
        if first is not None:
            self.slots, self.uses, self.tiers = first.slots, first.uses, first.tiers


class World:
    """The clock, the event queue, the memory and tiers of each rank, and the trace."""

    def __init__(self, scenario: Scenario, trace: RunTrace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.dice = Random(f"world {scenario.seed}")
        self.now_s = 0.0
        self.is_draining = False
        self.ranks: list[RankMemory] = []
        for traits in scenario.ranks or (RankTraits(scenario.faults),):
            first = None if traits.filled_by is None else self.ranks[traits.filled_by]
            self.ranks.append(RankMemory(scenario, traits, first))
        self.tiers: dict[str, SimTier] | dict[str, SharedTier] = self.ranks[0].tiers
        if len(self.ranks) > 1:
            stores = [rank.tiers for rank in self.ranks if rank.traits.filled_by is None]
            parts = {name: [tiers[name] for tiers in stores] for name in scenario.tiers}
            self.tiers = {name: SharedTier(of_ranks, self.dice) for name, of_ranks in parts.items()}
        self.open_blocks: set[int] = set()
        """Blocks of the engine that transfers may touch."""
        self._last_block = 0
        self.parked: list[Callable[[], None]] = []
        """Events of operations that hang. They wait for the end of the run."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._garbage = 0

    # ---- time ------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule `act` in `delay_s` seconds."""
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def next_s(self) -> float | None:
        """Return the time of the next event. None if there is none."""
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
        """Return content that equals nothing else."""
        self._garbage += 1
        return self._garbage

    def new_block(self, item: Item | None) -> int:
        """Allocate a block for a transfer, with an object's content or garbage."""
        self._last_block += 1
        self.open_blocks.add(self._last_block)
        for rank in self.ranks:
            rank.blocks[self._last_block] = self.garbage() if item is None else item
        return self._last_block

    def close_block(self, block: int) -> None:
        """Let the engine overwrite the block."""
        self.open_blocks.discard(block)
        for rank in self.ranks:
            rank.blocks[block] = self.garbage()

    def holds_right(self, block: int, item: Item) -> bool:
        """Whether a block has the object on every rank that has its group."""
        return all(rank.blocks[block] == item for rank in self.holders(item[1]))

    def is_in_slot(self, slot: int, item: Item) -> bool:
        """Whether a slot has the object on every rank that has its group."""
        return all(rank.slots[item[1]][slot] == item for rank in self.holders(item[1]))

    def holders(self, group: int) -> list[RankMemory]:
        """Return the ranks that have a group."""
        return [rank for rank in self.ranks if group not in rank.traits.lacks]

    def is_in_a_tier(self, item: Item) -> bool:
        """Whether some tier has a good copy."""
        return any(tier.holds(item) for tier in self.tiers.values())
