"""The model's blocks and stores against kvtier's own: random walks change both, and both must stay equal.

The real ones are `Stores` and `BlockPins` on the block pool of `tests.vllm_engine_parts`. The walks hand out and free
blocks, store, give pins back, reset vLLM's cache, and end stores. After each event both must agree on pins and on
the blocks in use. They also agree on the stores that have lost their blocks, and on those that a load would wait for.
"""

import random
from typing import Any

import pytest
from tests.model.async_steps import Model
from tests.model.world import DUE, QUEUED, Draft, Store
from tests.vllm_engine_parts import Pool

from kvtier.connect.vllm.scheduler.block_pool import BlockPins
from kvtier.connect.vllm.scheduler.stores import Stores
from kvtier.types import Place, RequestId

WALKS, EVENTS = 400, 40


class Session:
    """Takes stores, and never ends them by itself."""

    def __init__(self) -> None:
        self.taken: list[RequestId] = []
        self.released: set[RequestId] = set()

    def store(self, name: RequestId, *_given: object) -> None:
        self.taken.append(name)

    def release(self, name: RequestId) -> None:
        self.released.add(name)


class Walk:
    """Both, side by side. Block 0 of the real pool is the null block, so block n of the model is its block n + 1."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.model = Model()
        self.now = Draft(self.model.first(), self.model.texts)
        self.pool = Pool(1 + self.model.blocks, has_caching=False)
        self.session: Any = Session()
        self.stores = Stores(self.session, lambda on_reuse: BlockPins(self.pool, on_reuse))  # type: ignore[arg-type]
        self.names: list[RequestId] = []
        """The real names of the model's stores, in its order."""

    def event(self) -> str:
        acts = [self.hand_out] * 4 + [self.free] * 3 + [self.store] * 4 + [self.give_back] * 2
        act = self.draw.choice([*acts, self.orders, self.orders, self.end, self.reset])
        act()
        return act.__name__

    def hand_out(self) -> None:
        used = self.model._used(self.now)
        free = [block for block in range(self.model.blocks) if block not in used]
        waiting = [number for number, request in enumerate(self.now.requests) if not request.table]
        if free and waiting:
            block, number = self.draw.choice(free), self.draw.choice(waiting)
            self.model._hand_out(self.now, block)
            self.now.set(number, table=(block,))
            self.pool.free_block_queue.move_to_end(block + 1, last=False)
            assert [it.block_id for it in self.pool.get_new_blocks(1)] == [block + 1]

    def free(self) -> None:
        holding = [number for number, request in enumerate(self.now.requests) if request.table]
        if holding:
            number = self.draw.choice(holding)
            self.pool.free_blocks([self.pool.blocks[block + 1] for block in self.now.requests[number].table])
            self.now.set(number, table=())

    def store(self) -> None:
        holding = [request for request in self.now.requests if request.table]
        if holding:
            (block,) = self.draw.choice(holding).table
            self.now.stores.append(Store(block, 0, QUEUED))
            self.stores.begin("r", None, [Place(0, 0, (block + 1,))], None)  # type: ignore[arg-type]
            self.stores.send()
            self.names.append(self.session.taken[-1])

    def give_back(self) -> None:
        self.model._yield_idle(self.now)
        self.stores.yield_idle(is_thorough=True)

    def orders(self) -> None:
        """A step goes out, and carries what was lost since the one before."""
        lost = {name for name, it in zip(self.names, self.now.stores, strict=True) if it.revoke == DUE}
        known = set(self.session.released)
        self.model._carry_revoked(self.now)
        self.stores.cancel_lost()
        revoked, self.stores.revoked = self.stores.revoked, []
        assert set(revoked) - known == lost  # one that is lost already may be named again
        assert self.session.released == known | lost

    def end(self) -> None:
        if self.now.stores:
            number = self.draw.randrange(len(self.now.stores))
            del self.now.stores[number]
            self.stores.forget(self.names.pop(number))

    def reset(self) -> None:
        """vLLM's own reset, which gives the pins back first (`BlockPool.reset_prefix_cache`)."""
        self.give_back()
        self.now.left[2] = 1
        is_idle = not self.model._used(self.now)
        assert self.stores.pins.is_idle is is_idle
        if is_idle:
            self.model._reset(False, self.now)
            for block in list(self.pool.watchers):
                self.pool.watchers.pop(block)(self.pool.blocks[block])

    def compare(self) -> None:
        assert {it.block_id - 1 for it in self.pool.blocks[1:] if it.ref_cnt} == self.model._used(self.now)
        assert {block - 1 for block in self.pool.watchers} == {n for n, it in enumerate(self.now.watched) if it}
        assert self.stores.open == self.names
        for name, it in zip(self.names, self.now.stores, strict=True):
            assert any(self.stores._pinned[name]) is it.pinned
        for block in range(self.model.blocks):
            readers = {name for name, it in zip(self.names, self.now.stores, strict=True) if it.block == block}
            assert self.stores.reading({block + 1}) == readers


def walk(seed: int) -> None:
    both = Walk(seed)
    done: list[str] = []
    for _ in range(EVENTS):
        done.append(both.event())
        try:
            both.compare()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {', '.join(done)}: {error}") from error
    both.orders()


def test_the_model_and_the_real_stores_stay_equal() -> None:
    for seed in range(WALKS):
        walk(seed)


@pytest.mark.parametrize(
    ("kind", "name"), [(Stores, "_reused"), (BlockPins, "_reused"), (Stores, "yield_idle"), (BlockPins, "pin")]
)
def test_a_real_rule_that_is_missing_is_seen(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, name, lambda *_arguments, **_named: None)
    with pytest.raises(AssertionError):
        test_the_model_and_the_real_stores_stay_equal()
