"""A thread that owns a session. Other threads queue calls and wait for the result, with a deadline.

Between calls it processes completions, so stores and demotions proceed while the engine computes or is idle.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvtier.core.load_budget import LoadBudget
from kvtier.errors import KvError
from kvtier.runtime.local_session import Closed, LocalSession
from kvtier.types import Event, Lookup, NextTurn, Place, Prefix, RequestId

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""How long a caller waits for its result. The thread waits only in `lookup` and `close`, within their deadlines."""

IDLE_S = 1.0

EVENTS_MAX = 65_536
"""Events kept for an engine that does not poll; more drop the oldest."""

Answer = TypeVar("Answer")


class SessionError(KvError):
    """The session is closed, or its thread did not finish a call in time."""


class Session:
    """A session that any thread may call: all that an engine adapter uses. It takes and returns plain values.

    Every call may raise `SessionError`. Only calls with a `wait_s` or `deadline_s` block for long.

    Args:
        session: owned by the session's thread from now on.
    """

    def __init__(self, session: LocalSession) -> None:
        self._session = session
        self._process = os.getpid()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_dropped_events = False
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        self._thread.start()

    def lookup(self, request: RequestId, prefix: Prefix, *, resident_tokens: int = 0, wait_s: float = 0.0) -> Lookup:
        """How many leading tokens can be loaded. Probes lower tiers; call it again while it returns PROBING.

        Other calls wait while it waits for lower tiers.

        Args:
            request: its name.
            prefix: of its prompt.
            resident_tokens: leading tokens that the engine holds; load options start behind them.
            wait_s: how long to wait for the lower tiers' answers.
        """
        return self._call(
            lambda: self._session.lookup(request, prefix, resident_tokens=resident_tokens, wait_s=wait_s),
            CALL_DEADLINE_S + wait_s,
        )

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
        """Load the leading `tokens` into `places`. Exactly one `LoadDone` follows, also after errors.

        Args:
            request: its name.
            prefix: of its prompt.
            tokens: leading tokens to load.
            places: the engine's blocks of each chunk and group.
            resident_tokens: leading tokens that the engine holds for every group; they are not loaded.
            budget: ends the load early, with the tokens loaded so far, once waiting costs more than computing.
            session: conversation of the request, for eviction.

        Raises:
            BadCallError: the arguments do not fit. No `LoadDone` follows.
        """
        self._call(
            lambda: self._session.load(
                request, prefix, tokens, places, resident_tokens=resident_tokens, budget=budget, session=session
            )
        )

    def store(self, request: RequestId, prefix: Prefix, places: Sequence[Place], session: str | None = None) -> None:
        """Store the chunks at `places`. Exactly one `StoreDone` follows; until then the engine keeps the blocks.

        Raises:
            BadCallError: a place is not in the prefix. No `StoreDone` follows.
        """
        self._call(lambda: self._session.store(request, prefix, places, session))

    def release(self, request: RequestId) -> None:
        """The engine is done with `request`: cancel transfers that have not begun, and end its load and stores."""
        self._call(lambda: self._session.release(request))

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """Declare what continues conversation `session` after a response; None withdraws it.

        Eviction policies use it. A wrong declaration costs hits only.
        """
        self._call(lambda: self._session.expects(session, next_turn))

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """Events since the last call; waits up to `wait_s` seconds for the first. Each is returned to one caller."""
        with self._changed:
            if not self._events:
                self._changed.wait(wait_s)
            events = list(self._events)
            self._events.clear()
        return events

    def close(self, deadline_s: float = 30.0) -> Closed:
        """Write pending objects to their tiers, within `deadline_s` seconds, and end all threads. Idempotent.

        It does nothing in a forked child, because the session belongs to the parent.
        """
        if self._process != os.getpid():
            return Closed(flushed=False, lost=0)
        if not self._thread.is_alive():
            closed = self._session.close(0.0)
            self._publish(self._session.poll())
            return closed
        closed = self._call(lambda: self._close(deadline_s), deadline_s + CALL_DEADLINE_S)
        self._thread.join(CALL_DEADLINE_S)
        return closed

    def _close(self, deadline_s: float) -> Closed:
        self._is_closing = True
        return self._session.close(deadline_s)

    def _call(self, act: Callable[[], Answer], deadline_s: float = CALL_DEADLINE_S) -> Answer:
        if not self._thread.is_alive():
            raise SessionError("the session is closed")
        reply: Future[Answer] = Future()
        try:
            self._calls.put((reply, act))
            self._session.wake()
            return reply.result(timeout=deadline_s)
        except TimeoutError:
            raise SessionError(f"the session did not finish the call within {deadline_s:g} s") from None
        finally:
            reply.cancel()  # no effect once the call has begun

    def _run(self) -> None:
        events: list[Event] = []
        try:
            while not self._is_closing:
                # After an error, calls of other threads must still return, and their events arrive.
                try:
                    events += self._session.poll(IDLE_S)
                    self._publish(events)
                    self._do_calls()
                except BaseException as error:  # noqa: BLE001 - `shut` raises it again unless it is an `Exception`
                    self._session.shut(error)
        finally:
            events += self._session.poll()
            self._publish(events)
            self._do_calls()

    def _do_calls(self) -> None:
        while True:
            try:
                reply, act = self._calls.get_nowait()
            except Empty:
                return
            if not reply.set_running_or_notify_cancel():
                continue  # the caller has timed out
            try:
                reply.set_result(act())
            except Exception as error:  # noqa: BLE001 - the caller raises it
                reply.set_exception(error)
            except BaseException as error:
                reply.set_exception(SessionError(f"the session ends: {type(error).__name__}: {error}"))
                raise

    def _publish(self, events: list[Event]) -> None:
        """Move `events` to the queue of `poll`."""
        if not events:
            return
        with self._changed:
            if len(self._events) + len(events) > EVENTS_MAX and not self._has_dropped_events:
                self._has_dropped_events = True
                logger.warning(
                    "the engine has not polled %d events; kvtier drops the oldest, which end no load or store",
                    EVENTS_MAX,
                )
            self._events.extend(events)
            events.clear()
            self._changed.notify_all()
