"""The only file that imports SGLang's modules. Only `storage` imports it."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.observability import metrics_collector

HiCacheStorage: Any = hicache_storage.HiCacheStorage
PoolHitPolicy: Any = hicache_storage.PoolHitPolicy
PoolName: Any = hicache_storage.PoolName
PoolTransferResult: Any = hicache_storage.PoolTransferResult
StorageMetrics: Any = metrics_collector.StorageMetrics
context: Any = runtime_context.get_context
parallel: Any = runtime_context.get_parallel
arange: Any = torch.arange
