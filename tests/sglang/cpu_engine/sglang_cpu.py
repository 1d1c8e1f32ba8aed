"""Lets SGLang 0.5.23's engine and server run on a CPU, with HiCache. This folder is on their PYTHONPATH.

Stand-ins, all in this folder:
  - the copies between the device pool and the host pool (kernels for GPUs), by torch's indexing, for pools of keys and
    values in SGLang's four layouts
  - host memory that is not pinned, and no 10 GiB of it left for other programs
  - the wait for a stream, of which torch's CPU has none
  - one kernel that fills the table of requests (`sgl_kernel`)
  - an empty torchvision, which SGLang imports (`sitecustomize`)

All else is SGLang's own: scheduler, model, attention in torch, radix cache, HiCache's controller with its threads and
queues, host pools, storage factory, prefetch policies, tokenizer manager, HTTP server.

SGLang calls `install` in each of its processes: an entry point of the group ``sglang.srt.plugins``.
"""

import importlib
import os
from functools import wraps
from typing import Any

import torch

SABOTAGE = "SABOTAGE"
"""Environment variable with functions, ``module:function`` by spaces, that break something before the engine starts."""


def install() -> None:
    """Put the stand-ins in place, and then what a test breaks."""
    from sglang.srt.mem_cache.pool_host import base, mha

    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = copy_to_host
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    base.HostKVCache.__init__ = _unpinned(base.HostKVCache.__init__)
    torch.cpu.Stream.synchronize = lambda self: None
    for place in os.environ.get(SABOTAGE, "").split():
        module, _, function = place.partition(":")
        getattr(importlib.import_module(module), function)()


def copy_to_host(pool: Any, device_pool: object, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """Copy tokens of all layers from device to host."""
    for layer in range(pool.layer_num):
        for host, device in _buffers(pool, layer):
            host[_rows(pool, layer, host_indices)] = device[device_indices]


def _load(
    pool: Any,
    device_pool: object,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy tokens of one layer from host to device."""
    for host, device in _buffers(pool, layer_id):
        device[device_indices] = host[_rows(pool, layer_id, host_indices)]


def _buffers(pool: Any, layer: int) -> tuple[tuple[Any, Any], ...]:
    """Host and device memory of keys, and of values. On the device: [tokens, heads, dim]."""
    return (pool.k_buffer, pool.device_k_buffers[layer]), (pool.v_buffer, pool.device_v_buffers[layer])


def _rows(pool: Any, layer: int, tokens: Any) -> tuple[Any, ...]:
    """The index of these tokens' [heads, dim] in a host buffer, whose dimensions its `init_kv_buffer` gives."""
    page, token = tokens // pool.page_size, tokens % pool.page_size
    return {
        "layer_first": (layer, tokens),
        "page_first": (tokens, layer),
        "page_first_direct": (page, layer, token),
        "page_head": (page, slice(None), token, layer),
    }[pool.layout]


def _unpinned(begin: Any) -> Any:
    @wraps(begin)
    def begin_unpinned(pool: Any, **fields: Any) -> None:
        begin(pool, **{**fields, "pin_memory": False})

    return begin_unpinned
