"""Takes what the session says at the moment it says it, also in the middle of a step.

A step of a busy engine takes tens of milliseconds. A worker that hears during a step that a load has ended reports it
at that step's end, and vLLM schedules the request in the next one; by way of the next step's orders it would be one
step later. (The orders repeat it all the same: a note that is lost then costs a step, and never a request.)
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvtier.connect.vllm.meta import Ended
from kvtier.runtime.base import Session
from kvtier.types import Event, LoadDone

WAIT_S = 0.2
"""After this long it looks whether it is to end."""

_Item = TypeVar("_Item")


class CompletionInbox:
    """A thread between the session and the scheduler's thread.

    Args:
        session: polled by nobody else from now on.
        report: what a worker has to say about a load that has ended; called in the courier's thread.
        tell: carries it to the workers; called in the courier's thread.
    """

    def __init__(
        self, session: Session, report: Callable[[LoadDone], Ended | None], tell: Callable[[Ended], None]
    ) -> None:
        self._session = session
        self._report = report
        self._tell = tell
        # What is in them is limited by what is open in the session.
        self._events: deque[Event] = deque()
        self._ended: deque[Ended] = deque()
        self._is_closing = False
        self._mistake: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier courier", daemon=True)
        self._thread.start()

    def take_events(self) -> list[Event]:
        """What has ended since the last call.

        Raises:
            RuntimeError: an exception has ended the thread.
        """
        if self._mistake is not None:
            raise RuntimeError("the thread that takes the session's events has ended") from self._mistake
        return _drained(self._events)

    def take_ended(self) -> list[Ended]:
        """What the next step's orders have to repeat."""
        return _drained(self._ended)

    def deliver(self, done: LoadDone) -> None:
        """Pass on that a load has ended."""
        ended = self._report(done)
        self._events.append(done)
        if ended is not None:
            self._ended.append(ended)
            self._tell(ended)

    def close(self, deadline_s: float = 2 * WAIT_S) -> None:
        """End the thread."""
        self._is_closing = True
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for event in self._session.poll(WAIT_S):
                    if isinstance(event, LoadDone):
                        self.deliver(event)
                    else:
                        self._events.append(event)
        except BaseException as mistake:  # noqa: BLE001 - the scheduler's thread raises it
            self._mistake = mistake


def _drained(queue: deque[_Item]) -> list[_Item]:
    return [queue.popleft() for _ in range(len(queue))]
