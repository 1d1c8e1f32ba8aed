"""Open loads and stores: the life of each of their objects, and how they end.

An object of a load or store is a `WorkItem`. A step that its table (`LOAD_STEPS`, `PREFETCH_STEPS`, `STORE_STEPS`) does
not list raises AssertionError. This module starts no transfers. It fills the queues from which `transfer_scheduler`
takes items.

    load:   WANTED --promotion begins--> WAITING --readable--> QUEUED --scatter begins--> COPYING --> DELIVERED
    store:  WANTED --gather begins--> COPYING --> STORED          WANTED --another transfer--> WAITING --> STORED
    both:   WAITING --transfer failed--> WANTED                   each of these --> FAILED (load), DROPPED (store)

A prefetch is a load without places. Each of its objects is DELIVERED as soon as it is readable. The prefetch ends
without an event.

If objects only pass through host memory (`staging_core`), a store's object is KEEPING until a tier has it, and then
STORED.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import ClassVar

from kvtier.core.core_output import Output
from kvtier.core.host_residency import COMING, HOST, READABLE, HostEntry, HostMemory
from kvtier.core.load_budget import LoadBudget
from kvtier.core.prefix import load_sources, longest_boundary
from kvtier.core.tier_writes import TierWrites
from kvtier.layout import KvLayout
from kvtier.types import (
    SEVERITY,
    ChunkKey,
    LoadDone,
    ObjectsDone,
    Origin,
    Outcome,
    Place,
    Prefix,
    Priority,
    RequestId,
    StoreDone,
)


class ItemState(Enum):
    """State of one object of a load or store."""

    WANTED = auto()
    """It is in the `todo` of its operation, to be promoted or gathered."""
    WAITING = auto()
    """A transfer into its slot is in flight, for this operation or another."""
    QUEUED = auto()
    """It is readable and pinned, and waits for its scatter."""
    COPYING = auto()
    """Its scatter or gather is in flight."""
    DELIVERED = auto()
    FAILED = auto()
    """It will not be delivered."""
    KEEPING = auto()
    """It is in a slot, and waits until a tier has it."""
    STORED = auto()
    DROPPED = auto()
    """It is not stored."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash runs in Python


# Constants for hot paths, as in `host_residency`.
WANTED, WAITING, QUEUED, COPYING = ItemState.WANTED, ItemState.WAITING, ItemState.QUEUED, ItemState.COPYING
DELIVERED, FAILED, STORED, DROPPED = ItemState.DELIVERED, ItemState.FAILED, ItemState.STORED, ItemState.DROPPED
KEEPING = ItemState.KEEPING

WAITING_MAX = 4096
"""Maximum number of objects of all stores that may wait for a slot. Further ones are dropped."""

Steps = dict[ItemState, tuple[ItemState, ...]]

LOAD_STEPS: Steps = {
    WANTED: (WAITING, QUEUED, FAILED),
    WAITING: (QUEUED, WANTED, FAILED),
    QUEUED: (COPYING, FAILED),
    COPYING: (DELIVERED, FAILED),
    DELIVERED: (),
    FAILED: (),
}
PREFETCH_STEPS: Steps = {
    WANTED: (WAITING, DELIVERED, FAILED),
    WAITING: (DELIVERED, WANTED, FAILED),
    DELIVERED: (),
    FAILED: (),
}
STORE_STEPS: Steps = {
    WANTED: (COPYING, WAITING, KEEPING, STORED, DROPPED),
    WAITING: (KEEPING, STORED, WANTED, DROPPED),
    COPYING: (KEEPING, STORED, DROPPED),
    KEEPING: (STORED, DROPPED),
    STORED: (),
    DROPPED: (),
}


@dataclass(slots=True, eq=False)
class WorkItem:
    """One object of a load or store."""

    work: "LoadOperation | StoreOperation"
    place: Place
    key: ChunkKey
    state: ItemState = WANTED
    entry: HostEntry | None = None
    """The copy in host memory that it waits for or reads."""
    source: str = HOST
    """Source of the bytes of a DELIVERED object."""
    tried: frozenset[str] = frozenset()
    """Tiers that failed to deliver the object to this load."""
    outcome: Outcome = Outcome.CANCELLED
    """The most severe outcome of its transfers."""

    def become(self, state: ItemState) -> None:
        """Change the state.

        Raises:
            AssertionError: the table has no such step, which is a bug in the core.
        """
        if state not in self.work.STEPS[self.state]:
            kind = type(self.work).__name__
            raise AssertionError(f"{kind} has no step from {self.state.name} to {state.name}")
        self.state = state


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """The common base of loads and stores."""

    STEPS: ClassVar[Steps]
    request: RequestId
    prefix: Prefix
    conversation: str | None
    deadline_s: float
    items: list[WorkItem] = field(default_factory=list[WorkItem])
    todo: deque[WorkItem] = field(default_factory=deque[WorkItem])
    """Items that are WANTED, in order."""
    aside: dict[str, deque[WorkItem]] = field(default_factory=dict[str, deque[WorkItem]])
    """A get's other WANTED items, by the tier to ask next, so that a tier without room does not delay other tiers."""
    unfinished: int = 0
    """Number of items without a result."""
    is_over: bool = False
    """Whether it was released or is overdue, so that queued work is dropped."""
    origins: Sequence[Origin] = ()
    """Origin of each object of a get or put, whose `prefix` is only the list of its keys."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadOperation(Operation):
    """One load, until its LoadDone."""

    STEPS: ClassVar[Steps] = LOAD_STEPS
    tokens: int
    resident_tokens: int
    budget: LoadBudget | None = None
    begun_s: float = 0.0
    is_alone: bool = False
    """Whether no other load was open at its start."""
    has_led: bool = False
    """Whether a usable chunk has arrived."""
    lowest_regret_s: float = 0.0
    run: int = 0
    """Number of leading chunks that are resident or delivered in every group."""
    undelivered: dict[int, int] = field(default_factory=dict[int, int])
    """Number of objects of each chunk that have not been delivered yet."""
    cut_s: float = inf
    """Time at which the load is cut, unless more chunks arrive."""
    was_cut: bool = False
    cut: int = 1 << 62
    """The first missing chunk of a history. Later chunks are useless."""

    @property
    def end_s(self) -> float:
        """Time at which the load is stopped, unless more chunks arrive."""
        return min(self.deadline_s, self.cut_s)

    def begin(self, now_s: float, budget: LoadBudget | None, *, is_alone: bool) -> None:
        """Record when the load starts, and set its budget."""
        self.begun_s, self.budget, self.is_alone = now_s, budget, is_alone
        self.run = self.resident_tokens // self.prefix.chunk_tokens
        if budget is not None:
            self.cut_s = now_s + budget.cut_s(0.0, 0.0)

    def advanced(self, chunk: int, now_s: float) -> None:
        """Record the delivery of an object of `chunk`, in a load that has only history groups."""
        self.undelivered[chunk] -= 1
        before = self.run
        while self.undelivered.get(self.run) == 0:
            self.run += 1
        self.has_led |= self.run > before
        # A chunk after the cut is too late, even if no call has checked the deadline.
        if self.budget is not None and self.run > before and now_s < self.cut_s:
            saved_s = self.budget.saved_s(self.resident_tokens, self.run * self.prefix.chunk_tokens)
            regret_s = self.budget.regret_s(now_s - self.begun_s, saved_s)
            self.lowest_regret_s = min(self.lowest_regret_s, regret_s)
            self.cut_s = self.begun_s + self.budget.cut_s(self.lowest_regret_s, saved_s)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefetchOperation(LoadOperation):
    """One prefetch, which only brings objects into host memory."""

    priority: Priority = Priority.NORMAL
    until_s: float = 0.0
    """Time until which the objects that it brings are retained."""
    STEPS: ClassVar[Steps] = PREFETCH_STEPS


@dataclass(slots=True, eq=False, kw_only=True)
class StoreOperation(Operation):
    """One store, until its StoreDone."""

    STEPS: ClassVar[Steps] = STORE_STEPS


class OpenOperations:
    """The open loads and stores.

    Args:
        order: sources from fastest to slowest, host memory first.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        host: HostMemory,
        tier_writes: TierWrites,
        order: list[str],
        output: Output,
    ) -> None:
        self.loads: dict[RequestId, LoadOperation] = {}
        self.prefetches: dict[RequestId, PrefetchOperation] = {}
        self.prefetched: list[PrefetchOperation] = []
        """Prefetches that have ended, until `Hints.advance` takes them."""
        self.stores: dict[StoreOperation, None] = {}
        """The open stores, in the order of their starts, and so of their deadlines."""
        self.wanted = 0
        """Number of items of all stores that are WANTED."""
        self.waiters: dict[HostEntry, list[WorkItem]] = {}
        """Items that are WAITING, by the entry whose transfer they wait for."""
        self.scatters: deque[WorkItem] = deque()
        """Items that are QUEUED, in order."""
        self.keepers: dict[HostEntry, list[WorkItem]] = {}
        """Items that are KEEPING, by their entry."""
        self._layout = layout
        self._output = output
        self._host = host
        self._tier_writes = tier_writes
        self._order = order

    # ---- start -----------------------------------------------------------------------------------------------------

    def begin_load(self, load: LoadOperation, places: Sequence[Place], now_s: float) -> None:
        """Queue scatters of readable objects, wait for objects in transfer, and add the others to `load.todo`."""
        self.loads[load.request] = load
        undelivered = load.undelivered
        for place in places:
            undelivered[place.chunk] = undelivered.get(place.chunk, 0) + 1
        self._begin(load, places, now_s)
        if not load.unfinished:
            self.end_if_finished(load)

    def begin_prefetch(self, prefetch: PrefetchOperation, places: Sequence[Place], now_s: float) -> None:
        """Wait for objects in transfer, and add the objects that host memory lacks to `prefetch.todo`."""
        self.prefetches[prefetch.request] = prefetch
        self._begin(prefetch, places, now_s)
        self.end_if_finished(prefetch)

    def begin_store(self, store: StoreOperation, places: Sequence[Place], now_s: float) -> None:
        """Add the objects that host memory lacks to `store.todo`, while fewer than `WAITING_MAX` wait."""
        self.stores[store] = None
        self._begin(store, places, now_s)

    def _begin(self, work: LoadOperation | StoreOperation, places: Sequence[Place], now_s: float) -> None:
        keys = work.prefix.keys
        work.items = [WorkItem(work, place, keys[place.chunk]) for place in places]
        work.unfinished = len(places)
        for item in work.items:
            entry = self._host.entry(item.key, item.place.group)
            if entry is not None and not (entry.is_read and self.must_write(work)):
                self.found(item, entry)
            elif isinstance(work, LoadOperation):
                work.todo.append(item)
            else:
                self._want(item)
        # The deepest items come first, so that by recency alone a child is evicted before its parent.
        for item in reversed(work.items):
            if item.entry is not None:
                self._tier_writes.use(item.entry, now_s, work.conversation)

    def must_write(self, work: LoadOperation | StoreOperation) -> bool:
        """Return whether `work` is a put.

        A put writes even an object that a get is reading, because the tier may have lost it.
        """
        return self._host.stages_only and isinstance(work, StoreOperation)

    # ---- steps of an item ------------------------------------------------------------------------------------------

    def take(self, work: LoadOperation | StoreOperation) -> WorkItem:
        """Remove the first item from `work.todo`. The caller must take the item's next step immediately."""
        self.wanted -= isinstance(work, StoreOperation)
        return work.todo.popleft()

    def found(self, item: WorkItem, entry: HostEntry) -> None:
        """Use the copy in `entry`, which is readable or in transfer. A store then copies nothing."""
        item.entry = entry
        if entry.residency not in READABLE:
            item.become(WAITING)
            self.waiters.setdefault(entry, []).append(item)
        elif isinstance(item.work, PrefetchOperation):
            entry.source = HOST  # later uses find it in host memory
            self._finish(item, DELIVERED)
        elif isinstance(item.work, LoadOperation):
            item.become(QUEUED)
            self._host.pin(entry)
            self.scatters.append(item)
        else:
            self._finish_store(item, entry)

    def arrived(self, entry: HostEntry) -> None:
        """Continue the items that waited for an object, which has become readable."""
        for item in self.waiters.pop(entry, ()):
            if isinstance(item.work, LoadOperation) and item.place.chunk > item.work.cut:
                self.fail(item)
            else:
                self.found(item, entry)
                if not item.work.unfinished:
                    self.end_if_finished(item.work)

    def retry(self, entry: HostEntry, failed_tier: str = "", outcome: Outcome = Outcome.FAILED) -> None:
        """Retry after a transfer of an object failed: a load tries the next tier, a store gathers the object itself."""
        for item in self.waiters.pop(entry, ()):
            work = item.work
            if isinstance(work, LoadOperation):
                item.outcome = max(item.outcome, outcome, key=SEVERITY.__getitem__)
                if failed_tier:
                    item.tried |= {failed_tier}
                if item.place.chunk > work.cut:
                    self.fail(item)
                else:
                    item.become(WANTED)
                    work.todo.appendleft(item)
            else:
                item.become(WANTED)
                self._want(item)
                self.end_if_finished(work)

    def _want(self, item: WorkItem) -> None:
        """Queue a store's object that needs a slot, or drop it if too many wait."""
        if self.wanted < WAITING_MAX or self._host.stages_only:  # in a staging area, limits on calls bound the number
            item.work.todo.append(item)
            self.wanted += 1
        else:
            self._output.counters.unqueued += 1
            self._finish(item, DROPPED)

    def gathered(self, item: WorkItem, entry: HostEntry, *, is_stored: bool) -> None:
        """Record that the gather of a store's item has ended."""
        if is_stored:
            self._finish_store(item, entry)
        else:
            self._finish(item, DROPPED)
        if entry in self.waiters:
            (self.arrived if is_stored else self.retry)(entry)
        if not item.work.unfinished:
            self.end_if_finished(item.work)

    def _finish_store(self, item: WorkItem, entry: HostEntry) -> None:
        """Finish a store's item whose object is readable. If objects only pass through, it must first reach a tier."""
        is_stored = _has_tier(entry) if self._host.stages_only else True
        if is_stored is None and not item.work.is_over:
            item.entry = entry
            item.become(KEEPING)
            entry.awaited += 1
            self.keepers.setdefault(entry, []).append(item)
        else:
            item.outcome = Outcome.FAILED
            self._finish(item, STORED if is_stored else DROPPED)

    def written(self, entry: HostEntry) -> None:
        """Finish the items of puts that wait for an object, if it is known whether a tier keeps the object."""
        is_stored = _has_tier(entry)
        if is_stored is not None:
            entry.awaited = 0
            for item in self.keepers.pop(entry, ()):
                self._finish(item, STORED if is_stored else DROPPED)
                self.end_if_finished(item.work)

    def delivered(self, load: LoadOperation, item: WorkItem, entry: HostEntry, now_s: float) -> None:
        """Record that the bytes of an item of `load` have arrived."""
        item.source, entry.source = entry.source, HOST  # later uses find it in host memory
        item.become(DELIVERED)
        load.unfinished -= 1
        if self._host.has_history_only:
            load.advanced(item.place.chunk, now_s)
        if not load.unfinished:
            self.end_if_finished(load)

    def fail(self, item: WorkItem) -> None:
        """Give up an item of a load. If its group is a history, give up later chunks too, because they are useless."""
        load, (group, chunk, _) = item.work, item.place
        assert isinstance(load, LoadOperation)
        self._finish(item, FAILED)
        if self._host.is_history[group] and chunk < load.cut:
            load.cut = chunk
            for other in load.todo:
                if other.place.chunk > chunk:
                    self._finish(other, FAILED)
            load.todo = deque([other for other in load.todo if other.state is WANTED])
        self.end_if_finished(load)

    def _finish(self, item: WorkItem, state: ItemState) -> None:
        """Record the result of an item."""
        if state is DROPPED and item.state is not WANTED:
            item.outcome = Outcome.FAILED
        item.become(state)
        item.work.unfinished -= 1
        if state is DROPPED:
            self._output.counters.stores_dropped += 1

    # ---- end -------------------------------------------------------------------------------------------------------

    def stop(self, work: LoadOperation | StoreOperation) -> None:
        """Drop the queued items of `work`. A store's objects that another operation brought meanwhile are STORED."""
        work.is_over = True
        is_store = isinstance(work, StoreOperation)
        result = DROPPED if is_store else FAILED
        self.wanted -= len(work.todo) * is_store
        work.todo.clear()
        work.aside.clear()
        for item in work.items:
            if item.state in (WAITING, WANTED) and not is_store and item.outcome is not Outcome.CORRUPT:
                item.outcome = Outcome.CANCELLED  # a tier has not been asked yet
            if item.state is WAITING and item.entry is not None:
                self.waiters[item.entry].remove(item)
                self._finish(item, result)
            elif item.state is KEEPING and item.entry is not None:
                item.entry.awaited -= 1
                self.keepers[item.entry].remove(item)
                if not self.keepers[item.entry]:
                    del self.keepers[item.entry]
                    self._tier_writes.can_wait(item.entry)
                self._finish(item, result)
            elif item.state is WANTED:
                entry = self._host.entry(item.key, item.place.group)
                is_stored = (
                    is_store and entry is not None and entry.residency in READABLE and not self._host.stages_only
                )
                self._finish(item, STORED if is_stored else result)
        for item in self.scatters:
            if item.work is work and item.entry is not None:
                self._host.unpin(item.entry)
                self._finish(item, result)
        self.scatters = deque([item for item in self.scatters if item.state is QUEUED])
        self.end_if_finished(work)

    def end_if_finished(self, work: LoadOperation | StoreOperation) -> None:
        """Report the end of `work` when all its items have a result."""
        if work.unfinished:
            return
        if isinstance(work, PrefetchOperation):
            if self.prefetches.pop(work.request, None) is not None:
                self.prefetched.append(work)
                work.items.clear()
        elif isinstance(work, LoadOperation):
            del self.loads[work.request]
            stages_only = self._host.stages_only
            self._output.events.append(self._objects_done(work) if stages_only else self._load_done(work))
            work.items.clear()  # items and operations refer to each other
        elif work in self.stores:
            del self.stores[work]
            if self._host.stages_only:
                self._output.events.append(self._objects_done(work))
            else:
                stored = sum([item.state is STORED for item in work.items])
                self._output.events.append(StoreDone(work.request, stored, len(work.items) - stored))
            work.items.clear()

    def _objects_done(self, work: LoadOperation | StoreOperation) -> ObjectsDone:
        done = (DELIVERED, STORED)
        return ObjectsDone(
            work.request, tuple([Outcome.DONE if item.state in done else item.outcome for item in work.items])
        )

    def _load_done(self, load: LoadOperation) -> LoadDone:
        delivered = {item.place[:2]: item.source for item in load.items if item.state is DELIVERED}
        failed = sorted([item.place[:2] for item in load.items if item.state is FAILED])
        tokens = load.tokens
        if failed:
            resident = load.resident_tokens // load.prefix.chunk_tokens

            def is_there(group: int, chunk: int) -> bool:
                return chunk < resident or (group, chunk) in delivered

            reached = longest_boundary(self._layout.groups, load.prefix, is_there)
            tokens = min(load.tokens, max(reached, load.resident_tokens))
        sources = load_sources(load.prefix, tokens, delivered, self._order, load.resident_tokens)
        return LoadDone(load.request, tokens, load.tokens, tuple(failed), sources, load.was_cut)

    # ---- time ------------------------------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> list[LoadOperation | StoreOperation]:
        """Return loads past their deadline or budget, and stores past their deadline."""
        overdue: list[LoadOperation | StoreOperation] = []
        for load in (*self.loads.values(), *self.prefetches.values()):
            overdue += [] if load.is_over or load.end_s > now_s else [load]
        for store in self.stores:  # in the order of their deadlines
            if store.deadline_s > now_s:
                break
            overdue += [] if store.is_over else [store]
        return overdue

    def deadlines(self) -> list[float]:
        """Return deadlines of open operations, including the earliest."""
        ends = [load.end_s for load in (*self.loads.values(), *self.prefetches.values()) if not load.is_over]
        return ends + list(islice((store.deadline_s for store in self.stores if not store.is_over), 1))

    def check(self, copying: set[WorkItem]) -> None:
        """Assert that each item is where its state says. `copying` holds items of gathers and scatters in flight.

        Raises:
            AssertionError: an item is elsewhere, which is a bug in the core.
        """
        by_state: dict[ItemState, set[WorkItem]] = {
            state: set() for state in (WANTED, WAITING, QUEUED, COPYING, KEEPING)
        }
        for work in (*self.loads.values(), *self.prefetches.values(), *self.stores):
            assert work.unfinished > 0, "a load or store ended without an event"
            open_items = [item for item in work.items if item.state in by_state]
            assert len(open_items) == work.unfinished, "items without a result miscounted"
            for item in open_items:
                by_state[item.state].add(item)
            todo = {*work.todo, *(item for items in work.aside.values() for item in items)}
            assert todo == {item for item in open_items if item.state is WANTED}, "todo misses an item"
        for entry, items in self.waiters.items():
            assert not items or entry.residency in COMING, "an item waits for an object that is not in transfer"
            assert all(item.entry is entry for item in items), "an item waits for another entry"
        assert by_state[WAITING] == {item for items in self.waiters.values() for item in items}, (
            "a waiting item is lost"
        )
        assert by_state[KEEPING] == {item for items in self.keepers.values() for item in items}, "a kept item is lost"
        for entry, items in self.keepers.items():
            assert entry.awaited == len(items), "puts that wait for an object miscounted"
            assert not items or _has_tier(entry) is None, "a put waits for a write that has ended"
        assert by_state[QUEUED] == set(self.scatters), "a queued item is lost"
        assert by_state[COPYING] == copying, "an item is copied without a transfer"
        wanted = sum([len(store.todo) for store in self.stores])
        assert wanted == self.wanted, "wanted objects miscounted"
        assert wanted <= WAITING_MAX or self._host.stages_only, "too many wanted objects"


def _has_tier(entry: HostEntry) -> bool | None:
    """Return whether a put of the object has succeeded; None if this is not decided yet.

    It has succeeded once a persistent tier has the object. When all its writes have ended, any tier is enough. An
    overdue write may yet succeed, but no put waits for it.
    """
    if entry.kept_by:
        return True
    return None if entry.pending > entry.stuck else entry.is_in_tier
