"""The thread that polls the session, so that the end of a load is reported even in the middle of a step.

A step of a busy engine takes tens of milliseconds. A worker that receives the end of a load during a step reports it at
the end of that step, and vLLM schedules the request in the next one. Without this thread that would be one step later.
The next step's orders repeat each report, so a lost note costs one step and never a request.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvtier.connect.vllm.worker import LoadReport
from kvtier.runtime.session import Session
from kvtier.types import Event, LoadDone

POLL_S = 0.2
"""Longest poll; the thread then checks whether it should end."""

_Item = TypeVar("_Item")


class SessionPoller:
    """Ended loads and stores, collected by a thread for the scheduler's thread.

    Args:
        session: must not be polled by anything else.
        report: makes a worker's report of an ended load; called in the poller's thread.
        notify: sends a report to the workers; called in the poller's thread.
    """

    def __init__(
        self,
        session: Session,
        report: Callable[[LoadDone], LoadReport | None],
        notify: Callable[[LoadReport], None],
    ) -> None:
        self._session = session
        self._report = report
        self._notify = notify
        # Both are bounded by the number of open loads and stores.
        self._events: deque[Event] = deque()
        self._reports: deque[LoadReport] = deque()
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier session poller", daemon=True)
        self._thread.start()

    def take_events(self) -> list[Event]:
        """Events since the last call.

        Raises:
            RuntimeError: an exception has ended the thread.
        """
        if self._error is not None:
            raise RuntimeError("the thread that polls the session has ended") from self._error
        return _drained(self._events)

    def take_reports(self) -> list[LoadReport]:
        """Reports since the last call; the next step's orders repeat them."""
        return _drained(self._reports)

    def deliver(self, done: LoadDone) -> None:
        """Report an ended load."""
        report = self._report(done)
        self._events.append(done)
        if report is not None:
            self._reports.append(report)
            self._notify(report)

    def close(self, deadline_s: float = 2 * POLL_S) -> None:
        """Stop the thread."""
        self._is_closing = True
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for event in self._session.poll(POLL_S):
                    if isinstance(event, LoadDone):
                        self.deliver(event)
                    else:
                        self._events.append(event)
        except BaseException as error:  # noqa: BLE001 - the scheduler's thread raises it
            self._error = error


def _drained(queue: deque[_Item]) -> list[_Item]:
    return [queue.popleft() for _ in range(len(queue))]
