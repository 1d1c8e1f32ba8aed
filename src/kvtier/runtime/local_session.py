"""The session: passes the core's commands to the mover, and the mover's completions to the core.

It has no lock. One owner thread calls it (that of `session.Session`); any thread may call `wake`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.core.cache import Cache
from kvtier.core.load_budget import LoadBudget
from kvtier.errors import BadCallError
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion, Executor, Observer
from kvtier.types import (
    Cancel,
    Event,
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

MOVER_DEADLINE_S = 5.0
"""How long the mover may take to end after an internal error. Then loads and stores without a running copy fail."""

COPY_DEADLINE_S = 30.0
"""How long a load or store waits for its running copy after an internal error before it fails, too."""

COPY_STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Closed:
    """How a session ended."""

    flushed: bool
    """Whether all pending writes reached their tiers. Writes that a tier refused earlier are not pending."""
    lost: int
    """Pending writes that did not reach their tiers before the deadline."""


class LocalSession:
    """The session without a thread of its own: one owner thread calls it. Methods are described in `Session`.

    Args:
        cache: the core.
        mover: executes its commands, on all ranks.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        on_second: called about once a second in `poll`, to refresh gauges.
        metrics: counts lookups, loads and stores.
        observer: receives every command and every completion.
        clock: monotonic seconds; the mover's clock.
    """

    def __init__(
        self,
        cache: Cache,
        mover: Executor,
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
        """Requests whose tokens are counted, so that repeated lookups of a request count once."""
        self._warned: set[str] = set()
        """Limits whose warning was logged."""
        self._clock = clock
        self._loads: dict[RequestId, _Pending] = {}
        self._stores: list[_Pending] = []
        self._events: list[Event] = []
        self._closed: Closed | None = None
        self._is_broken = False
        self._copying: dict[int, RequestId] = {}
        """Running copies after an internal error: transfer id -> request."""
        self._copying_until_s = 0.0
        self._woken = threading.Event()

    def lookup(self, request: RequestId, prefix: Prefix, *, resident_tokens: int = 0, wait_s: float = 0.0) -> Lookup:
        """See `Session`."""
        try:
            answer = NOTHING if self._is_shut else self._look_up(request, prefix, resident_tokens, wait_s)
            self._count(request, prefix, answer)
        except BaseException as error:
            self.shut(error)
            return NOTHING
        return answer

    def _look_up(self, request: RequestId, prefix: Prefix, resident_tokens: int, wait_s: float) -> Lookup:
        now_s = self._clock()
        until_s = now_s + wait_s
        completions = self._mover.take(0.0)
        while True:
            self._settle(completions)
            answer = self._cache.lookup(request, prefix, now_s, resident_tokens=resident_tokens)
            self._pass_on()
            now_s = self._clock()
            if answer.presence is not Presence.PROBING or now_s >= until_s:
                return answer
            completions = self._mover.take(until_s - now_s)
            now_s = self._clock()

    def load(
        self,
        request: RequestId,
        prefix: Prefix,
        tokens: int,
        places: Sequence[Place],
        *,
        resident_tokens: int = 0,
        budget: LoadBudget | None = None,
        session: str | None = None,
    ) -> None:
        """See `Session`."""
        pending = _Pending(request, self._clock(), tokens, places)
        if self._is_shut:
            self._events.append(pending.load_failed())
            return
        if request in self._loads:
            raise BadCallError(f"request {request!r} has a load under way")
        self._loads[request] = pending  # before the core's call, so that a `LoadDone` follows whatever that raises
        try:
            self._cache.load(
                request,
                prefix,
                tokens,
                places,
                pending.time_s,
                resident_tokens=resident_tokens,
                budget=budget,
                session=session,
            )
            self._pass_on()
        except BadCallError:
            del self._loads[request]
            raise
        except BaseException as error:
            self.shut(error)

    def store(self, request: RequestId, prefix: Prefix, places: Sequence[Place], session: str | None = None) -> None:
        """See `Session`."""
        pending = _Pending(request, self._clock(), 0, places)
        if self._is_shut:
            self._events.append(pending.store_failed())
            return
        self._stores.append(pending)
        try:
            self._cache.store(request, prefix, places, pending.time_s, session)
            self._pass_on()
        except BadCallError:
            self._stores.remove(pending)
            raise
        except BaseException as error:
            self.shut(error)

    def release(self, request: RequestId) -> None:
        """See `Session`."""
        self._counted.pop(request, None)
        if not self._is_shut:
            try:
                self._cache.release(request, self._clock())
                self._pass_on()
            except BaseException as error:
                self.shut(error)

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """See `Session`."""
        if not self._is_shut:
            try:
                self._cache.expects(session, next_turn)
                self._cache.tick(self._clock())
                self._pass_on()
            except BaseException as error:
                self.shut(error)

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """See `Session`. Returns early, possibly without events, after `wake`."""
        until_s = self._clock() + wait_s
        pause_s = 0.0
        while True:
            try:
                if self._is_shut:
                    self._await_copies(until_s)
                else:
                    pause_s = self._step(pause_s, until_s)
            except BaseException as error:
                self.shut(error)
            if self._events or self._woken.is_set() or self._closed is not None or self._clock() >= until_s:
                self._woken.clear()
                events, self._events = self._events, []
                return events

    def _step(self, wait_s: float, until_s: float) -> float:
        """Pass on completions and commands once; how long the next step may wait for a completion."""
        completions = self._mover.take(wait_s)
        now_s = self._clock()
        if now_s >= self._next_second_s:
            self._next_second_s = now_s + 1.0
            self._on_second()
            self._warn_of_limits()
            self._cache.check_tiers(now_s)
        self._settle(completions)
        self._cache.tick(self._clock())
        self._pass_on()
        next_s = self._cache.next_deadline()
        return max(0.0, (until_s if next_s is None else min(until_s, next_s)) - self._clock())

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called from any thread."""
        # The flag first: a `take` that this wakes must find it set.
        self._woken.set()
        self._mover.wake()

    def close(self, deadline_s: float = 30.0) -> Closed:
        """See `Session`."""
        if self._closed is not None:
            return self._closed
        until_s = self._clock() + deadline_s
        lost = 0
        if not self._is_broken:
            try:
                lost = self._flush(until_s)
            except BaseException as error:
                self.shut(error)
        self._closed = Closed(flushed=lost == 0 and not self._is_broken, lost=lost)
        if lost:
            logger.warning(
                "the session is closed; %d objects were not written to their tiers in time and are lost", lost
            )
        for end in (self._end_mover, self._answer_all, self._on_close):
            try:
                end(max(0.0, until_s - self._clock()))
            except BaseException as error:
                self.shut(error)
        return self._closed

    def _flush(self, until_s: float) -> int:
        """Write pending objects to their tiers; the number not written by `until_s`."""
        lost_before = self._cache.counters.demotions_dropped
        self._cache.stop(self._clock())
        # Objects that finish gathering during a round become pending writes of the next one.
        while self._clock() < until_s:
            self._cache.flush(self._clock())
            self._pass_on()
            if not self._cache.in_flight and not self._cache.pending_count:
                break
            self._settle(self._mover.take(min(FLUSH_STEP_S, max(0.0, until_s - self._clock()))))
            self._cache.tick(self._clock())
        return self._cache.pending_count + self._cache.counters.demotions_dropped - lost_before

    @property
    def _is_shut(self) -> bool:
        return self._is_broken or self._closed is not None

    # ---- between core and mover ------------------------------------------------------------------------------------

    def _settle(self, batch: Sequence[Completion]) -> None:
        """Pass completions to the core."""
        now_s = self._clock()
        for completion in batch:
            command = completion.command
            if self._observer is not None:
                self._observer.completed(completion)
            if isinstance(command, Transfer):
                self._cache.complete(command.id, completion.outcome, now_s, is_fault=completion.is_tier_fault)
            elif isinstance(command, Probe):
                self._cache.probed(
                    command.id, completion.present if completion.outcome is Outcome.DONE else None, now_s
                )

    def _pass_on(self) -> None:
        """Pass the core's commands to the mover, and its events to the engine."""
        commands = self._cache.take_commands()
        if self._observer is not None:
            for command in commands:
                if not isinstance(command, Cancel):
                    self._observer.submitted(command)
        if commands:
            self._mover.submit(*commands)
        for event in self._cache.take_events():
            self._publish(event)

    def _warn_of_limits(self) -> None:
        counters = self._cache.counters
        for name, count, effect in (
            ("requests", counters.unprobed, "lower tiers are not probed for further requests"),
            ("waiting_chunks", counters.unqueued, "further objects are not stored"),
        ):
            if count and name not in self._warned:
                self._warned.add(name)
                logger.warning("limits.%s is reached: %s (this is logged once)", name, effect)

    def _count(self, request: RequestId, prefix: Prefix, answer: Lookup) -> None:
        self.metrics.add(table.LOOKUPS, presence=answer.presence.value)
        if answer.presence is Presence.PROBING or request in self._counted:
            return
        if len(self._counted) >= COUNTED_MAX:
            del self._counted[next(iter(self._counted))]
        self._counted[request] = None
        prompt_tokens = max(prefix.tokens, answer.tokens)
        self.metrics.add(table.LOOKUP_TOKENS, answer.ready_tokens, result="ready")
        self.metrics.add(table.LOOKUP_TOKENS, answer.tokens - answer.ready_tokens, result="arriving")
        self.metrics.add(table.LOOKUP_TOKENS, prompt_tokens - answer.tokens, result="absent")

    def _publish(self, event: Event) -> None:
        """Queue an event for the engine, and count it. Its request is removed first, so that no error repeats it."""
        if isinstance(event, LoadDone):
            pending = self._loads.pop(event.request)
            self._events.append(event)
            share = "none" if not event.tokens else "part" if event.tokens < event.wanted_tokens else "whole"
            self.metrics.add(table.LOADS, result=share)
            self.metrics.observe(table.LOAD_SECONDS, self._clock() - pending.time_s)
            for place, tokens in event.sources:
                self.metrics.add(table.LOAD_TOKENS, tokens, place=place)
        elif isinstance(event, StoreDone):
            number = next(number for number, pending in enumerate(self._stores) if pending.request == event.request)
            pending = self._stores.pop(number)
            self._events.append(event)
            self.metrics.add(table.STORES)
            self.metrics.add(table.STORE_CHUNKS, event.held, result="held")
            self.metrics.add(table.STORE_CHUNKS, event.dropped, result="dropped")
            self.metrics.observe(table.STORE_SECONDS, self._clock() - pending.time_s)
        else:
            self._events.append(event)
            self.metrics.set(table.TIER_UP, float(event.is_up), tier=event.tier, way=event.way)
            log = logger.info if event.is_up else logger.warning
            log("tier %s %s", event.tier, event.detail)

    # ---- internal errors -------------------------------------------------------------------------------------------

    def shut(self, error: BaseException) -> None:
        """Shut the session down after an internal error, so that the engine goes on without it.

        The mover ends first, because running copies use the engine's blocks. Then all open loads and stores fail.

        Args:
            error: the exception. It is raised again unless it is an `Exception`.
        """
        if self._is_broken:
            logger.warning("another internal error of kvtier after it was shut down", exc_info=error)
        else:
            logger.error(
                "internal error: kvtier shuts down; nothing is stored or loaded any more, all prompts are computed",
                exc_info=error,
            )
            self._is_broken = True
            if not self._end_mover(MOVER_DEADLINE_S):
                self._copying_until_s = self._clock() + COPY_DEADLINE_S
                try:
                    self._copying = self._cache.copies()
                except Exception:
                    logger.warning("internal error: kvtier does not know which copies still run", exc_info=True)
            self._fail_open()
        if not isinstance(error, Exception):
            raise error

    def _end_mover(self, deadline_s: float) -> bool:
        """Whether all of its threads have ended."""
        for _ in range(2):  # `close` is idempotent
            try:
                return self._mover.close(deadline_s)
            except Exception as error:
                self.shut(error)
        return False

    def _await_copies(self, until_s: float) -> None:
        """Wait for an event, at most until `until_s`, after the session was shut down."""
        wait_s = max(0.0, until_s - self._clock())
        if not self._copying:
            if not self._events and self._closed is None:
                self._woken.wait(wait_s)
            return
        for completion in self._mover.take(min(wait_s, COPY_STEP_S)):
            if isinstance(completion.command, Transfer):
                self._copying.pop(completion.command.id, None)
        if self._clock() >= self._copying_until_s:
            self._copying.clear()
        self._fail_open()

    def _answer_all(self, _deadline_s: float) -> None:
        self._copying.clear()
        self._fail_open()

    def _fail_open(self) -> None:
        """Fail all open loads and stores without a running copy."""
        copying = set(self._copying.values())
        for pending in [pending for pending in self._loads.values() if pending.request not in copying]:
            del self._loads[pending.request]
            self._events.append(pending.load_failed())
        for pending in [pending for pending in self._stores if pending.request not in copying]:
            self._stores.remove(pending)
            self._events.append(pending.store_failed())


@dataclass(frozen=True, slots=True)
class _Pending:
    """An open load or store."""

    request: RequestId
    time_s: float
    tokens: int
    places: Sequence[Place]

    def load_failed(self) -> LoadDone:
        return LoadDone(self.request, 0, self.tokens, tuple((place.group, place.chunk) for place in self.places))

    def store_failed(self) -> StoreDone:
        return StoreDone(self.request, 0, len(self.places))
