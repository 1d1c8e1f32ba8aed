"""`kvtier replay`: hit rates of policies and capacities, and replays through tiers, from a trace."""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvtier.cli.main import Commands
from kvtier.cli.options import OutputFile, Quantity, is_given, tier_option
from kvtier.layout import Loss
from kvtier.report.output import print_json
from kvtier.report.table import print_table
from kvtier.tools.options import NumberRange, gpu_option
from kvtier.tools.trace.options import load_trace, reading_options

if TYPE_CHECKING:
    from kvtier.tools.trace.stats import TraceStats

CAPACITIES = "3%,10%,30%"
POLICIES = "default,lru,min"
_TIER_ONLY = ("model", "gpu", "prefill", "probe", "servers", "nodes", "router", "write_policy", "planner")


class _RunOrDescribe(Commands):
    """Treats ``replay TRACE`` as ``replay run TRACE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` unless the first word is a subcommand or a mistyped one."""
        first = args[0] if args else ""
        is_command = first in self.commands or (get_close_matches(first, self.commands) and not Path(first).exists())
        return super().parse_args(ctx, args if is_command else ["run", *args])


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
    type=Quantity(1, 100),
    default=3,
    help="Draws of start times, from --seed on, for traces of sessions without them; not with --tier.  [3]",
)
@tier_option(
    "A tier, host memory first: host=64GiB, disk=4TiB?read=12GB/s, disk=4xpm1753, disk=4x7.68TB, s3=40TiB. "
    "Repeatable; the kind decides whether lookups are remote and nodes share it."
)
@click.option(
    "--model",
    default="llama-3.3-70b",
    help="Model whose KV is stored, as in `kvtier size`.  [llama-3.3-70b]",
)
@gpu_option("GPUs of a node, such as 8xh100-sxm; they set the speeds of prefill and host links.")
@click.option(
    "--prefill", type=NumberRange(0), help="Prefill speed of one prompt, tokens a second.  [by --gpu, or 10,000]"
)
@click.option("--probe", type=click.Path(path_type=Path), help="Link speeds from a record of `kvtier probe`.")
@click.option("--servers", type=Quantity(), help="Concurrent prompts per node.  [busy 80 % of the time without tiers]")
@click.option(
    "--nodes",
    default="1",
    help="Numbers of engines, comma-separated; each engine has its own unshared tiers.  [1]",
)
@click.option(
    "--router",
    default="round-robin",
    help="Routers, comma-separated: random, round-robin, session, prefix, load-and-prefix.",
)
@click.option(
    "--write-policy",
    type=click.Choice(["through", "back", "selective"]),
    default="through",
    help="When stored KV is copied to lower tiers.  [through]",
)
@click.option("--planner/--no-planner", default=True, help="Use the planner; --no-planner loads all cached KV.")
@click.option(
    "--loss",
    type=click.Choice(get_args(Loss)),
    default="none",
    help="Class of the engine (store.loss): the same space then holds more tokens, but not in host memory.  [none]",
)
@reading_options
@click.option("--jobs", type=Quantity(1, 256), help="Maximum number of processes.  [one for each core]")
@click.option("--keep", type=OutputFile(), help="Journal file: an interrupted run continues from it.")
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report with charts.")
@click.option("--picture", type=OutputFile("picture"), help="Also write charts of one replay to a .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    traces: tuple[Path, ...],
    capacity_tokens: str,
    policies: str,
    tiers: tuple[str, ...],
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    **others: Any,  # noqa: ANN401  jobs, keep, and the options above
) -> int:
    """Replay TRACES through one cache, for each policy and capacity.

    Unique tokens are those of all distinct blocks of a trace, which an infinite cache holds at the end. Without
    --capacity-tokens, capacities are shares of them.

    The replay covers the whole trace, without warm-up. The hit rate is the tokens of the longest leading run of cached
    blocks, divided by input tokens. A prompt's last block is accessed first. Policies are the shipped ones (`default`
    is the default setting) and others to compare with. `min` is the bound for policies that keep whole prefixes,
    `infinite` an infinite cache. `default` takes several times the processor time of `lru`, because it learns. The
    table shows these times.

    Sessions without start times (a coding agent's) start at random. Their order changes hit rates by a few percent,
    so such a trace is replayed for several draws. The table shows the mean, the least and the most.

    With --tier, the real core and planner run on each node, over tiers of these sizes and speeds, in virtual time, for
    each combination of shipped policy, number of nodes and router.

    Ctrl-C prints the finished replays. With --keep the next run continues from there.

    `kvtier replay describe TRACE` prints statistics of a trace.

    Formats are JSON lines with hash_ids or hash_runs (Mooncake, Bailian, AIPerf) or components (RAGPulse), coding-agent
    sessions, prompts, messages or token ids (OpenAI, vLLM), conversations (ShareGPT), Dynamo's request trace, LMCache's
    lookup hashes, KV events of vLLM or SGLang, and for `describe` CSV with lengths (Azure, BurstGPT). Files are plain,
    gzip, zstd or parquet. A directory of .json, .jsonl and .parquet files is one trace.
    """
    # Import numpy late, so that help starts quickly.
    from kvtier.tools.replay.command_run import ReplayOutput, read_capacities, read_policies, run_policies, run_tiers

    names = read_policies(policies)
    _check_given(has_tiers=bool(tiers))
    output = ReplayOutput(report, picture, as_json=as_json)
    output.refuse_several("traces", len(traces))
    if tiers:
        # By default only the first policy is used, because `min` is not a cache but a bound.
        chosen = names if is_given("policies") else names[:1]
        return run_tiers(traces, tiers, chosen, others, output)
    return run_policies(traces, names, read_capacities(capacity_tokens), others, output)


def _check_given(*, has_tiers: bool) -> None:
    """Refuse options that would have no effect."""
    for name in filter(is_given, click.get_current_context().params):
        option = f"--{name.replace('_', '-')}"
        if has_tiers and name in {"capacity_tokens", "draws"}:
            raise click.UsageError(f"{option} is not available with --tier")
        if not has_tiers and name in _TIER_ONLY and not (name == "model" and is_given("loss")):
            raise click.UsageError(f"{option} needs --tier")


@replay.command()
@click.argument("trace", type=click.Path(path_type=Path))
@reading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe(trace: Path, as_json: bool, **reading: Any) -> None:  # noqa: ANN401  as above
    """Print statistics of TRACE: requests, tokens, reuse and its intervals, working set, sessions."""
    from kvtier.tools.replay.report import stats_table  # late, as above
    from kvtier.tools.trace.stats import trace_stats

    stats = trace_stats(load_trace(trace, reading))
    if as_json:
        print_json(_plain(stats))
        return
    print_table(stats_table(stats))
    for note in stats.notes:
        click.echo(f"Note: {note}.")


def _plain(stats: "TraceStats") -> dict[str, object]:
    out: dict[str, object] = {name: getattr(stats, name) for name in stats.__slots__ if name != "intervals"}
    series = ((name, getattr(stats.over_time, name)) for name in stats.over_time.__slots__)
    out["over_time"] = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in series}
    return out
