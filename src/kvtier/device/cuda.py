"""A CUDA device as `Streams`. Imports torch; the copies go straight to the driver, a microsecond each.

torch would make temporaries, and look at every pointer, for each of the thousands of copies of a long prefix.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from kvtier.device.pieces import Pieces
from kvtier.device.streams import Crossing, Event, Stream

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"

_CALLS = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuStreamGetCtx": (ctypes.c_void_p, ctypes.c_void_p),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
}
"""Names in the driver with the types of their arguments: copies take target, source, bytes and stream."""


class CudaEvent:
    """An event of torch."""

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
    """A stream beside torch's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def to_device(self, crossings: Sequence[Crossing]) -> None:
        """See `Stream`."""
        copy, stream = self._copying("cuMemcpyHtoDAsync_v2")
        for payload, address in crossings:
            _checked(copy(address, _address(payload), payload.nbytes, stream), payload.nbytes)

    def to_host(self, crossings: Sequence[Crossing]) -> None:
        """See `Stream`."""
        copy, stream = self._copying("cuMemcpyDtoHAsync_v2")
        for payload, address in crossings:
            _checked(copy(_address(payload), address, payload.nbytes, stream), payload.nbytes)

    def copy(self, pieces: Pieces) -> None:
        """See `Stream`."""
        if not len(pieces):
            return
        kernel = _kernel(self._device)
        if kernel is None:
            copy, stream = self._copying("cuMemcpyDtoDAsync_v2")
            rows: list[list[int]] = cast("Any", pieces).tolist()
            for source, target, size in rows:
                _checked(copy(target, source, size, stream), size)
            return
        with torch.cuda.stream(self.stream):
            # Through torch's own page-locked memory, which it gives to nobody else before the copy has ended.
            told = torch.from_numpy(np.ascontiguousarray(pieces)).pin_memory()  # pyright: ignore[reportUnknownMemberType]
            kernel(pieces, told.to(self._device, non_blocking=True))

    def _copying(self, name: str) -> tuple[Callable[..., int], int]:
        """A copy of the driver's, and the stream to give it; the stream's context is the calling thread's from now on.

        A thread that has not yet spoken to the device has none, and the driver, unlike torch, takes no other.
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
        _kernel(self._device)  # compiled now, and not while somebody waits for a first copy

    def stream(self) -> Stream:
        """See `Streams`."""
        return CudaStream(self._device)

    def stage(self, size_bytes: int, stream: Stream) -> int:
        """See `Streams`."""
        assert isinstance(stream, CudaStream)
        # On that stream: torch gives out memory that work queued on the stream of the allocation may still use.
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
def _kernel(device: torch.device) -> Callable[[Pieces, torch.Tensor], None] | None:
    try:
        from kvtier.device.kernel import check, copy_pieces  # noqa: PLC0415 - Triton is optional
    except ImportError as error:
        reason = f"no Triton: {error}"
    else:
        reason = check(device)
        if not reason:
            return copy_pieces
    logger.warning("pieces are copied one by one, which is slow (%s)", reason)
    return None


def _checked(code: int, size_bytes: int = 0) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver answered {code} when a copy of {size_bytes} bytes was to begin")


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, np.uint8).__array_interface__["data"][0])
