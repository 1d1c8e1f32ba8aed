"""Calls of a client library that has no deadlines, in threads of their own."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvtier.errors import TierError

THREADS = 4
WAITING_MAX = 256

_T = TypeVar("_T")


class _Call:
    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.answer: object = None
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.is_overdue = False


class DeadlineCalls:
    """Runs calls that may hang, and gives up on them after a deadline. They must not use memory of the caller.

    While a call that was given up on still runs, further ones fail at once.

    Args:
        tier: the tier's name, for errors.
        subject: what does not answer then, for errors.
    """

    def __init__(self, tier: str, subject: str) -> None:
        self._tier, self._subject = tier, subject
        self._calls: queue.Queue[_Call | None] = queue.Queue(WAITING_MAX)
        self._lock = threading.Lock()
        self._overdue = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-{tier}-call-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises `TierError` while a call is overdue."""
        if self._overdue:
            raise TierError(self._tier, f"{self._subject} does not answer")

    def call(self, act: Callable[[], _T], deadline_s: float) -> _T:
        """The result of `act`, or its exception.

        Raises:
            TierError: there is none within `deadline_s` seconds.
        """
        self.check()
        call = _Call(act)
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TierError(self._tier, f"{self._subject} does not answer: {WAITING_MAX} calls wait") from None
        if not call.over.wait(deadline_s):
            with self._lock:
                if not call.over.is_set():
                    call.is_overdue = True
                    self._overdue += 1
            if call.is_overdue:
                raise TierError(self._tier, f"{self._subject} has not answered within {deadline_s:g} s")
        if call.error is not None:
            raise call.error
        return cast("_T", call.answer)

    def close(self, deadline_s: float) -> bool:
        """End the threads; whether all have ended within about `deadline_s` seconds."""
        end_s = time.monotonic() + deadline_s
        for _ in self._threads:
            try:
                self._calls.put(None, timeout=max(0.0, end_s - time.monotonic()))
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            call: Any = self._calls.get(timeout=None)
            if call is None:
                return
            try:
                call.answer = call.act()
            except BaseException as error:  # noqa: BLE001 - raised where the call was made
                call.error = error
            with self._lock:
                call.over.set()
                self._overdue -= call.is_overdue
