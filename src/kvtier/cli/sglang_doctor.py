"""Checks of `kvtier sglang doctor`: why SGLang does not find KV that was stored.

Each check yields findings: what was checked, what was found, and what to do. No check changes anything. SGLang itself
resolves the server's flags (`server_arguments`), so that its own rules decide, not a copy of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtier.cli.doctor_findings import DoctorFinding, EngineTerms, in_order, machine, stores
from kvtier.cli.engine_settings import overridden
from kvtier.cli.sglang import PAGE_TOKENS, UNUSED
from kvtier.config.loader import TIERS, Loaded, load
from kvtier.connect.local_files import local_folder
from kvtier.connect.sglang.installed import (
    BACKEND,
    EXTRA,
    OWN_KEYS,
    Environment,
    check_version,
    is_supported,
    look,
    read_extra,
    settings_in,
)
from kvtier.connect.sglang.pools import POOLS
from kvtier.errors import ConfigError
from kvtier.keys.weights import checkpoint_files

PAGE_TOKENS_FEW = 16
"""Smaller pages are reported: an object has a header of 4 KiB, and costs a request."""

LAYOUTS = sorted({layout for layouts in POOLS.values() for layout in layouts})
"""Layouts of HiCache's host memory that some pool supports."""

METRICS = (
    "sglang:prefetched_tokens_total",
    "sglang:backuped_tokens_total",
    "sglang:storage_prefetch_hit_tokens_total",
)
"""SGLang's counters of tokens read from the backend, written to it, and found in it."""

TERMS = EngineTerms(
    command="sglang",
    unit="pages",
    setting="--page-size",
    equal="weights, dtype, --kv-cache-dtype, --page-size, memory layout, parallel sizes and release of SGLang",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerToCheck:
    """The server to check, as given on the command line."""

    arguments: Sequence[str] = ()
    """Of ``python -m sglang.launch_server``."""
    tiers: Sequence[str] = ()
    """Overrides the list of tiers, as `--tier` gives them."""
    python: Path | None = None
    """Interpreter of SGLang's environment; None: this one."""
    prompt_tokens: int | None = None
    """Of the prompt that is not found."""


def examine(server: ServerToCheck) -> list[DoctorFinding]:
    """All findings about `server`, the most severe first."""
    findings: list[DoctorFinding] = []
    environment = look(server.python, server.arguments or None)
    fields = environment.fields
    extra, found = _extra(server, fields)
    findings += found
    unsupported = "refuse"
    try:
        loaded = _settings(server, extra)
    except ConfigError as error:
        advice = "correct the setting; with it the server does not attach the backend"
        findings.append(DoctorFinding("error", "settings", str(error), advice))
    else:
        unsupported = loaded.config.sglang.unsupported
        findings += machine(loaded, UNUSED)
        page_tokens = (fields.get("page_size") or 1) if fields else 0
        findings += stores(loaded.config, None, page_tokens, TERMS)
    findings += _environment(environment, server.python, unsupported)
    if fields:
        findings += _hicache(fields)
        findings += _pages(fields, environment.asked)
        findings += _model(fields)
        findings += _policies(fields)
    elif not environment.refused:
        text = "no flags were given, so only settings and tiers were checked"
        findings.append(DoctorFinding("note", "server", text, "give the server's flags after --"))
    if extra is not None:
        findings += _prompts(extra, fields, server.prompt_tokens)
    findings.append(_hits(fields))
    return in_order(findings)


def _extra(server: ServerToCheck, fields: Mapping[str, Any]) -> tuple[dict[str, object] | None, list[DoctorFinding]]:
    """The backend's configuration, if it is known, with findings about it."""
    text: object = None
    if fields:
        text = fields.get("hicache_storage_backend_extra_config")
    elif EXTRA in server.arguments[:-1]:  # where no SGLang reads the flags
        text = server.arguments[list(server.arguments).index(EXTRA) + 1]
    if not text:
        return None, []
    advice = "use the output of `kvtier sglang config`"
    try:
        extra = read_extra(str(text))
    except ConfigError as error:
        return None, [DoctorFinding("error", EXTRA, str(error), advice)]
    return extra, list(_keys(extra)) or [DoctorFinding("fine", EXTRA, "names kvtier's backend")]


def _keys(extra: Mapping[str, object]) -> Iterator[DoctorFinding]:
    """Wrong values of SGLang's own keys."""
    for key, wanted in BACKEND.items():
        value = extra.get(key)
        if key == "interface_v1" and not value:
            text = "is not set, so SGLang hands over no pointers to its memory"
            yield DoctorFinding("error", key, text, f"set it to {wanted!r}")
        elif (key == "backend_name" and not value) or (key in {"module_path", "class_name"} and value != wanted):
            text = f"is {value!r}, so SGLang does not use kvtier"
            yield DoctorFinding("error", key, text, f"set it to {wanted!r}")
    for key, default in OWN_KEYS.items():
        allowed = (int, float) if key.startswith("prefetch_timeout") else type(default)
        value = extra.get(key, default)
        if default is not None and not isinstance(value, allowed):
            text = f"is {value!r}, so SGLang refuses the configuration"
            yield DoctorFinding("error", key, text, f"set it to a number such as {default!r}")


def _settings(server: ServerToCheck, extra: Mapping[str, object] | None) -> Loaded:
    """The server's settings, as visible from here.

    Raises:
        ConfigError: a setting is wrong.
    """
    loaded = load(tiers=server.tiers)
    if extra is None:
        return loaded
    given: dict[str, Any] = {
        name: value for name, value in settings_in(extra).items() if name != TIERS or not server.tiers
    }
    return overridden(loaded, given, EXTRA)


def _environment(found: Environment, python: Path | None, unsupported: str) -> Iterator[DoctorFinding]:
    place = "this environment" if python is None else str(python)
    try:
        check_version(found.version, unsupported)
    except ConfigError as error:
        advice = "give the Python of the server's environment as --python, with a supported release installed there"
        yield DoctorFinding("error", "SGLang", f"{place}: {error}", advice)
    else:
        version = found.version or ""
        level, text = ("fine", "is supported") if is_supported(version) else ("note", "is not supported, but allowed")
        yield DoctorFinding(cast("Any", level), "SGLang", f"{version} {text}")
    if found.version is not None and not found.has_kvtier:
        text = f"is not installed in {place}, so SGLang cannot import the backend"
        yield DoctorFinding("error", "kvtier", text, "install it there, in the same release as here")
    if found.refused:
        yield DoctorFinding("error", "flags", f"SGLang refuses them: {found.refused}", "correct the server's flags")


def _hicache(fields: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Whether SGLang uses a storage backend at all, and which."""
    if not fields["enable_hierarchical_cache"]:
        text = "is off, so SGLang keeps KV in the GPU's memory only"
        yield DoctorFinding("error", "hierarchical cache", text, "add --enable-hierarchical-cache")
    if fields["disable_radix_cache"]:
        text = "is off, so no prefix is reused"
        yield DoctorFinding("error", "radix cache", text, "remove --disable-radix-cache")
    for name in ("radix_cache_backend", "enable_unified_cache_external_linker"):
        if fields.get(name):
            flag = f"--{name.replace('_', '-')}"
            text = "replaces HiCache, so its storage backend is not used"
            yield DoctorFinding("error", flag, text, f"remove {flag}")
    backend = fields["hicache_storage_backend"]
    if backend != "dynamic":
        text = "none, so nothing is stored below host memory"
        if backend is not None:
            text = f"is {backend!r}, so SGLang does not use kvtier"
        yield DoctorFinding("error", "storage backend", text, "use the flags of `kvtier sglang config`")
    elif not fields["hicache_storage_backend_extra_config"]:
        text = "dynamic, but no class is named"
        yield DoctorFinding("error", "storage backend", text, f"add {EXTRA} (`kvtier sglang config`)")
    elif fields["enable_hierarchical_cache"]:
        yield DoctorFinding("fine", "storage backend", "dynamic, below the hierarchical cache")


def _pages(fields: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Tokens and layout of a page; `asked` has the flags before SGLang's rules."""
    tokens = fields.get("page_size")
    if (tokens or 1) < PAGE_TOKENS_FEW:
        text = f"{tokens or '1, the default of SGLang'}: each page is an object with a header, and a request of its own"
        yield DoctorFinding("warning", "--page-size", text, f"add --page-size {PAGE_TOKENS}")
    else:
        yield DoctorFinding("fine", "--page-size", f"{tokens}; only full pages are found")
    layout = fields["hicache_mem_layout"]
    given = asked.get("hicache_mem_layout", layout)
    if layout not in LAYOUTS:
        text = f"{layout} is not supported"
        yield DoctorFinding("error", "memory layout", text, f"use one of {', '.join(LAYOUTS)}")
    elif layout != given:
        text = (
            f"SGLang changes {given} to {layout} because of the io backend {asked['hicache_io_backend']}; "
            "KV stored in another layout is not found"
        )
        yield DoctorFinding("note", "memory layout", text, "use the same io backend in all servers of one store")
    elif layout == "layer_first":
        text = "layer_first: each page has two pieces per layer, which costs time"
        yield DoctorFinding("note", "memory layout", text, "use page_first or page_first_direct")
    else:
        yield DoctorFinding("fine", "memory layout", f"{layout}; KV stored in another layout is not found")


def _model(resolved: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Whether the model's weights can be identified."""
    model = str(resolved["model_path"])
    if resolved["load_format"] == "dummy":
        text = "its weights are random (--load-format dummy), so its KV is of no use to another server"
        yield DoctorFinding("error", "model", text, "serve real weights from a local folder")
        return
    folder = local_folder(model, resolved.get("revision"), None)
    problem = f"the weights of {model} are in no local folder" if folder is None else ""
    if folder is not None:
        try:
            checkpoint_files(folder)
        except ConfigError as error:
            problem = str(error)
    if problem:
        advice = "serve it from a local folder with its weights, which this user can read"
        yield DoctorFinding("error", "model", f"cannot be identified: {problem}", advice)
    else:
        yield DoctorFinding("fine", "model", f"is identified by the weights in {folder}")


def _policies(resolved: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """When SGLang stores, and how long it reads."""
    write = resolved["hicache_write_policy"]
    if write == "write_back":
        text = "write_back: a page is stored when the GPU's memory evicts it, so without an eviction nothing is stored"
        yield DoctorFinding("warning", "write policy", text, "use --hicache-write-policy write_through")
    elif write == "write_through_selective":
        text = "write_through_selective: a page is stored at its second use, and found at its third"
        yield DoctorFinding(
            "note", "write policy", text, "to store at the first, use --hicache-write-policy write_through"
        )
    else:
        yield DoctorFinding("fine", "write policy", write)
    if resolved["hicache_storage_prefetch_policy"] == "best_effort":
        text = "best_effort: the read ends when the scheduler has room for the request, so an idle server reads little"
        advice = "use --hicache-storage-prefetch-policy timeout"
        yield DoctorFinding("warning", "prefetch policy", text, advice)


def _prompts(extra: Mapping[str, object], fields: Mapping[str, Any], tokens: int | None) -> Iterator[DoctorFinding]:
    """Whether a prompt is long enough to be looked up."""
    threshold = extra.get("prefetch_threshold", OWN_KEYS["prefetch_threshold"])
    if not isinstance(threshold, int):
        return  # `_extra` reports it
    page = fields.get("page_size") or 1
    least = max(threshold, page)
    if tokens is not None and tokens < least:
        text = f"{least}: SGLang looks up no prompt with fewer tokens, and this one has {tokens}"
        advice = f"lower prefetch_threshold in {EXTRA}" if page <= tokens else "use a smaller --page-size"
        yield DoctorFinding("error", "prefetch_threshold", text, advice)
    else:
        text = f"{least}: fewer tokens beyond those in SGLang's own memory are never looked up"
        yield DoctorFinding("note", "prefetch_threshold", text, f"to change it, set prefetch_threshold in {EXTRA}")


def _hits(fields: Mapping[str, Any]) -> DoctorFinding:
    """How to see hits."""
    text = 'a request with "return_cached_tokens_details": true gets the tokens found in device, host and storage'
    advice = "with --enable-metrics also the counters " + ", ".join(METRICS)
    if fields.get("enable_metrics"):
        advice = "and read the counters " + ", ".join(METRICS)
    return DoctorFinding("note", "hits", text, advice)
