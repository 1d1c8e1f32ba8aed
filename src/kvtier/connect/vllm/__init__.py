"""vLLM: a KV connector that vLLM's workers and scheduler import by name.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"tiers": ["directory:/path/to/kv"]}}'

The connector is imported on demand, so that the other modules work, and are tested, without vLLM.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["KvtierConnector", "register"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def register() -> None:
    """Let vLLM find the connector by its name alone, as its `MultiConnector` does for metrics.

    vLLM calls it in each of its processes, as a plug-in (`vllm.general_plugins`). It imports nothing of the connector.
    """
    with suppress(ImportError, ValueError):  # no such vLLM; the name is registered already
        factory: Any = import_module(_FACTORY)
        factory.KVConnectorFactory.register_connector("KvtierConnector", __name__, "KvtierConnector")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class whose base is vLLM's
    if name == "KvtierConnector":
        from kvtier.connect.vllm.connector import KvtierConnector  # noqa: PLC0415
        from kvtier.connect.vllm.installed import config_being_made  # noqa: PLC0415
        from kvtier.connect.vllm.sides import check_start  # noqa: PLC0415

        register()  # `VLLM_PLUGINS` may leave the plug-in out
        config = config_being_made()
        if config is not None:
            check_start(config)  # before the weights are loaded
        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
