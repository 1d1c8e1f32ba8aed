"""Processes that the core knows nothing of: they add, remove and damage objects in the tiers."""

from tests.sim.mover import DAMAGE, Mover
from tests.sim.world import Condition, Copy, Shelf, World

from kvtier.types import ChunkKey


class OtherWriters:
    """Whoever else shares the tiers."""

    def __init__(self, world: World, mover: Mover) -> None:
        self._world = world
        self._mover = mover

    def act(self) -> None:
        """Do one thing to one tier."""
        dice = self._world.dice
        if not self._world.shelves:
            return
        shelf = dice.choice(list(self._world.shelves.values()))
        act = dice.choice((self._add, self._remove, self._damage))
        act(shelf)

    def _add(self, shelf: Shelf) -> None:
        scenario, dice = self._world.scenario, self._world.dice
        depth = dice.randint(1, scenario.chunks_max)
        key = ChunkKey(b"".join(b"%d" % dice.randrange(scenario.branches) for _ in range(depth)))
        group = dice.randrange(len(scenario.slots))
        is_everywhere = dice.random() < 0.7
        for rank, copies in enumerate(shelf.copies):
            if is_everywhere or dice.random() < 0.5:
                copies[key, group] = Copy((key, group, rank))

    def _remove(self, shelf: Shelf) -> None:
        rank = self._world.dice.randrange(len(shelf.copies))
        if shelf.copies[rank]:
            self._mover.remove(shelf, rank, self._world.dice.choice(list(shelf.copies[rank])))

    def _damage(self, shelf: Shelf) -> None:
        rank = self._world.dice.randrange(len(shelf.copies))
        sound = [item for item, copy in shelf.copies[rank].items() if copy.condition is Condition.GOOD]
        if sound:
            item = self._world.dice.choice(sound)
            shelf.copies[rank][item] = Copy(0, self._world.dice.choice(DAMAGE))
            self._mover.damaged(item)
