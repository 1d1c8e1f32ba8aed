"""The core behind one lock: the common base of a session and an object store.

A call takes the lock, settles waiting completions (passes them to the core), calls the core, queues the core's commands
in the executor, and releases the lock. It does no I/O, waits for nothing and writes no log under the lock. Signal
handlers run after the call. A thread that has completed commands puts the completions into the inbox. It settles them
itself if the lock is free. Otherwise the holder does so after releasing the lock.

An exception during a decision leaves the core inconsistent, so the core shuts down. After a temporary error, such as a
brief lack of memory, it restarts with empty host memory once every command has ended. Guards (`guards`) isolate
optional features.

    callers' threads     what `Session` and `ObjectStore` add
    executor's threads   `ready`, after they have put completions into the inbox
    its own thread       deadlines, health checks, gauges, closing: slow or scheduled work
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import ClassVar

from kvtier.core.cache import Cache
from kvtier.core.hint_scheduler import PREFETCHES_MAX, WAITING_HINTS_MAX
from kvtier.core.operations import WAITING_MAX
from kvtier.core.tier_searches import REQUESTS_MAX
from kvtier.errors import BadCallError, KvError
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion, Executor, Work
from kvtier.runtime.held_signals import without_signals
from kvtier.runtime.mailbox import Mailbox
from kvtier.runtime.observers.guards import Feature, Guards, LogLine, ends_by_itself
from kvtier.runtime.observers.health_record import HealthRecord, TierFaults
from kvtier.types import (
    Cancel,
    ChunkKey,
    Command,
    Direction,
    Drop,
    Event,
    Outcome,
    Probe,
    Recall,
    RequestId,
    TierNotice,
    Transfer,
)

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""How long a call waits for the lock, which is usually held for microseconds."""

TICK_S = 0.5
"""Longest sleep of the session's thread. An earlier deadline wakes it. By default a probe's deadline is not earlier, so
probes cause no wake-up. A tick takes 0.1 to 0.2 ms of the engine's processor core."""

SECOND_S = 1.0
"""Interval of gauges and health checks."""

RETRY_S = 0.005
"""Time after which a rank that reads slowly is sent the rest of its commands."""

READY_ROUNDS = 4
"""How many times one call of `ready` settles completions that have arrived meanwhile."""

FLUSH_STEP_S = 0.1

ALIVE_S = 10.0
"""A session counts as dead when its thread has made no health check for this long."""

MOVER_DEADLINE_S = 5.0
"""Time that the executor has to end after an internal error. Loads and stores without a running copy then fail."""

COPY_DEADLINE_S = 30.0
"""Time that a load or store waits for its running copy after an internal error, before it also fails. A core that
cannot restart by then stays shut."""

COPY_STEP_S = 0.05

RENEWALS_MAX, RENEWALS_S = 8, 3600.0
"""Maximum number of restarts within a period, and the period. After a further error, the core stays shut, because a
recurring error is a defect."""


class SessionError(KvError):
    """Raised if the session is closed or the call cannot start in time."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The result of closing a session."""

    flushed: bool
    """Whether all pending writes reached their tiers. Writes that a tier refused earlier are not pending."""
    lost: int
    """Pending writes that did not reach their tiers before the deadline."""


class LockedCore:
    """One core, the lock around its decisions, and its executor. A subclass adds the calls and then starts the thread.

    Args:
        cache: the core, owned by this object from now on.
        executor: executes its commands, on all ranks.
        publish: called with each event of the core, under the lock.
        fail: ends open operations, except those of the given requests, which have a running copy. Called under the lock
            after an internal error and at the end.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        metrics: receives the state of tiers.
        guards: guard the optional features and the observers; their log lines are written once the lock is free.
        clock: the executor's clock, in monotonic seconds.
        annotate: adds the chunk's text (token ids and extras) to a demotion, under the lock; None if demotions carry no
            text.
    """

    THREAD_NAME: ClassVar[str]
    SHUT_TEXT: ClassVar[str]
    """Logged once after an internal error."""

    def __init__(
        self,
        cache: Cache,
        executor: Executor,
        *,
        publish: Callable[[Event], None],
        fail: Callable[[Collection[RequestId]], None],
        on_close: Callable[[float], None],
        metrics: Metrics,
        guards: Guards,
        clock: Callable[[], float],
        annotate: Callable[[Transfer], Transfer] | None = None,
    ) -> None:
        self.metrics = metrics
        self.health_record = HealthRecord()
        self._cache, self._executor = cache, executor
        self._publish, self._fail = publish, fail
        self.guards = guards
        self._watched: Callable[[str], tuple[tuple[ChunkKey, int], ...]] = lambda _tier: ()
        self._each_second: Callable[[], None] = lambda: None
        self._annotate = annotate
        self._on_close = on_close
        self._clock = clock
        self._process = os.getpid()
        self._lock = threading.RLock()
        """Reentrant, so that a nested call in the holding thread finds `_holder` and does not deadlock."""
        self._holder = 0
        """Id of the thread that works under the lock; 0 for none. Changed under the lock."""
        self._inbox: deque[Completion] = deque()
        """Completions, which executors add without the lock; bounded by the commands in flight."""
        self._wishes: deque[Callable[[float], None]] = deque()
        """Calls that the next holder of the lock makes; added without the lock."""
        self._lines = guards.lines
        self._warned: set[str] = set()
        """Limits whose warning was logged."""
        self._settles = 0
        """How many times completions have been settled or deadlines checked."""
        self._settled = threading.Condition()
        self._waiting = 0
        """Number of threads that wait for `_settles` to change."""
        self._next_second_s, self._due_s = clock(), 0.0
        """Times of the next health check and of the next tick."""
        self._alarm: Mailbox[str] = Mailbox()
        """Wakes the thread. `_wake` keeps it to a few entries."""
        self._has_sent = False
        """Whether commands were submitted since the last `flush`."""
        self._open: dict[int, Work] = {}
        """Submitted commands without a completion, by object identity. Changed under the lock."""
        self._is_broken = self._is_lasting = self._has_ended = False
        """Whether an internal error has stopped all starts, whether it is final (set before `_is_broken`), and whether
        the executor is closed."""
        self._copies_until_s = 0.0  # deadline of copies that still run after an internal error; 0 until set
        self._renewals: deque[float] = deque(maxlen=RENEWALS_MAX)  # times at which the core restarted
        self._close_until_s: float | None = None
        """Deadline of `close` once it has been called."""
        self._closed: Closed | None = None
        self._is_over = False
        """Whether the session is closed, so that no call starts. Changed under the lock."""
        self._over = threading.Event()
        self._main_id = threading.main_thread().ident
        executor.complete_to(self._inbox.append, self.ready)
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        self._thread = threading.Thread(target=self._run, name=self.THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 30.0) -> Closed:
        """Write pending objects to their tiers, within `deadline_s` seconds, and end all threads. Idempotent.

        The session's thread does the work. `close` does nothing in a forked child, because the session belongs to the
        parent. If it is called in the session's thread or inside another call (by a finalizer), it returns without
        waiting for the end.

        Raises:
            SessionError: the session did not end in time.
        """
        if self._process != os.getpid():
            return Closed(flushed=False, lost=0)
        if self._close_until_s is None:
            self._close_until_s = self._clock() + deadline_s
        if self._thread is None or not self._thread.is_alive():
            self.tick()
        elif threading.current_thread() is self._thread or self._holds_lock():
            self._wake()
        else:
            self._wake()
            if not self._over.wait(deadline_s + CALL_DEADLINE_S):
                raise SessionError(f"the session did not close within {deadline_s:g} s")
            self._thread.join(CALL_DEADLINE_S)
        return self._closed or Closed(flushed=False, lost=0)

    @property
    def is_alive(self) -> bool:
        """Return whether the session's thread is working. Take no lock, so that a health check never waits.

        The result stays true after an internal error: the engine continues without kvtier, and `health_record` has the
        error.
        """
        return not self._is_over and (self._is_broken or self._clock() < self._next_second_s + ALIVE_S)

    def tier_faults(self) -> dict[str, TierFaults]:
        """Return the state of each tier, fastest first. Take no lock."""
        return self.health_record.tiers(self._cache)

    def ready(self) -> None:
        """Settle waiting completions, unless another thread holds the lock. Called after each release of the lock.

        Executors call it in the threads that complete commands, while holding no lock. No completion is stranded: a
        thread that finds the lock taken has already put its completions into the inbox. The current holder or the next
        one settles them. This method also does the work that must not run under the lock. It does nothing if the
        calling thread holds the lock. The session's thread takes over after `READY_ROUNDS`, so that a call ends even if
        completions keep arriving.
        """
        if self._holder == get_ident():
            return
        try:
            for _ in range(READY_ROUNDS):
                while self._lines:
                    with suppress(Exception):  # a log handler failed, or another thread has taken the last line
                        level, text, values, error = self._lines.popleft()
                        logger.log(level, text, *values, exc_info=error)
                if self._has_sent:
                    self._has_sent = False
                    if not self._executor.flush():
                        self._wake()  # the session's thread sends the rest
                if self._waiting:
                    with self._settled:
                        self._settled.notify_all()
                if not (self._inbox or self._wishes) or not self._locked(None, 0.0):
                    return
            self._wake()
        except Exception as error:
            self._shut(error)

    def tick(self) -> float:
        """Do the work that is due: deadlines, health checks, gauges, queued commands, the end after an error, closing.

        Called by the session's thread.

        Returns:
            Seconds until the next call is due.
        """
        if self._close_until_s is not None:
            if not self._over.is_set():
                self._end(self._close_until_s)
            return 0.0
        if self._is_broken and not self._is_lasting:
            self._locked(self._renew, TICK_S)
        elif self._is_broken and not self._has_ended:
            self._end_after_error()
        self._locked(self._check, TICK_S)
        self.ready()
        if not self._executor.flush():
            return RETRY_S
        if self._is_broken:
            return COPY_STEP_S if self._open or not self._is_lasting else TICK_S
        return max(0.0, min(TICK_S, self._due_s - self._clock()))

    def _uninterrupted(self, call: Callable[..., None], *arguments: object) -> None:
        """Make a call. Signal handlers can raise anywhere in the main thread, so they wait until the call ends."""
        if get_ident() == self._main_id:
            without_signals(call, *arguments)
        else:
            call(*arguments)

    # ---- the lock --------------------------------------------------------------------------------------------------

    def _call(self, act: Callable[[float], None], wait_s: float = CALL_DEADLINE_S) -> None:
        """Run `act` with `_locked`, for a call of the engine.

        Raises:
            SessionError: the session cannot take the call.
        """
        if self._process != os.getpid():
            raise SessionError("the session belongs to the parent process")
        if self._close_until_s is not None:
            raise SessionError("the session is closed")
        has_begun = True
        try:
            try:
                has_begun = self._locked(act, wait_s)
            finally:
                self.ready()
        except (BadCallError, SessionError):
            raise
        except Exception as error:
            self._shut(error)
        if not has_begun:
            raise SessionError(
                f"the session was closed, busy for {wait_s:g} s, or called inside a call of the same thread"
            )

    def _wish(self, act: Callable[[float], None]) -> None:
        """Let the next holder of the lock call `act`, if there is one."""
        if self._is_over or self._process != os.getpid():
            return
        self._wishes.append(act)
        self._wake()

    def _locked(self, act: Callable[[float], None] | None, wait_s: float) -> bool:
        """Run `_work` under the lock. Return False without calling `act` if the lock is taken or the session closed.

        The caller calls `ready` afterwards. A thread that already holds the lock cannot take it again.
        """
        is_mine = False
        try:
            # The lock is taken inside the `try`, because a signal handler may raise right after it.
            if not self._lock.acquire(timeout=wait_s) or self._holder:
                return False
            is_mine = True
            self._holder = get_ident()
            self._work(act, self._clock())
        except (BadCallError, SessionError):
            raise
        except Exception as error:
            self._shut(error)
        except BaseException as error:
            self._shut(error)
            raise
        finally:
            if is_mine:
                self._holder = 0
            try:  # noqa: SIM105 - this runs often, and `suppress` takes longer than the rest of this method
                self._lock.release()
            except RuntimeError:
                pass  # it was not taken
        return not self._is_over

    def _wait(self, seen: int, wait_s: float) -> None:
        """Wait up to `wait_s` seconds until `_settles` differs from `seen`."""
        with self._settled:
            self._waiting += 1
            try:
                self._settled.wait_for(lambda: self._settles != seen or self._is_broken, min(wait_s, FLUSH_STEP_S))
            finally:
                self._waiting -= 1

    def _holds_lock(self) -> bool:
        """Return whether this thread is inside a call."""
        return self._holder == get_ident()

    # ---- under the lock --------------------------------------------------------------------------------------------

    def _work(self, act: Callable[[float], None] | None, now_s: float) -> None:
        """Settle completions, call `act` unless the session is shut, and pass on the core's commands and events."""
        if self._is_broken or self._is_over:
            self._settle_shut(now_s)
            if act == self._renew and not self._is_over:
                self._renew(now_s)
            return
        if self._inbox or self._wishes:
            self._settle(now_s)
        if act is not None:
            act(now_s)
        if self._cache.commands:
            self._send(self._cache.take_commands())
        for event in self._cache.take_events() if self._cache.events else ():
            if isinstance(event, TierNotice):
                detail = self.guards.run(Feature.HEALTH, self._note, event, otherwise=event.detail)
                level = logging.INFO if event.is_up else logging.WARNING
                self._lines.append(LogLine(level, "tier %s %s", (event.tier, detail)))
            self._publish(event)

    def _note(self, notice: TierNotice) -> str:
        self.metrics.set(table.TIER_UP, float(notice.is_up), tier=notice.tier, way=notice.way)
        return self.health_record.changed(notice)

    def _settle(self, now_s: float) -> None:  # noqa: C901 - in one piece, because it runs for each object
        """Pass completions to the core, and make the waiting calls."""
        for _ in range(len(self._inbox)):
            completion = self._inbox.popleft()
            command = completion.command
            if self._open.pop(id(command), None) is None:
                continue  # it was already completed
            for feature, observer in self.guards.watching["completed"]:  # without `tell`: this runs for each object
                try:
                    observer.completed(completion)
                except Exception as error:
                    self.guards.failed(feature, error)
            if completion.is_tier_fault:
                self.guards.run(Feature.HEALTH, self.health_record.faulted, completion, otherwise=None)
            if isinstance(command, Transfer):
                self._cache.complete(command.id, completion.outcome, now_s, is_fault=completion.is_tier_fault)
            elif isinstance(command, Probe):
                present = completion.present if completion.outcome is Outcome.DONE else None
                self._cache.probed(command.id, present, now_s)
            elif isinstance(command, Drop):
                self._cache.dropped(command, completion.outcome)
            elif isinstance(command, Recall):
                self._recalled(command, completion, now_s)
        for _ in range(len(self._wishes)):
            self._wishes.popleft()(now_s)
        self._cache.advance(now_s)
        self._settles += 1

    def _settle_shut(self, now_s: float) -> None:
        """Fail open loads and stores without a running copy, after an internal error or the end.

        By now their commands that had not started are cancelled, or the executor refuses them.
        """
        self._wishes.clear()
        while self._inbox:
            completion = self._inbox.popleft()
            command = self._open.pop(id(completion.command), None)
            if command is not None:
                self.guards.tell("completed", completion)
            if isinstance(command, Recall):
                self._recalled(command, Completion(command, Outcome.FAILED, detail="kvtier has shut down"), now_s)
        if not self._copies_until_s:
            return
        if self._is_over or (self._is_lasting and now_s >= self._copies_until_s):
            self._open.clear()
        self._fail({it.request for it in self._open.values() if isinstance(it, Transfer) and it.request is not None})

    def _renew(self, now_s: float) -> None:
        """Restart after a temporary error, once no command runs. Called by the session's thread.

        Commands that have not started are cancelled first. The others own their slots and blocks until they end.
        """
        if self._is_lasting:
            return
        if not self._copies_until_s:
            self._copies_until_s = now_s + COPY_DEADLINE_S
            ids = (it.id for it in self._open.values() if isinstance(it, Transfer | Probe))
            self._executor.submit(Cancel(tuple(ids)))
            self._has_sent = self._executor.needs_flush
            self._settle_shut(now_s)
        if now_s >= self._copies_until_s:
            raise TimeoutError(f"{len(self._open)} commands still run, {COPY_DEADLINE_S:g} s after the error")
        if self._open:
            return
        self._fail(())
        self._cache.renew()
        self.guards.tell("renewed")
        self._renewals.append(now_s)
        self._copies_until_s = 0.0
        self._lines.append(LogLine(logging.INFO, "kvtier goes on after the error, with empty host memory"))
        self._is_broken = False
        if self._is_lasting:  # just now, by an error in another thread
            self._is_broken = True

    def _recalled(self, command: Recall, completion: Completion, now_s: float) -> None:
        """Handle a completed recall. A subclass that sends recalls overrides this."""

    def _send(self, commands: Sequence[Command]) -> None:
        """Queue the core's commands in the executor."""
        due_s = self._due_s
        if (annotate := self._annotate) is not None:
            run = self.guards.run
            commands = [
                run(Feature.EVENTS, annotate, it, otherwise=it)
                if isinstance(it, Transfer) and it.direction is Direction.DEMOTE
                else it
                for it in commands
            ]
        for command in commands:
            if isinstance(command, Cancel):
                continue
            self._open[id(command)] = command
            for feature, observer in self.guards.watching["submitted"]:
                try:
                    observer.submitted(command)
                except Exception as error:
                    self.guards.failed(feature, error)
            if isinstance(command, Transfer | Probe) and command.deadline_s < due_s:
                due_s = command.deadline_s
        self._executor.submit(*commands)
        self._has_sent = self._executor.needs_flush
        if due_s < self._due_s:
            self._plan_tick(due_s)

    def _plan_tick(self, due_s: float) -> None:
        """Wake the session's thread if `due_s` is earlier than its next tick."""
        if due_s < self._due_s:
            self._due_s = due_s
            self._wake()

    def _check(self, now_s: float) -> None:
        """Check deadlines, and the health of tiers once a second."""
        if now_s >= self._next_second_s:
            self._next_second_s = now_s + SECOND_S
            self.guards.tell("each_second")
            self._each_second()
            self._warn_of_limits()
            self._cache.check_tiers(now_s, self._watched)
        self._cache.tick(now_s)
        self._settles += 1
        next_s = self._cache.next_deadline()
        self._due_s = now_s + TICK_S if next_s is None else min(next_s, now_s + TICK_S)

    def _warn_of_limits(self) -> None:
        counters = self._cache.counters
        for name, count, effect in (
            (f"{REQUESTS_MAX} requests are open", counters.unprobed, "lower tiers are not probed for further requests"),
            (f"{WAITING_MAX} objects of stores wait for slots", counters.unqueued, "further objects are not stored"),
            (
                f"{PREFETCHES_MAX} prefetches are open",
                counters.refused_hints["prefetches"],
                "those that are due latest are ignored",
            ),
            (f"{WAITING_HINTS_MAX} hints wait for stores", counters.refused_hints["waiting"], "the oldest are ignored"),
            (
                "a hint exceeds limits.hint_percent or retained_percent",
                counters.refused_hints["retained"],
                "the rest is not retained",
            ),
        ):
            if count and name not in self._warned:
                self._warned.add(name)
                text = "%s: %s (this is logged once)"
                self._lines.append(LogLine(logging.WARNING, text, (name, effect)))

    # ---- the session's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = 0.0
        while not self._over.is_set():
            self._alarm.get(wait_s)
            wait_s = COPY_STEP_S
            try:
                wait_s = self.tick()
            except BaseException as error:
                self._shut(error)

    def _wake(self) -> None:
        """Wake the session's thread. A finalizer or signal handler may call it anywhere."""
        if not len(self._alarm):
            self._alarm.put("wake")

    def _end(self, until_s: float) -> None:
        """Close the session: flush, end the executor, end open operations, close the tiers."""
        lost = 0
        try:
            lost = self._flush(until_s)
        except BaseException as error:
            self._shut(error)
        self._closed = Closed(flushed=lost == 0 and not self._is_broken, lost=lost)
        if lost:
            text = "the session is closed; %d objects were not written to their tiers in time and are lost"
            self._lines.append(LogLine(logging.WARNING, text, (lost,)))
        # The executor is closed twice: if the first call raises, copies could still use the engine's blocks.
        for end in (self._executor.close, self._executor.close, self._answer_all, self.guards.close, self._on_close):
            try:
                end(max(0.0, until_s - self._clock()))
            except BaseException as error:
                self._shut(error)
        self.ready()
        self._over.set()

    def _flush(self, until_s: float) -> int:
        """Write pending objects to their tiers. Return how many were not written by `until_s`."""
        cache = self._cache
        lost_before = cache.counters.demotions_dropped
        left, seen = 0, 0

        def flush(now_s: float) -> None:
            nonlocal left, seen
            cache.tick(now_s)
            cache.flush(now_s)
            left, seen = cache.in_flight + cache.pending_count, self._settles

        self._locked(cache.stop, max(0.0, until_s - self._clock()))
        # Objects whose gather ends during a round become pending writes of the next round.
        while (now_s := self._clock()) < until_s and not self._is_broken:
            has_lock = self._locked(flush, until_s - now_s)
            self.ready()
            if has_lock and not left:
                break
            self._wait(seen, until_s - self._clock())
        return 0 if self._is_broken else cache.pending_count + cache.counters.demotions_dropped - lost_before

    def _answer_all(self, _deadline_s: float) -> None:
        self._is_over = True
        self._locked(None, CALL_DEADLINE_S)
        self._fail(())

    # ---- internal errors -------------------------------------------------------------------------------------------

    def _shut(self, error: BaseException) -> None:
        """Shut the session down after an internal error, so that the engine goes on without it. Thread-safe.

        The session's thread ends the executor first, because running copies use the engine's blocks. Then all open
        loads and stores fail. After a temporary error, the thread only waits until no command runs, and then restarts
        the core.
        """
        level, text = logging.WARNING, "kvtier had another internal error after it was shut down"
        if ends_by_itself(error) and not self._is_lasting and (self._is_broken or self._may_renew()):
            if self._is_broken:
                return
            text = "a decision failed: kvtier empties host memory, and goes on when all transfers have ended"
        elif not self._is_lasting:
            self._is_lasting = True
            self.health_record.failed(error)
            level = logging.ERROR
            text = self.SHUT_TEXT
        self._is_broken = True
        self._lines.append(LogLine(level, text, (), error))
        self._wake()

    def _may_renew(self) -> bool:
        return len(self._renewals) < RENEWALS_MAX or self._clock() - self._renewals[0] > RENEWALS_S

    def _end_after_error(self) -> None:
        if self._executor.close(MOVER_DEADLINE_S):
            self._open.clear()
        self._has_ended = True
        self._copies_until_s = self._copies_until_s or self._clock() + COPY_DEADLINE_S
