"""`kvtier replay --tier`: a trace through the real core over tiers, in virtual time."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.render import emit_json, emit_table, progress

if TYPE_CHECKING:
    from kvtier.replay.outcome import Tiered
    from kvtier.replay.stating import TieredReplay
    from kvtier.replay.tiered import Setup
    from kvtier.trace.packed import Packed


def run_tiers(
    traces: tuple[Path, ...],
    tiers: tuple[str, ...],
    policy: str,
    options: dict[str, Any],
    *,
    report: Path | None,
    as_json: bool,
) -> int:
    """Replay each trace; returns the exit code.

    Args:
        traces: the files.
        tiers: as `--tier` has them, host memory first.
        policy: an eviction policy of the product, with an admission if wanted.
        options: of `tier_options` and `reading_options`.
        report: where to write an HTML report; None for none.
        as_json: print JSON instead of tables.
    """
    from kvtier.cli.replay import INTERRUPTED, interruptible, packed_trace
    from kvtier.replay.stating import stated
    from kvtier.replay.tiered import replay_tiers

    setup = _setup(tiers, policy, options)
    model = str(options["model"])
    told: list[dict[str, object]] = []
    shown: list[TieredReplay] = []
    was_stopped = False
    for path in traces:
        packed = packed_trace(path, options)
        with interruptible() as should_stop, progress(path.name, len(packed)) as advance:
            outcome = replay_tiers(packed, setup, advance, should_stop)
            was_stopped = should_stop()
        told.append(
            {
                "trace": packed.name,
                "model": model,
                "token_bytes": setup.token_bytes,
                "policy": f"{setup.evictor}+{setup.admitter}",
                "router": setup.router,
                "write_policy": setup.write_policy.value,
                "stated": [it._asdict() for it in stated(setup)],
                **asdict(outcome),
            }
        )
        if report is not None:
            from kvtier.replay.stating import TieredReplay as Shown
            from kvtier.trace.describe import describe

            shown.append(Shown(description=describe(packed), model=model, setup=setup, outcome=outcome))
        if not as_json:
            _print(packed, model, setup, outcome)
        if was_stopped:
            click.echo(f"Broken off: {outcome.requests:,} of {len(packed):,} requests of {path} were asked.", err=True)
            break
    if report is not None:
        from kvtier.replay.tiered_report import write_tiered_report

        write_tiered_report(report, shown)
        click.echo(f"Written: {report}", err=True)
    if as_json:
        emit_json(told[0] if len(traces) == 1 else told)
    return INTERRUPTED if was_stopped else 0


def _setup(tiers: tuple[str, ...], policy: str, options: dict[str, Any]) -> "Setup":
    from kvtier import size
    from kvtier.config.sections import HostConfig
    from kvtier.core.limits import WritePolicy
    from kvtier.replay.speeds import Probed, find_part, prefill_of
    from kvtier.replay.stating import parse_tier
    from kvtier.replay.tiered import Setup

    evictor, _, admitter = policy.partition("+")
    model = str(options["model"])
    gpu = find_part(options["gpu"], "--gpu", "gpu") if options["gpu"] else None
    probe = Probed(options["probe"]) if options["probe"] else None
    return Setup(
        tiers=tuple(parse_tier(it, probe=probe, gpu=gpu) for it in tiers),
        token_bytes=size.of(model).bytes_per_token_stored,
        prefill=prefill_of(model, tokens_per_s=options["prefill"], gpu=gpu),
        servers=options["servers"],
        nodes=options["nodes"],
        router=options["router"],
        seed=options["seed"],
        evictor=HostConfig().evictor if evictor == "default" else evictor,
        admitter=admitter or "all",
        write_policy=WritePolicy(options["write_policy"]),
        is_planned=options["planner"],
    )


def _print(packed: "Packed", model: str, setup: "Setup", told: "Tiered") -> None:
    from kvtier.replay.stating import planning_table, stated_table, tiers_table, ttft_table

    nodes = "one node" if told.nodes == 1 else f"{told.nodes:,} nodes, router {setup.router}"
    servers = f"{nodes}, {told.servers} prompts at a time on each"
    click.secho(
        f"{packed.name}: {told.requests:,} requests, {model}, {setup.token_bytes:,.0f} bytes a token", bold=True
    )
    click.echo(f"  {servers}; whole blocks of {packed.block_tokens} tokens; {told.hit_rate:.4f} of input tokens loaded")
    for table in (tiers_table(told), ttft_table(told), planning_table(told), stated_table(setup)):
        click.echo()
        emit_table(table.columns, table.rows, numeric=table.numeric)
