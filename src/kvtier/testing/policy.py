"""What every eviction policy must hold. Subclass `EvictorContract` in a pytest module and give it a `make`."""

import random

from kvtier.policy.base import Evictor, Held


def held(number: int, parent: int | None = None) -> Held:
    """An event of the object `number`, of 4096 bytes."""
    return Held(name_of(number), None if parent is None else name_of(parent))


def name_of(number: int) -> bytes:
    """A 32-byte name, like the ones of keys and objects."""
    return number.to_bytes(32, "big")


class EvictorContract:
    """Whom a policy chooses is its own affair; what it may never do is not.

    A policy of your own is tested by::

        class TestMine(EvictorContract):
            def make(self) -> Evictor:
                return Mine()
    """

    def make(self) -> Evictor:
        """An empty evictor; called anew for each test."""
        raise NotImplementedError

    def test_an_empty_one_has_no_victim(self) -> None:
        """There is nobody to choose."""
        assert self.make().victim(_nobody) is None

    def test_the_victim_is_present_and_stays_until_it_is_removed(self) -> None:
        """`victim` only answers a question."""
        evictor = self.make()
        evictor.added(held(1))
        assert evictor.victim(_nobody) == name_of(1)
        assert evictor.victim(_nobody) == name_of(1)
        evictor.removed(name_of(1))
        assert evictor.victim(_nobody) is None

    def test_never_chooses_who_is_pinned(self) -> None:
        """Pinned bytes are being read or written."""
        evictor = self.make()
        for number in range(50):
            evictor.added(held(number))
        free = name_of(37)
        assert evictor.victim(lambda name: name != free) == free
        assert evictor.victim(_everybody) is None

    def test_forgets_nobody_because_of_a_pin(self) -> None:
        """Who was skipped is found again when the pin is gone."""
        evictor = self.make()
        for number in range(20):
            evictor.added(held(number))
        assert evictor.victim(_everybody) is None
        assert _drain(evictor) == {name_of(number) for number in range(20)}

    def test_adding_twice_makes_one(self) -> None:
        """The second time is a use."""
        evictor = self.make()
        evictor.added(held(1))
        evictor.added(held(1))
        evictor.removed(name_of(1))
        assert evictor.victim(_nobody) is None

    def test_strangers_are_ignored(self) -> None:
        """Touching or removing a name that was never added changes nothing."""
        evictor = self.make()
        evictor.touched(held(9))
        evictor.removed(name_of(9))
        assert evictor.victim(_nobody) is None
        evictor.added(held(1))
        evictor.removed(name_of(9))
        assert _drain(evictor) == {name_of(1)}

    def test_everybody_leaves_in_the_end(self) -> None:
        """Whatever was linked, used, removed and added again: nobody stays for ever, and nobody leaves twice."""
        chance = random.Random(7)
        evictor = self.make()
        present: set[bytes] = set()
        for _ in range(3000):
            number = chance.randrange(200)
            parent = number - 1 if number % 8 else None
            event = held(number, parent)
            match chance.randrange(4):
                case 0 | 1:
                    evictor.added(event)
                    present.add(event.name)
                case 2:
                    evictor.touched(event)
                case _:
                    evictor.removed(event.name)
                    present.discard(event.name)
            victim = evictor.victim(_nobody)
            assert (victim in present) if present else victim is None
        assert _drain(evictor) == present

    def test_no_parents_in_a_ring_can_stop_it(self) -> None:
        """Parents may come from a damaged hint; even then somebody must be able to leave."""
        evictor = self.make()
        evictor.added(held(1, parent=2))
        evictor.added(held(2, parent=1))
        evictor.added(held(3, parent=3))
        assert _drain(evictor) == {name_of(1), name_of(2), name_of(3)}


def _nobody(_name: bytes) -> bool:
    return False


def _everybody(_name: bytes) -> bool:
    return True


def _drain(evictor: Evictor) -> set[bytes]:
    """Evict until nobody is left."""
    gone: set[bytes] = set()
    while (victim := evictor.victim(_nobody)) is not None:
        assert victim not in gone, "a name that was removed is chosen again"
        gone.add(victim)
        evictor.removed(victim)
    return gone
