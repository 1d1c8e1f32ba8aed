"""Charts as values. matplotlib draws charts to a file, or as SVG in the colors of a page.

Pages and charts share colors and a style that is readable on light and dark screens and on paper.

matplotlib is imported only when a chart is drawn. `report.output.check_matplotlib` checks that it is installed.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.report.output import write_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Values = Sequence[float] | npt.NDArray[np.floating[Any] | np.integer[Any]]

COLOURS = {
    "ground": ("#ffffff", "#14181d"),
    "panel": ("#f6f7f9", "#1c2229"),
    "ink": ("#1c2128", "#e6e9ed"),
    "soft": ("#5b6470", "#9aa4af"),
    "line": ("#dfe3e8", "#313943"),
    "bad": ("#c62828", "#ff7b72"),
    "alone": ("#6b7480", "#9aa4af"),
    "computed": ("#6b7480", "#9aa4af"),
    "tiered": ("#c9540a", "#f28a3c"),
    "gpu": ("#2f7ed8", "#5ba3f0"),
    "host": ("#b57a0c", "#e0a548"),
    "disk": ("#1b8f6f", "#34b38e"),
    "shared": ("#8a4fd0", "#b58af0"),
}
"""Colors of pages and charts: the first on light screens, the second on dark ones."""
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
_LIGHT_VARIABLES = "".join(f"--{name}:{light};" for name, light in LIGHT.items())
_DARK_VARIABLES = "".join(f"--{name}:{dark};" for name, (_, dark) in COLOURS.items())

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT_VARIABLES}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK_VARIABLES}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1,h2{overflow-wrap:anywhere}
h1{font-size:30px;line-height:1.25;margin:0 0 8px;font-weight:650;text-wrap:balance}
h2{font-size:20px;margin:44px 0 4px;font-weight:650}
h2.table{font-size:17px;margin-top:28px}
h3{font-size:16px;margin:0 0 6px;font-weight:650}
p{margin:6px 0 12px;max-width:85ch}
.soft,figcaption{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px;margin:26px 0 8px}
figure{margin:0;padding:16px 14px 10px;background:var(--panel);border:1px solid var(--line);border-radius:10px}
figcaption{font-size:14px;padding:8px 4px 2px}
svg{display:block;width:100%;height:auto;max-width:680px}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif!important;
font-variant-numeric:tabular-nums}
figure:only-child{max-width:720px}
.wide{overflow-x:auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px;overflow-x:auto;
font-size:14px}
table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th:first-child,td:first-child{padding-left:4px}
.number{text-align:right;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
td.name{white-space:nowrap}
td{overflow-wrap:anywhere}
ul{padding-left:20px;max-width:85ch}li{margin:4px 0}
summary{cursor:pointer;margin:34px 0 6px;font-weight:600}
@media (max-width:640px){main{padding:20px 12px 40px}h1{font-size:23px}figure{padding:10px 4px 8px}
table{font-size:14px}th,td{padding:6px}th,td.name{white-space:normal!important}td:not(.number){min-width:9em}
td.name{overflow-wrap:normal}}
@media print{main{padding:0}figure,tr{break-inside:avoid}}
"""
)


MARKED = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}
"""Placeholder colors for matplotlib. Variables of the style sheet replace them in the drawn SVG."""
RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvtier",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
SIZE_INCHES = (5.0, 3.7)
"""Size of a chart in a page. On a phone the letters are still nine pixels high."""
FILE_SIZE_INCHES = (6.2, 4.3)
LEGEND_CHARACTERS = 60
"""Characters that fit into a row of a legend, including lines and gaps."""
LEGEND_ROW = 14
"""Height of a row of a legend, in points."""
FEW_DECADES = 300.0
"""If its ends have a smaller ratio, a logarithmic axis labels 1, 2 and 5 times each power of ten, not only powers."""
TICKS_MAX = 7
"""Most labels of an axis."""
END_GAP = 0.065
"""Least distance between two labels at the ends of curves, as a share of the chart's height."""
POINTS_MAX = 2000
"""Most points that a chart draws individually. More points become pixels, to keep pages small."""
DASHED = (0, (5, 3))
Dash = str | tuple[float, tuple[float, ...]]
"""A line style of matplotlib; an empty one draws no line."""
LAYERS: "Sequence[tuple[Dash, float]]" = (("-", 4.4), ((0, (5, 3)), 2.6), ((0, (2, 2)), 1.8), ((0, (6, 3, 2, 3)), 1.2))
"""Style and width of lines that may coincide. Earlier lines stay visible around and between later ones."""
Colours = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line through points, or only the points. Its color is a name in `COLOURS`."""

    x: "Values"
    y: "Values"
    colour: str
    label: str = ""
    """Text in the legend; empty if the legend omits the curve."""
    dash: Dash = "-"
    marker: str = ""
    """matplotlib's marker of each point."""
    width: float = 2.2
    alpha: float = 1.0
    band: "tuple[Values, Values] | None" = None
    """Lower and upper ends of an area around the curve."""
    band_alpha: float = 0.15
    is_step: bool = False
    """Whether each value lasts until the next x."""
    end: str = ""
    """Label to the right of the last point, below the labels of higher curves."""

    def draw(self, axes: "Axes", colours: Colours) -> None:
        """Draw the curve into `axes`."""
        colour = colours[self.colour]
        axes.plot(
            self.x, self.y, color=colour, label=self.label or None, linestyle=self.dash, marker=self.marker,
            markersize=4.5 if self.dash else 3, linewidth=self.width, alpha=self.alpha,
            drawstyle="steps-post" if self.is_step else "default",
            rasterized=not self.dash and len(self.x) > POINTS_MAX,
        )  # fmt: skip
        if self.band is not None:
            step = "post" if self.is_step else None
            axes.fill_between(self.x, *self.band, color=colour, alpha=self.band_alpha, linewidth=0, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A line across the whole chart."""

    at: float
    label: str = ""
    dash: Dash = DASHED
    is_vertical: bool = False

    def draw(self, axes: "Axes", colours: Colours) -> None:
        """Draw the line into `axes`."""
        draw = axes.axvline if self.is_vertical else axes.axhline
        draw(self.at, color=colours["soft"], linewidth=1.2, linestyle=self.dash, label=self.label or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars, or one part of each bar. The first bar is on top."""

    names: Sequence[str]
    values: Sequence[float]
    colours: Sequence[str]
    """The color of each bar."""
    label: str = ""
    """Text in the legend; empty if the legend omits the bars."""
    left: Sequence[float] | None = None
    """Start of each part; None if bars are drawn whole, from 0."""
    texts: Sequence[str] = ()
    """Labels at the end of each bar, or in the middle of each part."""
    ends: tuple[Sequence[float], Sequence[float]] | None = None
    """Lengths of an error line below and above each value."""

    def draw(self, axes: "Axes", colours: Colours) -> None:
        """Draw the bars into `axes`."""
        is_part = self.left is not None
        drawn = axes.barh(
            self.names, self.values, left=self.left or 0, color=[colours[it] for it in self.colours],
            label=self.label or None, xerr=self.ends, ecolor=colours["ink"],
        )  # fmt: skip
        # White is legible on every hue except the light one of lines.
        ink = "#ffffff" if is_part and "line" not in self.colours else colours["ink"]
        if self.texts:
            place = "center" if is_part else "edge"
            axes.bar_label(drawn, self.texts, label_type=place, padding=0 if is_part else 4, color=ink)
        if not axes.yaxis_inverted():
            axes.invert_yaxis()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a chart."""

    label: str = ""
    is_log: bool = False
    least: float | None = None
    most: float | None = None
    text: Callable[[float], str] | None = None
    """Returns the label of a value; None means that the label is the number."""
    ticks: Sequence[float] = ()
    """The values that get a label; empty means that round values get labels."""

    def set(self, axes: "Axes", name: str) -> None:
        """Apply these properties to the axis `name` ("x" or "y") of `axes`."""
        from matplotlib.ticker import LogLocator

        own = axes.xaxis if name == "x" else axes.yaxis
        if self.is_log:
            axes.set(**{f"{name}scale": "log"})
        axes.set(**{f"{name}label": self.label, f"{name}lim": (self.least, self.most)})
        if self.is_log:
            low, high = own.get_view_interval()
            own.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < FEW_DECADES * low else (1.0,)))
        if self.ticks:
            own.set_ticks(list(self.ticks))
        if self.is_log or self.ticks:
            own.minorticks_off()
        if self.text is not None or self.is_log:
            text = self.text or "{:,g}".format
            own.set_major_formatter(lambda value, _: text(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The contents of one chart."""

    heading: str
    marks: Sequence[Curve | Rule | Bars]
    x: Axis
    y: Axis = Axis()
    caption: str = ""
    """Text below the chart in a page."""


Charts = Mapping[str, Chart]
"""Charts by name."""


def few(values: Iterable[float]) -> list[float]:
    """Return at most `TICKS_MAX` of the values in order, including the largest, so that labels do not touch."""
    found = sorted(values, reverse=True)
    return found[:: -(-len(found) // TICKS_MAX) or 1][::-1]


def stacked(names: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]], least: float = 0.06) -> list[Bars]:
    """Return bars whose parts lie end to end. Each part is labeled with its share of the bar.

    Args:
        names: names of the bars.
        parts: for each part its label, its color, and its values, one for each bar.
        least: smaller shares have no label.
    """
    left = [0.0] * len(names)
    bars: list[Bars] = []
    whole = [max(sum(values), 1e-12) for values in zip(*(values for *_, values in parts), strict=True)]
    for label, colour, values in parts:
        shares = [value / total for value, total in zip(values, whole, strict=True)]
        texts = [f"{share:.0%}" if share > least else "" for share in shares]
        bars.append(Bars(names=names, values=shares, colours=[colour], label=label, left=left, texts=texts))
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    return bars


def told_apart(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with decreasing widths and different dashes, so that coinciding curves stay visible."""
    return [replace(it, dash=dash, width=width) for it, (dash, width) in zip(curves, LAYERS, strict=False)]


def svg(chart: Chart, name: str) -> str:
    """Return the chart, without its heading, as an SVG element. `name` makes its ids unique in the page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        _draw(figure.subplots(), chart, MARKED)
        text = _bytes(figure, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', text, count=1
    )
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, marked in MARKED.items():
        text = text.replace(marked, f"var(--{colour})")
    return text


def write_charts(
    option: str, path: Path, charts: Charts, size_inches: tuple[float, float] = FILE_SIZE_INCHES, columns: int = 2
) -> None:
    """Write all charts to one file, in rows on a light ground. The suffix decides the format.

    Args:
        option: the command line's option, for error messages.
        path: the file.
        charts: the charts to draw.
        size_inches: width and height of each chart. The size of letters does not change.
        columns: number of charts in a row.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    with mpl.rc_context(RC):
        figure = Figure(
            figsize=(size_inches[0] * columns, size_inches[1] * rows), layout="constrained", facecolor=LIGHT["ground"]
        )
        for number, chart in enumerate(charts.values(), 1):
            axes = figure.add_subplot(rows, columns, number)
            legend_rows = _draw(axes, chart, LIGHT)
            axes.set_title(chart.heading, pad=8 + LEGEND_ROW * legend_rows, color=LIGHT["ink"])
        write_file(option, path, _bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))


def _bytes(figure: "Figure", form: str, dpi: float = 72) -> bytes:
    """Return the figure in format `form`. An SVG at the default `dpi` is transparent."""
    buffer = io.BytesIO()
    # Without a date, equal charts give equal files.
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(buffer, format=form, dpi=dpi, metadata=metadata, transparent=form == "svg" and dpi == 72)
    return buffer.getvalue()


def _write_ends(axes: "Axes", curves: Sequence[Curve], colours: Colours) -> None:
    """Write the label of each curve to the right of its end, from the top down, so that no label covers another."""
    to_share = (axes.transData + axes.transAxes.inverted()).transform
    ends = [(float(to_share((it.x[-1], it.y[-1]))[1]), it) for it in curves]
    highest = 1.0 + END_GAP
    for place, (height, curve) in enumerate(sorted(ends, key=lambda it: -it[0]), 1):
        # Below the previous label, and high enough for the following ones.
        highest = max(min(height, highest - END_GAP), END_GAP * (len(ends) - place))
        axes.annotate(
            curve.end, (1.02, highest), xycoords="axes fraction", va="center", color=colours[curve.colour],
            fontweight="bold", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def _draw(axes: "Axes", chart: Chart, colours: Colours) -> int:
    """Draw a chart, with the legend above it, where the legend hides no curve. Return the legend's number of rows."""
    for mark in chart.marks:
        mark.draw(axes, colours)
    chart.x.set(axes, "x")
    chart.y.set(axes, "y")
    _write_ends(axes, [mark for mark in chart.marks if isinstance(mark, Curve) and mark.end], colours)
    axes.set_facecolor("none")
    axes.grid(visible=True, color=colours["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=colours["soft"], length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours["line"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(colours["soft"])
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return 0
    columns = max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + 5))
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.6, columnspacing=1.2,
        labelcolor=colours["ink"],
    )  # fmt: skip
    return -(-len(labels) // columns)
