"""Many threads, slots and faults at once, seeded: DONE means the right bytes, and each command is completed once."""

import random
from collections import Counter

import pytest
from mover_world import CHUNKS, World
from tests.memory_tier import MischievousTier

from kvtier.runtime.executor import Completion, Threads
from kvtier.types import Cancel, Direction, Outcome, Transfer

COMMANDS = 5000
IN_FLIGHT_MAX = 24
SLOTS = 16


class Owner:
    """Gives commands as the core would: a slot has one writer or several readers, and only complete slots are read."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.free = {(group, slot) for group in (0, 1) for slot in range(SLOTS)}
        self.whole: dict[tuple[int, int], int] = {}
        self.readers: Counter[tuple[int, int]] = Counter()
        self.places = set(range(CHUNKS, 2 * CHUNKS))
        self.out: dict[int, Transfer] = {}
        self.outcomes: Counter[Outcome] = Counter()

    def step(self) -> None:
        group, chunk = self.rng.randrange(2), self.rng.randrange(CHUNKS)
        tier = self.rng.choice(["a", "b"])
        act = self.rng.random()
        free = sorted(slot for in_group, slot in self.free if in_group == group)
        whole = sorted(slot for in_group, slot in self.whole if in_group == group)
        if act < 0.5 and free:
            slot = free[0]
            self.free.remove((group, slot))
            direction = Direction.GATHER if act < 0.15 else Direction.PROMOTE
            self._submit(self.world.transfer(direction, chunk, slot, group=group, tier=tier))
        elif act < 0.9 and whole:
            slot = self.rng.choice(whole)
            chunk = self.whole[group, slot]
            if act < 0.7:
                self.readers[group, slot] += 1
                self._submit(self.world.transfer(Direction.DEMOTE, chunk, slot, group=group, tier=tier))
            elif self.places:
                self.readers[group, slot] += 1
                place = self.places.pop()
                self._submit(self.world.transfer(Direction.SCATTER, chunk, slot, group=group, place=place))
        elif act < 0.93 and self.out:
            self.world.mover.submit(Cancel((self.rng.choice(sorted(self.out)),)))
        elif whole:
            slot = self.rng.choice(whole)
            if not self.readers[group, slot]:  # evict
                assert self.world.is_in_slot(self.whole.pop((group, slot)), slot, group)
                self.world.spoil(slot, group)
                self.free.add((group, slot))

    def _submit(self, transfer: Transfer) -> None:
        self.out[transfer.id] = transfer
        self.world.mover.submit(transfer)

    def settle(self, completion: Completion) -> None:
        transfer = completion.command
        assert isinstance(transfer, Transfer)
        assert self.out.pop(transfer.id) is transfer, "answered twice"
        self.outcomes[completion.outcome] += 1
        at, chunk = (transfer.group, transfer.slot), int(transfer.depth)
        if transfer.direction in (Direction.GATHER, Direction.PROMOTE):
            if completion.outcome is Outcome.DONE:
                assert self.world.is_in_slot(chunk, transfer.slot, transfer.group), "wrong bytes are DONE"
                self.whole[at] = chunk
            else:
                self.free.add(at)
            return
        self.readers[at] -= 1
        assert self.world.is_in_slot(chunk, transfer.slot, transfer.group), "a slot changed while it was read"
        if transfer.direction is Direction.SCATTER:
            place = transfer.blocks[0] // len(transfer.blocks)
            self.places.add(place)
            if completion.outcome is Outcome.DONE:
                assert self.world.is_at(chunk, place, transfer.group)


@pytest.mark.parametrize("seed", range(3))
def test_faulty_tiers_under_load(seed: int) -> None:
    # So small that they evict all the time.
    tiers = {name: MischievousTier(name, seed, 200_000, 0.001) for name in ("a", "b")}
    with World(tiers, slots=SLOTS, threads=Threads(device=3, read=3, write=3)) as world:
        owner = Owner(world, seed)
        for _ in range(COMMANDS):
            owner.step()
            for completion in world.mover.take(1.0 if len(owner.out) >= IN_FLIGHT_MAX else 0.0):
                owner.settle(completion)
        for completion in world.take(len(owner.out)):
            owner.settle(completion)
        assert world.mover.take() == []
    assert owner.outcomes[Outcome.DONE] > COMMANDS // 4
    for outcome in (Outcome.FAILED, Outcome.ABSENT, Outcome.CORRUPT):
        assert owner.outcomes[outcome], f"the test never saw {outcome}"
