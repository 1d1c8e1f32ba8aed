"""The session in this process: the core decides, the mover obeys, and this file carries notes between the two.

One owner calls it (an engine's loop, or `Desk`); it has no lock. Only `wake` may be called from elsewhere.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.core.cache import Cache
from kvtier.core.patience import Patience
from kvtier.observe import table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.base import NO_HINT, Closed
from kvtier.runtime.jobs import Obedient, Observer, Settled
from kvtier.types import (
    Cancel,
    Event,
    Hint,
    LoadDone,
    Lookup,
    NextTurn,
    Outcome,
    Place,
    Prefix,
    Presence,
    Probe,
    RequestId,
    StoreDone,
    Transfer,
)

logger = logging.getLogger(__name__)

NOTHING = Lookup(0, 0, Presence.ABSENT)

FLUSH_STEP_S = 0.1

COUNTED_MAX = 65_536

DOORS_DEADLINE_S = 5.0
"""How long to wait for running copies after a mistake of ours, before answering all that is open as failed."""


class LocalSession:
    """A `Session` whose core and mover live in this process.

    Args:
        cache: the core.
        mover: moves bytes for it, on every rank there is (`ranks` of the cache is 1: it answers once for all).
        on_close: called once when everything has ended, with the seconds that are left, for example to close the tiers.
        on_second: called about once a second by whoever polls, to refresh gauges.
        metrics: where to count.
        observer: told of every command and every answer.
        clock: seconds, never going back; the mover's own.
    """

    def __init__(
        self,
        cache: Cache,
        mover: Obedient,
        *,
        on_close: Callable[[float], None] = lambda _seconds: None,
        on_second: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._cache = cache
        self._mover = mover
        self._observer = observer
        self._on_close = on_close
        self._on_second = on_second
        self._next_second_s = clock()
        self._counted: dict[RequestId, None] = {}
        """Requests whose tokens the metrics have, so that a lookup that is repeated counts once."""
        self._clock = clock
        self._loads: dict[RequestId, _Asked] = {}
        self._stores: list[_Asked] = []
        self._events: list[Event] = []
        self._closed: Closed | None = None
        self._is_broken = False
        self._woken = threading.Event()

    def lookup(self, request: RequestId, prefix: Prefix, *, resident_tokens: int = 0) -> Lookup:
        """See `Session`."""
        answer = NOTHING
        if not self._is_shut:
            with self._doors():
                self._settle(self._mover.take(0.0))
                answer = self._cache.lookup(request, prefix, self._clock(), resident_tokens=resident_tokens)
                self._pass_on()
        self._count(request, prefix, answer)
        return answer

    def load(
        self,
        request: RequestId,
        prefix: Prefix,
        tokens: int,
        places: Sequence[Place],
        *,
        resident_tokens: int = 0,
        patience: Patience | None = None,
        hint: Hint = NO_HINT,
    ) -> None:
        """See `Session`."""
        asked = _Asked(request, self._clock(), tokens, tuple((place.group, place.chunk) for place in places))
        if self._is_shut:
            self._events.append(asked.load_failed())
            return
        with self._doors():
            self._cache.load(
                request,
                prefix,
                tokens,
                places,
                asked.time_s,
                resident_tokens=resident_tokens,
                patience=patience,
                hint=hint,
            )
            self._loads[request] = asked
            self._pass_on()

    def store(self, request: RequestId, prefix: Prefix, places: Sequence[Place], hint: Hint = NO_HINT) -> None:
        """See `Session`."""
        asked = _Asked(request, self._clock(), 0, tuple((place.group, place.chunk) for place in places))
        if self._is_shut:
            self._events.append(asked.store_failed())
            return
        with self._doors():
            self._cache.store(request, prefix, places, asked.time_s, hint)
            self._stores.append(asked)
            self._pass_on()

    def release(self, request: RequestId) -> None:
        """See `Session`."""
        self._counted.pop(request, None)
        if not self._is_shut:
            with self._doors():
                self._cache.release(request, self._clock())
                self._pass_on()

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """See `Session`."""
        if not self._is_shut:
            with self._doors():
                self._cache.expects(session, next_turn)
                self._cache.tick(self._clock())
                self._pass_on()

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """See `Session`. Returns early, perhaps with nothing, when somebody calls `wake`."""
        until_s = self._clock() + wait_s
        settled = self._mover.take(0.0)
        if self._clock() >= self._next_second_s and not self._is_shut:
            self._next_second_s = self._clock() + 1.0
            self._on_second()
        while True:
            if not self._is_shut:
                with self._doors():
                    self._settle(settled)
                    self._cache.tick(self._clock())
                    self._pass_on()
            now_s = self._clock()
            if self._events or now_s >= until_s or self._woken.is_set() or self._is_shut:
                self._woken.clear()
                events, self._events = self._events, []
                return events
            next_s = self._cache.next_deadline()
            wake_s = until_s if next_s is None else min(until_s, next_s)
            settled = self._mover.take(max(0.0, wake_s - now_s))

    def wake(self) -> None:
        """Make a `poll` that waits return. May be called from any thread."""
        # The flag first: whoever takes the mover's note finds it set.
        self._woken.set()
        self._mover.wake()

    def close(self, deadline_s: float = 30.0) -> Closed:
        """See `Session`."""
        if self._closed is not None:
            return self._closed
        until_s = self._clock() + deadline_s
        lost_before = self._cache.tally.demotions_dropped
        if not self._is_broken:
            with self._doors():
                self._cache.stop(self._clock())
        # Each round: what has arrived is owed to the tiers, what is owed goes out, what has gone out is settled.
        while not self._is_broken and self._clock() < until_s:
            with self._doors():
                self._cache.flush(self._clock())
                self._pass_on()
                if not self._cache.in_flight and not self._cache.owed_count:
                    break
                self._settle(self._mover.take(min(FLUSH_STEP_S, max(0.0, until_s - self._clock()))))
                self._cache.tick(self._clock())
        lost = self._cache.owed_count + self._cache.tally.demotions_dropped - lost_before
        self._closed = Closed(flushed=lost == 0 and not self._is_broken, lost=lost)
        if lost:
            logger.warning("closed before %d stored objects had reached their lower tiers", lost)
        self._mover.close(max(0.0, until_s - self._clock()))
        self._fail_open()
        self._on_close(max(0.0, until_s - self._clock()))
        return self._closed

    @property
    def _is_shut(self) -> bool:
        return self._is_broken or self._closed is not None

    # ---- between core and mover ------------------------------------------------------------------------------------

    def _settle(self, batch: Sequence[Settled]) -> None:
        """Tell the core what has been done."""
        now_s = self._clock()
        for settled in batch:
            command = settled.command
            if self._observer is not None:
                self._observer.settled(settled)
            if isinstance(command, Transfer):
                self._cache.complete(command.id, settled.outcome, now_s, is_fault=settled.is_tier_fault)
            elif isinstance(command, Probe):
                self._cache.probed(command.id, settled.present if settled.outcome is Outcome.DONE else None, now_s)

    def _pass_on(self) -> None:
        """Give the core's commands to the mover, and its events to the engine."""
        commands = self._cache.take_commands()
        if self._observer is not None:
            for command in commands:
                if not isinstance(command, Cancel):
                    self._observer.submitted(command)
        if commands:
            self._mover.submit_all(commands)
        for event in self._cache.take_events():
            self._events.append(event)
            self._observe(event)

    def _count(self, request: RequestId, prefix: Prefix, answer: Lookup) -> None:
        self.metrics.add(table.LOOKUPS, presence=answer.presence.value)
        if answer.presence is Presence.PROBING or request in self._counted:
            return
        if len(self._counted) >= COUNTED_MAX:
            del self._counted[next(iter(self._counted))]
        self._counted[request] = None
        asked = max(prefix.tokens, answer.tokens)
        self.metrics.add(table.LOOKUP_TOKENS, answer.ready_tokens, result="ready")
        self.metrics.add(table.LOOKUP_TOKENS, answer.tokens - answer.ready_tokens, result="arriving")
        self.metrics.add(table.LOOKUP_TOKENS, asked - answer.tokens, result="absent")

    def _observe(self, event: Event) -> None:
        if isinstance(event, LoadDone):
            asked = self._loads.pop(event.request)
            share = "none" if not event.tokens else "part" if event.tokens < event.wanted_tokens else "whole"
            self.metrics.add(table.LOADS, result=share)
            self.metrics.observe(table.LOAD_SECONDS, self._clock() - asked.time_s)
            for place, tokens in event.sources:
                self.metrics.add(table.LOAD_TOKENS, tokens, place=place)
        elif isinstance(event, StoreDone):
            self.metrics.add(table.STORES)
            self.metrics.add(table.STORE_CHUNKS, event.held, result="held")
            self.metrics.add(table.STORE_CHUNKS, event.dropped, result="dropped")
            asked = next(asked for asked in self._stores if asked.request == event.request)
            self._stores.remove(asked)
            self.metrics.observe(table.STORE_SECONDS, self._clock() - asked.time_s)
        else:
            self.metrics.set(table.TIER_UP, float(event.is_up), tier=event.tier, way=event.way)
            log = logger.info if event.is_up else logger.warning
            log("tier %s %s", event.tier, event.detail)

    # ---- our own mistakes ------------------------------------------------------------------------------------------

    @contextmanager
    def _doors(self) -> Generator[None]:
        """We are a guest in the engine's process: after a mistake of ours the doors are shut, and it serves on."""
        try:
            yield
        except AssertionError:
            logger.exception("kvtier has found a mistake of its own and shuts down; requests are computed from now on")
            self._is_broken = True
            # Copies that run still touch the engine's blocks: nothing is answered before they have ended.
            self._mover.close(DOORS_DEADLINE_S)
            self._fail_open()

    def _fail_open(self) -> None:
        """Answer whatever is still open."""
        self._events += [asked.load_failed() for asked in self._loads.values()]
        self._events += [asked.store_failed() for asked in self._stores]
        self._loads.clear()
        self._stores.clear()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A load or store that has not been answered."""

    request: RequestId
    time_s: float
    tokens: int
    objects: tuple[tuple[int, int], ...]

    def load_failed(self) -> LoadDone:
        return LoadDone(self.request, 0, self.tokens, self.objects)

    def store_failed(self) -> StoreDone:
        return StoreDone(self.request, 0, len(self.objects))
