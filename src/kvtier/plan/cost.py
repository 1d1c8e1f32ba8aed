"""Power, cost, and for how long KV is worth keeping. All prices are inputs; without them only ratios are computed."""

from dataclasses import dataclass

from kvtier.plan.queueing import OperatingPoint, prefill_s
from kvtier.plan.resolve import Deployment

_TIER_PRICES = {"host": "price.host_memory_per_gb", "disk": "price.drive", "shared": "price.shared_per_tb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a deployment at one load; None where a price is missing."""

    watts: float
    """Power of all machines, times `power.pue`."""
    bought: float | None
    """Price of GPUs, servers and, with tiers, of their hardware, without drives that replace worn ones."""
    per_hour: float | None
    """The price spread over its years, and energy."""
    per_million_output_tokens: float | None
    tokens_per_s_per_watt: float
    """Output tokens."""
    tokens_per_s_per_price: float | None
    """Output tokens a second for each unit of money over the years, energy included."""
    missing: tuple[str, ...]
    """Inputs whose price is needed and not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Time for which keeping KV in a tier is cheaper than recreating it.

    The five-minute rule (Gray and Putzolu, 1987; Gray and Graefe, 1997; Appuswamy et al., 2017), with the GPU in the
    role of the disk: keeping a chunk for T costs its share of the tier's price, computing it again costs its share of
    the GPUs' time. Both are bought for the same years, which cancel:
    ``T = compute seconds x price of a replica / (bytes of a chunk x price of a byte)``.
    """

    tier: str
    instead_of: str
    """The alternative: computing it again, or reading it from a drive."""
    per_price_ratio_s: float
    """T at equal unit prices of the tier and the alternative; times the ratio of their prices, it is T."""
    saved_unit: str
    unit: str
    residence_s: float | None
    """T, where prices are given."""


def cost(deployment: Deployment, point: OperatingPoint, *, served_per_s: float) -> Cost:
    """The cost of a deployment that serves `served_per_s` requests a second."""
    price, load = deployment.inputs.price, deployment.workload
    watts = _watts(deployment, point)
    bills = _bills(deployment, with_tiers=point.with_tiers)
    output_per_s = served_per_s * load.answer_tokens
    bought = per_hour = None
    if price.gpu or price.server:
        bought = sum(total for total, _ in bills.values())
        per_hour = bought / (price.years * 365.25 * 24) + watts / 1000 * price.energy_per_kwh
    return Cost(
        watts=watts,
        bought=bought,
        per_hour=per_hour,
        per_million_output_tokens=None if per_hour is None else per_hour / 3600 / output_per_s * 1e6,
        tokens_per_s_per_watt=output_per_s / watts,
        tokens_per_s_per_price=None if per_hour is None else output_per_s / (per_hour * price.years * 365.25 * 24),
        missing=tuple(name for name, (total, is_needed) in bills.items() if is_needed and not total),
    )


def _watts(deployment: Deployment, point: OperatingPoint) -> float:
    gpu, power, disk = deployment.inputs.gpu, deployment.inputs.power, deployment.inputs.disk
    busy = point.gpu_busy * deployment.used_gpus / gpu.count
    share = power.gpu_idle_share + (1 - power.gpu_idle_share) * busy
    has_drives = point.with_tiers and any(it.name == "disk" for it in deployment.tiers)
    drives = disk.count * disk.watts if has_drives else 0.0
    return (gpu.count * gpu.watts * share + power.server_watts + drives) * power.pue


def tier_prices(deployment: Deployment) -> dict[str, float]:
    """The price of the hardware of each of its tiers."""
    inputs, price = deployment.inputs, deployment.inputs.price
    prices = {
        "host": inputs.host.capacity_bytes / 1e9 * price.host_memory_per_gb,
        "disk": inputs.disk.count * price.drive,
        "shared": inputs.shared.capacity_bytes / 1e12 * price.shared_per_tb,
    }
    return {it.name: prices[it.name] for it in deployment.tiers}


def worn(deployment: Deployment, life_years: float | None) -> float:
    """The price of the drives that replace worn ones within the years of the prices."""
    disk, price = deployment.inputs.disk, deployment.inputs.price
    return max(0.0, disk.count * price.drive * (price.years / life_years - 1)) if life_years else 0.0


def _bills(deployment: Deployment, *, with_tiers: bool) -> dict[str, tuple[float, bool]]:
    """Total and whether it is needed, by the input of the price."""
    inputs, price = deployment.inputs, deployment.inputs.price
    bills = {
        "price.gpu": (inputs.gpu.count * price.gpu, not price.server),
        "price.server": (deployment.hosts * price.server, True),
    }
    if with_tiers:
        bills |= {_TIER_PRICES[name]: (total, True) for name, total in tier_prices(deployment).items()}
    return bills


def break_evens(deployment: Deployment) -> list[BreakEven]:
    """Compute for each tier below the GPU how long KV is worth keeping there."""
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
        # Seconds of one GPU, or of one drive, for a byte; each second is paid as a share of the price.
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
