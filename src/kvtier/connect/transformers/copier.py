"""Moves chunks between the library's cache tensors and host slots. Called from mover threads.

`blocks` is (first token, token after the last) of a row. A request is one row of one cache; the copier knows it from
`expose` until `forget`, and keeps its tensors alive for that time.

On the CPU a copy is complete on return. It is made with numpy, because torch would start a team of threads in every
mover thread and take the processor from the model. On a device a `StagedCopy` makes it: it first waits for
what the engine had queued when the request was exposed. The fence is an event behind the copy.

A load whose layers are waited for one by one (`LayerReadiness`) goes over a `LayerOrder`, lowest layer first.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connect.transformers.caches import CachedLayer, CacheShape, Span, Spans
from kvtier.connect.transformers.parts import SpanPlan, Step, chunk_pieces, extents, span_plan, steps_of
from kvtier.device.base import Fence
from kvtier.device.copy_descriptors import joined
from kvtier.device.layers import ChunkScatter, LayerOrder, LayerReadiness
from kvtier.device.page_lock import cuda_page_lock
from kvtier.device.staged_copy import PayloadPart, StagedCopy
from kvtier.device.streams import Event
from kvtier.layout import KvLayout
from kvtier.runtime.arena import PageLock
from kvtier.types import RequestId

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a KV number: bytes are moved, whatever they mean, and numpy knows no bfloat16."""

CPU_WORKERS = 2
"""Threads that copy at the same time on a CPU; more take the processor from the model."""

MOVED_AT_ONCE = 64
"""Chunks whose layers one thread gives to a device before others have a say."""

Plans: TypeAlias = dict[tuple[int, int], tuple[SpanPlan, ...]]

_SETTLE_S = 1e-3

StagedCopyOf: TypeAlias = Callable[[torch.device], StagedCopy | None]
"""What moves bytes to and from a device; None where a thread can do it itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a cache: where the tokens of one request lie."""

    row: int
    pad: int
    spans: Spans
    """For each group, for each of its layers, the runs of columns that there are."""
    readiness: LayerReadiness | None
    """Who waits for single layers; None when nobody does."""
    ready: dict[torch.device, Event]
    """For each device with stages, an event behind all that the engine had queued on these tensors."""
    plans: dict[tuple[int, int], tuple[SpanPlan, ...]] = field(
        default_factory=dict[tuple[int, int], "tuple[SpanPlan, ...]"]
    )
    """For each (group, layer) that was asked for, where its spans lie."""


class Fences:
    """Events behind the copies of one chunk, one for each device."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events


class _Carried(ChunkScatter):
    """A chunk that is scattered in layer order."""

    def __init__(self, chunk: "_Chunk", row: Row, group: int, payload: memoryview, steps: Sequence[Step]) -> None:
        # Not beside chunks of another load: its tensors may be younger than what this one's are ready after.
        super().__init__((group, row.readiness), [step.rank for step in steps])
        self.chunk, self.row, self.group, self.payload = chunk, row, group, payload
        self.events: dict[torch.device, Event] = {}


class CacheCopier:
    """Gathers and scatters chunks of the rows that were exposed. Thread-safe.

    Args:
        shape: the model's KV groups.
        layout: their layout, made of `shape`.
        staged_copy_of: what moves bytes on a device; tests give a device in threads.
    """

    def __init__(self, shape: CacheShape, layout: KvLayout, staged_copy_of: StagedCopyOf | None = None) -> None:
        self._shape = shape
        self._layout = layout
        self._rows: dict[RequestId, Row] = {}
        self._lock = threading.Lock()
        self._gathers = threading.BoundedSemaphore(CPU_WORKERS)
        devices = dict.fromkeys(layer.device for layer in shape.layers)
        found = {device: (staged_copy_of or _staged_copy)(device) for device in devices}
        self._staged_copies: dict[torch.device, StagedCopy] = {
            device: staged for device, staged in found.items() if staged is not None
        }
        self._steps = [steps_of(layers, told) for layers, told in zip(shape.groups, layout.groups, strict=True)]
        on_device = bool(self._staged_copies)
        # One thread gives work to a device, so that an event behind the last copy is behind all before it.
        self._layer_order = LayerOrder(
            self._carry, at_once=MOVED_AT_ONCE if on_device else 1, workers=1 if on_device else CPU_WORKERS
        )

    def expose(
        self, request: RequestId, row: int, pad: int, spans: Spans, readiness: LayerReadiness | None = None
    ) -> None:
        """Let `request` be copied from and to these tensors until `forget`.

        Args:
            request: a row's load or store.
            row: its number in the tensors.
            pad: columns of padding before its first token.
            spans: the tensors.
            readiness: told of each layer that a scatter has brought, or is about to.
        """
        ready = {device: staged.now() for device, staged in self._staged_copies.items()}
        with self._lock:
            self._rows[request] = Row(row, pad, spans, readiness, ready)

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
        row, chunk = self._chunk(request, group, blocks, is_gather=True)
        with self._gathers:
            return self._at_once(row, chunk, group, payload, lambda staged, parts, after: staged.gather(parts, after))

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy `payload` into the tokens `blocks` of a row, as far as its tensors have room for them.

        Raises:
            LookupError: the request is not exposed.
            ValueError: `blocks` is no run of at most a chunk's tokens.
        """
        row, chunk = self._chunk(request, group, blocks, is_gather=False)
        if row.readiness is None:
            return self._at_once(row, chunk, group, payload, lambda staged, parts, after: staged.scatter(parts, after))
        job = _Carried(chunk, row, group, payload, self._steps[group])
        try:
            self._layer_order.run(job)
        except BaseException:
            _settle(job.events.values())
            raise
        return Fences(list(job.events.values())) if job.events else None

    def done(self, fence: Fence) -> bool:
        """Whether the copy behind `fence` is complete."""
        return not isinstance(fence, Fences) or all(event.query() for event in fence.events)

    def _chunk(
        self, request: RequestId, group: int, blocks: tuple[int, ...], *, is_gather: bool
    ) -> "tuple[Row, _Chunk]":
        with self._lock:
            row = self._rows.get(request)
        if row is None:
            raise LookupError(f"request {request!r} is not exposed to the copier")
        start, stop = blocks
        if not 0 <= start < stop <= start + self._layout.chunk_tokens:
            raise ValueError(f"blocks {blocks} is no run of 1 to {self._layout.chunk_tokens} tokens")
        chunk = _Chunk(row, row.pad + start, row.pad + stop, self._layout.chunk_tokens, is_gather=is_gather)
        for spans in row.spans[group]:
            chunk.check(spans)
        return row, chunk

    def _at_once(
        self,
        row: Row,
        chunk: "_Chunk",
        group: int,
        payload: memoryview,
        begin: Callable[[StagedCopy, Sequence[PayloadPart], Event], Event],
    ) -> Fence | None:
        """Copy all layers, in as few calls as there are devices."""
        parts: dict[torch.device, list[PayloadPart]] = {}
        for step in self._steps[group]:
            if step.device not in self._staged_copies:
                self._copy(chunk, row, group, step, payload)
            else:
                parts.setdefault(step.device, []).extend(self._parts(chunk, row, group, step, payload))
        events: list[Event] = []
        try:
            for device, told in parts.items():
                events.append(begin(self._staged_copies[device], told, row.ready[device]))
        except BaseException:
            _settle(events)
            raise
        return Fences(events) if events else None

    def _carry(self, jobs: Sequence[ChunkScatter]) -> None:
        """Scatter the next step of jobs that are at the same one."""
        carried = [job for job in jobs if isinstance(job, _Carried)]
        group, step = carried[0].group, self._steps[carried[0].group][carried[0].step]
        staged = self._staged_copies.get(step.device)
        events: list[Event] = []
        if staged is None:
            for job in carried:
                self._copy(job.chunk, job.row, group, step, job.payload)
        else:
            # The tensors of all rows of a load were there before the first was exposed.
            parts = [part for job in carried for part in self._parts(job.chunk, job.row, group, step, job.payload)]
            events = [staged.scatter(parts, carried[-1].row.ready[step.device])]
            for job in carried:
                job.events[step.device] = events[0]
        readiness = carried[0].row.readiness
        if readiness is not None:
            readiness.arrived(step.layers, len(carried), events)

    def _copy(self, chunk: "_Chunk", row: Row, group: int, step: Step, payload: memoryview) -> None:
        offsets = self._layout.groups[group].layer_offsets
        for number in range(step.first, step.stop):
            chunk.copy(self._shape.groups[group][number], row.spans[group][number], payload, offsets[number])

    def _parts(self, chunk: "_Chunk", row: Row, group: int, step: Step, payload: memoryview) -> Iterator[PayloadPart]:
        layout = self._layout.groups[group]
        for first, stop, begin, end in extents(layout, step.first, step.stop):
            offsets = [offset - begin for offset in layout.layer_offsets[first:stop]]
            pieces = [
                chunk_pieces(self._plans(row, group, number), chunk.start, chunk.stop, at)
                for number, at in zip(range(first, stop), offsets, strict=True)
            ]
            yield PayloadPart(payload[begin:end], pieces[0] if len(pieces) == 1 else joined(pieces))

    def _plans(self, row: Row, group: int, number: int) -> tuple[SpanPlan, ...]:
        # Two threads may make the same plan; either is right.
        known = row.plans.get((group, number))
        if known is None:
            layer = self._shape.groups[group][number]
            known = row.plans[group, number] = tuple(
                span_plan(layer, span, row.row, self._layout.chunk_tokens) for span in row.spans[group][number]
            )
        return known


class _Chunk:
    """One chunk of one row on its way."""

    def __init__(self, row: Row, start: int, stop: int, chunk_tokens: int, *, is_gather: bool) -> None:
        self._row, self.start, self.stop = row, start, stop
        self._chunk_tokens = chunk_tokens
        self._is_gather = is_gather

    def check(self, spans: Sequence[Span]) -> None:
        """Refuse to gather what is not all there: bytes of an earlier chunk would leave with it."""
        found = sum(max(0, min(self.stop, span.stop) - max(self.start, span.start)) for span in spans)
        if self._is_gather and found != self.stop - self.start:
            raise LookupError(f"only {found} of {self.stop - self.start} tokens are in the cache's tensors")

    def copy(self, layer: CachedLayer, spans: Sequence[Span], payload: memoryview, offset: int) -> None:
        """Copy one layer's K and V between `spans` and its part of `payload`, which begins at `offset`."""
        tokens = self._chunk_tokens
        key_bytes, value_bytes = tokens * layer.key_bytes_per_token, tokens * layer.value_bytes_per_token
        slot_keys = _typed(payload[offset : offset + key_bytes], layer, layer.key_heads, layer.key_dim)
        payload_values = payload[offset + key_bytes : offset + key_bytes + value_bytes]
        slot_values = _typed(payload_values, layer, layer.value_heads, layer.value_dim)
        for span in spans:
            start, stop = max(self.start, span.start), min(self.stop, span.stop)
            if start >= stop:
                continue
            here, there = slice(start - span.start, stop - span.start), slice(start - self.start, stop - self.start)
            self._move(span.keys[self._row.row, :, here], slot_keys[:, there])
            self._move(span.values[self._row.row, :, here], slot_values[:, there])

    def _move(self, engine: torch.Tensor, slot: torch.Tensor) -> None:
        target, source = (slot, engine) if self._is_gather else (engine, slot)
        np.copyto(_numpy(target), _numpy(source))


def _settle(events: Iterable[Event]) -> None:
    """Wait for copies whose chunk has failed: until they have ended, nobody else may have its slot."""
    for event in events:
        while not event.query():
            time.sleep(_SETTLE_S)


def _staged_copy(device: torch.device) -> StagedCopy | None:
    if device.type == "cpu":
        return None
    from kvtier.device.cuda import CudaStreams  # noqa: PLC0415 - needs a driver

    return StagedCopy(CudaStreams(device))


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
