"""A plan's pictures, drawn by matplotlib: as a file of four, or one by one for the report.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

import math
import re
from pathlib import Path

from matplotlib.axes import Axes

from kvtier.plan.drawing import Colours, Pictures, svgs, write_pictures
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


def write_plot(path: Path, plan: Plan) -> None:
    """Write all pictures to one file, on a light ground.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_pictures(path, PICTURES, plan)


def pictures(plan: Plan) -> dict[str, str]:
    """Name of each picture to its SVG, whose colours are the variables of the page that shows it."""
    return svgs(PICTURES, plan)


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


PICTURES: Pictures[Plan] = {
    "capacity": ("KV against conversations and context", _draw_capacity),
    "prompt": ("One prompt: computed, or fetched", _draw_single_prompt),
    "ttft": ("Time to first token against the load", _draw_ttft),
    "cost": ("What a million output tokens take", _draw_cost),
}
