"""The HTML report of `kvtier characterize`."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtier.characterize.events import IoTrace, transfers
from kvtier.characterize.measures import IoMeasures, submitted_rows
from kvtier.characterize.tables import headline, notes, tables
from kvtier.config.value_types import size_text
from kvtier.report.chart import Chart, Charts, Colours, figures_html
from kvtier.report.format import bytes_text, digits, rate_text, share_text, time_text
from kvtier.report.output import write_file
from kvtier.report.page import list_html, page_html, table_html, tiles_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_MAX = 3000
"""Requests drawn in a chart of single requests; of more, every n-th."""
READ, WRITE = "disk", "tiered"
"""Colours of reads and writes."""


class _Drawn(NamedTuple):
    rows: np.ndarray
    """Of the lowest layer."""
    submitted: np.ndarray
    """As they were submitted, if that was seen."""
    measures: IoMeasures
    sizes: dict[str, np.ndarray]
    """Sizes of the requests of each layer in bytes, sorted."""


def write_report(path: Path, trace: IoTrace, measures: IoMeasures) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(trace, measures))


def render_report(trace: IoTrace, measures: IoMeasures, made: datetime | None = None) -> str:
    """The HTML of the report."""
    rows = transfers(trace.of_chosen(trace.at(trace.lowest)))
    sizes = {
        layer.name.lower().replace("_", " "): np.sort(transfers(trace.of_chosen(trace.at(layer)))["bytes"])
        for layer in trace.layers
    }
    it = measures
    submitted = it.submitted_depth or it.queue_depth
    tiles = [
        (share_text(it.sequential_share["per_process"]), "sequential per process"),
        (bytes_text(it.request_bytes["p50"]), "median request"),
        (digits(it.queue_depth["submitted"]), f"requests in flight; {submitted['peak']:.0f} at most"),
        (rate_text(it.gb_per_s["mean"] * 1e9), f"on average; {rate_text(it.gb_per_s['peak'] * 1e9)} at most"),
        (time_text(it.latency_us["p99"] / 1e6), "99th percentile of latency"),
    ]
    return page_html(
        "kvtier characterize",
        headline(measures),
        tiles_html(tiles) if len(rows) else "",
        figures_html(_charts(), _Drawn(rows, trace.of_chosen(submitted_rows(trace)), measures, sizes))
        if len(rows)
        else "",
        list_html(notes(measures)),
        *(table_html(table) for table in tables(measures)),
        remark=f"{it.requests:,} requests; the lowest layer: {it.layer.replace('_', ' ')}; source: {it.source}.",
        made=made,
    )


def _charts() -> "Charts[_Drawn]":
    return {
        "sizes": Chart("Request sizes", _draw_sizes, "Share of all requests; two steps double the size."),
        "layers": Chart("Sizes by layer", _draw_layers, "Share of the bytes in requests of at most this size."),
        "depth": Chart("Queue depth over time", _draw_depth, "Mean of each interval, exact; dashed: over all time."),
        "throughput": Chart("Throughput over time", _draw_throughput, "Reads and writes."),
        "latency": Chart("Latency", _draw_latency, "Share of requests that took at most this long."),
        "addresses": Chart("Addresses over time", _draw_addresses, "One point for a request, or for every n-th."),
    }


def _draw_sizes(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    sizes = it.submitted["bytes"].astype(float)
    edges = np.exp2(np.arange(np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max() + 1)) + 0.5, 0.5))
    for is_write, name, colour in ((False, "reads", READ), (True, "writes", WRITE)):
        of = sizes[it.submitted["is_write"] == is_write]
        if len(of):
            axes.hist(of, bins=edges.tolist(), weights=np.full(len(of), 1 / len(sizes)), color=colours[colour], alpha=0.75, label=name)  # fmt: skip  # noqa: E501
    axes.set(ylabel="share of requests")
    _size_axis(axes, edges[0], edges[-1])
    axes.legend(loc="best")


def _draw_layers(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    for (name, sizes), colour in zip(it.sizes.items(), ("shared", "gpu", "disk"), strict=False):
        if len(sizes):
            steps, first = np.unique(sizes, return_index=True)
            total = np.concatenate([np.cumsum(sizes)[first[1:] - 1], [sizes.sum()]]) / sizes.sum()
            axes.step([steps[0], *steps], [0.0, *total], where="post", color=colours[colour], label=name, linewidth=1.8)
    axes.set(ylim=(0, 1.02), ylabel="share of bytes")
    everything = np.concatenate(list(it.sizes.values()))
    _size_axis(axes, float(everything.min()), float(everything.max()))
    axes.legend(loc="best")


def _size_axis(axes: "Axes", least: float, most: float) -> None:
    """A logarithmic axis of sizes, with at most eight round ticks."""
    low, high = int(np.floor(np.log2(least))), int(np.ceil(np.log2(most + 1)))
    ticks = [2.0**power for power in range(low, high + 1, max(1, -(-(high - low) // 7)))]
    axes.set(xscale="log", xlim=(2.0 ** (low - 0.5), 2.0 ** (high + 0.5)), xlabel="bytes")
    axes.set_xticks(ticks, [size_text(int(tick)) for tick in ticks])
    axes.minorticks_off()


def _draw_depth(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    over = it.measures.over_time
    axes.stairs(over.queue_depth, _edges(it), color=colours["gpu"], linewidth=1.6)
    axes.axhline(it.measures.queue_depth["submitted"], color=colours["soft"], linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set(ylim=(0, None), xlabel="s", ylabel="requests in flight")


def _draw_throughput(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    over = it.measures.over_time
    for values, name, colour in ((over.read_gb_per_s, "reads", READ), (over.write_gb_per_s, "writes", WRITE)):
        axes.stairs(values, _edges(it), color=colours[colour], linewidth=1.6, label=name)
    axes.set(ylim=(0, None), xlabel="s", ylabel="GB/s")
    axes.legend(loc="best")


def _draw_latency(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    for is_write, name, colour in ((False, "reads", READ), (True, "writes", WRITE)):
        of = it.rows[it.rows["is_write"] == is_write]
        took = np.sort((of["completed_s"] - of["issued_s"])[~np.isnan(of["completed_s"])]) * 1e6
        if len(took):
            chosen = np.unique(np.linspace(0, len(took) - 1, min(len(took), 400)).astype(int))
            axes.plot(np.maximum(took[chosen], 1), (chosen + 1) / len(took), color=colours[colour], label=name)
    axes.set(xscale="log", ylim=(0, 1), xlabel="us", ylabel="share of requests")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_addresses(axes: "Axes", it: _Drawn, colours: Colours) -> None:
    drawn = it.rows[:: -(-len(it.rows) // POINTS_MAX)]
    for is_write, name, colour in ((False, "reads", READ), (True, "writes", WRITE)):
        of = drawn[drawn["is_write"] == is_write]
        if len(of):
            axes.plot(of["issued_s"], of["position"] / 1e9, ".", markersize=2.5, color=colours[colour], label=name)
    axes.set(xlabel="s", ylabel="address, GB")
    axes.legend(loc="best", markerscale=3)


def _edges(it: _Drawn) -> list[float]:
    over = it.measures.over_time
    return [over.interval_s * place for place in range(len(over.queue_depth) + 1)]
