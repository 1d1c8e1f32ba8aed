"""A CUDA device as `Streams`. Imports torch.

Copies call the driver directly, at one microsecond each. A long prefix has thousands, and for each torch would create
temporary tensors and inspect both pointers.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from kvtier.device.copy_descriptors import CopyDescriptors
from kvtier.device.streams import BusCopy, Event, Stream

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"

_CALLS = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuStreamGetCtx": (ctypes.c_void_p, ctypes.c_void_p),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
}
"""Argument types of the driver's functions. Copies take target, source, bytes and stream."""


class CudaEvent:
    """A torch event."""

    def __init__(self, event: Any, device: torch.device) -> None:  # noqa: ANN401 - torch has two types for it
        self.event = event
        self._device = device

    def query(self) -> bool:
        """See `Event`."""
        return self.event.query()

    def hold(self) -> None:
        """See `Event`."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaStream:
    """A CUDA stream of its own, so that copies overlap with the engine's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def to_device(self, copies: Sequence[BusCopy]) -> None:
        """See `Stream`."""
        copy, stream = self._copying("cuMemcpyHtoDAsync_v2")
        for payload, address in copies:
            _checked(copy(address, _address(payload), payload.nbytes, stream), payload.nbytes)

    def to_host(self, copies: Sequence[BusCopy]) -> None:
        """See `Stream`."""
        copy, stream = self._copying("cuMemcpyDtoHAsync_v2")
        for payload, address in copies:
            _checked(copy(_address(payload), address, payload.nbytes, stream), payload.nbytes)

    def copy(self, descriptors: CopyDescriptors) -> None:
        """See `Stream`."""
        if not len(descriptors):
            return
        kernel = _kernel(self._device)
        if kernel is None:
            copy, stream = self._copying("cuMemcpyDtoDAsync_v2")
            for source, target, size in cast("list[list[int]]", cast("Any", descriptors).tolist()):
                _checked(copy(target, source, size, stream), size)
            return
        with torch.cuda.stream(self.stream):
            # torch does not reuse its page-locked memory before the copy from it is complete.
            rows = torch.from_numpy(np.ascontiguousarray(descriptors)).pin_memory()  # pyright: ignore[reportUnknownMemberType]
            kernel(descriptors, rows.to(self._device, non_blocking=True))

    def _copying(self, name: str) -> tuple[Callable[..., int], int]:
        """A copy function of the driver, and the stream handle to call it with.

        Makes the stream's context current in the calling thread: a new thread has none, and unlike torch the driver
        does not set one.
        """
        handle: int = self.stream.cuda_stream
        context = ctypes.c_void_p()
        _checked(_driver("cuStreamGetCtx")(handle, ctypes.addressof(context)))
        _checked(_driver("cuCtxSetCurrent")(context))
        return _driver(name), handle

    def wait(self, event: Event) -> None:
        """See `Stream`."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self) -> Event:
        """See `Stream`."""
        return CudaEvent(self.stream.record_event(), self._device)

    def settle(self) -> None:
        """See `Stream`."""
        self.stream.synchronize()


class CudaStreams:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index: int | None = cast("Any", device).index
        self._device = torch.device(device.type, torch.cuda.current_device() if index is None else index)
        self._stages: list[torch.Tensor] = []
        _kernel(self._device)  # compile now, so that the first copy does not wait for it

    def stream(self) -> Stream:
        """See `Streams`."""
        return CudaStream(self._device)

    def stage(self, size_bytes: int, stream: Stream) -> int:
        """See `Streams`."""
        assert isinstance(stream, CudaStream)
        # On that stream, because torch may return memory that queued work of the allocating stream still uses.
        with torch.cuda.stream(stream.stream):
            self._stages.append(torch.empty(size_bytes, dtype=torch.uint8, device=self._device))
        return self._stages[-1].data_ptr()

    def now(self) -> Event:
        """See `Streams`."""
        return CudaEvent(torch.cuda.current_stream(self._device).record_event(), self._device)


@cache
def _driver(name: str) -> Callable[..., int]:
    found = getattr(ctypes.CDLL(DRIVER), name)
    found.argtypes = _CALLS[name]
    found.restype = ctypes.c_int
    return found


@cache
def _kernel(device: torch.device) -> Callable[[CopyDescriptors, torch.Tensor], None] | None:
    try:
        from kvtier.device.kernel import check, copy_kernel  # noqa: PLC0415 - Triton is optional
    except ImportError as error:
        reason = f"no Triton: {error}"
    else:
        reason = check(device)
        if not reason:
            return copy_kernel
    logger.warning(
        "the copy kernel is not available on %s (%s); kvtier copies run by run with cuMemcpyDtoDAsync, which is slower",
        device,
        reason,
    )
    return None


def _checked(code: int, size_bytes: int = 0) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} when a copy of {size_bytes} bytes was queued")


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, np.uint8).__array_interface__["data"][0])
