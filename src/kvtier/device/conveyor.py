"""Layers in the order in which they are needed, over all chunks that are here.

A chunk is scattered by one thread, and layer by layer; but the engine needs the first layer of every chunk before the
second of any. So the threads put their chunks together: whoever finds nobody at work moves the lowest layer that is
left, of all chunks at once, and the others wait until theirs are through. Nothing waits for a chunk that is not here
yet: the order is kept among those that are, and the device is never idle while there is something to move.
"""

import threading
from collections.abc import Callable, Sequence

_WAIT_S = 60.0
"""Nobody waits longer without looking again, so that not even a lost wake-up could stall anything."""


class Job:
    """One chunk on its way.

    Args:
        kind: jobs of one kind have the same steps, and move together.
        ranks: for each step, the model's layer that it brings first; rising.
    """

    def __init__(self, kind: object, ranks: Sequence[int]) -> None:
        self.kind = kind
        self.ranks = ranks
        self.step = 0
        """The next one."""
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.error is not None or self.step == len(self.ranks)


Move = Callable[[list[Job]], None]
"""Moves the next step of jobs that are of one kind, and at the same step. An error is that of all of them."""


class Conveyor:
    """Moves the steps of all jobs that are here, lowest rank first. Thread-safe.

    Args:
        move: moves.
        at_once: jobs that one call moves at most.
        workers: calls at the same time.
    """

    def __init__(self, move: Move, *, at_once: int, workers: int = 1) -> None:
        self._move = move
        self._at_once = at_once
        self._idle = workers
        self._waiting: list[Job] = []
        self._news = threading.Condition()

    def carry(self, job: Job) -> None:
        """Move all steps of `job`, and those of others on the way; returns when it is through.

        Raises what moving it has raised.
        """
        with self._news:
            self._waiting.append(job)
            while not job.is_over:
                if not self._idle or not self._waiting:
                    self._news.wait(_WAIT_S)
                    continue
                jobs = self._lowest()
                self._idle -= 1
                self._news.release()
                try:
                    self._moved(jobs)
                finally:
                    self._news.acquire()
                    self._idle += 1
                    self._waiting += [one for one in jobs if not one.is_over]
                    self._news.notify_all()
        if job.error is not None:
            raise job.error

    def _lowest(self) -> list[Job]:
        """Take out the jobs that are next."""
        first = min(self._waiting, key=lambda job: job.ranks[job.step])
        alike = [job for job in self._waiting if (job.kind, job.step) == (first.kind, first.step)][: self._at_once]
        self._waiting = [job for job in self._waiting if job not in alike]
        return alike

    def _moved(self, jobs: list[Job]) -> None:
        try:
            self._move(jobs)
        except Exception as error:  # noqa: BLE001 - each job's own thread raises it
            for job in jobs:
                job.error = error
        except BaseException as error:
            for job in jobs:
                job.error = RuntimeError(f"{type(error).__name__} in the thread that moved it")
            raise
        else:
            for job in jobs:
                job.step += 1
