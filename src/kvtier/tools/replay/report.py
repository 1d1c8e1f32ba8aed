"""Builds the reports of `kvtier replay` and `kvtier replay describe` on a trace and its replays through one cache."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from kvtier.report.format import NONE, share_text, short_count
from kvtier.report.table import Table
from kvtier.tools.charts.chart import DASHED, Axis, Chart, Charts, Curve, Dash, Rule, few
from kvtier.tools.charts.report import PageSection
from kvtier.tools.replay.sweep import CacheResult
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.tools.trace.stats import TraceStats

CONVENTION = (
    "One cache, the whole trace, no warm-up. Hit rate: tokens of the longest leading run of cached blocks, over input "
    "tokens; prompts only. A prompt's last block is accessed first. Capacity and written tokens count whole blocks. "
    "Of unique: capacity, as a share of the trace's unique tokens."
)
DRAWS = "Means over several draws of the sessions' start times; least to most: the hit rates of single draws."
_HUES = ("disk", "shared", "alone")
_DASHES: tuple[Dash, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_OWN: dict[str, tuple[str, Dash]] = {
    "default": ("tiered", "-"),
    "lru": ("gpu", (0, (6, 2, 1, 2))),
    "min": ("ink", DASHED),
}
"""Colors and dashes of common policies, chosen so that each line stays visible where lines coincide."""
_INTERVAL_LEAST_S = 0.1


def cache_sections(
    trace: TraceArrays, bound: float, results: Sequence[CacheResult], seeds: Sequence[int], stats: TraceStats | None
) -> Iterator[PageSection]:
    """Yield the sections on the replays of one trace through one cache.

    Args:
        trace: the replayed trace.
        bound: hit rate of an infinite cache.
        results: a row for each policy and capacity.
        seeds: seeds of the draws of start times.
        stats: the trace's statistics, for the charts of an HTML page; None for no charts.
    """
    unique = short_count(trace.unique_tokens)
    text = f"An infinite cache holds {unique} unique tokens and hits {bound:.4f} of the input tokens."
    draws = f"{len(seeds)} draws of the start times, seeds {seeds[0]} to {seeds[-1]}."
    yield PageSection(
        title=f"{trace.name}: {len(trace):,} requests, blocks of {trace.block_tokens} tokens",
        texts=[text, draws] if len(seeds) > 1 else [text],
        notes=trace.notes,
        tables=[results_table(bound, trace.unique_tokens, results)],
    )
    if stats is not None:
        charts = partial(_cache_charts, bound, results, stats)
        yield PageSection(charts=charts, notes=stats.warnings, tables=[stats_table(stats)], is_page_only=True)


def results_table(bound: float, unique_tokens: int | None, results: Sequence[CacheResult]) -> Table:
    """Return the table with a row for each policy and capacity.

    Args:
        bound: hit rate of an infinite cache.
        unique_tokens: tokens in an infinite cache at the end.
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
    """Return the table of a trace's statistics."""

    def text(value: float | None, form: str, unit: str = "") -> str:
        return NONE if value is None else f"{value:{form}}{unit}"

    rows = [
        ("requests", f"{stats.requests:,}"),
        ("duration", f"{stats.duration_s:,.1f} s"),
        ("sessions", text(stats.sessions, ",")),
        ("tokens per block", f"{stats.block_tokens:,}"),
        ("input tokens", f"{stats.input_tokens:,}"),
        ("input tokens per request, mean", f"{stats.input_mean:,.0f}"),
        ("input tokens per request, median", f"{stats.input_p50:,.0f}"),
        ("input tokens per request, 99 %", f"{stats.input_p99:,.0f}"),
        ("output tokens per request, mean", f"{stats.output_mean:,.0f}"),
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
        *(
            (f"working set, {window_s:,.0f} s after the last use", f"{tokens:,.0f} tokens")
            for window_s, tokens in stats.working_set_tokens.items()
        ),
        *([("blocks after a different parent", f"{stats.prefix_violations:,}")] * bool(stats.prefix_violations)),
    ]
    return Table(title="The trace", columns=("", "value"), rows=tuple(rows), numeric=1)


def intervals_chart(stats: TraceStats) -> Chart:
    """Draw the distribution of the times between two uses of a block."""
    it = stats.intervals
    share = np.cumsum(it.counts) / max(it.counts.sum(), 1)
    shown = (it.seconds >= _INTERVAL_LEAST_S) & (share > 0.001) & (share < 0.9999)
    if not shown.any():
        shown = it.counts > 0
    return Chart(
        heading="Reuse intervals",
        marks=[Curve(x=it.seconds[shown], y=share[shown], colour="tiered")],
        x=Axis(label="seconds since the last use", is_log=bool(shown.any())),
        y=Axis(label="share of reuse within", least=0, most=1),
        caption="Accesses to blocks that were used before, by the time since the last use.",
    )


def _cache_charts(bound: float, results: Sequence[CacheResult], stats: TraceStats) -> Charts:
    over_time = stats.over_time
    minutes = (np.arange(len(over_time.unique_tokens)) + 1) * over_time.bin_s / 60
    per_s = max(over_time.bin_s, 1e-9)
    tokens = Axis(label="tokens", least=0, text=short_count)
    capacities = {it.capacity_tokens for it in results if it.capacity_tokens is not None}
    return {
        "capacity": Chart(
            heading="Hit rate against capacity",
            marks=[*_policy_curves(results), Rule(at=bound, label="infinite cache", dash=":")],
            x=Axis(label="tokens of capacity", is_log=True, text=short_count, ticks=few(capacities)),
            y=Axis(label="hit rate of tokens", least=0),
            caption="Dashed: Belady's bound for whole prefixes. Dotted: an infinite cache.",
        ),
        "intervals": intervals_chart(stats),
        "working-set": Chart(
            heading="Working set over time",
            marks=[
                Curve(x=minutes, y=over_time.unique_tokens, colour="disk", label="distinct so far"),
                Curve(
                    x=minutes, y=over_time.used_tokens, colour="tiered", label=f"used within {over_time.bin_s:,.0f} s"
                ),
            ],
            x=Axis(label="minutes"),
            y=tokens,
            caption="Distinct blocks since the start, and blocks that are used within one interval.",
        ),
        "demand": Chart(
            heading="Demand over time",
            marks=[
                Curve(x=minutes, y=over_time.input_tokens / per_s, colour="gpu", label="all"),
                Curve(x=minutes, y=over_time.new_tokens / per_s, colour="tiered", label="new"),
            ],
            x=Axis(label="minutes"),
            y=Axis(label="input tokens a second", least=0, text=short_count),
            caption="New tokens must be computed with any cache.",
        ),
    }


def _policy_curves(results: Sequence[CacheResult]) -> Iterator[Curve]:
    limited = [it for it in results if it.capacity_tokens is not None]
    policies = list(dict.fromkeys(it.policy for it in limited))
    others = [it for it in policies if it not in _OWN]
    for policy in policies:
        place = others.index(policy) if policy in others else 0
        spare = _HUES[place % len(_HUES)], _DASHES[place // len(_HUES) % len(_DASHES)]
        colour, dash = _OWN.get(policy, spare)
        points = sorted((it.capacity_tokens or 0, it.hit_rate) for it in limited if it.policy == policy)
        yield Curve(
            x=[tokens for tokens, _ in points],
            y=[rate for _, rate in points],
            colour=colour,
            dash=dash,
            marker="o",
            label="min (bound)" if policy == "min" else policy,
        )
