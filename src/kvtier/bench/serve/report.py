"""The charts and HTML report of `kvtier bench serve`."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.bench.serve.answer import OWN, Figure, ServeRecord, answer, headline, joined, p50_ms, tokens_per_s
from kvtier.bench.serve.join import CACHED, COMPUTED, EXTERNAL, NO_CONNECTOR, RESIDENT
from kvtier.bench.serve.results import Prices, Spread, hit_share, repetitions
from kvtier.bench.serve.tables import arms_table, conditions, cost_table, notes, run_name, runs_table, work_table
from kvtier.report.chart import Chart, Charts, Colours, figures_html, logarithmic_y, write_charts
from kvtier.report.format import decimal, digits
from kvtier.report.output import write_file
from kvtier.report.page import definitions_html, list_html, page_html, paragraphs_html, section_html, table_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HUES = {NO_CONNECTOR: "computed", "native": "shared", OWN: "tiered"}
_OTHER_HUES = ("gpu", "disk", "host", "ink")
_PLACE_HUES = {COMPUTED: "line", RESIDENT: "gpu", "host": "host", "disk": "disk", EXTERNAL: "shared", CACHED: "shared"}


def write_report(path: Path, record: dict[str, Any], prices: Prices | None = None) -> None:
    """Write the HTML report of a record.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(record, prices))


def write_picture(path: Path, record: dict[str, Any]) -> None:
    """Write the picture of the answer, legible at a width of 700 pixels.

    Raises:
        ConfigError: the file cannot be written.
    """
    served = ServeRecord.of(record)
    charts = {name: chart for name, chart in charts_of(served).items() if name in HEADLINE}
    write_charts("--picture", path, charts, served, PICTURE_INCHES)


def render_report(record: dict[str, Any], prices: Prices | None = None, made: datetime | None = None) -> str:
    """The HTML of the report."""
    served = ServeRecord.of(record, prices)
    charts = charts_of(served)
    shown = {name: chart for name, chart in charts.items() if name in HEADLINE}
    others = {name: chart for name, chart in charts.items() if name not in HEADLINE and name not in OVER_TIME}
    over_time = {name: chart for name, chart in charts.items() if name in OVER_TIME}
    return page_html(
        "kvtier bench serve",
        headline(served),
        paragraphs_html([answer(served)]),
        figures_html(shown, served),
        list_html(notes(served)),
        section_html("Where the tokens came from", figures_html(others, served)) if others else "",
        section_html("Over time", paragraphs_html([_over_time_text(served)]), figures_html(over_time, served))
        if over_time
        else "",
        table_html(replace(arms_table(served), title="Speed")),
        table_html(work_table(served)),
        table_html(cost_table(served)),
        section_html("Conditions", definitions_html(conditions(served))),
        section_html("Definitions", paragraphs_html(served.definitions.values())),
        table_html(runs_table(served)),
        remark=f"{served.machine.get('processor', '')}, {served.machine.get('cores', '?')} cores.",
        made=made,
    )


def charts_of(served: ServeRecord) -> Charts[ServeRecord]:
    """The charts that the record has figures for."""
    charts: dict[str, Chart[ServeRecord]] = {}
    loads = sorted({load for load, _ in served.points})
    limited = [ratio for ratio in served.ratios if ratio]
    if limited:
        charts["ttft"] = Chart("Time to first token against the drive's speed", partial(_draw_ratio, of=p50_ms), RATIO)
        charts["tokens"] = Chart(
            "Output tokens against the drive's speed", partial(_draw_ratio, of=tokens_per_s), RATIO
        )
    if len(loads) > 1:
        charts["ttft-load" if limited else "ttft"] = Chart(
            "Time to first token against load", partial(_draw_load, of=p50_ms), LOAD
        )
        charts["tokens-load" if limited else "tokens"] = Chart(
            "Output tokens against load", partial(_draw_load, of=tokens_per_s), LOAD
        )
    elif not limited:
        charts["ttft"] = Chart("Time to first token", partial(_draw_bars, of=p50_ms), BARS)
        charts["tokens"] = Chart("Output tokens", partial(_draw_bars, of=tokens_per_s), BARS)
    charts["places"] = Chart("Prompt tokens by place", _draw_places, PLACES_CAPTION)
    if any(len(it.by_turn) > 1 for it in served.results):
        charts["turns"] = Chart("Hits by turn", partial(_draw_turns, of=_turn_hits), TURNS)
        charts["turns-ttft"] = Chart("Time to first token by turn", partial(_draw_turns, of=_turn_ms), TURNS)
    for name, heading, columns, unit in SERIES:
        if any(column in it.series for it in served.results for column, _ in columns):
            draw = partial(_draw_series, columns=columns, unit=unit)
            charts[name] = Chart(heading, draw, "Seconds since the measured part began.")
    return charts


PICTURE_INCHES = (4.6, 3.6)
"""Of each of the two charts in a picture: at 700 pixels together their letters are of ten."""
LOGARITHMIC_FROM = 10.0
"""Above this ratio of the largest to the smallest median an axis of load is logarithmic."""
HEADLINE = ("ttft", "tokens")
"""Charts of the answer."""
SERIES = (
    ("reads", "Reads from storage", (("read_gb_per_s", ""),), "bytes a second"),
    ("writes", "Writes to storage", (("write_gb_per_s", ""),), "bytes a second"),
    ("depth", "Queue depth of the drive", (("queue_depth", ""),), "requests in the device's queue"),
    ("throughput", "Output tokens", (("output_tokens_per_s", ""),), "output tokens/s"),
    ("cpu", "Processor of the server", (("cpu_cores", ""),), "cores"),
    ("watts", "Power", (("gpu_watts", "GPU"), ("package_watts", "processor")), "W"),
)
OVER_TIME = tuple(name for name, *_ in SERIES)
BARS = "Medians of the runs; lines: smallest and largest."
LOAD = "Medians of the runs; bands: smallest and largest. The drive has no limit, or the highest."
RATIO = (
    "R is the KV that the engine computes in a second over what the drive moves in one: right of 1 the drive is slower "
    "than computing. Medians of the runs; bands: smallest and largest."
)
TURNS = "All complete runs at the point of the answer. The first turn of a conversation has no history to load."
PLACES_CAPTION = "Share of the prompt tokens, of all complete runs at the point of the answer."


def _draw_ratio(axes: "Axes", served: ServeRecord, colours: Colours, *, of: Figure) -> None:
    load, ratios = served.top[0], [ratio for ratio in served.ratios if ratio]
    for name, colour in _colours(served, colours).items():
        found = [(ratio, it) for ratio in ratios if (it := served.at(name, (load, ratio), of))]
        _line(axes, found, colour, label=served.label(name))
    axes.axvline(1.0, color=colours["soft"], linewidth=1.0, linestyle=":")
    axes.set(xscale="log", xlabel="R: computing over the drive", ylabel=_unit(of), ylim=(0, None))
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    _legend(axes)


def _draw_load(axes: "Axes", served: ServeRecord, colours: Colours, *, of: Figure) -> None:
    names = list(dict.fromkeys(name for load, _ in served.points for name, _ in load))
    moving = next((name for name in names if len({dict(load).get(name) for load, _ in served.points}) > 1), "")
    own = sorted({it.point for it in served.results if it.name == served.own})
    lowest = {load: min(ratio for other, ratio in own if other == load) for load, _ in own}
    medians: list[float] = []
    for arm, colour in _colours(served, colours).items():
        points = [(dict(load).get(moving, 0.0), served.at(arm, (load, ratio), of)) for load, ratio in lowest.items()]
        found = [(at, it) for at, it in points if it]
        _line(axes, found, colour, label=served.label(arm))
        medians += [it.median for _, it in found]
    known = {"requests_per_s": "requests/s asked for", "users": "users"}
    axes.set(xlabel=known.get(moving, moving.replace("_", " ")), ylabel=_unit(of))
    if min(medians, default=0.0) > 0 and max(medians) > LOGARITHMIC_FROM * min(medians):
        logarithmic_y(axes)
    else:
        axes.set_ylim(0, None)
    _legend(axes)


def _draw_bars(axes: "Axes", served: ServeRecord, colours: Colours, *, of: Figure) -> None:
    hues = _colours(served, colours)
    found = {name: it for name in served.names if (it := served.at(name, served.top, of))}
    middles = [it.median for it in found.values()]
    ends = [[it.median - it.low for it in found.values()], [it.high - it.median for it in found.values()]]
    drawn = axes.barh(
        [served.label(name).replace(" (", "\n(") for name in found],
        middles,
        color=[hues[name] for name in found],
        xerr=ends,
        ecolor=colours["ink"],
    )
    axes.bar_label(drawn, [digits(it) for it in middles], padding=4, color=colours["ink"])
    axes.invert_yaxis()
    axes.set(xlabel=_unit(of), xlim=(0, 1.18 * max([it.high for it in found.values()], default=1.0)))


def _draw_places(axes: "Axes", served: ServeRecord, colours: Colours) -> None:
    rows: dict[str, dict[str, float]] = {}
    found = sorted(repetitions(served.results).items(), key=lambda it: served.names.index(it[0][0]))
    for (name, point), runs in found:
        if point == served.top or (name == served.plain and point[0] == served.top[0]):
            sums: dict[str, float] = {}
            for place, tokens in ((place, n) for run in runs for place, n in (run.tokens_by_place or {}).items()):
                sums[place] = sums.get(place, 0) + tokens
            if total := sum(sums.values()):
                rows[served.label(name).replace(" (", "\n(")] = {
                    place: tokens / total for place, tokens in sums.items()
                }
    places = sorted(
        {place for row in rows.values() for place in row}, key=lambda it: (it == COMPUTED, it != RESIDENT, it)
    )
    left = dict.fromkeys(rows, 0.0)
    spare = iter(_OTHER_HUES)
    for place in places:
        hue = _PLACE_HUES.get(place) or next(spare, "ink")
        widths = [row.get(place, 0.0) for row in rows.values()]
        drawn = axes.barh(list(rows), widths, left=list(left.values()), color=colours[hue], label=place)
        # White is read on every hue of a tier; the light bar of what is computed takes ink.
        ink = colours["ink"] if place == COMPUTED else "#ffffff"
        axes.bar_label(drawn, [f"{it:.0%}" if it > 0.06 else "" for it in widths], label_type="center", color=ink)
        left = {name: at + width for (name, at), width in zip(left.items(), widths, strict=True)}
    axes.invert_yaxis()
    axes.set(xlabel="share of the prompt tokens", xlim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(axes)


def _draw_turns(
    axes: "Axes", served: ServeRecord, colours: Colours, *, of: Callable[[dict[str, Any]], float | None]
) -> None:
    for name, colour in _colours(served, colours).items():
        found: dict[int, list[float]] = {}
        for (arm, point), runs in repetitions(served.results).items():
            if arm == name and (point == served.top or (name == served.plain and point[0] == served.top[0])):
                for row, value in ((row, of(row)) for run in runs for row in run.by_turn):
                    if value is not None:
                        found.setdefault(row["turn"] + 1, []).append(value)
        middles = [(turn, Spread(median(own), min(own), max(own))) for turn, own in sorted(found.items())]
        _line(axes, middles, colour, label=served.label(name))
    axes.set(xlabel="turn of the conversation", ylabel=_turn_unit(of), ylim=(0, None))
    if of is _turn_hits:
        axes.set(ylim=(0, 1))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xticks(sorted({row["turn"] + 1 for run in served.results for row in run.by_turn}))
    _legend(axes)


def _draw_series(
    axes: "Axes", served: ServeRecord, colours: Colours, *, columns: Sequence[tuple[str, str]], unit: str
) -> None:
    hues = _colours(served, colours)
    for run in served.results:
        for column, label in columns:
            if column not in run.series:
                continue
            # A gap stays one: what is unknown is not drawn as zero.
            at_s, values = (np.array(run.series[name], dtype=float) for name in ("at_s", column))
            dash = "-" if (column, label) == columns[0] else (0, (4, 2))
            text = f"{served.label(run.name)} {label}".strip()
            axes.plot(at_s, values, color=hues[run.name], linestyle=dash, linewidth=1.4, label=text)
    axes.set(xlabel="seconds", ylabel=unit, ylim=(0, None), xlim=(0, None))
    if columns[0][0].endswith("_gb_per_s"):
        axes.yaxis.set_major_formatter(lambda value, _: decimal(1e9 * value))
    _legend(axes)


def _line(axes: "Axes", found: Sequence[tuple[float, Spread]], colour: str, *, label: str) -> None:
    """Medians as a line with a marker each, and a band from the smallest to the largest."""
    if found:
        at = [place for place, _ in found]
        axes.plot(at, [it.median for _, it in found], color=colour, marker="o", markersize=5, label=label)
        axes.fill_between(at, [it.low for _, it in found], [it.high for _, it in found], color=colour, alpha=0.15, lw=0)


def _legend(axes: "Axes") -> None:
    """Above the axes, where it hides no line."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, columnspacing=1.2, handlelength=1.6)


def _colours(served: ServeRecord, colours: Colours) -> dict[str, str]:
    """By arm."""
    spare = iter(_OTHER_HUES)
    return {name: colours[_HUES.get(name) or next(spare, "soft")] for name in served.names}


def _turn_hits(row: dict[str, Any]) -> float | None:
    return hit_share(row["tokens_by_place"])


def _turn_ms(row: dict[str, Any]) -> float | None:
    return row["ttft_ms"]["p50"]


def _turn_unit(of: Callable[[dict[str, Any]], float | None]) -> str:
    return "prompt tokens not computed" if of is _turn_hits else "median ms to the first token"


def _unit(of: Figure) -> str:
    return "median ms to the first token" if of is p50_ms else "output tokens/s"


def _over_time_text(served: ServeRecord) -> str:
    shown = [f"{run_name(it)}" for it in served.results if it.series]
    return (
        f"One run of each arm: {joined(shown)}. Reads and writes are the server's own where they are known, else the "
        "drive's. Queue depth is the drive's, with what other processes did."
    )
