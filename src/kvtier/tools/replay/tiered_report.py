"""Builds the report of `kvtier replay --tier` on replays through tiers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvtier.report.format import NONE, binary, counted, decimal, short_count
from kvtier.report.table import Table
from kvtier.tools import size
from kvtier.tools.charts.chart import DASHED, Axis, Chart, Charts, Curve
from kvtier.tools.charts.report import PageSection
from kvtier.tools.replay.report import intervals_chart, stats_table
from kvtier.tools.replay.results import HOST, QUANTILES, LinkStats, TieredResult, TieredSeries, TtftStats
from kvtier.tools.replay.tiered import TieredSetup
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.tools.trace.stats import TraceStats

PLANNER_SLACK = 1.01
"""The planner loses if it lengthens the mean time to first token by more than this factor."""
INTRO = (
    "The real core and planner on each node, in virtual time. The engine's own prefix cache is not modelled: "
    "every hit is a load."
)
_OTHERS = ("shared", "gpu", "tiered")
"""Colors for tiers other than host memory and disk."""
_MINUTE_S = 60.0


def tiered_sections(
    trace: TraceArrays,
    model: str,
    done: Mapping[TieredSetup, TieredResult],
    unplanned: TieredResult | None,
    stats: TraceStats | None,
) -> Iterator[PageSection]:
    """Yield the sections on the replays of one trace through tiers.

    Args:
        trace: the replayed trace.
        model: the model whose KV is stored.
        done: one or more results. All setups have tiers of the same names and speeds.
        unplanned: result without the planner, if there is only one setup.
        stats: the trace's statistics, for the charts of an HTML page; None for no charts.
    """
    setup, is_one = next(iter(done)), len(done) == 1
    speeds = [_inputs_table(setup)]
    bytes_text = f"{setup.token_bytes:,.0f} bytes a token"
    yield PageSection(
        title=f"{trace.name}: {len(trace):,} requests, {model}, {bytes_text}",
        texts=[
            f"{INTRO} {omissions(model)}".strip(),
            f"Whole blocks of {trace.block_tokens} tokens; write policy {setup.write_policy.value}.",
        ],
        tables=[] if is_one else [_comparison_table(done), *speeds],
    )
    for one, result in done.items():
        yield PageSection(
            title="" if is_one else f"eviction {one.evictor}, nodes {one.nodes}, router {one.router}",
            texts=[_answer(one, result)],
            charts=dict if stats is None else partial(_charts, one, result, stats),
            tables=[
                _tiers_table(result),
                _ttft_table(result, unplanned),
                _planning_table(result),
                *(speeds if is_one else []),
            ],
            is_page_only=not is_one,
        )
    if stats is not None:
        yield PageSection(
            charts=lambda: {"intervals": intervals_chart(stats)},
            notes=[*stats.warnings, *stats.notes],
            tables=[stats_table(stats)],
            is_page_only=True,
        )


def omissions(model: str) -> str:
    """Return sentences on what a replay leaves out for a model with states or windows; empty for other models."""
    kv = size.of(model)
    states = f"States, {decimal(kv.state_bytes)} for each conversation, are not counted." if kv.state_bytes else ""
    has_windows = any(cache.window for cache, _ in kv.model.runs)
    windows = "Loads count all stored tokens of layers with a window." if has_windows else ""
    return f"{states} {windows}".strip()


def _answer(setup: TieredSetup, result: TieredResult) -> str:
    nodes = f"{result.nodes:,} nodes, router {setup.router}" if result.nodes > 1 else "One node"
    cut = "" if result.is_complete else " Interrupted: only the requests until then."
    with_s, without_s = result.ttft.mean_s, result.ttft_without.mean_s
    return (
        f"{nodes}, {counted(result.servers, 'prompt')} at a time on each, eviction {setup.evictor}: "
        f"{result.hit_rate:.4f} of {result.requests:,} requests' input tokens loaded; mean time to first token "
        f"{with_s:.3g} s, {without_s:.3g} s without tiers ({without_s / max(with_s, 1e-9):.2g}x).{cut}"
    )


def _comparison_table(results: Mapping[TieredSetup, TieredResult]) -> Table:
    """Return the table with a row for each setup. All setups have tiers of the same names."""
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


def inputs(setup: TieredSetup) -> list[dict[str, str]]:
    """Return the speeds and capacities of a replay, each with its source."""
    prefill = setup.prefill
    rows = [("prefill of one prompt", f"{prefill.tokens_per_s:,.0f} tokens/s", prefill.source)]
    for number, tier in enumerate(setup.tiers):
        reads, writes = _directions(is_host=not number)
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


def _inputs_table(setup: TieredSetup) -> Table:
    """Return the table of inputs."""
    rows = tuple(tuple(it.values()) for it in inputs(setup))
    return Table(title="Inputs", columns=("", "value", "source"), rows=rows)


def _tiers_table(result: TieredResult) -> Table:
    """Return the table of tiers."""
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
            f"{it.drive_writes_per_day:,.2f}"
            + (f" of {it.rated_writes_per_day:g} rated" if it.rated_writes_per_day is not None else "")
            if number
            else NONE,
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


def _planning_table(result: TieredResult) -> Table:
    """Return the table of the planner's decisions and regret."""
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


def planner_warning(result: TieredResult, unplanned: TieredResult | None) -> str:
    """Return a warning if requests are slower with the planner than without it, or else an empty string."""
    if unplanned is None or result.ttft.mean_s <= PLANNER_SLACK * unplanned.ttft.mean_s:
        return ""
    return (
        f"the planner loses here: mean time to first token {result.ttft.mean_s:.3f} s, and "
        f"{unplanned.ttft.mean_s:.3f} s with --no-planner"
    )


def _ttft_table(result: TieredResult, unplanned: TieredResult | None = None) -> Table:
    """Return the table of TTFT with and without tiers and, given `unplanned`, without the planner."""

    def row(name: str, it: TtftStats, busy: float) -> tuple[str, ...]:
        return (name, *(f"{value:.3f}" for value in (it.mean_s, it.p50_s, it.p95_s, it.p99_s)), f"{busy:.0%}")

    rows = [
        row("without tiers", result.ttft_without, result.busy_share_without),
        row("with tiers", result.ttft, result.busy_share),
    ]
    if unplanned is not None:
        rows.append(row("with tiers, no planner", unplanned.ttft, unplanned.busy_share))
    columns = ("time to first token, s", "mean", "p50", "p95", "p99", "prefill busy")
    return Table(title="Time to first token", columns=columns, rows=rows, numeric=5)


def _directions(*, is_host: bool) -> tuple[str, str]:
    """Return the names of the two directions of a tier's link."""
    return ("to the engine", "from the engine") if is_host else ("reads", "writes")


def _rate(bytes_per_s: float) -> str:
    return f"{decimal(bytes_per_s)}/s"


def _charts(setup: TieredSetup, result: TieredResult, stats: TraceStats) -> Charts:
    over_time, trace = result.over_time, stats.over_time
    hues = _hues([it.name for it in setup.tiers])
    bins = (np.arange(len(trace.unique_tokens)) + 1) * trace.bin_s / _MINUTE_S
    token_bytes, minutes = setup.token_bytes, Axis(label="minutes", least=0)
    share = np.linspace(0, 1, QUANTILES + 1)
    arms = (("everything computed", result.ttft_without, "alone"), ("with tiers", result.ttft, "tiered"))
    ends = _minutes(over_time, at=1.0)
    return {
        "stack": Chart(
            heading="Where prompts came from, over time",
            marks=list(_stack(over_time, hues)),
            x=minutes,
            y=Axis(label="input tokens a second", least=0, text=short_count),
            caption="By the arrival of the requests. Cached, but computed: computing was expected to be faster.",
        ),
        "ttft": Chart(
            heading="Time to first token",
            marks=[
                Curve(
                    x=np.maximum(it.quantiles_s, 1e-4), y=share, colour=colour,
                    label=f"{name}: {it.p50_s:.3g} s median, {it.p99_s:.3g} s p99",
                )
                for name, it, colour in arms
            ],
            x=Axis(label="seconds to the first token", is_log=True),
            y=Axis(label="share of requests within", least=0, most=1),
            caption="The same requests on the same nodes, with tiers and with everything computed.",
        ),
        "demand": Chart(
            heading="Bandwidth used on each link",
            marks=[
                replace(bandwidth, label=f"{bandwidth.label}: {_rate(it.mean_bytes_per_s)} mean, "
                        f"{_rate(it.peak_together_bytes_per_s)} peak")
                for it, bandwidth, _ in _links(result, hues)
            ],
            x=minutes,
            y=Axis(label="bytes a second", least=0, text=decimal),
            caption="All nodes together. A link that is always busy shows its own limit; give it more bandwidth to see "
            "demand.",
        ),
        "depth": Chart(
            heading="Queue depth",
            marks=[depth for *_, depth in _links(result, hues)],
            x=minutes,
            y=Axis(label="active and queued transfers", least=0),
            caption="Transfers on all links of a tier together, mean of each part of the time.",
        ),
        "working-set": Chart(
            heading="Working set, and bytes held",
            marks=[
                Curve(
                    x=bins, y=trace.unique_tokens * token_bytes, colour="soft", dash=":", label="distinct so far"
                ),
                Curve(
                    x=bins, y=trace.used_tokens * token_bytes, colour="tiered", width=1.5,
                    label=f"used within {trace.bin_s:,.0f} s",
                ),
                *(
                    Curve(x=ends, y=it.held_bytes, colour=hues[name], label=f"held by {name}")
                    for name, it in over_time.tiers.items()
                ),
            ],
            x=minutes,
            y=Axis(label="KV", least=0, text=decimal),
            caption="Dotted: all blocks used so far.",
        ),
    }  # fmt: skip


def _minutes(over_time: TieredSeries, *, at: float) -> list[float]:
    """Return one time per part, in minutes. `at` 0.5 is the middle of a part, and 1 the end."""
    return [(place + at) * over_time.part_s / _MINUTE_S for place in range(len(over_time.input_tokens_per_s))]


def _hues(names: Sequence[str]) -> dict[str, str]:
    """Return the color of each tier."""
    others = [name for name in names if name not in (HOST, "disk")]
    return {name: _OTHERS[others.index(name) % len(_OTHERS)] if name in others else name for name in names}


def _stack(over_time: TieredSeries, hues: Mapping[str, str]) -> Iterator[Curve]:
    """Stack the tokens per second of each source of prompt tokens. Computed tokens come last."""
    minutes = _minutes(over_time, at=0.5)
    parts = [(name, hues[name], it.hit_tokens_per_s) for name, it in over_time.tiers.items()]
    parts.append(("cached, but computed", "soft", over_time.skipped_tokens_per_s))
    known = np.sum([values for *_, values in parts], axis=0)
    parts.append(("computed", "line", np.maximum(np.asarray(over_time.input_tokens_per_s) - known, 0.0).tolist()))
    below = np.zeros(len(minutes))
    for label, colour, values in parts:
        above = below + values
        yield Curve(x=minutes, y=above, colour=colour, label=label, width=1.0, band=(below, above), band_alpha=1.0)
        below = above


def _links(result: TieredResult, hues: Mapping[str, str]) -> Iterator[tuple[LinkStats, Curve, Curve]]:
    """Yield statistics, bytes per second and depth of each tier's links."""
    minutes = _minutes(result.over_time, at=0.5)
    for tier in result.tiers:
        it = result.over_time.tiers[tier.name]
        reads, writes = _directions(is_host=tier.name == HOST)
        for stats, way, dash, rate, depth in (
            (tier.reads, reads, "-", it.read_bytes_per_s, it.read_depth),
            (tier.writes, writes, DASHED, it.written_bytes_per_s, it.write_depth),
        ):
            curve = Curve(x=minutes, y=rate, colour=hues[tier.name], dash=dash, width=1.5, label=f"{tier.name} {way}")
            yield stats, curve, replace(curve, y=depth)
