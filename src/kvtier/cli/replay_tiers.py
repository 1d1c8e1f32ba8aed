"""`kvtier replay --tier`: a trace through the real core over tiers, in virtual time."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.replay_ending import Ending
from kvtier.report.table import Table, print_table

if TYPE_CHECKING:
    from kvtier.replay.outcome import Tiered
    from kvtier.replay.tiered import Setup
    from kvtier.trace.arrays import TraceArrays


def run_tiers(
    traces: tuple[Path, ...],
    tiers: tuple[str, ...],
    policies: list[str],
    options: dict[str, Any],
    ending: Ending,
) -> int:
    """Replay each trace through each combination of policies, nodes and routers; returns the exit code.

    Args:
        traces: the files.
        tiers: as `--tier` has them, host memory first.
        policies: names of eviction policies.
        options: of `tier_options` and `reading_options`, jobs and keep.
        ending: how all this is told.
    """
    from kvtier.cli.replay import packed_trace
    from kvtier.replay.comparing import sweep_tiers
    from kvtier.replay.stating import TieredReplay, planner_loses
    from kvtier.trace.stats import trace_stats

    setups = _setups(tiers, policies, options)
    # One way alone is also replayed without the planner, to show what that is worth. Several would take twice as long.
    twin = replace(setups[0], is_planned=False) if len(setups) == 1 and setups[0].is_planned else None
    all_setups = setups if twin is None else [*setups, twin]
    model = str(options["model"])
    shown: list[TieredReplay] = []
    for path in traces:
        packed = packed_trace(path, options)
        with ending.watch(path.name, len(packed) * len(all_setups)) as (advance, should_stop):
            done = sweep_tiers(
                packed, all_setups, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
            )
        unplanned = done.pop(twin, None) if twin is not None else None
        if unplanned is not None and not (unplanned.is_complete and all(it.is_complete for it in done.values())):
            unplanned = None
        if ending.report is not None:
            what = trace_stats(packed)
            shown += [TieredReplay(description=what, model=model, setup=it, outcome=done[it]) for it in done]
        for setup, outcome in done.items():
            ending.tell(_as_dict(packed, model, setup, outcome, unplanned))
            loss = planner_loses(outcome, unplanned) if unplanned is not None else ""
            if loss:
                click.echo(f"kvtier: trace {path}: {loss}", err=True)
        if done and not ending.as_json:
            _print(packed, model, done, unplanned)
        if ending.was_stopped:
            whole = sum(it.is_complete for it in done.values())
            told = f"{whole} of {len(setups)} replays of {path} are done"
            cut = [f"{it.requests:,}" for it in done.values() if not it.is_complete]
            rest = f"; {' and '.join(cut)} of {len(packed):,} requests of others were asked" if cut else ""
            click.echo(f"Broken off: {told}{rest}.", err=True)
            break

    def write(report: Path) -> None:
        from kvtier.replay.tiered_report import write_tiered_report

        write_tiered_report(report, shown)

    return ending.end(write, is_list=len(traces) * len(setups) > 1)


def _as_dict(
    packed: "TraceArrays", model: str, setup: "Setup", outcome: "Tiered", unplanned: "Tiered | None"
) -> dict[str, object]:
    from kvtier.replay.stating import planner_loses, stated

    loss = "" if unplanned is None else planner_loses(outcome, unplanned)

    return {
        "trace": packed.name,
        "model": model,
        "token_bytes": setup.token_bytes,
        "policy": setup.evictor,
        "router": setup.router,
        "write_policy": setup.write_policy.value,
        "stated": [it._asdict() for it in stated(setup)],
        **asdict(outcome),
        "ttft_unplanned": None if unplanned is None else asdict(unplanned.ttft),
        "warnings": [loss] if loss else [],
    }


def _setups(tiers: tuple[str, ...], policies: list[str], options: dict[str, Any]) -> "list[Setup]":
    from kvtier import size
    from kvtier.config.sections import HostConfig
    from kvtier.core.limits import WritePolicy
    from kvtier.replay.speeds import Probed, find_part, prefill_of
    from kvtier.replay.stating import parse_tier
    from kvtier.replay.tiered import Setup

    model = str(options["model"])
    gpu = find_part(options["gpu"], "--gpu", "gpu") if options["gpu"] else None
    probe = Probed(options["probe"]) if options["probe"] else None
    base = Setup(
        tiers=tuple(parse_tier(it, probe=probe, gpu=gpu) for it in tiers),
        token_bytes=size.of(model).bytes_per_token_stored,
        prefill=prefill_of(model, tokens_per_s=options["prefill"], gpu=gpu),
        servers=options["servers"],
        seed=options["seed"],
        write_policy=WritePolicy(options["write_policy"]),
        is_planned=options["planner"],
    )
    setups: list[Setup] = []
    routers = _words(options["router"])
    for policy, nodes, router in product(policies, _counts(options["nodes"]), routers):
        evictor = HostConfig().evictor if policy == "default" else policy
        setup = replace(base, nodes=nodes, router=router, evictor=evictor)
        if nodes > 1 or router == routers[0]:  # one node has nothing to choose between: all routers are alike
            setups.append(setup)
    return list(dict.fromkeys(setups))


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(it.strip() for it in text.split(",")))


def _counts(text: str) -> list[int]:
    try:
        return [int(it) for it in _words(text)]
    except ValueError:
        raise click.UsageError(f"--nodes {text!r}: allowed: whole numbers, with commas between them") from None


def _print(packed: "TraceArrays", model: str, done: "dict[Setup, Tiered]", unplanned: "Tiered | None") -> None:
    from kvtier.replay.comparing import comparison_table
    from kvtier.replay.stating import stated_table

    setup = next(iter(done))
    click.secho(f"{packed.name}: {len(packed):,} requests, {model}, {setup.token_bytes:,.0f} bytes a token", bold=True)
    if len(done) == 1:
        _print_one(packed, setup, done[setup], unplanned)
    else:
        click.echo(f"  whole blocks of {packed.block_tokens} tokens; write policy {setup.write_policy.value}")
        click.echo()
        _emit(comparison_table(done))
    click.echo()
    _emit(stated_table(setup))


def _print_one(packed: "TraceArrays", setup: "Setup", told: "Tiered", unplanned: "Tiered | None") -> None:
    from kvtier.replay.stating import planning_table, tiers_table, ttft_table

    nodes = "one node" if told.nodes == 1 else f"{told.nodes:,} nodes, router {setup.router}"
    servers = f"{nodes}, {told.servers} prompts at a time on each"
    click.echo(f"  {servers}; whole blocks of {packed.block_tokens} tokens; {told.hit_rate:.4f} of input tokens loaded")
    for table in (tiers_table(told), ttft_table(told, unplanned), planning_table(told)):
        click.echo()
        _emit(table)


def _emit(table: "Table") -> None:
    print_table(table)
