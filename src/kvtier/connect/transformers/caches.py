"""Describes a model's cached layers and the layout of their bytes in a chunk, and fills the library's caches.

A layer's part of a chunk is K as a contiguous [head, token, dim] array, followed by V in the same form. Layers with
full attention form one KV group, which requires all chunks. Layers with the same sliding window form a group that
requires only the last window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from kvtier.layout import Axes, GroupLayout, History, KvLayout, Window, run_of

Model: TypeAlias = Any
"""A `PreTrainedModel`. Its attributes depend on the model's class, so they cannot be typed."""

ModelConfig: TypeAlias = Any
"""A `PreTrainedConfig`, usually the decoder's."""

Layer: TypeAlias = Any
"""A layer of the library's cache."""

Output: TypeAlias = Any
"""The output of `generate`: a tensor of sequences, or an object with `sequences`."""

Argument: TypeAlias = Any
"""An argument that kvtier only forwards."""


def integers(tensor: torch.Tensor) -> list[int]:
    """Return the values of a one-dimensional tensor of integers."""
    return cast("Argument", tensor).tolist()


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer of the model's cache that contains KV."""

    index: int
    """The layer's position in the library's cache."""
    window: int | None
    """Number of tokens that a query attends to, including its own; None for full attention."""
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def key_bytes_per_token(self) -> int:
        """Bytes of a token's K, over all heads."""
        return self.key_heads * self.key_dim * self.dtype.itemsize

    @property
    def value_bytes_per_token(self) -> int:
        """Bytes of a token's V, over all heads."""
        return self.value_heads * self.value_dim * self.dtype.itemsize

    @property
    def past_tokens(self) -> int | None:
        """Number of earlier tokens that a query attends to; None for all."""
        return None if self.window is None else self.window - 1

    @property
    def pages(self) -> str:
        """The name of the layer's byte layout."""
        keys, values = f"{self.key_heads}x{self.key_dim}", f"{self.value_heads}x{self.value_dim}"
        return f"{str(self.dtype).removeprefix('torch.')}/K={keys}/V={values}"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layers of a model's cache, divided into KV groups."""

    config: ModelConfig
    """The decoder's configuration, from which the library creates an empty cache."""
    groups: tuple[tuple[CachedLayer, ...], ...]
    """The group with full attention, if any, and then one group per window size."""

    @property
    def layers(self) -> Iterator[CachedLayer]:
        """All layers that contain KV, group by group."""
        return (layer for group in self.groups for layer in group)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return any(layer.window is not None for layer in self.layers)

    def layout(self, chunk_tokens: int) -> KvLayout:
        """Return the layout of a chunk of `chunk_tokens` tokens."""
        return KvLayout(chunk_tokens, tuple(_group_layout(group, chunk_tokens) for group in self.groups))


def group_layers(config: object, layers: Sequence[CachedLayer]) -> CacheShape:
    """Divide `layers` into KV groups."""
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    groups = [tuple(layer for layer in layers if layer.window == window) for window in (None, *windows)]
    return CacheShape(config, tuple(group for group in groups if group))


def _group_layout(group: tuple[CachedLayer, ...], chunk_tokens: int) -> GroupLayout:
    past_tokens = group[0].past_tokens
    runs = tuple(
        (
            run_of("keys", layer.dtype, chunk_tokens * layer.key_bytes_per_token),
            run_of("values", layer.dtype, chunk_tokens * layer.value_bytes_per_token),
        )
        for layer in group
    )
    names = "head", "token", "channel"
    axes = tuple(
        (
            Axes(names, (layer.key_heads, chunk_tokens, layer.key_dim)).fitting(keys),
            Axes(names, (layer.value_heads, chunk_tokens, layer.value_dim)).fitting(values),
        )
        for layer, (keys, values) in zip(group, runs, strict=True)
    )
    layer_bytes = tuple(sum(run.size_bytes for run in layer) for layer in runs)
    # Name layers of one shape only once.
    pages = [layer.pages for layer in group]
    shapes = pages[0] if len(set(pages)) == 1 else ",".join(pages)
    validity = History() if past_tokens is None else Window(past_tokens)
    pages_of = f"transformers/K[head,token,dim] V[head,token,dim]/{shapes}"
    return GroupLayout(validity, layer_bytes, pages_of, runs=runs, axes=axes)


@dataclass(frozen=True, slots=True)
class Span:
    """The K and V of one layer for a run of columns: [row, head, column, dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    """Column of the first token."""

    @property
    def stop(self) -> int:
        """Column after the last token."""
        return self.start + self.keys.shape[-2]


Spans: TypeAlias = tuple[tuple[tuple[Span, ...], ...], ...]
"""Runs of columns in order, per group and layer."""


class RecordingWindowLayer(DynamicSlidingWindowLayer):
    """The library's sliding-window layer, extended to record all its K and V.

    The library keeps only the last window, but most chunks of a prompt lie before it. Attention reads the library's
    own tensors, so results and speed do not change.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)  # pyright: ignore[reportUnknownMemberType]
        self.recorded: list[Span] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Argument, **kwargs: Argument
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the new K and V, then call the library."""
        start = self.recorded[-1].stop if self.recorded else self.get_seq_length()
        self.recorded.append(Span(_detached(key_states), _detached(value_states), start))
        return super().update(key_states, value_states, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]


def _detached(states: torch.Tensor) -> torch.Tensor:
    # Copy a slice of a fused projection, because the slice would keep the whole projection in memory.
    is_slice = states.untyped_storage().nbytes() > states.numel() * states.element_size()
    return states.clone(memory_format=torch.contiguous_format) if is_slice else states


def empty_cache(shape: CacheShape) -> DynamicCache:
    """Return the library's cache for this model, with recording window layers."""
    cache = DynamicCache(config=shape.config)
    for layer in shape.layers:
        if layer.window is not None:
            cache.layers[layer.index] = RecordingWindowLayer(layer.window)
    return cache


def blank_spans(shape: CacheShape, padding: Sequence[int], columns: int) -> Spans:
    """Return tensors for the leading `columns` columns of a cache, one run per layer. Loads fill them.

    Window layers have only the last columns. Padding columns are zero, so that masked values are finite.
    """
    # Other threads cannot write to tensors made in inference mode, which may be on here.
    with torch.inference_mode(mode=False):
        return tuple(tuple((_blank_span(layer, padding, columns),) for layer in group) for group in shape.groups)


def _blank_span(layer: CachedLayer, padding: Sequence[int], columns: int) -> Span:
    start = 0 if layer.past_tokens is None else max(0, columns - layer.past_tokens)
    rows, length = len(padding), columns - start
    keys = torch.empty((rows, layer.key_heads, length, layer.key_dim), dtype=layer.dtype, device=layer.device)
    values = torch.empty((rows, layer.value_heads, length, layer.value_dim), dtype=layer.dtype, device=layer.device)
    for row, pad in enumerate(padding):
        if pad > start:
            keys[row, :, : pad - start].zero_()
            values[row, :, : pad - start].zero_()
    return Span(keys, values, start)


def filled_cache(shape: CacheShape, spans: Spans, columns: int) -> DynamicCache:
    """Return the library's cache for the first `columns` columns, using the tensors of `blank_spans`."""
    cache = empty_cache(shape)
    for group, group_spans in zip(shape.groups, spans, strict=True):
        for cached, (span,) in zip(group, group_spans, strict=True):
            layer: Layer = cache.layers[cached.index]
            layer.lazy_initialization(span.keys, span.values)
            layer.keys, layer.values = span.keys, span.values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = columns
    return cache


def recorded_spans(shape: CacheShape, cache: DynamicCache, columns: int) -> Spans | None:
    """Return all KV of the first `columns` columns of `cache`.

    Returns:
        The spans; None if the cache has another length because the model replaced it with its own.
    """
    groups: list[tuple[tuple[Span, ...], ...]] = []
    for group in shape.groups:
        layers: list[tuple[Span, ...]] = []
        for cached in group:
            layer: Layer = cache.layers[cached.index]
            if layer.get_seq_length() != columns:
                return None
            is_window = isinstance(layer, RecordingWindowLayer)
            layers.append(_joined(layer.recorded) if is_window else (Span(layer.keys, layer.values, 0),))
        groups.append(tuple(layers))
    return tuple(groups)


_SMALL_TOKENS = 64


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join runs of short spans (decode steps), so that a chunk is not copied token by token."""
    joined: list[Span] = []
    for is_small, group in groupby(spans, lambda span: span.keys.shape[-2] < _SMALL_TOKENS):
        run = list(group)
        if not is_small:
            joined += run
            continue
        keys = torch.cat([span.keys for span in run], dim=-2)
        values = torch.cat([span.values for span in run], dim=-2)
        joined.append(Span(keys, values, run[0].start))
    return tuple(joined)
