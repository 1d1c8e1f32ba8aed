"""A program for the Python of SGLang's environment. It reports what is installed and how SGLang reads a command line.

    python -P -c SOURCE '["--model-path", "MODEL", "--enable-hierarchical-cache"]'

The program requires only the standard library, because kvtier may be missing there. It writes one line of JSON to
stdout: the versions, whether SGLang loads kvtier as a plug-in, whether it can compile its page hash, and `FIELDS` as
resolved by SGLang. Resolving them requires neither a model nor a GPU. Other output goes to stderr.
Without an argument, the program reads no command line and does not import SGLang.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

FIELDS = (
    "disable_radix_cache",
    "disaggregation_mode",
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
"""Fields of SGLang's `ServerArgs` that determine whether KV is stored and found."""

HASH_SOURCE, HASH_LIBRARY = "srt/mem_cache/cpp_utils/hash_binding.cpp", "hicache_hash_cpp.so"
"""The source that SGLang compiles when it hashes its first page (`native_hash.py`), and the library that it keeps."""

COMPILE_S = 60.0


def main(text: str | None) -> None:
    """Write the report as one line of JSON."""
    result: dict[str, Any] = {"sglang": _version("sglang"), "kvtier": importlib.util.find_spec("kvtier") is not None}
    result["no_plug_in"], result["no_page_hash"] = _no_plug_in(), page_hash_problem()
    if text is not None and result["sglang"] is not None:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(messages):
                result["fields"], result["asked"] = _resolved(json.loads(text))
        except SystemExit:  # argparse exits after 400 lines of usage
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
    """Return why SGLang does not load kvtier as a plug-in; empty if it does."""
    chosen = os.environ.get("SGLANG_PLUGINS")
    if "kvtier" not in metadata.entry_points(group="sglang.srt.plugins").names:
        return (
            "kvtier's installation in that environment has no plug-in for SGLang; install this release of kvtier again"
        )
    if chosen and "kvtier" not in map(str.strip, chosen.split(",")):
        return f"SGLANG_PLUGINS is {chosen!r}; add kvtier to it, or unset it"
    return ""


def page_hash_problem() -> str:
    """Return why SGLang cannot compile the hash that names its pages; empty if it can or already has."""
    package = importlib.util.find_spec("sglang")
    if package is None or not (Path(package.origin or "").parent / HASH_SOURCE).exists():
        return ""
    cxx, cache = os.environ.get("CXX", "c++"), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions").rglob(HASH_LIBRARY)
    is_built = False
    with contextlib.suppress(OSError):  # torch reuses a library only if the same compiler made it
        is_built = any(f"cxx = {cxx}\n" in it.with_name("build.ninja").read_text() for it in built)
    with tempfile.TemporaryDirectory() as folder:
        include, output = sysconfig.get_path("include", "posix_prefix"), f"{folder}/trial.so"
        compiler = [*shlex.split(cxx), "-shared", "-fPIC", "-I", include, "-x", "c++", "-", "-o", output, "-lcrypto"]
        for command in (["ninja", "--version"], compiler)[: 1 if is_built else 2]:
            try:
                source = "#include <Python.h>\n#include <openssl/sha.h>\n"
                subprocess.run(command, input=source, capture_output=True, text=True, timeout=COMPILE_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                said = " ".join((getattr(error, "stderr", None) or str(error)).split())
                return f"{command[0]}: {said[:300]}"
    return ""


def _resolved(arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of `FIELDS` after SGLang has applied its rules for HiCache, and those before."""
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
