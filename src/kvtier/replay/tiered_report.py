"""The HTML report of replays through tiers."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.replay.report import INTERVALS_CAPTION, draw_intervals, trace_html, trace_names
from kvtier.replay.results import HOST, QUANTILES, LinkStats, TieredResult, TieredSeries
from kvtier.replay.tables import (
    TieredReplay,
    comparison_table,
    directions,
    inputs_table,
    planning_table,
    tiers_table,
    ttft_table,
)
from kvtier.report.chart import Chart, Charts, Colours, figures_html, write_charts
from kvtier.report.format import decimal, short_count
from kvtier.report.output import write_file
from kvtier.report.page import page_html, paragraphs_html, section_html, table_html, tiles_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTRO = (
    "The real core and planner on each node, in virtual time. The engine's own prefix cache is not modelled: "
    "every hit is a load."
)
_OTHERS = ("shared", "gpu", "tiered")
"""Colours of tiers that are neither host memory nor disk."""
_MINUTE_S = 60.0

Curves = tuple[Sequence[float], Sequence[float]]


def write_tiered_report(path: Path, replayed: Sequence[TieredReplay]) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_tiered_report(replayed))


def write_plot(path: Path, replayed: TieredReplay) -> None:
    """Write all charts of one replay to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_charts("--picture", path, CHARTS, replayed)


def render_tiered_report(replayed: Sequence[TieredReplay], made: datetime | None = None) -> str:
    """The HTML of the report."""
    traces = [list(group) for _, group in groupby(replayed, lambda it: id(it.stats))]
    return page_html(
        "kvtier replay --tier",
        f"{trace_names([it.stats for it in replayed])} through tiers",
        paragraphs_html([INTRO]),
        *(_trace_html(group, f"t{number}-") for number, group in enumerate(traces)),
        made=made,
    )


def _trace_html(replayed: Sequence[TieredReplay], prefix: str) -> str:
    parts: list[str] = []
    if len(replayed) > 1:
        parts.append(table_html(comparison_table({it.setup: it.result for it in replayed})))
    for number, it in enumerate(replayed):
        parts += [
            section_html(
                it.stats.name,
                paragraphs_html([_circumstances(it)]),
                tiles_html(_tiles(it.result)),
                figures_html(CHARTS, it, f"{prefix}s{number}-"),
            ),
            table_html(ttft_table(it.result)),
            table_html(tiers_table(it.result)),
            table_html(planning_table(it.result)),
            table_html(inputs_table(it.setup)),
        ]
    return "\n".join([*parts, trace_html(replayed[0].stats)])


def _circumstances(replayed: TieredReplay) -> str:
    setup, result = replayed.setup, replayed.result
    nodes = f"{result.nodes:,} nodes, router {setup.router}" if result.nodes > 1 else "One node"
    cut = "" if result.is_complete else " Interrupted: only the requests until then."
    return (
        f"{nodes}, {result.servers} prompts at a time on each; {replayed.model}, {setup.token_bytes:,.0f} bytes a "
        f"token; eviction {setup.evictor}, write policy {setup.write_policy.value}.{cut}"
    )


def _tiles(result: TieredResult) -> list[tuple[str, str]]:
    without_s = result.ttft_without.mean_s
    gain = without_s / max(result.ttft.mean_s, 1e-9)
    lowest = result.tiers[-1]
    rated = "" if lowest.rated_writes_per_day is None else f"; rated for {lowest.rated_writes_per_day:g}"
    return [
        (f"{result.hit_rate:.1%}", f"of {result.requests:,} requests' input tokens loaded"),
        (
            f"{result.ttft.mean_s:.3g} s",
            f"mean time to first token; {result.ttft_without.mean_s:.3g} s without ({gain:.2g}x)",
        ),
        (f"{result.busy_share:.0%}", f"of the time prefill is busy; {result.busy_share_without:.0%} without"),
        (
            f"{lowest.drive_writes_per_day:,.2f}",
            f"drive writes a day of {lowest.name}, {decimal(lowest.writes.total_bytes)} in the trace{rated}",
        ),
        (f"{result.planning.regret_s:,.1f} s", "regret of all plans together, against each request's best split"),
    ]


def _minutes(over_time: TieredSeries, *, at: float) -> list[float]:
    """The times of all parts: 0.5 is a part's middle, 1 its end."""
    count = len(over_time.input_tokens_per_s)
    return [(place + at) * over_time.part_s / _MINUTE_S for place in range(count)]


def _hues(replayed: TieredReplay, colours: Colours) -> dict[str, str]:
    names = [it.name for it in replayed.setup.tiers]
    others = [name for name in names if name not in (HOST, "disk")]
    picked = {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}
    return {name: colours[picked.get(name, name)] for name in names}


def _sources(replayed: TieredReplay) -> list[tuple[str, Sequence[float]]]:
    """Name and tokens a second of each source of prompt tokens; computed tokens come last."""
    over_time = replayed.result.over_time
    parts: list[tuple[str, Sequence[float]]] = [(name, it.hit_tokens_per_s) for name, it in over_time.tiers.items()]
    loaded = np.sum([it for _, it in parts], axis=0)
    skipped = np.asarray(over_time.skipped_tokens_per_s)
    computed = np.maximum(np.asarray(over_time.input_tokens_per_s) - loaded - skipped, 0.0)
    return [*parts, ("cached, but computed", skipped.tolist()), ("computed", computed.tolist())]


def _source_colours(replayed: TieredReplay, colours: Colours) -> list[str]:
    return [*_hues(replayed, colours).values(), colours["soft"], colours["line"]]


def _draw_stack(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    sources = _sources(replayed)
    minutes = _minutes(replayed.result.over_time, at=0.5)
    names = [name for name, _ in sources]
    values = [list(it) for _, it in sources]
    axes.stackplot(minutes, values, labels=names, colors=_source_colours(replayed, colours), linewidth=0)
    most = max(replayed.result.over_time.input_tokens_per_s)
    axes.set(xlabel="minutes", ylabel="input tokens a second", ylim=(0, 1.35 * most), xlim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.legend(loc="upper right", ncols=2)


def _draw_total(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    part_s = replayed.result.over_time.part_s
    sources = _sources(replayed)
    tokens = [sum(it) * part_s for _, it in sources]
    names = [name for name, _ in sources]
    axes.barh(names, tokens, color=_source_colours(replayed, colours))
    total = max(sum(tokens), 1.0)
    for place, count in enumerate(tokens):
        axes.annotate(
            f"{count / total:.1%}",
            (count, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colours["ink"],
        )
    axes.invert_yaxis()
    axes.set(xlabel="input tokens", xlim=(0, 1.15 * max(*tokens, 1.0)))
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))


def _links(replayed: TieredReplay, colours: Colours) -> Iterator[tuple[str, LinkStats, Curves, dict[str, Any]]]:
    """Name, statistics, (bytes a second, depth) and line style of each tier's links."""
    for tier, colour in zip(replayed.result.tiers, _hues(replayed, colours).values(), strict=True):
        it = replayed.result.over_time.tiers[tier.name]
        reads, writes = directions(is_host=tier.name == HOST)
        style = {"color": colour, "linewidth": 1.5}
        yield f"{tier.name} {reads}", tier.reads, (it.read_bytes_per_s, it.read_depth), style
        dashed = {**style, "linestyle": (0, (4, 2))}
        yield f"{tier.name} {writes}", tier.writes, (it.written_bytes_per_s, it.write_depth), dashed


def _draw_demand(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    minutes = _minutes(replayed.result.over_time, at=0.5)
    for name, stats, (bytes_per_s, _), style in _links(replayed, colours):
        mean, peak = decimal(stats.mean_bytes_per_s), decimal(stats.peak_together_bytes_per_s)
        axes.plot(minutes, bytes_per_s, label=f"{name}: {mean}/s mean, {peak}/s peak", **style)
    # Room for the legend above the curves.
    axes.set(xlabel="minutes", ylabel="bytes a second", ylim=(0, None), xlim=(0, None))
    axes.set_ylim(top=(1.2 + 0.16 * len(replayed.result.tiers)) * axes.dataLim.y1)
    axes.yaxis.set_major_formatter(lambda value, _: decimal(value))
    axes.legend(loc="upper right")


def _draw_depth(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    minutes = _minutes(replayed.result.over_time, at=0.5)
    for name, _, (_, depth), style in _links(replayed, colours):
        axes.plot(minutes, depth, label=name, **style)
    axes.set(xlabel="minutes", ylabel="active and queued transfers", ylim=(0, None), xlim=(0, None))
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.legend(loc="upper right", ncols=2)


def _draw_working_set(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    over_time, trace = replayed.result.over_time, replayed.stats.over_time
    token_bytes = replayed.setup.token_bytes
    minutes = (np.arange(len(trace.unique_tokens)) + 1) * trace.bin_s / _MINUTE_S
    axes.plot(minutes, trace.unique_tokens * token_bytes, color=colours["soft"], linestyle=":", label="distinct so far")
    used = f"used within {trace.bin_s:,.0f} s"
    axes.plot(minutes, trace.used_tokens * token_bytes, color=colours["tiered"], linewidth=1.5, label=used)
    for (name, it), colour in zip(over_time.tiers.items(), _hues(replayed, colours).values(), strict=True):
        axes.plot(_minutes(over_time, at=1.0), it.held_bytes, color=colour, label=f"held by {name}")
    axes.set(xlabel="minutes", ylabel="KV", ylim=(0, None), xlim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: decimal(value))
    axes.legend(loc="upper left")


def _draw_ttft(axes: "Axes", replayed: TieredReplay, colours: Colours) -> None:
    result = replayed.result
    share = np.linspace(0, 1, QUANTILES + 1)
    for name, it, colour in (
        ("everything computed", result.ttft_without, colours["alone"]),
        ("with tiers", result.ttft, colours["tiered"]),
    ):
        label = f"{name}: {it.p50_s:.3g} s median, {it.p99_s:.3g} s p99"
        axes.plot(np.maximum(it.quantiles_s, 1e-4), share, color=colour, label=label)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of requests within", ylim=(0, 1.2))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper left")


CHARTS: Charts[TieredReplay] = {
    "stack": Chart(
        "Where prompts came from, over time",
        _draw_stack,
        "By the arrival of the requests. Cached, but computed: computing was expected to be faster.",
    ),
    "total": Chart(
        "Where prompts came from, in total",
        _draw_total,
        "Prompt tokens by the tier that held their KV; light: computed.",
    ),
    "ttft": Chart(
        "Time to first token",
        _draw_ttft,
        "The same requests on the same nodes, with tiers and with everything computed.",
    ),
    "demand": Chart(
        "Bandwidth used on each link",
        _draw_demand,
        "All nodes together. A link that is always busy shows its own limit; give it more bandwidth to see demand.",
    ),
    "depth": Chart(
        "Queue depth", _draw_depth, "Transfers on all links of a tier together, mean of each part of the time."
    ),
    "working-set": Chart("Working set, and bytes held", _draw_working_set, "Dotted: all blocks used so far."),
    "intervals": Chart("Reuse intervals", draw_intervals, INTERVALS_CAPTION),
}
