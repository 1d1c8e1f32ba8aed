"""All imports from vLLM's tiering modules, in one file. Only `secondary_tier` imports it."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any

from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.tiering import base as tiering_base

offload: Any = offload_base
tiering: Any = tiering_base
