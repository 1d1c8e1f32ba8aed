"""vLLM: a KV connector that vLLM's workers and scheduler import by name.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"tiers": ["directory:/path/to/kv"]}}'

The connector is imported on demand, so that the other modules work, and are tested, without vLLM.
"""

from typing import Any

__all__ = ["KvtierConnector"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class whose base is vLLM's
    if name == "KvtierConnector":
        from kvtier.connect.vllm.connector import KvtierConnector  # noqa: PLC0415
        from kvtier.connect.vllm.required_names import config_being_made  # noqa: PLC0415
        from kvtier.connect.vllm.sides import check_start  # noqa: PLC0415

        config = config_being_made()
        if config is not None:
            check_start(config)  # before the weights are loaded
        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
