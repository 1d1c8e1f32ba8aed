"""The bytes of each layer's pages, as views of vLLM's own memory.

vLLM registers one tensor for each layer, [blocks, heads, tokens, content] with strides that follow the engine's KV
layout. What a page is, and where it lies, is told by vLLM's configuration; a view that disagrees is refused, since
bytes copied on a guess would be wrong tokens later. A page whose parts lie apart (layouts that put heads outside of
blocks) is read piece by piece, in the order in which the pieces lie in memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kvtier.connect.vllm.geometry import Geometry, TableLayout
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Layer, plain_name
from kvtier.errors import UnsupportedModelError
from kvtier.layout import KvLayout

BlockIds = Sequence[Sequence[int]]
"""For each table of one of our groups the ids of its blocks."""


class Stack(NamedTuple):
    """Layers that lie at equal distances, in the engine as well as in a payload: one copy takes them all."""

    pages: torch.Tensor
    """uint8 [layers, blocks of the engine, pieces of a page ..., bytes of a piece]."""
    offset: int
    """Where the first layer begins in a payload."""
    step: int
    """Bytes from one layer to the next in a payload."""


@dataclass(frozen=True, slots=True)
class TablePages:
    """The pages of one vLLM group's layers."""

    blocks: int
    """Blocks that an address names."""
    page_bytes: int
    stacks: tuple[Stack, ...]


class EnginePages(NamedTuple):
    """All pages of one worker, and what they are called."""

    groups: tuple[tuple[TablePages, ...], ...]
    """For each of our groups, its tables."""
    layout: KvLayout
    """The geometry's layout, with what only a worker knows of the bytes."""
    block_count: int
    """Blocks of the engine; ids are 0, the null block, to this, exclusive."""
    device: torch.device


def engine_pages(
    geometry: Geometry, config: KvCacheConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> EnginePages:
    """The pages of a worker.

    Args:
        geometry: made of the same `config`.
        config: the worker's `KVCacheConfig`.
        tensors: what vLLM registers: for each layer its view.
        layers: the model's layers, `static_forward_context`, which know the backend that writes their pages.

    Raises:
        UnsupportedModelError: a view is not what, or where, the configuration says.
    """
    starts = _starts(config)
    found: dict[str, _Pages] = {}
    for group in geometry.groups:
        for table in group.tables:
            for name in table.layers:
                if name not in tensors:
                    raise UnsupportedModelError(f"vLLM registered no KV tensor for layer {name}")
                found[name] = _pages(name, tensors[name], table, starts[name], config.num_blocks)
    device = next(iter(found.values())).view.device
    if len({(pages.view.device, pages.shift) for pages in found.values()}) > 1:
        raise UnsupportedModelError("vLLM's KV tensors do not lie in one allocation, as its configuration says")
    details = {name: f"{_backend(layers.get(name), device)} {pages.cut}".rstrip() for name, pages in found.items()}
    layout = geometry.layout_with(details)
    groups: list[tuple[TablePages, ...]] = []
    for group, told in zip(geometry.groups, layout.groups, strict=True):
        offsets = iter(told.layer_offsets)
        tables = [[(found[name].view, next(offsets)) for name in table.layers] for table in group.tables]
        groups.append(
            tuple(
                TablePages(table.blocks, table.page_bytes, tuple(_stacks(placed)))
                for table, placed in zip(group.tables, tables, strict=True)
            )
        )
    return EnginePages(tuple(groups), layout, config.num_blocks, device)


def _stacks(placed: list[tuple[torch.Tensor, int]]) -> Iterator[Stack]:
    """All layers in one stack, or each in its own where their distances differ.

    Args:
        placed: (pages, offset in a payload) of each layer.
    """
    starts = [(int(view.storage_offset()), offset) for view, offset in placed]
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(starts)}
    view, offset = placed[0]
    if len(steps) > 1 or any(step < 0 for step, _ in steps):
        for each, at in placed:
            yield Stack(each.unsqueeze(0), at, 0)
        return
    step, slot_step = steps.pop() if steps else (0, 0)
    stacked = view.as_strided((len(placed), *view.shape), (step, *view.stride()), view.storage_offset())
    yield Stack(stacked, offset, slot_step)


class _Pages(NamedTuple):
    view: torch.Tensor
    shift: int
    """Where vLLM's allocation begins in the tensor's storage, in bytes."""
    cut: str
    """How the kernel divides a block, where it does."""


def _starts(config: KvCacheConfig) -> dict[str, tuple[int, int]]:
    """For each layer its (offset, block stride) in the worker's KV memory, in bytes."""
    return {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }


def _pages(name: str, tensor: object, table: TableLayout, start: tuple[int, int], block_count: int) -> _Pages:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
        told = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedModelError(f"layer {name}: KV is {told}; allowed: a tensor [blocks, heads, tokens, content]")
    width = tensor.element_size()
    parts, rest = divmod(tensor.shape[0], block_count)
    if rest or (tensor.stride(3) != 1 and tensor.shape[3] > 1):
        shape, stride = list(tensor.shape), list(tensor.stride())
        raise UnsupportedModelError(f"layer {name}: KV of shape {shape} and strides {stride} for {block_count} blocks")
    sizes = [parts, *tensor.shape[1:3], tensor.shape[3] * width]
    strides = [tensor.stride(0) * width, tensor.stride(1) * width, tensor.stride(2) * width, 1]
    shift = int(tensor.storage_offset()) * width - start[0]
    found = tensor.stride(0) * width * parts, math.prod(sizes)
    if shift < 0 or found != (start[1], table.page_bytes):
        raise UnsupportedModelError(
            f"layer {name}: vLLM's KV tensor begins {shift} bytes after where its configuration says, with (block "
            f"stride, page bytes) {found} instead of {(start[1], table.page_bytes)}"
        )
    pieces = _merged(sizes, strides)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        start[0] + shift,
        (block_count, *(size for size, _ in pieces)),
        (start[1], *(stride for _, stride in pieces)),
    )
    return _Pages(view, shift, f"in {parts} parts" if parts > 1 else "")


def _merged(sizes: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """The dimensions of a page from the outermost in memory to the innermost, those without gaps taken together."""
    dims = sorted(((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in reversed(dims or [(1, 1)]):
        if merged and stride == merged[0][0] * merged[0][1]:
            merged[0] = (merged[0][0] * size, merged[0][1])
        else:
            merged.insert(0, (size, stride))
    return merged


def _backend(layer: Layer, device: torch.device) -> str:
    """Who wrote the bytes. On a CPU the kernels pack them for the vector unit they run on."""
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    told = [str(backend.get_name()) if backend is not None else type(layer).__name__]
    if device.type == "cpu":
        told += [plain_name(getattr(layer, "isa", "")), torch.backends.cpu.get_cpu_capability()]
    return ":".join(filter(None, told))
