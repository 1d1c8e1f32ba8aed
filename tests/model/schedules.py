"""Schedules of the model in `async_steps`: all steps that vLLM may put together, and the orders that kvtier adds."""

from collections.abc import Callable, Iterator
from functools import partial

from tests.model.copies import Copies, Event
from tests.model.world import (
    COPYING,
    DUE,
    FAILED,
    LOST,
    NEVER,
    QUEUED,
    SCHEDULED,
    Draft,
    Item,
    Load,
    Request,
    Step,
    Violation,
    World,
    said,
)


class Schedules(Copies):
    """What vLLM may put into a step, and kvtier's part of it."""

    def _schedules(self, world: World) -> Iterator[Event]:
        """All steps that vLLM may put together now."""
        if all(request.status == "-" for request in world.requests) and not world.stores:
            return
        known: set[tuple[World, tuple[Item, ...], bool]] = set()
        open_ones: list[tuple[World, tuple[Item, ...], bool, tuple[str, ...]]] = [(world, (), False, ())]
        while open_ones:
            now, items, has_preempted, said_so_far = open_ones.pop()
            key = (now, tuple(sorted(items)), has_preempted)
            if key in known:
                continue
            known.add(key)
            text = ", ".join(said_so_far) or "nothing"
            has_report = any(it.load and it.load.ended and it.load.told == NEVER for it in now.requests)
            if said_so_far or has_report or not world.queue:
                yield f"a step is scheduled: {text}", partial(self._orders, now, items)
                if world.left[3] and not world.is_broken:
                    yield f"an internal error in a step: {text}", partial(self._last_orders, now, items)
            for label, act in self._choices(now, items, has_preempted):
                draft = Draft(now, self.texts)
                added, preempts = act(draft)
                more = items if added is None else (*items, added)
                open_ones.append((draft.raw(), more, has_preempted or preempts, (*said_so_far, label)))

    def _choices(self, now: World, items: tuple[Item, ...], has_preempted: bool) -> Iterator[tuple[str, Callable]]:
        """What vLLM may do next in a schedule. The action returns what it adds to the step, and whether it preempts."""
        used = self._used(now)
        free = [block for block in range(self.blocks) if block not in used]
        busy = {item.request for item in items}
        for number, request in enumerate(now.requests):
            name = f"r{number}"
            if request.status == "R" and request.computed < self.parts and number not in busy:
                yield f"{name} goes on", partial(self._goes_on, number, -1)
            elif request.status == "R" and request.computed == self.parts and number not in busy:
                for block in free:
                    yield f"{name} goes on in block {block}", partial(self._goes_on, number, block)
                if not free and not self._has_idle_pins(now):
                    for victim, other in enumerate(now.requests):
                        is_under_way = any(it.request == victim for step in now.queue for it in step.items)
                        if other.status == "R" and victim not in busy and not is_under_way:
                            yield f"r{victim} is preempted", partial(self._preempts, victim)
                elif not free:
                    yield "pins are given back", self._gives_back
            elif request.status == "L" and request.reported:
                yield f"{name} has its load", partial(self._promotes, number)
            elif request.status == "W" and not has_preempted and number not in busy:
                yield from self._admissions(now, number, request, free)

    def _admissions(self, now: World, number: int, request: Request, free: list[int]) -> Iterator[tuple[str, Callable]]:
        name, text = f"r{number}", self.texts[number]
        if request.table:
            for block in free:
                yield f"{name} begins behind its load, in block {block}", partial(self._begins_loaded, number, block)
            return
        hits = [block for block in range(self.blocks) if now.hashes[block] == text]
        for hit in hits:
            for block in free:
                if block != hit:
                    yield (
                        f"{name} begins behind block {hit}, in block {block}",
                        partial(self._begins_behind, number, hit, block),
                    )
        if hits:
            return
        key = 2 * request.epoch + text
        is_cached = request.epoch >= 0 and not now.is_broken and not now.is_off
        found = [content for known, content in now.objects if known == key] if is_cached else []
        others = [it for it in now.requests if it.load is not None and it.status != "A"]
        if found and any(it.load.key == key and not it.load.void for it in others if it.load is not None):
            return  # that load brings it
        if found and not any(it.request == number for it in now.scatters):
            # A load is admitted only if all of it fits beside what others will need.
            reserved = sum(2 - len(it.table) for it in now.requests if it.table)
            if len(free) >= 2 + reserved:
                for block in free:
                    yield f"{name} loads into block {block}", partial(self._loads, number, block, found[0])
            return
        for block in free:
            yield f"{name} begins in block {block}", partial(self._begins, number, block)

    def _goes_on(self, number: int, block: int, new: Draft) -> tuple[Item, bool]:
        request = new.requests[number]
        if block >= 0:
            self._hand_out(new, block)
            new.set(number, table=(*request.table, block))
        elif request.computed == self.parts - 1:
            new.hashes[request.table[0]] = self.texts[number]  # vLLM's cache finds it before it is computed
        new.set(number, computed=request.computed + 1)
        return Item(number, request.computed, request.table[0], block), False

    def _preempts(self, number: int, new: Draft) -> tuple[None, bool]:
        new.set(number, status="W", table=(), computed=0)
        return None, True

    def _gives_back(self, new: Draft) -> tuple[None, bool]:
        self._yield_idle(new)
        return None, False

    def _promotes(self, number: int, new: Draft) -> tuple[None, bool]:
        request = new.requests[number]
        if request.failed:
            new.set(number, status="W", table=(), computed=0, failed=False, reported=False)
        else:
            new.hashes[request.table[0]] = self.texts[number]
            new.set(number, status="W", computed=self.parts, reported=False, is_fresh=True)
        return None, False

    def _begins_loaded(self, number: int, block: int, new: Draft) -> tuple[Item, bool]:
        request = new.requests[number]
        self._hand_out(new, block)
        new.set(number, status="R", table=(*request.table, block), computed=self.parts + 1)
        return Item(number, self.parts, request.table[0], block, begins=True), False

    def _matched(self, new: Draft, number: int, is_cached: bool) -> None:
        new.set(number, began=False, handed=is_cached)
        for position, step in enumerate(new.queue):
            items = [it._replace(begins=it.begins and it.request != number) for it in step.items]
            new.queue[position] = step._replace(items=tuple(items))

    def _begins_behind(self, number: int, hit: int, block: int, new: Draft) -> tuple[Item, bool]:
        request = new.requests[number]
        key = 2 * request.epoch + self.texts[number]
        self._matched(new, number, any(known == key for known, _ in new.objects))
        self._hand_out(new, block)
        new.set(number, status="R", table=(hit, block), computed=self.parts + 1)
        return Item(number, self.parts, hit, block, begins=True), False

    def _begins(self, number: int, block: int, new: Draft) -> tuple[Item, bool]:
        self._matched(new, number, is_cached=False)
        self._hand_out(new, block)
        if self.parts == 1:
            new.hashes[block] = self.texts[number]  # vLLM's cache finds it before it is computed
        new.set(number, status="R", table=(block,), computed=1)
        return Item(number, 0, block, begins=True), False

    def _loads(self, number: int, block: int, content: int, new: Draft) -> tuple[None, bool]:
        self._matched(new, number, is_cached=True)
        self._hand_out(new, block)
        key = 2 * new.requests[number].epoch + self.texts[number]
        readers = [store for store in new.stores if store.block == block]
        if not self.on("Stores.reading"):
            readers = []
        new.set(number, status="L", table=(block,), computed=self.parts, load=Load(key, content, bool(readers)))
        self._start_loads(new)
        return None, False

    def _orders(self, now: World, items: tuple[Item, ...], new: Draft) -> None:
        """kvtier's part of a schedule."""
        new.take(now)
        if not new.is_broken:
            self._settle(new)
            self._yield_idle(new)
            if self.on("Scheduler.orders"):
                self._carry_revoked(new)
            for number, request in enumerate(new.requests):
                load = request.load
                if load is not None and load.ended and load.ordered == NEVER:
                    ordered = len(new.queue) if self.on("Loads.reports") else LOST
                    new.set(number, load=load._replace(ordered=ordered))
        self._append(new, items)

    def _last_orders(self, now: World, items: tuple[Item, ...], new: Draft) -> None:
        """The same with an internal error: kvtier ends what is open, and is off."""
        new.take(now)
        new.left[3] -= 1
        new.is_broken = True
        position = len(new.queue)
        for number, request in enumerate(new.requests):
            load = request.load
            if load is not None and load.ordered == NEVER and self.on("Loads.last_reports"):
                new.set(number, load=load._replace(ended=load.ended or FAILED, ordered=position))
        if self.on("Scheduler.last_orders"):
            for number, store in enumerate(new.stores):
                new.stores[number] = store._replace(revoke=position if store.revoke >= DUE else store.revoke)
            new.scatters = [it._replace(revoke=position) for it in new.scatters]
        new.stores = [it._replace(pinned=False) for it in new.stores if it.phase in (QUEUED, COPYING)]
        self._append(new, items)

    def _carry_revoked(self, new: Draft) -> None:
        for number, store in enumerate(new.stores):
            if store.revoke == DUE:
                new.stores[number] = store._replace(revoke=len(new.queue))

    def _append(self, new: Draft, items: tuple[Item, ...]) -> None:
        for item in items:
            if not item.begins:
                continue
            request = new.requests[item.request]
            content = new.content[item.chunk]
            if request.is_fresh and new.is_off and content % 2 != new.weights:
                raise Violation(f"r{item.request} begins behind {said(content)}, which was loaded before the change")
            new.set(item.request, began=True, is_fresh=False)
        new.queue.append(Step(SCHEDULED, tuple(sorted(items)), new.base, new.is_off))
