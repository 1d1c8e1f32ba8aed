"""What the vLLM that is installed makes of a configuration, without starting an engine.

vLLM is imported when it is asked, which takes some seconds; what it prints goes to stderr, since stdout is for results.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError

CONNECTOR: Mapping[str, object] = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connect.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""What ``--kv-transfer-config`` says besides our settings."""


def engine_config(arguments: Sequence[str]) -> VllmConfig:
    """The configuration of an engine that is started with `arguments`; those of the server alone are passed over.

    Raises:
        ConfigError: vLLM does not take them, here; the message is vLLM's.
    """
    with _quiet():
        try:
            given = engine_arguments(arguments)
            _look_at_models_here()
            return given.create_engine_config()
        except KvError:  # ours: it asks for the connector
            raise
        except Exception as error:  # whatever vLLM, or what it is built on, has against them
            raise ConfigError(f"vLLM does not start with these arguments here: {error}") from error


def engine_arguments(arguments: Sequence[str]) -> Any:  # noqa: ANN401 - vLLM's class
    """What vLLM reads in a server's command line; what is the server's alone is passed over.

    Raises:
        ConfigError: vLLM does not take them, or cannot be imported.
    """
    engine: Any = _imported("vllm.engine.arg_utils")
    parsing: Any = _imported("vllm.utils.argparse_utils")
    parser: Any = engine.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
    parser.error = _refuse  # instead of four hundred lines of usage, and an end of the process
    known, _ = parser.parse_known_args(list(arguments))
    return engine.EngineArgs.from_cli_args(known)


def _look_at_models_here() -> None:
    """Let vLLM look at a model's class in this process, not in a new one that imports everything again.

    A new one keeps CUDA out of a server's process, and this one ends soon. Without the function vLLM makes a new one.
    """
    registry: Any = _imported("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = _call  # noqa: SLF001


def _call(act: Callable[[], object]) -> object:
    return act()


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"vLLM does not take these arguments: {message}")


def _imported(name: str) -> object:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        raise ConfigError(f"vLLM is installed, but cannot be imported: {error}") from error


@contextmanager
def _quiet() -> Generator[None]:
    """Nothing on stdout, and no log lines below an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)
