"""The connector's configuration, as a user of vLLM gives it."""

from pathlib import Path
from typing import Any

CHUNK = 256
"""Tokens of a chunk, with blocks of 16 to 256 tokens."""

PATIENT = "probe_deadline_s=20"
"""Setting of a tier whose hits a test counts. A busy machine may not answer a lookup within the default of 0.5 s."""


def connector(directory: Path | None, **settings: Any) -> dict[str, Any]:
    """A configuration that loads whatever it can: on models this small, computing would be faster.

    Args:
        directory: of the store; None: host memory alone.
        settings: further ones, named like ``host__capacity_bytes``; of the tier like ``tiers__directory__retry_s``.
    """
    extra: dict[str, Any] = {"host.capacity_bytes": "64MiB", "planner.enabled": False}
    if directory is not None:
        extra["tiers"] = [f"directory:{directory}?{PATIENT}"]
    extra |= {name.replace("__", "."): value for name, value in settings.items()}
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connect.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def tiering(*tiers: str, chunk: int = 1, **settings: Any) -> dict[str, Any]:
    """vLLM's connector with the tiering manager, and kvtier below it. Settings are named like ``host__evictor``."""
    patient = [f"{tier}{'&' if '?' in tier else '?'}{PATIENT}" for tier in tiers]
    kvtier = {name.replace("__", "."): value for name, value in settings.items()}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tiering_on_cpu",
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": chunk,
            "secondary_tiers": [
                {
                    "type": "KvtierSecondaryTier",
                    "module_path": "kvtier.connect.vllm.secondary_tier",
                    **({"tiers": patient} if tiers else {}),
                    **kvtier,
                }
            ],
        },
    }


def whole(tokens: int, chunk_tokens: int = CHUNK) -> int:
    """Tokens that a prompt can load: full chunks, without its last token."""
    return (tokens - 1) // chunk_tokens * chunk_tokens
