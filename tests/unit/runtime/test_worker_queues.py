"""A worker queue: each job is run or returned once, in order, within its bound, whatever a job raises."""

import threading
import time

from kvtier.runtime.executor import Job
from kvtier.runtime.worker_queues import Scratch, WorkerQueue
from kvtier.types import Drop, Probe

WAIT_S = 20.0
BOUND = 100


def _job(number: int, deadline_s: float = float("inf"), together: int = 1) -> Job:
    return Job(Probe(number, "tier", (), deadline_s), 0.0, together)


class _Worker:
    """Runs jobs one after the other, each only when `gate` lets it; negative ids raise."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.ran: list[int] = []

    def run(self, jobs: list[Job], scratch: Scratch) -> None:
        (job,) = jobs
        self.begun.release()
        assert self.gate.acquire(timeout=WAIT_S)
        assert not isinstance(job.command, Drop)
        self.ran.append(job.command.id)
        if job.command.id < 0:
            raise SystemExit

    def queue(self, threads: int = 1) -> WorkerQueue:
        queue = WorkerQueue("test", threads=threads, run=self.run)
        queue.start()
        return queue

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)


def _until_s() -> float:
    return time.monotonic() + WAIT_S


def test_scratch_memory_is_kept_until_more_is_needed() -> None:
    scratch = Scratch()
    small = scratch.view(5000)
    small[:] = b"\x01" * 5000
    assert scratch.view(4000) == b"\x01" * 4000
    large = scratch.view(20_000)
    assert len(large) == 20_000
    assert not large.readonly
    assert len(scratch.view(0)) == 0


def test_what_may_go_together_is_taken_together_but_not_more_than_a_share() -> None:
    """A job's id is its largest batch. No other thread is idle, so the share is all waiting jobs."""
    taken: list[list[int]] = []
    begun, gate = threading.Semaphore(0), threading.Semaphore(0)

    def run(jobs: list[Job], _scratch: Scratch) -> None:
        taken.append([job.command.id for job in jobs if isinstance(job.command, Probe)])
        begun.release()
        assert gate.acquire(timeout=WAIT_S)

    queue = WorkerQueue("test", threads=1, run=run)
    queue.start()
    ids = [1, 3, 3, 3, 3, 1, 2, 4, 4, 4]
    for number in ids:
        assert queue.add([_job(number, together=number)], bound=BOUND)
        if len(taken) == 0:
            assert begun.acquire(timeout=WAIT_S)
    gate.release(len(ids))
    until_s = _until_s()
    while sum(map(len, taken)) < len(ids):
        assert time.monotonic() < until_s
        assert begun.acquire(timeout=WAIT_S)
    assert queue.close() == []
    assert queue.join(_until_s())
    assert taken == [[1], [3, 3, 3], [3], [1], [2, 4], [4, 4]]


def test_one_that_begins_wakes_another_for_what_is_left() -> None:
    """Three come in one go. Each thread hangs in its own, so that none but another could begin the next."""
    worker = _Worker()
    queue = worker.queue(threads=3)
    assert queue.add([_job(0), _job(1), _job(2)], bound=BOUND) == 3
    for _ in range(3):
        worker.wait_begun()
    worker.gate.release(3)
    assert queue.close() == []
    assert queue.join(_until_s())


def test_of_those_that_come_together_as_many_wait_as_there_is_room_for() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.add([_job(0)], bound=2) == 1
    worker.wait_begun()
    assert queue.add([_job(1)], bound=2, is_urgent=True) == 1
    last = _job(2)
    assert queue.add([last, _job(3)], bound=2) == 1
    assert queue.close()[1:] == [last]
    worker.gate.release()
    assert queue.join(_until_s())
