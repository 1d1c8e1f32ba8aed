"""A plan's HTML report, its charts, and their curves."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.plan.cost import cost
from kvtier.plan.limits import in_users
from kvtier.plan.plan import Plan, Variant
from kvtier.plan.queueing import OperatingPoint, fetch_s, operate, prefill_s
from kvtier.plan.settings import settings_toml
from kvtier.plan.tables import (
    assumptions,
    circumstances,
    conclusion,
    heading,
    load_text,
    load_unit,
    tables,
    verdict,
)
from kvtier.plan.worth import TIER_NAMES
from kvtier.report.chart import Chart, Charts, Colours, figures_html, write_charts
from kvtier.report.format import bytes_text, short_count, time_text
from kvtier.report.output import write_file
from kvtier.report.page import (
    code_html,
    definitions_html,
    list_html,
    page_html,
    paragraphs_html,
    section_html,
    table_html,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 120
CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
LIMITS = (
    (
        "Limits are of mean times. The 95th percentile assumes an exponential tail of the waiting time, and no other "
        "delay."
    ),
    (
        "The exchange between GPUs takes no time beyond gpu.flops_share. Measure that share at your size; a larger "
        "size has a smaller share, so it gains less than the table of sizes says."
    ),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a chart."""

    name: str
    kind: str
    """Colour: the same in every chart."""
    x: tuple[float, ...]
    y: tuple[float, ...]


def write_report(path: Path, plan: Plan) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(plan))


def write_plot(path: Path, plan: Plan) -> None:
    """Write all charts to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_charts("--picture", path, charts(plan), plan)


def render_report(plan: Plan, made: datetime | None = None) -> str:
    """The HTML of the report."""
    sources = [f"{name}: {source}; read {date}" for name, source, date in plan.deployment.sources]
    answer, *others = charts(plan).items()
    return page_html(
        "kvtier plan",
        verdict(plan),
        paragraphs_html([heading(plan)]),
        figures_html(dict([answer]), plan),
        list_html(conclusion(plan)),
        *(table_html(it) for it in tables(plan)),
        figures_html(dict(others), plan),
        section_html("Settings of kvtier", code_html(settings_toml(plan))),
        section_html("Model and traffic", definitions_html(circumstances(plan))),
        f'<div class="assumptions">{table_html(assumptions(plan))}{list_html(sources)}</div>',
        section_html("Not modelled", list_html(LIMITS)),
        made=made,
    )


def charts(plan: Plan) -> Charts[Plan]:
    """The plan's charts by name."""
    computed, *fetched = single_prompt_curves(plan)
    crossings = [
        f"{curve.name} from {at:,.0f} tokens on" for curve in fetched if (at := crossing(computed, curve)) is not None
    ]
    faster = f" It is faster {'; '.join(crossings)}." if crossings else ""
    return {
        "ttft": Chart(
            "Time to first token against the load",
            _draw_ttft,
            "Dashed: the limit; a dot is where the mean meets it. Curves end where queues grow without bound.",
        ),
        "capacity": Chart(
            "KV against conversations and context",
            _draw_capacity,
            "Each conversation has its own KV. Dashed: the capacity of each tier. Both axes are logarithmic.",
        ),
        "prompt": Chart(
            "One prompt: computed, or fetched",
            _draw_single_prompt,
            f"One prompt whose KV is all stored, on an idle machine.{faster}",
        ),
        "cost": Chart(
            "Cost of a million output tokens" if _has_prices(plan) else "Energy of a million output tokens",
            _draw_cost,
            "The same machines under growing load: a curve ends where throughput saturates.",
        ),
    }


def capacity_curves(plan: Plan) -> list[Curve]:
    """Bytes of KV against users, for several contexts that the model allows."""
    model = plan.deployment.model
    most = model.tokens_max or CONTEXTS[-1]
    last = max(10_000.0, 10 * plan.binding.users, 10 * plan.requested_users)
    users = (1.0, 10.0 ** math.ceil(math.log10(min(last, 1e7))))
    return [
        Curve(
            name=f"{tokens // 1024:,}k tokens",
            kind="tiered",
            x=users,
            y=tuple(model.stored_bytes(tokens) * it for it in users),
        )
        for tokens in [it for it in CONTEXTS if it <= most] or [most]
    ]


def single_prompt_curves(plan: Plan) -> list[Curve]:
    """Seconds to the KV of one prompt on an idle machine: computed, or fetched from each tier."""
    deployment = plan.given.deployment
    least, most = 1_000.0, min(deployment.model.tokens_max or CONTEXTS[-1], CONTEXTS[-1])
    tokens = tuple(least * (most / least) ** (step / (POINTS - 1)) for step in range(POINTS))
    computed = Curve(
        name="computed", kind="computed", x=tokens, y=tuple(prefill_s(deployment, it, it) for it in tokens)
    )
    return [computed] + [
        Curve(
            name=f"fetched from {TIER_NAMES[tier.name]}",
            kind=tier.name,
            x=tokens,
            y=tuple(fetch_s(deployment, tier.name, it) for it in tokens),
        )
        for tier in deployment.tiers
    ]


def crossing(computed: Curve, fetched: Curve) -> float | None:
    """Tokens from which on fetching is faster; None when it always or never is."""
    faster = [fetch < compute for fetch, compute in zip(fetched.y, computed.y, strict=True)]
    return fetched.x[faster.index(True)] if True in faster and not faster[0] else None


def ttft_curves(plan: Plan) -> list[Curve]:
    """Mean time to first token against the load, up to where queues grow without end."""
    return [_variant_curve(plan, variant, lambda point: point.ttft_s) for variant in (plan.alone, plan.tiered)]


def cost_curves(plan: Plan) -> list[Curve]:
    """A million output tokens against the load: in money where prices are given, else in kWh."""

    def of(point: OperatingPoint) -> float:
        at_load = cost(plan.deployment, point, served_per_s=point.requests_per_s)
        return at_load.per_million_output_tokens or 1e6 / at_load.tokens_per_s_per_watt / 3.6e6

    return [_variant_curve(plan, variant, of) for variant in (plan.alone, plan.tiered)]


def _variant_curve(plan: Plan, variant: Variant, of: Callable[[OperatingPoint], float]) -> Curve:
    most = variant.throughput_per_s * 0.9999
    rates = [most * (step + 1) / POINTS for step in range(POINTS)]
    return Curve(
        name="with tiers" if variant.with_tiers else "GPU memory alone",
        kind="tiered" if variant.with_tiers else "alone",
        x=tuple(in_users(plan.deployment, rate) for rate in rates),
        y=tuple(of(operate(variant.deployment, rate, with_tiers=variant.with_tiers)) for rate in rates),
    )


def _has_prices(plan: Plan) -> bool:
    return plan.tiered.cost.per_hour is not None


def _draw_capacity(axes: "Axes", plan: Plan, colours: Colours) -> None:
    curves = capacity_curves(plan)
    first, last = curves[0].x
    labels: list[tuple[float, str, str]] = []
    for index, curve in enumerate(curves, 1):
        axes.plot(curve.x, curve.y, color=colours[curve.kind], alpha=0.35 + 0.65 * index / len(curves))
        labels.append((curve.y[-1], curve.name, colours[curve.kind]))
    for tier in plan.tiers:
        colour = colours[tier.name]
        axes.hlines(tier.capacity_bytes, first, last, colors=colour, linewidth=1.4, linestyles=(0, (5, 3)))
        labels.append((tier.capacity_bytes, f"{TIER_NAMES[tier.name]}, {bytes_text(tier.capacity_bytes)}", colour))
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
    computed, *fetched = curves = single_prompt_curves(plan)
    _plot(axes, curves, colours)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="time to its KV")
    floor = axes.get_ylim()[0]
    for curve in fetched:
        at = crossing(computed, curve)
        if at is not None:
            axes.vlines(at, floor, curve.y[curve.x.index(at)], colors=colours[curve.kind], linewidth=1, linestyles=":")
    axes.set_ylim(bottom=floor)
    axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    axes.legend(loc="upper left")


def _draw_ttft(axes: "Axes", plan: Plan, colours: Colours) -> None:
    limit_s = plan.inputs.target.ttft_s
    _plot(axes, ttft_curves(plan), colours)
    axes.axhline(limit_s, color=colours["soft"], linewidth=1.2, linestyle=(0, (5, 3)))
    for kind, variant in (("alone", plan.alone), ("tiered", plan.tiered)):
        users = variant.users_at_ttft
        _dot(axes, users, limit_s, load_text(plan, users), colours[kind], offset=(-6, 7), ha="right")
    axes.set(xlabel=load_unit(plan), ylabel="mean time to first token, s", ylim=(0, 3 * limit_s), xlim=(0, None))
    # Between the axes and the heading, where no curve is.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.4)


def _draw_cost(axes: "Axes", plan: Plan, colours: Colours) -> None:
    curves = cost_curves(plan)
    _plot(axes, curves, colours)
    for curve in curves:
        last = curve.y[-1]
        _dot(axes, curve.x[-1], last, f"{last:.3g}", colours[curve.kind], offset=(0, -14), ha="center")
    unit = plan.inputs.price.currency if _has_prices(plan) else "kWh"
    least = min(min(curve.y) for curve in curves)
    axes.set(xlabel=load_unit(plan), ylabel=f"{unit} for a million output tokens", ylim=(0, 8 * least), xlim=(0, None))
    axes.legend(loc="upper right")


def _plot(axes: "Axes", curves: list[Curve], colours: Colours) -> None:
    for curve in curves:
        axes.plot(curve.x, curve.y, color=colours[curve.kind], label=curve.name)


def _dot(axes: "Axes", x: float, y: float, text: str, colour: str, *, offset: tuple[int, int], ha: str) -> None:
    """A point with a label."""
    axes.plot([x], [y], "o", color=colour, markersize=6)
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=ha, color=colour, fontweight="bold")
