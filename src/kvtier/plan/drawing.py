"""How pictures are drawn: one set of colours, axes without ornament, and SVG that takes the colours of its page.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier.plan.files import write_whole

LIGHT = {
    "ground": "#ffffff",
    "ink": "#1c2128",
    "soft": "#5b6470",
    "line": "#dfe3e8",
    "alone": "#6b7480",
    "tiered": "#c9540a",
    "computed": "#6b7480",
    "gpu": "#2f7ed8",
    "host": "#b57a0c",
    "disk": "#1b8f6f",
    "shared": "#8a4fd0",
}
"""Colours by what they stand for; the report's dark page has its own."""
MARKED = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}
"""Colours that no picture has otherwise: in the report they become the page's variables."""
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
Colours = Mapping[str, str]

Subject = TypeVar("Subject")
Pictures = Mapping[str, tuple[str, Callable[[Axes, Subject, Colours], None]]]
"""Name to heading and how it is drawn."""


def svgs(pictures: Pictures[Subject], subject: Subject, prefix: str = "") -> dict[str, str]:
    """Name of each picture to its SVG without heading, whose colours are the variables of the page that shows it.

    Args:
        pictures: what to draw.
        subject: of what.
        prefix: makes the names unique in a page that shows several subjects.
    """
    drawn: dict[str, str] = {}
    with mpl.rc_context(RC):
        for name, (_, draw) in pictures.items():
            figure = Figure(figsize=(6.6, 4.4), layout="constrained")
            axes = figure.subplots()
            draw(axes, subject, MARKED)
            dress(axes, MARKED)
            axes.set_title("")  # the page has its own
            drawn[name] = for_page(figure_bytes(figure, "svg").decode(), f"{prefix}{name}")
    return drawn


def write_pictures(path: Path, pictures: Pictures[Subject], subject: Subject) -> None:
    """Write all pictures to one file, two in a row, on a light ground.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = -(-len(pictures) // 2)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(12.4, 4.3 * rows), layout="constrained", facecolor=LIGHT["ground"])
        for number, (heading, draw) in enumerate(pictures.values(), 1):
            axes = figure.add_subplot(rows, 2, number)
            draw(axes, subject, LIGHT)
            if not axes.get_title():
                axes.set_title(heading)
            dress(axes, LIGHT)
        write_whole("--plot", path, figure_bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))


def figure_bytes(figure: Figure, form: str, dpi: float = 72) -> bytes:
    """The figure as a file of kind `form`; at the usual `dpi` an SVG has no ground of its own."""
    buffer = io.BytesIO()
    # Without a date the same plan gives the same file.
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(buffer, format=form, dpi=dpi, metadata=metadata, transparent=form == "svg" and dpi == 72)
    return buffer.getvalue()


def for_page(svg: str, name: str) -> str:
    """The bare element, its colours as variables, its ids its own: a page has several pictures."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', svg, count=1
    )
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, marked in MARKED.items():
        svg = svg.replace(marked, f"var(--{colour})")
    return svg


def dress(axes: Axes, colours: Colours) -> None:
    """Give axes, grid and texts their colours."""
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
