"""Checks why SGLang does not find stored KV (`kvtier doctor sglang`).

SGLang itself interprets the server's flags (`connect/sglang/environment_probe.py`), so its own rules decide, not a copy
of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.doctor_checks import (
    ASK_SHARE,
    READ_SHARE,
    Check,
    DoctorFinding,
    EngineTerms,
    TimeLimit,
    read_settings,
    run_checks,
    server_checks,
    started,
)
from kvtier.connect.installed_programs import NotInTimeError
from kvtier.connect.model_files import local_folder
from kvtier.connect.sglang.host_pools import POOLS
from kvtier.connect.sglang.installed_engine import (
    BACKEND,
    COMPILE_ADVICE,
    EXTRA,
    OWN_KEYS,
    PAGE_TOKENS,
    UNUSED,
    Environment,
    check_version,
    is_supported,
    look,
    read_extra,
    settings_in,
)
from kvtier.errors import ConfigError
from kvtier.keys.weights import checkpoint_files
from kvtier.report.output import progress

PAGE_TOKENS_FEW = 16
"""Number of tokens below which a page is reported as small. Each page is an object, which has a header of 4 KiB and
costs a request."""

LOOK_SHARE = 0.7
"""Share of the time that importing SGLang may take. The remaining time is for the tiers that its flags name."""

LAYOUTS = sorted({layout for layouts in POOLS.values() for layout in layouts})
"""Layouts of HiCache's host memory that at least one pool supports."""

METRICS = (
    "sglang:prefetched_tokens_total",
    "sglang:backuped_tokens_total",
    "sglang:storage_prefetch_hit_tokens_total",
)
"""SGLang's counters of tokens that it reads from the backend, writes to it, and finds in it."""

TERMS = EngineTerms(
    naming="name one: `kvtier sglang config --tier disk:DIR`",
    unit="pages",
    setting="--page-size",
    equal="weights, dtype, --kv-cache-dtype, --page-size, memory layout, parallel sizes and release of SGLang",
    exact="expected with this setting; SGLang passes storage no salts, so requests for exact KV need another server",
)


def examine(
    arguments: Sequence[str], tiers: Sequence[str], python: Path | None, prompt_tokens: int | None, limit: TimeLimit
) -> list[DoctorFinding]:
    """Return all findings about a server.

    Args:
        arguments: arguments of ``python -m sglang.launch_server``.
        tiers: values of `--tier`, which override the list of tiers.
        python: interpreter of SGLang's environment; None means this one.
        prompt_tokens: number of tokens of the prompt that is not found; None if not given.
        limit: the time for all checks.
    """
    about_flags = DoctorFinding(
        "note",
        "server",
        "no flags were given, so only settings and tiers were checked",
        "give the server's flags after --",
    )
    try:
        with progress("asking SGLang what the server's flags mean", None):
            environment = look(python, arguments or None, limit.left_s(LOOK_SHARE))
    except NotInTimeError:
        environment = looked(python, limit)  # without an import of SGLang
        about_flags = limit.unchecked("server", "SGLang has not read the flags")
    fields: Mapping[str, Any] = {} if environment is None else environment.fields
    checks = [Check("model", lambda: [_model(fields)])] if fields else []
    try:
        extra, findings = started(EXTRA, lambda: _extra(arguments, fields)).result(limit.left_s(ASK_SHARE))
    except TimeoutError:
        extra, findings = None, [limit.unchecked(EXTRA, "its file was not read")]
    unsupported, advice = "refuse", "correct the setting; with it the server does not attach the backend"
    loaded = read_settings(tiers, None if extra is None else settings_in(extra), EXTRA, advice, limit)
    if isinstance(loaded, DoctorFinding):
        findings.append(loaded)
    else:
        unsupported, loss = loaded.config.sglang.unsupported, loaded.config.store.loss
        if loss != "none" and (mode := fields.get("disaggregation_mode")) not in {None, "null"}:
            text = f"{loss}: the server does not attach the backend with --disaggregation-mode {mode}"
            advice = "set it to none, because lossy KV would go to engines whose store.loss is unknown"
            findings.append(DoctorFinding("error", "store.loss", text, advice))
        page = (fields.get("page_size") or 1) if fields else 0
        terms = TERMS if arguments else TERMS._replace(without_tiers="note")
        checks += server_checks(loaded, lambda: None, page, terms, limit, UNUSED)
    findings += run_checks(checks, limit)
    findings += release(environment, python, unsupported, limit)
    if environment is not None and fields:
        findings += [*_hicache(fields), *_pages(fields, environment.asked), *_policies(fields)]
    elif environment is None or not environment.refused:
        findings.append(about_flags)
    if extra is not None:
        findings += _prompts(extra, fields, prompt_tokens)
    return [*findings, _hits(fields)]


def _extra(arguments: Sequence[str], fields: Mapping[str, Any]) -> tuple[dict[str, object] | None, list[DoctorFinding]]:
    """Return the backend's configuration, or None if it is unknown, and findings about it."""
    text = fields.get("hicache_storage_backend_extra_config")
    if not fields and EXTRA in arguments[:-1]:  # SGLang has not read the flags
        text = arguments[list(arguments).index(EXTRA) + 1]
    if not text:
        return None, []
    try:
        extra = read_extra(str(text))
    except ConfigError as error:
        return None, [DoctorFinding("error", EXTRA, str(error), "use the output of `kvtier sglang config`")]
    names = [extra.get(key) == wanted for key, wanted in BACKEND.items() if key != "interface_v1"]
    if not any(names) and "tiers" not in extra:
        is_said = fields.get("hicache_storage_backend", "dynamic") != "dynamic"  # `_hicache` reports it
        missing = DoctorFinding("error", EXTRA, "kvtier is not in it", "use the flags of `kvtier sglang config`")
        return None, [] if is_said else [missing]
    return extra, list(_keys(extra)) or [DoctorFinding("fine", EXTRA, "names kvtier's backend")]


def _keys(extra: Mapping[str, object]) -> Iterator[DoctorFinding]:
    """Report wrong values of the keys that SGLang itself reads."""
    for key, wanted in BACKEND.items():
        value = extra.get(key)
        is_named = key in {"module_path", "class_name"}
        if value != wanted if is_named else not value:
            effect = "hands over no pointers to its memory" if key == "interface_v1" else "does not use kvtier"
            yield DoctorFinding("error", key, f"is {value!r}, so SGLang {effect}", f"set it to {wanted!r}")
    for key, default in OWN_KEYS.items():
        allowed = (int, float) if key.startswith("prefetch_timeout") else type(default)
        value = extra.get(key, default)
        if default is not None and not isinstance(value, allowed):
            text = f"is {value!r}, so SGLang refuses the configuration"
            yield DoctorFinding("error", key, text, f"set it to a number such as {default!r}")


def looked(python: Path | None, limit: TimeLimit) -> Environment | None:
    """Describe the environment of `python` without importing SGLang. Return None if it does not answer in time."""
    try:
        return look(python, None, limit.left_s(READ_SHARE))
    except NotInTimeError:
        return None


def release(
    found: Environment | None, python: Path | None, unsupported: str, limit: TimeLimit
) -> Iterator[DoctorFinding]:
    """Check whether the environment has a supported SGLang that accepts the flags. See `examine` for the arguments."""
    place = "this environment" if python is None else str(python)
    if found is None:
        yield limit.unchecked("SGLang", f"the Python of {place} has not answered")
        return
    try:
        check_version(found.version, unsupported)
    except ConfigError as error:
        advice = "give the Python of the server's environment as --python, with a supported release installed there"
        yield DoctorFinding("error", "SGLang", f"{place}: {error}", advice)
    else:
        is_tested = is_supported(found.version or "")
        text = f"{found.version} {'is supported' if is_tested else 'is not supported, but allowed'}"
        yield DoctorFinding("fine" if is_tested else "note", "SGLang", text)
    if found.version is not None and not found.has_kvtier:
        text = f"is not installed in {place}, so SGLang cannot import the backend"
        yield DoctorFinding("error", "kvtier", text, "install it there, in the same release as here")
    elif found.version is not None and found.no_plug_in:
        text = "is not loaded by SGLang, so kvtier stores and finds nothing"
        yield DoctorFinding("error", "plug-in", text, found.no_plug_in)
    if found.no_page_hash:
        text = f"SGLang cannot compile it, so it finds none of its stored pages: {found.no_page_hash}"
        yield DoctorFinding("error", "page hash", text, COMPILE_ADVICE)
    if found.refused:
        yield DoctorFinding("error", "flags", f"SGLang refuses them: {found.refused}", "correct the server's flags")


def _hicache(fields: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Check whether SGLang uses a storage backend, and which one."""
    if not fields["enable_hierarchical_cache"]:
        text = "is off, so SGLang keeps KV in the GPU's memory only"
        yield DoctorFinding("error", "hierarchical cache", text, "add --enable-hierarchical-cache")
    if fields["disable_radix_cache"]:
        yield DoctorFinding("error", "radix cache", "is off, so no prefix is reused", "remove --disable-radix-cache")
    for flag in ("--radix-cache-backend", "--enable-unified-cache-external-linker"):
        if fields.get(flag.removeprefix("--").replace("-", "_")):
            text = "replaces HiCache, so its storage backend is not used"
            yield DoctorFinding("error", flag, text, f"remove {flag}")
    backend = fields["hicache_storage_backend"]
    if backend is None:
        text = "none, so nothing is stored below host memory"
    elif backend != "dynamic":
        text = f"is {backend!r}, so SGLang does not use kvtier"
    elif not fields["hicache_storage_backend_extra_config"]:
        text = "dynamic, but no class is named"
    else:
        if fields["enable_hierarchical_cache"]:
            yield DoctorFinding("fine", "storage backend", "dynamic, below the hierarchical cache")
        return
    yield DoctorFinding("error", "storage backend", text, "use the flags of `kvtier sglang config`")


def _pages(fields: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Check the tokens and layout of a page. `asked` has the flags before SGLang's rules changed them."""
    tokens = fields.get("page_size")
    if (tokens or 1) < PAGE_TOKENS_FEW:
        text = f"{tokens or '1, the default of SGLang'}: each page is an object with a header, and a request of its own"
        yield DoctorFinding("warning", "--page-size", text, f"add --page-size {PAGE_TOKENS}")
    else:
        yield DoctorFinding("fine", "--page-size", f"{tokens}; only full pages are found")
    layout = fields["hicache_mem_layout"]
    given = asked.get("hicache_mem_layout", layout)
    if layout not in LAYOUTS:
        allowed = f"use one of {', '.join(LAYOUTS)}"
        yield DoctorFinding("error", "memory layout", f"{layout} is not supported", allowed)
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


def _model(resolved: Mapping[str, Any]) -> DoctorFinding:
    """Check whether the model's weights can be identified."""
    model = str(resolved["model_path"])
    if resolved["load_format"] == "dummy":
        text = "its weights are random (--load-format dummy), so its KV is of no use to another server"
        return DoctorFinding("error", "model", text, "serve real weights from a local folder")
    folder = local_folder(model, resolved.get("revision"), None)
    problem = f"the weights of {model} are in no local folder"
    if folder is not None:
        try:
            checkpoint_files(folder)
        except ConfigError as error:
            problem = str(error)
        else:
            return DoctorFinding("fine", "model", f"is identified by the weights in {folder}")
    advice = "serve it from a local folder with its weights, which this user can read"
    return DoctorFinding("error", "model", f"cannot be identified: {problem}", advice)


def _policies(resolved: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Report when SGLang stores, and how long it reads."""
    write = resolved["hicache_write_policy"]
    if write == "write_back":
        text = "write_back: a page is stored when the GPU's memory evicts it, so without an eviction nothing is stored"
        yield DoctorFinding("warning", "write policy", text, "use --hicache-write-policy write_through")
    elif write == "write_through_selective":
        text = "write_through_selective: a page is stored at its second use, and found at its third"
        advice = "to store at the first, use --hicache-write-policy write_through"
        yield DoctorFinding("note", "write policy", text, advice)
    else:
        yield DoctorFinding("fine", "write policy", write)
    if resolved["hicache_storage_prefetch_policy"] == "best_effort":
        text = "best_effort: the read ends when the scheduler has room for the request, so an idle server reads little"
        advice = "use --hicache-storage-prefetch-policy timeout"
        yield DoctorFinding("warning", "prefetch policy", text, advice)


def _prompts(extra: Mapping[str, object], fields: Mapping[str, Any], tokens: int | None) -> Iterator[DoctorFinding]:
    """Check whether a prompt is long enough for a lookup."""
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
    """Return advice on how to see hits."""
    text = 'a request with "return_cached_tokens_details": true reports the tokens found in device, host and storage'
    also = "and read" if fields.get("enable_metrics") else "with --enable-metrics also"
    return DoctorFinding("note", "hits", text, f"{also} the counters {', '.join(METRICS)}")
