"""A program for the Python of SGLang's environment: what is installed there, and how SGLang reads a command line.

    python -P -c SOURCE '["--model-path", "MODEL", "--enable-hierarchical-cache"]'

It needs the standard library alone, because kvtier may be missing there. It writes one line of JSON to stdout: the
versions, whether SGLang loads kvtier as a plug-in, and SGLang's own resolution of `FIELDS`, which needs neither a model
nor a GPU. Other output goes to stderr.
Without an argument the command line is not read, and SGLang is not imported.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from importlib import metadata
from typing import Any

FIELDS = (
    "disable_radix_cache",
    "enable_hierarchical_cache",
    "enable_metrics",
    "enable_unified_cache_external_linker",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_storage_backend",
    "hicache_storage_backend_extra_config",
    "hicache_storage_prefetch_policy",
    "hicache_write_policy",
    "load_format",
    "model_path",
    "page_size",
    "radix_cache_backend",
    "revision",
)
"""Fields of SGLang's `ServerArgs` that decide whether KV is stored and found."""


def main(text: str | None) -> None:
    """Write the line of JSON."""
    result: dict[str, Any] = {"sglang": _version("sglang"), "kvtier": importlib.util.find_spec("kvtier") is not None}
    result["no_plug_in"] = _no_plug_in()
    if text is not None and result["sglang"] is not None:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(messages):
                result["fields"], result["asked"] = _resolved(json.loads(text))
        except SystemExit:  # of argparse, after 400 lines of usage
            result["refused"] = messages.getvalue().strip().rpartition("error: ")[2]
        except Exception as error:  # noqa: BLE001 - any error of SGLang or its dependencies
            result["refused"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(result)}\n")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _no_plug_in() -> str:
    """Why SGLang does not load kvtier as a plug-in; empty if it does."""
    chosen = os.environ.get("SGLANG_PLUGINS")
    if "kvtier" not in metadata.entry_points(group="sglang.srt.plugins").names:
        return "kvtier's installation there names no plug-in of SGLang; install this release of kvtier again"
    if chosen and "kvtier" not in map(str.strip, chosen.split(",")):
        return f"SGLANG_PLUGINS is {chosen!r}; add kvtier to it, or unset it"
    return ""


def _resolved(arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields after and before SGLang's rules for HiCache."""
    server: Any = importlib.import_module("sglang.srt.server_args")
    rules: Any = importlib.import_module("sglang.srt.arg_groups.hicache_hook")
    overrides: Any = importlib.import_module("sglang.srt.arg_groups.overrides")
    given = server.prepare_server_args(arguments)
    asked = _fields(given)
    rules.handle_hicache_ratio_default(given)
    rules.handle_hicache(given)
    return _fields(overrides.resolving_view(given)), asked


def _fields(view: object) -> dict[str, Any]:
    return {name: getattr(view, name) for name in FIELDS}


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
