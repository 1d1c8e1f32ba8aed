"""`kvtier replay`: what hit rate, which policy and how much storage, from a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvtier.cli.options import OutputFile
from kvtier.cli.replay_ending import Ending
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table

if TYPE_CHECKING:
    from kvtier.replay.hits import Outcome
    from kvtier.replay.tables import Replayed
    from kvtier.trace.arrays import TraceArrays
    from kvtier.trace.stats import TraceStats

CAPACITIES = "1M,3M,10M"
POLICIES = "default,lru,min"


_TIER_ONLY = ("model", "gpu", "prefill", "probe", "servers", "nodes", "router", "write_policy", "planner")


class _RunOrDescribe(click.Group):
    """``replay TRACE`` and ``replay describe TRACE``: without a known word, the first is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put in the word that was left out."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


def reading_options(command: Callable[..., object]) -> Callable[..., object]:
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


def tier_options(command: Callable[..., object]) -> Callable[..., object]:
    """Options on tiers, and on the nodes above them."""
    for option in reversed(
        (
            click.option(
                "--tier",
                "tiers",
                multiple=True,
                metavar="NAME=SIZE",
                help="host=64GiB first, then such as disk=4TiB,read=12GB/s or disk=4xpm1753; may be repeated.",
            ),
            click.option("--model", default="llama-3.3-70b", help="Whose KV tiers hold, as `kvtier size` knows it."),
            click.option("--gpu", help="GPUs of a node, such as 8xh100-sxm: speed of prefill, and of their links."),
            click.option("--prefill", type=float, help="Tokens a second of one prompt.  [by --gpu, or 10,000]"),
            click.option(
                "--probe", type=click.Path(path_type=Path), help="Speeds of links from a record of `kvtier probe`."
            ),
            click.option("--servers", type=int, help="Prompts at a time on a node.  [80 % busy without tiers]"),
            click.option("--nodes", default="1", help="Engines, each with its own tiers unless shared; several.  [1]"),
            click.option(
                "--router",
                default="round-robin",
                help="random, round-robin, session, prefix, load-and-prefix; several.",
            ),
            click.option("--write-policy", type=click.Choice(["through", "back", "selective"]), default="through"),
            click.option("--planner/--no-planner", default=True, help="Without it, whatever is there is loaded."),
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
@tier_options
@reading_options
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes at most.  [default: one for each core]")
@click.option("--keep", type=OutputFile(), help="File of outcomes: a run goes on where it stood.")
@click.option("--report", type=OutputFile(), help="Also write an HTML report with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    traces: tuple[Path, ...],
    capacity_tokens: str,
    policies: str,
    tiers: tuple[str, ...],
    report: Path | None,
    as_json: bool,
    **others: Any,  # noqa: ANN401  jobs, keep, and the options of `tier_options` and `reading_options`
) -> int:
    """Replay TRACES through one cache, for each policy and capacity.

    The whole trace, no warm-up; the hit rate is the tokens of the longest leading run of blocks that are here, over
    input tokens; a prompt's deepest block is touched first. Policies are the product's own (`default` is what kvtier
    ships) and others to compare with; `min` is the best that keeping whole prefixes allows, `infinite` a cache without
    end.

    With --tier, the real core and planner run on each node over tiers of that size and speed, in virtual time, for each
    policy of the product, number of nodes and router.

    Ctrl-C ends a run with what is done; with --keep the next one goes on from there.

    `kvtier replay describe TRACE` tells what a trace is like.

    Reads JSON lines with hash_ids or hash_runs (Mooncake), coding-agent sessions, text conversations, KV events of
    vLLM or SGLang, and for `describe` CSV with lengths (Azure); plain, gzip or zstd; a file, or a directory of
    .json and .jsonl files that are one trace.
    """
    names = _names(policies)
    _check_given(has_tiers=bool(tiers))
    if report is not None:
        from kvtier.report.output import check_matplotlib

        check_matplotlib("--report")
    if tiers:
        from kvtier.cli.replay_tiers import run_tiers

        chosen = names if _is_given("policies") else names[:1]  # of the others by default, one is a bound
        return run_tiers(traces, tiers, chosen, others, Ending(report, as_json=as_json))
    wanted = [(name, capacity) for name in names for capacity in _capacities(capacity_tokens)]
    return _run_policies(traces, wanted, others, Ending(report, as_json=as_json))


def _check_given(*, has_tiers: bool) -> None:
    """Refuse options that would do nothing."""
    for name in filter(_is_given, click.get_current_context().params):
        option = f"--{name.replace('_', '-')}"
        if has_tiers and name == "capacity_tokens":
            raise click.UsageError(f"{option} is not available with --tier")
        if not has_tiers and name in _TIER_ONLY:
            raise click.UsageError(f"{option} needs --tier")


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _run_policies(
    traces: tuple[Path, ...],
    wanted: list[tuple[str, int | None]],
    options: dict[str, Any],
    ending: Ending,
) -> int:
    from kvtier.replay.curves import Task, sweep
    from kvtier.replay.policies.bounds import infinite_hit_tokens

    tasks = [Task(*it) for it in wanted]
    shown: list[Replayed] = []
    for path in traces:
        packed = packed_trace(path, options)
        bound = infinite_hit_tokens(packed) / max(int(packed.input_tokens.sum(dtype="int64")), 1)
        with ending.watch(f"{path.name}: {len(tasks)} replays", len(packed) * len(tasks)) as (advance, should_stop):
            outcomes = sweep(
                packed, tasks, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
            )
        if ending.report is not None:
            shown.append(_described(packed, bound, outcomes))
        ending.tell({**_as_dict(packed, bound, outcomes), "is_complete": len(outcomes) == len(tasks)})
        if not ending.as_json:
            _print(packed, bound, outcomes)
        if ending.was_stopped:
            click.echo(f"Broken off: {len(outcomes)} of {len(tasks)} replays of {path} are done.", err=True)
            break

    def write(report: Path) -> None:
        from kvtier.replay.report import write_report

        write_report(report, shown)

    return ending.end(write, is_list=len(traces) > 1)


def _described(packed: "TraceArrays", bound: float, outcomes: "list[Outcome]") -> "Replayed":
    """What a report tells of a trace; only reports pay for these imports."""
    from kvtier.replay.tables import Replayed
    from kvtier.trace.stats import trace_stats

    return Replayed(description=trace_stats(packed), bound=bound, outcomes=outcomes)


@replay.command()
@click.argument("trace", type=click.Path(path_type=Path))
@reading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(trace: Path, as_json: bool, **reading: Any) -> None:  # noqa: ANN401  as above
    """Tell what TRACE is like: requests, tokens, reuse, its intervals, working set, sessions."""
    from kvtier.replay.tables import description_table
    from kvtier.trace.stats import trace_stats

    told = trace_stats(packed_trace(trace, reading))
    if as_json:
        print_json(_plain(told))
        return
    table = description_table(told)
    print_table(table)
    for note in told.notes:
        click.echo(f"Note: {note}.")


def packed_trace(path: Path, options: dict[str, Any]) -> "TraceArrays":
    """The trace at `path`, read as the options of `reading_options` say; warnings go to stderr."""
    from kvtier.trace.arrays import read_arrays
    from kvtier.trace.formats.request_lines import RequestLines
    from kvtier.trace.formats.session_lines import SessionLines
    from kvtier.trace.formats.text_lines import TextLines
    from kvtier.trace.open import ReadOptions, open_trace

    reading: ReadOptions = ReadOptions(
        block_tokens=options["block"],
        window_h=options["window_h"],
        seed=options["seed"],
        time_unit=options["time_unit"],
        tokenizer=options["tokenizer"],
    )
    trace = open_trace(path, reading)
    readers = {"--tokenizer": (TextLines,), "--window-h": (SessionLines,), "--time-unit": (TextLines, RequestLines)}
    for option, of in readers.items():
        if _is_given(option[2:].replace("-", "_")) and not isinstance(trace, of):
            click.echo(f"kvtier: trace {path}: {option} has no effect on a trace of this form", err=True)
    packed = read_arrays(trace, is_strict=options["strict"])
    for warning in packed.warnings:
        click.echo(f"kvtier: trace {path}: {warning}", err=True)
    return packed


def _names(text: str) -> list[str]:
    from kvtier.replay.policies.registry import REFERENCES, policy_names

    names = [it.strip() for it in text.split(",") if it.strip()]
    if names == ["help"]:
        known = {name: REFERENCES.get(name) for name in policy_names()}
        rows = [(name, it.help if it else "shipped with kvtier, or installed") for name, it in known.items()]
        print_table(Table(("policy", "what it is"), rows))
        raise click.exceptions.Exit(0)
    if not names:
        raise click.UsageError("--policy is empty; allowed: names, with commas between them")
    return list(dict.fromkeys(names))


def _capacities(text: str) -> list[int | None]:
    from kvtier.config.kinds import parse_count
    from kvtier.errors import ConfigError

    found: list[int | None] = []
    for it in text.split(","):
        try:
            found.append(None if it.strip().lower() == "inf" else parse_count(it))
        except ValueError as error:
            raise ConfigError(f"--capacity-tokens {it!r}: {error}") from None
    return list(dict.fromkeys(found))


def _as_dict(packed: "TraceArrays", bound: float, outcomes: "list[Outcome]") -> dict[str, object]:
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


def _print(packed: "TraceArrays", bound: float, outcomes: "list[Outcome]") -> None:
    from kvtier.replay.tables import outcomes_table

    click.secho(f"{packed.name}: {len(packed):,} requests, blocks of {packed.block_tokens} tokens", bold=True)
    click.echo(f"  a cache without end hits {bound:.4f} of the input tokens; whole trace, no warm-up")
    for note in packed.notes:
        click.echo(f"  {note}")
    table = outcomes_table(bound, outcomes)
    print_table(table)


def _plain(told: "TraceStats") -> dict[str, object]:
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
