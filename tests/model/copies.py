"""Blocks, stores and loads of the model in `async_steps`. Copies run beside the steps, at any time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from tests.model.rules import named
from tests.model.world import (
    COPYING,
    COUNTED,
    DONE,
    DUE,
    ENDED,
    FAILED,
    GARBAGE,
    NEVER,
    QUEUED,
    REVOKED,
    STORES_MAX,
    TORN,
    UNSENT,
    Draft,
    Scatter,
    Store,
    Violation,
    World,
    said,
)

Event: TypeAlias = tuple[str, Callable[[Draft], None]]
"""What may happen, in words, and what it does to a state."""


class Copies:
    """vLLM's scheduler, a worker, a device and kvtier.

    Args:
        texts: the text of each request's chunk, 0 or 1.
        blocks: in the pool.
        depth: steps that may be under way.
        parts: steps that compute a chunk.
        aborts, changes, resets, errors: how many there may be at most.
        is_silent: a change of weights comes without a call, so that only the worker can notice it.
        without: functions whose rules do not hold.
    """

    def __init__(
        self,
        texts: Sequence[int] = (0, 0, 1),
        *,
        blocks: int = 3,
        depth: int = 2,
        parts: int = 1,
        aborts: int = 0,
        changes: int = 0,
        resets: int = 0,
        errors: int = 0,
        is_silent: bool = False,
        without: Collection[str] = (),
    ) -> None:
        self.texts, self.blocks, self.depth, self.is_silent = tuple(texts), blocks, depth, is_silent
        self.parts = parts
        self.left = (aborts, changes, resets, errors)
        self.without = frozenset(map(named, without))

    def on(self, rule: str) -> bool:
        """Whether a rule holds."""
        return not self.without or named(rule) not in self.without

    # ---- copies ----------------------------------------------------------------------------------------------------

    def _copies(self, world: World) -> Iterator[Event]:
        for number, store in enumerate(world.stores):
            name = f"the gather of block {store.block}"
            if store.phase == QUEUED:
                if store.revoke != REVOKED or not self.on("BlockCopier._run"):
                    yield f"{name} begins", partial(self._gather_begins, number)
                yield f"the store of block {store.block} fails", partial(self._gather_ends, number, False)
            elif store.phase == COPYING:
                is_good = store.revoke != REVOKED or not self.on("BlockCopier._end")
                yield f"{name} ends", partial(self._gather_ends, number, is_good)
        for number, scatter in enumerate(world.scatters):
            name = f"r{scatter.request}'s load into block {scatter.block}"
            if scatter.phase == QUEUED:
                if scatter.revoke != REVOKED or not self.on("BlockCopier._run"):
                    yield f"{name} begins", partial(self._scatter_begins, number)
                yield f"{name} fails", partial(self._scatter_ends, number, FAILED)
            else:
                yield f"{name} ends", partial(self._scatter_ends, number, DONE)

    def _gather_begins(self, number: int, new: Draft) -> None:
        store = new.stores[number]
        new.stores[number] = store._replace(phase=COPYING, seen=new.content[store.block])

    def _gather_ends(self, number: int, is_good: bool, new: Draft) -> None:
        store = new.stores[number]
        new.stores[number] = store._replace(phase=ENDED, seen=GARBAGE)
        if not is_good:
            return
        text, meaning = store.key % 2, new.meaning[store.key // 2]
        if store.seen < 0 or store.seen // 2 != text or meaning not in (-1, store.seen % 2):
            raise Violation(f"text {text} of weights {meaning} is published, with {said(store.seen)}")
        if (store.key, store.seen) not in new.objects:
            new.objects.append((store.key, store.seen))

    def _scatter_begins(self, number: int, new: Draft) -> None:
        new.scatters[number] = scatter = new.scatters[number]._replace(phase=COPYING)
        self._copy_into(new, scatter, TORN)

    def _scatter_ends(self, number: int, how: int, new: Draft) -> None:
        scatter = new.scatters.pop(number)
        if how == DONE:
            self._copy_into(new, scatter, scatter.content)
        load = new.requests[scatter.request].load
        if load is not None and load.told == NEVER and not load.ended:
            self._deliver(new, scatter.request, how)

    def _copy_into(self, new: Draft, scatter: Scatter, content: int) -> None:
        request = new.requests[scatter.request]
        if scatter.block not in request.table or request.load is None:
            raise Violation(f"a copy for r{scatter.request} writes block {scatter.block}, which it does not have")
        self._write(new, scatter.block, content)

    def _write(self, new: Draft, block: int, content: int) -> None:
        new.content[block] = content
        for number, store in enumerate(new.stores):
            if store.block == block and store.phase == COPYING and store.seen != content:
                new.stores[number] = store._replace(seen=TORN)

    def _deliver(self, new: Draft, number: int, how: int) -> None:
        load = new.requests[number].load
        if load is not None and not load.ended:
            is_bad = (how == FAILED or load.void) and self.on("Loads._report")
            new.set(number, load=load._replace(ended=FAILED if is_bad else DONE))

    # ---- stores and loads ------------------------------------------------------------------------------------------

    def _hand_out(self, new: Draft, block: int) -> None:
        """The pool gives a free block to a request."""
        new.hashes[block] = -1
        if new.watched[block]:
            new.watched[block] = False
            if self.on("Stores._reused"):
                self._cancel(new, [number for number, store in enumerate(new.stores) if store.block == block])

    def _cancel(self, new: Draft, numbers: Collection[int]) -> None:
        """Stores are lost. Those that the session does not know end at once."""
        for number in sorted(numbers, reverse=True):
            store = new.stores[number]
            if store.phase == UNSENT:
                del new.stores[number]
            elif store.revoke == NEVER:
                new.stores[number] = store._replace(revoke=DUE)

    def _start_loads(self, new: Draft) -> None:
        """Start the loads whose blocks no store reads any more."""
        for number, request in enumerate(new.requests):
            load = request.load
            if load is None or load.ended or any(it.request == number for it in new.scatters):
                continue
            if load.blocked and any(it.block == request.table[0] for it in new.stores):
                continue
            if load.blocked and not self.on("Loads.unblocked"):
                continue
            if load.void:
                self._deliver(new, number, FAILED)
            else:
                new.set(number, load=load._replace(blocked=False))
                new.scatters.append(Scatter(number, request.table[0], load.content))

    def _settle(self, new: Draft) -> None:
        new.stores = [store for store in new.stores if store.phase != ENDED]
        self._start_loads(new)

    def _yield_idle(self, new: Draft) -> None:
        if not self.on("Stores.yield_idle"):
            return
        held = {block for request in new.requests for block in request.table}
        held.update(block for _, blocks in new.deferred for block in blocks)
        for number, store in enumerate(new.stores):
            if store.pinned and store.block not in held:
                new.stores[number] = store._replace(pinned=False)
                new.watched[store.block] = True

    def _has_idle_pins(self, now: World) -> bool:
        held = {block for request in now.requests for block in request.table}
        held.update(block for _, blocks in now.deferred for block in blocks)
        return self.on("Stores.yield_idle") and any(it.pinned and it.block not in held for it in now.stores)

    def _store(self, new: Draft, number: int, *, is_end: bool) -> None:
        """Store the chunk of a request if it is computed; `is_end`: the step's output has ended the request."""
        request = new.requests[number]
        if new.is_broken or request.epoch < 0 or request.handed or not request.began:
            return
        steps = [(step.phase, it) for step in new.queue for it in step.items if it.request == number]
        is_first = any(it.begins for _, it in steps)
        if is_first and not is_end and self.on("TrackedRequest.computed_tokens/shared"):
            return
        under_way = sum(phase < COUNTED for phase, _ in steps)
        if request.computed - under_way * self.on("TrackedRequest.computed_tokens") < self.parts:
            return
        new.set(number, handed=True)
        if len(new.stores) < STORES_MAX:
            phase = UNSENT if self.on("Stores.send") else QUEUED
            key = 2 * request.epoch + self.texts[number]
            new.stores.append(Store(request.table[0], key, phase, pinned=self.on("Stores.begin")))

    def _free(self, new: Draft, number: int) -> None:
        """vLLM frees the blocks of a request, later if a step under way may write them."""
        blocks = new.requests[number].table
        new.set(number, table=(), computed=0)
        fence, is_under_way = 0, False
        for position, step in enumerate(new.queue):
            if step.phase < COUNTED:
                fence += bool(step.items)
                is_under_way |= any(it.request == number for it in step.items)
            items = tuple([it._replace(is_alive=it.is_alive and it.request != number) for it in step.items])
            new.queue[position] = step._replace(items=items)
        if blocks and is_under_way and self.on("KvtierConnector.__init__"):
            new.deferred.append((fence, blocks))

    @staticmethod
    def _used(world: World | Draft) -> set[int]:
        """Blocks that are not free."""
        used = {block for request in world.requests for block in request.table}
        used.update(block for _, blocks in world.deferred for block in blocks)
        used.update(store.block for store in world.stores if store.pinned)
        return used
