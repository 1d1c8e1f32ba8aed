"""LRU against a slow oracle: exact, children before parents, pins skipped, and cheap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy.base import Held
from kvtier.policy.lru import Lru
from kvtier.testing.policy import held, name_of


class SlowLru:
    """The same rule with plain lists: `order` holds the present names, the one used longest ago first."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.parents: dict[bytes, bytes | None] = {}

    def added(self, event: Held) -> None:
        if event.name in self.order:
            self.order.remove(event.name)
        else:
            self.parents[event.name] = None
        self.order.append(event.name)
        if self.parents[event.name] is None and event.parent != event.name:
            self.parents[event.name] = event.parent

    def touched(self, event: Held) -> None:
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
            event = held(what, parent_of(what) if is_parent_told else None)
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


def test_a_child_leaves_before_its_parent_whoever_was_used_last():
    lru = Lru()
    lru.added(held(1))
    lru.added(held(2, parent=1))
    lru.added(held(3, parent=2))
    lru.touched(held(3))
    order = []
    while (victim := lru.victim(_nobody)) is not None:
        order.append(victim)
        lru.removed(victim)
    assert order == [name_of(3), name_of(2), name_of(1)]


def test_a_parent_that_arrives_after_its_child_is_linked():
    lru = Lru()
    lru.added(held(2, parent=1))
    lru.added(held(1))
    assert lru.victim(_nobody) == name_of(2)
    lru.removed(name_of(1))
    lru.touched(held(2))
    lru.added(held(1))
    assert lru.victim(_nobody) == name_of(2)


def test_a_parent_learned_later_is_linked():
    lru = Lru()
    lru.added(held(1))
    lru.added(held(2))
    assert lru.victim(_nobody) == name_of(1)
    lru.added(held(2, parent=1))
    assert lru.victim(_nobody) == name_of(2)


def test_a_pinned_child_keeps_its_parent():
    lru = Lru()
    lru.added(held(1))
    lru.added(held(2, parent=1))
    assert lru.victim({name_of(2)}.__contains__) is None


def test_many_pinned_are_not_looked_at_again_for_every_victim():
    lru = Lru()
    pinned = {name_of(number) for number in range(2000)}
    for number in range(4000):
        lru.added(held(number))
    asked = 0

    def is_pinned(name: bytes) -> bool:
        nonlocal asked
        asked += 1
        return name in pinned

    for _ in range(2000):
        victim = lru.victim(is_pinned)
        assert victim is not None
        assert victim not in pinned
        lru.removed(victim)
    assert asked <= 3 * 4000
    assert lru.victim(is_pinned) is None


def test_memory_stays_bounded_when_nobody_asks_for_a_victim():
    lru = Lru()
    for number in range(20_000):
        lru.added(held(number, parent=number - 1 if number else None))
        lru.touched(held(number))
        if number >= 100:
            lru.removed(name_of(number - 100))
    assert len(lru) == 100
    assert len(lru._heap) <= 2 * len(lru) + 64
    assert len(lru._children) <= len(lru) + 1


def _nobody(_name: bytes) -> bool:
    return False
