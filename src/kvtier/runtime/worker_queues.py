"""A queue: a bounded queue and the threads that serve it. What one queue waits for, no other queue does.

Each job leaves the queue exactly once, under the lock, and whoever takes it out answers it: a thread that begins it,
alone or with others that gain by going together, or the caller of `withdraw`, `expire` or `close`. Threads are daemons,
and no join is without a deadline, so a thread that hangs in a tier holds up neither `close` nor the end of the process.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Sequence
from enum import Enum

from kvtier.runtime.arena import page_aligned
from kvtier.runtime.jobs import Job
from kvtier.types import Drop, Tell

IDLE_WAIT_S = 60.0
"""A thread without work looks again after this long, so that not even a lost wake-up could stall a queue for ever."""

STUCK_S = 30.0
"""A queue is stuck when each of its threads has been at the same jobs for this long."""

SHARES_MOST = 4
"""Jobs that one thread may take at once are shared by so many at most: a switch of threads costs more than a job."""


_END = object()


class QueueState(Enum):
    """Whether a queue takes jobs."""

    OPEN = "open"
    CLOSED = "closed"
    DEAD = "without threads"


class Scratch:
    """Page-aligned memory of one thread: made when it is first needed, and again only when it must be larger."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def view(self, size_bytes: int) -> memoryview:
        """`size_bytes` writable bytes, whatever they held before."""
        if len(self._view) < size_bytes:
            self._view = page_aligned(size_bytes).data
        return self._view[:size_bytes]


class WorkerQueue:
    """One queue in front of some threads; urgent jobs go first, otherwise the oldest.

    Args:
        name: of its threads, for people who look at a hung process.
        threads: how many.
        run: does jobs that one thread takes at once, and answers them. When it raises, it has answered; its thread ends
            and another takes its place. It may yield twice: when it has nothing to do but wait for a device, and when
            it need not wait any more. Other jobs may begin then, before it goes on.
        orphaned: answers the jobs that wait when the last thread has ended and no other can be started.
        start: starts a thread.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        run: Callable[[list[Job], Scratch], Generator[None]],
        orphaned: Callable[[list[Job]], None],
        start: Callable[[threading.Thread], None] = threading.Thread.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._run = run
        self._orphaned = orphaned
        self._start = start
        self._urgent: deque[Job] = deque()
        self._usual: deque[Job] = deque()
        self._ready = threading.Condition(threading.Lock())
        self._state = QueueState.OPEN
        self._wanted = threads
        self._serving = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []  # also those that are about to end
        self._clock = clock
        self._began_s: dict[int, float] = {}
        """When each thread that is at work began its present jobs, by the thread's identity."""

    def start(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        for _ in range(self._wanted):
            with self._ready:
                self._start_thread()

    @property
    def state(self) -> QueueState:
        """Whether it takes jobs."""
        return self._state

    @property
    def is_stuck(self) -> bool:
        """Whether each thread has been at the same jobs for `STUCK_S`. Takes no lock."""
        began_s = list(self._began_s.values())
        return 0 < self._serving <= len(began_s) and max(began_s) <= self._clock() - STUCK_S

    def add(self, jobs: Sequence[Job], *, bound: int, is_urgent: bool = False) -> int:
        """Queue the first of `jobs`, as many as there is room for; how many. The rest is the caller's to answer.

        There is room for fewer than all when `bound` jobs wait then, and for none when the queue is not open.
        """
        with self._ready:
            if self._state is not QueueState.OPEN:
                return 0
            room = max(0, bound - len(self._urgent) - len(self._usual))
            taken = jobs if len(jobs) <= room else jobs[:room]
            (self._urgent if is_urgent else self._usual).extend(taken)
            if taken:
                self._ready.notify()
            return len(taken)

    def withdraw(self, ids: Container[int]) -> list[Job]:
        """Take out the waiting jobs with these ids; they are the caller's to answer."""
        if not (self._urgent or self._usual):
            return []
        with self._ready:
            return self._take_out(lambda job: not isinstance(job.command, Drop | Tell) and job.command.id in ids)

    def expire(self, now_s: float) -> list[Job]:
        """Take out the oldest jobs while they are too late to begin; they are the caller's to answer.

        Without this a queue whose threads all hang would keep what came after for as long as they do.
        """
        late: list[Job] = []
        if self._urgent or self._usual:
            with self._ready:
                for queue in (self._urgent, self._usual):
                    while queue and queue[0].deadline_s <= now_s:
                        late.append(queue.popleft())
        return late

    def close(self) -> list[Job]:
        """Take no more jobs and tell the threads to end; the jobs that had not begun are the caller's to answer."""
        with self._ready:
            self._state = QueueState.CLOSED
            self._ready.notify_all()
            return self._take_out(lambda _: True)

    def join(self, until_s: float) -> bool:
        """Wait for the threads to end, until `until_s` on the clock of `time.monotonic`; whether they did."""
        with self._ready:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _take_out(self, is_wanted: Callable[[Job], bool]) -> list[Job]:
        taken: list[Job] = []
        for queue in (self._urgent, self._usual):
            found = [job for job in queue if is_wanted(job)]
            for job in found:
                queue.remove(job)
            taken += found
        return taken

    def _start_thread(self) -> None:
        # Under the lock, so that the thread is among the others before it can end.
        thread = threading.Thread(target=self._serve, name=f"kvtier {self.name}", daemon=True)
        self._start(thread)
        self._serving += 1
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _serve(self) -> None:
        scratch = Scratch()
        try:
            while jobs := self._next():
                under_way = self._begin(jobs, scratch)
                while under_way is not None:
                    under_way = self._go_on(under_way, scratch)
        except BaseException:
            self._replace_thread()
            raise

    def _begin(self, jobs: list[Job], scratch: Scratch) -> Generator[None] | None:
        """Run `jobs`; what is left to do when a device is busy with them, or None when that is all."""
        steps = self._run(jobs, scratch)
        return steps if next(steps, _END) is None else None

    def _go_on(self, steps: Generator[None], scratch: Scratch) -> Generator[None] | None:
        """Wait for the device, give it the next that waits, and only then do the rest; what is left of the next."""
        if next(steps, _END) is _END:
            return None
        following = None
        try:
            if jobs := self._next_several():
                following = self._begin(jobs, scratch)
        finally:
            try:
                next(steps, None)
            except BaseException:
                if following is not None:
                    following.close()
                raise
        return following

    def _next_several(self) -> list[Job]:
        """Jobs that may go together, if some wait."""
        with self._ready:
            queue = self._urgent or self._usual
            is_worth = (
                self._state is QueueState.OPEN and len(queue) > 1 and min(queue[0].together, queue[1].together) > 1
            )
            return self._take_from(queue) if is_worth else []

    def _next(self) -> list[Job]:
        """The next job, with those behind it that may go with it; none when the queue is closed."""
        with self._ready:
            self._began_s.pop(threading.get_ident(), None)
            while self._state is QueueState.OPEN:
                if queue := self._urgent or self._usual:
                    return self._take_from(queue)
                self._idle += 1
                try:
                    self._ready.wait(IDLE_WAIT_S)
                finally:
                    self._idle -= 1
            return []

    def _take_from(self, queue: deque[Job]) -> list[Job]:
        first = queue.popleft()
        jobs = [first]
        self._began_s[threading.get_ident()] = self._clock()
        if first.together > 1 and queue:
            # An even share where others have nothing to do: what one thread takes no other begins earlier.
            share = max(-(-(len(queue) + 1) // (self._idle + 1)), -(-first.together // SHARES_MOST))
            most = min(first.together, share)
            while len(jobs) < most and queue and len(jobs) < queue[0].together:
                jobs.append(queue.popleft())
        if self._urgent or self._usual:
            self._ready.notify()  # one thread was woken, for however many jobs
        return jobs

    def _replace_thread(self) -> None:
        """This thread ends; without another the jobs that wait would never be answered."""
        with self._ready:
            self._serving -= 1
            self._began_s.pop(threading.get_ident(), None)
            if self._state is not QueueState.OPEN:
                return
            try:
                self._start_thread()
            except RuntimeError:
                if self._serving:
                    return
                self._state = QueueState.DEAD
                orphans = self._take_out(lambda _: True)
            else:
                return
        self._orphaned(orphans)
