"""Queries the installed SGLang for its release and its view of a command line, and lists the flags for the backend."""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.connect.installed_programs import ask_program, installed_version
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted

SUPPORTED = ("0.5.23",)
"""Tested releases. HiCache's interface and the layout of pages change between patch releases."""

BACKEND: Mapping[str, object] = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connect.sglang",
    "class_name": "KvtierStorage",
    "interface_v1": 1,
}
"""The keys of ``--hicache-storage-backend-extra-config`` that select kvtier. ``interface_v1`` avoids an extra copy."""

OWN_KEYS: Mapping[str, object] = {
    "prefetch_threshold": 256,
    "prefetch_timeout_base": 1,
    "prefetch_timeout_per_ki_token": 0.25,
    "hicache_storage_pass_prefix_keys": False,
    "tp_lcm_size": None,
}
"""Keys of the extra config that SGLang reads, with their defaults. All others except `BACKEND` are kvtier's."""

COMPILE_ADVICE = (
    "install a C++ compiler, ninja and the headers of Python and OpenSSL (apt-get install g++ ninja-build python3-dev "
    "libssl-dev), or mount a TORCH_EXTENSIONS_DIR in which the same SGLang has compiled it"
)
"""Advice for compiling the hash that names SGLang's pages."""

EXTRA = "--hicache-storage-backend-extra-config"

PAGE_TOKENS = 64
"""Recommended tokens per page. SGLang's default of one token is too small for an object."""

UNUSED = ("host.capacity_bytes",)
"""Settings that have no effect, because SGLang owns the host memory."""

PROGRAM = Path(__file__).with_name("environment_probe.py")

DEADLINE_S = 180.0
"""Seconds that importing SGLang may take. The import takes 10 s, or a minute from a cold disk."""


class Environment(NamedTuple):
    """One Python environment, as `environment_probe` describes it."""

    version: str | None
    """SGLang's release; None if it is not installed."""
    has_kvtier: bool
    fields: Mapping[str, Any]
    """The command line as resolved by SGLang, by field of its `ServerArgs`; empty if SGLang did not read it."""
    asked: Mapping[str, Any]
    """The same fields before SGLang's rules changed them."""
    refused: str
    """SGLang's message if it refuses the command line; otherwise empty."""
    no_plug_in: str = ""
    """Why SGLang does not load kvtier as a plug-in with this `SGLANG_PLUGINS`, and what to do; empty if it does."""
    no_page_hash: str = ""
    """Why SGLang cannot compile the hash that names its pages; empty if it can."""


def installed() -> str | None:
    """Return SGLang's release in this environment, such as ``0.5.23``; None if it is not installed."""
    return installed_version("sglang")


def check_version(version: str | None, unsupported: str = "refuse") -> None:
    """Refuse an unsupported release.

    Args:
        version: SGLang's release.
        unsupported: value of the setting `sglang.unsupported`.

    Raises:
        ConfigError: SGLang is missing, or its release has not been tested.
    """
    allowed = " and ".join(SUPPORTED)
    if version is None:
        raise ConfigError(f"SGLang is not installed; allowed: SGLang {allowed}")
    if not is_supported(version) and unsupported == "refuse":
        raise ConfigError(
            f"SGLang {version} is not supported by this release of kvtier; allowed: SGLang {allowed}. Another release "
            "may store KV in another layout. To use it nevertheless, set sglang.unsupported=allow; its KV is then "
            "found only by the same release"
        )


def is_supported(version: str) -> bool:
    """Return whether this release has been tested."""
    return version.partition("+")[0] in SUPPORTED


def look(
    python: Path | None = None, arguments: Sequence[str] | None = None, deadline_s: float = DEADLINE_S
) -> Environment:
    """Describe an environment, and let its SGLang read a server's command line.

    Args:
        python: the environment's interpreter; None means this one.
        arguments: arguments of ``python -m sglang.launch_server``. If None, SGLang is not imported.
        deadline_s: seconds that the whole call may take.

    Raises:
        NotInTimeError: the deadline has passed.
        ConfigError: the interpreter cannot be run.
    """
    # With -P, files in the current folder cannot replace the modules that the program imports. Like kvtier, it requires
    # Python 3.11.
    command = [str(python or sys.executable), "-P", "-c", PROGRAM.read_text(encoding="utf-8")]
    if arguments is not None:
        command.append(json.dumps(list(arguments)))
    found = ask_program(command, deadline_s, "allowed: the Python of SGLang's environment, 3.11 or later")
    return Environment(
        version=found.get("sglang"),
        has_kvtier=found.get("kvtier", False),
        fields=found.get("fields", {}),
        asked=found.get("asked", {}),
        refused=redacted(found.get("refused", "")),
        no_plug_in=found.get("no_plug_in", ""),
        no_page_hash=found.get("no_page_hash", ""),
    )


def read_extra(text: str) -> dict[str, object]:
    """Read the value of `EXTRA` as SGLang does: JSON, or ``@`` and a JSON or TOML file. SGLang also reads YAML.

    Raises:
        ConfigError: `text` has none of these forms. The message does not repeat it, because it may contain a secret.
    """
    problem, hint, suffix = "is not valid JSON", "; did the shell remove its quotes?", ".json"
    if text.startswith("@"):
        path = Path(text[1:])
        problem, hint, suffix = f"{path} cannot be read", "", path.suffix.lower()
        if suffix not in {".json", ".toml"}:
            raise ConfigError(f"{problem}, because its suffix is {suffix!r}; allowed: .json, .toml")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{problem}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    try:
        value: object = json.loads(text) if suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{problem}: it is nested too deeply") from None
    except ValueError as error:
        place = f": line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{problem}{place}{hint}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"has the type {type(value).__name__}; allowed: a JSON object or a TOML table")
    return cast("dict[str, object]", value)


def settings_in(extra: Mapping[str, object]) -> dict[str, object]:
    """Return kvtier's settings in the extra config."""
    return {name: value for name, value in extra.items() if name not in BACKEND and name not in OWN_KEYS}
