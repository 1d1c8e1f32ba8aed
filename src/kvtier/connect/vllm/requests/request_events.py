"""Reports what happens to requests to the optional observers: journal, recorder, history and KV events.

Each observer has its own guard (`runtime.observers.guards`). After an error in an observer, the record is lost or the
feature ends, but the error is not raised.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.connect.vllm.requests.kv_events import BlockEvent, Events
from kvtier.connect.vllm.requests.miss_reasons import RequestHistory
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.core.planner import LoadPlan, Planner
from kvtier.runtime.observers.guards import Feature
from kvtier.runtime.open import OpenedSession
from kvtier.types import LoadDone, Lookup, Place, Prefix


class RequestEvents:
    """Observes the requests of one engine. Only the scheduler's thread uses it, except `has_news`.

    Args:
        opened: the session, with its recorder and journal if enabled.
        object_bytes: bytes of an object of each group, without padding, on all workers together.
        events: KV events for routers, if enabled.
        history: remembers the last requests, if enabled.
    """

    def __init__(
        self,
        opened: OpenedSession,
        object_bytes: Sequence[int],
        events: Events | None = None,
        history: RequestHistory | None = None,
    ) -> None:
        self._session, self._recorder, self._journal = opened.session, opened.recorder, opened.journal
        self._object_bytes = object_bytes
        self._guards = guards = opened.session.guards
        self._events = events and guards.around(Feature.EVENTS, events, take=(), has_news=False)
        self._history = history and guards.around(Feature.HISTORY, history)
        self._has_cleared = False
        """Whether routers were asked to forget everything, because the events have ended."""

    def _account(self, act: Callable[..., None], *given: object) -> None:
        self._guards.run(Feature.JOURNAL, act, *given, otherwise=None)

    # ---- what happens to a request ---------------------------------------------------------------------------------

    def arrived(self, tracked: TrackedRequest, problem: str) -> None:
        """Record a new request. `problem` says why loads and stores are off; empty if they are on."""
        if self._history is not None and not tracked.hints.opt_out:
            self._history.arrived(tracked, problem)

    def resident(self, tracked: TrackedRequest, tokens: int) -> None:
        """Record how many leading tokens vLLM's own cache has."""
        self._account(tracked.account.resident, tokens)

    def missed(self, tracked: TrackedRequest, lost: str) -> None:
        """Record that a lookup has not found everything. `lost` says why no worker can load; empty if they can."""
        if self._history is not None:
            self._history.missed(tracked, lost)

    def planned(self, tracked: TrackedRequest, lookup: Lookup, plan: LoadPlan, planner: Planner) -> None:
        """Record that the planner has chosen `plan`."""
        self._account(tracked.account.chosen, lookup, plan, planner)

    def allocated(self, tracked: TrackedRequest, tokens: int) -> None:
        """Record that vLLM has allocated blocks for a load of `tokens`."""
        self._account(tracked.account.load_begins, tokens)

    def load_started(self, tracked: TrackedRequest, prefix: Prefix) -> None:
        """Record that a load of `prefix` is passed to the session."""
        if self._events is not None and not tracked.hints.opt_out:
            self._events.learn(tracked.request, prefix)

    def began(self, tracked: TrackedRequest) -> None:
        """Record that the engine has begun to compute the request."""
        tracked.account.has_begun = True

    def load_ended(self, tracked: TrackedRequest, done: LoadDone, seconds: float, places: Sequence[Place]) -> None:
        """Record that a load into `places` ended after `seconds`."""
        self._account(tracked.account.load_ended, done, seconds, places, self._object_bytes)

    def stored(self, tracked: TrackedRequest, prefix: Prefix, first: int) -> None:
        """Record a new store of the chunks of `prefix`, from number `first` on."""
        tracked.account.stored_tokens += prefix.tokens - first * prefix.chunk_tokens
        if self._events is not None:
            self._events.learn(tracked.request, prefix, first)

    def ended(self, tracked: TrackedRequest, open_since_s: float | None) -> None:
        """Record that a request has ended, finished or aborted. Nothing is kept about a request that opts out.

        Args:
            tracked: the request.
            open_since_s: arrival of the oldest request that has not ended; None if there is none.
        """
        run = self._guards.run
        if tracked.hints.opt_out:
            return
        if (recorder := self._recorder) is not None:
            run(Feature.RECORDER, lambda: recorder.served(tracked.served(), open_since_s), otherwise=None)
        if (journal := self._journal) is not None:
            account, request = tracked.account, tracked.request
            run(Feature.JOURNAL, lambda: journal.ended(account.line(request, tracked.arrived_s)), otherwise=None)
        if self._history is not None:
            self._history.ended(tracked)

    # ---- KV events -------------------------------------------------------------------------------------------------

    def keys_renewed(self) -> None:
        """Withdraw everything that was published, because all requests have other keys from now on."""
        if self._events is not None:
            self._events.reset()

    def salt_cleared(self, salt: str) -> None:
        """Withdraw what was published about requests with this salt (``""`` for none)."""
        if self._events is not None:
            self._events.clear(salt)

    @property
    def has_news(self) -> bool:
        """Whether `take_events` may return anything. Any thread may ask."""
        return self._events is not None and (self._events.has_news or self._must_clear)

    @property
    def _must_clear(self) -> bool:
        """Whether an error has ended the events while routers still trust what was published."""
        return not self._has_cleared and self._guards.has_ended(Feature.EVENTS)

    def take_events(self, form: Callable[[BlockEvent], Any], *, is_off: bool) -> list[Any] | None:
        """Return KV events for routers, at the end of a step. After an internal error, withdraw all chunks.

        Return None once if the error was in the events, because what was published is then unknown. Everything must be
        withdrawn, including the blocks of vLLM's own cache.

        Args:
            form: converts an event into vLLM's form.
            is_off: whether there was an error in the connector.
        """
        if self._events is None:
            return []
        if is_off or self._session.health_record.failure:
            self._events.reset()
        events = self._events
        found = self._guards.run(Feature.EVENTS, lambda: list(map(form, events.take())), otherwise=[])
        if self._must_clear:
            self._has_cleared = True
            return None
        return found
