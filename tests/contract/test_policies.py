"""Every eviction policy through the shared contract suite."""

import pytest

from kvtier.errors import ConfigError
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.base import Evictor
from kvtier.policy.fifo import Fifo
from kvtier.policy.lru import Lru
from kvtier.policy.registry import EVICTORS, make_evictor
from kvtier.testing.policy_contract import EvictorContract, use_of


class TestAdaptive(EvictorContract):
    def make(self) -> Evictor:
        return make_evictor("adaptive")


class TestLru(EvictorContract):
    def make(self) -> Evictor:
        return make_evictor("lru")


class TestFifo(EvictorContract):
    def make(self) -> Evictor:
        return make_evictor("fifo")


class Forgets(Fifo):
    """A wrong policy: it loses whom it skipped. The suite must see it."""

    def victim(self, is_pinned):
        for name in list(self._names):
            if not is_pinned(name):
                return name
            self.removed(name)
        return None


class TakesPinned(Fifo):
    """A wrong policy: it evicts pinned objects. The suite must see it."""

    def victim(self, is_pinned):
        return super().victim(lambda _name: False)


@pytest.mark.parametrize("wrong", [Forgets, TakesPinned])
def test_the_suite_finds_wrong_policies(wrong):
    class Suite(EvictorContract):
        def make(self) -> Evictor:
            return wrong()

    with pytest.raises(AssertionError):
        Suite().test_never_chooses_a_pinned_object()


def test_the_registry_makes_a_new_one_each_time_and_names_whom_it_knows():
    assert isinstance(make_evictor("lru"), Lru)
    assert isinstance(make_evictor("adaptive"), Adaptive)
    assert make_evictor("lru") is not make_evictor("lru")
    for name in EVICTORS:
        assert make_evictor(name).victim(lambda _name: False) is None
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'lfu'; allowed: adaptive, fifo, lru"):
        make_evictor("lfu")


def test_fifo_ignores_use():
    fifo = Fifo()
    fifo.added(use_of(1))
    fifo.added(use_of(2))
    fifo.touched(use_of(1))
    assert fifo.victim(lambda _name: False) == use_of(1).name
    assert len(fifo) == 2
