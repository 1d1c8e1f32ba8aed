"""A model of vLLM's asynchronous steps and kvtier's connector, of which every reachable state is visited.

Three sequences of events interleave in every order. vLLM's scheduler schedules steps, at most two before the first has
returned, and ends, preempts and aborts requests. The device runs the steps in order, later. Copies begin and end at any
time. A block of KV holds a chunk, made of a text and the weights that computed it. Each request has one chunk that can
be stored and loaded, and a tail in a block of its own. So two requests need four blocks, and there are three.

What vLLM, the user or a copy may choose is free: which free block is handed out, which requests a step takes, which
copy fails. So the model allows more than vLLM does. A schedule is one event, because what goes on meanwhile could as
well happen before or after it. `rules.RULES` names what kvtier does about all this. A model without one of these rules
reaches a state that breaks a promise, or one in which a request waits for ever.
"""

from collections.abc import Iterator
from functools import partial

from tests.model.copies import Event
from tests.model.schedules import Schedules
from tests.model.world import (
    COPYING,
    COUNTED,
    DUE,
    FAILED,
    GARBAGE,
    LAUNCHED,
    LOST,
    NEVER,
    QUEUED,
    REVOKED,
    RUN,
    SCHEDULED,
    UNSENT,
    Draft,
    Request,
    Violation,
    World,
    said,
)


class Model(Schedules):
    """vLLM's scheduler, a worker, a device and kvtier. The arguments are those of `Copies`."""

    def first(self) -> World:
        """The state in which all requests have arrived."""
        nothing: tuple[()] = ()
        requests = (Request(),) * len(self.texts)
        blocks = (GARBAGE,) * self.blocks, (-1,) * self.blocks, (False,) * self.blocks
        lists = requests, nothing, nothing, nothing, nothing, nothing, (0,)
        return Draft(World(*blocks, *lists, 0, 0, 0, 0, 0, False, False, self.left), self.texts).frozen()

    def is_end(self, world: World) -> bool:
        """Whether every request has ended, and no block is held."""
        is_held = world.queue or world.deferred or world.scatters or any(store.pinned for store in world.stores)
        return not is_held and all(request.status == "-" for request in world.requests)

    def successors(self, world: World) -> Iterator[tuple[str, World | Violation]]:
        """All that may happen next, and the state, or the promise that it breaks."""
        for label, act in self._events(world):
            draft = Draft(world, self.texts)
            try:
                act(draft)
            except Violation as violation:
                yield label, violation
            else:
                yield label, draft.frozen()

    def _events(self, world: World) -> Iterator[Event]:
        yield from self._copies(world)
        yield from self._steps(world)
        if not world.queue or world.queue[0].phase != COUNTED:
            yield from self._users(world)
            if len(world.queue) < self.depth:
                yield from self._schedules(world)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _steps(self, world: World) -> Iterator[Event]:
        phases = [step.phase for step in world.queue]
        for position, phase in enumerate(phases):
            if phase == SCHEDULED:
                is_waiting = any(it.revoke == position and it.phase == COPYING for it in world.scatters)
                if not (is_waiting and self.on("BlockCopier.revoke")):
                    yield from self._launches(world, position)
                break
        for position, phase in enumerate(phases):
            if phase < RUN:
                if phase == LAUNCHED:
                    yield f"step {position} runs on the device", partial(self._run, position)
                break
        if phases and phases[0] == RUN:
            if self.is_silent:
                yield "the oldest step has returned, its tokens are counted", self._count
            else:
                yield "the oldest step has returned", self._returns
        elif phases and phases[0] == COUNTED:
            yield "its results reach kvtier", self._stepped

    def _launches(self, world: World, position: int) -> Iterator[Event]:
        noted: list[tuple[int, ...]] = [()]
        for number, request in enumerate(world.requests):
            load = request.load
            if load is not None and load.ended and load.told == NEVER and load.ordered == NEVER:
                noted += [(*some, number) for some in noted]
        for some in noted:
            heard = "".join(f", which has a note about r{number}" for number in some)
            yield f"step {position} is launched{heard}", partial(self._launch, position, some)

    def _launch(self, position: int, noted: tuple[int, ...], new: Draft) -> None:
        step = new.queue[position]
        if self.on("Worker.begin"):
            for number, store in enumerate(new.stores):
                if store.revoke == position:
                    new.stores[number] = store._replace(revoke=REVOKED)
            new.scatters = [it._replace(revoke=REVOKED) if it.revoke == position else it for it in new.scatters]
        if step.base > new.worker_base:
            new.worker_base, new.known = step.base, new.weights
            new.meaning[step.base] = new.weights
        has_changed = self.is_silent and new.weights != new.known and self.on("Worker.results")
        for number, request in enumerate(new.requests):
            load = request.load
            if load is not None and load.told == NEVER and (load.ordered <= position or number in noted):
                is_bad = (step.is_off or has_changed) and self.on("StepOrders")
                ended = FAILED if is_bad else load.ended
                new.set(number, load=load._replace(told=position, ended=ended))
        phase = LAUNCHED if step.items else RUN
        new.queue[position] = step._replace(phase=phase, weights=new.weights, changed=has_changed)

    def _run(self, position: int, new: Draft) -> None:
        step = new.queue[position]
        new.queue[position] = step._replace(phase=RUN)
        for item in sorted(step.items, key=lambda it: it.unit):
            name, text = f"r{item.request}", self.texts[item.request]
            busy = [it.block for it in new.scatters if it.phase == COPYING]
            for block in (item.chunk, item.tail):
                if block in busy:
                    raise Violation(f"{name}'s forward uses block {block}, which a load writes")
            if item.unit < self.parts:
                is_full = item.unit == self.parts - 1
                self._write(new, item.chunk, 2 * text + step.weights if is_full else GARBAGE)
                continue
            content = new.content[item.chunk]
            if item.is_alive and (content < 0 or content // 2 != text or content % 2 < new.oldest):
                raise Violation(f"{name}'s forward reads {said(content)} in block {item.chunk}")
            self._write(new, item.tail, GARBAGE)

    def _returns(self, new: Draft) -> None:
        self._count(new)
        self._stepped(new)

    def _count(self, new: Draft) -> None:
        """vLLM's part of a step that has returned."""
        step = new.queue[0]
        new.queue[0] = step._replace(phase=COUNTED)
        if step.items:
            new.deferred = [(fence - 1, blocks) for fence, blocks in new.deferred if fence > 1]
        for item in step.items:
            if item.unit == self.parts and item.is_alive:
                self._store(new, item.request, is_end=True)
                self._free(new, item.request)
                new.set(item.request, status="-")

    def _stepped(self, new: Draft) -> None:
        """kvtier's part of it."""
        step = new.queue.pop(0)
        for number, store in enumerate(new.stores):
            if 0 <= store.revoke < DUE:
                new.stores[number] = store._replace(revoke=store.revoke - 1)
        new.scatters = [it._replace(revoke=it.revoke - 1) if 0 <= it.revoke < DUE else it for it in new.scatters]
        told = []
        for number, request in enumerate(new.requests):
            if (load := request.load) is not None:
                if load.told == 0:
                    told.append(number)
                ordered, tells = (it - (it < LOST) for it in (load.ordered, load.told))
                new.set(number, load=load._replace(ordered=ordered, told=tells))
        if step.changed and step.base >= new.base:
            self._weights_change(new)
        if not new.is_broken:
            self._settle(new)
            self._yield_idle(new)
            for number, request in enumerate(new.requests):
                if request.status == "R":
                    self._store(new, number, is_end=False)
            for number, store in enumerate(new.stores):
                if store.phase == UNSENT:
                    new.stores[number] = store._replace(phase=QUEUED)
        for number in told:
            self._reported(new, number)

    def _reported(self, new: Draft, number: int) -> None:
        request = new.requests[number]
        assert request.load is not None
        is_bad = request.load.ended == FAILED or request.failed
        if request.status == "A":
            new.set(number, status="-", table=(), load=None)
        elif is_bad:
            new.set(number, table=(), computed=0, load=None, reported=True, failed=True)
        else:
            new.set(number, load=None, reported=True)

    # ---- what users do ---------------------------------------------------------------------------------------------

    def _users(self, world: World) -> Iterator[Event]:
        aborts, changes, resets, _ = world.left
        if aborts:
            for number, request in enumerate(world.requests):
                if request.status in "WRL":
                    yield f"r{number} is aborted", partial(self._abort, number)
        if changes and (self.is_silent or all(step.phase != SCHEDULED for step in world.queue)):
            yield "the weights change", self._change
        if resets and not world.is_broken:
            yield "a reset", partial(self._reset, False)
            if any(request.status == "R" for request in world.requests):
                yield "a reset that preempts", partial(self._reset, True)

    def _abort(self, number: int, new: Draft) -> None:
        new.left[0] -= 1
        request = new.requests[number]
        if not new.is_broken:
            self._settle(new)
            request = new.requests[number]
        if request.status == "L" and not request.reported:
            load = request.load
            assert load is not None
            new.set(number, status="A", failed=False)
            if not self.on("Loads.drop"):
                new.set(number, load=load._replace(ordered=LOST, told=LOST))
            elif not load.ended:
                self._void(new, number)
                if not self.on("Loads._deliver"):
                    self._deliver(new, number, FAILED)
            return
        if request.status == "R":
            self._store(new, number, is_end=False)
        self._free(new, number)
        new.set(number, status="-", reported=False, failed=False, is_fresh=False)

    def _void(self, new: Draft, number: int) -> None:
        load = new.requests[number].load
        if load is not None and not load.ended:
            new.set(number, load=load._replace(void=True))

    def _change(self, new: Draft) -> None:
        new.left[1] -= 1
        if not self.is_silent and not new.is_broken:
            self._weights_change(new)
        new.weights = 1

    def _weights_change(self, new: Draft) -> None:
        if new.is_off or new.is_broken or not self.on("Invalidation.weights_change"):
            return
        new.is_off = True
        self._cancel(new, range(len(new.stores)))
        self._yield_idle(new)
        self._renew(new)
        self._restart_waiting(new)

    def _renew(self, new: Draft) -> None:
        epoch = -1 if new.is_off else len(new.meaning) - 1
        for number, request in enumerate(new.requests):
            if self.on("Loads.void"):
                self._void(new, number)
            is_old = request.computed > 0 if request.load is None else bool(request.load.ended)
            new.set(number, epoch=-1 if is_old else epoch)

    def _restart_waiting(self, new: Draft) -> None:
        for number, request in enumerate(new.requests):
            if request.status == "L" and self.on("Loads.void"):
                self._void(new, number)
            if not self.on("EngineCache.restart"):
                continue
            if request.status == "L":
                table = () if request.reported else request.table
                new.set(number, failed=True, computed=0, table=table)
            elif request.status == "W":
                new.set(number, table=(), computed=0, is_fresh=False)

    def _reset(self, preempts: bool, new: Draft) -> None:
        new.left[2] -= 1
        for number, request in enumerate(new.requests):
            if preempts and request.status == "R":
                self._free(new, number)
                new.set(number, status="W")
        is_running = any(request.status == "R" for request in new.requests)
        if self.on("Invalidation.own_reset_begins"):
            self._yield_idle(new)
            if not is_running:
                self._restart_waiting(new)
        held = self._used(new)
        leaving = {block for _, blocks in new.deferred for block in blocks}
        for request in new.requests:
            if request.status == "A" or (request.failed and not request.computed):
                leaving.update(request.table)
        is_empty = not held - (leaving if self.on("EngineCache.watch_resets") else set())
        if not is_empty and not is_running:
            raise Violation(f"a reset fails because of blocks {sorted(held)}, and no request runs")
        if is_empty:
            new.hashes = [-1] * self.blocks
            for block in [block for block in range(self.blocks) if new.watched[block]]:
                if block in held:
                    self._hand_out(new, block)
                elif not self.on("BlockPins._reused"):
                    new.watched[block] = False
            new.oldest = new.weights
        if self.on("KeyMaker.new_epoch"):
            new.meaning.append(new.weights if is_empty or not self.is_silent else -1)
        if new.is_off and not is_empty and self.on("Invalidation.reset"):
            return
        new.is_off = False
        if is_empty:
            new.base = len(new.meaning) - 1
        self._renew(new)
