"""Imports the modules of vLLM that the connector requires. Only `connector` imports this file."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from datetime import timedelta
from typing import Any

import torch
from vllm.distributed import kv_events, parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.utils import hashing
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.metrics import cache_hit_source

ConnectorBase: Any = base.KVConnectorBase_V1
SupportsHMA: Any = base.SupportsHMA
ConnectorRole: Any = base.KVConnectorRole
TransferResults: Any = base.KVConnectorTransferResults
AllBlocksCleared: Any = kv_events.AllBlocksCleared
BlockStored: Any = kv_events.BlockStored
BlockRemoved: Any = kv_events.BlockRemoved
CacheHitSource: Any = cache_hit_source.CacheHitSource
transfer_group: Any = kv_transfer_state.get_kv_transfer_group
external_hash: Any = kv_cache_utils.maybe_convert_block_hash
extra_keys: Any = kv_cache_utils.generate_block_hash_extra_keys
published_keys: Any = kv_cache_utils.to_event_extra_keys
wake_up: Any = EngineCoreRequestType.WAKEUP
hash_block: Any = kv_cache_utils.hash_block_tokens
hash_function: Any = hashing.get_hash_fn_by_name
spec_kind: Any = kv_cache_interface.get_kv_cache_spec_kind


START_S = 300.0
"""Seconds that a worker waits for another worker at start. Workers may arrive far apart, because each has just read the
checkpoint."""


def gathered(own: object) -> list[Any]:
    """Return what each worker of the engine passes to this call, by rank. Wait for all workers, up to `START_S`.

    vLLM numbers workers by stage, then by rank of prefill context parallelism, then by rank of tensor parallelism.

    Raises:
        RuntimeError: a worker did not arrive. The message names it.
    """
    found = [own]
    groups: list[Any] = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
    for group in groups:
        if group.world_size > 1:  # a collective alone would wait for half an hour
            torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=START_S), wait_all_ranks=True)
        parts: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(parts, found, group=group.cpu_group)
        found = [it for part in parts for it in part]
    return found


def own_token_share() -> tuple[int, int]:
    """Return this worker's share of the tokens, as `rank_parts.token_share` does."""
    group: Any = parallel_state.get_dcp_group()
    return group.rank_in_group, group.world_size
