"""Everything that is imported from vLLM itself, in one place: it need not be installed where this is checked.

Only the connector imports this; all other modules of the package work on vLLM's objects without importing it.
"""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any

from vllm.distributed.kv_events import BlockRemoved as _BlockRemoved
from vllm.distributed.kv_events import BlockStored as _BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1 as _Base,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole as _Role,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults as _Results,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    SupportsHMA as _SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as _external_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource as _CacheHitSource

ConnectorBase: Any = _Base
SupportsHMA: Any = _SupportsHMA
ConnectorRole: Any = _Role
TransferResults: Any = _Results
CacheHitSource: Any = _CacheHitSource
BlockStored: Any = _BlockStored
BlockRemoved: Any = _BlockRemoved
external_hash: Any = _external_hash
