"""Stores and loads of vLLM's tiering manager, in threads.

vLLM's scheduler submits a job, polls for the result, and reuses the job's host memory when it has the result. So a
result is there only after the last access to that memory. `ObjectStore` copies in the thread that calls it, and never
after the call. Every job ends by its deadline, because every job before it does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.runtime.object_store import ObjectBytes, ObjectStore
from kvtier.types import Outcome

LOAD_THREADS = 4
STORE_THREADS = 2

JOBS_MAX = 1024
"""Most jobs of each kind that wait; further jobs fail at once."""

IDLE_WAIT_S = 60.0
"""An idle thread looks for jobs at this interval, so that a lost wake-up cannot stall it."""

CANCEL_S = 0.05
"""Interval at which calls are canceled until none is left: storing an object takes two calls."""

COPIES_S = 30.0
"""Longest wait for copies between host memory and host memory, after everything else was canceled."""


class Job(NamedTuple):
    """Objects to store or to load."""

    number: int
    """vLLM's."""
    request: str
    keys: Sequence[bytes]
    """vLLM's."""
    items: Sequence[ObjectBytes]
    """One for each key; or none: the job fails."""
    is_load: bool
    until_s: float
    """Deadline, `time.monotonic`."""


class Done(NamedTuple):
    """A job that has ended. Nothing accesses its memory any more."""

    job: Job
    outcomes: Sequence[Outcome]
    """One for each item of a job that began; otherwise none."""
    seconds: float

    @property
    def keys(self) -> list[bytes]:
        """Keys of the objects that were stored or loaded."""
        return [key for key, outcome in zip(self.job.keys, self.outcomes, strict=False) if outcome is Outcome.DONE]


class Jobs:
    """Jobs that wait, run, and have ended. `submit` and `finished` never wait for a tier.

    Args:
        store: None: all jobs fail.
        failed: called in a job's thread with an exception that the store should not have raised.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    def __init__(self, store: ObjectStore | None, failed: Callable[[BaseException], None]) -> None:
        self._store = store
        self._failed = failed
        self._waiting: dict[bool, deque[Job]] = {True: deque(), False: deque()}
        """Loads under True, stores under False."""
        self._running = 0
        self._done: deque[Done] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        kinds = [True] * LOAD_THREADS + [False] * STORE_THREADS if store is not None else []
        self._threads = [
            threading.Thread(target=self._serve, args=(kind,), name="kvtier job", daemon=True) for kind in kinds
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. It fails at once without items or a store, after `close`, and with too many before it."""
        with self._changed:
            waiting = self._waiting[job.is_load]
            if not job.items or not self._threads or self._is_over or len(waiting) >= JOBS_MAX:
                self._done.append(Done(job, (), 0.0))
            else:
                waiting.append(job)
                self._changed.notify_all()

    def finished(self) -> list[Done]:
        """Jobs that have ended since the last call."""
        with self._changed:
            found = [*self._done]
            self._done.clear()
        return found

    def drain(self, patience_s: float) -> None:
        """End all jobs. Waiting jobs fail; running jobs are canceled when they have not ended after `patience_s`.

        Raises:
            TimeoutError: a copy has not ended after `COPIES_S`, so a job still accesses its memory.
        """
        with self._changed:
            self._done.extend(Done(job, (), 0.0) for waiting in self._waiting.values() for job in waiting)
            for waiting in self._waiting.values():
                waiting.clear()
            if self._changed.wait_for(lambda: not self._running, patience_s) or self._store is None:
                return
        until_s = time.monotonic() + COPIES_S
        while time.monotonic() < until_s:
            self._store.cancel()
            with self._changed:
                if self._changed.wait_for(lambda: not self._running, CANCEL_S):
                    return
        raise TimeoutError(f"{self._running} transfers have not ended {COPIES_S:g} s after they were canceled")

    def close(self, patience_s: float) -> None:
        """Give jobs `patience_s` seconds to end, cancel the others, and end the threads.

        Raises:
            TimeoutError: see `drain`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._running or any(self._waiting.values())), patience_s)
            self._is_over = True
            self._changed.notify_all()
        self.drain(0.0)
        for thread in self._threads:
            thread.join(1.0)

    def _serve(self, is_load: bool) -> None:  # noqa: FBT001 - of a thread
        while not self._is_over:
            self._run_next(is_load=is_load)

    def _run_next(self, *, is_load: bool) -> None:
        """Run a job, for which it waits. No variable of the thread keeps a job, whose memory vLLM unmaps at the end."""
        waiting = self._waiting[is_load]
        with self._changed:
            if not self._changed.wait_for(lambda: waiting or self._is_over, IDLE_WAIT_S) or not waiting:
                return
            job = waiting.popleft()
            self._running += 1
        outcomes: Sequence[Outcome] = ()
        began_s = time.monotonic()
        try:
            assert self._store is not None
            call = self._store.get_into if is_load else self._store.put_from
            outcomes = call(job.items, job.until_s - began_s)
        except Exception as error:  # noqa: BLE001 - the scheduler needs a result of every job
            self._failed(error)
        with self._changed:
            self._running -= 1
            self._done.append(Done(job, outcomes, time.monotonic() - began_s))
            self._changed.notify_all()
