"""The session, the only interface of an engine adapter: loads and stores on a core with a lock (`locked_core`)."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvtier.core.cache import Cache
from kvtier.core.load_budget import LoadBudget
from kvtier.core.recall_schedule import Recalls
from kvtier.core.survey import Survey
from kvtier.core.tier_searches import ASK_AGAIN_S_MAX
from kvtier.layout import Loss
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion, Executor
from kvtier.runtime.locked_core import FLUSH_STEP_S, TICK_S, Closed, LockedCore, SessionError
from kvtier.runtime.observers.guards import Feature, Guards, LogLine
from kvtier.runtime.session_events import OpenCall, SessionEvents
from kvtier.types import (
    ChunkKey,
    ChunkRecord,
    Event,
    Lookup,
    NextTurn,
    Outcome,
    Place,
    Prefix,
    Presence,
    Priority,
    Recall,
    RequestId,
    Transfer,
)

T = TypeVar("T")

__all__ = ["Closed", "Session", "SessionError"]

COUNTED_MAX = 65_536

NOTHING = Lookup(0, 0, Presence.ABSENT)


class Session(LockedCore):
    """Loads and stores KV for an engine. It takes and returns plain values. Thread-safe.

    `lookup`, `load` and `store` raise `SessionError` after `close` and in a forked child. They also raise it in a
    finalizer or signal handler that interrupts another call of the same thread. `release`, `poll` and hints
    (`expects`, `retain`, `lower`, `prefetch`, `forget_hints`) can be called anywhere. Only calls with a `wait_s` or
    `deadline_s` block for long.

    Args:
        cache: the core, owned by the session from now on.
        executor: executes its commands, on all ranks.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        metrics: counts lookups, loads and stores.
        clock: the executor's clock, in monotonic seconds.
        locked_by: returns why nothing may be found or stored, such as a missing key; else empty. Called for each lookup
            and store.
        annotate: adds the chunk's text to a demotion (`LockedCore`).
        recalls: decides when each tier is asked which chunks it holds; None if no tier is asked.
        recalled: receives the records found in a tier, and its name. Called under the lock, from any thread.
        guards: guard the optional features and the observers.
        loss: how lossy the engine's stored KV may be (`store.loss`).

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    THREAD_NAME = "kvtier-session"
    SHUT_TEXT = (
        "internal error: kvtier shuts down; from now on nothing is stored or loaded, and all prompts are computed"
    )

    def __init__(
        self,
        cache: Cache,
        executor: Executor,
        *,
        on_close: Callable[[float], None] = lambda _seconds: None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        locked_by: Callable[[], str] = lambda: "",
        annotate: Callable[[Transfer], Transfer] | None = None,
        recalls: Recalls | None = None,
        recalled: Callable[[Sequence[ChunkRecord], str], None] = lambda _records, _tier: None,
        guards: Guards | None = None,
        loss: Loss = "none",
    ) -> None:
        self._locked_by = locked_by
        metrics, guards = metrics or Metrics(), guards or Guards()
        self._events = SessionEvents(metrics, guards, clock, loss)
        super().__init__(
            cache,
            executor,
            publish=self._events.publish,
            fail=self._events.fail,
            on_close=on_close,
            metrics=metrics,
            guards=guards,
            clock=clock,
            annotate=annotate,
        )
        self._recalls = None if recalls is None else guards.around(Feature.RECALL, recalls, due=(), answered=())
        self._on_recalled = recalled
        self.is_lent = False
        """Whether host memory has been returned to the system, so that nothing is prefetched into it."""
        self._counted: dict[RequestId, None] = {}
        """Requests whose tokens have been counted, so that repeated lookups of a request count once."""
        self._start()

    def lookup(
        self,
        request: RequestId,
        prefix: Prefix,
        *,
        resident_tokens: int = 0,
        compute_s: float | None = None,
        announced_tokens: int = 0,
        wait_s: float = 0.0,
    ) -> Lookup:
        """Return how many leading tokens can be loaded. Probe lower tiers; call again while the result is PROBING.

        Args:
            request: name of the request.
            prefix: the prompt's prefix.
            resident_tokens: leading tokens that the engine already has; load options start after them.
            compute_s: expected time to compute the prompt, which limits how long PROBING lasts for remote tiers. The
                tiers' deadlines are the limit if it is None.
            announced_tokens: leading tokens that another engine is storing in a shared tier. The lookup stays PROBING
                while more of them appear there, for at most `limits.announced_wait_s` or the time to compute them.
            wait_s: how long to wait for the lower tiers' answers. This does not block other calls.
        """
        answer = NOTHING
        seen, now_s = 0, self._clock()
        until_s = now_s + wait_s

        def ask(at_s: float) -> None:
            nonlocal answer, seen, now_s
            answer = self._cache.lookup(
                request,
                prefix,
                at_s,
                resident_tokens=resident_tokens,
                compute_s=compute_s,
                announced_tokens=announced_tokens,
            )
            seen, now_s = self._settles, at_s
            if answer.presence is not Presence.PROBING or now_s >= until_s:
                self.guards.run(Feature.METRICS, self._count, request, prefix, answer, announced_tokens, otherwise=None)

        while not self._locked_by():
            self._uninterrupted(self._call, ask)
            if self._is_broken:
                return NOTHING
            if answer.presence is not Presence.PROBING or now_s >= until_s:
                return answer
            self._wait(seen, min(until_s - now_s, ASK_AGAIN_S_MAX if announced_tokens else FLUSH_STEP_S))
        return NOTHING

    def load(
        self,
        request: RequestId,
        prefix: Prefix,
        tokens: int,
        places: Sequence[Place],
        *,
        resident_tokens: int = 0,
        budget: LoadBudget | None = None,
        conversation: str | None = None,
    ) -> None:
        """Load the leading `tokens` into `places`. Exactly one `LoadDone` follows, even after errors.

        Args:
            request: name of the request.
            prefix: the prompt's prefix.
            tokens: leading tokens to load.
            places: the engine's blocks of each chunk and group.
            resident_tokens: leading tokens that the engine has for every group, which are not loaded.
            budget: ends the load early, with the tokens loaded so far, once waiting costs more than computing.
            conversation: name of the conversation, for eviction.

        Raises:
            BadCallError: the arguments are invalid. No `LoadDone` follows.
        """

        def begin(call: OpenCall, now_s: float) -> None:
            if call.is_over:  # an error in another thread has ended it
                return
            self._cache.load(
                request,
                prefix,
                tokens,
                places,
                now_s,
                resident_tokens=resident_tokens,
                budget=budget,
                conversation=conversation,
            )
            if budget is not None:  # it may end earlier than any transfer
                self._plan_tick(self._cache.next_deadline() or now_s + TICK_S)

        self._uninterrupted(self._begin, begin, self._events.begin_load, request, tokens, places)

    def store(
        self, request: RequestId, prefix: Prefix, places: Sequence[Place], conversation: str | None = None
    ) -> None:
        """Store the chunks at `places`. Exactly one `StoreDone` follows; until then the engine keeps the blocks.

        Raises:
            BadCallError: a place is not in the prefix. No `StoreDone` follows.
        """
        wanted = () if self._locked_by() else places

        def begin(call: OpenCall, now_s: float) -> None:
            if not call.is_over:
                self._cache.store(request, prefix, wanted, now_s, conversation)

        self._uninterrupted(self._begin, begin, self._events.begin_store, request, wanted)

    def release(self, request: RequestId) -> None:
        """End the load and stores of `request`, which the engine no longer needs, and cancel unstarted transfers.

        This happens before this thread's next call starts, or immediately if the session's thread is free.
        """

        def release(now_s: float) -> None:
            self._counted.pop(request, None)
            self._cache.release(request, now_s)

        self._wish(release)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Declare the next turn of `conversation` after a response; None withdraws the declaration.

        Eviction policies use the declaration. A wrong one costs only hits.
        """
        self._wish(lambda _now_s: self._cache.expects(conversation, next_turn))

    def watch(
        self, watched: Callable[[str], tuple[tuple[ChunkKey, int], ...]] | None, each_second: Callable[[], None]
    ) -> None:
        """Let health checks also probe objects. Observers receive the answers.

        Args:
            watched: returns the objects for a tier's next check, under the session's lock; None for no objects.
            each_second: called about once a second, under the session's lock.
        """
        self._each_second = partial(self.guards.run, Feature.IDLE_STEPS, each_second, otherwise=None)
        if watched is not None:
            self._watched = partial(self.guards.run, Feature.EVENTS, watched, otherwise=())

    def survey(self, prefix: Prefix, wait_s: float) -> Survey | None:
        """Find every place that holds an object of `prefix`. Tiers have `wait_s` seconds to answer.

        Return None after an internal error, or while the tenant has no key.
        """
        found: list[Survey] = []
        seen, until_s = 0, self._clock() + wait_s

        def attempt(now_s: float) -> None:
            nonlocal seen
            found[:] = found or [self._cache.survey(prefix, now_s)]
            seen = self._settles
            if now_s >= until_s:
                found[0].stop()

        while not self._locked_by():
            self._uninterrupted(self._call, attempt)
            if self._is_broken or not found:
                return None
            if not found[0].unasked or not found[0].is_wanted:
                return found[0]
            self._wait(seen, max(0.0, until_s - self._clock()))
        return None

    def clear(self) -> tuple[int, int]:
        """Free host memory (`Cache.clear`). Lower tiers keep their objects, and objects of open requests stay."""
        return self._asked(self._cache.clear, otherwise=(0, 0))

    def emptied(self, act: Callable[[], object], wait_s: float) -> bool:
        """Free host memory, and call `act` while it is empty. The session does nothing else meanwhile.

        Prefetching then stops until the caller sets `is_lent` to False, once host memory is back. Lower tiers keep
        their objects, and this method waits for writes to them.

        Args:
            act: uses the memory. The session shuts down if it raises.
            wait_s: longest time to wait.

        Returns:
            Whether host memory was empty in time.
        """
        is_empty, seen = False, 0

        def attempt(now_s: float) -> None:
            nonlocal is_empty, seen
            is_empty, seen = self._cache.clear(now_s)[1] == 0, self._settles
            if is_empty:
                self.is_lent = True
                act()

        until_s = self._clock() + wait_s
        while not is_empty and not self._is_broken and (left_s := until_s - self._clock()) > 0:
            self._uninterrupted(self._call, attempt)
            if not is_empty:
                self._wait(seen, min(left_s, FLUSH_STEP_S))
        return is_empty

    @property
    def obstacle(self) -> str:
        """The reason why nothing is found or stored now; empty in normal operation."""
        if self.health_record.failure:
            return f"an internal error has switched kvtier off: {self.health_record.failure}"
        return self._locked_by()

    def retain(self, prefix: Prefix, seconds: float, priority: Priority = Priority.NORMAL) -> None:
        """Keep the objects of `prefix` that are in host memory there for `seconds`, at most `limits.retain_s`.

        One request's hint may retain at most `limits.hint_percent` of host memory, and all hints together at most
        `limits.retained_percent`. Beyond that, the oldest retention of the lowest priority ends, deepest chunk first.
        The objects are also written to lower tiers. The call also covers stores of the prefix that started before it.
        """
        self._wish(lambda now_s: self._cache.hints.retain(prefix, now_s + seconds, now_s, priority))

    def end_retention(self, prefix: Prefix) -> None:
        """Allow eviction of the objects of `prefix` in host memory again, whichever hint retained them."""
        self._wish(lambda _now_s: self._cache.hints.end(prefix))

    def host_tokens(self, prefix: Prefix, *, is_retained: bool = False) -> int:
        """Return how many leading tokens can be loaded from host memory alone. Earlier hints are applied first.

        With `is_retained`, only objects that hints retain count.
        """
        return self._asked(lambda _now_s: self._cache.host_tokens(prefix, is_retained=is_retained), otherwise=0)

    def lower(self, prefix: Prefix, conversation: str | None = None) -> None:
        """Let the chunks of `prefix` that only `conversation` has used be evicted first, until their next use.

        If no conversation is given, only chunks that a single load or store has used are affected.
        """
        self._wish(lambda _now_s: self._cache.hints.lower(prefix, conversation))

    def prefetch(
        self,
        request: RequestId,
        prefix: Prefix,
        in_s: float = 0.0,
        conversation: str | None = None,
        *,
        wait_s: float = 0.0,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Load the chunks of `prefix` from lower tiers into host memory, due in `in_s` seconds, and retain them.

        A prefetch uses no blocks of the engine, yields to loads, and ends without an event. Chunks of the prefix that
        only `conversation` has used are written to lower tiers. They may leave host memory until the prefetch starts.

        Args:
            request: a unique name; `release` ends the prefetch.
            prefix: the prompt's prefix, whose leading chunks within the limits of `retain` are fetched.
            in_s: seconds until the prefix is needed, at most `limits.retain_s`.
            conversation: name of the conversation.
            wait_s: minimum time that a slow tier has after `in_s`.
            priority: an operator's prefetches have their own quota and come first.
        """
        wish = partial(self._cache.hints.prefetch, conversation=conversation, wait_s=wait_s, priority=priority)
        self._wish(lambda now_s: None if self.is_lent else wish(request, prefix, now_s + in_s, now_s))

    def forget_hints(self) -> None:
        """End every retention and prefetch."""
        self._wish(lambda _now_s: self._cache.forget_hints())

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """Return the events since the last call, after waiting up to `wait_s` seconds for the first.

        Each event is returned to only one caller.
        """
        return self._events.poll(wait_s)

    def end_poll(self) -> None:
        """Make a waiting `poll`, or else the next one, return without an event. Thread-safe."""
        self._events.end_poll()

    def _check(self, now_s: float) -> None:
        super()._check(now_s)
        if (
            self._recalls is not None
            and not self._locked_by()  # otherwise no head could be opened
            and (due := self._recalls.due(self._cache.is_up, now_s))
        ):
            self._send(due)

    def _recalled(self, command: Recall, completion: Completion, now_s: float) -> None:
        if self._recalls is None:
            return
        records, is_last = completion.page or ((), False)
        if records:
            self.guards.run(Feature.EVENTS, self._on_recalled, records, command.tier, otherwise=None)
        elif completion.outcome is Outcome.FAILED:
            level = logging.DEBUG if self._is_broken or command.tier in self._warned else logging.WARNING
            self._warned.add(command.tier)
            text = "tier %s cannot be listed for routers: %s"
            self._lines.append(LogLine(level, text, (command.tier, completion.detail)))
        if following := self._recalls.answered(command, completion.outcome, len(records), now_s, is_last=is_last):
            self._send(following)

    def _asked(self, ask: Callable[[float], T], otherwise: T) -> T:
        """Return the core's answer, or `otherwise` after an internal error. Raises `SessionError`."""
        answers = [otherwise]

        def note(now_s: float) -> None:
            answers[0] = ask(now_s)

        self._uninterrupted(self._call, note)
        return answers[0]

    def _begin(self, act: Callable[[OpenCall, float], None], register: Callable[..., OpenCall], *what: object) -> None:
        """Make a load or store with `_call`, after registering it."""
        call = register(*what)
        try:
            self._call(partial(act, call))
        except Exception:
            if self._events.withdraw(call):
                raise

    def _count(self, request: RequestId, prefix: Prefix, answer: Lookup, announced_tokens: int) -> None:
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
        if announced_tokens:
            announced = min(announced_tokens // prefix.chunk_tokens * prefix.chunk_tokens, prefix.tokens)
            found = min(announced, answer.tokens)
            self.metrics.add(table.ANNOUNCED_TOKENS, found, result="found")
            self.metrics.add(table.ANNOUNCED_TOKENS, announced - found, result="missing")
