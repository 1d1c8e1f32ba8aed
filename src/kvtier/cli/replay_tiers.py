"""`kvtier replay --tier`: a trace through the real core over tiers, in virtual time."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvtier import size
from kvtier.cli.reading import load_trace
from kvtier.cli.replay_output import ReplayOutput
from kvtier.config.value_types import parse_count
from kvtier.core.limits import WritePolicy
from kvtier.policy.registry import DEFAULT_EVICTOR
from kvtier.replay.results import TieredResult
from kvtier.replay.tier_spec import ProbedSpeeds, find_parts, parse_tier, prefill_of
from kvtier.replay.tiered import TieredSetup, sweep_tiers
from kvtier.replay.tiered_report import inputs, planner_warning, tiered_sections
from kvtier.report.report import Report, Section
from kvtier.trace.arrays import TraceArrays
from kvtier.trace.stats import trace_stats


def run_tiers(
    traces: tuple[Path, ...],
    tiers: tuple[str, ...],
    policies: list[str],
    options: dict[str, Any],
    output: ReplayOutput,
) -> int:
    """Replay each trace through each combination of policies, nodes and routers; returns the exit code.

    Args:
        traces: the files.
        tiers: as in `--tier`, host memory first.
        policies: names of eviction policies.
        options: of `kvtier replay run`.
        output: collects the results.
    """
    setups = _setups(tiers, policies, options)
    output.refuse_several("combinations of policies, nodes and routers", len(setups))
    # A single setup is also replayed without the planner, for comparison. For several this would double the time.
    twin = replace(setups[0], is_planned=False) if len(setups) == 1 and setups[0].is_planned else None
    all_setups = setups if twin is None else [*setups, twin]
    model = str(options["model"])
    shown: list[Section] = []
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
        shown += sections
        for setup, result in done.items():
            output.json.append(_as_dict(trace, model, setup, result, unplanned))
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


def _as_dict(
    trace: TraceArrays, model: str, setup: TieredSetup, result: TieredResult, unplanned: TieredResult | None
) -> dict[str, object]:
    warning = planner_warning(result, unplanned)
    return {
        "trace": trace.name,
        "model": model,
        "token_bytes": setup.token_bytes,
        "policy": setup.evictor,
        "router": setup.router,
        "write_policy": setup.write_policy.value,
        "inputs": inputs(setup),
        **asdict(result),
        "ttft_unplanned": None if unplanned is None else unplanned.ttft,
        "warnings": [warning] if warning else [],
    }


def _setups(tiers: tuple[str, ...], policies: list[str], options: dict[str, Any]) -> list[TieredSetup]:
    model = str(options["model"])
    gpu = find_parts(options["gpu"], "--gpu", "gpu") if options["gpu"] else None
    probe = ProbedSpeeds(options["probe"]) if options["probe"] else None
    base = TieredSetup(
        tiers=tuple(parse_tier(it, probe=probe, gpu=gpu) for it in tiers),
        token_bytes=size.of(model).bytes_per_token_stored,
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
        if nodes > 1 or router == routers[0]:  # with one node all routers are the same
            setups.append(replace(base, nodes=nodes, router=router, evictor=evictor))
    return list(dict.fromkeys(setups))


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(it.strip() for it in text.split(",")))


def _counts(text: str) -> list[int]:
    try:
        return [parse_count(it) for it in _words(text)]
    except ValueError:
        raise click.UsageError(f"--nodes {text!r}: allowed: whole numbers, with commas between them") from None
