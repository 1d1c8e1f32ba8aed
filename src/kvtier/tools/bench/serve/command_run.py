"""Runs `kvtier bench serve`, and prints the results."""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from kvtier.cli import engine_settings
from kvtier.cli.options import tell_written
from kvtier.config.loader import TIERS, load
from kvtier.errors import ConfigError
from kvtier.report.format import bytes_text
from kvtier.report.output import progress, write_json
from kvtier.tools.bench.serve.arms import Arm, model_context, parse_arms
from kvtier.tools.bench.serve.campaign import START_S, Record, RunKey, ServeSettings, known_context, pinned
from kvtier.tools.bench.serve.checkpoint import CONTEXT_TOKENS, kv_bytes_per_token
from kvtier.tools.bench.serve.generator import find_generator, served_model
from kvtier.tools.bench.serve.join import write_joined
from kvtier.tools.bench.serve.load_driver import GeneratedLoad, LoadSettings, tokens_per_word
from kvtier.tools.bench.serve.regret import join_runs
from kvtier.tools.bench.serve.report import serve_report
from kvtier.tools.bench.serve.results import Prices, serve_record
from kvtier.tools.bench.serve.server import find_lmcache, find_vllm
from kvtier.tools.bench.serve.summary import ServeRecord
from kvtier.tools.bench.serve.workload import PRESETS, ConversationSizes, SingleShotSizes
from kvtier.tools.options import ended_by_signals, origin
from kvtier.tools.run_record import RecordedSetting
from kvtier.tools.size import of
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.tools.trace.options import load_trace

ARMS = ("none", "native", "kvtier")
SERVER_BYTES = 3 << 30
"""Memory of a server in addition to KV: processes, weights and some page cache."""
LMCACHE_BYTES = 1 << 30
"""Memory of LMCache's server process in addition to KV. All arms of the record get it."""
BLOCK_TOKENS = 128
"""Block size of vLLM on a CPU, in tokens. Other devices have smaller blocks."""
RESERVE_BYTES = 2 << 30
"""Bytes that stay free in the file system of the store."""
SIZES = {
    "users": "users",
    "rounds": "rounds",
    "system": "system_tokens",
    "history": "history_tokens",
    "question": "question_tokens",
    "answer": "answer_tokens",
}
"""Options that override a size of the preset."""


def run(
    *,
    as_json: bool,
    report: Path | None,
    record_file: Path | None,
    directory: Path,
    ttft_limit_s: float,
    hour_price: float | None,
    kwh_price: float | None,
    **given: Any,  # noqa: ANN401 - the other options
) -> int:
    """Execute the missing runs, and show all runs. Return the exit code."""
    it = _record(directory, given)
    failed = _measure(it)
    runs = join_runs(it.done())
    for joined, place in zip(runs, it.done(), strict=True):
        write_joined(place, joined)
    given["generator"] = Path(given["generator"]).name
    settings = {
        name: RecordedSetting(value.name if isinstance(value, Path) else value, origin(name))
        for name, value in given.items()
    }
    made = serve_record(
        runs,
        settings=settings,
        seed=given["seed"],
        conditions=_conditions(it),
        directory=directory,
        ttft_limit_s=ttft_limit_s,
    )
    if record_file is not None:
        write_json("--record", record_file, made)
    shown = serve_report(ServeRecord.of(made, Prices(machine_hour=hour_price, kwh=kwh_price)))
    tell_written(record_file)
    shown.show(made["results"], as_json=as_json, page=report)
    return 1 if failed else 0


def _measure(it: Record) -> int:
    """Execute the missing runs in order. Return how many failed."""
    todo = [key for key in it.order() if not it.is_done(key)]
    if not todo:
        return 0
    load = it.settings.load
    each_s = START_S + load["seconds"] + load["warm_up"]
    failed = 0
    with (
        pinned(it.settings.client_cores),
        ended_by_signals(),
        progress("serve", each_s * len(todo)) as advance,
    ):
        it.make_model()
        for key in todo:
            failed += _run(it, key, each_s, advance)
    return failed


def _run(it: Record, key: RunKey, expected_s: float, advance: Any) -> bool:  # noqa: ANN401 - a function
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        if ticks < expected_s:
            ticks += 1
            advance(1)

    result = it.run(key, tick)
    advance(max(0.0, expected_s - ticks))
    if result["status"] != "ok":
        click.secho(f"warning: {key.name}: {result['error']}", fg="yellow", err=True)
        return True
    return False


def _record(directory: Path, given: dict[str, Any]) -> Record:
    """Open the record in `directory`, and make all checks that are possible before a server starts."""
    arms = parse_arms(given["arms"] or ARMS, _kvtier_settings(given["settings"]))
    find_generator(given["generator"])
    is_ours = any(arm.is_ours for arm in arms)
    if given["ratios"] and given["no_limits"]:
        raise ConfigError("--ratio needs a control group; leave out --no-limits")
    if given["ratios"] and not any(arm.has_tiers for arm in arms):
        raise ConfigError("--ratio throttles the drive of arms with tiers; add --arm native, lmcache or kvtier")
    if given["shares"] and not is_ours:
        raise ConfigError("--load needs a server that is started here; add --arm none, or use --rate instead")
    vllm = find_vllm(given["vllm"]) if is_ours else None
    has_lmcache = any(arm.kind == "lmcache" for arm in arms)
    lmcache = find_lmcache(given["lmcache"], vllm) if vllm is not None and has_lmcache else None
    client, server = _cores(is_cpu=vllm is None or vllm.is_cpu)
    named = {"preset": "preset", "rates": "rate", "shares": "load"} | {it: it for it in SIZES}
    beside = [option for it, option in named.items() if given[it]]
    if given["trace"] is not None and beside:
        options = ", ".join(f"--{it}" for it in beside)
        raise ConfigError(f"--trace gives the requests and their times; leave out {options}")
    trace = None if given["trace"] is None else load_trace(given["trace"], given)
    per_word = 1.0 if vllm is None or given["model"] is None else tokens_per_word(vllm, given["model"])
    load_settings = _load_settings(given, arms, trace, client, directory)
    load = GeneratedLoad(settings=load_settings, recording=trace, tokens_per_word=per_word)
    kv_bytes, own_bytes = given["host"] + given["device_kv"], SERVER_BYTES + (LMCACHE_BYTES if lmcache else 0)
    settings = ServeSettings(
        arms=tuple(arms),
        repeats=given["repeats"],
        ratios=given["ratios"],
        rates=given["rates"],
        shares=given["shares"],
        model=given["model"],
        vllm=vllm,
        lmcache=lmcache,
        device_kv_bytes=given["device_kv"],
        host_bytes=given["host"],
        store_bytes=given["store"],
        memory_bytes=None if given["no_limits"] or not is_ours else given["memory"] or own_bytes + kv_bytes,
        running=given["running"],
        context_tokens=load.context_tokens,
        server_cores=server,
        client_cores=client,
        load=asdict(load.settings),
    )
    _check_device_kv(settings)
    free = shutil.disk_usage(directory).free
    if any(arm.has_tiers for arm in arms) and settings.store_bytes + RESERVE_BYTES > free:
        raise ConfigError(
            f"--store {settings.store_bytes}: {directory} has {free} bytes free, of which {RESERVE_BYTES} must stay "
            "free; use less, or another --dir"
        )
    return Record(settings, load, directory)


def _kvtier_settings(flags: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of ``--set`` by name, after the checks that kvtier would make in the server."""
    if not flags:
        return {}
    extra: dict[str, Any] = engine_settings.given(load(environ={}, flags=flags, tiers=["disk:/store"]))
    tables: list[dict[str, Any]] = extra.pop(TIERS)
    found = {f"{section}.{key}": value for section, values in extra.items() for key, value in values.items()}
    return found | {f"{TIERS}.disk.{key}": value for key, value in tables[0].items() if key not in {"kind", "path"}}


def _check_device_kv(settings: ServeSettings) -> None:
    """Refuse a `--device-kv` that cannot hold the KV of one request of `context_tokens`.

    vLLM would not start with it.
    """
    per_token = kv_bytes_per_token() if settings.model is None else float(of(settings.model).bytes_per_token)
    needed = (settings.context_tokens + BLOCK_TOKENS) * per_token  # vLLM keeps one block unused
    if settings.vllm is not None and needed > settings.device_kv_bytes:
        raise ConfigError(
            f"--device-kv {settings.device_kv_bytes}: a request of {settings.context_tokens} tokens, rounded up, has "
            f"{needed:.0f} bytes of KV; give at least that"
        )


def _load_settings(
    given: dict[str, Any], arms: list[Arm], trace: TraceArrays | None, cores: tuple[int, ...], directory: Path
) -> LoadSettings:
    context = known_context(directory)
    if context is None:
        known = [served_model(arm.url)[1] for arm in arms if not arm.is_ours]
        if given["model"] is not None:
            known.append(model_context(given["model"]))
        elif any(arm.is_ours for arm in arms):
            known.append(CONTEXT_TOKENS)
        context = min([tokens for tokens in known if tokens is not None], default=CONTEXT_TOKENS)
    return LoadSettings(
        sizes=_sizes(given) if trace is None else None,
        trace="" if trace is None else trace.name,
        seconds=given["seconds"],
        seed=given["seed"],
        warm_up=given["warm_up"],
        has_real_lengths=given["real_lengths"],
        time_factor=given["time_factor"],
        length_factor=given["length_factor"],
        is_longer_skipped=given["skip_longer"],
        context_tokens=context,
        generator=given["generator"],
        cores=",".join(map(str, cores)),
    )


def _sizes(given: dict[str, Any]) -> ConversationSizes | SingleShotSizes:
    """Return the preset's sizes for a small machine. Sizes from the command line replace them."""
    name = given["preset"] or "dell"
    if name not in PRESETS:
        raise ConfigError(f"--preset {name} is unknown; allowed: {', '.join(PRESETS)}")
    sizes = PRESETS[name].here
    changed = {field: given[option] for option, field in SIZES.items() if given[option] is not None}
    if not isinstance(sizes, ConversationSizes):
        if changed or given["rates"] or given["shares"]:
            raise ConfigError(f"--preset {name}: its sizes are fixed; leave out {', '.join(f'--{it}' for it in SIZES)}")
        return sizes
    return replace(sizes, **changed)


def _cores(*, is_cpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the client's cores and the server's: one for each, or all others for a server with a GPU.

    If only one core is usable, the server gets it, and the client is not pinned.
    """
    usable = tuple(sorted(os.sched_getaffinity(0)))
    if len(usable) < 2:
        return (), usable
    return usable[:1], usable[1:2] if is_cpu else usable[1:]


def _conditions(it: Record) -> dict[str, object]:
    """Return what the report says about model, workload, limits and arms."""
    settings = it.settings
    vllm, memory = settings.vllm, settings.memory_bytes
    is_cpu = vllm is None or vllm.is_cpu
    found: dict[str, object] = {arm.name: arm.means(is_cpu=is_cpu) for arm in settings.arms}
    found["model"] = "a small one with random weights" if settings.model is None else settings.model.name
    found["server"] = "not ours" if vllm is None else f"vLLM {vllm.version} on {'the CPU' if vllm.is_cpu else 'a GPU'}"
    if settings.lmcache is not None:
        found["server"] = f"{found['server']}, LMCache {settings.lmcache.version}"
    found["KV memory"] = f"device {bytes_text(settings.device_kv_bytes)}, host {bytes_text(settings.host_bytes)}"
    found["limits"] = (
        "none"
        if memory is None
        else f"{bytes_text(memory)} of memory with page cache; server on cores {list(settings.server_cores)}, "
        f"client on {list(settings.client_cores)}"
    )
    load = dict(settings.load) | {"generator": Path(settings.load["generator"]).name}
    found["workload"] = {name: value for name, value in load.items() if value}
    sizes = settings.load["sizes"]
    source = next((preset for preset in PRESETS.values() if asdict(preset.here) == sizes), None)
    if source is not None:
        found["scaled from"] = {"source": source.source} | asdict(source.original)
    if (calibration := it.calibrated()) is not None:
        found["computed KV"] = f"{bytes_text(calibration['kv_bytes_per_s'])}/s at {calibration['tokens']:.0f} tokens"
        measured = calibration | {"capacity_per_s": it.capacity_per_s()}
        found["calibration"] = {name: float(f"{value:.4g}") for name, value in measured.items()}
    return found
