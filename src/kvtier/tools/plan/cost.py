"""Compute power, cost, how long KV is worth keeping, and what a load demands of tiers.

All prices are inputs; without them there are only ratios. The demands are capacity and reads for a share of the hits,
and the drives' time and life.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvtier.tools.plan.limits import in_users, is_within, life_years, most_users
from kvtier.tools.plan.queueing import OperatingPoint, operate, prefill_s
from kvtier.tools.plan.resolve import Deployment

_HALVINGS = 24
_FIGURES = 3
"""Significant digits to which a sufficient capacity is rounded up, which are those that a table shows."""
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
    """Output tokens per second for each unit of money over the years, including energy."""
    missing: tuple[str, ...]
    """Price inputs that are needed but not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Time for which keeping KV in a tier is cheaper than recreating it.

    This is the five-minute rule (Gray and Putzolu, 1987; Gray and Graefe, 1997; Appuswamy et al., 2017) with the GPU in
    the role of the disk. Keeping a chunk for T costs its share of the tier's price; computing it again costs its share
    of the GPUs' time. Both are bought for the same years, which cancel:
    ``T = compute seconds x price of a replica / (bytes of a chunk x price of a byte)``.
    """

    tier: str
    instead_of: str
    """The alternative to keeping it: computing it again, or reading it from a drive."""
    per_price_ratio_s: float
    """T if the tier and the alternative had equal unit prices; multiplied by the ratio of their prices, it is T."""
    saved_unit: str
    unit: str
    residence_s: float | None
    """T in seconds; None without prices."""


def cost(deployment: Deployment, point: OperatingPoint, *, life_years: float | None = None) -> Cost:
    """Compute the cost of a deployment at one load. Given the life of its drives, include those that replace them."""
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
    """Map each price input to a total, and to whether the total is required."""
    inputs, price = deployment.inputs, deployment.inputs.price
    bills = {
        "price.gpu": (inputs.gpu.count * price.gpu, not price.server),
        "price.server": (deployment.hosts * price.server, True),
    }
    return bills | {_TIER_PRICES[name]: (total, True) for name, total in tier_prices(deployment).items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityNeed:
    """Capacity and bandwidth that all tiers together need for a share of the possible hits."""

    hit_share: float
    hit_rate: float
    """Hits as a share of all prompt tokens."""
    residence_s: float
    tokens: float
    bytes: float
    """Size of the KV as tiers store it, or, without tiers, as GPU memory keeps it.

    A tier that fills only a share of its capacity needs more.
    """
    read_bytes_per_s: float
    """Average reads if tiers serve all hits."""
    read_burst_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLoad:
    """The load on the drives."""

    read_bytes_per_s: float
    wanted_bytes_per_s: float
    """Reads if every hit were loaded, even where computing it is faster."""
    used: float
    """Share of the drives' time that reads in bursts, and writes, take."""
    chunk_bytes: float
    """Bytes that a load reads of a chunk: layers with a window are read only at the end of a prefix."""
    depth: float
    """Mean number of commands in flight, over all drives."""
    written_bytes_per_day: float
    writes_per_day: float
    """Bytes written per day, divided by the capacity of all drives."""
    life_years: float
    life_selective_years: float
    """Life if KV is written at its second use, not as soon as it is computed."""
    write_policy: Literal["through", "selective", "budget"]
    """Write all new KV, KV at its second use, or a budget: the first with which drives last `target.life_years`."""
    write_share: float | None
    """Share of new KV that this policy writes at the load; at `users`, if the policy serves fewer.

    None if no smaller share lasts within the limits: drives then last only at `users`, with the writes of the inputs.
    """
    users: float
    """Users within all limits with this policy."""
    drives_for_capacity: int
    drives_for_bandwidth: int
    drives_for_life: int


def capacity(deployment: Deployment, hit_share: float) -> CapacityNeed:
    """Compute the capacity and reads that a share of the possible hits needs at the requested load."""
    load, model = deployment.workload, deployment.model
    residence_s = load.curve.residence_for(hit_share)
    tokens = load.curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
    size = tokens * model.gpu_bytes(load.session_tokens) / load.session_tokens
    if deployment.tiers:
        size = deployment.tier_curve.tokens_held(residence_s, load.requests_per_s)
        size += load.prefix_tokens * model.token_bytes
    hit_requests = (1 - load.first_share) * hit_share
    later = hit_requests * load.reusable_tokens
    read = load.requests_per_s * hit_requests * model.loaded_bytes(load.reusable_tokens)
    hits = (load.first_share + (1 - load.first_share) * (1 - hit_share)) * load.prefix_tokens + later
    return CapacityNeed(
        hit_share=hit_share,
        hit_rate=hits / load.input_tokens,
        residence_s=residence_s,
        tokens=tokens,
        bytes=size,
        read_bytes_per_s=read,
        read_burst_bytes_per_s=read * deployment.inputs.target.burst,
    )


def enough_bytes(deployment: Deployment) -> dict[str, float]:
    """Find the capacity of each tier with which the requested load stays within the limits; the slowest tier shrinks.

    Tiers are inclusive, so this is a whole size: it has copies of what GPU memory and faster tiers hold. Drives are
    counted before they are filled to `disk.filled`, with the rates that they have in the deployment.
    """
    filled = {"disk": deployment.inputs.disk.filled}
    found = {it.name: it.capacity_bytes / filled.get(it.name, 1.0) for it in deployment.tiers}
    if not found:
        return found
    *others, last = deployment.tiers

    def serves(capacity_bytes: float) -> bool:
        kept = (replace(last, capacity_bytes=capacity_bytes),) if capacity_bytes else ()
        return is_within(replace(deployment, tiers=(*others, *kept)), deployment.workload.requests_per_s)

    low, high = 0.0, last.capacity_bytes
    if serves(low):
        return found | {last.name: 0.0}
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    high /= filled.get(last.name, 1.0)
    step = 10.0 ** (math.floor(math.log10(high)) + 1 - _FIGURES)
    return found | {last.name: math.ceil(high / step) * step}


def drive_load(deployment: Deployment, point: OperatingPoint) -> DriveLoad:
    """Compute the load on the drives at one operating point, and the write policy with which they last."""
    inputs = deployment.inputs
    disk, software, target = inputs.disk, inputs.software, inputs.target
    policy: Literal["through", "selective", "budget"]
    read, written = point.read_bytes_per_s["disk"], point.write_bytes_per_s["disk"]
    whole = sum(it.stored for it in deployment.model.spans if math.isinf(it.last_tokens))
    chunk_bytes = (whole or deployment.model.token_bytes) * software.chunk_tokens or deployment.model.state_bytes
    # Little's law twice: the mean number of requests that load from drives, and the commands of each in flight.
    depth = point.loading["disk"] * software.chunks_in_flight * max(chunk_bytes / disk.command_bytes, 1.0)
    wanted = point.wanted_bytes_per_s["disk"]
    given = point.given_bytes_per_s["disk"]
    time_used = target.burst * wanted / disk.read_bytes_per_s + given / disk.write_bytes_per_s  # in drives
    years, full_years = life_years(deployment, written), life_years(deployment, point.new_bytes_per_s)
    kept = deployment.workload.kept_share
    selective_years = full_years / kept if kept else math.inf
    share: float | None
    policy, share = "through", 1.0
    if full_years < target.life_years:
        lasts = selective_years >= target.life_years
        policy, share = ("selective", kept) if lasts else ("budget", software.write_share)
    users = most_users(_writing(deployment, min(share, software.write_share)))
    if policy == "budget":
        share, users = _budget(deployment, point.requests_per_s, users)
    written_per_day = written * 86_400 * inputs.traffic.day_share
    return DriveLoad(
        read_bytes_per_s=read,
        wanted_bytes_per_s=wanted,
        used=time_used / disk.count,
        chunk_bytes=chunk_bytes,
        depth=depth,
        written_bytes_per_day=written_per_day,
        writes_per_day=written_per_day / (disk.count * disk.capacity_bytes),
        life_years=years,
        life_selective_years=selective_years,
        write_policy=policy,
        write_share=share,
        users=users,
        drives_for_capacity=max(math.ceil(enough_bytes(deployment)["disk"] / disk.capacity_bytes), 1),
        drives_for_bandwidth=max(math.ceil(time_used - 1e-9), 1),
        drives_for_life=max(math.ceil(disk.count * target.life_years / years - 1e-9), 1),
    )


def _writing(deployment: Deployment, share: float) -> Deployment:
    """Return the deployment with another share of new KV that is written to the drives."""
    return replace(deployment, inputs=deployment.inputs.change({"software.write_share": share}))


def _budget(deployment: Deployment, requests_per_s: float, users: float) -> tuple[float | None, float]:
    """Find the largest share of new KV that drives can write and still last, and how many users it serves.

    With fewer writes, fewer prompts find their KV, and more new KV is computed. So the share is solved for at each
    load. It is None if a smaller share costs more users than it saves writes. Then only a lower load helps.

    Args:
        deployment: the deployment. Its `software.write_share` is the upper bound of the share.
        requests_per_s: the load to find the share for. If the drives last only at a lower load, that one is used.
        users: the users within all limits at the upper bound.
    """
    years = deployment.inputs.target.life_years

    def share(load: float) -> float:
        def lasts(tried: float) -> bool:
            return life_years(deployment, operate(_writing(deployment, tried), load).write_bytes_per_s["disk"]) >= years

        return _most(lasts, deployment.inputs.software.write_share)

    def serves(load: float) -> bool:
        return is_within(_writing(deployment, share(load)), load)

    served = users / deployment.workload.interval_s
    served = _most(serves, served) if math.isfinite(served) else served
    found = share(min(requests_per_s, served))
    if served < requests_per_s and found == deployment.inputs.software.write_share:
        return None, in_users(deployment, served)
    # Rounded down as it is shown, so that drives last when it is typed.
    return math.floor(found * 1000 + 1e-9) / 1000 or found, in_users(deployment, served)


def _most(holds: Callable[[float], bool], high: float) -> float:
    """Find the most, up to `high`, for which `holds` is true; it is true below that."""
    low = 0.0
    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
