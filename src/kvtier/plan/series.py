"""The curves of a plan's pictures, as numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.plan.limits import in_users
from kvtier.plan.money import cost
from kvtier.plan.operate import Point, fetch_s, operate, prefill_s
from kvtier.plan.planning import Plan, Side
from kvtier.plan.setup import Setup

POINTS = 120
CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
_TOKENS_MOST = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve."""

    name: str
    """What it is, for people."""
    kind: str
    """What it stands for, so that it has the same colour in every picture."""
    x: tuple[float, ...]
    y: tuple[float, ...]


def capacity_curves(plan: Plan) -> list[Curve]:
    """Bytes of KV against users, for several contexts that the model allows."""
    shape, most = plan.setup.shape, plan.setup.shape.tokens_max or _TOKENS_MOST
    contexts = [it for it in CONTEXTS if it <= most] or [most]
    last = max(10_000.0, 10 * plan.tiered.ceiling.users, 10 * plan.asked_users)
    users = _spread(1.0, 10 ** math.ceil(math.log10(min(last, 1e7))), 2)
    return [
        Curve(
            name=f"{tokens // 1024:,}k tokens",
            kind="context",
            x=users,
            y=tuple(shape.stored_bytes(tokens) * it for it in users),
        )
        for tokens in contexts
    ]


def capacity_marks(plan: Plan) -> list[tuple[str, str, float]]:
    """Name, kind and bytes of each place."""
    names = {"gpu": "GPU memory", "host": "host memory", "disk": "drives", "shared": "shared"}
    return [(names[it.name], it.name, it.capacity_bytes) for it in plan.tiers]


def single_prompt_curves(plan: Plan) -> list[Curve]:
    """Seconds to the KV of one prompt, alone on the machine: computed, or fetched from each place."""
    setup = plan.setup
    tokens = _spread(1_000.0, float(min(setup.shape.tokens_max or _TOKENS_MOST, _TOKENS_MOST)), POINTS)
    names = {"host": "fetched from host memory", "disk": "fetched from drives", "shared": "fetched over the network"}
    curves = [Curve(name="computed", kind="computed", x=tokens, y=tuple(prefill_s(setup, it, it) for it in tokens))]
    return curves + [
        Curve(
            name=names[place.name],
            kind=place.name,
            x=tokens,
            y=tuple(fetch_s(setup, place.name, it) for it in tokens),
        )
        for place in setup.places
    ]


def crossing(computed: Curve, fetched: Curve) -> float | None:
    """Tokens from which on fetching is faster; None when it always or never is."""
    faster = [fetch < compute for fetch, compute in zip(fetched.y, computed.y, strict=True)]
    return fetched.x[faster.index(True)] if True in faster and not faster[0] else None


def ttft_curves(plan: Plan) -> list[Curve]:
    """Mean time to first token against the load, up to where queues grow without end."""
    return [_side_curve(plan.setup, side, lambda _, point: point.ttft_s) for side in (plan.alone, plan.tiered)]


def has_prices(plan: Plan) -> bool:
    """Whether costs are known, so that `cost_curves` are of money, not of energy."""
    return plan.tiered.cost.per_hour is not None


def cost_curves(plan: Plan) -> list[Curve]:
    """A million output tokens against the load: in money where prices are known, else in kWh."""
    of = _price if has_prices(plan) else _energy_kwh
    return [_side_curve(plan.setup, side, of) for side in (plan.alone, plan.tiered)]


def _price(setup: Setup, point: Point) -> float:
    return cost(setup, point, served_per_s=point.requests_per_s).per_million_output_tokens or 0.0


def _energy_kwh(setup: Setup, point: Point) -> float:
    joules = 1 / cost(setup, point, served_per_s=point.requests_per_s).tokens_per_s_per_watt
    return joules * 1e6 / 3.6e6


def _side_curve(setup: Setup, side: Side, of: Callable[[Setup, Point], float]) -> Curve:
    most = side.throughput_per_s * 0.9999
    rates = [most * (step + 1) / POINTS for step in range(POINTS)]
    values = [of(setup, operate(setup, rate, with_tiers=side.with_tiers)) for rate in rates]
    return Curve(
        name="with tiers" if side.with_tiers else "GPU memory alone",
        kind="tiered" if side.with_tiers else "alone",
        x=tuple(in_users(setup, rate) for rate in rates),
        y=tuple(values),
    )


def _spread(least: float, most: float, count: int) -> tuple[float, ...]:
    """Values from one to the other, each the same times the one before."""
    return tuple(least * (most / least) ** (step / (count - 1)) for step in range(count))
