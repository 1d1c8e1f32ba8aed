"""Runs `kvtier replay`, and shows its progress and results.

Without `--tier`, a trace is replayed through one cache for each policy and capacity. With `--tier`, the real core runs
over tiers in virtual time.
"""

import re
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvtier.cli.options import tell_written
from kvtier.config.value_types import parse_count
from kvtier.core.limits import WritePolicy
from kvtier.errors import ConfigError
from kvtier.policy.registry import DEFAULT_EVICTOR
from kvtier.report.output import print_json, progress
from kvtier.report.table import Table, print_table
from kvtier.tools import size
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.options import noted_signals
from kvtier.tools.plan.model_cost import model_cost
from kvtier.tools.replay.policies.reference import infinite_hit_tokens
from kvtier.tools.replay.policies.registry import REFERENCES, policy_names
from kvtier.tools.replay.report import cache_sections
from kvtier.tools.replay.results import TieredResult
from kvtier.tools.replay.sweep import CacheResult, Task, mean_of, sweep
from kvtier.tools.replay.tier_spec import ProbedSpeeds, find_parts, parse_tier, prefill_of
from kvtier.tools.replay.tiered import TieredSetup, sweep_tiers
from kvtier.tools.replay.tiered_report import inputs, omissions, planner_warning, tiered_sections
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.tools.trace.options import load_drawn, load_trace
from kvtier.tools.trace.stats import trace_stats


class ReplayOutput:
    """Collects the results of a command until they can be printed.

    Args:
        report: path of the HTML report, if any.
        picture: path of the file of charts, if any.
        as_json: print JSON instead of tables.
    """

    def __init__(self, report: Path | None, picture: Path | None, *, as_json: bool) -> None:
        self.report = report
        self.picture = picture
        self.as_json = as_json
        self.is_interrupted = False
        self.json: list[dict[str, object]] = []
        """JSON objects to print."""

    @contextmanager
    def watch(self, label: str, requests: int) -> Generator[tuple[Callable[[float], None], Callable[[], bool]]]:
        """Show progress and record Ctrl-C. Yield `advance` and `should_stop`."""
        with noted_signals(signal.SIGINT) as noted, progress(label, requests) as advance:
            yield advance, lambda: noted() is not None
            self.is_interrupted = noted() is not None

    @property
    def is_drawn(self) -> bool:
        """Whether charts will be drawn."""
        return self.report is not None or self.picture is not None

    def refuse_several(self, what: str, count: int) -> None:
        """Refuse a picture of more than one replay.

        Raises:
            ConfigError: there is more than one replay.
        """
        if self.picture is not None and count > 1:
            raise ConfigError(
                f"--picture shows one replay, but there are {count} {what}; use one, or --report, which has charts of "
                "each"
            )

    def finish(self, shown: Report, *, is_list: bool) -> int:
        """Write the report and the charts, and print JSON. Return the exit code.

        Args:
            shown: the report.
            is_list: whether the JSON document is a list, even of one object.
        """
        tell_written(*shown.write(self.report, self.picture))
        if self.as_json:
            print_json(self.json if is_list or not self.json else self.json[0])
        return 128 + signal.SIGINT if self.is_interrupted else 0


class Capacity(NamedTuple):
    """Capacity of a cache, as on the command line. Without either field it is unlimited."""

    tokens: int | None = None
    percent: float | None = None
    """Share of the unique tokens of a trace, in percent."""

    def tokens_of(self, trace: TraceArrays, stored_share: float) -> int | None:
        """Return how many tokens fit if a cache stores `stored_share` of their raw bytes; None if it is unlimited.

        A percentage of the trace is rounded down to whole blocks, but is at least one block.
        """
        if self.percent is None:
            return None if self.tokens is None else int(self.tokens / stored_share)
        return max(1, int(self.percent * trace.block_count / 100 / stored_share)) * trace.block_tokens


def read_policies(text: str) -> list[str]:
    """Return the names in `--policy`. ``help`` lists all names and ends the command."""
    names = [it.strip() for it in text.split(",") if it.strip()]
    if names == ["help"]:
        known = {name: REFERENCES.get(name) for name in policy_names()}
        rows = [(name, it.help if it else "shipped or installed") for name, it in known.items()]
        print_table(Table(("policy", "description"), rows))
        raise click.exceptions.Exit(0)
    if not names:
        raise click.UsageError("--policy is empty; allowed: names, separated by commas")
    return list(dict.fromkeys(names))


def read_capacities(text: str) -> list[Capacity]:
    """Return the capacities in `--capacity-tokens`.

    Raises:
        ConfigError: a capacity is malformed.
    """
    found: list[Capacity] = []
    for it in text.split(","):
        word = it.strip().lower()
        try:
            if word.endswith("%"):
                found.append(Capacity(percent=_percent(word.removesuffix("%"))))
            else:
                found.append(Capacity() if word == "inf" else Capacity(tokens=parse_count(it)))
        except ValueError as error:
            raise ConfigError(f"--capacity-tokens {it!r}: {error}") from None
    return found


def _percent(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", text, re.ASCII) and 0 < float(text) <= 100:
        return float(text)
    raise ValueError("not a share; allowed: more than 0%, up to 100%, such as 10%")


def run_policies(
    traces: tuple[Path, ...],
    names: list[str],
    capacities: list[Capacity],
    options: dict[str, Any],
    output: ReplayOutput,
) -> int:
    """Replay each trace for each policy and capacity. Return the exit code.

    Args:
        traces: the files.
        names: names of policies.
        capacities: capacities of caches.
        options: options of `kvtier replay run`.
        output: collects the results.
    """
    shown: list[PageSection] = []
    share = size.of(options["model"]).stored_share(options["loss"])
    for path in traces:
        trace, is_drawn = load_drawn(path, options)
        sizes = dict.fromkeys(it.tokens_of(trace, share) for it in capacities)
        tasks = [Task(name, size) for name in names for size in sizes]
        bound = infinite_hit_tokens(trace) / max(int(trace.input_tokens.sum(dtype="int64")), 1)
        seeds = [options["seed"] + draw for draw in range(options["draws"] if is_drawn else 1)]
        count = len(seeds) * len(tasks)
        with output.watch(f"{path.name}: {count} replays", len(trace) * count) as watching:
            found = _sweep_draws(path, trace, tasks, seeds, options, watching)
        results = [mean_of(found[task]) for task in tasks if task in found]
        done = sum(map(len, found.values()))
        stats = trace_stats(trace) if output.is_drawn else None
        sections = list(cache_sections(trace, bound, results, seeds, stats))
        if share < 1:
            sections.insert(0, _about_loss(options, share, "The capacities are the given ones, divided by that share."))
        shown += sections
        output.json.append(
            {
                **_policies_json(trace, bound, results),
                "loss": options["loss"],
                "stored_share": share,
                "seeds": seeds if is_drawn else [],
                "is_complete": done == count,
            }
        )
        for section in sections if not output.as_json else ():
            section.print()
        if output.is_interrupted:
            click.echo(f"Interrupted: {done} of {count} replays of {path} are done.", err=True)
            break
    title = ", ".join(dict.fromkeys(path.name for path in traces))
    report = Report(command="kvtier replay", answer=f"Replay of {title}", sections=shown)
    return output.finish(report, is_list=len(traces) > 1)


def _sweep_draws(
    path: Path,
    trace: TraceArrays,
    tasks: list[Task],
    seeds: list[int],
    options: dict[str, Any],
    watching: tuple[Callable[[float], None], Callable[[], bool]],
) -> dict[Task, list[CacheResult]]:
    """Return the finished replays of each task, one for each draw of the start times. `trace` is the first draw."""
    advance, should_stop = watching
    found: dict[Task, list[CacheResult]] = {}
    for seed in seeds:
        if should_stop():
            break
        drawn = trace if seed == seeds[0] else load_drawn(path, {**options, "seed": seed}, is_quiet=True)[0]
        for it in sweep(
            drawn, tasks, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
        ):
            found.setdefault(Task(it.policy, it.capacity_tokens), []).append(it)
    return found


def _about_loss(options: dict[str, Any], share: float, effect: str) -> PageSection:
    stored = f"{share:.1%} of the raw bytes of {options['model']}"
    return PageSection(texts=[f"With loss {options['loss']}, a tier stores {stored}. {effect}"])


def _policies_json(trace: TraceArrays, bound: float, results: list[CacheResult]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "requests": len(trace),
        "input_tokens": int(trace.input_tokens.sum(dtype="int64")),
        "unique_tokens": trace.unique_tokens,
        "block_tokens": trace.block_tokens,
        "infinite_hit_rate": bound,
        "results": results,
        "prefix_violations": trace.prefix_violations,
        "notes": trace.notes,
        "warnings": trace.warnings,
    }


def run_tiers(
    traces: tuple[Path, ...],
    tiers: tuple[str, ...],
    policies: list[str],
    options: dict[str, Any],
    output: ReplayOutput,
) -> int:
    """Replay each trace through each combination of policies, nodes and routers. Return the exit code.

    Args:
        traces: the files.
        tiers: as in `--tier`, host memory first.
        policies: names of eviction policies.
        options: options of `kvtier replay run`.
        output: collects the results.
    """
    setups = _setups(tiers, policies, options)
    output.refuse_several("combinations of policies, nodes and routers", len(setups))
    # A single setup is also replayed without the planner, for comparison. With several this would double the time.
    twin = replace(setups[0], is_planned=False) if len(setups) == 1 and setups[0].is_planned else None
    all_setups = setups if twin is None else [*setups, twin]
    model = str(options["model"])
    share = size.of(model).stored_share(options["loss"])
    shown: list[PageSection] = []
    for path in traces:
        trace = load_trace(path, options)
        with output.watch(path.name, len(trace) * len(all_setups)) as (advance, should_stop):
            done = sweep_tiers(
                trace, all_setups, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
            )
        unplanned = done.pop(twin, None) if twin is not None else None
        if unplanned is not None and not (unplanned.is_complete and all(it.is_complete for it in done.values())):
            unplanned = None
        stats = trace_stats(trace) if output.is_drawn else None
        sections = list(tiered_sections(trace, model, done, unplanned, stats)) if done else []
        if share < 1:
            sections.insert(0, _about_loss(options, share, "Bytes below host memory are those of raw KV."))
        shown += sections
        for setup, result in done.items():
            output.json.append(_tiers_json(trace, model, options["loss"], setup, result, unplanned))
            if warning := planner_warning(result, unplanned):
                click.echo(f"kvtier: trace {path}: {warning}", err=True)
        for section in sections if not output.as_json else ():
            section.print()
        if output.is_interrupted:
            partial = [f"{it.requests:,}" for it in done.values() if not it.is_complete]
            rest = f"; of others, {' and '.join(partial)} of {len(trace):,} requests" if partial else ""
            finished = len(done) - len(partial)
            click.echo(f"Interrupted: {finished} of {len(setups)} replays of {path} are done{rest}.", err=True)
            break
    names = ", ".join(dict.fromkeys(path.name for path in traces))
    report = Report(command="kvtier replay --tier", answer=f"{names} through tiers", sections=shown)
    return output.finish(report, is_list=len(traces) * len(setups) > 1)


def _tiers_json(
    trace: TraceArrays, model: str, loss: str, setup: TieredSetup, result: TieredResult, unplanned: TieredResult | None
) -> dict[str, object]:
    warning = planner_warning(result, unplanned)
    return {
        "trace": trace.name,
        "model": model,
        "token_bytes": setup.token_bytes,
        "loss": loss,
        "policy": setup.evictor,
        "router": setup.router,
        "write_policy": setup.write_policy.value,
        "inputs": inputs(setup),
        **asdict(result),
        "ttft_unplanned": None if unplanned is None else unplanned.ttft,
        "warnings": [it for it in (warning, omissions(model)) if it],
    }


def _setups(tiers: tuple[str, ...], policies: list[str], options: dict[str, Any]) -> list[TieredSetup]:
    model = str(options["model"])
    gpu = find_parts(options["gpu"], "--gpu", "gpu") if options["gpu"] else None
    probe = ProbedSpeeds(options["probe"]) if options["probe"] else None
    kv = size.of(model)
    token_bytes = model_cost(kv).token_bytes
    if not token_bytes:
        raise ConfigError(f"--model {model}: it keeps only states, which a replay does not count; use another model")
    host, *lower = [parse_tier(it, probe=probe, gpu=gpu) for it in tiers]
    if options["loss"] != "none":
        lower = [it.in_raw_bytes(kv.stored_share(options["loss"])) for it in lower]
    base = TieredSetup(
        tiers=(host, *lower),
        token_bytes=token_bytes,
        prefill=prefill_of(model, tokens_per_s=options["prefill"], gpu=gpu),
        servers=options["servers"],
        seed=options["seed"],
        write_policy=WritePolicy(options["write_policy"]),
        is_planned=options["planner"],
    )
    setups: list[TieredSetup] = []
    routers = _words(options["router"])
    for policy, nodes, router in product(policies, _counts(options["nodes"]), routers):
        evictor = DEFAULT_EVICTOR if policy == "default" else policy
        if nodes > 1 or router == routers[0]:  # with one node all routers are equal
            setups.append(replace(base, nodes=nodes, router=router, evictor=evictor))
    return list(dict.fromkeys(setups))


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(it.strip() for it in text.split(",")))


def _counts(text: str) -> list[int]:
    try:
        return [parse_count(it) for it in _words(text)]
    except ValueError:
        raise click.UsageError(
            f"--nodes {text!r} is not a list of numbers; allowed: whole numbers, separated by commas"
        ) from None
