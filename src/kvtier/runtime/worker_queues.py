"""A worker queue: a bounded queue of jobs and the threads that do them.

Each job leaves the queue once, under the lock. The thread that removes it completes it: a worker thread, or the caller
of `withdraw`, `expire` or `close`. Threads are daemons and every join has a deadline. So a thread that hangs in a tier
delays neither `close` nor the exit of the process. Another thread does the jobs behind it. A thread ends only after
`close`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from kvtier.runtime.arena import page_aligned
from kvtier.runtime.executor import Job
from kvtier.types import Drop, Tell

IDLE_WAIT_S = 60.0
"""An idle thread checks the queue at this interval, so that a lost wake-up cannot stall it."""

STUCK_S = 30.0
"""A queue is stuck when all of its threads have been in their current jobs for this long."""

STALL_SHARE = 0.2
"""If all threads stay busy for about this share of the time that a waiting job has until its deadline, the queue starts
another thread."""

SHARES_MOST = 4
"""At most this many threads share the jobs of one batch. A thread switch costs more than a small job."""


logger = logging.getLogger(__name__)


class Scratch:
    """One thread's page-aligned memory, which grows on demand."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def view(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` writable bytes with undefined contents."""
        if len(self._view) < size_bytes:
            self._view = page_aligned(size_bytes).data
        return self._view[:size_bytes]


class WorkerQueue:
    """Jobs in order of arrival, urgent jobs first, and the threads that do them.

    Args:
        name: part of the threads' names.
        threads: number of threads.
        run: does and completes a batch of jobs. It completes them even if it raises.
        clock: returns seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        run: Callable[[list[Job], Scratch], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._run = run
        self.jobs: deque[Job] = deque()
        """Waiting jobs. Changed only under the lock."""
        self.urgent_jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Each entry wakes one idle thread. There is at most one entry per idle thread, plus one per thread once the
        queue is closed."""
        self.is_open = True
        """Whether the queue accepts jobs."""
        self._wanted = threads
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._clock = clock
        self._began_s: dict[int, float] = {}
        """Time at which each busy thread started its current jobs, by thread id."""

    def start(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        for _ in range(self._wanted):
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"kvtier {self.name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def relieve(self) -> None:
        """Start another thread if jobs wait and no thread takes one, up to twice the number of threads.

        Otherwise a few reads that hang, one per thread, would block all others.
        """
        with self._lock:
            first = next(iter(self.urgent_jobs or self.jobs), None)
            if first is None or not self.is_open or not len(self._threads) == len(self._began_s) < 2 * self._wanted:
                return
            patience_s = STALL_SHARE * min(first.deadline_s - first.submitted_s, STUCK_S)
            if max(self._began_s.values()) + patience_s <= self._clock():
                with suppress(RuntimeError):  # the system provides no more threads
                    self._start_thread()

    @property
    def is_stuck(self) -> bool:
        """Whether all threads have been in their current jobs for `STUCK_S`. This takes no lock."""
        began_s = list(self._began_s.values())
        return 0 < len(self._threads) <= len(began_s) and max(began_s) <= self._clock() - STUCK_S

    def add(self, jobs: Sequence[Job], *, bound: int, is_urgent: bool = False) -> int:
        """Queue `jobs` until `bound` jobs wait, and return how many were queued. The caller completes the others.

        A closed queue accepts no jobs.
        """
        with self._lock:
            if not self.is_open:
                return 0
            room = max(0, bound - len(self.urgent_jobs) - len(self.jobs))
            taken = jobs if len(jobs) <= room else jobs[:room]
            (self.urgent_jobs if is_urgent else self.jobs).extend(taken)
            if taken and self._bell.qsize() < self._idle:
                self._bell.put(None)
            return len(taken)

    def withdraw(self, ids: Container[int]) -> list[Job]:
        """Remove the waiting jobs with these ids. The caller completes them."""
        if not (self.urgent_jobs or self.jobs):
            return []
        with self._lock:
            return self._take_out(lambda job: not isinstance(job.command, Drop | Tell) and job.command.id in ids)

    def expire(self, now_s: float) -> list[Job]:
        """Remove the oldest jobs that are past their deadline. The caller completes them.

        Otherwise jobs behind threads that hang would wait as long as those threads hang.
        """
        late: list[Job] = []
        if self.urgent_jobs or self.jobs:
            with self._lock:
                for queue in (self.urgent_jobs, self.jobs):
                    while queue and queue[0].deadline_s <= now_s:
                        late.append(queue.popleft())
        return late

    def close(self) -> list[Job]:
        """Accept no more jobs and stop the threads. Return the waiting jobs, which the caller completes."""
        with self._lock:
            self.is_open = False
            for _ in self._threads:
                self._bell.put(None)
            return self._take_out(lambda _: True)

    def join(self, until_s: float) -> bool:
        """Wait until `until_s` (`time.monotonic`) for the threads to end. Return whether all have ended."""
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _take_out(self, is_wanted: Callable[[Job], bool]) -> list[Job]:
        taken: list[Job] = []
        for queue in (self.urgent_jobs, self.jobs):
            found = [job for job in queue if is_wanted(job)]
            for job in found:
                queue.remove(job)
            taken += found
        return taken

    def _serve(self) -> None:
        scratch = Scratch()
        while True:
            try:
                while jobs := self._next():
                    self._run(jobs, scratch)
            except BaseException:  # the thread continues, because other jobs wait for it
                logger.exception("internal error in a thread of the %s queue", self.name)
            else:
                return

    def _next(self) -> list[Job]:
        """Wait for the next batch. Return an empty list if the queue is closed."""
        was_idle = False
        while True:
            with self._lock:
                self._idle -= was_idle
                self._began_s.pop(threading.get_ident(), None)
                if not self.is_open:
                    return []
                if queue := self.urgent_jobs or self.jobs:
                    first = queue.popleft()
                    jobs = [first]
                    self._began_s[threading.get_ident()] = self._clock()
                    if first.together > 1 and queue:
                        # Share the waiting jobs evenly with idle threads, which would start them sooner.
                        share = max(-(-(len(queue) + 1) // (self._idle + 1)), -(-first.together // SHARES_MOST))
                        most = min(first.together, share)
                        while len(jobs) < most and queue and len(jobs) < queue[0].together:
                            jobs.append(queue.popleft())
                    if (self.urgent_jobs or self.jobs) and self._bell.qsize() < self._idle:
                        self._bell.put(None)  # `add` wakes one thread for all of its jobs
                    return jobs
                self._idle += 1
                was_idle = True
            try:
                self._bell.get(timeout=IDLE_WAIT_S)
            except Empty:
                continue
