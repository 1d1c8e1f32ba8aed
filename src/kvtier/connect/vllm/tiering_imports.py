"""All imports from vLLM's tiering modules, in one file. Only `secondary_tier` imports it."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering import base

SecondaryTierManager: Any = base.SecondaryTierManager
JobResult: Any = base.JobResult
Locality: Any = offload.Locality
LookupResult: Any = offload.LookupResult
Medium: Any = offload.Medium
OffloadingEvent: Any = offload.OffloadingEvent
RequestOffloadingContext: Any = offload.RequestOffloadingContext


def hash_seed(algorithm: str) -> str:
    """The seed of the hash with which every chain of block hashes begins in this process."""
    find: Any = hashing.get_hash_fn_by_name
    resolve: Any = kv_cache_utils.resolve_none_hash_seed
    return resolve(find(algorithm))
