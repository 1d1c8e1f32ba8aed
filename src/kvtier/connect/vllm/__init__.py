"""A KV connector that vLLM's workers and scheduler import by name.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"tiers": ["directory:/path/to/kv"]}}'

The connector is imported on demand, so that the other modules work and can be tested without vLLM.
"""

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["KvtierConnector", "register"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_LOADERS = "vllm.model_executor.model_loader"


class _OnImport:
    """An entry of `sys.meta_path` that watches vLLM's loaders once they are imported.

    kvtier does not import them itself, because the import takes a second and many processes never need it.
    """

    @staticmethod
    def find_spec(name: str, *given: Any) -> Any:  # noqa: ANN401
        """Return a spec that watches vLLM's loaders once their package has run, or None for any other module."""
        if name != _LOADERS:
            return None
        finders: list[Any] = [it for it in sys.meta_path if it is not _OnImport and hasattr(it, "find_spec")]
        spec: Any = next((found for it in finders if (found := it.find_spec(name, *given)) is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:  # noqa: ANN401
                execute(module)
                import_module(f"{__name__}.engine_hooks").watch_loaders(module)

            spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Register the connector's name, which `MultiConnector` requires for metrics, and watch vLLM's loaders.

    vLLM calls this in each of its processes, as a plug-in (`vllm.general_plugins`). This does not import the connector.
    """
    if _OnImport not in sys.meta_path:
        sys.meta_path.insert(0, _OnImport)
    if _LOADERS in sys.modules:
        import_module(f"{__name__}.engine_hooks").watch_loaders(sys.modules[_LOADERS])
    with suppress(ImportError, ValueError):  # no such vLLM is installed, or the name is already registered
        factory: Any = import_module(_FACTORY)
        factory.KVConnectorFactory.register_connector("KvtierConnector", __name__, "KvtierConnector")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class whose base is vLLM's
    if name == "KvtierConnector":
        from kvtier.connect.vllm.engine_hooks import check, config_being_made  # noqa: PLC0415

        check("import")
        from kvtier.connect.vllm.checkpoint_reads import look_early  # noqa: PLC0415
        from kvtier.connect.vllm.connector import KvtierConnector  # noqa: PLC0415
        from kvtier.connect.vllm.engine_setup import check_start  # noqa: PLC0415

        register()  # `VLLM_PLUGINS` may leave the plug-in out
        config = config_being_made()
        if config is not None:
            look_early(config)
            if config.kv_transfer_config.kv_connector == "KvtierConnector":
                # Check before the weights are loaded. Under a MultiConnector the settings belong to a configuration
                # that does not exist yet.
                check_start(config)
        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
