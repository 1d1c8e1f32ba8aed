"""Many reads at once by one thread: Linux's asynchronous I/O (`io_submit`), by plain system calls.

A batch of small reads that do not lie side by side is two system calls instead of one each, and the device sees all of
them at once. Between any two calls a thread has to get the interpreter's lock back, which costs more than a small read.
io_uring would do the same, but containers mostly forbid it. With direct I/O only: otherwise the kernel reads while it
is being asked, one after the other.
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
"""Most reads that one thread has under way."""

NOT_READ = -errno.EAGAIN
"""The answer to a read that the kernel did not take."""

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_IOCB = struct.Struct("<QIIHhIQQqQII")
_IOCB_BYTES = 64
_PREAD, _PREADV = 0, 7
_EVENT = struct.Struct("<QQqq")
_IOVEC = struct.Struct("<QQ")

_local = threading.local()


def _forget_in_child() -> None:
    """A queue belongs to the process that made it; in a forked child its number may become another's."""
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class Run(NamedTuple):
    """Bytes of a file that lie side by side, and where they go, one view after the other."""

    descriptor: int
    views: Sequence[memoryview]
    offset: int


class _Asked(NamedTuple):
    """What the kernel was asked for."""

    runs: Sequence[Run]
    kept: Sequence[object]
    """Lives until it was read."""
    begun: int


class ReadQueue:
    """Reads of one thread, one batch at a time. `begin_runs` keeps one for each.

    Raises:
        OSError: the system has none for us.
    """

    def __init__(self) -> None:
        self._context = 0
        self._under_way: _Asked | None = None
        if sys.platform != "linux" or platform.machine() not in _NUMBERS or sys.maxsize < 1 << 32:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._events, self._submit = _NUMBERS[platform.machine()]
        prototype = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 6, use_errno=True)  # gives up the lock
        self._call = prototype(("syscall", ctypes.CDLL(None)))
        self._iocbs = bytearray(_IOCB_BYTES * DEPTH)
        self._told = bytearray(_EVENT.size * DEPTH)
        start = _address(memoryview(self._iocbs))
        self._pointers = (ctypes.c_uint64 * DEPTH)(*(start + _IOCB_BYTES * place for place in range(DEPTH)))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._told_at = _address(memoryview(self._told))
        context = ctypes.c_ulong(0)
        if self._call(self._setup, DEPTH, ctypes.addressof(context), 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._context = context.value

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._context != 0

    def close(self) -> None:
        """Wait for what is under way, whose memory is in use until then, and give everything back. Twice is fine."""
        context, self._context = self._context, 0
        if context:
            self._call(self._destroy, context, 0, 0, 0, 0)
        self._under_way = None

    @property
    def is_busy(self) -> bool:
        """Whether reads are under way."""
        return self._under_way is not None

    def read(self, runs: Sequence[Run]) -> list[int]:
        """The bytes that were read of each of `runs`, fewer where the file ends; below 0 the number of the error.

        Raises:
            OSError: the queue is closed or busy, or broke; nothing is under way any more.
        """
        self.begin(runs)
        return self.end()

    def begin(self, runs: Sequence[Run]) -> None:
        """Ask for `runs`, the first `DEPTH` of them; their memory is in use until `end`.

        Raises:
            OSError: as `read`.
        """
        if not self._context or self._under_way is not None:
            raise OSError(errno.EBADF, "the queue is busy" if self._context else "the queue is closed")
        self._under_way = self._ask(runs, 0)

    def end(self) -> list[int]:
        """Wait for what `begin` has asked for, and for the rest: see `read`.

        Raises:
            OSError: as `read`.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            raise OSError(errno.EBADF, "nothing is under way")
        runs = under_way.runs
        answers = [NOT_READ] * len(runs)
        try:
            self._collect(under_way.begun, answers)
        except BaseException:
            self.close()  # nobody may have the memory back before the kernel is done with it
            raise
        for start in range(DEPTH, len(runs), DEPTH):
            rest = self._ask(runs, start)
            try:
                self._collect(rest.begun, answers)
            except BaseException:
                self.close()
                raise
        return answers

    def _ask(self, runs: Sequence[Run], start: int) -> "_Asked":
        """Ask for those of `runs` from `start` on that fit."""
        part = runs[start : start + DEPTH]
        kept = [self._pack(place, start + place, run) for place, run in enumerate(part)]
        try:
            return _Asked(runs, kept, self._begin(len(part)))
        except BaseException:
            self.close()
            raise

    def _pack(self, place: int, number: int, run: Run) -> object:
        """Describe `run` to the kernel; what is returned must live until it was read."""
        if len(run.views) == 1:
            (view,) = run.views
            self._pack_one(place, number, run, _PREAD, _address(view), view.nbytes)
            return None
        vector = bytearray(_IOVEC.size * len(run.views))
        for at, view in enumerate(run.views):
            _IOVEC.pack_into(vector, _IOVEC.size * at, _address(view), view.nbytes)
        self._pack_one(place, number, run, _PREADV, _address(memoryview(vector)), len(run.views))
        return vector

    def _pack_one(self, place: int, number: int, run: Run, operation: int, address: int, count: int) -> None:
        _IOCB.pack_into(
            self._iocbs, _IOCB_BYTES * place,
            number, 0, 0, operation, 0, run.descriptor, address, count, run.offset, 0, 0, 0,
        )  # fmt: skip

    def _begin(self, count: int) -> int:
        """How many of `count` described reads the kernel has taken."""
        begun = 0
        while begun < count:
            taken = self._call(self._submit, self._context, count - begun, self._pointers_at + 8 * begun, 0, 0)
            if taken <= 0:
                break  # it does not want the next one; whoever asks alone learns why
            begun += taken
        return begun

    def _collect(self, count: int, answers: list[int]) -> None:
        """Wait for `count` reads."""
        while count:
            ended = self._call(self._events, self._context, count, count, self._told_at, 0)
            if ended < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for place in range(ended):
                number, _, answer, _ = _EVENT.unpack_from(self._told, _EVENT.size * place)
                answers[number] = answer
            count -= ended


def begin_runs(runs: Sequence[Run]) -> Callable[[], list[int]] | None:
    """Ask for `runs` at the same time. What is returned waits for them: see `ReadQueue.read`.

    It must be called, and by the same thread: until then the memory is in use. None where the system has no queue for
    this thread, or the thread is using it.

    Raises:
        OSError: the queue broke; so does what is returned.
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
