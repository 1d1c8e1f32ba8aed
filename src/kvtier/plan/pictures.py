"""A plan's pictures, drawn by matplotlib: as a file of four, or one by one for the report.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier.plan.files import write_whole
from kvtier.plan.planning import Plan
from kvtier.plan.series import (
    capacity_curves,
    capacity_marks,
    cost_curves,
    crossing,
    has_prices,
    single_prompt_curves,
    ttft_curves,
)
from kvtier.plan.words import bytes_text, load_text, time_text

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
_MARKED = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}
"""Colours that no picture has otherwise: in the report they become the page's variables."""
_RC: Any = {
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


def write_plot(path: Path, plan: Plan) -> None:
    """Write all pictures to one file, on a light ground.

    Raises:
        ConfigError: the file cannot be written.
    """
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(12.4, 8.6), layout="constrained", facecolor=LIGHT["ground"])
        for axes, (_, draw) in zip(figure.subplots(2, 2).flat, PICTURES.values(), strict=True):
            draw(axes, plan, LIGHT)
            _dress(axes, LIGHT)
        write_whole("--plot", path, _bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))


def pictures(plan: Plan) -> dict[str, str]:
    """Name of each picture to its SVG, whose colours are the variables of the page that shows it."""
    drawn: dict[str, str] = {}
    with mpl.rc_context(_RC):
        for name, (_, draw) in PICTURES.items():
            figure = Figure(figsize=(6.6, 4.4), layout="constrained")
            axes = figure.subplots()
            draw(axes, plan, _MARKED)
            _dress(axes, _MARKED)
            axes.set_title("")  # the page has its own
            drawn[name] = _for_page(_bytes(figure, "svg").decode(), name)
    return drawn


def _bytes(figure: Figure, form: str, dpi: float = 72) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same plan gives the same file.
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(buffer, format=form, dpi=dpi, metadata=metadata, transparent=form == "svg" and dpi == 72)
    return buffer.getvalue()


def _for_page(svg: str, name: str) -> str:
    """The bare element, its colours as variables, its ids its own: a page has several pictures."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', svg, count=1
    )
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, marked in _MARKED.items():
        svg = svg.replace(marked, f"var(--{colour})")
    return svg


def _dress(axes: Axes, colours: Colours) -> None:
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


def _draw_capacity(axes: Axes, plan: Plan, colours: Colours) -> None:
    curves, marks = capacity_curves(plan), capacity_marks(plan)
    first, last = curves[0].x[0], curves[0].x[-1]
    labels: list[tuple[float, str, str]] = []
    for place, curve in enumerate(curves):
        axes.plot(curve.x, curve.y, color=colours["tiered"], alpha=0.35 + 0.65 * (place + 1) / len(curves))
        labels.append((curve.y[-1], curve.name, colours["tiered"]))
    for name, kind, capacity_bytes in marks:
        axes.hlines(capacity_bytes, first, last, colors=colours[kind], linewidth=1.4, linestyles=(0, (5, 3)))
        labels.append((capacity_bytes, f"{name}, {bytes_text(capacity_bytes)}", colours[kind]))
    axes.set(xscale="log", yscale="log", xlabel="conversations held", ylabel="KV")
    axes.set_title("KV against conversations and context")
    axes.yaxis.set_major_formatter(lambda value, _: _round(bytes_text(value)))
    # Beyond the curves is the room for their names.
    axes.xaxis.set_major_formatter(lambda value, _: _short_count(value) if value <= last else "")
    axes.set_xlim(first, last * 10 ** (0.4 * math.log10(last / first)))
    _label_ends(axes, last, labels)


def _label_ends(axes: Axes, x: float, labels: list[tuple[float, str, str]]) -> None:
    """Names at the right ends of lines, moved up where they would lie on each other."""
    low, high = axes.get_ylim()
    apart = (high / low) ** 0.05
    least = 0.0
    for y, text, colour in sorted(labels):
        least = max(y, least * apart)
        axes.annotate(
            text, (x, least), xytext=(6, 0), textcoords="offset points", va="center", color=colour, fontsize=9
        )


def _draw_single_prompt(axes: Axes, plan: Plan, colours: Colours) -> None:
    curves = single_prompt_curves(plan)
    for curve in curves:
        axes.plot(curve.x, curve.y, color=colours[curve.kind], label=curve.name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="until its KV is there")
    floor = axes.get_ylim()[0]
    for curve in curves[1:]:
        at = crossing(curves[0], curve)
        if at is not None:
            axes.vlines(at, floor, curve.y[curve.x.index(at)], colors=colours[curve.kind], linewidth=1, linestyles=":")
    axes.set_ylim(bottom=floor)
    axes.set_title("One prompt: computed, or fetched")
    axes.yaxis.set_major_formatter(lambda value, _: _round(time_text(value)))
    axes.xaxis.set_major_formatter(lambda value, _: _short_count(value))
    axes.legend(loc="upper left")


def _draw_ttft(axes: Axes, plan: Plan, colours: Colours) -> None:
    limit_s = plan.inputs.target.ttft_s
    curves = ttft_curves(plan)
    for curve in curves:
        axes.plot(curve.x, curve.y, color=colours[curve.kind], label=curve.name)
    axes.axhline(limit_s, color=colours["soft"], linewidth=1.2, linestyle=(0, (5, 3)))
    is_users = plan.setup.demand.has_users
    for curve, side in zip(curves, (plan.alone, plan.tiered), strict=True):
        axes.plot([side.users_at_ttft], [limit_s], "o", color=colours[curve.kind], markersize=7)
        axes.annotate(
            load_text(side.users_at_ttft, is_users=is_users),
            (side.users_at_ttft, limit_s),
            xytext=(-6, 7),
            textcoords="offset points",
            ha="right",
            color=colours[curve.kind],
            fontweight="bold",
        )
    axes.set(xlabel=_load_name(plan), ylabel="mean time to first token, s", ylim=(0, 3 * limit_s), xlim=(0, None))
    axes.set_title(f"{_load_name(plan).capitalize()} at {limit_s:g} s to the first token")
    _legend_above(axes)


def _draw_cost(axes: Axes, plan: Plan, colours: Colours) -> None:
    curves = cost_curves(plan)
    for curve in curves:
        axes.plot(curve.x, curve.y, color=colours[curve.kind], label=curve.name)
        axes.plot(curve.x[-1:], curve.y[-1:], "o", color=colours[curve.kind], markersize=6)
        axes.annotate(
            f"{curve.y[-1]:.3g}",
            (curve.x[-1], curve.y[-1]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            color=colours[curve.kind],
            fontweight="bold",
        )
    unit = plan.inputs.price.currency if has_prices(plan) else "kWh"
    least = min(min(curve.y) for curve in curves)
    axes.set(xlabel=_load_name(plan), ylabel=f"{unit} for a million output tokens", ylim=(0, 8 * least), xlim=(0, None))
    axes.set_title("What a million output tokens cost" if has_prices(plan) else "Energy of a million output tokens")
    axes.legend(loc="upper right")


def _load_name(plan: Plan) -> str:
    return "users" if plan.setup.demand.has_users else "queries/s"


def _legend_above(axes: Axes) -> None:
    """Where curves may be anywhere: above the picture, below its title."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.4)
    axes.set_title(axes.get_title(loc="left"), pad=22)


def _short_count(count: float) -> str:
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:,.0f}{unit}"
    return f"{count:,.0f}"


def _round(text: str) -> str:
    """The text of a round number, without zeros behind the point."""
    return re.sub(r"\.0+(?= )", "", text)


Draw = Callable[[Axes, Plan, Colours], None]

PICTURES: dict[str, tuple[str, Draw]] = {
    "capacity": ("KV against conversations and context", _draw_capacity),
    "prompt": ("One prompt: computed, or fetched", _draw_single_prompt),
    "ttft": ("Time to first token against the load", _draw_ttft),
    "cost": ("What a million output tokens take", _draw_cost),
}
"""Name to heading and how it is drawn."""
