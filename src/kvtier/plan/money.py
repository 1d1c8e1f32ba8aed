"""Power, cost, and for how long KV is worth keeping. All prices are the user's; without them only ratios are told."""

from dataclasses import dataclass

from kvtier.plan.operate import Point, prefill_s
from kvtier.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a set-up costs at one load; None where a price is missing."""

    watts: float
    """Of all machines, times `power.pue`."""
    bought: float | None
    """GPUs, servers and, with tiers, what they are made of."""
    per_hour: float | None
    """What was bought spread over its years, and energy."""
    per_million_output_tokens: float | None
    per_million_tokens: float | None
    """Prompt and output."""
    tokens_per_s_per_watt: float
    """Output tokens."""
    tokens_per_s_per_price: float | None
    """Output tokens a second for each unit of money over the years, energy included."""
    missing: tuple[str, ...]
    """Prices that are not given, though something is there to be paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """For how long it is cheaper to keep KV in a place than to make it again when it is needed.

    The five-minute rule (Gray and Putzolu, 1987; Gray and Graefe, 1997; Appuswamy et al., 2017), with the GPU in the
    part of the disk: keeping a chunk for T costs its share of the place's price, computing it again costs its share of
    the GPUs' time. Both are bought for the same years, which cancel:
    ``T = compute seconds x price of a replica / (bytes of a chunk x price of a byte)``.
    """

    place: str
    instead_of: str
    """What it saves: computing it again, or reading it from a drive."""
    per_price_ratio_s: float
    """T where a unit of the place costs as much as what it saves; times the ratio of their prices, it is T."""
    saved_unit: str
    unit: str
    residence_s: float | None
    """T, where prices are given."""


def cost(setup: Setup, point: Point, *, served_per_s: float) -> Cost:
    """What the set-up costs while it serves so many requests a second."""
    inputs, demand = setup.inputs, setup.demand
    watts = _watts(setup, point)
    bought, missing = _bought(setup, with_tiers=point.with_tiers)
    per_hour = None
    if bought is not None:
        per_hour = bought / (inputs.price.years * 365.25 * 24) + watts / 1000 * inputs.price.energy_per_kwh
    output_per_s = served_per_s * demand.answer_tokens
    all_per_s = served_per_s * (demand.answer_tokens + demand.input_tokens)
    return Cost(
        watts=watts,
        bought=bought,
        per_hour=per_hour,
        per_million_output_tokens=None if per_hour is None else per_hour / 3600 / output_per_s * 1e6,
        per_million_tokens=None if per_hour is None else per_hour / 3600 / all_per_s * 1e6,
        tokens_per_s_per_watt=output_per_s / watts,
        tokens_per_s_per_price=None
        if per_hour is None
        else output_per_s / (per_hour * inputs.price.years * 365.25 * 24),
        missing=missing,
    )


def _watts(setup: Setup, point: Point) -> float:
    gpu, power, disk = setup.inputs.gpu, setup.inputs.power, setup.inputs.disk
    share = power.gpu_idle_share + (1 - power.gpu_idle_share) * point.gpu_busy
    drives = disk.count * disk.watts if point.with_tiers else 0.0
    return (gpu.count * gpu.watts * share + power.server_watts + drives) * power.pue


def _bought(setup: Setup, *, with_tiers: bool) -> tuple[float | None, tuple[str, ...]]:
    inputs, price = setup.inputs, setup.inputs.price
    bills = [("price.gpu", inputs.gpu.count * price.gpu, not price.server), ("price.server", price.server, True)]
    if with_tiers:
        bills += [
            (
                "price.host_memory_per_gb",
                inputs.host.capacity_bytes / 1e9 * price.host_memory_per_gb,
                inputs.host.capacity_bytes > 0,
            ),
            ("price.drive", inputs.disk.count * price.drive, inputs.disk.count > 0),
            (
                "price.shared_per_tb",
                inputs.shared.capacity_bytes / 1e12 * price.shared_per_tb,
                inputs.shared.capacity_bytes > 0,
            ),
        ]
    missing = tuple(name for name, total, is_there in bills if is_there and not total)
    if not (price.gpu or price.server):
        return None, missing
    return sum(total for _, total, _ in bills), missing


def break_evens(setup: Setup) -> list[BreakEven]:
    """For each place below the GPU, how long KV is worth keeping there."""
    inputs, price = setup.inputs, setup.inputs.price
    tokens = setup.demand.reusable_tokens
    if not tokens:
        return []
    compute_s_per_byte = prefill_s(setup, tokens, tokens) / setup.shape.stored_bytes(tokens)
    units = {
        "host": (1e9, price.host_memory_per_gb, "GB of it"),
        "disk": (inputs.disk.capacity_bytes * inputs.disk.filled, price.drive, "drive"),
        "shared": (1e12, price.shared_per_tb, "TB of it"),
    }
    rows: list[BreakEven] = []
    for place in setup.places:
        unit_bytes, unit_price, unit = units[place.name]
        # Seconds of one GPU, or of one drive, that a byte costs; each second is paid as a share of what was bought.
        savings = [("computing it again", "GPU", compute_s_per_byte * inputs.model.tp, price.gpu)]
        if place.name == "host" and inputs.disk.count:
            savings.append(("reading it from a drive", "drive", 1 / inputs.disk.read_bytes_per_s, price.drive))
        for instead_of, saved_unit, seconds_per_byte, saved_price in savings:
            at_par_s = seconds_per_byte * unit_bytes
            rows.append(
                BreakEven(
                    place=place.name,
                    instead_of=instead_of,
                    per_price_ratio_s=at_par_s,
                    saved_unit=saved_unit,
                    unit=unit,
                    residence_s=at_par_s * saved_price / unit_price if saved_price and unit_price else None,
                )
            )
    return rows
