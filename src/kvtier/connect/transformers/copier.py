"""Copies chunks between the library's cache tensors and host slots. Called from transfer threads.

`blocks` is (first token, token after the last) of a row. A request is one row of one cache; the copier holds its
tensors from `expose` until `forget`.

On the CPU a copy is complete on return. It uses numpy: torch would start a thread pool in every transfer thread and
take cores from the model. On a device a `StagedCopy` makes it, after everything that the engine had queued when the
request was exposed. The fence is an event behind the copy. A layerwise load (`LayerReadiness`) runs in `LayerOrder`,
lowest layer first.

A layer's share of a payload is K as [head, token, dim], then V likewise. In the tensors each head's tokens are
contiguous, or, in the records of a window layer, each token's heads.
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
from kvtier.device.copier import Fence
from kvtier.device.copy_descriptors import CopyDescriptors, joined, table
from kvtier.device.layers import ChunkScatter, LayerOrder, LayerReadiness
from kvtier.device.staged_copy import PayloadPart, StagedCopy
from kvtier.device.streams import Event
from kvtier.layout import GroupLayout, KvLayout
from kvtier.types import RequestId

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a KV number, since numpy has no bfloat16."""

CPU_WORKERS = 2
"""Threads that copy at the same time on a CPU. More would take cores from the model."""

MOVED_AT_ONCE = 64
"""Chunks whose next layers one thread copies to a device at once."""

STEP_BYTES_MIN = 1 << 20
"""Smaller layers are copied together with the next; smaller copies do not saturate the bus."""

_SETTLE_S = 1e-3

Numbers: TypeAlias = npt.NDArray[np.int64]
StagedCopyOf: TypeAlias = Callable[[torch.device], StagedCopy | None]
"""Makes the copier of a device; None if the transfer threads can copy there themselves."""


# ---- where the bytes of a chunk are --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Layers of a group that are copied together."""

    first: int
    """Position in the group."""
    stop: int
    rank: int
    """Number of the first layer in the model."""
    layers: tuple[int, ...]
    """Numbers in the model."""
    device: torch.device


def layer_steps(layers: Sequence[CachedLayer], layout: GroupLayout) -> tuple[LayerStep, ...]:
    """Cut a group's layers into steps, each on one device."""
    steps: list[LayerStep] = []
    first = 0
    for stop in range(1, len(layers) + 1):
        is_end = stop == len(layers) or layers[stop].device != layers[first].device
        if is_end or sum(layout.layer_bytes[first:stop]) >= STEP_BYTES_MIN:
            numbers = tuple(layer.index for layer in layers[first:stop])
            steps.append(LayerStep(first, stop, numbers[0], numbers, layers[first].device))
            first = stop
    return tuple(steps)


def extents(layout: GroupLayout, first: int, stop: int) -> list[tuple[int, int, int, int]]:
    """(first layer, layer after the last, offset, end) of runs of layers without padding between them in a payload."""
    runs: list[tuple[int, int, int, int]] = []
    for layer in range(first, stop):
        begin = layout.layer_offsets[layer]
        end = begin + layout.layer_bytes[layer]
        if runs and runs[-1][3] == begin:
            runs[-1] = (runs[-1][0], layer + 1, runs[-1][2], end)
        else:
            runs.append((layer, layer + 1, begin, end))
    return runs


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Addresses of one span of one layer of one row. Each array has a number per head of K, then per head of V."""

    start: int
    stop: int
    offsets: Numbers
    """Offset of the chunk's first token in the layer's share of a payload."""
    addresses: Numbers
    """Addresses of the span's first column."""
    token_bytes: Numbers
    """Stride of a token in a payload."""
    column_bytes: Numbers
    """Stride of a column in the tensor."""
    is_dense: bool
    """`token_bytes` equals `column_bytes`."""

    def pieces(self, begin: int, end: int, at: int) -> CopyDescriptors | None:
        """Copies for a chunk of columns [begin, end), its layer at `at` in its part; None without common columns."""
        first, last = max(begin, self.start), min(end, self.stop)
        if first >= last:
            return None
        offsets = self.offsets + (at + (first - begin) * self.token_bytes)
        addresses = self.addresses + (first - self.start) * self.column_bytes
        if self.is_dense:
            return table(offsets, addresses, (last - first) * self.token_bytes)
        tokens = np.arange(last - first)[None]
        return table(
            offsets[:, None] + tokens * self.token_bytes[:, None],
            addresses[:, None] + tokens * self.column_bytes[:, None],
            self.token_bytes[:, None],
        )


def span_plan(layer: CachedLayer, span: Span, row: int, chunk_tokens: int) -> SpanPlan:
    """Addresses of the K and V of one row of a span.

    Raises:
        ValueError: the numbers of a head are not contiguous.
    """
    columns: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    base = 0
    for tensor, heads, dim in (
        (span.keys, layer.key_heads, layer.key_dim),
        (span.values, layer.value_heads, layer.value_dim),
    ):
        size = tensor.element_size()
        _, per_head, per_column, per_number = tensor.stride()
        if per_number != 1 and dim > 1:
            raise ValueError(f"layer {layer.index}: KV of strides {tensor.stride()}; allowed: contiguous heads")
        number = np.arange(heads, dtype=np.int64)
        ones = np.ones(heads, np.int64)
        begin = tensor.data_ptr() + row * tensor.stride(0) * size
        columns.append(
            (
                base + number * (chunk_tokens * dim * size),
                begin + number * (per_head * size),
                ones * (dim * size),
                ones * (per_column * size),
            )
        )
        base += heads * chunk_tokens * dim * size
    offsets, addresses, token_bytes, column_bytes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    is_dense = bool((token_bytes == column_bytes).all())
    return SpanPlan(span.start, span.stop, offsets, addresses, token_bytes, column_bytes, is_dense)


def chunk_pieces(plans: Sequence[SpanPlan], begin: int, end: int, at: int) -> CopyDescriptors:
    """Copies for one layer of a chunk of columns [begin, end), by offset in a part where the layer is at `at`."""
    found = [pieces for plan in plans if (pieces := plan.pieces(begin, end, at)) is not None]
    if len(found) == 1:
        return found[0]
    every = joined(found)
    return every[np.argsort(every[:, 0], kind="stable")]


# ---- the copier ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExposedRow:
    """One row of a cache: the tensors of one request."""

    row: int
    pad: int
    spans: Spans
    readiness: LayerReadiness | None
    """Readiness of a layerwise load's layers; None for other requests."""
    ready: dict[torch.device, Event]
    """An event per device, behind everything that the engine had queued on these tensors."""
    plans: dict[tuple[int, int], tuple[SpanPlan, ...]] = field(
        default_factory=dict[tuple[int, int], "tuple[SpanPlan, ...]"]
    )
    """Copy plans by (group, layer), computed on demand."""


class Fences:
    """Events behind the copies of one chunk, one per device."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events


class _LayerwiseScatter(ChunkScatter):
    """A chunk that is scattered in layer order."""

    def __init__(
        self, chunk: "_ChunkCopy", row: ExposedRow, group: int, payload: memoryview, steps: Sequence[LayerStep]
    ) -> None:
        # Not together with chunks of another load, whose tensors may become ready later.
        super().__init__((group, row.readiness), [step.rank for step in steps])
        self.chunk, self.row, self.group, self.payload = chunk, row, group, payload
        self.events: dict[torch.device, Event] = {}


class CacheCopier:
    """Gathers and scatters chunks of exposed rows. Thread-safe.

    Args:
        shape: the model's KV groups.
        layout: the layout of `shape`.
        staged_copy_of: makes the copier of a device; tests simulate a device.
    """

    def __init__(self, shape: CacheShape, layout: KvLayout, staged_copy_of: StagedCopyOf | None = None) -> None:
        self._shape = shape
        self._layout = layout
        self._rows: dict[RequestId, ExposedRow] = {}
        self._lock = threading.Lock()
        self._gathers = threading.BoundedSemaphore(CPU_WORKERS)
        devices = dict.fromkeys(layer.device for layer in shape.layers)
        found = {device: (staged_copy_of or _staged_copy)(device) for device in devices}
        self._staged_copies: dict[torch.device, StagedCopy] = {
            device: staged for device, staged in found.items() if staged is not None
        }
        self._steps = [layer_steps(layers, group) for layers, group in zip(shape.groups, layout.groups, strict=True)]
        on_device = bool(self._staged_copies)
        # One thread submits all copies to a device, so an event behind the last copy is behind all earlier ones.
        self._layer_order = LayerOrder(
            self._scatter_step, at_once=MOVED_AT_ONCE if on_device else 1 if on_device else CPU_WORKERS
        )

    def expose(
        self, request: RequestId, row: int, pad: int, spans: Spans, readiness: LayerReadiness | None = None
    ) -> None:
        """Hold these tensors for copies of `request` until `forget`.

        Args:
            request: a row's load or store.
            row: its number in the tensors.
            pad: columns of padding before its first token.
            spans: the tensors.
            readiness: updated with each scattered layer.
        """
        ready = {device: staged.now() for device, staged in self._staged_copies.items()}
        with self._lock:
            self._rows[request] = ExposedRow(row, pad, spans, readiness, ready)

    def forget(self, request: RequestId) -> None:
        """Release the tensors of `request`; an unknown request is ignored."""
        with self._lock:
            self._rows.pop(request, None)

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy the tokens `blocks` of a row into `payload`.

        Raises:
            LookupError: the request is not exposed, or its tensors lack some of the tokens.
            ValueError: `blocks` is not a run of at most a chunk's tokens.
        """
        row, chunk = self._chunk(request, group, blocks, is_gather=True)
        with self._gathers:
            return self._at_once(row, chunk, group, payload, lambda staged, parts, after: staged.gather(parts, after))

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Copy `payload` into the tokens `blocks` of a row. Tokens outside of its tensors are skipped.

        Raises:
            LookupError: the request is not exposed.
            ValueError: `blocks` is not a run of at most a chunk's tokens.
        """
        row, chunk = self._chunk(request, group, blocks, is_gather=False)
        if row.readiness is None:
            return self._at_once(row, chunk, group, payload, lambda staged, parts, after: staged.scatter(parts, after))
        job = _LayerwiseScatter(chunk, row, group, payload, self._steps[group])
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
    ) -> "tuple[ExposedRow, _ChunkCopy]":
        with self._lock:
            row = self._rows.get(request)
        if row is None:
            raise LookupError(f"request {request!r} is not exposed to the copier")
        start, stop = blocks
        if not 0 <= start < stop <= start + self._layout.chunk_tokens:
            raise ValueError(f"blocks {blocks} is not a run of 1 to {self._layout.chunk_tokens} tokens")
        chunk = _ChunkCopy(row, row.pad + start, row.pad + stop, self._layout.chunk_tokens, is_gather=is_gather)
        for spans in row.spans[group]:
            chunk.check(spans)
        return row, chunk

    def _at_once(
        self,
        row: ExposedRow,
        chunk: "_ChunkCopy",
        group: int,
        payload: memoryview,
        begin: Callable[[StagedCopy, Sequence[PayloadPart], Event], Event],
    ) -> Fence | None:
        """Copy all layers, with one call per device."""
        parts: dict[torch.device, list[PayloadPart]] = {}
        for step in self._steps[group]:
            if step.device not in self._staged_copies:
                self._copy(chunk, row, group, step, payload)
            else:
                parts.setdefault(step.device, []).extend(self._parts(chunk, row, group, step, payload))
        events: list[Event] = []
        try:
            for device, found in parts.items():
                events.append(begin(self._staged_copies[device], found, row.ready[device]))
        except BaseException:
            _settle(events)
            raise
        return Fences(events) if events else None

    def _scatter_step(self, jobs: Sequence[ChunkScatter]) -> None:
        """Scatter the next step of jobs that are at the same step."""
        scatters = [job for job in jobs if isinstance(job, _LayerwiseScatter)]
        group, step = scatters[0].group, self._steps[scatters[0].group][scatters[0].step]
        staged = self._staged_copies.get(step.device)
        events: list[Event] = []
        if staged is None:
            for job in scatters:
                self._copy(job.chunk, job.row, group, step, job.payload)
        else:
            # All rows of a load have their tensors before the first is exposed.
            parts = [part for job in scatters for part in self._parts(job.chunk, job.row, group, step, job.payload)]
            events = [staged.scatter(parts, scatters[-1].row.ready[step.device])]
            for job in scatters:
                job.events[step.device] = events[0]
        readiness = scatters[0].row.readiness
        if readiness is not None:
            readiness.arrived(step.layers, len(scatters), events)

    def _copy(self, chunk: "_ChunkCopy", row: ExposedRow, group: int, step: LayerStep, payload: memoryview) -> None:
        offsets = self._layout.groups[group].layer_offsets
        for number in range(step.first, step.stop):
            chunk.copy(self._shape.groups[group][number], row.spans[group][number], payload, offsets[number])

    def _parts(
        self, chunk: "_ChunkCopy", row: ExposedRow, group: int, step: LayerStep, payload: memoryview
    ) -> Iterator[PayloadPart]:
        layout = self._layout.groups[group]
        for first, stop, begin, end in extents(layout, step.first, step.stop):
            offsets = [offset - begin for offset in layout.layer_offsets[first:stop]]
            pieces = [
                chunk_pieces(self._plans(row, group, number), chunk.start, chunk.stop, at)
                for number, at in zip(range(first, stop), offsets, strict=True)
            ]
            yield PayloadPart(payload[begin:end], pieces[0] if len(pieces) == 1 else joined(pieces))

    def _plans(self, row: ExposedRow, group: int, number: int) -> tuple[SpanPlan, ...]:
        # Two threads may compute the same plan, with equal results.
        known = row.plans.get((group, number))
        if known is None:
            layer = self._shape.groups[group][number]
            known = row.plans[group, number] = tuple(
                span_plan(layer, span, row.row, self._layout.chunk_tokens) for span in row.spans[group][number]
            )
        return known


class _ChunkCopy:
    """The copy of one chunk of one row."""

    def __init__(self, row: ExposedRow, start: int, stop: int, chunk_tokens: int, *, is_gather: bool) -> None:
        self._row, self.start, self.stop = row, start, stop
        self._chunk_tokens = chunk_tokens
        self._is_gather = is_gather

    def check(self, spans: Sequence[Span]) -> None:
        """Refuse to gather an incomplete chunk, which would store stale bytes of an earlier chunk."""
        found = sum(max(0, min(self.stop, span.stop) - max(self.start, span.start)) for span in spans)
        if self._is_gather and found != self.stop - self.start:
            raise LookupError(f"only {found} of {self.stop - self.start} tokens are in the cache's tensors")

    def copy(self, layer: CachedLayer, spans: Sequence[Span], payload: memoryview, offset: int) -> None:
        """Copy one layer's K and V between `spans` and `payload`, from `offset` on."""
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
    """Wait for the running copies of a failed chunk: until they end, its slot must not be reused."""
    for event in events:
        while not event.query():
            time.sleep(_SETTLE_S)


def _staged_copy(device: torch.device) -> StagedCopy | None:
    if device.type == "cpu":
        return None
    from kvtier.device.cuda import CudaStreams  # noqa: PLC0415 - needs a driver

    return StagedCopy(CudaStreams(device))


def _typed(part: memoryview, layer: CachedLayer, heads: int, dim: int) -> torch.Tensor:
    return torch.frombuffer(part, dtype=torch.uint8).view(layer.dtype).view(heads, -1, dim)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.detach().view(_SAME_SIZE[tensor.element_size()]).numpy()
