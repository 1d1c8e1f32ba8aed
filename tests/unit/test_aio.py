"""Many reads at once: each is answered for itself, and memory is given back only when the kernel is done with it."""

import ctypes
import errno
import os
import threading

import pytest

from kvtier.tier import aio
from kvtier.tier.aio import DEPTH, NOT_READ, ReadQueue, ReadRun, begin_runs
from kvtier.tier.direct import aligned_buffer

BLOCK = 4096
BLOCKS = 40


@pytest.fixture
def queue():
    try:
        queue = ReadQueue()
    except OSError as error:
        pytest.skip(f"no asynchronous I/O here: {error}")
    yield queue
    queue.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"".join(content(number) for number in range(BLOCKS)))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def content(number):
    return bytes([number]) * (BLOCK - 1) + b"\n"


def read_runs(runs):
    wait = begin_runs(runs)
    assert wait is not None
    return wait()


def runs_of(descriptor, numbers, blocks=1):
    return [ReadRun(descriptor, [aligned_buffer(BLOCK) for _ in range(blocks)], number * BLOCK) for number in numbers]


def check(runs, numbers):
    for run, number in zip(runs, numbers, strict=True):
        assert [bytes(view) for view in run.views] == [content(number + more) for more in range(len(run.views))]


@pytest.mark.parametrize("count", [1, 7, DEPTH, 2 * DEPTH + 3])
def test_each_gets_its_own_bytes(queue, file, count):
    numbers = [(17 * at) % BLOCKS for at in range(count)]
    runs = runs_of(file, numbers)
    assert queue.read(runs) == [BLOCK] * count
    check(runs, numbers)


def test_neighbours_fill_one_view_after_the_other(queue, file):
    numbers = [5, 0, 20]
    runs = runs_of(file, numbers, blocks=3)
    assert queue.read(runs) == [3 * BLOCK] * 3
    check(runs, numbers)


def test_one_that_fails_costs_the_others_nothing(queue, file):
    runs = runs_of(file, range(6))
    cut = ReadRun(file, [aligned_buffer(2 * BLOCK)], (BLOCKS - 1) * BLOCK)
    beyond = ReadRun(file, [aligned_buffer(BLOCK)], BLOCKS * BLOCK)
    write_only = os.open(os.devnull, os.O_WRONLY)
    refused = ReadRun(write_only, [aligned_buffer(BLOCK)], 0)
    answers = queue.read([*runs[:3], cut, beyond, *runs[3:], refused])
    os.close(write_only)
    assert answers == [BLOCK] * 3 + [BLOCK, 0] + [BLOCK] * 3 + [NOT_READ]
    check(runs, range(6))


def test_behind_one_that_the_kernel_does_not_take_nothing_is_read(queue, file):
    """Whoever asks for each alone then learns which one it was."""
    runs = runs_of(file, range(3))
    answers = queue.read([runs[0], ReadRun(1 << 20, [aligned_buffer(BLOCK)], 0), *runs[1:]])
    assert answers == [BLOCK, NOT_READ, NOT_READ, NOT_READ]
    assert queue.read(runs) == [BLOCK] * 3, "it goes on"


def test_an_interruption_waits_for_the_kernel(queue, file, monkeypatch):
    """Nobody may have the memory back before: what is closed here waits for what is under way."""
    calls = []
    real = queue._call

    def call(number, *given):
        calls.append(number)
        if number == queue._get_events and len(calls) == 2:
            raise KeyboardInterrupt
        return real(number, *given)

    monkeypatch.setattr(queue, "_call", call)
    runs = runs_of(file, range(3))
    with pytest.raises(KeyboardInterrupt):
        queue.read(runs)
    assert calls == [queue._submit, queue._get_events, queue._destroy]
    assert not queue.is_open
    check(runs, range(3))
    with pytest.raises(OSError, match="closed"):
        queue.read(runs)


def test_a_signal_does_not_end_the_wait_but_another_error_does(queue, file, monkeypatch):
    real, told = queue._call, [errno.EINTR, errno.EINTR]

    def call(number, *given):
        if number == queue._get_events and told:
            ctypes.set_errno(told.pop(0))
            return -1
        return real(number, *given)

    monkeypatch.setattr(queue, "_call", call)
    assert queue.read(runs_of(file, range(3))) == [BLOCK] * 3
    told.append(errno.EFAULT)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        queue.read(runs_of(file, range(3)))
    assert not queue.is_open


def test_each_thread_has_a_queue_of_its_own_which_goes_with_it(queue, file, monkeypatch):
    monkeypatch.setattr(aio, "_local", threading.local())
    closed = []
    real = ReadQueue.close
    monkeypatch.setattr(ReadQueue, "close", lambda it: (closed.append(it._context), real(it)))
    queues = []

    def read():
        for _ in range(2):
            runs = runs_of(file, range(5))
            assert read_runs(runs) == [BLOCK] * 5
            check(runs, range(5))
        queues.append(aio._local.queue._context)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(queues) == 3
    assert set(queues) <= set(closed)


def test_a_system_without_is_asked_once(file, monkeypatch):
    monkeypatch.setattr(aio, "_local", threading.local())
    asked = []
    monkeypatch.setattr(aio.platform, "machine", lambda: asked.append(1) or "abacus")
    assert begin_runs(runs_of(file, range(3))) is None
    assert begin_runs(runs_of(file, range(3))) is None
    assert len(asked) == 1


def test_a_queue_that_broke_is_replaced(queue, file, monkeypatch):
    monkeypatch.setattr(aio, "_local", threading.local())
    assert read_runs(runs_of(file, range(3))) == [BLOCK] * 3
    aio._local.queue.close()
    assert read_runs(runs_of(file, range(3))) == [BLOCK] * 3
