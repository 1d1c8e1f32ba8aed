"""`kvtier replay`: hit rates of policies and capacities, and replays through tiers, from a trace."""

import re
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from kvtier.cli.options import OutputFile, PictureFile, ReportFile, tell_written
from kvtier.report.output import print_json, progress
from kvtier.report.table import Table, print_table

if TYPE_CHECKING:
    from kvtier.replay.single_cache import CacheResult, Task
    from kvtier.report.report import Report
    from kvtier.trace.arrays import TraceArrays
    from kvtier.trace.stats import TraceStats

CAPACITIES = "3%,10%,30%"
POLICIES = "default,lru,min"


_TIER_ONLY = ("model", "gpu", "prefill", "probe", "servers", "nodes", "router", "write_policy", "planner")


INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell would report it."""


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. The second Ctrl-C ends the process as usual."""
    is_pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, before)


class ReplayOutput:
    """Collects the results of a command until they are printed.

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
        """Objects to print."""

    @contextmanager
    def watch(self, label: str, requests: int) -> Generator[tuple[Callable[[float], None], Callable[[], bool]]]:
        """Show progress and note Ctrl-C; yields `advance` and `should_stop`."""
        with interruptible() as should_stop, progress(label, requests) as advance:
            yield advance, should_stop
            self.is_interrupted = should_stop()

    @property
    def is_drawn(self) -> bool:
        """Whether there will be charts."""
        return self.report is not None or self.picture is not None

    def refuse_several(self, what: str, count: int) -> None:
        """Refuse a picture of more than one replay.

        Raises:
            ConfigError: there are several.
        """
        from kvtier.errors import ConfigError

        if self.picture is not None and count > 1:
            raise ConfigError(f"--picture: {count} {what}; allowed: one, or --report, which has charts of each")

    def finish(self, shown: "Report", *, is_list: bool) -> int:
        """Write the report and the charts, and print JSON; returns the exit code.

        Args:
            shown: the report.
            is_list: the JSON is a list, also of one object.
        """
        tell_written(*shown.write(self.report, self.picture))
        if self.as_json:
            print_json(self.json if is_list or not self.json else self.json[0])
        return INTERRUPTED if self.is_interrupted else 0


class _RunOrDescribe(click.Group):
    """``replay TRACE`` is ``replay run TRACE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` where there is no subcommand."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


def reading_options(command: Callable[..., object]) -> Callable[..., object]:
    """Options for reading a trace."""
    for option in reversed(
        (
            click.option(
                "--block", type=int, metavar="TOKENS", help="Tokens of a block.  [the trace's; sessions: 256]"
            ),
            click.option("--window-h", type=float, default=10.0, help="Hours over which sessions start.  [10]"),
            click.option("--seed", type=int, default=1, help="Seed of all that is drawn, also start times.  [1]"),
            click.option("--time-unit", default="ms", help="Unit of timestamps in request lines: s, ms, us.  [ms]"),
            click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json, for traces of text."),
            click.option("--strict", is_flag=True, help="Treat warnings about a trace as errors."),
        )
    ):
        command = option(command)
    return command


def tier_options(command: Callable[..., object]) -> Callable[..., object]:
    """Options for tiers and nodes."""
    for option in reversed(
        (
            click.option(
                "--tier",
                "tiers",
                multiple=True,
                metavar="NAME=SIZE",
                help="A tier, host memory first: host=64GiB, disk=4TiB,read=12GB/s, disk=4xpm1753, disk=4x7.68TB, "
                "s3=40TiB. Repeatable; a name that is a kind, or kind=KIND, decides whether lookups are remote.",
            ),
            click.option(
                "--model",
                default="llama-3.3-70b",
                help="Model whose KV is stored, as in `kvtier size`.  [llama-3.3-70b]",
            ),
            click.option(
                "--gpu", help="GPUs of a node, such as 8xh100-sxm; they set the speeds of prefill and host links."
            ),
            click.option(
                "--prefill", type=float, help="Prefill speed of one prompt, in tokens a second.  [by --gpu, or 10,000]"
            ),
            click.option(
                "--probe", type=click.Path(path_type=Path), help="Link speeds from a record of `kvtier probe`."
            ),
            click.option(
                "--servers", type=int, help="Concurrent prompts of a node.  [busy 80 % of the time without tiers]"
            ),
            click.option(
                "--nodes",
                default="1",
                help="Numbers of engines, comma-separated; each engine has its own unshared tiers.  [1]",
            ),
            click.option(
                "--router",
                default="round-robin",
                help="Routers, comma-separated: random, round-robin, session, prefix, load-and-prefix.",
            ),
            click.option(
                "--write-policy",
                type=click.Choice(["through", "back", "selective"]),
                default="through",
                help="When stored KV is copied to lower tiers.  [through]",
            ),
            click.option(
                "--planner/--no-planner", default=True, help="Use the planner; --no-planner loads everything cached."
            ),
        )
    ):
        command = option(command)
    return command


@click.group(cls=_RunOrDescribe)
def replay() -> None:
    """Replay traces."""


@replay.command(name="run")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--capacity-tokens",
    default=CAPACITIES,
    help="Cache capacities, comma-separated: tokens such as 3M, shares of the trace's unique tokens such as 10%, or "
    f"inf.  [{CAPACITIES}]",
)
@click.option(
    "--policy",
    "policies",
    default=POLICIES,
    help=f"Eviction policies, comma-separated; `help` lists all.  [{POLICIES}]",
)
@click.option(
    "--draws",
    type=click.IntRange(1, 100),
    default=3,
    help="Draws of start times, from --seed on, for traces of sessions without them; not with --tier.  [3]",
)
@tier_options
@reading_options
@click.option("--jobs", type=click.IntRange(1, 256), help="Maximum number of processes.  [one for each core]")
@click.option("--keep", type=OutputFile(), help="Journal file: an interrupted run continues from it.")
@click.option("--report", type=ReportFile(), help="Also write an HTML report with charts.")
@click.option("--picture", type=PictureFile(), help="Also write the charts of one replay to a .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    traces: tuple[Path, ...],
    capacity_tokens: str,
    policies: str,
    tiers: tuple[str, ...],
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    **others: Any,  # noqa: ANN401  jobs, keep, and the options of `tier_options` and `reading_options`
) -> int:
    """Replay TRACES through one cache, for each policy and capacity.

    Unique tokens are those of all distinct blocks of a trace: what an infinite cache holds at the end. Without
    --capacity-tokens, capacities are shares of them.

    The replay covers the whole trace, without warm-up.
    The hit rate is the tokens of the longest leading run of cached blocks, over input
    tokens; a prompt's last block is accessed first. Policies are the shipped ones (`default` is the default setting)
    and others to compare with; `min` is the bound for policies that keep whole prefixes, `infinite` an infinite cache.
    `default` takes several times the processor time of `lru`, because it learns; the table has it.

    Sessions without start times (a coding agent's) start at random. Their order moves hit rates by some percent, so
    such a trace is replayed for several draws; the table has the mean, the least and the most.

    With --tier, the real core and planner run on each node, over tiers of these sizes and speeds, in virtual time, for
    each combination of shipped policy, number of nodes and router.

    Ctrl-C prints the finished replays; with --keep the next run continues from there.

    `kvtier replay describe TRACE` prints statistics of a trace.

    Formats: JSON lines with hash_ids or hash_runs (Mooncake), coding-agent sessions, text conversations, KV events of
    vLLM or SGLang, and for `describe` CSV with lengths (Azure); plain, gzip or zstd; a file, or a directory of
    .json and .jsonl files that are one trace.
    """
    names = _names(policies)
    _check_given(has_tiers=bool(tiers))
    output = ReplayOutput(report, picture, as_json=as_json)
    output.refuse_several("traces", len(traces))
    if tiers:
        from kvtier.cli.replay_tiers import run_tiers

        chosen = names if _is_given("policies") else names[:1]  # the other defaults include a bound
        return run_tiers(traces, tiers, chosen, others, output)
    return _run_policies(traces, names, _capacities(capacity_tokens), others, output)


def _check_given(*, has_tiers: bool) -> None:
    """Refuse options that would do nothing."""
    for name in filter(_is_given, click.get_current_context().params):
        option = f"--{name.replace('_', '-')}"
        if has_tiers and name in {"capacity_tokens", "draws"}:
            raise click.UsageError(f"{option} is not available with --tier")
        if not has_tiers and name in _TIER_ONLY:
            raise click.UsageError(f"{option} needs --tier")


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _run_policies(
    traces: tuple[Path, ...],
    names: list[str],
    capacities: "list[Capacity]",
    options: dict[str, Any],
    output: ReplayOutput,
) -> int:
    from kvtier.replay.policies.reference import infinite_hit_tokens
    from kvtier.replay.report import cache_sections
    from kvtier.replay.single_cache import Task, mean_of
    from kvtier.report.report import Report, Section
    from kvtier.trace.stats import trace_stats

    shown: list[Section] = []
    for path in traces:
        trace, is_drawn = _load(path, options)
        sizes = dict.fromkeys(it.tokens_of(trace) for it in capacities)
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
        shown += sections
        output.json.append(
            {**_as_dict(trace, bound, results), "seeds": seeds if is_drawn else [], "is_complete": done == count}
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
    trace: "TraceArrays",
    tasks: "list[Task]",
    seeds: list[int],
    options: dict[str, Any],
    watching: tuple[Callable[[float], None], Callable[[], bool]],
) -> "dict[Task, list[CacheResult]]":
    """The finished replays of each task, for each draw of the start times; `trace` is the first."""
    from kvtier.replay.single_cache import Task
    from kvtier.replay.sweep import sweep

    advance, should_stop = watching
    found: dict[Task, list[CacheResult]] = {}
    for seed in seeds:
        if should_stop():
            break
        drawn = trace if seed == seeds[0] else _load(path, {**options, "seed": seed}, is_quiet=True)[0]
        for it in sweep(
            drawn, tasks, jobs=options["jobs"], keep=options["keep"], advance=advance, should_stop=should_stop
        ):
            found.setdefault(Task(it.policy, it.capacity_tokens), []).append(it)
    return found


@replay.command()
@click.argument("trace", type=click.Path(path_type=Path))
@reading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(trace: Path, as_json: bool, **reading: Any) -> None:  # noqa: ANN401  as above
    """Print statistics of TRACE: requests, tokens, reuse and its intervals, working set, sessions."""
    from kvtier.replay.report import stats_table
    from kvtier.trace.stats import trace_stats

    stats = trace_stats(load_trace(trace, reading))
    if as_json:
        print_json(_plain(stats))
        return
    print_table(stats_table(stats))
    for note in stats.notes:
        click.echo(f"Note: {note}.")


def load_trace(path: Path, options: dict[str, Any]) -> "TraceArrays":
    """Read the trace at `path` with the options of `reading_options`; warnings go to stderr."""
    return _load(path, options)[0]


def _load(path: Path, options: dict[str, Any], *, is_quiet: bool = False) -> "tuple[TraceArrays, bool]":
    """The trace, and whether start times are drawn for its sessions and decide their order."""
    from kvtier.trace.arrays import read_arrays
    from kvtier.trace.open import ReadOptions, open_trace

    read_options: ReadOptions = ReadOptions(
        block_tokens=options["block"],
        window_h=options["window_h"],
        seed=options["seed"],
        time_unit=options["time_unit"],
        tokenizer=options["tokenizer"],
    )
    reader = open_trace(path, read_options)
    trace = read_arrays(reader, is_strict=options["strict"])
    unused = (option for option in ("tokenizer", "window_h", "time_unit") if option not in reader.options)
    remarks = [f"--{it.replace('_', '-')} has no effect on this format" for it in unused if _is_given(it)]
    for remark in () if is_quiet else (*remarks, *trace.warnings):
        click.echo(f"kvtier: trace {path}: {remark}", err=True)
    return trace, "window_h" in reader.options and int(trace.session.max()) > 0


def _names(text: str) -> list[str]:
    from kvtier.replay.policies.registry import REFERENCES, policy_names

    names = [it.strip() for it in text.split(",") if it.strip()]
    if names == ["help"]:
        known = {name: REFERENCES.get(name) for name in policy_names()}
        rows = [(name, it.help if it else "shipped or installed") for name, it in known.items()]
        print_table(Table(("policy", "description"), rows))
        raise click.exceptions.Exit(0)
    if not names:
        raise click.UsageError("--policy is empty; allowed: names, with commas between them")
    return list(dict.fromkeys(names))


class Capacity(NamedTuple):
    """Capacity of a cache, as on the command line; neither: unlimited."""

    tokens: int | None = None
    percent: float | None = None
    """Of the unique tokens of a trace."""

    def tokens_of(self, trace: "TraceArrays") -> int | None:
        """Tokens for this trace; a share in whole blocks, at least one."""
        if self.percent is None:
            return self.tokens
        return max(1, int(self.percent * trace.block_count / 100)) * trace.block_tokens


def _capacities(text: str) -> list[Capacity]:
    from kvtier.config.value_types import parse_count
    from kvtier.errors import ConfigError

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
    raise ValueError("not a share; allowed: above 0% to 100%, such as 10%")


def _as_dict(trace: "TraceArrays", bound: float, results: "list[CacheResult]") -> dict[str, object]:
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


def _plain(stats: "TraceStats") -> dict[str, object]:
    out: dict[str, object] = {name: getattr(stats, name) for name in stats.__slots__ if name != "intervals"}
    series = ((name, getattr(stats.over_time, name)) for name in stats.over_time.__slots__)
    out["over_time"] = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in series}
    return out
