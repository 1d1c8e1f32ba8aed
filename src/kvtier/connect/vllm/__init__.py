"""vLLM: a KV connector that vLLM's workers and scheduler import by name.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"tiers": ["directory:/path/to/kv"]}}'

The connector is imported on demand, so that the other modules work, and are tested, without vLLM.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

__all__ = ["KvtierConnector", "register"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)

logger = logging.getLogger(__name__)

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_LOADERS = "vllm.model_executor.model_loader"
_IS_WATCHED = "_kvtier_is_watched"


class _OnImport:
    """An entry of `sys.meta_path` that watches vLLM's loaders once they are imported.

    In many processes they never are, and their import takes a second.
    """

    @staticmethod
    def find_spec(name: str, *given: Any) -> Any:  # noqa: ANN401
        """The spec of vLLM's package of loaders, whose execution ends with the watch; None for all other modules."""
        if name != _LOADERS:
            return None
        finders: list[Any] = [it for it in sys.meta_path if it is not _OnImport and hasattr(it, "find_spec")]
        spec: Any = next((found for it in finders if (found := it.find_spec(name, *given)) is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:  # noqa: ANN401
                execute(module)
                watch_loaders(module)

            spec.loader.exec_module = exec_module
        return spec


def watch_loaders(loaders: Any) -> None:  # noqa: ANN401 - a module
    """Note the files that vLLM's loaders are about to read. Idempotent.

    Args:
        loaders: vLLM's `vllm.model_executor.model_loader`. In another form it is left alone, and its engine cannot be
            identified.
    """
    with suppress(AttributeError):
        default, sharded = loaders.DefaultModelLoader, loaders.ShardedStateLoader
        prepare, load_weights = default._prepare_weights, sharded.load_weights  # noqa: SLF001
        if hasattr(default, _IS_WATCHED):
            return
        setattr(default, _IS_WATCHED, True)

        @wraps(prepare)
        def _prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            found = prepare(self, *args, **kwargs)
            _note(lambda: (self.load_config, args[0] if args else kwargs["model_name_or_path"], found[0], found[1]))
            return found

        @wraps(load_weights)
        def _load_weights(self: Any, model: Any, model_config: Any) -> Any:  # noqa: ANN401
            _note(lambda: (self.load_config, str(model_config.model), model_config.model_weights, ()))
            return load_weights(self, model, model_config)

        default._prepare_weights, sharded.load_weights = _prepare_weights, _load_weights  # noqa: SLF001


def _note(read: Callable[[], tuple[Any, ...]]) -> None:
    """Call `files_read.note` with `read()`. An engine that passes no KV on loads as without kvtier."""
    try:
        config = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", lambda: None)()
        if config is None or config.kv_transfer_config is not None:
            import_module(f"{__name__}.files_read").note(*read())
    except Exception as error:  # noqa: BLE001 - the engine must load, and cannot be identified then
        logger.warning("kvtier cannot note which files vLLM reads: %r", error)


def register() -> None:
    """Let vLLM find the connector by its name alone, as its `MultiConnector` does for metrics; watch its loaders.

    vLLM calls it in each of its processes, as a plug-in (`vllm.general_plugins`). It imports nothing of the connector.
    """
    if _OnImport not in sys.meta_path:
        sys.meta_path.insert(0, _OnImport)
    if _LOADERS in sys.modules:
        watch_loaders(sys.modules[_LOADERS])
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
