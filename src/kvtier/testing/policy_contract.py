"""Contract tests for eviction policies. Subclass `EvictorContract` in a pytest module and override `make`."""

import random

from kvtier.policy.base import Evictor, Use


def use_of(number: int, parent: int | None = None) -> Use:
    """Return a use of object `number`."""
    return Use(name_of(number), None if parent is None else name_of(parent))


def name_of(number: int) -> bytes:
    """Return a 32-byte name, like those of keys and objects."""
    return number.to_bytes(32, "big")


class EvictorContract:
    """A policy chooses freely, but it evicts every object exactly once, and never a pinned one.

    Test your policy with::

        class TestMine(EvictorContract):
            def make(self) -> Evictor:
                return Mine()
    """

    def make(self) -> Evictor:
        """Return an empty evictor. Each test calls this."""
        raise NotImplementedError

    def test_the_victim_is_present_and_stays_until_it_is_removed(self) -> None:
        """Calling `victim` changes nothing."""
        evictor = self.make()
        assert evictor.victim(_none) is None
        evictor.added(use_of(1))
        assert evictor.victim(_none) == name_of(1)
        assert evictor.victim(_none) == name_of(1)
        evictor.removed(name_of(1))
        assert evictor.victim(_none) is None

    def test_never_chooses_a_pinned_object(self) -> None:
        """The bytes of a pinned object are being read or written. It can be evicted once it is unpinned."""
        evictor = self.make()
        for number in range(50):
            evictor.added(use_of(number))
        free = name_of(37)
        assert evictor.victim(lambda name: name != free) == free
        assert evictor.victim(_all) is None
        assert _drain(evictor) == {name_of(number) for number in range(50)}

    def test_every_object_is_evicted_once(self) -> None:
        """Any additions, uses and removals may precede eviction, even of names that the evictor lacks."""
        chance = random.Random(7)
        evictor = self.make()
        present: set[bytes] = set()
        for _ in range(3000):
            number = chance.randrange(200)
            parent = number - 1 if number % 8 else None
            event = use_of(number, parent)
            match chance.randrange(4):
                case 0 | 1:
                    evictor.added(event)
                    present.add(event.name)
                case 2:
                    evictor.touched(event)
                case _:
                    evictor.removed(event.name)
                    present.discard(event.name)
            victim = evictor.victim(_none)
            assert (victim in present) if present else victim is None
        assert _drain(evictor) == present

    def test_a_retained_object_is_no_candidate_until_it_comes_back(self) -> None:
        """A hint removes objects from the middle and the end of a prefix. Their parents need not stay."""
        evictor = self.make()
        for number in range(10):
            evictor.added(use_of(number, number - 1 if number else None))
        retained = {4, 9}
        for number in retained:
            evictor.removed(name_of(number))
            evictor.touched(use_of(number, number - 1))
        assert _drain(evictor) == {name_of(number) for number in range(10) if number not in retained}
        for number in retained:
            evictor.added(use_of(number, number - 1))
        assert _drain(evictor) == {name_of(number) for number in retained}

    def test_a_cycle_of_parents_is_evicted(self) -> None:
        """Parents may come from a damaged index."""
        evictor = self.make()
        evictor.added(use_of(1, parent=2))
        evictor.added(use_of(2, parent=1))
        evictor.added(use_of(3, parent=3))
        assert _drain(evictor) == {name_of(1), name_of(2), name_of(3)}, (
            "names whose parents form a cycle are never evicted"
        )


def _none(_name: bytes) -> bool:
    return False


def _all(_name: bytes) -> bool:
    return True


def _drain(evictor: Evictor) -> set[bytes]:
    """Evict all objects, and return their names."""
    gone: set[bytes] = set()
    while (victim := evictor.victim(_none)) is not None:
        assert victim not in gone, "the policy chose a name that was removed"
        gone.add(victim)
        evictor.removed(victim)
    return gone
