"""Compute the power and the price of a deployment, and how long KV is worth keeping.

All prices are inputs; without them there are only ratios.
"""

from dataclasses import dataclass

from kvtier.tools.plan.operating_point import OperatingPoint, prefill_s
from kvtier.tools.plan.resolve import Deployment

_TIER_PRICES = {"host": "price.host_memory_per_gb", "disk": "price.drive", "shared": "price.shared_per_tb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a deployment at one load. A figure is None if a price is missing."""

    watts: float
    """Power of all machines, times `power.pue`."""
    bought: float | None
    """Price of GPUs, servers and tiers, plus drives that replace worn ones if their life is given."""
    total: float | None
    """`bought` plus the energy over the years of the prices."""
    per_hour: float | None
    """`total` per hour."""
    per_million_output_tokens: float | None
    tokens_per_s_per_watt: float
    """Output tokens per second for each watt."""
    tokens_per_s_per_price: float | None
    """Output tokens per second for each unit of money in `total`."""
    missing: tuple[str, ...]
    """Price inputs that are required but not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Time for which keeping KV in a tier is cheaper than an alternative, such as computing it again.

    This is the five-minute rule (Gray and Putzolu, 1987; Gray and Graefe, 1997; Appuswamy et al., 2017) with the GPU in
    the role of the disk. Keeping a chunk for T costs its share of the tier's price; computing it again costs its share
    of the GPUs' time. Both are bought for the same years, which cancel:
    ``T = compute seconds x price of a replica / (bytes of a chunk x price of a byte)``.
    """

    tier: str
    instead_of: str
    """The alternative to keeping KV: computing it again, or reading it from a drive."""
    per_price_ratio_s: float
    """T if a `saved_unit` cost as much as a `unit`. Multiply by the ratio of their prices to get T at real prices."""
    saved_unit: str
    unit: str
    residence_s: float | None
    """T in seconds; None without prices."""


def cost(deployment: Deployment, point: OperatingPoint, *, life_years: float | None = None) -> Cost:
    """Compute the cost of a deployment at one load. Include replacement drives if the life of drives is given."""
    price, load = deployment.inputs.price, deployment.workload
    watts = _watts(deployment, point)
    bills = _bills(deployment)
    output_per_s, hours = point.requests_per_s * load.answer_tokens, price.years * 365.25 * 24
    bought = total = per_hour = None
    if price.gpu or price.server:
        bought = sum(bill for bill, _ in bills.values()) + worn(deployment, life_years)
        total = bought + watts / 1000 * hours * price.energy_per_kwh
        per_hour = total / hours
    return Cost(
        watts=watts,
        bought=bought,
        total=total,
        per_hour=per_hour,
        per_million_output_tokens=None if per_hour is None else per_hour / 3600 / output_per_s * 1e6,
        tokens_per_s_per_watt=output_per_s / watts,
        tokens_per_s_per_price=None if total is None else output_per_s / total,
        missing=tuple(name for name, (bill, is_needed) in bills.items() if is_needed and not bill),
    )


def _watts(deployment: Deployment, point: OperatingPoint) -> float:
    gpu, power, disk = deployment.inputs.gpu, deployment.inputs.power, deployment.inputs.disk
    busy = point.gpu_busy * deployment.used_gpus / gpu.count
    share = power.gpu_idle_share + (1 - power.gpu_idle_share) * busy
    drives = disk.count * disk.watts if any(it.name == "disk" for it in deployment.tiers) else 0.0
    return (gpu.count * gpu.watts * share + power.server_watts + drives) * power.pue


def tier_prices(deployment: Deployment) -> dict[str, float]:
    """Compute the price of each tier's hardware."""
    inputs, price = deployment.inputs, deployment.inputs.price
    prices = {
        "host": inputs.host.capacity_bytes / 1e9 * price.host_memory_per_gb,
        "disk": inputs.disk.count * price.drive,
        "shared": inputs.shared.capacity_bytes / 1e12 * price.shared_per_tb,
    }
    return {it.name: prices[it.name] for it in deployment.tiers}


def worn(deployment: Deployment, life_years: float | None) -> float:
    """Compute the price of drives that replace worn ones within the years of the prices."""
    disk, price = deployment.inputs.disk, deployment.inputs.price
    return max(0.0, disk.count * price.drive * (price.years / life_years - 1)) if life_years else 0.0


def _bills(deployment: Deployment) -> dict[str, tuple[float, bool]]:
    """Map each price input to its total and to a flag that tells whether the total is required."""
    inputs, price = deployment.inputs, deployment.inputs.price
    bills = {
        "price.gpu": (inputs.gpu.count * price.gpu, not price.server),
        "price.server": (deployment.hosts * price.server, True),
    }
    return bills | {_TIER_PRICES[name]: (total, True) for name, total in tier_prices(deployment).items()}


def break_evens(deployment: Deployment) -> list[BreakEven]:
    """Compute how long KV is worth keeping in each tier below the GPU."""
    inputs, price = deployment.inputs, deployment.inputs.price
    tokens = deployment.workload.reusable_tokens
    if not tokens:
        return []
    compute_s_per_byte = prefill_s(deployment, tokens, tokens) / deployment.model.stored_bytes(tokens)
    units = {
        "host": (1e9, price.host_memory_per_gb, "GB of it"),
        "disk": (inputs.disk.capacity_bytes * inputs.disk.filled, price.drive, "drive"),
        "shared": (1e12, price.shared_per_tb, "TB of it"),
    }
    rows: list[BreakEven] = []
    for tier in deployment.tiers:
        unit_bytes, unit_price, unit = units[tier.name]
        # Seconds of one GPU or drive per byte. Each second costs its share of the price.
        savings = [("computing it again", "GPU", compute_s_per_byte * deployment.server_gpus, price.gpu)]
        if tier.name == "host" and inputs.disk.count:
            savings.append(("reading it from a drive", "drive", 1 / inputs.disk.read_bytes_per_s, price.drive))
        for instead_of, saved_unit, seconds_per_byte, saved_price in savings:
            at_par_s = seconds_per_byte * unit_bytes
            rows.append(
                BreakEven(
                    tier=tier.name,
                    instead_of=instead_of,
                    per_price_ratio_s=at_par_s,
                    saved_unit=saved_unit,
                    unit=unit,
                    residence_s=at_par_s * saved_price / unit_price if saved_price and unit_price else None,
                )
            )
    return rows
