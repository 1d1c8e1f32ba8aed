"""Streams, events and memory of a simulated device, executed by a seed in any order that happens-before allows.

A stream is a queue of operations. The machine runs them when the host waits, and some at each call. Which stream goes
on is drawn from the seed; so is how eager the device is, and which streams it favors.

Races are found by PyTorch's own sanitizer (`torch.cuda._sanitizer`). It gets each operation with the parts of memory
that it reads and writes, each event, and each wait. The host is one more stream. So one schedule finds what only few
orders of execution would show.
"""

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from tests.simulated_cuda.turns import STALLED_S, StalledError, Turns
from torch.cuda import _sanitizer

POISON = 0xDB
"""Each byte of memory that nothing has written, or that was freed."""

HOST = -1
"""The host's number among streams."""

_ALIASES: Any = defaultdict(list)

Parts = Iterable[int]
"""Keys of parts of memory."""


class DeviceError(RuntimeError):
    """What a call of the driver raises."""


class Op:
    """One queued operation."""

    __slots__ = ("after", "host_range", "is_held", "is_over", "is_sleep", "name", "run")

    def __init__(self, name: str, run: Callable[[], object], after: Sequence["Op"] = ()) -> None:
        self.name = name
        self.run = run
        self.after = after
        self.host_range: tuple[int, int] | None = None
        self.is_over = self.is_held = self.is_sleep = False


class Memory:
    """One allocation of the device. It is freed with its last reference, on the stream where it was allocated."""

    def __init__(self, machine: "Machine", size_bytes: int, stream: int) -> None:
        self.machine = machine
        self.number = next(machine.numbers)
        self.stream = stream
        self.near = near = torch.full((size_bytes,), POISON, dtype=torch.uint8)
        self.used_on: set[int] = set()
        """Streams of `record_stream`."""
        self.written: Op | None = None
        """The last operation that writes to it."""
        with machine.changed:
            machine.check_call("allocate")
            # Until the stream gets there, its earlier operations may use this memory, as that of freed tensors.
            parts = range(size_bytes // machine.part_bytes + 1)
            keys = [self.number << 40 | part for part in parts]
            machine.queue("allocate", lambda: near.fill_(POISON), (), keys, stream)

    def __del__(self) -> None:
        self.machine.freed.append((self.number, self.stream, self.near, self.used_on))


class Machine:
    """A device.

    Args:
        seed: decides the order of execution.
        part_bytes: accesses to the device's memory are compared in parts of so many bytes.
        host_part_bytes: the same for the host's memory.
        stream_count: streams of the pool. Further ones share them, as in PyTorch.
    """

    def __init__(
        self, seed: int = 0, *, part_bytes: int = 256, host_part_bytes: int = 256, stream_count: int = 32
    ) -> None:
        self.rng = random.Random(seed)
        self.part_bytes = part_bytes
        self._host_part_bytes = host_part_bytes
        self.stream_count = stream_count
        self.numbers = count(1)
        self.changed = threading.Condition(threading.RLock())
        self.local = threading.local()
        self.queues: dict[int, deque[Op]] = {0: deque()}
        self.freed: deque[tuple[int, int, torch.Tensor, set[int]]] = deque()
        self.pinned: dict[int, int] = {}
        """Page-locked ranges of host memory: size by address."""
        self.races: list[str] = []
        self.fault: BaseException | None = None
        """What an operation has raised. The device is unusable after it."""
        self.calls = 0
        self.fail_at: Callable[[str], bool] = lambda _name: False
        """Whether the driver refuses the call of this name."""
        self.eagerness = self.rng.choice((0.0, 0.2, 1.0, 4.0))
        """Operations that run at each call, on average."""
        self._weights: dict[int, float] = {}
        self._vain = 0
        """Polls that found nothing that could run, in a row."""
        self._polls = 0
        """Polls since the last launch."""
        self._streams = count()
        self._sanitizer = _sanitizer.EventHandler()
        self._parts_of: dict[int, set[int]] = defaultdict(set)
        self._host_is_new = False
        self.turns = Turns(self.rng)
        self._captures = self._is_broken = False

    # ---- what the host calls ------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """The number of a stream of the pool."""
        with self.changed:
            number = 1 + next(self._streams) % self.stream_count
            self.queues.setdefault(number, deque())
            return number

    @property
    def stream(self) -> int:
        """The current stream of this thread."""
        return getattr(self.local, "stream", 0)

    def launch(self, name: str, run: Callable[[], object], reads: Parts = (), writes: Parts = (), **options: Any) -> Op:
        """Queue an operation on a stream, by default the current one."""
        self.turns.switch()
        return self._launch(name, run, reads, writes, **options)

    def _launch(
        self,
        name: str,
        run: Callable[[], object],
        reads: Parts = (),
        writes: Parts = (),
        *,
        stream: int | None = None,
        after: Sequence[Op] = (),
        host_range: tuple[int, int] | None = None,
        is_sleep: bool = False,
    ) -> Op:
        with self.changed:
            self.check_call(name)
            op = self.queue(name, run, reads, writes, self.stream if stream is None else stream, after)
            op.host_range, op.is_sleep = host_range, is_sleep
            self._progress()
            return op

    def check_call(self, name: str) -> None:
        """Fail if the device is broken or the driver shall refuse this call. Queues what frees imply."""
        self.calls += 1
        while self.freed:
            self._free(*self.freed.popleft())
        self._check_fault()
        if self.fail_at(name):
            raise DeviceError(f"CUDA error: refused {name}")

    def _check_fault(self) -> None:
        if self.fault is not None:
            raise DeviceError(f"CUDA error: device-side assert triggered: {self.fault!r}") from self.fault

    def record(self, event: int, stream: int) -> Op:
        """Queue that an event happens."""
        self.turns.switch()
        with self.changed:
            op = self._launch("record", _nothing, stream=stream)
            self._sanitizer._handle_event_record(event, stream)
            return op

    def wait(self, event: int, op: Op, stream: int) -> None:
        """Queue that a stream waits for an event."""
        self.turns.switch()
        with self.changed:
            self._launch("wait", _nothing, stream=stream, after=(op,))
            self._sanitizer._handle_event_wait(event, stream)

    def query(self, op: Op) -> bool:
        """Whether an operation is over. Polls make progress, more and more, so that they end."""
        with self.changed:
            self.check_call("query")
            self._polls = min(self._polls + 1, 12)
            for _ in range(self.rng.randrange(1 << self._polls)):
                if op.is_over:
                    break
                if not self._run_one():
                    self._vain += 1
                    if self._vain <= 2 or not self._wake():
                        break
            self._check_fault()
            return op.is_over

    def finish(self, op: Op) -> None:
        """Block the host until an operation is over."""
        until_s = time.monotonic() + STALLED_S
        with self.changed:
            while not op.is_over:
                if self._run_one() or self._wake():
                    self._check_fault()
                    continue
                if self.turns.are_taken or time.monotonic() > until_s:
                    raise StalledError(f"the host waits for {op.name}, behind a stream that is held")
                self.changed.wait(0.01)

    def finish_stream(self, stream: int) -> None:
        """Block the host until a stream is empty."""
        with self.changed:
            self.check_call("synchronize")
            if self.queues[stream]:
                self.finish(self.queues[stream][-1])
            self._sanitizer._handle_stream_synchronization(stream)

    def finish_event(self, event: int, op: Op) -> None:
        """Block the host until an event has happened."""
        with self.changed:
            self.check_call("synchronize")
            self.finish(op)
            self.event_is_over(event)

    def event_is_over(self, event: int) -> None:
        """Note that the host knows that an event has happened."""
        with self.changed:
            self._sanitizer._handle_event_synchronization(event)

    def finish_all(self) -> None:
        """Block the host until the device is idle."""
        with self.changed:
            self.check_call("synchronize")
            for queue in list(self.queues.values()):
                if queue:
                    self.finish(queue[-1])
            self._sanitizer._handle_device_synchronization()

    def sleep(self) -> None:
        """Keep the current stream busy: until nothing else can run, and the host waits or has polled in vain."""
        self._launch("sleep", _nothing, is_sleep=True)

    @contextmanager
    def label(self, label: str) -> Iterator[None]:
        """Name what this thread launches, for reports of races."""
        self.local.label = f"{label}: "
        try:
            yield
        finally:
            self.local.label = ""

    @contextmanager
    def held(self, stream: int = 0) -> Iterator[None]:
        """Hold a stream: what is queued on it from now on does not run before the end."""
        with self.changed:
            op = Op("hold", _nothing)
            op.is_held = True
            self.queues[stream].append(op)
        try:
            yield
        finally:
            with self.changed:
                op.is_held = False
                self.changed.notify_all()

    # ---- the host's own accesses --------------------------------------------------------------------------------

    def host_reads(self, what: str, memory: Any) -> None:
        """Note that the host reads bytes; a race if the device may still write to them."""
        self._host(what, reads=self.host_parts(*_range(memory)))

    def host_writes(self, what: str, memory: Any) -> None:
        """Note that the host writes bytes, or gives them away; a race if the device may still use them."""
        self._host(what, writes=self.host_parts(*_range(memory)))

    def _host(self, what: str, reads: Parts = (), writes: Parts = ()) -> None:
        with self.changed:
            self._note(HOST, what, reads, writes)
            self._host_is_new = True

    def host_parts(self, address: int, size_bytes: int) -> range:
        """The keys of a range of host memory: negative, unlike the device's."""
        first, last = address // self._host_part_bytes, (address + size_bytes - 1) // self._host_part_bytes
        return range(-last - 1, -first) if size_bytes else range(0)

    def is_pinned(self, address: int, size_bytes: int) -> bool:
        """Whether a range is page-locked.

        Raises:
            DeviceError: it crosses the edge of a locked range.
        """
        with self.changed:
            for start, size in self.pinned.items():
                if start <= address and address + size_bytes <= start + size:
                    return True
                if start < address + size_bytes and address < start + size:
                    raise DeviceError("CUDA error: invalid argument: a copy crosses the edge of a locked range")
        return False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a CUDA graph, in the mode that PyTorch and vLLM use: no thread may call what is unsafe meanwhile.

        Raises:
            DeviceError: a thread has done so.
        """
        self._captures = True
        try:
            yield
        finally:
            self._captures, is_broken, self._is_broken = False, self._is_broken, False
        if is_broken:
            raise DeviceError("CUDA error: operation failed due to a previous error during capture")

    def exchange_capture_mode(self, mode: int) -> int:
        """What other threads' captures mean for this one: 0 (global, the default) to 2 (relaxed); the mode before."""
        before = getattr(self.local, "capture_mode", 0)
        self.local.capture_mode = mode
        return before

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock a range; a CUDA error code."""
        with self.changed:
            if self._captures and not getattr(self.local, "capture_mode", 0):
                self._is_broken = True
                return 900
            if any(address < start + size and start < address + size_bytes for start, size in self.pinned.items()):
                return 712
            self.pinned[address] = size_bytes
            return 0

    def unregister(self, address: int) -> int:
        """Unlock a range; a CUDA error code."""
        with self.changed:
            size = self.pinned.pop(address, None)
            if size is None:
                return 713
            for queue in self.queues.values():
                for op in queue:
                    if op.host_range and op.host_range[0] < address + size and address < op.host_range[1]:
                        self.races.append(f"host memory is unlocked under {op.name}")
            return 0

    # ---- the device ---------------------------------------------------------------------------------------------

    def queue(
        self,
        name: str,
        run: Callable[[], object],
        reads: Parts,
        writes: Parts,
        stream: int,
        after: Sequence[Op] = (),
    ) -> Op:
        """Queue an operation, without a call of the driver. The caller has the lock."""
        self._note(stream, f"{getattr(self.local, 'label', '')}{name}", reads, writes)
        op = Op(name, run, after)
        self.queues[stream].append(op)
        self._vain = self._polls = 0
        return op

    def _free(self, number: int, stream: int, near: torch.Tensor, used_on: set[int]) -> None:
        """Poison freed memory, as the next user on its stream would."""
        parts, after = self._parts_of.pop(number, set()), []
        for other in used_on - {stream}:
            event = next(self.numbers)
            self._sanitizer._handle_event_record(event, other)
            self._sanitizer._handle_event_wait(event, stream)
            after += list(self.queues[other])[-1:]
        self.queue("free", lambda: near.fill_(POISON), (), parts, stream, after)

    def _progress(self) -> None:
        for _ in range(int(self.eagerness + self.rng.random())):
            self._run_one()

    def _run_one(self) -> bool:
        """Run one operation that can run."""
        ready = [stream for stream, queue in self.queues.items() if queue and _can_run(queue[0])]
        if not ready:
            return False
        for stream in ready:
            if stream not in self._weights:
                self._weights[stream] = self.rng.choice((0.02, 1.0, 50.0))
        (stream,) = self.rng.choices(ready, [self._weights[stream] for stream in ready])
        self._run(stream)
        return True

    def _run(self, stream: int) -> None:
        op = self.queues[stream].popleft()
        try:
            op.run()
        except Exception as error:  # noqa: BLE001 - as a device, it fails at a later call
            self.fault = self.fault or error
        op.run = _nothing
        op.is_over = True
        self._vain = 0
        self.changed.notify_all()

    def _wake(self) -> bool:
        """End one sleep."""
        for stream, queue in self.queues.items():
            if queue and queue[0].is_sleep:
                self._run(stream)
                return True
        return False

    def _note(self, stream: int, name: str, reads: Parts, writes: Parts) -> None:
        handler = self._sanitizer
        if self._host_is_new and stream != HOST:
            handler._handle_event_record(0, HOST)
            handler._handle_event_wait(0, stream)
        written = set(writes)
        read = set(reads) - written
        for part in read | written:
            if part >= 0:
                self._parts_of[part >> 40].add(part)
        errors: Any = handler._handle_kernel_launch(stream, read, written, set(), name, _ALIASES)
        if errors:
            found = errors[0]
            before, now = found.previous_access, found.current_access
            self.races.append(
                f"{now.operator} on stream {now.stream} is {now.type} what {before.operator} on stream "
                f"{before.stream} was {before.type}, without an order between them"
            )


def _can_run(op: Op) -> bool:
    return not op.is_held and not op.is_sleep and all(it.is_over for it in op.after)


def _nothing() -> None:
    pass


def _range(memory: Any) -> tuple[int, int]:
    """Address and size of host memory."""
    held = torch.frombuffer(memory, dtype=torch.uint8)
    return held.data_ptr(), held.numel()


@contextmanager
def without_stacks() -> Iterator[None]:
    """Spare the sanitizer the stack of each access, which takes most of its time."""
    real = _sanitizer.traceback
    stacks = SimpleNamespace(extract=lambda *_args, **_named: [])
    _sanitizer.traceback = SimpleNamespace(StackSummary=stacks, walk_stack=lambda _frame: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        _sanitizer.traceback = real
