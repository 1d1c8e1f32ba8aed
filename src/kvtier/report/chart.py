"""Charts, drawn by matplotlib: as a file, or as SVG in a page with the page's colours.

matplotlib is imported when a chart is drawn, not before; `report.output.check_matplotlib` says whether it is there.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvtier.report.output import write_file
from kvtier.report.page import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKED = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}
"""Placeholders that are replaced by the style sheet's variables once matplotlib has drawn."""
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
    "lines.linewidth": 2.2,
}
SIZE_INCHES = (5.0, 3.7)
"""Of a chart in a page: on a phone its letters are still of nine pixels."""
FILE_SIZE_INCHES = (6.2, 4.3)
Colours = Mapping[str, str]

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Chart(Generic[Subject]):
    """One chart of a subject such as a plan or a replay."""

    heading: str
    draw: "Callable[[Axes, Subject, Colours], None]"
    caption: str = ""
    """Shown below it in a page."""


Charts = Mapping[str, Chart[Subject]]
"""Charts of one subject, by name."""


def figures_html(charts: Charts[Subject], subject: Subject, prefix: str = "") -> str:
    """All charts with headings and captions, as a part of a page.

    Args:
        charts: what to draw.
        subject: of what.
        prefix: makes the ids unique in a page that shows several subjects.
    """
    figures = "".join(
        f"<figure><h3>{escape(chart.heading)}</h3>{svg(chart, subject, f'{prefix}{name}')}"
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        for name, chart in charts.items()
    )
    return f'<div class="pictures">{figures}</div>'


def svg(chart: Chart[Subject], subject: Subject, name: str) -> str:
    """The chart without heading as an SVG element; `name` makes its ids unique in the page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        chart.draw(axes, subject, MARKED)
        _style(axes, MARKED)
        text = _bytes(figure, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', text, count=1
    )
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, marked in MARKED.items():
        text = text.replace(marked, f"var(--{colour})")
    return text


def logarithmic_y(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, with labels at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.minorticks_off()


def write_charts(
    option: str,
    path: Path,
    charts: Charts[Subject],
    subject: Subject,
    size_inches: tuple[float, float] = FILE_SIZE_INCHES,
    columns: int = 2,
) -> None:
    """Write all charts to one file, beside each other, on a light ground; the suffix gives the format.

    Args:
        option: the command line's option, for error messages.
        path: the file.
        charts: what to draw.
        subject: of what.
        size_inches: width and height of each chart; letters keep their size.
        columns: charts in a row.

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
            chart.draw(axes, subject, LIGHT)
            axes.set_title(chart.heading, pad=22)  # a legend fits between it and the axes
            _style(axes, LIGHT)
        write_file(option, path, _bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))


def _bytes(figure: "Figure", form: str, dpi: float = 72) -> bytes:
    """The figure in format `form`; an SVG at the default `dpi` is transparent."""
    buffer = io.BytesIO()
    # Without a date the same subject gives the same file.
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(buffer, format=form, dpi=dpi, metadata=metadata, transparent=form == "svg" and dpi == 72)
    return buffer.getvalue()


def _style(axes: "Axes", colours: Colours) -> None:
    """Set the colours of axes, grid and text."""
    axes.set_facecolor("none")
    axes.grid(visible=True, color=colours["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=colours["soft"], length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours["line"])
    axes.xaxis.label.set_color(colours["soft"])
    axes.yaxis.label.set_color(colours["soft"])
    axes.title.set_color(colours["ink"])
    legend = axes.get_legend()
    for text in legend.get_texts() if legend else ():
        text.set_color(colours["ink"])
