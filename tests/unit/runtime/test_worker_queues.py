"""A worker queue: each job is run or returned once, in order, within its bound, whatever a job raises."""

import threading
import time

import pytest

from kvtier.runtime.executor import Job
from kvtier.runtime.worker_queues import Scratch, WorkerQueue
from kvtier.types import ChunkKey, Drop, Probe

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


def test_urgent_jobs_go_first_then_the_oldest() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.add([_job(0)], bound=BOUND)
    worker.wait_begun()
    for number, is_urgent in ((1, False), (2, True), (3, False), (4, True)):
        assert queue.add([_job(number)], bound=BOUND, is_urgent=is_urgent)
    worker.gate.release(5)
    for _ in range(4):
        worker.wait_begun()
    assert queue.close() == []
    assert queue.join(_until_s())
    assert worker.ran == [0, 2, 4, 1, 3]


def test_no_more_than_the_bound_may_wait() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.add([_job(0)], bound=2)
    worker.wait_begun()
    assert [queue.add([_job(number)], bound=2, is_urgent=number == 1) for number in (1, 2, 3)] == [1, 1, 0]
    assert queue.is_open
    worker.gate.release(3)
    queue.close()
    assert queue.join(_until_s())


def test_what_is_withdrawn_is_not_run() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.withdraw([0]) == []
    running, drop, *waiting = [_job(0), Job(Drop("tier", ChunkKey(b""), 0), 0.0), *(_job(n) for n in (1, 2, 3))]
    assert queue.add([running], bound=BOUND)
    worker.wait_begun()
    for job in (*waiting, drop):
        assert queue.add([job], bound=BOUND)
    assert queue.withdraw({0, 1, 3}) == [waiting[0], waiting[2]]
    assert queue.close() == [waiting[1], drop]
    worker.gate.release()
    assert queue.join(_until_s())
    assert worker.ran == [0]


def test_what_is_late_leaves_the_front_of_the_queue() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.expire(0.0) == []
    assert queue.add([_job(0)], bound=BOUND)
    worker.wait_begun()
    jobs = [_job(number, deadline_s) for number, deadline_s in ((1, 1.0), (2, 2.0), (3, 3.0))]
    urgent = _job(4, 1.5)
    for job in jobs:
        assert queue.add([job], bound=BOUND)
    assert queue.add([urgent], bound=BOUND, is_urgent=True)
    assert queue.expire(0.5) == []
    assert set(queue.expire(2.0)) == {jobs[0], jobs[1], urgent}
    assert queue.close() == [jobs[2]]
    worker.gate.release()
    assert queue.join(_until_s())


def test_a_closed_lane_takes_nothing() -> None:
    worker = _Worker()
    queue = worker.queue(threads=3)
    assert queue.close() == []
    assert not queue.add([_job(0)], bound=BOUND)
    assert not queue.is_open
    assert queue.join(_until_s())


def test_join_does_not_wait_beyond_its_time() -> None:
    worker = _Worker()
    queue = worker.queue()
    assert queue.add([_job(0)], bound=BOUND)
    worker.wait_begun()
    queue.close()
    assert not queue.join(time.monotonic() + 0.01)
    assert not queue.join(time.monotonic() - 1.0)
    worker.gate.release()
    assert queue.join(_until_s())


def test_a_thread_goes_on_after_an_exception_of_any_kind() -> None:
    worker = _Worker()
    queue = worker.queue()
    threads = set(threading.enumerate())
    worker.gate.release(4)
    for number in (-1, -2, -3, 4):
        assert queue.add([_job(number)], bound=BOUND)
    for _ in range(4):
        worker.wait_begun()
    assert threads <= set(threading.enumerate())
    assert queue.close() == []
    assert queue.join(_until_s())
    assert worker.ran == [-1, -2, -3, 4]


def test_a_failed_start_raises_and_started_threads_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    queue = WorkerQueue("test", threads=3, run=_Worker().run)
    with pytest.raises(RuntimeError, match="can't start"):
        queue.start()
    queue.close()
    assert queue.join(_until_s())
    assert not any(thread.is_alive() for thread in started)


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
