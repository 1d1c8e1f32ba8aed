"""The installed SGLang: its release, the flags that name kvtier's backend, and SGLang's reading of a command line."""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.connect.local_files import ask_program, installed_version
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
"""SGLang's part of ``--hicache-storage-backend-extra-config``; ``interface_v1``: without a further copy."""

OWN_KEYS: Mapping[str, object] = {
    "prefetch_threshold": 256,
    "prefetch_timeout_base": 1,
    "prefetch_timeout_per_ki_token": 0.25,
    "hicache_storage_pass_prefix_keys": False,
    "tp_lcm_size": None,
}
"""Keys of the extra config that are SGLang's, with its defaults. All others except `BACKEND` are kvtier's settings."""

EXTRA = "--hicache-storage-backend-extra-config"

PAGE_TOKENS = 64
"""A page of SGLang's default is one token, which is too little for an object."""

UNUSED = ("host.capacity_bytes",)
"""Settings without effect here: SGLang keeps the host memory itself."""

PROGRAM = Path(__file__).with_name("server_arguments.py")

DEADLINE_S = 180.0
"""For an import of SGLang, which takes 10 s, or a minute from a cold disk."""


class Environment(NamedTuple):
    """One Python environment, as `server_arguments` describes it."""

    version: str | None
    """SGLang's release; None without SGLang."""
    has_kvtier: bool
    fields: Mapping[str, Any]
    """SGLang's resolution of the command line, by field of its `ServerArgs`; empty if it was not read."""
    asked: Mapping[str, Any]
    """The same fields as given, before SGLang's rules changed them."""
    refused: str
    """SGLang's message, if it does not take the command line."""
    no_plug_in: str = ""
    """Why SGLang does not load kvtier as a plug-in, and what to do; empty if it does. `SGLANG_PLUGINS` is read here."""


def installed() -> str | None:
    """Release of SGLang in this environment, such as ``0.5.23``; None without SGLang."""
    return installed_version("sglang")


def check_version(version: str | None, unsupported: str = "refuse") -> None:
    """Refuse an unsupported release.

    Args:
        version: SGLang's.
        unsupported: the setting `sglang.unsupported`.

    Raises:
        ConfigError: SGLang is missing, or its release was not tested.
    """
    allowed = " and ".join(SUPPORTED)
    if version is None:
        raise ConfigError(f"SGLang is not installed; allowed: {allowed}")
    if not is_supported(version) and unsupported == "refuse":
        raise ConfigError(
            f"SGLang {version} is not supported by this release of kvtier; allowed: {allowed}. Another release may "
            "store KV in another layout. To use it nevertheless, set sglang.unsupported=allow: its KV is then found by "
            "the same release only"
        )


def is_supported(version: str) -> bool:
    """Whether this release was tested."""
    return version.partition("+")[0] in SUPPORTED


def look(
    python: Path | None = None, arguments: Sequence[str] | None = None, deadline_s: float = DEADLINE_S
) -> Environment:
    """Describe an environment, and let its SGLang read a server's command line.

    Args:
        python: the environment's interpreter; None: this one.
        arguments: of ``python -m sglang.launch_server``; None: SGLang is not imported.
        deadline_s: for all of it.

    Raises:
        NotInTimeError: the deadline has passed.
        ConfigError: the interpreter cannot be run.
    """
    # -P: the current folder may hold modules of the same names. kvtier needs a Python that knows it, too.
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
    )


def read_extra(text: str) -> dict[str, object]:
    """The value of `EXTRA`: JSON, or ``@`` and a file of JSON or TOML, as SGLang reads it. SGLang also reads YAML.

    Raises:
        ConfigError: it is none of these. The message does not repeat it, since it may contain a secret.
    """
    problem, hint, suffix = "is not valid JSON", "; did the shell remove its quotes?", ".json"
    if text.startswith("@"):
        path = Path(text[1:])
        problem, hint, suffix = f"{path} cannot be read", "", path.suffix.lower()
        if suffix not in {".json", ".toml"}:
            raise ConfigError(f"{problem}: format {suffix!r}; allowed: .json, .toml")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not text'}") from error
    try:
        value: object = json.loads(text) if suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{problem}: it is nested too deeply") from None
    except ValueError as error:
        place = f": line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{problem}{place}{hint}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"is a {type(value).__name__}; allowed: an object")
    return cast("dict[str, object]", value)


def settings_in(extra: Mapping[str, object]) -> dict[str, object]:
    """Of the extra config, kvtier's settings."""
    return {name: value for name, value in extra.items() if name not in BACKEND and name not in OWN_KEYS}
