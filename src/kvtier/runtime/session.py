"""The session: all that an engine adapter uses. The core behind one lock (`locked_core`), for loads and stores."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvtier.core.cache import Cache
from kvtier.core.load_budget import LoadBudget
from kvtier.core.probes import ASK_AGAIN_S_MAX
from kvtier.core.recalls import Recalls
from kvtier.core.survey import Survey
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion, Executor, Observer
from kvtier.runtime.guards import Feature, Guards, LogLine
from kvtier.runtime.locked_core import FLUSH_STEP_S, TICK_S, Closed, LockedCore, SessionError
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
    """A session that any thread may call. It takes and returns plain values.

    `lookup`, `load` and `store` raise `SessionError` if the session is closed, in a forked child, or called from a
    finalizer or signal handler in the middle of another call of the same thread. `release`, `poll` and hints
    (`expects`, `retain`, `lower`, `prefetch`, `forget_hints`) may be called anywhere. Only calls with a `wait_s` or
    `deadline_s` block for long.

    Args:
        cache: the core; owned by the session from now on.
        executor: executes its commands, on all ranks.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        on_second: called about once a second, under the lock, to refresh gauges.
        metrics: counts lookups, loads and stores.
        observer: receives every command and every completion, under the lock.
        clock: monotonic seconds; the executor's clock.
        locked_by: why nothing may be found or stored, such as a missing key; else empty. Called for each lookup and
            store.
        has_thread: False: `tick` is called instead, by the owner.
        annotate: adds the text of its chunk to a demote; see `LockedCore`.
        recalls: of tiers that may hold texts; None: none is recalled.
        recalled: receives the records that tiers hold, and the tier's name; under the lock, in any thread.
        guards: of what is optional.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    THREAD_NAME = "kvtier-session"
    SHUT_TEXT = "internal error: kvtier shuts down; nothing is stored or loaded any more, all prompts are computed"

    def __init__(
        self,
        cache: Cache,
        executor: Executor,
        *,
        on_close: Callable[[float], None] = lambda _seconds: None,
        on_second: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        locked_by: Callable[[], str] = lambda: "",
        has_thread: bool = True,
        annotate: Callable[[Transfer], Transfer] | None = None,
        recalls: Recalls | None = None,
        recalled: Callable[[Sequence[ChunkRecord], str], None] = lambda _records, _tier: None,
        guards: Guards | None = None,
    ) -> None:
        self._locked_by = locked_by
        metrics, guards = metrics or Metrics(), guards or Guards()
        self._events = SessionEvents(metrics, guards, clock)
        super().__init__(
            cache,
            executor,
            publish=self._events.publish,
            fail=self._events.fail,
            on_close=on_close,
            on_second=partial(guards.run, Feature.METRICS, on_second, otherwise=None),
            metrics=metrics,
            observer=observer,
            guards=guards,
            clock=clock,
            annotate=annotate,
        )
        self._recalls = None if recalls is None else guards.around(Feature.RECALL, recalls, due=(), answered=())
        self._on_recalled = recalled
        self.is_lent = False
        """Host memory has been given back, so nothing is prefetched into it."""
        self._counted: dict[RequestId, None] = {}
        """Requests whose tokens are counted, so that repeated lookups of a request count once."""
        if has_thread:
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
        """How many leading tokens can be loaded. Probes lower tiers; call it again while it returns PROBING.

        Args:
            request: its name.
            prefix: of its prompt.
            resident_tokens: leading tokens that the engine holds; load options start behind them.
            compute_s: expected time to compute the prompt, which bounds how long PROBING lasts for remote tiers; None:
                until their deadlines.
            announced_tokens: leading tokens that another engine is storing in a shared tier. The lookup is PROBING
                while further ones appear there, for `limits.announced_wait_s` or the time of computing them at most.
            wait_s: how long to wait for the lower tiers' answers. Other calls go on meanwhile.
        """
        answer = NOTHING
        seen, now_s = 0, self._clock()
        until_s = now_s + wait_s

        def look_up(at_s: float) -> None:
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
            self._uninterrupted(self._call, look_up)
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
        """Load the leading `tokens` into `places`. Exactly one `LoadDone` follows, also after errors.

        Args:
            request: its name.
            prefix: of its prompt.
            tokens: leading tokens to load.
            places: the engine's blocks of each chunk and group.
            resident_tokens: leading tokens that the engine holds for every group; they are not loaded.
            budget: ends the load early, with the tokens loaded so far, once waiting costs more than computing.
            conversation: name of the conversation, for eviction.

        Raises:
            BadCallError: the arguments do not fit. No `LoadDone` follows.
        """

        def begin(call: OpenCall, now_s: float) -> None:
            if call.is_over:  # it has failed with a call of another thread
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
        """The engine is done with `request`: cancel transfers that have not begun, and end its load and stores.

        It happens before the next call of this thread begins, and at once if the session's thread is free.
        """

        def release(now_s: float) -> None:
            self._counted.pop(request, None)
            self._cache.release(request, now_s)

        self._wish(release)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Declare what continues `conversation` after a response; None withdraws it.

        Eviction policies use it. A wrong declaration costs hits only.
        """
        self._wish(lambda _now_s: self._cache.expects(conversation, next_turn))

    def watch(
        self, watched: Callable[[str], tuple[tuple[ChunkKey, int], ...]] | None, each_second: Callable[[], None]
    ) -> None:
        """Let health checks ask for objects, whose answers the observer gets.

        Args:
            watched: gives the objects of a tier's next check, under the session's lock; None: no objects.
            each_second: called about once a second, under the session's lock.
        """
        self._each_second = partial(self.guards.run, Feature.IDLE_STEPS, each_second, otherwise=None)
        if watched is not None:
            self._watched = partial(self.guards.run, Feature.EVENTS, watched, otherwise=())

    def recall(self, tier: str) -> None:
        """Ask once more for the chunks whose tokens `tier` holds, see `open.open_core`. Other tiers hold none."""
        recalls = self._recalls
        if recalls is not None:
            self._wish(lambda _now_s: recalls.again(tier))

    def survey(self, prefix: Prefix, wait_s: float) -> Survey | None:
        """Every place of the objects of `prefix`, as far as tiers answer within `wait_s` seconds.

        None after an internal error, and while the tenant has no key.
        """
        found: list[Survey] = []
        seen, until_s = 0, self._clock() + wait_s

        def look(now_s: float) -> None:
            nonlocal seen
            found[:] = found or [self._cache.survey(prefix, now_s)]
            seen = self._settles
            if now_s >= until_s:
                found[0].stop()

        while not self._locked_by():
            self._uninterrupted(self._call, look)
            if self._is_broken or not found:
                return None
            if not found[0].unasked or not found[0].is_wanted:
                return found[0]
            self._wait(seen, max(0.0, until_s - self._clock()))
        return None

    def clear(self) -> tuple[int, int]:
        """Free host memory, see `Cache.clear`. Lower tiers keep their objects, and those of open requests stay."""
        return self._asked(self._cache.clear, otherwise=(0, 0))

    def emptied(self, act: Callable[[], object], wait_s: float) -> bool:
        """Free host memory, and call `act` while it is empty; nothing else is done meanwhile.

        From then on nothing is prefetched, until the caller says that host memory is back (`is_lent`).
        Lower tiers keep their objects, and what is being written to them is waited for.

        Args:
            act: uses the memory. If it raises, the session is over.
            wait_s: longest wait in seconds.

        Returns:
            Whether host memory was empty in time.
        """
        is_empty, seen = False, 0

        def look(now_s: float) -> None:
            nonlocal is_empty, seen
            is_empty, seen = self._cache.clear(now_s)[1] == 0, self._settles
            if is_empty:
                self.is_lent = True
                act()

        until_s = self._clock() + wait_s
        while not is_empty and not self._is_broken and (left_s := until_s - self._clock()) > 0:
            self._uninterrupted(self._call, look)
            if not is_empty:
                self._wait(seen, min(left_s, FLUSH_STEP_S))
        return is_empty

    @property
    def obstacle(self) -> str:
        """Why nothing is found or stored now; empty in normal operation."""
        if self.fault_record.failure:
            return f"an internal error has switched kvtier off: {self.fault_record.failure}"
        return self._locked_by()

    def retain(self, prefix: Prefix, seconds: float, priority: Priority = Priority.NORMAL) -> None:
        """Keep what host memory has of `prefix` there for `seconds`, at most `limits.retain_s`.

        One hint of a request has at most `limits.hint_percent` of host memory, and all retained objects at most
        `limits.retained_percent`. Beyond it the oldest retention of the lowest priority ends, the deepest chunk first.
        Lower tiers get the objects, too. The call counts for stores of the prefix that began before it.
        """
        self._wish(lambda now_s: self._cache.hints.retain(prefix, now_s + seconds, now_s, priority))

    def end_retention(self, prefix: Prefix) -> None:
        """Let what host memory has of `prefix` be evicted again, whichever hint retained it."""
        self._wish(lambda _now_s: self._cache.hints.end(prefix))

    def host_tokens(self, prefix: Prefix, *, is_retained: bool = False) -> int:
        """Leading tokens that host memory alone can load, after all calls before; see `Cache.host_tokens`."""
        return self._asked(lambda _now_s: self._cache.host_tokens(prefix, is_retained=is_retained), otherwise=0)

    def lower(self, prefix: Prefix, conversation: str | None = None) -> None:
        """Evict what only `conversation` has used of `prefix` from host memory before all else, until its next use.

        Without a conversation: what one load or store only has used.
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
        """Have what lower tiers hold of `prefix` in host memory in `in_s` seconds, and keep it there as `retain` does.

        It needs no blocks of the engine, yields to loads, and ends without an event. Until it begins, what only
        `conversation` has used of the prefix is written to lower tiers and may leave host memory.

        Args:
            request: a name of its own; `release` ends the prefetch.
            prefix: of the prompt; its leading chunks within the limits of `retain` are fetched.
            in_s: seconds until it is needed, at most `limits.retain_s`.
            conversation: name of the conversation.
            wait_s: seconds after `in_s` that a slow tier may take at least.
            priority: an operator's prefetches have places of their own, and come first.
        """
        wish = partial(self._cache.hints.prefetch, conversation=conversation, wait_s=wait_s, priority=priority)
        self._wish(lambda now_s: None if self.is_lent else wish(request, prefix, now_s + in_s, now_s))

    def forget_hints(self) -> None:
        """End every retention and prefetch."""
        self._wish(lambda _now_s: self._cache.forget_hints())

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """Events since the last call; waits up to `wait_s` seconds for the first. Each is returned to one caller."""
        return self._events.poll(wait_s)

    def end_poll(self) -> None:
        """Let a `poll` that waits, or the next one, return without an event. Any thread."""
        self._events.end_poll()

    def _check(self, now_s: float) -> None:
        super()._check(now_s)
        if (
            self._recalls is not None
            and not self._locked_by()  # no head could be opened
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
        """The core's answer; `otherwise` after an internal error. Raises `SessionError`."""
        answers = [otherwise]

        def note(now_s: float) -> None:
            answers[0] = ask(now_s)

        self._uninterrupted(self._call, note)
        return answers[0]

    def _begin(self, act: Callable[[OpenCall, float], None], register: Callable[..., OpenCall], *what: object) -> None:
        """`_call` for a load or store, which is registered before it begins."""
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
