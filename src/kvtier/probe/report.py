"""A probe's table, charts and HTML report."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config.value_types import size_text
from kvtier.probe.links import LinkMeasures, Measure
from kvtier.probe.run import ProbeResult
from kvtier.probe.tiers import TierFacts
from kvtier.report.chart import Chart, Charts, Colours, figures_html, write_charts
from kvtier.report.format import time_text
from kvtier.report.output import write_file
from kvtier.report.page import definitions_html, list_html, page_html, section_html, table_html, tiles_html
from kvtier.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"host": "host", "gpu": "gpu", "directory": "shared", "disk": "disk"}
"""The colour of each link. Other tiers have one colour, and other links are not drawn."""
DASHED = ("write", "from_gpu")


def write_report(path: Path, result: ProbeResult) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(result))


def write_plot(path: Path, result: ProbeResult) -> None:
    """Write the charts to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_charts("--picture", path, CHARTS, result)


def render_report(result: ProbeResult, made: datetime | None = None) -> str:
    """The HTML of the report."""
    tiles = [
        (f"{best.gb_per_s:.2f} GB/s", f"{link.name} {op.replace('_', ' ')}, at its best")
        for link in result.links
        for op in ("copy", "to_gpu", "read", "write", "hash")
        if (best := link.best(op)) is not None
    ]
    return page_html(
        "kvtier probe",
        "Links of this machine",
        definitions_html((it.tier, place_text(it)) for it in result.places),
        tiles_html(tiles),
        section_html("Misconfigured", list_html(result.warnings or ["none found"])),
        figures_html(CHARTS, result),
        table_html(table(result)),
        section_html("Not measured", list_html(result.skipped)) if result.skipped else "",
        remark=f"{result.bounds}.",
        made=made,
    )


def table(result: ProbeResult) -> Table:
    """One row per measure."""
    rows = tuple(
        (
            link.name,
            it.op,
            size_text(it.bytes),
            str(it.depth),
            f"{it.gb_per_s:.2f}",
            time_text(it.latency_us_p50 / 1e6),
            time_text(it.latency_us_p99 / 1e6),
        )
        for link in result.links
        for it in link.measures
    )
    return Table(
        title="Links of this machine",
        columns=("link", "op", "size", "depth", "GB/s", "p50", "p99"),
        rows=rows,
        numeric=5,
        note=(
            "GB are 10^9 bytes; depth is the number of concurrent operations, each in a thread of its own; p50 and p99 "
            "are times of one operation at that depth."
        ),
    )


def place_lines(result: ProbeResult) -> Iterator[str]:
    """Lines about the tiers: their round trips and their places."""
    for link in result.links:
        if link.round_trip_us is not None:
            yield f"{link.name}: an absent name takes {time_text(link.round_trip_us / 1e6)}"
    for place in result.places:
        yield f"{place.tier}: {place_text(place)}"


def place_text(place: TierFacts) -> str:
    """The file system of a tier."""
    direct = "no direct I/O"
    if place.alignment_bytes is not None:
        used = "used" if place.direct_io else "not used"
        direct = f"direct I/O {used}, aligned to {place.alignment_bytes} bytes"
    return (
        f"{place.file_system} on {place.source}, {direct}, {size_text(place.free_bytes)} free; "
        f"measured in a temporary store in {place.measured_in}"
    )


def _draw_rates(axes: "Axes", result: ProbeResult, colours: Colours) -> None:
    """The best depth of each size."""
    for link, op, measures in _series(result.links):
        best = _by_size(measures, lambda it: -it.gb_per_s)
        _line(axes, link, op, [it.bytes for it in best], [it.gb_per_s for it in best], colours)
    axes.set(ylabel="GB/s, at the best depth")
    _finish(axes, result)


def _draw_latencies(axes: "Axes", result: ProbeResult, colours: Colours) -> None:
    """Median at the least depth of each size, with a band up to the 99th percentile."""
    for link, op, measures in _series(result.links):
        least = _by_size(measures, lambda it: it.depth)
        sizes = [it.bytes for it in least]
        _line(axes, link, op, sizes, [it.latency_us_p50 for it in least], colours)
        colour = colours[COLOURS.get(link, "tiered")]
        axes.fill_between(
            sizes, [it.latency_us_p50 for it in least], [it.latency_us_p99 for it in least], color=colour, alpha=0.12
        )
    axes.set(ylabel="microseconds, one operation; band: up to p99")
    _finish(axes, result)


def _series(links: Iterable[LinkMeasures]) -> Iterable[tuple[str, str, list[Measure]]]:
    for link in links:
        if link.name in COLOURS or any(it.op == "read" for it in link.measures):
            for op in dict.fromkeys(it.op for it in link.measures if not it.op.endswith("pageable")):
                yield link.name, op, [it for it in link.measures if it.op == op]


def _by_size(measures: list[Measure], cost: Callable[[Measure], float]) -> list[Measure]:
    sizes = sorted({it.bytes for it in measures})
    return [min((it for it in measures if it.bytes == size), key=cost) for size in sizes]


def _line(axes: "Axes", link: str, op: str, x: list[int], y: list[float], colours: Colours) -> None:
    style = (0, (4, 2)) if op in DASHED else "-"
    name = f"{link} {op.replace('_', ' ')}"
    axes.plot(x, y, color=colours[COLOURS.get(link, "tiered")], linestyle=style, marker="o", markersize=4, label=name)


def _finish(axes: "Axes", result: ProbeResult) -> None:
    axes.set(xscale="log", yscale="log", xlabel="size of an operation")
    sizes = sorted({it.bytes for _, _, measures in _series(result.links) for it in measures})
    shown = [size for number, size in enumerate(sizes) if number % max(1, len(sizes) // 5) == 0]
    axes.set_xticks(shown, [size_text(size) for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="best", ncols=2)


CHARTS: Charts[ProbeResult] = {
    "rates": Chart("Bandwidth", _draw_rates),
    "latencies": Chart("Latency of one operation", _draw_latencies),
}
