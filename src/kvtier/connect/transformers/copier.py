"""Moves chunks between the library's cache tensors and host slots. Called from mover threads.

`blocks` is (first token, token after the last) of a row. A request is one row of one cache; the copier knows it from
`expose` until `forget`, and keeps its tensors alive for that time.

On the CPU a copy is complete on return. It is made with numpy, because torch would start a team of threads in every
mover thread and take the processor from the model. On CUDA it goes over a stream of our own that first waits for what
the engine had queued when the request was exposed, and the fence is an event behind the copy.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connect.transformers.caches import CachedLayer, CacheShape, Span, Spans
from kvtier.device.base import Fence
from kvtier.device.page_lock import cuda_page_lock
from kvtier.layout import KvLayout
from kvtier.runtime.arena import PageLock
from kvtier.types import RequestId

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a KV number: bytes are moved, whatever they mean, and numpy knows no bfloat16."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a cache: where the tokens of one request lie."""

    row: int
    pad: int
    spans: Spans
    """For each group, for each of its layers, the runs of columns that there are."""
    ready: dict[torch.device, Any] = field(default_factory=dict[torch.device, Any])
    """For each CUDA device, an event behind all that the engine had queued on these tensors."""


class CudaFence:
    """Events behind the copies of one chunk, one for each device."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events


class CacheCopier:
    """Gathers and scatters chunks of the rows that were exposed. Thread-safe.

    Args:
        shape: the model's KV groups.
        layout: their layout, made of `shape`.
    """

    def __init__(self, shape: CacheShape, layout: KvLayout) -> None:
        self._shape = shape
        self._layout = layout
        self._rows: dict[RequestId, Row] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def expose(self, request: RequestId, row: int, pad: int, spans: Spans) -> None:
        """Let `request` be copied from and to these tensors until `forget`."""
        devices = {layer.device for layer in self._shape.layers if layer.device.type == "cuda"}
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        with self._lock:
            self._rows[request] = Row(row, pad, spans, ready)

    def forget(self, request: RequestId) -> None:
        """Let go of the tensors of `request`; unknown is fine."""
        with self._lock:
            self._rows.pop(request, None)

    @property
    def exposed(self) -> int:
        """Rows whose tensors are held."""
        with self._lock:
            return len(self._rows)

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy the tokens `blocks` of a row into `payload`.

        Raises:
            LookupError: the request is not exposed, or its tensors do not have all of the tokens.
            ValueError: `blocks` is no run of at most a chunk's tokens.
        """
        return self._copy(request, group, blocks, payload, is_gather=True)

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy `payload` into the tokens `blocks` of a row, as far as its tensors have room for them.

        Raises:
            LookupError: the request is not exposed.
            ValueError: `blocks` is no run of at most a chunk's tokens.
        """
        return self._copy(request, group, blocks, payload, is_gather=False)

    def done(self, fence: Fence) -> bool:
        """Whether the copy behind `fence` is complete."""
        return not isinstance(fence, CudaFence) or all(event.query() for event in fence.events)

    def _copy(
        self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview, *, is_gather: bool
    ) -> Fence | None:
        with self._lock:
            row = self._rows.get(request)
        if row is None:
            raise LookupError(f"request {request!r} is not exposed to the copier")
        start, stop = blocks
        if not 0 <= start < stop <= start + self._layout.chunk_tokens:
            raise ValueError(f"blocks {blocks} is no run of 1 to {self._layout.chunk_tokens} tokens")
        layout = self._layout.groups[group]
        chunk = _Chunk(row, row.pad + start, row.pad + stop, self._layout.chunk_tokens, is_gather=is_gather)
        for spans in row.spans[group]:
            chunk.check(spans)
        devices: set[torch.device] = set()
        for layer, spans, offset in zip(self._shape.groups[group], row.spans[group], layout.layer_offsets, strict=True):
            if layer.device.type == "cuda":
                devices.add(layer.device)
                with torch.cuda.stream(self._stream(layer.device, row)):
                    chunk.copy(layer, spans, payload, offset)
            else:
                chunk.copy(layer, spans, payload, offset)
        if not devices:
            return None
        return CudaFence([self._streams[device].record_event() for device in devices])

    def _stream(self, device: torch.device, row: Row) -> torch.cuda.Stream:
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_event(row.ready[device])
        return stream


class _Chunk:
    """One chunk of one row on its way."""

    def __init__(self, row: Row, start: int, stop: int, chunk_tokens: int, *, is_gather: bool) -> None:
        self._row, self._start, self._stop = row, start, stop
        self._chunk_tokens = chunk_tokens
        self._is_gather = is_gather

    def check(self, spans: Sequence[Span]) -> None:
        """Refuse to gather what is not all there: bytes of an earlier chunk would leave with it."""
        found = sum(max(0, min(self._stop, span.stop) - max(self._start, span.start)) for span in spans)
        if self._is_gather and found != self._stop - self._start:
            raise LookupError(f"only {found} of {self._stop - self._start} tokens are in the cache's tensors")

    def copy(self, layer: CachedLayer, spans: Sequence[Span], payload: memoryview, offset: int) -> None:
        """Copy one layer's K and V between `spans` and its part of `payload`, which begins at `offset`."""
        tokens = self._chunk_tokens
        key_bytes, value_bytes = tokens * layer.key_bytes_per_token, tokens * layer.value_bytes_per_token
        slot_keys = _typed(payload[offset : offset + key_bytes], layer, layer.key_heads, layer.key_dim)
        payload_values = payload[offset + key_bytes : offset + key_bytes + value_bytes]
        slot_values = _typed(payload_values, layer, layer.value_heads, layer.value_dim)
        for span in spans:
            start, stop = max(self._start, span.start), min(self._stop, span.stop)
            if start >= stop:
                continue
            here, there = slice(start - span.start, stop - span.start), slice(start - self._start, stop - self._start)
            self._move(span.keys[self._row.row, :, here], slot_keys[:, there])
            self._move(span.values[self._row.row, :, here], slot_values[:, there])

    def _move(self, engine: torch.Tensor, slot: torch.Tensor) -> None:
        target, source = (slot, engine) if self._is_gather else (engine, slot)
        if engine.device.type == "cpu":
            np.copyto(_numpy(target), _numpy(source))
        else:
            # Into a slot with gaps torch goes through memory of its own, which must not outlive an unfinished copy.
            target.copy_(source, non_blocking=slot.is_contiguous())


def host_page_lock(shape: CacheShape, mode: str) -> PageLock | None:
    """What page-locks host memory for copies to and from the GPU; None where there is none, or `mode` is ``off``.

    Args:
        shape: tells whether some layer lies on a CUDA device.
        mode: the setting `host.page_lock`. With ``auto`` memory that cannot be locked is used as it is.

    Raises (from what is returned):
        ConfigError: the mode is ``on`` and the memory cannot be locked.
    """
    return cuda_page_lock(mode) if any(layer.device.type == "cuda" for layer in shape.layers) else None


def _typed(part: memoryview, layer: CachedLayer, heads: int, dim: int) -> torch.Tensor:
    return torch.frombuffer(part, dtype=torch.uint8).view(layer.dtype).view(heads, -1, dim)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.detach().view(_SAME_SIZE[tensor.element_size()]).numpy()
