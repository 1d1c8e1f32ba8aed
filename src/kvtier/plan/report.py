"""A plan's HTML report and charts."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

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
from kvtier.plan.stated import Stated
from kvtier.plan.tables import assumptions, circumstances, heading, load_text, stated_table, tables, verdict
from kvtier.report.chart import Chart, Charts, Colours, figures_html, write_charts
from kvtier.report.format import bytes_text, ratio_text, share_text, short_count, time_text
from kvtier.report.output import write_file
from kvtier.report.page import (
    definitions_html,
    list_html,
    page_html,
    paragraphs_html,
    section_html,
    table_html,
    tiles_html,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIMITS = (
    "Times are means, not percentiles: the slowest requests wait longer.",
    (
        "One queue for each copy of the model. Chunked prefill, batching and preemption are not simulated; their cost "
        "is in gpu.flops_share and gpu.memory_rate_share, which you can measure."
    ),
    "Users stay with their copy of the model, so GPU memories add up; all copies share the tiers.",
    (
        "LRU by its residence time. Against exact LRU on public traces that is off by one or two points of hit rate; a "
        "policy that knows which conversations have ended does better."
    ),
    "Every computed token is written. Drives wear as rated; a drive in a data centre may do better or worse.",
)


def write_report(path: Path, plan: Plan, stated: list[Stated] | None = None) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(plan, stated))


def write_plot(path: Path, plan: Plan) -> None:
    """Write all charts to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_charts("--plot", path, charts(plan), plan)


def render_report(plan: Plan, stated: list[Stated] | None, made: datetime | None = None) -> str:
    """The HTML of the report."""
    sources = [f"{name}: {source}; read {date}" for name, source, date in plan.sources]
    return page_html(
        "kvtier plan",
        heading(plan),
        paragraphs_html(verdict(plan)),
        definitions_html(circumstances(plan)),
        tiles_html(_tiles(plan)),
        figures_html(charts(plan), plan),
        *(table_html(it) for it in tables(plan)),
        table_html(stated_table(stated, with_notes=True)) if stated else "",
        f'<div class="assumptions">{table_html(assumptions(plan))}{list_html(sources)}</div>',
        section_html("What the plan does not model", list_html(LIMITS)),
        made=made,
    )


def _tiles(plan: Plan) -> list[tuple[str, str]]:
    alone, tiered = plan.alone, plan.tiered
    is_users = plan.setup.demand.has_users
    unit = "users" if is_users else "queries/s"
    before, after = (load_text(it.users_at_ttft, is_users=is_users) for it in (alone, tiered))
    ratio = ratio_text(tiered.users_at_ttft, alone.users_at_ttft)
    return [
        (f"{before} → {after}", f"{unit} within {plan.inputs.target.ttft_s:g} s to the first token ({ratio})"),
        (
            ratio_text(tiered.output_tokens_per_s, alone.output_tokens_per_s),
            f"tokens a second at {load_text(plan.asked_users, is_users=is_users)} {unit}",
        ),
        (
            f"{share_text(alone.point.hit_rate)} → {share_text(tiered.point.hit_rate)}",
            "of all prompt tokens found, not computed",
        ),
        (plan.binding.name, f"binds, at {load_text(plan.binding.users, is_users=is_users)} {unit}"),
    ]


def charts(plan: Plan) -> Charts[Plan]:
    """The plan's charts by name."""
    computed, *fetched = single_prompt_curves(plan)
    crossings = [
        f"{curve.name} from {at:,.0f} tokens on" for curve in fetched if (at := crossing(computed, curve)) is not None
    ]
    faster = f" It is faster {'; '.join(crossings)}." if crossings else ""
    return {
        "capacity": Chart(
            "KV against conversations and context",
            _draw_capacity,
            "Each conversation keeps its own KV. Dashed: the capacity of each tier. Both axes are logarithmic.",
        ),
        "prompt": Chart(
            "One prompt: computed, or fetched",
            _draw_single_prompt,
            f"One prompt whose KV is all stored, on an idle machine.{faster}",
        ),
        "ttft": Chart(
            "Time to first token against the load",
            _draw_ttft,
            "Dashed: the limit; a dot is where the mean meets it. Curves end where queues grow without bound.",
        ),
        "cost": Chart(
            "What a million output tokens cost" if has_prices(plan) else "Energy of a million output tokens",
            _draw_cost,
            "The same machines, used more and more: a curve ends where throughput saturates.",
        ),
    }


def _draw_capacity(axes: "Axes", plan: Plan, colours: Colours) -> None:
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
    axes.yaxis.set_major_formatter(lambda value, _: bytes_text(value))
    # Leave room for the names to the right of the curves.
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value) if value <= last else "")
    axes.set_xlim(first, last * 10 ** (0.4 * math.log10(last / first)))
    _label_ends(axes, last, labels)


def _label_ends(axes: "Axes", x: float, labels: list[tuple[float, str, str]]) -> None:
    """Write names at the right ends of lines, moved up where they would overlap."""
    low, high = axes.get_ylim()
    apart = (high / low) ** 0.05
    least = 0.0
    for y, text, colour in sorted(labels):
        least = max(y, least * apart)
        axes.annotate(
            text, (x, least), xytext=(6, 0), textcoords="offset points", va="center", color=colour, fontsize=9
        )


def _draw_single_prompt(axes: "Axes", plan: Plan, colours: Colours) -> None:
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
    axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.legend(loc="upper left")


def _draw_ttft(axes: "Axes", plan: Plan, colours: Colours) -> None:
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
    _legend_above(axes)


def _draw_cost(axes: "Axes", plan: Plan, colours: Colours) -> None:
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
    axes.legend(loc="upper right")


def _load_name(plan: Plan) -> str:
    return "users" if plan.setup.demand.has_users else "queries/s"


def _legend_above(axes: "Axes") -> None:
    """Place the legend between the axes and the heading, where no curve is."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.4)
