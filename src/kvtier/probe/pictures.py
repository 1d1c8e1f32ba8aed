"""A probe's pictures: how fast each link is by size, and how long its operations take.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterable
from pathlib import Path

from matplotlib.axes import Axes

from kvtier.config.kinds import size_text
from kvtier.plan.drawing import Colours, Pictures, svgs, write_pictures
from kvtier.probe.result import LinkMeasures, Measure, ProbeResult

COLOURS = {"host": "host", "gpu": "gpu", "directory": "shared", "disk": "disk"}
"""Link to colour; other links are not drawn."""
DASHED = ("write", "from_gpu")


def write_plot(path: Path, result: ProbeResult) -> None:
    """Write both pictures to one file, on a light ground.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_pictures(path, PICTURES, result)


def pictures(result: ProbeResult) -> dict[str, str]:
    """Title of each picture to its SVG, whose colours are the variables of the page that shows it."""
    return {PICTURES[name][0]: svg for name, svg in svgs(PICTURES, result).items()}


def _draw_rates(axes: Axes, result: ProbeResult, colours: Colours) -> None:
    """The best depth of each size."""
    for link, op, measures in _series(result.links):
        best = _by_size(measures, lambda it: -it.gb_per_s)
        _line(axes, link, op, [it.bytes for it in best], [it.gb_per_s for it in best], colours)
    axes.set(ylabel="GB/s, at the best depth")
    _finish(axes, result)


def _draw_latencies(axes: Axes, result: ProbeResult, colours: Colours) -> None:
    """The least depth of each size, as a line; up to the 99th percentile, as a band."""
    for link, op, measures in _series(result.links):
        least = _by_size(measures, lambda it: it.depth)
        sizes = [it.bytes for it in least]
        _line(axes, link, op, sizes, [it.latency_us_p50 for it in least], colours)
        colour = colours[COLOURS[link]]
        axes.fill_between(
            sizes, [it.latency_us_p50 for it in least], [it.latency_us_p99 for it in least], color=colour, alpha=0.12
        )
    axes.set(ylabel="microseconds, alone; band: up to p99")
    _finish(axes, result)


def _series(links: Iterable[LinkMeasures]) -> Iterable[tuple[str, str, list[Measure]]]:
    for link in links:
        if link.name in COLOURS:
            for op in dict.fromkeys(it.op for it in link.measures if not it.op.endswith("pageable")):
                yield link.name, op, [it for it in link.measures if it.op == op]


def _by_size(measures: list[Measure], worth: Callable[[Measure], float]) -> list[Measure]:
    sizes = sorted({it.bytes for it in measures})
    return [min((it for it in measures if it.bytes == size), key=worth) for size in sizes]


def _line(axes: Axes, link: str, op: str, x: list[int], y: list[float], colours: Colours) -> None:
    style = (0, (4, 2)) if op in DASHED else "-"
    name = f"{link} {op.replace('_', ' ')}"
    axes.plot(x, y, color=colours[COLOURS[link]], linestyle=style, marker="o", markersize=4, label=name)


def _finish(axes: Axes, result: ProbeResult) -> None:
    axes.set(xscale="log", yscale="log", xlabel="size of an operation")
    sizes = sorted({it.bytes for _, _, measures in _series(result.links) for it in measures})
    shown = [size for number, size in enumerate(sizes) if number % max(1, len(sizes) // 5) == 0]
    axes.set_xticks(shown, [size_text(size) for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="best", ncols=2)


PICTURES: Pictures[ProbeResult] = {
    "rates": ("How fast", _draw_rates),
    "latencies": ("How long one operation takes", _draw_latencies),
}
