"""SGLang's real pools and controllers on a CPU, with kvtier's backend or SGLang's own.

The scheduler's part is played here: it allocates host memory for a hit, and frees what a prefetch did not fill.
`torchvision_shim.install` comes before the import of this module.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import SpawnRanks, get_context, publish, reset_context
from sglang.srt.server_args import ServerArgs

from kvtier.connect.sglang import checkpoint_reads

PAGE = 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
WAIT_S = 60.0

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
"""Configuration of the model, which SGLang reads at start."""

BACKEND = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connect.sglang",
    "class_name": "KvtierStorage",
    "interface_v1": 1,
}


def checkpoint(folder: Path, content: bytes = b"weights", **config: object) -> Path:
    """Make a folder with the files of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content * 100)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return folder


@contextmanager
def published(model: str | Path, ranks: tuple[int, int] = (0, 1), **arguments: Any) -> Iterator[None]:
    """SGLang's runtime context of one rank of a server.

    Args:
        model: the checkpoint.
        ranks: number of this rank, and of all.
        arguments: further server arguments.
    """
    reset_context()
    args = ServerArgs(model_path=str(model), device="cpu", tp_size=ranks[1], **arguments)
    publish(args, role="test", ranks=SpawnRanks(world_rank=ranks[0], dp_rank=None))
    checkpoint_reads.look(get_context())  # as SGLang's own plug-in call does
    try:
        yield
    finally:
        reset_context()


def resolved(**values: object) -> None:
    """Change server arguments after SGLang's resolution, and before it reads the model."""
    get_context().override("test", **values)
    checkpoint_reads.look(get_context())


def small(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let SGLang allocate a small host pool, also where less memory is free than it keeps for other programs."""

    @wraps(make)
    def made(*args: Any, **fields: Any) -> Any:
        with host_memory_budget_scope(4 << 30):
            return make(*args, **fields)

    return made


@small
def mha(
    layout: str,
    tokens: int = 512,
    page: int = PAGE,
    layers: int = 4,
    heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    device: str = "cpu",
) -> Any:
    """A device pool of keys and values, and its host pool."""
    pool = MHATokenToKVPool(
        size=tokens,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        v_head_dim=value_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    kind, info, fields = _mha_host_inputs(pool)
    return pool, kind(info, 2.0, 0, page, layout, pin_memory=device != "cpu", **fields)


@small
def mla(layout: str, tokens: int = 512) -> Any:
    """A device pool of latents, and its host pool."""
    device = MLATokenToKVPool(
        size=tokens,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return device, _mla_host(device, PAGE, layout)


def _mla_host(device: Any, page: int, layout: str) -> MLATokenToKVPoolHost:
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        override_kv_cache_dim=device.kv_cache_dim,
    )


@small
def indexer(layout: str = "page_first") -> Any:
    """DeepSeek's index keys, beside a pool of latents."""
    device = DSATokenToKVPool(
        512, 64, 64, torch.bfloat16, 16, 3, "cpu", 128, enable_memory_saver=False, kv_cache_dim=80
    )
    return device, DSAIndexerPoolHost(
        make_dsa_indexer_pool_decl(device), _mla_host(device, 64, layout), pin_memory=False
    )


@small
def compressor_states(layout: str = "page_first") -> Any:
    """DeepSeek V4's states of the compressor."""
    scores = [torch.zeros(64, 48, dtype=torch.float32) for _ in range(3)]
    device = [SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=each), ring_size=4) for each in scores]
    return device, DeepSeekV4StateHostPool("c4_state", device, 32, PAGE, layout=layout, pin_memory=False)


@small
def mamba(slots: int = 64) -> Any:
    """Recurrent states in device memory, and their host pool."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, slots, 8, 16, dtype=torch.float32), conv=(torch.zeros(3, slots, 4, 24),)
    )
    device = SimpleNamespace(buffer_info=info, size=slots)
    return device, MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


@small
def latents_in_pages(name: str, pages: int = 64, layout: str = "page_first") -> Any:
    """DeepSeek V4's compressed KV in device memory, and its host pool."""
    device = [torch.zeros(pages, 640, dtype=torch.uint8) for _ in range(3)]
    return device, DeepSeekV4PagedHostPool(
        name, device, 640, pages, PAGE, layout=layout, pin_memory=False, page_aligned_only=True
    )


def chain(tokens: Sequence[int], page: int = PAGE) -> list[str]:
    """SGLang's page hashes of a prompt."""
    return get_hash_str(list(tokens), None, page_size=page)


@dataclass
class Engine:
    """A controller with a storage backend."""

    controller: Any
    host: Any
    backend: str
    pools: dict[str, Any] = field(default_factory=dict)
    """Host pools besides that of the tokens' KV."""

    @property
    def storage(self) -> Any:
        """The backend itself, also inside SGLang's proxy that injects failures."""
        inner = self.controller.storage_backend
        return getattr(inner, "_backend", inner)

    def fill(self, seed: int, pool: Any = None) -> None:
        """Fill a host pool with numbers."""
        torch.manual_seed(seed)
        for buffer in buffers(pool or self.host):
            buffer.copy_((torch.randn(buffer.shape) * 50).to(buffer.dtype))

    def backup(self, tokens: Sequence[int], seed: int = 0, transfers: Any = None) -> tuple[int, list[torch.Tensor]]:
        """Store a prompt's pages; the tokens that SGLang counts as stored, and the pages' content."""
        self.fill(seed)
        indices = self.host.alloc(len(tokens))
        pages = self.pages(indices)
        further = {"extra_pools": transfers} if transfers else {}
        self.controller.write_storage(indices, list(tokens), hash_value=chain(tokens, self.page), **further)
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.host.free(indices)
        return done.completed_tokens, pages

    def prefetch(self, tokens: Sequence[int], name: str = "request", transfers: Any = None) -> "Prefetched":
        """Ask for a prompt, allocate host memory for the hit, and bring it."""
        controller = self.controller
        if transfers is None:
            operation = controller.prefetch(self._request(name), list(tokens), None)
        else:
            operation = controller.prefetch(self._request(name), list(tokens), None, extra_pools=transfers)
        hit = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        assert hit is operation
        for buffer in buffers(self.host):
            buffer.zero_()
        if not hit.storage_hit_count:
            return Prefetched(0, 0, [])
        indices = hit.host_indices = self.host.alloc(hit.storage_hit_count)
        for transfer in transfers or ():
            pool = self.pools[str(transfer.name)]
            transfer.keys = hit.hash_value[-len(transfer.keys) :]
            transfer.host_indices = pool.alloc(len(transfer.keys) * pool.page_size)
            for buffer in buffers(pool):
                buffer.zero_()
        controller.prefetch_buffer.put(hit)
        completed, extra = 0, {}
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
            completed = max(completed, ack.completed_tokens or 0)
            extra |= {name: count for name, count in (getattr(ack, "pool_hits", None) or {}).items() if count}
            if ack.completed_req:
                break
        found = Prefetched(hit.storage_hit_count, completed, self.pages(indices), extra)
        self.host.free(indices)
        return found

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return int(self.controller.page_size)

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the pages at these positions."""
        return [self.host.get_data_page(int(at)).clone() for at in indices[:: self.host.page_size]]

    def _request(self, name: str) -> Any:
        return SimpleNamespace(rid=name) if isinstance(self.controller, HybridCacheController) else name


@dataclass
class Prefetched:
    """What a prefetch brought."""

    hit: int
    """Tokens that the storage promised."""
    completed: int
    """Tokens that SGLang counts as arrived."""
    pages: list[torch.Tensor]
    pools: dict[str, int] = field(default_factory=dict)
    """Pages that arrived, by name of the further pool."""


def buffers(pool: Any) -> list[torch.Tensor]:
    """The tensors of a host pool."""
    names = ("kv_buffer", "temporal_buffer", "index_k_with_scale_buffer")
    found = [getattr(pool, name, None) for name in names]
    found += list(getattr(pool, "conv_buffer", ()))
    if found[0] is None:
        found += [getattr(pool, name, None) for name in ("k_buffer", "v_buffer")]
    flat: list[torch.Tensor] = []
    for each in found:
        if each is not None:
            flat += each if isinstance(each, (list, tuple)) else [each]
    return flat


def content_of(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """Copies of a pool's pages."""
    starts = [int(at) for at in indices[:: pool.page_size]]
    if type(pool).__name__ == "AsymmetricMHATokenToKVPoolHost":  # SGLang does not copy its pages
        pieces = (pool.k_buffer, pool.v_buffer)
        return [torch.cat([each[at : at + pool.page_size].flatten() for each in pieces]) for at in starts]
    return [pool.get_data_page(at).clone() for at in starts]


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether pages hold the same bytes."""
    return len(first) == len(second) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


class Allocator:
    """As much of SGLang's device allocator as a controller asks for."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def get_kvcache(self) -> Any:
        """The device pool."""
        return self._device

    def set_hicache_transfer_done_event(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def engine(
    settings: dict[str, Any],
    layout: str = "page_first",
    backend: str = "dynamic",
    pools: tuple[Any, Any] | None = None,
    group: Any = None,
    **fields: Any,
) -> Iterator[Engine]:
    """A controller of one rank, attached to a backend.

    Args:
        settings: kvtier's settings, or those of SGLang's own backend.
        layout: of the host pool.
        backend: SGLang's name of the backend.
        pools: device and host pool; None: keys and values of a small model.
        group: the ranks' process group.
        fields: further arguments of the controller.
    """
    device, host = pools or mha(layout)
    extra = {**BACKEND, **settings} if backend == "dynamic" else settings
    controller = HiCacheController(
        Allocator(device),
        host,
        host.page_size,
        group,
        threading.Event(),
        **{"write_policy": "write_through", "io_backend": "kernel", **fields},
        storage_backend=backend,
        prefetch_threshold=host.page_size,
        model_name="the/model",
        storage_backend_extra_config=extra,
    )
    try:
        yield Engine(controller, host, backend)
    finally:
        controller.detach_storage_backend()


@contextmanager
def hybrid(settings: dict[str, Any], pools: Any, further: dict[Any, Any], backend: str = "dynamic") -> Iterator[Engine]:
    """The controller of a model with several pools.

    Args:
        settings: kvtier's settings.
        pools: device and host pool of the tokens' KV.
        further: device and host pool of each further pool, by SGLang's name.
        backend: SGLang's name of the backend.
    """
    device, host = pools
    entries = [PoolEntry(PoolName.KV, host, device, lambda layer: layer, is_primary_index_anchor=True)]
    entries += [PoolEntry(name, it[1], it[0], lambda layer: layer) for name, it in further.items()]
    group = HostPoolGroup(entries)
    controller = HybridCacheController(
        Allocator(device),
        group,
        host.page_size,
        None,
        threading.Event(),
        write_policy="write_through",
        io_backend="kernel",
        prefetch_threshold=host.page_size,
        model_name="the/model",
    )
    extra = {**BACKEND, **settings} if backend == "dynamic" else settings
    controller.attach_storage_backend(
        storage_backend=backend,
        prefetch_threshold=host.page_size,
        model_name="the/model",
        storage_backend_extra_config=extra,
        host_pools=entries,
    )
    try:
        yield Engine(controller, host, backend, {str(name): it[1] for name, it in further.items()})
    finally:
        controller.detach_storage_backend()
