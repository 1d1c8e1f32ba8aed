"""Type aliases for SGLang's objects. They are `Any` because type checks of this package run without SGLang."""

from typing import Any, TypeAlias

HostPool: TypeAlias = Any
"""`sglang.srt.mem_cache.pool_host.HostKVCache`: the pages of one kind of KV in host memory."""

StorageConfig: TypeAlias = Any
"""`sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig`: the model, the ranks and the extra config."""

ExtraInfo: TypeAlias = Any
"""`sglang.srt.mem_cache.hicache_storage.HiCacheStorageExtraInfo` or None: keys of the pages before a call's pages."""

PoolTransfer: TypeAlias = Any
"""`sglang.srt.mem_cache.hicache_storage.PoolTransfer`: one pool's pages in a call for several pools."""

PoolTransferResult: TypeAlias = Any
"""`sglang.srt.mem_cache.hicache_storage.PoolTransferResult`: the pages that the storage has, per pool."""

Indices: TypeAlias = Any
"""`torch.Tensor`: `page_size` positions in a host pool for each page."""

Leaves: TypeAlias = Any
"""Function that maps a server argument's name to its value as resolved by SGLang."""
