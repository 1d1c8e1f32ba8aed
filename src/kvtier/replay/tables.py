"""Tables of replays, for the terminal and the reports."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.report.format import NONE, binary, decimal, share_text, short_count
from kvtier.report.table import Table
from kvtier.trace.stats import TraceStats

if TYPE_CHECKING:  # replays through one cache do not load the core
    from kvtier.replay.results import TieredResult, TtftStats
    from kvtier.replay.single_cache import CacheResult
    from kvtier.replay.tiered import TieredSetup

CONVENTION = (
    "One cache, the whole trace, no warm-up. Hit rate: tokens of the longest leading run of cached blocks, over input "
    "tokens; prompts only. A prompt's last block is accessed first. Capacity and written tokens count whole blocks. "
    "Of unique: capacity, as a share of the trace's unique tokens."
)
DRAWS = "Means over several draws of the sessions' start times; least to most: the hit rates of single draws."
PLANNER_SLACK = 1.01
"""The planner loses if it makes the mean time to first token longer than this many times."""


class CacheReplays(NamedTuple):
    """A trace and its replays through one cache."""

    stats: TraceStats
    bound: float
    """Hit rate of an infinite cache."""
    results: "Sequence[CacheResult]"


class TieredReplay(NamedTuple):
    """A trace and one replay through tiers."""

    stats: TraceStats
    model: str
    setup: "TieredSetup"
    result: "TieredResult"


def results_table(bound: float, unique_tokens: int | None, results: "Sequence[CacheResult]") -> Table:
    """A row for each policy and capacity.

    Args:
        bound: hit rate of an infinite cache.
        unique_tokens: what an infinite cache holds at the end.
        results: the rows.
    """
    is_drawn = any(it.hit_rates for it in results)
    rows = tuple(
        (
            it.policy,
            short_count(it.capacity_tokens),
            f"{it.capacity_tokens / unique_tokens:.1%}" if it.capacity_tokens and unique_tokens else NONE,
            f"{it.hit_rate:.4f}",
            *([f"{min(it.hit_rates):.4f} to {max(it.hit_rates):.4f}" if it.hit_rates else NONE] * is_drawn),
            f"{it.hit_rate / bound:.1%}" if bound else NONE,
            short_count(it.hit_tokens),
            short_count(it.written_tokens),
            f"{it.evictions:,}",
            f"{it.cpu_s:,.2f}",
        )
        for it in results
    )
    columns = (
        *("policy", "capacity", "of unique", "hit rate", *(["least to most"] * is_drawn)),
        *("of possible", "hit tokens", "written tokens", "evictions", "CPU, s"),
    )
    note = f"{CONVENTION} {DRAWS}" if is_drawn else CONVENTION
    return Table(title="Hit rates", columns=columns, rows=rows, numeric=len(columns) - 1, note=note)


def stats_table(stats: TraceStats) -> Table:
    """The statistics of a trace."""

    def text(value: float | None, form: str, unit: str = "") -> str:
        return NONE if value is None else f"{value:{form}}{unit}"

    rows = [
        ("requests", f"{stats.requests:,}"),
        ("duration", f"{stats.duration_s:,.1f} s"),
        ("sessions", text(stats.sessions, ",")),
        ("tokens of a block", f"{stats.block_tokens:,}"),
        ("input tokens", f"{stats.input_tokens:,}"),
        ("input tokens of a request, mean", f"{stats.input_mean:,.0f}"),
        ("input tokens of a request, median", f"{stats.input_p50:,.0f}"),
        ("input tokens of a request, 99 %", f"{stats.input_p99:,.0f}"),
        ("output tokens of a request, mean", f"{stats.output_mean:,.0f}"),
        ("unique tokens", text(stats.unique_tokens, ",")),
        ("hit rate of an infinite cache", text(stats.infinite_hit_rate, ".4f")),
        ("the same, second half of the requests", text(stats.infinite_hit_rate_second_half, ".4f")),
        ("blocks used once", share_text(stats.used_once)),
        ("share of reuse by the top 1 % of blocks", share_text(stats.top_reuse)),
        ("reuse interval, median", text(stats.interval_p50_s, ",.1f", " s")),
        ("reuse interval, 90 %", text(stats.interval_p90_s, ",.1f", " s")),
        ("reuse interval, 99 %", text(stats.interval_p99_s, ",.1f", " s")),
        ("first turns", share_text(stats.first_turns)),
        ("tokens written for each token read, infinite cache", text(stats.written_per_read, ".3f")),
    ]
    rows += [
        (f"working set, {window_s:,.0f} s after the last use", f"{tokens:,.0f} tokens")
        for window_s, tokens in stats.working_set_tokens.items()
    ]
    rows += [("blocks after a different parent", f"{stats.prefix_violations:,}")] * bool(stats.prefix_violations)
    return Table(title="The trace", columns=("", "value"), rows=tuple(rows), numeric=1)


def comparison_table(results: "Mapping[TieredSetup, TieredResult]") -> Table:
    """A row for each setup; all have tiers of the same names."""
    names = [it.name for it in next(iter(results)).tiers]
    rows = tuple(
        (
            setup.evictor,
            f"{setup.nodes:,}",
            setup.router if setup.nodes > 1 else NONE,
            f"{it.requests:,}",
            f"{it.hit_rate:.4f}",
            *(f"{tier.hit_rate:.4f}" for tier in it.tiers),
            f"{it.ttft.mean_s:.3f}",
            f"{it.ttft.p95_s:.3f}",
            f"{it.ttft_without.mean_s:.3f}",
            f"{it.planning.regret_s:,.1f} s",
            f"{it.dropped_chunks:,}",
            f"{it.tiers[-1].drive_writes_per_day:,.2f}",
        )
        for setup, it in results.items()
    )
    columns = (
        *("policy", "nodes", "router", "requests", "hit rate", *names),
        *("TTFT mean, s", "p95", "without", "regret", "chunks not stored", f"writes a day of {names[-1]}"),
    )
    note = "Rows with fewer requests than the trace were interrupted and are not comparable."
    return Table(title="Comparison", columns=columns, rows=rows, numeric=len(columns) - 3, note=note)


def inputs(setup: "TieredSetup") -> list[dict[str, str]]:
    """The speeds and capacities of a replay, each with its source."""
    prefill = setup.prefill
    rows = [("prefill of one prompt", f"{prefill.tokens_per_s:,.0f} tokens/s", prefill.source)]
    for number, tier in enumerate(setup.tiers):
        reads, writes = directions(is_host=not number)
        figures = (
            ("capacity_bytes", "capacity", binary(tier.capacity_bytes)),
            ("read_bytes_per_s", reads, _rate(tier.read_bytes_per_s)),
            ("write_bytes_per_s", writes, _rate(tier.write_bytes_per_s)),
            ("latency_s", "latency", f"{tier.latency_s * 1e6:,.0f} us"),
        )
        rows += [(f"{tier.name}, {what}", value, tier.sources.get(field, "given")) for field, what, value in figures]
        if tier.is_remote:
            rows.append((f"{tier.name}, lookups", "remote: in rounds, each takes the latency", "--tier"))
    return [{"what": what, "value": value, "source": source} for what, value, source in rows]


def inputs_table(setup: "TieredSetup") -> Table:
    """A row for each input."""
    rows = tuple(tuple(it.values()) for it in inputs(setup))
    return Table(title="Inputs", columns=("", "value", "source"), rows=rows)


def tiers_table(result: "TieredResult") -> Table:
    """A row for each tier."""
    rows = tuple(
        (
            it.name,
            binary(it.capacity_bytes),
            f"{it.hit_rate:.4f}",
            short_count(it.hit_tokens),
            decimal(it.reads.total_bytes),
            f"{_rate(it.reads.mean_bytes_per_s)} / {_rate(it.reads.peak_together_bytes_per_s)}",
            f"{it.reads.used_share:.0%}",
            f"{it.reads.mean_depth:.1f} / {it.reads.peak_depth}",
            decimal(it.writes.total_bytes),
            f"{_rate(it.writes.mean_bytes_per_s)} / {_rate(it.writes.peak_together_bytes_per_s)}",
            f"{it.writes.used_share:.0%}",
            f"{it.writes.mean_depth:.1f} / {it.writes.peak_depth}",
            f"{it.drive_writes_per_day:,.2f}{_of_rated(it.rated_writes_per_day)}" if number else NONE,
        )
        for number, it in enumerate(result.tiers)
    )
    columns = (
        *("tier", "capacity", "hit rate", "hit tokens", "read", "mean / peak", "used", "depth"),
        *("written", "mean / peak", "used", "depth", "drive writes a day"),
    )
    note = (
        "Host: read = to the engine, written = from the engine. Lower tiers: promotions and demotions. A tier of each "
        "node is summed over nodes, except its capacity, depth and drive writes. Peak: busiest second. Used: share of "
        "the bandwidth. Depth: active and queued transfers, mean and maximum."
    )
    return Table(title="Tiers", columns=columns, rows=rows, numeric=12, note=note)


def planning_table(result: "TieredResult") -> Table:
    """Decisions of the planner, and their regret."""
    it = result.planning

    def tokens(count: int) -> str:
        return f"{short_count(count)} ({count / result.input_tokens:.1%} of the input)"

    rows = (
        ("requests with a hit", f"{it.requests:,}"),
        ("loads, trials of a slow tier among them", f"{it.loads:,}, {it.trials:,}"),
        ("loads that were cut", f"{it.cut_loads:,}"),
        ("loads with chunks in transfer for another request", f"{result.convoys:,}"),
        ("tokens loaded", tokens(it.loaded_tokens)),
        ("tokens cached, but computing was expected to be faster", tokens(it.skipped_tokens)),
        ("tokens planned and not delivered", tokens(it.cut_tokens)),
        ("time of loads, expected and actual", f"{it.predicted_load_s:,.1f} s, {it.load_s:,.1f} s"),
        ("time of the requests, everything computed", f"{it.recompute_s:,.1f} s"),
        ("time of the requests", f"{it.taken_s:,.1f} s"),
        ("time of the requests, best splits", f"{it.best_s:,.1f} s"),
        ("regret, sum and maximum", f"{it.regret_s:,.2f} s, {it.regret_most_s:,.3f} s"),
        ("chunks not stored", f"{result.dropped_chunks:,}"),
        ("demotions dropped", f"{result.dropped_demotions:,}"),
    )
    note = (
        "The time of a request is that of its load, or of the prompts before it if that is longer, and of computing "
        "the rest. The best split is found by trying every one, with the true speeds and queues of the links, after "
        "the loads that are running."
    )
    return Table(title="Load or compute", columns=("", "value"), rows=rows, numeric=1, note=note)


def planner_warning(result: "TieredResult", unplanned: "TieredResult | None") -> str:
    """A warning if requests are slower with the planner than without; else empty."""
    if unplanned is None or result.ttft.mean_s <= PLANNER_SLACK * unplanned.ttft.mean_s:
        return ""
    return (
        f"the planner loses here: mean time to first token {result.ttft.mean_s:.3f} s, and "
        f"{unplanned.ttft.mean_s:.3f} s with --no-planner"
    )


def ttft_table(result: "TieredResult", unplanned: "TieredResult | None" = None) -> Table:
    """Time to first token with and without tiers, and, given `unplanned`, without the planner."""

    def row(name: str, it: "TtftStats", busy: float) -> tuple[str, ...]:
        return (name, *(f"{value:.3f}" for value in (it.mean_s, it.p50_s, it.p95_s, it.p99_s)), f"{busy:.0%}")

    rows = [
        row("without tiers", result.ttft_without, result.busy_share_without),
        row("with tiers", result.ttft, result.busy_share),
    ]
    if unplanned is not None:
        rows.append(row("with tiers, no planner", unplanned.ttft, unplanned.busy_share))
    columns = ("time to first token, s", "mean", "p50", "p95", "p99", "prefill busy")
    return Table(title="Time to first token", columns=columns, rows=rows, numeric=5)


def directions(*, is_host: bool) -> tuple[str, str]:
    """Names of a tier's links."""
    return ("to the engine", "from the engine") if is_host else ("reads", "writes")


def _rate(bytes_per_s: float) -> str:
    return f"{decimal(bytes_per_s)}/s"


def _of_rated(writes_per_day: float | None) -> str:
    return "" if writes_per_day is None else f" of {writes_per_day:g} rated"
