"""Provides the bytes of each layer's pages as views of vLLM's KV memory.

vLLM registers one tensor per layer, [blocks, heads, tokens, content], with strides that follow the engine's KV layout.
vLLM's configuration says what a page is and where it is stored. A tensor that contradicts the configuration is refused,
because wrongly copied bytes would later produce wrong tokens. A page may have parts that are not contiguous (layouts
that put heads outside blocks). kvtier then reads the page in pieces, in memory order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kvtier.connect.vllm.geometry import Geometry, TableLayout, layer_starts
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Layer, plain_name
from kvtier.errors import UnsupportedModelError
from kvtier.layout import Axes, KvLayout

BlockIds = Sequence[Sequence[int]]
"""Block ids of each table of a group."""


class Stack(NamedTuple):
    """Layers at equal distances in both the engine and a payload, so that one copy moves all of them."""

    pages: torch.Tensor
    """uint8 [layers, blocks of the engine, pieces of a page ..., bytes of a piece]."""
    offset: int
    """Offset of the first layer in a payload."""
    step: int
    """Bytes from one layer to the next in a payload."""


@dataclass(frozen=True, slots=True)
class TablePages:
    """The pages of one vLLM group's layers."""

    blocks: int
    """Number of blocks in an address."""
    page_bytes: int
    stacks: tuple[Stack, ...]


class EnginePages(NamedTuple):
    """All pages of one worker."""

    groups: tuple[tuple[TablePages, ...], ...]
    """Tables of each group."""
    layout: KvLayout
    """The geometry's layout, with the details of this worker."""
    block_count: int
    """Number of the engine's blocks. Block 0 is the null block."""
    device: torch.device


def engine_pages(
    geometry: Geometry, config: KvCacheConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> EnginePages:
    """Return the pages of a worker.

    Args:
        geometry: the geometry of `config`.
        config: the worker's `KVCacheConfig`.
        tensors: the tensor that vLLM registers for each layer.
        layers: the model's layers, `static_forward_context`, which name their attention backend.

    Raises:
        UnsupportedModelError: a tensor contradicts the configuration.
    """
    starts = layer_starts(config)
    found: dict[tuple[int, str], _Pages] = {}
    for number, group in enumerate(geometry.groups):
        for table in group.tables:
            for name in table.layers:
                if name not in tensors:
                    raise UnsupportedModelError(f"vLLM registered no KV tensor for layer {name}")
                found[number, name] = _pages(name, tensors[name], table, starts[name], config.num_blocks)
    device = next(iter(found.values())).view.device
    if len({(pages.view.device, pages.shift) for pages in found.values()}) > 1:
        raise UnsupportedModelError("vLLM's KV tensors are not in one allocation, contrary to its configuration")
    details = {
        name: f"{backend_name(layers.get(name), device)} {pages.cut}".rstrip() for (_, name), pages in found.items()
    }
    axes = {
        name: pages.axes
        for (_, name), pages in found.items()
        if pages.axes is not None and _backend(layers.get(name)) in SIDE_BY_SIDE
    }
    layout = geometry.layout_with(details, axes)
    groups: list[tuple[TablePages, ...]] = []
    for number, group in enumerate(geometry.groups):
        offsets = iter(layout.groups[number].layer_offsets)
        tables = [[(found[number, name].view, next(offsets)) for name in table.layers] for table in group.tables]
        groups.append(
            tuple(
                TablePages(table.blocks, table.page_bytes, tuple(_stacks(placed)))
                for table, placed in zip(group.tables, tables, strict=True)
            )
        )
    return EnginePages(tuple(groups), layout, config.num_blocks, device)


def _stacks(placed: list[tuple[torch.Tensor, int]]) -> Iterator[Stack]:
    """Yield all layers in one stack, or one stack per layer if their distances differ.

    Args:
        placed: (pages, offset in a payload) of each layer.
    """
    if not placed:  # the pipeline stage has none of the table's layers
        return
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
    """Offset of vLLM's allocation in the tensor's storage, in bytes."""
    cut: str
    """How the kernel divides a block. Empty if it does not, or if a block's tokens are in one row anyway."""
    axes: Axes | None
    """The axes of a page, if the backend is one of `SIDE_BY_SIDE`."""


def _pages(name: str, tensor: object, table: TableLayout, start: tuple[int, int], block_count: int) -> _Pages:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
        found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedModelError(f"layer {name}: KV is {found}; allowed: a tensor [blocks, heads, tokens, content]")
    width = tensor.element_size()
    parts, rest = divmod(tensor.shape[0], block_count)
    if rest or (tensor.stride(3) != 1 and tensor.shape[3] > 1):
        shape, stride = list(tensor.shape), list(tensor.stride())
        raise UnsupportedModelError(
            f"layer {name}: KV of shape {shape} and strides {stride} is not {block_count} blocks"
        )
    sizes = [parts, *tensor.shape[1:3], tensor.shape[3] * width]
    strides = [tensor.stride(0) * width, tensor.stride(1) * width, tensor.stride(2) * width, 1]
    shift = int(tensor.storage_offset()) * width - start[0]
    found = tensor.stride(0) * width * parts, math.prod(sizes)
    if shift < 0 or found != (start[1], table.page_bytes * table.pieces):
        raise UnsupportedModelError(
            f"layer {name}: vLLM's KV tensor begins {shift} bytes after its configured offset, with (block stride, "
            f"page bytes) {found} instead of {(start[1], table.page_bytes * table.pieces)}"
        )
    pieces, first = _merged(sizes, strides), start[0] + shift
    if table.row_bytes and len(pieces) > 1:
        raise UnsupportedModelError(
            f"layer {name}: a page consists of the pieces (number, stride) {pieces}, so its tokens cannot be divided "
            "into shares. Set store.token_shares = 0"
        )
    if table.pieces > 1:
        pieces = [(table.page_bytes // table.row_bytes, table.pieces * table.row_bytes), (table.row_bytes, 1)]
        first += table.piece * table.row_bytes
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        first,
        (block_count, *(size for size, _ in pieces)),
        (start[1], *(stride for _, stride in pieces)),
    )
    cut = f"in {parts} parts" if parts > 1 and not table.row_bytes else ""
    return _Pages(view, shift, cut, _axes(table, parts, tensor, strides))


def _axes(table: TableLayout, parts: int, tensor: torch.Tensor, strides: list[int]) -> Axes | None:
    """Return the axes of a page of a backend in `SIDE_BY_SIDE`.

    Args:
        table: the vLLM group.
        parts: number of kernel blocks in a page.
        tensor: [kernel blocks, heads, tokens, content].
        strides: distances of its first three dimensions in bytes.
    """
    heads, tokens = tensor.shape[1], tensor.shape[2]
    if not table.channels or parts * tokens != table.block_tokens or (parts > 1 and strides[0] != max(strides)):
        return None
    if strides[1] > strides[2]:
        return Axes(("page", "head", "token", "side", "channel"), (parts, heads, tokens, 2, table.channels))
    return Axes(("page", "token", "head", "side", "channel"), (parts, tokens, heads, 2, table.channels))


def _merged(sizes: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of a page's dimensions, outermost first. Dimensions without gaps are merged."""
    dims = sorted(((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in reversed(dims or [(1, 1)]):
        if merged and stride == merged[0][0] * merged[0][1]:
            merged[0] = (merged[0][0] * size, merged[0][1])
        else:
            merged.insert(0, (size, stride))
    return merged


SIDE_BY_SIDE = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})
"""Backends whose pages hold a key and then its value, for each head and token (`do_kv_cache_update`, vLLM 0.32 and
0.33). Backends for CPUs arrange their pages in other ways."""


def _backend(layer: Layer) -> str:
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    return str(backend.get_name()) if backend is not None else type(layer).__name__


def backend_name(layer: Layer, device: torch.device) -> str:
    """Return the attention backend's name, with the vector instructions on a CPU. Both determine the bytes."""
    names = [_backend(layer)]
    if device.type == "cpu":
        names += [plain_name(getattr(layer, "isa", "")), torch.backends.cpu.get_cpu_capability()]
    return ":".join(filter(None, names))
