"""A worker's KV memory in any of vLLM's layouts, for tests of copies."""

import mmap
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.axes import Numbers
from tests.simulated_cuda import seen_by_host
from tests.vllm_recorded import Recorded, recorded

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.worker.copier import BlockCopier
from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy
from kvtier.connect.vllm.worker.cuda_copy import CudaPageCopy
from kvtier.connect.vllm.worker.pages import EnginePages, engine_pages
from kvtier.layout import KvLayout
from kvtier.testing.copier_contract import CopierWorld
from kvtier.types import RequestId

BLOCKS = 120
"""Number of blocks in the engine."""

PAGE_ORDER = {"LBHNC": (0, 1), "LBNHC": (1, 0), "LHBNC": (0, 1), "BLHNC": (0, 1), "BLNHC": (1, 0), "BHLNC": (0, 1)}
"""Order in which heads (0) and tokens (1) of one page lie in memory."""


def made(layout: str, parts: int = 1, channels: int = 9) -> Recorded:
    """Make an engine with three layers of one group in any layout of vLLM (`KVCacheLayout`), with blocks in `parts`.

    The strides follow `compute_layout_strides` of vLLM 0.32, with dimensions in the order of the layout's name.
    """
    engine = recorded("llama32", BLOCKS)
    config, spec = engine.config, engine.config.kv_cache_groups[0].kv_cache_spec
    layers = config.kv_cache_groups[0].layer_names = config.kv_cache_groups[0].layer_names[:3]
    sizes = {"L": 3, "B": BLOCKS * parts, "H": 2, "N": 32 // parts, "C": 2 * channels}
    spec.state_content_size_bytes = 4 * channels  # 36, so that each layer of a chunk has padding behind it
    strides, step = {}, 1
    for dim in reversed(layout):
        strides[dim] = step
        step *= sizes[dim]
    config.kv_cache_layout = layout
    (tensor,) = config.kv_cache_tensors
    tensor.layers, tensor.size = layers, 2 * step
    tensor.layer_stride, tensor.block_stride = 2 * strides["L"], 2 * strides["B"] * parts
    engine.views.clear()
    for number, name in enumerate(layers):
        engine.views[name] = {
            "shape": [sizes[dim] for dim in "BHNC"],
            "stride": [strides[dim] for dim in "BHNC"],
            "dtype": "bfloat16",
            "offset": number * strides["L"],
        }
    return engine


def attended(layout: str, parts: int = 1, backend: str = "FLASH_ATTN", channels: int = 9) -> Recorded:
    """Make such an engine with an attention backend of a GPU, in bf16."""
    engine = made(layout, parts, channels)
    spec = engine.config.kv_cache_groups[0].kv_cache_spec
    spec.head_size = spec.head_size_v = channels
    for layer in engine.layers.values():
        layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    return engine


def side_by_side(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values as `do_kv_cache_update` of vLLM's backends for GPUs.

    Args:
        key, value: [token, head, channel].
        kv_cache: [block, head, token, channels of a key and of a value].
        slots: the place of each token: its block and its place there, as one number.
    """
    keys, values = kv_cache.transpose(1, 2).split(key.shape[2], dim=-1)
    cache_flash(key, value, keys, values, slots)


def cache_flash(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """Do as vLLM's kernel `reshape_and_cache_flash` does. Caches are [block, token, head, channel]."""
    keys[slots // keys.shape[1], slots % keys.shape[1]] = key
    values[slots // values.shape[1], slots % values.shape[1]] = value


def gathered(
    engine: Recorded, numbers: Numbers, update: Callable[..., None] = side_by_side
) -> tuple[KvLayout, memoryview]:
    """Write a chunk into shuffled blocks, and gather it.

    Args:
        engine: made by `attended`.
        numbers: [side, layer, head, token, channel].
        update: writes as `side_by_side` does.

    Returns:
        The layout, and the payload.
    """
    tensors = engine.tensors()
    pages = engine_pages(Geometry.of(engine.config), engine.config, tensors, engine.layers)
    ids = torch.tensor(random.Random(5).sample(range(1, BLOCKS), 8))
    slots = (ids[:, None] * 32 + torch.arange(32)).flatten()
    for layer, tensor in enumerate(tensors.values()):
        key, value = (torch.from_numpy(side[layer]).view(torch.bfloat16).transpose(0, 1) for side in numbers)
        update(key, value, tensor, slots)
    payload = payload_of(pages.layout.groups[0].payload_bytes)
    BlockCopier(pages, CpuPageCopy(pages)).gather(RequestId("S0/x"), 0, tuple(ids.tolist()), payload)
    return pages.layout, payload


class VllmWorld(CopierWorld):
    """A worker's KV memory with random bytes in it.

    Args:
        engine: gives the geometry.
        copy: copies on its device. A GPU is simulated, and the test has installed it.
    """

    def __init__(self, engine: Recorded, copy: Callable[[EnginePages], Any] = CpuPageCopy) -> None:
        self.engine = engine
        self.geometry = Geometry.of(engine.config)
        self.tensors = engine.tensors()
        self.memory = next(iter(self.tensors.values())).untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(self.memory)
        flat.copy_(torch.randint(1, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
        self.flat = flat
        tensors = self.tensors
        if copy is CudaPageCopy:
            tensors = dict(zip(tensors, seen_by_host(tensors.values()), strict=True))
        pages = engine_pages(self.geometry, engine.config, tensors, engine.layers)
        super().__init__(BlockCopier(pages, copy(pages)), pages.layout)

    def chunks(self, group: int) -> list[tuple[int, ...]]:
        """Return chunks: the first in order, the others shuffled. Groups differ, because they share memory."""
        sizes = [sum(table.blocks for table in known.tables) for known in self.geometry.groups]
        first, size = 1 + 4 * sum(sizes[:group]), sizes[group]
        mixed = random.Random(7).sample(range(first + size, first + 4 * size), 3 * size)
        return [tuple(range(first, first + size)), *(tuple(mixed[n * size : (n + 1) * size]) for n in range(3))]

    def wrong(self, group: int) -> list[tuple[int, ...]]:
        good = self.chunks(group)[1]
        return [(), good[1:], (*good, 1), (0, *good[1:]), (BLOCKS, *good[1:]), (-2, *good[1:])]

    def read(self, group: int, blocks: tuple[int, ...]) -> list[bytes]:
        return [b"".join(bytes(self.page(name, block)) for block in ids) for name, ids in self.layers(group, blocks)]

    def fill(self, group: int, blocks: tuple[int, ...], layers: list[bytes]) -> None:
        for (name, ids), layer in zip(self.layers(group, blocks), layers, strict=True):
            size = len(layer) // len(ids)
            for number, block in enumerate(ids):
                found = torch.frombuffer(bytearray(layer[number * size : (number + 1) * size]), dtype=torch.uint8)
                page = self.view(name, block)
                page.copy_(found.view(page.dtype).view(page.shape))

    def everything(self) -> bytes:
        return self.flat.numpy().tobytes()

    def layers(self, group: int, blocks: tuple[int, ...]) -> list[tuple[str, list[int]]]:
        """Return each layer with the ids of its blocks."""
        ids = iter(blocks)
        tables = [(table, [next(ids) for _ in range(table.blocks)]) for table in self.geometry.groups[group].tables]
        return [(name, mine) for table, mine in tables for name in table.layers]

    def view(self, name: str, block: int) -> torch.Tensor:
        """Return one page with its dimensions in the order of memory, by torch's indexing instead of offsets."""
        tensor = self.tensors[name]
        parts = tensor.unflatten(0, (BLOCKS, -1))[block]  # [parts, heads, tokens, content]
        heads, tokens = (1 + dim for dim in PAGE_ORDER[self.engine.config.kv_cache_layout])
        in_order = parts.permute(0, heads, tokens, 3)
        # If heads are outside blocks, the parts of a block follow each other within a head.
        return in_order.transpose(0, 1) if self.engine.config.kv_cache_layout == "LHBNC" else in_order

    def page(self, name: str, block: int) -> bytes:
        return self.view(name, block).contiguous().view(torch.uint8).numpy().tobytes()


def payload_of(size_bytes: int) -> memoryview:
    """Return memory as an arena has it."""
    return memoryview(mmap.mmap(-1, size_bytes))
