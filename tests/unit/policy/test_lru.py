"""LRU against a slow oracle: exact, children before parents, pins skipped, and cheap. `Adaptive` is as cheap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy.adaptive import Adaptive
from kvtier.policy.base import Use
from kvtier.policy.lru import Lru
from kvtier.testing.policy_contract import name_of, use_of


class SlowLru:
    """The same rule with plain lists: `order` holds the present names, the one used longest ago first."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.parents: dict[bytes, bytes | None] = {}

    def added(self, event: Use) -> None:
        if event.name in self.order:
            self.order.remove(event.name)
        else:
            self.parents[event.name] = None
        self.order.append(event.name)
        if self.parents[event.name] is None and event.parent != event.name:
            self.parents[event.name] = event.parent

    def touched(self, event: Use) -> None:
        if event.name in self.order:
            self.order.remove(event.name)
            self.order.append(event.name)

    def removed(self, name: bytes) -> None:
        if name in self.order:
            self.order.remove(name)
            del self.parents[name]

    def victim(self, is_pinned) -> bytes | None:
        with_child = {parent for parent in self.parents.values() if parent is not None}
        leaves = [name for name in self.order if name not in with_child]
        for leaf in leaves:
            if not is_pinned(leaf):
                return leaf
            self.order.remove(leaf)  # pinned: its reader uses it now
            self.order.append(leaf)
        return None


NUMBERS = st.integers(0, 11)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("added"), NUMBERS, st.booleans()),
        st.tuples(st.just("touched"), NUMBERS, st.booleans()),
        st.tuples(st.just("removed"), NUMBERS, st.booleans()),
        st.tuples(st.just("victim"), st.sets(NUMBERS), st.booleans()),
        st.tuples(st.just("evict"), st.sets(NUMBERS), st.booleans()),
    ),
    max_size=120,
)


def parent_of(number: int) -> int | None:
    """Three prompts: 0 is the start of two of them, so that a parent has two children."""
    return None if number in (0, 9) else {5: 0}.get(number, number - 1)


@settings(max_examples=400)
@given(STEPS)
def test_agrees_with_the_oracle(steps):
    fast, slow = Lru(), SlowLru()
    for step, what, is_parent_told in steps:
        if step in ("added", "touched"):
            event = use_of(what, parent_of(what) if is_parent_told else None)
            getattr(fast, step)(event)
            getattr(slow, step)(event)
        elif step == "removed":
            fast.removed(name_of(what))
            slow.removed(name_of(what))
        else:
            pinned = {name_of(number) for number in what}
            victim = fast.victim(pinned.__contains__)
            assert victim == slow.victim(pinned.__contains__)
            if step == "evict" and victim is not None:
                fast.removed(victim)
                slow.removed(victim)
        assert len(fast) == len(slow.order)


@pytest.mark.parametrize("make", [Lru, Adaptive])
def test_many_pinned_are_not_looked_at_again_for_every_victim(make):
    evictor = make()
    pinned = {name_of(number) for number in range(2000)}
    for number in range(4000):
        evictor.added(use_of(number))
    asked = 0

    def is_pinned(name: bytes) -> bool:
        nonlocal asked
        asked += 1
        return name in pinned

    for _ in range(2000):
        victim = evictor.victim(is_pinned)
        assert victim is not None
        assert victim not in pinned
        evictor.removed(victim)
    assert asked <= 3 * 4000
    assert evictor.victim(is_pinned) is None


def test_memory_stays_bounded_when_nobody_asks_for_a_victim():
    lru = Lru()
    for number in range(20_000):
        lru.added(use_of(number, parent=number - 1 if number else None))
        lru.touched(use_of(number))
        if number >= 100:
            lru.removed(name_of(number - 100))
    assert len(lru) == 100
    assert len(lru._heap) <= 2 * len(lru) + 64
    assert len(lru._children) <= len(lru) + 1
