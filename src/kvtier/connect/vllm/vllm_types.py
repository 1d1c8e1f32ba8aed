"""Type aliases for vLLM's objects. They are `Any`, because type checks of this package run without vLLM."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

VllmConfig: TypeAlias = Any
"""`vllm.config.VllmConfig`"""

ConfigPart: TypeAlias = Any
"""A part of `VllmConfig`, such as `ModelConfig`, `LoRAConfig` or `ParallelConfig`."""

KvCacheConfig: TypeAlias = Any
"""`vllm.v1.kv_cache_interface.KVCacheConfig`: layer groups and the location of their pages."""

KvCacheSpec: TypeAlias = Any
"""`vllm.v1.kv_cache_interface.KVCacheSpec`: contents of one page of a layer."""

Request: TypeAlias = Any
"""`vllm.v1.request.Request`, the scheduler's view of a request."""

LoraRequest: TypeAlias = Any
"""`vllm.lora.request.LoRARequest`: the adapter of a request."""

Item: TypeAlias = Any
"""`vllm.multimodal.inputs.MultiModalFeatureSpec`: an image or other item of a request, with its data and position."""

Layer: TypeAlias = Any
"""A layer of the model, from `CompilationConfig.static_forward_context`."""

Block: TypeAlias = Any
"""`vllm.v1.core.kv_cache_utils.KVCacheBlock`: one block of the pool, in use or free."""

BlockPool: TypeAlias = Any
"""`vllm.v1.core.block_pool.BlockPool`, which owns all blocks."""

KvCacheManager: TypeAlias = Any
"""`vllm.v1.core.kv_cache_manager.KVCacheManager`: block tables, the block pool and vLLM's own cache."""

VllmScheduler: TypeAlias = Any
"""`vllm.v1.core.sched.scheduler.Scheduler`: queues of requests, and the block manager."""

SchedulerOutput: TypeAlias = Any
"""`vllm.v1.core.sched.output.SchedulerOutput`: one scheduled step."""

TransferJob: TypeAlias = Any
"""`vllm.v1.kv_offload.tiering.base.TransferJob`: chunks that a secondary tier stores or loads."""

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""Block ids of one request for each vLLM group, in token order."""


class StateOffer(NamedTuple):
    """A block that holds the recurrent state after a number of tokens."""

    table: int
    """Number of the vLLM group."""
    block: int
    tokens: int


def plain_name(value: object) -> str:
    """Return the name of an enum member, else `str(value)` without the module of a torch dtype."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value).removeprefix("torch.")
