"""A device simulated in threads: streams over host memory that tests can delay.

A fast device hides missing dependencies between streams, such as a copy to a stage that is still in use. Here each
stream is a thread: pause one, and all work that is not ordered behind it runs first.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.device.copy_descriptors import CopyDescriptors
from kvtier.device.streams import BusCopy, Event, Stream

_WAIT_S_MAX = 60.0
"""Longest wait of a stream for an event."""
_IDLE_S_MAX = 3600.0
_JOBS_MAX = 1 << 16
_POLL_S = 50e-6


class ThreadEvent:
    """An event of a `ThreadStream`."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        """Whether its stream has reached it."""
        return self.reached.is_set()

    def hold(self) -> None:
        """Block until it is reached, because a thread of a CPU has no stream.

        Raises:
            TimeoutError: it never came.
        """
        if not self.reached.wait(_WAIT_S_MAX):
            raise TimeoutError(f"no event within {_WAIT_S_MAX:g} s")


class ThreadStream:
    """A stream of a `ThreadStreams`; a daemon thread does its work, in order.

    Args:
        pause_s: how long to sleep before each piece of work.
    """

    def __init__(self, pause_s: Callable[[], float]) -> None:
        self._pause_s = pause_s
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_JOBS_MAX)
        self.may_run = threading.Event()
        self.may_run.set()
        self.moved_bytes = 0
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="kvtier twin of a stream", daemon=True).start()

    def to_device(self, copies: Sequence[BusCopy]) -> None:
        """See `Stream`."""
        self._cross([(copy.address, _address(copy.payload), copy.payload) for copy in copies])

    def to_host(self, copies: Sequence[BusCopy]) -> None:
        """See `Stream`."""
        self._cross([(_address(copy.payload), copy.address, copy.payload) for copy in copies])

    def _cross(self, moves: list[tuple[int, int, memoryview]]) -> None:
        for target, source, payload in moves:
            self._add(lambda target=target, source=source, payload=payload: self._move(target, source, payload.nbytes))

    def copy(self, descriptors: CopyDescriptors) -> None:
        """See `Stream`."""
        rows: list[list[int]] = cast("Any", descriptors).tolist()
        for source, target, size in rows:
            self._add(lambda source=source, target=target, size=size: self._move(target, source, size))

    def wait(self, event: Event) -> None:
        """See `Stream`."""
        self._add(lambda: _until(event.query))

    def record(self) -> Event:
        """See `Stream`."""
        event = ThreadEvent()
        self._add(event.reached.set)
        return event

    def settle(self) -> None:
        """See `Stream`."""
        self.record().hold()

    def close(self) -> None:
        """End the thread after its queued work."""
        self.may_run.set()
        self._jobs.put(None, timeout=_WAIT_S_MAX)

    def _add(self, job: Callable[[], None]) -> None:
        self._jobs.put(job, timeout=_WAIT_S_MAX)

    def _move(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)
        self.moved_bytes += size

    def _run(self) -> None:
        while (job := self._jobs.get(timeout=_IDLE_S_MAX)) is not None:
            self.may_run.wait(_WAIT_S_MAX)
            pause_s = self._pause_s()
            if pause_s:
                time.sleep(pause_s)
            try:
                job()
            except BaseException as error:
                self.error = error
                raise


class ThreadStreams:
    """A device of `ThreadStream`s.

    Args:
        pause_s: how long a stream sleeps before each piece of work; called for each.
    """

    def __init__(self, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        self._pause_s = pause_s
        self.streams: list[ThreadStream] = []
        self.engine = ThreadStream(lambda: 0.0)
        """The engine's own stream."""
        self._stages: list[npt.NDArray[np.uint8]] = []

    def close(self) -> None:
        """End all threads."""
        for stream in (*self.streams, self.engine):
            stream.close()

    def stream(self) -> Stream:
        """See `Streams`."""
        self.streams.append(ThreadStream(self._pause_s))
        return self.streams[-1]

    def stage(self, size_bytes: int, stream: Stream) -> int:
        """See `Streams`. It is filled with 0xEE."""
        self._stages.append(np.full(size_bytes + 256, 0xEE, np.uint8))
        return -(-int(self._stages[-1].ctypes.data) // 256) * 256

    def now(self) -> Event:
        """See `Streams`."""
        return self.engine.record()


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


def _until(is_it: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _WAIT_S_MAX
    while not is_it():
        if time.monotonic() > until_s:
            raise TimeoutError(f"no event within {_WAIT_S_MAX:g} s")
        time.sleep(_POLL_S)
