"""Tracks open loads and stores, each of which ends with exactly one event."""

import logging
import time
from collections.abc import Callable, Collection, Sequence

from kvtier.errors import BadCallError
from kvtier.layout import Loss
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Bound, Metrics
from kvtier.runtime.mailbox import Mailbox
from kvtier.runtime.observers.guards import Feature, Guards, LogLine
from kvtier.types import Event, LoadDone, Place, RequestId, StoreDone

EVENTS_MAX = 65_536
"""Maximum number of events kept for an engine that does not poll. A further event replaces the oldest."""


class OpenCall:
    """A load or store whose event has not been published."""

    __slots__ = ("is_over", "places", "request", "time_s", "tokens")

    def __init__(self, request: RequestId, time_s: float, tokens: int, places: Sequence[Place]) -> None:
        self.request = request
        self.time_s = time_s
        self.tokens = tokens
        self.places = places
        self.is_over = False
        """Whether the call was refused or has failed."""


class SessionEvents:
    """Open loads and stores, and the queue of events for the engine.

    Any thread may call `begin_load`, `begin_store`, `withdraw` and `poll`. Only the holder of the session's lock may
    call the other methods.

    Args:
        metrics: counts ended loads and stores.
        guards: guard the metrics, and collect lines for the log.
        clock: returns seconds.
        loss: how lossy the engine's stored KV may be (`store.loss`).
    """

    def __init__(
        self, metrics: Metrics, guards: Guards, clock: Callable[[], float] = time.monotonic, loss: Loss = "none"
    ) -> None:
        self._metrics = metrics
        self._guards = guards
        self._clock = clock
        self._loads: dict[RequestId, OpenCall] = {}
        self._stores: list[OpenCall] = []
        self._queue: Mailbox[Event | None] = Mailbox()
        """A queue that a finalizer may use during a call. None ends a poll."""
        self._has_dropped = False
        self._loaded = {share: metrics.bind(table.LOADS, result=share) for share in ("none", "part", "whole")}
        self._load_seconds = metrics.bind(table.LOAD_SECONDS)
        self._load_tokens: dict[str, Bound] = {}
        """Counters of loaded tokens, by place."""
        self._lossy_tokens = None if loss == "none" else metrics.bind(table.LOSSY_LOAD_TOKENS, loss=loss)

    def begin_load(self, request: RequestId, tokens: int, places: Sequence[Place]) -> OpenCall:
        """Register a load.

        Raises:
            BadCallError: the request already has an open load.
        """
        call = OpenCall(request, self._clock(), tokens, places)
        if self._loads.setdefault(request, call) is not call:
            raise BadCallError(f"request {request!r} has a load under way")
        return call

    def begin_store(self, request: RequestId, places: Sequence[Place]) -> OpenCall:
        """Register a store."""
        call = OpenCall(request, self._clock(), 0, places)
        self._stores.append(call)
        return call

    def withdraw(self, call: OpenCall) -> bool:
        """Remove a call that was refused. Return False if it has been answered meanwhile."""
        call.is_over = True
        if self._loads.get(call.request) is call:
            return self._loads.pop(call.request, None) is call
        try:
            self._stores.remove(call)
        except ValueError:
            return False
        return True

    def poll(self, wait_s: float) -> list[Event]:
        """Return the events since the last call, after waiting up to `wait_s` seconds for the first."""
        return self._queue.get_all(wait_s)

    def end_poll(self) -> None:
        """Make a poll return without an event."""
        self._queue.put(None)

    def publish(self, event: Event) -> None:
        """Queue and count an event. Remove its call first, so that an error cannot repeat the event."""
        if isinstance(event, LoadDone):
            call = self._loads.pop(event.request)
            try:
                waiting = self._queue.put(event)
            except BaseException:  # the load is still open, and `fail` will end it
                self._loads[event.request] = call
                raise
            try:
                self._count_load(event, self._clock() - call.time_s)
            except Exception as error:  # noqa: BLE001 - there are too many loads for `Guards.run`
                self._guards.failed(Feature.METRICS, error)
        elif isinstance(event, StoreDone):
            call = next(call for call in list(self._stores) if call.request == event.request)
            self._stores.remove(call)  # not by position, because `withdraw` may remove another one meanwhile
            try:
                waiting = self._queue.put(event)
            except BaseException:
                self._stores.append(call)
                raise
            self._guards.run(Feature.METRICS, self._count_store, event, self._clock() - call.time_s, otherwise=None)
        else:
            waiting = self._queue.put(event)
        if waiting > EVENTS_MAX:
            self._drop_oldest()

    def _count_load(self, event: LoadDone, seconds: float) -> None:
        share = "none" if not event.tokens else "part" if event.tokens < event.wanted_tokens else "whole"
        counts = [(self._loaded[share], 1.0), (self._load_seconds, seconds)]
        for place, tokens in event.sources:
            if place not in self._load_tokens:
                self._load_tokens[place] = self._metrics.bind(table.LOAD_TOKENS, place=place)
            counts.append((self._load_tokens[place], tokens))
        if self._lossy_tokens is not None:
            counts.append((self._lossy_tokens, sum(tokens for _, tokens in event.sources)))
        self._metrics.count(counts)

    def _count_store(self, event: StoreDone, seconds: float) -> None:
        self._metrics.add(table.STORES)
        self._metrics.add(table.STORE_CHUNKS, event.stored, result="held")
        self._metrics.add(table.STORE_CHUNKS, event.dropped, result="dropped")
        self._metrics.observe(table.STORE_SECONDS, seconds)

    def fail(self, copying: Collection[RequestId] = ()) -> None:
        """Fail all open loads and stores, except those of requests in `copying`."""
        for load in [load for load in list(self._loads.values()) if load.request not in copying]:
            places = tuple((place.group, place.chunk) for place in load.places)
            if self.withdraw(load):
                self._queue.put(LoadDone(load.request, 0, load.tokens, places))
        for store in [store for store in list(self._stores) if store.request not in copying]:
            if self.withdraw(store):
                self._queue.put(StoreDone(store.request, 0, len(store.places)))

    def _drop_oldest(self) -> None:
        if self._queue.get() is None:
            return
        if not self._has_dropped:
            self._has_dropped = True
            text = (
                "the engine has not polled %d events; kvtier drops the oldest of those that do not end a load or store"
            )
            self._guards.lines.append(LogLine(logging.WARNING, text, (EVENTS_MAX,)))
