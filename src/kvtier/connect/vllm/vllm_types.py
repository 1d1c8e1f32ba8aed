"""Names for what comes from vLLM and cannot be typed here: it need not be installed where this is checked."""

from collections.abc import Sequence
from typing import Any, TypeAlias

VllmConfig: TypeAlias = Any
"""`vllm.config.VllmConfig`: everything an engine was started with."""

KvCacheConfig: TypeAlias = Any
"""`vllm.v1.kv_cache_interface.KVCacheConfig`: groups of layers, and where their pages lie."""

KvCacheSpec: TypeAlias = Any
"""`vllm.v1.kv_cache_interface.KVCacheSpec`: what one page of a layer is."""

Request: TypeAlias = Any
"""`vllm.v1.request.Request`, as the scheduler knows it."""

LoraRequest: TypeAlias = Any
"""`vllm.lora.request.LoRARequest`: the adapter of a request."""

Layer: TypeAlias = Any
"""A layer of the model, from `CompilationConfig.static_forward_context`."""

Block: TypeAlias = Any
"""`vllm.v1.core.kv_cache_utils.KVCacheBlock`: one block of the pool, in use or free."""

BlockPool: TypeAlias = Any
"""`vllm.v1.core.block_pool.BlockPool`: who has which block."""

SchedulerOutput: TypeAlias = Any
"""`vllm.v1.core.sched.output.SchedulerOutput`: one step, as it goes out."""

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""For each vLLM group the ids of one request's blocks, in token order."""

Offer: TypeAlias = tuple[int, int, int]
"""(vLLM group, block, tokens): that block holds the recurrent state after so many tokens."""


def plain_name(value: object) -> str:
    """The name of an enum's member, or what `str` gives, without the module of a torch dtype."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value).removeprefix("torch.")
