"""Where the bytes of a chunk lie in the library's tensors, as tables for a device's kernel.

A layer's share of a payload is K as [head, token, dim], then V likewise; in the tensors each head's tokens lie
together, or, in what a window layer recorded, each token's heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connect.transformers.caches import CachedLayer, Span
from kvtier.device.copy_descriptors import CopyDescriptors, joined, table
from kvtier.layout import GroupLayout

Numbers = npt.NDArray[np.int64]

STEP_BYTES_MIN = 1 << 20
"""Layers of less are moved together with the next: smaller copies do not fill the bus."""


@dataclass(frozen=True, slots=True)
class Step:
    """Layers of a group that move together."""

    first: int
    """Position in the group."""
    stop: int
    rank: int
    """The first one's number in the model."""
    layers: tuple[int, ...]
    """All numbers in the model."""
    device: torch.device


def steps_of(layers: Sequence[CachedLayer], layout: GroupLayout) -> tuple[Step, ...]:
    """Cut a group's layers into steps, each of one device."""
    steps: list[Step] = []
    first = 0
    for stop in range(1, len(layers) + 1):
        is_end = stop == len(layers) or layers[stop].device != layers[first].device
        if is_end or sum(layout.layer_bytes[first:stop]) >= STEP_BYTES_MIN:
            numbers = tuple(layer.index for layer in layers[first:stop])
            steps.append(Step(first, stop, numbers[0], numbers, layers[first].device))
            first = stop
    return tuple(steps)


def extents(layout: GroupLayout, first: int, stop: int) -> list[tuple[int, int, int, int]]:
    """(first layer, layer after the last, offset, end) of runs of layers that lie in a payload without padding."""
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
    """One span of one layer of one row. Of each head of K, then of V, one number in each array."""

    start: int
    stop: int
    offsets: Numbers
    """Of the chunk's first token in the layer's share of a payload."""
    addresses: Numbers
    """Of the span's first column."""
    token_bytes: Numbers
    """From one token to the next in a payload: what one has."""
    column_bytes: Numbers
    """From one column to the next in the tensor."""
    is_dense: bool
    """Whether these are the same."""

    def pieces(self, begin: int, end: int, at: int) -> CopyDescriptors | None:
        """The pieces of a chunk of columns [begin, end) whose layer lies at `at` in its part; None when it has none."""
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
    """Where the K and V of one row of a span lie.

    Raises:
        ValueError: the numbers of a head do not lie together.
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
            raise ValueError(f"layer {layer.index}: KV of strides {tensor.stride()}; allowed: heads in one piece")
        number = np.arange(heads, dtype=np.int64)
        whole = np.ones(heads, np.int64)
        begin = tensor.data_ptr() + row * tensor.stride(0) * size
        columns.append(
            (
                base + number * (chunk_tokens * dim * size),
                begin + number * (per_head * size),
                whole * (dim * size),
                whole * (per_column * size),
            )
        )
        base += heads * chunk_tokens * dim * size
    offsets, addresses, token_bytes, column_bytes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    is_dense = bool((token_bytes == column_bytes).all())
    return SpanPlan(span.start, span.stop, offsets, addresses, token_bytes, column_bytes, is_dense)


def chunk_pieces(plans: Sequence[SpanPlan], begin: int, end: int, at: int) -> CopyDescriptors:
    """The pieces of one layer of a chunk of columns [begin, end), by their offsets in a part where it lies at `at`."""
    found = [pieces for plan in plans if (pieces := plan.pieces(begin, end, at)) is not None]
    if len(found) == 1:
        return found[0]
    every = joined(found)
    return every[np.argsort(every[:, 0], kind="stable")]
