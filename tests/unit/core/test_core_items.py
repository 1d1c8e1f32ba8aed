"""Steps of an item: those outside the tables raise, and the simulator takes each step in them."""

import pytest
from tests import sim
from tests.core_driver import Driver, prefix_of
from tests.sim import objects

from kvtier.core.operations import (
    LOAD_STEPS,
    PREFETCH_STEPS,
    STORE_STEPS,
    ItemState,
    LoadOperation,
    OpenOperations,
    PrefetchOperation,
    StoreOperation,
    WorkItem,
)
from kvtier.types import ChunkKey, Place, RequestId

PREFIX = prefix_of("a")
SEEDS = 60
"""Enough for every step."""

LOAD = LoadOperation(
    request=RequestId("r"), prefix=PREFIX, conversation=None, deadline_s=1.0, tokens=2, resident_tokens=0
)
PREFETCH = PrefetchOperation(
    request=RequestId("r"), prefix=PREFIX, conversation=None, deadline_s=1.0, tokens=2, resident_tokens=0
)
STORE = StoreOperation(request=RequestId("r"), prefix=PREFIX, conversation=None, deadline_s=1.0)


@pytest.mark.parametrize("after", ItemState)
@pytest.mark.parametrize(
    ("work", "before"), [(work, before) for work in (LOAD, PREFETCH, STORE) for before in work.STEPS]
)
def test_a_step_is_in_the_table_or_raises(work: LoadOperation | StoreOperation, before: ItemState, after: ItemState):
    item = WorkItem(work, Place(0, 0, ()), ChunkKey(b"a"), before)
    if after in work.STEPS[before]:
        item.become(after)
        assert item.state is after
    else:
        with pytest.raises(AssertionError, match=f"no step from {before.name} to {after.name}"):
            item.become(after)
        assert item.state is before


def test_the_simulator_takes_every_step_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[type, ItemState, ItemState]] = set()
    real = WorkItem.become

    def become(self: WorkItem, state: ItemState) -> None:
        taken.add((type(self.work), self.state, state))
        real(self, state)

    monkeypatch.setattr(WorkItem, "become", become)
    for seed in range(SEEDS):
        assert sim.run(seed, hinted=0.3).is_good
        assert objects.run(seed).is_good
    tables = {LoadOperation: LOAD_STEPS, PrefetchOperation: PREFETCH_STEPS, StoreOperation: STORE_STEPS}
    assert taken == {
        (kind, a, b) for kind, steps in tables.items() for a, following in steps.items() for b in following
    }


def open_driver() -> tuple[Driver, OpenOperations]:
    """Store `s` copies "a"; "b" is wanted because one gather at a time is allowed; load `r` waits for "a"."""
    core = Driver(stores_in_flight=1)
    core.store("s", prefix_of("ab"))
    core.load("r", PREFIX)
    core.cache.check()
    return core, core.cache._operations


def test_an_item_that_is_not_where_its_state_says_is_noticed() -> None:
    core, operations = open_driver()
    operations.waiters.clear()
    with pytest.raises(AssertionError, match="a waiting item is lost"):
        core.cache.check()
    core, operations = open_driver()
    next(iter(operations.stores)).todo.clear()
    with pytest.raises(AssertionError, match="todo misses an item"):
        core.cache.check()
    core, operations = open_driver()
    core.cache._transfers.flights.clear()
    with pytest.raises(AssertionError):
        core.cache.check()


def test_an_operation_that_has_ended_holds_no_items() -> None:
    """Items and operations refer to each other: only the garbage collector would free them."""
    core, operations = open_driver()
    ended = [*operations.loads.values(), *operations.stores]
    core.run()
    assert not operations.loads
    assert not operations.stores
    assert not any(work.items or work.todo for work in ended)
