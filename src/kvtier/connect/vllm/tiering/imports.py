"""Imports the modules of vLLM that the secondary tier requires. Only `secondary_tier` imports this file."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as offload_metrics
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.tiering import base as tiering_base

offload: Any = offload_base
tiering: Any = tiering_base
OffloadingConnectorStats: Any = offload_metrics.OffloadingConnectorStats
