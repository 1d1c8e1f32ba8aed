"""vLLM: a KV connector that vLLM's workers and scheduler import by name.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"tiers": ["directory:/path/to/kv"]}}'

The connector is imported on demand, so that the other modules work, and are tested, without vLLM.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec as find_module
from typing import Any

__all__ = ["KvtierConnector", "register"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_LOADERS = "vllm.model_executor.model_loader"


class _OnImport:
    """An entry of `sys.meta_path` that watches vLLM's loaders once they are imported.

    In many processes they never are, and their import takes a second.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> Any:  # noqa: ANN401
        """The spec of vLLM's package of loaders, whose execution ends with the watch; None for all other modules."""
        if name != _LOADERS:
            return None
        sys.meta_path.remove(_OnImport)
        spec: Any = find_module(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:  # noqa: ANN401
            execute(module)
            _watch(module)

        spec.loader.exec_module = exec_module
        return spec


def _watch(loaders: object) -> None:
    with suppress(AttributeError):  # another release, whose engine cannot be identified then
        import_module(f"{__name__}.files_read").watch_loaders(loaders)


def register() -> None:
    """Let vLLM find the connector by its name alone, as its `MultiConnector` does for metrics; watch its loaders.

    vLLM calls it in each of its processes, as a plug-in (`vllm.general_plugins`). It imports nothing of the connector.
    """
    if _LOADERS in sys.modules:
        _watch(sys.modules[_LOADERS])
    elif _OnImport not in sys.meta_path:
        sys.meta_path.insert(0, _OnImport)
    with suppress(ImportError, ValueError):  # no such vLLM; the name is registered already
        factory: Any = import_module(_FACTORY)
        factory.KVConnectorFactory.register_connector("KvtierConnector", __name__, "KvtierConnector")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class whose base is vLLM's
    if name == "KvtierConnector":
        from kvtier.connect.vllm.connector import KvtierConnector  # noqa: PLC0415
        from kvtier.connect.vllm.files_read import look_early  # noqa: PLC0415
        from kvtier.connect.vllm.installed import config_being_made  # noqa: PLC0415
        from kvtier.connect.vllm.sides import check_start  # noqa: PLC0415

        register()  # `VLLM_PLUGINS` may leave the plug-in out
        config = config_being_made()
        if config is not None:
            look_early(config)
            if config.kv_transfer_config.kv_connector == "KvtierConnector":
                # Before the weights are loaded. Under a MultiConnector the settings belong to a configuration that does
                # not exist yet.
                check_start(config)
        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
