"""`kvtier replay`: what hit rate, which policy and how much storage, from a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.render import emit_json, emit_table, progress

if TYPE_CHECKING:
    from kvtier.replay.hits import Outcome
    from kvtier.replay.tables import Replayed
    from kvtier.replay.tiered import Tiered
    from kvtier.trace.describe import Description
    from kvtier.trace.packed import Packed

CAPACITIES = "1M,3M,10M"
POLICIES = "default,lru,min"


class _RunOrDescribe(click.Group):
    """``replay TRACE`` and ``replay describe TRACE``: without a known word, the first is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put in the word that was left out."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


def reading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options on how a trace is read."""
    for option in reversed(
        (
            click.option(
                "--block", type=int, metavar="TOKENS", help="Tokens of a block.  [default: the trace's; sessions: 256]"
            ),
            click.option("--window-h", type=float, default=10.0, help="Hours within which sessions start.  [10]"),
            click.option("--seed", type=int, default=1, help="Of the draw of their starts.  [1]"),
            click.option("--time-unit", default="ms", help="Of timestamps in request lines: s, ms, us.  [ms]"),
            click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, for traces of text."),
            click.option("--strict", is_flag=True, help="What is wrong with a trace is an error, not a warning."),
        )
    ):
        command = option(command)
    return command


@click.group(cls=_RunOrDescribe)
def replay() -> None:
    """Replay traces."""


@replay.command(name="run")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--capacity-tokens", default=CAPACITIES, help=f"Such as 3M; several, or inf.  [{CAPACITIES}]")
@click.option("--policy", "policies", default=POLICIES, help=f"One or several; `help` lists them.  [{POLICIES}]")
@click.option("--tier", "tiers", multiple=True, help="Such as host=64GiB, then disk=4TiB,read=12GB/s; may be repeated.")
@click.option("--model", default="llama-3.3-70b", help="Whose KV tiers hold, as `kvtier size` knows it.")
@click.option("--prefill", type=float, default=10_000.0, help="Tokens a second that one prompt is computed with.")
@click.option("--servers", type=int, help="Prompts computed at a time on a node.  [default: 80 % busy without tiers]")
@click.option("--nodes", type=int, default=1, help="Engines, each with its own tiers unless they are shared.")
@click.option("--router", default="round-robin", help="random, round-robin, session, prefix, load-and-prefix.")
@click.option("--write-policy", type=click.Choice(["through", "back", "selective"]), default="through")
@reading_options
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes at most.  [default: one for each core]")
@click.option("--keep", type=click.Path(path_type=Path), help="File of outcomes: a run goes on where it stood.")
@click.option("--report", type=click.Path(path_type=Path), help="Also write an HTML report with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    traces: tuple[Path, ...],
    capacity_tokens: str,
    policies: str,
    tiers: tuple[str, ...],
    model: str,
    prefill: float,
    servers: int | None,
    nodes: int,
    router: str,
    write_policy: str,
    jobs: int | None,
    keep: Path | None,
    report: Path | None,
    as_json: bool,
    **reading: Any,  # noqa: ANN401  the options of `reading_options`
) -> None:
    """Replay TRACES through one cache, for each policy and capacity.

    The whole trace, no warm-up; the hit rate is the tokens of the longest leading run of blocks that are here, over
    input tokens; a prompt's deepest block is touched first. Policies are the product's own (`default` is what kvtier
    ships) and others to compare with; `min` is the best that keeping whole prefixes allows, `infinite` a cache without
    end.

    With --tier, the real core runs on each node over tiers of that size and speed, in virtual time; the first --policy
    rules its host memory and tiers.

    `kvtier replay describe TRACE` tells what a trace is like.

    Reads JSON lines with hash_ids or hash_runs (Mooncake), coding-agent sessions and text conversations; plain, gzip
    or zstd.
    """
    from kvtier.replay.cost import Prefill
    from kvtier.replay.curves import Journal, Task, sweep
    from kvtier.replay.policies.bounds import infinite_hit_tokens

    names = _names(policies)
    if tiers:
        wanted = {
            "servers": servers,
            "nodes": nodes,
            "router": router,
            "policy": names[0],
            "write_policy": write_policy,
        }
        _run_tiers(traces, tiers, model, prefill, wanted, reading, report=report, as_json=as_json)
        return
    capacities = _capacities(capacity_tokens)
    if report is not None:
        from kvtier.plan.files import check_library, check_writable

        check_library("--report")
        check_writable("--report", report)
    told: list[dict[str, object]] = []
    shown: list[Replayed] = []
    for path in traces:
        packed = packed_trace(path, reading)
        tasks = [Task(name, capacity) for name in names for capacity in capacities]
        bound = infinite_hit_tokens(packed) / max(int(packed.input_tokens.sum(dtype="int64")), 1)
        journal = Journal(keep, packed, Prefill()) if keep else None
        with progress(f"{path.name}: {len(tasks)} replays", len(packed) * len({*tasks})) as advance:
            outcomes = sweep(packed, tasks, jobs=jobs, journal=journal, advance=advance)
        if report is not None:
            from kvtier.replay.tables import Replayed as Shown
            from kvtier.trace.describe import describe as measure

            shown.append(Shown(description=measure(packed), bound=bound, outcomes=outcomes))
        told.append(_as_dict(packed, bound, outcomes))
        if not as_json:
            _print(packed, bound, outcomes)
    if report is not None:
        from kvtier.replay.report import write_report

        write_report(report, shown)
        click.echo(f"Written: {report}", err=True)
    if as_json:
        emit_json(told[0] if len(told) == 1 else told)


def _run_tiers(
    traces: tuple[Path, ...],
    tiers: tuple[str, ...],
    model: str,
    prefill: float,
    wanted: dict[str, Any],
    reading: dict[str, Any],
    *,
    report: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from kvtier import size
    from kvtier.config.sections import HostConfig
    from kvtier.core.limits import WritePolicy
    from kvtier.errors import ConfigError
    from kvtier.replay.cost import Prefill
    from kvtier.replay.stating import parse_tier
    from kvtier.replay.tiered import Setup, replay_tiers

    if report is not None:
        raise ConfigError("--report is not available with --tier; allowed: --json")
    policy, _, admitter = str(wanted["policy"]).partition("+")
    setup = Setup(
        tiers=tuple(parse_tier(it) for it in tiers),
        token_bytes=size.of(model).bytes_per_token_stored,
        prefill=Prefill(tokens_per_s=prefill),
        servers=wanted["servers"],
        nodes=wanted["nodes"],
        router=wanted["router"],
        seed=reading["seed"],
        evictor=HostConfig().evictor if policy == "default" else policy,
        admitter=admitter or "all",
        write_policy=WritePolicy(wanted["write_policy"]),
    )
    told: list[dict[str, object]] = []
    for path in traces:
        packed = packed_trace(path, reading)
        with progress(path.name, len(packed)) as advance:
            outcome = replay_tiers(packed, setup, advance)
        told.append({"trace": packed.name, "model": model, "token_bytes": setup.token_bytes, **asdict(outcome)})
        if not as_json:
            _print_tiers(packed, model, setup.token_bytes, outcome)
    if as_json:
        emit_json(told[0] if len(told) == 1 else told)


def _print_tiers(packed: "Packed", model: str, token_bytes: float, told: "Tiered") -> None:
    from kvtier.replay.stating import tiers_table, ttft_table

    servers = f"{told.nodes} nodes, {told.servers} prompts at a time on each"
    click.secho(f"{packed.name}: {told.requests:,} requests, {model}, {token_bytes:,.0f} bytes a token", bold=True)
    click.echo(f"  {servers}; whole blocks of {packed.block_tokens} tokens; {told.hit_rate:.4f} of input tokens loaded")
    for table in (tiers_table(told), ttft_table(told)):
        click.echo()
        emit_table(table.columns, table.rows, numeric=table.numeric)
    click.echo()
    click.echo(
        f"{told.loads:,} loads, {told.cut_loads:,} brought less than asked for, {told.convoys:,} joined others; "
        f"{told.skipped_tokens:,} tokens were there, but sooner computed; {told.dropped_chunks:,} chunks not stored"
    )


@replay.command()
@click.argument("trace", type=click.Path(path_type=Path))
@reading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(trace: Path, as_json: bool, **reading: Any) -> None:  # noqa: ANN401  as above
    """Tell what TRACE is like: requests, tokens, reuse, its intervals, working set, sessions."""
    from kvtier.replay.tables import description_table
    from kvtier.trace.describe import describe as measure

    told = measure(packed_trace(trace, reading))
    if as_json:
        emit_json(_plain(told))
        return
    table = description_table(told)
    emit_table(table.columns, table.rows, numeric=table.numeric)
    for note in told.notes:
        click.echo(f"Note: {note}.")


def packed_trace(path: Path, options: dict[str, Any]) -> "Packed":
    """The trace at `path`, read as the options of `reading_options` say; warnings go to stderr."""
    from kvtier.trace.opening import Reading, open_trace
    from kvtier.trace.packed import pack

    reading: Reading = Reading(
        block_tokens=options["block"],
        window_h=options["window_h"],
        seed=options["seed"],
        time_unit=options["time_unit"],
        tokenizer=options["tokenizer"],
    )
    packed = pack(open_trace(path, reading), is_strict=options["strict"])
    for warning in packed.warnings:
        click.echo(f"kvtier: trace {path}: {warning}", err=True)
    return packed


def _names(text: str) -> list[str]:
    from kvtier.replay.policies.registry import REFERENCES, policy_names

    names = [it.strip() for it in text.split(",") if it.strip()]
    if names == ["help"]:
        for name in policy_names():
            known = REFERENCES.get(name)
            click.echo(f"{name:<14}{known.help if known else 'shipped with kvtier, or installed'}")
        raise click.exceptions.Exit(0)
    if not names:
        raise click.UsageError("--policy is empty; allowed: names, with commas between them")
    return list(dict.fromkeys(names))


def _capacities(text: str) -> list[int | None]:
    from kvtier.errors import ConfigError
    from kvtier.size.units import parse_count

    found: list[int | None] = []
    for it in text.split(","):
        try:
            found.append(None if it.strip().lower() == "inf" else parse_count(it))
        except ValueError as error:
            raise ConfigError(f"--capacity-tokens {it!r}: {error}") from None
    return list(dict.fromkeys(found))


def _as_dict(packed: "Packed", bound: float, outcomes: "list[Outcome]") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "trace": packed.name,
        "requests": len(packed),
        "input_tokens": int(packed.input_tokens.sum(dtype="int64")),
        "block_tokens": packed.block_tokens,
        "infinite_hit_rate": bound,
        "results": [asdict(it) for it in outcomes],
        "prefix_violations": packed.prefix_violations,
        "notes": list(packed.notes),
        "warnings": list(packed.warnings),
    }


def _print(packed: "Packed", bound: float, outcomes: "list[Outcome]") -> None:
    from kvtier.replay.tables import outcomes_table

    click.secho(f"{packed.name}: {len(packed):,} requests, blocks of {packed.block_tokens} tokens", bold=True)
    click.echo(f"  a cache without end hits {bound:.4f} of the input tokens; whole trace, no warm-up")
    for note in packed.notes:
        click.echo(f"  {note}")
    table = outcomes_table(bound, outcomes)
    emit_table(table.columns, table.rows, numeric=table.numeric)


def _plain(told: "Description") -> dict[str, object]:
    out: dict[str, object] = {}
    for name in told.__slots__:
        value: Any = getattr(told, name)
        if name == "over_time":
            value = {
                key: it.tolist() if hasattr(it, "tolist") else it
                for key, it in ((slot, getattr(value, slot)) for slot in value.__slots__)
            }
        if name != "intervals":
            out[name] = value
    return out
