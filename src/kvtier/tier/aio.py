"""Batched reads by one thread: Linux asynchronous I/O (`io_submit`), by plain system calls.

A batch of small scattered reads takes two system calls instead of one each, and the device gets all of them at once.
After each call the thread must reacquire the interpreter lock, which costs more than a small read. io_uring would do
the same, but most containers forbid it. Direct I/O only: `io_submit` blocks for buffered reads.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

DEPTH = 64
"""Most reads in flight per thread."""

NOT_READ = -errno.EAGAIN
"""Result of a read that the kernel did not accept."""

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_IOCB = struct.Struct("<QIIHhIQQqQII")
_IOCB_BYTES = 64
_PREAD, _PREADV = 0, 7
_EVENT = struct.Struct("<QQqq")
_IOVEC = struct.Struct("<QQ")

_local = threading.local()


def _forget_in_child() -> None:
    """A context belongs to its process; in a forked child its number may be reused."""
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class ReadRun(NamedTuple):
    """A contiguous read: file, offset, and the buffers to fill in order."""

    descriptor: int
    views: Sequence[memoryview]
    offset: int


class _Submitted(NamedTuple):
    """Submitted reads."""

    runs: Sequence[ReadRun]
    kept: Sequence[object]
    """Buffers that must live until the reads end."""
    accepted: int


class ReadQueue:
    """The reads of one thread, one batch at a time. `begin_runs` keeps one per thread.

    Raises:
        OSError: the system offers none.
    """

    def __init__(self) -> None:
        self._context = 0
        self._in_flight: _Submitted | None = None
        if sys.platform != "linux" or platform.machine() not in _NUMBERS or sys.maxsize < 1 << 32:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._get_events, self._submit = _NUMBERS[platform.machine()]
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_long, *[ctypes.c_long] * 6, use_errno=True
        )  # releases the interpreter lock
        self._call = prototype(("syscall", ctypes.CDLL(None)))
        self._iocbs = bytearray(_IOCB_BYTES * DEPTH)
        self._event_buffer = bytearray(_EVENT.size * DEPTH)
        start = _address(memoryview(self._iocbs))
        self._pointers = (ctypes.c_uint64 * DEPTH)(*(start + _IOCB_BYTES * place for place in range(DEPTH)))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._events_at = _address(memoryview(self._event_buffer))
        context = ctypes.c_ulong(0)
        if self._call(self._setup, DEPTH, ctypes.addressof(context), 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._context = context.value

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the queue is open."""
        return self._context != 0

    def close(self) -> None:
        """Wait for reads in flight, whose buffers are in use until then, and release the context. Idempotent."""
        context, self._context = self._context, 0
        if context:
            self._call(self._destroy, context, 0, 0, 0, 0)
        self._in_flight = None

    @property
    def is_busy(self) -> bool:
        """Whether reads are in flight."""
        return self._in_flight is not None

    def read(self, runs: Sequence[ReadRun]) -> list[int]:
        """Bytes read per run, fewer at the end of the file; a negative number is -errno.

        Raises:
            OSError: the queue is closed, busy or failed; nothing is in flight any more.
        """
        self.begin(runs)
        return self.end()

    def begin(self, runs: Sequence[ReadRun]) -> None:
        """Submit the first `DEPTH` of `runs`; all buffers are in use until `end`.

        Raises:
            OSError: as `read`.
        """
        if not self._context or self._in_flight is not None:
            raise OSError(errno.EBADF, "the queue is busy" if self._context else "the queue is closed")
        self._in_flight = self._submit_from(runs, 0)

    def end(self) -> list[int]:
        """Wait for the reads of `begin`, then do the rest. Returns as `read`.

        Raises:
            OSError: as `read`.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            raise OSError(errno.EBADF, "nothing is in flight")
        runs = in_flight.runs
        answers = [NOT_READ] * len(runs)
        try:
            self._collect(in_flight.accepted, answers)
        except BaseException:
            self.close()  # waits: the kernel may still write to the buffers
            raise
        for start in range(DEPTH, len(runs), DEPTH):
            rest = self._submit_from(runs, start)
            try:
                self._collect(rest.accepted, answers)
            except BaseException:
                self.close()
                raise
        return answers

    def _submit_from(self, runs: Sequence[ReadRun], start: int) -> "_Submitted":
        """Submit up to `DEPTH` of `runs` from `start`."""
        part = runs[start : start + DEPTH]
        kept = [self._pack(place, start + place, run) for place, run in enumerate(part)]
        try:
            return _Submitted(runs, kept, self._submit_packed(len(part)))
        except BaseException:
            self.close()
            raise

    def _pack(self, place: int, number: int, run: ReadRun) -> object:
        """Fill the control block of `run`; the returned object must live until the read ends."""
        if len(run.views) == 1:
            (view,) = run.views
            self._pack_one(place, number, run, _PREAD, _address(view), view.nbytes)
            return None
        vector = bytearray(_IOVEC.size * len(run.views))
        for at, view in enumerate(run.views):
            _IOVEC.pack_into(vector, _IOVEC.size * at, _address(view), view.nbytes)
        self._pack_one(place, number, run, _PREADV, _address(memoryview(vector)), len(run.views))
        return vector

    def _pack_one(self, place: int, number: int, run: ReadRun, operation: int, address: int, count: int) -> None:
        _IOCB.pack_into(
            self._iocbs, _IOCB_BYTES * place,
            number, 0, 0, operation, 0, run.descriptor, address, count, run.offset, 0, 0, 0,
        )  # fmt: skip

    def _submit_packed(self, count: int) -> int:
        """Submit `count` control blocks; returns how many the kernel accepted."""
        accepted = 0
        while accepted < count:
            taken = self._call(self._submit, self._context, count - accepted, self._pointers_at + 8 * accepted, 0, 0)
            if taken <= 0:
                break  # a separate read reports the reason
            accepted += taken
        return accepted

    def _collect(self, count: int, answers: list[int]) -> None:
        """Wait for `count` reads."""
        while count:
            ended = self._call(self._get_events, self._context, count, count, self._events_at, 0)
            if ended < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for place in range(ended):
                number, _, answer, _ = _EVENT.unpack_from(self._event_buffer, _EVENT.size * place)
                answers[number] = answer
            count -= ended


def begin_runs(runs: Sequence[ReadRun]) -> Callable[[], list[int]] | None:
    """Submit `runs` at once. The returned function waits for them and returns as `ReadQueue.read`.

    The same thread must call it: until then the buffers are in use. None when this thread has no queue, or its queue is
    busy.

    Raises:
        OSError: the queue failed; the returned function raises it, too.
    """
    queue: ReadQueue | None = getattr(_local, "queue", None)
    if queue is None or not queue.is_open:
        if getattr(_local, "is_without", False):
            return None
        try:
            queue = _local.queue = ReadQueue()
        except OSError:
            _local.is_without = True
            return None
    if queue.is_busy:
        return None
    queue.begin(runs)
    return queue.end


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
