"""Draw the charts of a plan, and compute their curves."""

import math
from collections.abc import Callable

from kvtier.report.format import bytes_text, short_count, time_text
from kvtier.tools.charts.chart import Axis, Chart, Charts, Curve, Rule, told_apart
from kvtier.tools.plan.cost import cost
from kvtier.tools.plan.max_load import TTFT, TTFT_P95, in_users
from kvtier.tools.plan.operating_point import OperatingPoint, fetch_s, operate, prefill_s
from kvtier.tools.plan.plan import Plan, Variant
from kvtier.tools.plan.plan_text import arm_name, load_text, load_unit
from kvtier.tools.plan.tier_selection import TIER_NAMES

POINTS = 120
CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)


def answer_chart(plan: Plan) -> Charts:
    """Draw the time to first token against the load."""
    target, curves = plan.inputs.target, ttft_curves(plan)
    limit_s = target.ttft_s or target.ttft_p95_s
    met = [
        Curve(x=[_users_at_limit(plan, it)], y=[limit_s], colour=curve.colour, dash="", marker="o")
        for curve, it in zip(curves, plan.arms, strict=True)
    ]
    last = max(it.x[-1] for it in curves)
    asked = [Rule(at=plan.requested_users, dash=":", is_vertical=True)] if plan.requested_users < last else []
    what = "mean time to first token" if target.ttft_s else "95 % of first tokens within"
    return {
        "ttft": Chart(
            heading="Time to first token against the load",
            marks=[*curves, Rule(at=limit_s), *asked, *met],
            x=Axis(label=load_unit(plan), least=0, most=last),
            y=Axis(label=f"{what}, s", least=0, most=3 * limit_s),
            caption="Dashed across: the limit; a dot is where a curve meets it, the legend has that load. Curves end "
            f"where queues grow without bound.{' Dotted upright: the requested load.' if asked else ''}",
        )
    }


def other_charts(plan: Plan) -> Charts:
    """Draw KV against conversations, one prompt computed or fetched, and the cost against the load."""
    computed, *fetched = single_prompt_curves(plan)
    crossed = [(it, place) for it in fetched if (place := crossing(computed, it)) is not None]
    since = "; ".join(f"{it.label} from {it.x[place]:,.0f} tokens on" for it, place in crossed)
    floor = min(min(it.y) for it in (computed, *fetched))
    falls = [
        Curve(x=[it.x[place]] * 2, y=[floor, it.y[place]], colour=it.colour, dash=":", width=1.0)
        for it, place in crossed
    ]
    held = capacity_curves(plan)
    room = [
        Curve(
            x=held[0].x, y=[it.capacity_bytes] * 2, colour=it.name, width=1.4,
            label=f"{TIER_NAMES[it.name]}, {bytes_text(it.capacity_bytes)}",
        )
        for it in plan.tiers
    ]  # fmt: skip
    costs = cost_curves(plan)
    is_money = plan.tiered.cost.per_hour is not None
    price = plan.inputs.price.currency if is_money else "kWh"
    return {
        "capacity": Chart(
            heading="KV against conversations and context",
            marks=[*held, *told_apart([held[0], *room])[1:]],
            x=Axis(label="conversations held", is_log=True, text=short_count),
            y=Axis(label="KV", is_log=True, text=bytes_text),
            caption="Each conversation has its own KV, as tiers store it. Dashed: the capacity of each tier. Both axes "
            "are logarithmic.",
        ),
        "prompt": Chart(
            heading="One prompt: computed, or fetched",
            marks=[*told_apart([computed, *fetched]), *falls],
            x=Axis(label="tokens of the prompt", is_log=True, text=short_count),
            y=Axis(label="time to its KV", is_log=True, text=time_text),
            caption="One prompt whose KV is all stored, on an idle machine."
            + (f" It is faster {since}." if since else ""),
        ),
        "cost": Chart(
            heading=f"{'Cost' if is_money else 'Energy'} of a million output tokens",
            marks=costs,
            x=Axis(label=load_unit(plan), least=0, most=max(it.x[-1] for it in costs)),
            y=Axis(label=f"{price} for a million output tokens", least=0, most=8 * min(min(it.y) for it in costs)),
            caption="The same machines under growing load: a curve ends where throughput saturates.",
        ),
    }


def capacity_curves(plan: Plan) -> list[Curve]:
    """Plot bytes of KV against users, for several lengths of context that the model allows."""
    model = plan.deployment.model
    most = model.tokens_max or CONTEXTS[-1]
    contexts = [it for it in CONTEXTS if it <= most] or [most]
    last = max(10_000.0, 10 * plan.binding.users, 10 * plan.requested_users)
    users = (1.0, 10.0 ** math.ceil(math.log10(min(last, 1e7))))
    return [
        Curve(
            label=f"{tokens // 1024:,}k tokens",
            colour="tiered",
            alpha=0.35 + 0.65 * number / len(contexts),
            x=users,
            y=[model.stored_bytes(tokens) * it for it in users],
        )
        for number, tokens in enumerate(contexts, 1)
    ]


def single_prompt_curves(plan: Plan) -> list[Curve]:
    """Plot the seconds that an idle machine takes to compute one prompt's KV, or to fetch it from each tier."""
    deployment = plan.given.deployment
    least, most = 1_000.0, min(deployment.model.tokens_max or CONTEXTS[-1], CONTEXTS[-1])
    tokens = tuple(least * (most / least) ** (step / (POINTS - 1)) for step in range(POINTS))
    computed = Curve(
        label="computed", colour="computed", x=tokens, y=tuple(prefill_s(deployment, it, it) for it in tokens)
    )
    return [computed] + [
        Curve(
            label=f"from {TIER_NAMES[tier.name]}",
            colour=tier.name,
            x=tokens,
            y=tuple(fetch_s(deployment, tier.name, it) for it in tokens),
        )
        for tier in deployment.tiers
    ]


def crossing(computed: Curve, fetched: Curve) -> int | None:
    """Find the first point at which `fetched` becomes faster. Return None if it is always or never faster."""
    faster = [fetch < compute for fetch, compute in zip(fetched.y, computed.y, strict=True)]
    return faster.index(True) if True in faster and not faster[0] else None


def ttft_curves(plan: Plan) -> list[Curve]:
    """Plot the mean TTFT, or the 95th percentile if only that is limited, until queues grow without end."""

    def of(_: Variant, point: OperatingPoint) -> float:
        return point.ttft_s if plan.inputs.target.ttft_s else point.ttft_within_s(0.95)

    return _variant_curves(plan, of, lambda it, _: load_text(plan, _users_at_limit(plan, it)))


def _users_at_limit(plan: Plan, variant: Variant) -> float:
    """Return the users at which the curve of `ttft_curves` meets its limit, which may not be the tightest one."""
    name = TTFT if plan.inputs.target.ttft_s else TTFT_P95
    return next(it.users for it in variant.ceiling.limits if it.name == name)


def cost_curves(plan: Plan) -> list[Curve]:
    """Plot the cost of a million output tokens against the load: in money if prices are given, else in kWh."""

    def of(variant: Variant, point: OperatingPoint) -> float:
        at_load = cost(variant.deployment, point)
        return at_load.per_million_output_tokens or 1e6 / at_load.tokens_per_s_per_watt / 3.6e6

    return _variant_curves(plan, of, lambda _, last: f"{last:.3g}")


def _variant_curves(
    plan: Plan, of: Callable[[Variant, OperatingPoint], float], figure: Callable[[Variant, float], str]
) -> list[Curve]:
    curves: list[Curve] = []
    for variant in plan.arms:
        most = variant.throughput_per_s * 0.9999
        rates = [most * (step + 1) / POINTS for step in range(POINTS)]
        y = tuple(of(variant, operate(variant.deployment, rate)) for rate in rates)
        curves.append(
            Curve(
                label=f"{arm_name(variant)}: {figure(variant, y[-1])}",
                colour={0: "alone", 1: variant.tiers[0] if variant.tiers else ""}.get(len(variant.tiers), "tiered"),
                x=tuple(in_users(plan.deployment, rate) for rate in rates),
                y=y,
            )
        )
    return told_apart(curves)
