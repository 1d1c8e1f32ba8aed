"""The part of `torch.cuda` that a simulated device needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Self

import torch
from tests.simulated_cuda.machine import Machine, Op
from tests.simulated_cuda.tensors import DEVICE, Current

TOTAL_BYTES = 16 << 30


_MADE_ON_THE_HOST = ("tensor", "as_tensor", "arange", "linspace", "randperm", "eye")
"""A tensor from numbers is copied from the host, and the host waits; in real PyTorch, too."""


def _machine() -> Machine:
    return Current.machine


class Stream:
    """A stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = _machine().new_stream()
        self.device = DEVICE
        self.priority = priority

    @classmethod
    def of(cls, number: int) -> "Stream":
        made = cls.__new__(cls)
        made.number, made.device, made.priority = number, DEVICE, 0
        return made

    @property
    def cuda_stream(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _machine().finish_stream(self.number)

    def query(self) -> bool:
        machine = _machine()
        with machine.changed:
            queue = machine.queues[self.number]
            return not queue or machine.query(queue[-1])

    def __enter__(self) -> Self:
        self._before = getattr(self, "_before", [])
        self._before.append(_machine().stream)
        _machine().local.stream = self.number
        return self

    def __exit__(self, *_: object) -> None:
        _machine().local.stream = self._before.pop()


class Event:
    """An event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.number = next(_machine().numbers)
        self.op: Op | None = None

    def record(self, stream: Stream | None = None) -> None:
        machine = _machine()
        self.op = machine.record(self.number, machine.stream if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        machine = _machine()
        if self.op is not None:
            machine.wait(self.number, self.op, machine.stream if stream is None else stream.number)

    def query(self) -> bool:
        if self.op is None:
            return True
        machine = _machine()
        with machine.changed:
            is_over = machine.query(self.op)
            if is_over:
                machine.event_is_over(self.number)
            return is_over

    def synchronize(self) -> None:
        if self.op is not None:
            _machine().finish_event(self.number, self.op)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds; a simulated device has no time, so all take one."""
        return 1.0


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    machine = _machine()
    before = machine.stream
    if chosen is not None:
        machine.local.stream = chosen.number
    try:
        yield
    finally:
        machine.local.stream = before


@contextmanager
def _on_device(*_: object) -> Iterator[None]:
    yield


class _Runtime:
    """The part of `torch.cuda.cudart()` that locks memory."""

    @staticmethod
    def cudaHostRegister(address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        return _machine().register(address, size_bytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        return _machine().unregister(address)


class _Library:
    """The CUDA runtime, as C has it."""

    @staticmethod
    def cudaThreadExchangeStreamCaptureMode(mode: Any) -> int:  # noqa: N802
        mode._obj.value = _machine().exchange_capture_mode(mode._obj.value)
        return 0


def open_library(real: Callable[..., Any]) -> Callable[..., Any]:
    """`ctypes.CDLL`, which finds the CUDA runtime behind PyTorch's own library."""

    def opened(name: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _Library if str(name).endswith("libc10_cuda.so") else real(name, *args, **kwargs)

    return opened


def _set_stream(chosen: Stream) -> None:
    _machine().local.stream = chosen.number


_PROPERTIES = SimpleNamespace(
    name="simulated", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=1, uuid="simulated"
)


def doubles() -> dict[str, Any]:
    """Names of `torch.cuda`, each with what stands in for it."""
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "device": _on_device,
        "current_stream": lambda device=None: Stream.of(_machine().stream),
        "default_stream": lambda device=None: Stream.of(0),
        "set_stream": _set_stream,
        "synchronize": lambda device=None: _machine().finish_all(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: getattr(_machine().local, "device", 0),
        "set_device": lambda device: setattr(_machine().local, "device", device),
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "cudart": lambda: _Runtime,
        "_sleep": lambda cycles: _machine().sleep(),
    }


def with_device(device: torch.device) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Calls whose device gets a number before C++ asks the guard for it, and those that make numbers on the device."""

    def numbered(value: Any) -> Any:
        is_cuda = isinstance(value, str | torch.device) and torch.device(value).type == "cuda"
        return device if is_cuda else value

    def patched(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            return real(*map(numbered, args), **{name: numbered(it) for name, it in kwargs.items()})

        return call

    def made_here(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if numbered(device) is not DEVICE:
                return real(*args, device=device, **kwargs)
            return real(*args, device="cpu", **kwargs).to(DEVICE)

        return call

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return _machine().is_pinned(tensor.data_ptr(), tensor.nbytes)

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        kept = tensor.clone()
        _machine().register(kept.data_ptr(), kept.nbytes)
        return kept

    return [
        *((torch, name, made_here(getattr(torch, name))) for name in _MADE_ON_THE_HOST),
        (torch.Tensor, "to", patched(torch.Tensor.to)),
        (
            torch.Tensor,
            "cuda",
            lambda tensor, device=None, non_blocking=False: tensor.to(DEVICE, non_blocking=non_blocking),
        ),
        (torch.Tensor, "is_pinned", is_pinned),
        (torch.Tensor, "pin_memory", pin_memory),
    ]
