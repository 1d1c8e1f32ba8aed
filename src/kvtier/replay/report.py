"""The HTML report of replays through one cache, and parts that the report of tiers uses too."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.replay.tables import CONVENTION, CacheReplays, TieredReplay, results_table, stats_table
from kvtier.report.chart import Chart, Charts, Colours, figures_html, write_charts
from kvtier.report.format import short_count
from kvtier.report.output import write_file
from kvtier.report.page import list_html, page_html, paragraphs_html, section_html, table_html, tiles_html
from kvtier.trace.stats import TraceStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HUES = ("gpu", "disk", "shared", "host", "ink")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_INTERVAL_LEAST_S = 0.1
_OWN = {"default": "tiered", "lru": "alone"}


def write_report(path: Path, replayed: Sequence[CacheReplays]) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(replayed))


def write_plot(path: Path, replayed: CacheReplays) -> None:
    """Write all charts of one replay to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_charts("--picture", path, CHARTS, replayed)


def render_report(replayed: Sequence[CacheReplays], made: datetime | None = None) -> str:
    """The HTML of the report."""
    return page_html(
        "kvtier replay",
        f"Replay of {trace_names([it.stats for it in replayed])}",
        paragraphs_html([CONVENTION]),
        *(_replay_html(it, f"t{number}-") for number, it in enumerate(replayed)),
        made=made,
    )


def _replay_html(replayed: CacheReplays, prefix: str) -> str:
    trace = replayed.stats
    tiles = [
        (f"{trace.requests:,}", f"requests in {trace.duration_s:,.0f} s"),
        (short_count(trace.input_tokens), "input tokens"),
        (f"{replayed.bound:.1%}", "hit rate of an infinite cache"),
        (short_count(trace.unique_tokens), "tokens in distinct blocks"),
    ]
    return (
        section_html(trace.name, tiles_html(tiles), figures_html(CHARTS, replayed, prefix))
        + table_html(results_table(replayed.bound, trace.unique_tokens, replayed.results))
        + trace_html(trace)
    )


def trace_names(stats: Sequence[TraceStats]) -> str:
    """The files' names, each once."""
    return ", ".join(dict.fromkeys(Path(it.name).name for it in stats))


def trace_html(trace: TraceStats) -> str:
    """The statistics of a trace, its warnings and notes."""
    return table_html(stats_table(trace)) + list_html([*trace.warnings, *trace.notes])


def _draw_capacity(axes: "Axes", replayed: CacheReplays, colours: Colours) -> None:
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for it in replayed.results:
        if it.capacity_tokens is not None:
            by_policy.setdefault(it.policy, []).append((it.capacity_tokens, it.hit_rate))
    others = 0
    for policy, points in by_policy.items():
        x, y = zip(*sorted(points), strict=True)
        if policy == "min":
            axes.plot(x, y, color=colours["soft"], linestyle=(0, (5, 3)), marker="o", markersize=3, label="min (bound)")
            continue
        if policy in _OWN:
            colour, dash = colours[_OWN[policy]], "-"
        else:
            colour, dash = colours[_HUES[others % len(_HUES)]], _DASHES[others // len(_HUES) % len(_DASHES)]
            others += 1
        axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=4, label=policy)
    axes.axhline(replayed.bound, color=colours["soft"], linewidth=1.2, linestyle=":", label="infinite cache")
    axes.set(xscale="log", xlabel="tokens of capacity", ylabel="hit rate of tokens", ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.xaxis.set_minor_formatter(lambda value, _: short_count(value) if f"{value:e}"[0] in "25" else "")
    axes.legend(loc="best")


def draw_intervals(axes: "Axes", replayed: "CacheReplays | TieredReplay", colours: Colours) -> None:
    """The distribution of reuse intervals; also used by the report of tiers."""
    it = replayed.stats.intervals
    total = it.counts.sum()
    if not total:
        axes.text(0.5, 0.5, "nothing is reused", transform=axes.transAxes, ha="center", color=colours["soft"])
        return
    share = np.cumsum(it.counts) / total
    shown = (it.seconds >= _INTERVAL_LEAST_S) & (share > 0.001) & (share < 0.9999)
    if not shown.any():
        shown = it.counts > 0
    axes.plot(it.seconds[shown], share[shown], color=colours["tiered"])
    axes.set(xscale="log", xlabel="seconds since the last use", ylabel="share of reuse within", ylim=(0, 1))


def _draw_working_set(axes: "Axes", replayed: CacheReplays, colours: Colours) -> None:
    it = replayed.stats.over_time
    minutes = (np.arange(len(it.unique_tokens)) + 1) * it.bin_s / 60
    axes.plot(minutes, it.unique_tokens, color=colours["disk"], label="distinct so far")
    axes.plot(minutes, it.used_tokens, color=colours["tiered"], label=f"used within {it.bin_s:,.0f} s")
    axes.set(xlabel="minutes", ylabel="tokens", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.legend(loc="upper left")


def _draw_demand(axes: "Axes", replayed: CacheReplays, colours: Colours) -> None:
    it = replayed.stats.over_time
    minutes = (np.arange(len(it.input_tokens)) + 0.5) * it.bin_s / 60
    per_s = max(it.bin_s, 1e-9)
    axes.plot(minutes, it.input_tokens / per_s, color=colours["gpu"], label="all")
    axes.plot(minutes, it.new_tokens / per_s, color=colours["tiered"], label="new")
    axes.set(xlabel="minutes", ylabel="input tokens a second", ylim=(0, 1.25 * float(it.input_tokens.max()) / per_s))
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.legend(loc="upper right")


INTERVALS_CAPTION = "Accesses to blocks that were used before, by the time since the last use."
CHARTS: Charts[CacheReplays] = {
    "capacity": Chart(
        "Hit rate against capacity",
        _draw_capacity,
        "Dashed: Belady's bound for whole prefixes. Dotted: an infinite cache.",
    ),
    "intervals": Chart("Reuse intervals", draw_intervals, INTERVALS_CAPTION),
    "working-set": Chart(
        "Working set over time",
        _draw_working_set,
        "Distinct blocks since the start, and blocks that are used within one interval.",
    ),
    "demand": Chart(
        "Demand over time",
        _draw_demand,
        "New tokens must be computed with any cache.",
    ),
}
