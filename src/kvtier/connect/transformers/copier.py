"""Copies chunks between the library's cache tensors and host slots. Transfer threads call it.

`blocks` is (first token, token after the last) of a row. A request is one row of one cache. The copier keeps the
request's tensors from `expose` until `forget`.

On the CPU a copy is complete on return. It uses NumPy, because torch would start a thread pool in every transfer thread
and take cores from the model. On a CUDA device, a layer is copied between its tensors and a device buffer laid out like
the payload. The buffer crosses the bus in one copy. Each direction has one stream, which waits for all work that the
engine had queued when the request was exposed. The fence is an event after the last copy.

A layer's part of a payload is K as [head, token, dim], followed by V in the same form. In the cache's tensors, each
head's tokens are contiguous. In what a `RecordingWindowLayer` records, each token's heads are contiguous.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connect.transformers.caches import CachedLayer, CacheShape, Span, Spans
from kvtier.device.copier import Fence
from kvtier.layout import KvLayout
from kvtier.types import RequestId

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types as wide as a KV value, because NumPy has no bfloat16."""

CudaEvent: TypeAlias = Any
"""A CUDA event. It is `Any` because torch has two types for it."""


@dataclass(frozen=True, slots=True)
class ExposedRow:
    """One row of a cache: the tensors of one request."""

    row: int
    pad: int
    spans: Spans
    ready: dict[torch.device, CudaEvent]
    """One event per CUDA device, after all work that the engine had queued on these tensors."""


class StreamFence:
    """Events after the copies of one chunk, one per CUDA device.

    It keeps the tensors alive even if the request is forgotten meanwhile. Otherwise their memory could be reused during
    the copy.
    """

    def __init__(self, events: Sequence[CudaEvent], row: ExposedRow) -> None:
        self.events = events
        self.row = row


class CacheCopier:
    """Gathers and scatters chunks of exposed rows. Thread-safe.

    Args:
        shape: the model's KV groups.
        layout: the layout of `shape`.
    """

    def __init__(self, shape: CacheShape, layout: KvLayout) -> None:
        self._shape = shape
        self._layout = layout
        self._rows: dict[RequestId, ExposedRow] = {}
        self._lock = threading.Lock()
        self._devices = {layer.device for layer in shape.layers if layer.device.type == "cuda"}
        # Two sets of streams, so that a load does not wait for stores.
        self._gather_streams = {device: torch.cuda.Stream(device) for device in self._devices}
        self._scatter_streams = {device: torch.cuda.Stream(device) for device in self._devices}

    def expose(self, request: RequestId, row: int, pad: int, spans: Spans) -> None:
        """Keep these tensors for copies of `request` until `forget`.

        Args:
            request: a row's load or store.
            row: the row's number in the tensors.
            pad: number of padding columns before its first token.
            spans: the tensors.
        """
        ready = {device: torch.cuda.current_stream(device).record_event() for device in self._devices}
        with self._lock:
            self._rows[request] = ExposedRow(row, pad, spans, ready)

    def forget(self, request: RequestId) -> None:
        """Release the tensors of `request`. An unknown request is ignored."""
        with self._lock:
            self._rows.pop(request, None)

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy the tokens `blocks` of a row into `payload`.

        Raises:
            LookupError: the request is not exposed, or its tensors lack some of the tokens.
            ValueError: `blocks` is not as long as a chunk.
        """
        row, start, stop = self._columns(request, blocks)
        if stop - start < self._layout.chunk_tokens:
            raise ValueError(f"blocks {blocks} is not a full chunk of {self._layout.chunk_tokens} tokens")
        for spans in row.spans[group]:
            _check_complete(spans, start, stop)
        return self._copy(row, group, start, stop, payload, is_gather=True)

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy `payload` into the tokens `blocks` of a row. Tokens outside its tensors are skipped.

        Raises:
            LookupError: the request is not exposed.
            ValueError: `blocks` is empty or longer than a chunk.
        """
        row, start, stop = self._columns(request, blocks)
        return self._copy(row, group, start, stop, payload, is_gather=False)

    def done(self, fence: Fence) -> bool:
        """Return whether the copy that `fence` represents is complete. Never block."""
        return not isinstance(fence, StreamFence) or all(event.query() for event in fence.events)

    def _columns(self, request: RequestId, blocks: tuple[int, ...]) -> tuple[ExposedRow, int, int]:
        """Return the request's row, the first column of these tokens, and the column after the last."""
        with self._lock:
            row = self._rows.get(request)
        if row is None:
            raise LookupError(f"request {request!r} is not exposed to the copier")
        start, stop = blocks
        if not 0 <= start < stop <= start + self._layout.chunk_tokens:
            raise ValueError(f"blocks {blocks} is not a run of 1 to {self._layout.chunk_tokens} tokens")
        return row, row.pad + start, row.pad + stop

    def _copy(
        self, row: ExposedRow, group: int, start: int, stop: int, payload: memoryview, *, is_gather: bool
    ) -> Fence | None:
        layout = self._layout.groups[group]
        streams = self._gather_streams if is_gather else self._scatter_streams
        with _on_streams(streams, row):
            for number, layer in enumerate(self._shape.groups[group]):
                offset = layout.layer_offsets[number]
                slot = torch.frombuffer(payload[offset : offset + layout.layer_bytes[number]], dtype=torch.uint8)
                is_staged = layer.device.type == "cuda"
                near = torch.empty_like(slot, device=layer.device) if is_staged else slot
                if is_staged and not is_gather:
                    near.copy_(slot, non_blocking=True)
                _move(layer, row.row, row.spans[group][number], near, start, stop, is_gather=is_gather)
                if is_staged and is_gather:
                    slot.copy_(near, non_blocking=True)
            if not streams:
                return None
            return StreamFence([stream.record_event() for stream in streams.values()], row)


@contextmanager
def _on_streams(streams: Mapping[torch.device, torch.cuda.Stream], row: ExposedRow) -> Generator[None]:
    """Queue this thread's work on these streams, after the events of the row."""
    with ExitStack() as entered:
        for device in islice(streams, 1):
            torch.cuda.set_device(device)  # a new thread uses device 0, where it would take memory for a context
        for device, stream in streams.items():
            stream.wait_event(row.ready[device])
            entered.enter_context(torch.cuda.stream(stream))
        try:
            yield
        except BaseException:
            # The slot may be reused after a failure, so queued copies must end first.
            for stream in streams.values():
                stream.synchronize()
            raise


def _check_complete(spans: Sequence[Span], start: int, stop: int) -> None:
    """Refuse to gather an incomplete chunk, because this would store stale bytes of an earlier chunk."""
    found = sum(max(0, min(stop, span.stop) - max(start, span.start)) for span in spans)
    if found != stop - start:
        raise LookupError(f"only {found} of {stop - start} tokens are in the cache's tensors")


def _move(
    layer: CachedLayer, row: int, spans: Sequence[Span], near: torch.Tensor, start: int, stop: int, *, is_gather: bool
) -> None:
    """Copy K and V of columns [start, stop) between `spans` and `near`, which has the layout of the layer's payload."""
    tokens = near.numel() // (layer.key_bytes_per_token + layer.value_bytes_per_token)
    key_bytes = tokens * layer.key_bytes_per_token
    keys = near[:key_bytes].view(layer.dtype).view(layer.key_heads, tokens, layer.key_dim)
    values = near[key_bytes:].view(layer.dtype).view(layer.value_heads, tokens, layer.value_dim)
    for span in spans:
        first, last = max(start, span.start), min(stop, span.stop)
        if first >= last:
            continue
        here, there = slice(first - span.start, last - span.start), slice(first - start, last - start)
        for engine, slot in ((span.keys, keys), (span.values, values)):
            source, target = slot[:, there], engine.detach()[row, :, here]
            if is_gather:
                source, target = target, source
            if layer.device.type == "cpu":
                np.copyto(_numpy(target), _numpy(source))
            else:
                target.copy_(source)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.view(_SAME_SIZE[tensor.element_size()]).numpy()
