"""Victims of the adaptive policy, against a plain record of the entries and their parents."""

import random
from collections import Counter

import pytest

from kvtier.policy.adaptive import Adaptive
from kvtier.testing.policy_contract import name_of, use_of
from kvtier.types import NextTurn

EVENTS = 1000
HINTS = (None, *NextTurn)


class Driver:
    """Tells a policy of prompts in any order, of names that leave out of order, of hints; pins; checks each victim."""

    def __init__(self, seed: int, *, with_rings: bool) -> None:
        self.chance = random.Random(seed)
        self.with_rings = with_rings
        self.slots = self.chance.choice([1, 3, 9, 17, 40])
        self.policy = Adaptive()
        self.parents: dict[int, int | None] = {}  # of those present
        self.children = Counter[int]()
        self.pinned: set[int] = set()
        self.prompts: list[list[int]] = [[]]
        self.names = 0

    def prompt(self) -> int:
        """Tell of one, which begins like another; returns its names."""
        chance = self.chance
        path = chance.choice(self.prompts)
        path = path[: chance.randint(0, len(path))]
        for _ in range(chance.randint(1, self.slots // 3 + 1)):
            self.names += 1
            path.append(self.names)
        self.prompts = [*self.prompts[-20:], path]
        conversation = chance.choice(["a", "b", "c", None])
        entries = list(enumerate(path))
        for depth, name in entries if chance.random() < 0.4 else reversed(entries):
            parent = path[depth - 1] if depth and chance.random() < 0.97 else None
            if self.with_rings and chance.random() < 0.05:
                parent = chance.choice(path)
            self.use(name, parent, conversation)
            if chance.random() < 0.03:
                self.remove(chance.choice(path))
            if chance.random() < 0.2:
                self.victim()
            if chance.random() < 0.03:
                self.policy.expects(chance.choice("abc"), chance.choice(HINTS))
        return len(path)

    def use(self, name: int, parent: int | None, conversation: str | None) -> None:
        event = use_of(name, parent)._replace(conversation=conversation)
        if name in self.parents and self.chance.random() < 0.8:
            self.policy.touched(event)
            return
        while name not in self.parents and len(self.parents) >= self.slots:
            victim = self.victim()
            self.remove(self.chance.choice(list(self.parents)) if victim is None else victim)
        self.policy.added(event)
        if self.parents.setdefault(name) is None and parent not in (None, name):
            self.parents[name] = parent
            self.children[parent] += 1

    def remove(self, name: int) -> None:
        self.policy.removed(name_of(name))
        self.children[self.parents.pop(name, None)] -= 1
        self.pinned.discard(name)

    def victim(self) -> int | None:
        pinned = {name_of(name) for name in self.pinned}
        chosen = self.policy.victim(pinned.__contains__)
        victim = next((name for name in self.parents if name_of(name) == chosen), None)
        assert (victim is None) == (chosen is None), "the victim is absent"
        leaves = {name for name in self.parents if not self.children[name]}
        # Without leaves there are rings only, of which anybody may leave.
        allowed = (leaves or set(self.parents)) - self.pinned
        assert victim in (allowed or {None})
        return victim

    def pin(self) -> None:
        self.pinned = {name for name in self.parents if self.chance.random() < 0.5}
        if self.chance.random() < 0.5:
            # All but one, which must be found then if it is a leaf.
            self.pinned = set(self.parents) - {self.chance.choice([0, *self.parents])}
        self.victim()
        if self.chance.random() < 0.5:
            self.pinned.clear()


@pytest.mark.parametrize("with_rings", [False, True])
def test_who_leaves_is_a_leaf_that_nobody_pins(with_rings: bool):
    for seed in range(20, 30):
        driver, events = Driver(seed, with_rings=with_rings), 0
        while events < EVENTS:
            events += driver.prompt()
            driver.pin()
            assert len(driver.policy) == len(driver.parents)
        driver.pinned.clear()
        driver.names += 1
        driver.use(pin := driver.names, None, None)
        if not with_rings:
            driver.pinned = {pin}  # a cycle has no leaf, and no real leaf may be overlooked
        while (victim := driver.victim()) is not None:
            driver.remove(victim)
        assert set(driver.parents) == driver.pinned
