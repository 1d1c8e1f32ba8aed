"""Open loads and stores: what each of them waits for, and how it ends.

This module starts no transfers; it fills the queues that `transfer_scheduler` works on.
"""

from collections import deque
from itertools import islice, takewhile

from kvtier.core.boundary import longest_boundary
from kvtier.core.counters import Counters
from kvtier.core.hit_sources import load_sources
from kvtier.core.host_memory import HostMemory
from kvtier.core.limits import Limits
from kvtier.core.pending_writes import PendingWrites
from kvtier.core.records import HOST, HostEntry, LoadOperation, StoreOperation, Waiter
from kvtier.core.residency import READABLE
from kvtier.layout import History, KvLayout
from kvtier.types import ChunkKey, Event, LoadDone, Place, RequestId, StoreDone


class OpenOperations:
    """The open loads and stores.

    Args:
        order: places from fastest to slowest, host memory first.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        limits: Limits,
        host: HostMemory,
        pending_writes: PendingWrites,
        order: list[str],
        counters: Counters,
        events: list[Event],
    ) -> None:
        self.loads: dict[RequestId, LoadOperation] = {}
        self.stores: dict[StoreOperation, None] = {}
        """Ordered by start, and so by deadline."""
        self.chunks = 0
        """Objects of all stores that wait for a slot."""
        self.scatters: deque[tuple[LoadOperation, Place, HostEntry]] = deque()
        """Readable objects that wait for their scatter; each holds a pin."""
        self.has_parents = [isinstance(group.validity, History) for group in layout.groups]
        self.has_history_only = all(self.has_parents)
        self._layout = layout
        self._limits = limits
        self._host = host
        self._pending_writes = pending_writes
        self._order = order
        self._counters = counters
        self._events = events

    # ---- start -----------------------------------------------------------------------------------------------------

    def begin_load(self, load: LoadOperation, places: list[tuple[Place, ChunkKey]], now_s: float) -> None:
        """Queue scatters of readable objects, wait for objects in transfer, and queue promotions of the others."""
        self.loads[load.request] = load
        found: list[HostEntry] = []
        for place, key in places:
            entry = self._host.find(key, place.group)
            if entry is None:
                load.todo.append((place, key))
            else:
                found.append(entry)
                self.attach(load, place, entry)
        # Deepest first, so that by recency alone a child is evicted before its parent.
        for entry in reversed(found):
            self._pending_writes.use(entry, now_s, load.session)
        self._end_load_if_settled(load)

    def begin_store(self, store: StoreOperation, places: list[tuple[Place, ChunkKey]], now_s: float) -> None:
        """Queue gathers of the objects that host memory lacks, while the queue has room."""
        self.stores[store] = None
        found: list[HostEntry] = []
        for place, key in places:
            entry = self._host.find(key, place.group)
            if entry is not None:
                found.append(entry)
                self.join(store, place, key, entry)
            elif self.chunks < self._limits.waiting_chunks:
                store.todo.append((place, key))
                self.chunks += 1
            else:
                self._counters.unqueued += 1
                self.settle_store(store, is_held=False)
        for entry in reversed(found):
            self._pending_writes.use(entry, now_s, store.session)

    # ---- objects of an operation -----------------------------------------------------------------------------------

    def attach(self, load: LoadOperation, place: Place, entry: HostEntry) -> None:
        """`load` needs an object that is readable or in transfer."""
        if entry.residency in READABLE:
            self._host.pin(entry)
            self.scatters.append((load, place, entry))
        else:
            load.attached.append(entry)
            entry.waiters.append((load, place, entry.key))

    def join(self, store: StoreOperation, place: Place, key: ChunkKey, entry: HostEntry) -> None:
        """`store` contains an object that is readable or in transfer, so it moves nothing."""
        if entry.residency in READABLE:
            self.settle_store(store, is_held=True)
        else:
            store.attached.append(entry)
            entry.waiters.append((store, place, key))

    def serve(self, waiters: list[Waiter], entry: HostEntry) -> None:
        """The object has become readable."""
        for work, place, _ in waiters:
            if isinstance(work, LoadOperation):
                if place.chunk > work.cut:
                    self.fail(work, place)
                else:
                    self.attach(work, place, entry)
            else:
                self.settle_store(work, is_held=True)
                self.end_store_if_settled(work)

    def retry(self, waiters: list[Waiter]) -> None:
        """The object's transfer failed: a load tries the next tier, a store gathers the object itself."""
        for work, place, key in waiters:
            if isinstance(work, LoadOperation):
                if place.chunk > work.cut:
                    self.fail(work, place)
                else:
                    work.todo.appendleft((place, key))
            elif self.chunks < self._limits.waiting_chunks:
                work.todo.append((place, key))
                self.chunks += 1
            else:
                self._counters.unqueued += 1
                self.settle_store(work, is_held=False)
                self.end_store_if_settled(work)

    # ---- results of an operation's objects -------------------------------------------------------------------------

    def delivered(self, load: LoadOperation, place: Place, entry: HostEntry, now_s: float) -> None:
        """The bytes of `place` have arrived."""
        load.delivered[place.group, place.chunk] = entry.source
        entry.source = HOST  # later uses find it in host memory
        load.unsettled -= 1
        if self.has_history_only:
            load.advanced(len(self.has_parents), now_s)
        self._end_load_if_settled(load)

    def fail(self, load: LoadOperation, place: Place) -> None:
        """`place` will not be delivered. Later chunks of a history are useless without it, and not promoted."""
        load.lose(place)
        if self.has_parents[place.group] and place.chunk < load.cut:
            load.cut = place.chunk
            kept = [item for item in load.todo if item[0].chunk <= place.chunk]
            for other, _ in load.todo:
                if other.chunk > place.chunk:
                    load.lose(other)
            load.todo = deque(kept)
        self._end_load_if_settled(load)

    def settle_store(self, store: StoreOperation, *, is_held: bool) -> None:
        """One object of `store` is held or dropped."""
        store.unsettled -= 1
        store.held += is_held
        store.dropped += not is_held
        self._counters.stores_dropped += not is_held

    # ---- end -------------------------------------------------------------------------------------------------------

    def stop_load(self, load: LoadOperation) -> None:
        """Drop the queued work of `load`."""
        load.is_over = True
        for place in self._detach(load):
            load.lose(place)
        kept: deque[tuple[LoadOperation, Place, HostEntry]] = deque()
        for item in self.scatters:
            if item[0] is load:
                self._host.unpin(item[2])
                load.lose(item[1])
            else:
                kept.append(item)
        self.scatters = kept
        self._end_load_if_settled(load)

    def give_up(self, store: StoreOperation) -> None:
        """Drop the queued work of `store`."""
        store.is_over = True
        for place, key in store.todo:  # another operation may have brought it
            entry = self._host.find(key, place.group)
            self.settle_store(store, is_held=entry is not None and entry.residency in READABLE)
        self.chunks -= len(store.todo)
        store.todo.clear()
        for _ in self._detach(store):
            self.settle_store(store, is_held=False)
        self.end_store_if_settled(store)

    def _detach(self, work: LoadOperation | StoreOperation) -> list[Place]:
        """Remove `work` from everything it waits for; returns the waiting places."""
        places = [place for place, _ in work.todo]
        work.todo.clear()
        for entry in work.attached:
            places += [place for other, place, _ in entry.waiters if other is work]
            entry.waiters = [waiter for waiter in entry.waiters if waiter[0] is not work]
        work.attached.clear()
        return places

    def _end_load_if_settled(self, load: LoadOperation) -> None:
        if load.unsettled or self.loads.get(load.request) is not load:
            return
        del self.loads[load.request]
        tokens = load.tokens
        if load.failed:
            resident = load.resident_tokens // load.prefix.chunk_tokens

            def is_there(group: int, chunk: int) -> bool:
                return chunk < resident or (group, chunk) in load.delivered

            reached = longest_boundary(self._layout.groups, load.prefix, is_there)
            tokens = min(load.tokens, max(reached, load.resident_tokens))
        sources = load_sources(load.prefix, tokens, load.delivered, self._order, load.resident_tokens)
        failed = tuple(sorted(load.failed))
        self._events.append(LoadDone(load.request, tokens, load.tokens, failed, sources, load.was_cut))

    def end_store_if_settled(self, store: StoreOperation) -> None:
        """Report the end of `store` when all its objects have a result."""
        if not store.unsettled and store in self.stores:
            del self.stores[store]
            self._events.append(StoreDone(store.request, store.held, store.dropped))

    # ---- time ------------------------------------------------------------------------------------------------------

    def overdue_loads(self, now_s: float) -> list[LoadOperation]:
        """Loads past their deadline or budget."""
        return [load for load in self.loads.values() if load.end_s <= now_s and not load.is_over]

    def overdue_stores(self, now_s: float) -> list[StoreOperation]:
        """Stores past their deadline."""
        began_before = takewhile(lambda store: store.deadline_s <= now_s, self.stores)
        return [store for store in began_before if not store.is_over]

    def deadlines(self) -> list[float]:
        """Deadlines of open operations."""
        ends = [load.end_s for load in self.loads.values() if not load.is_over]
        return ends + list(islice((store.deadline_s for store in self.stores if not store.is_over), 1))

    def check(self) -> None:
        """Assert that the counts are consistent.

        Raises:
            AssertionError: they are not, which is a bug in the core.
        """
        chunks = sum([len(store.todo) for store in self.stores])
        assert chunks == self.chunks <= self._limits.waiting_chunks, "waiting chunks miscounted or too many"
        for work in (*self.loads.values(), *self.stores):
            assert work.unsettled > 0, "a load or store ended without an event"
