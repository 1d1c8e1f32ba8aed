"""Compute what a load demands of tiers: capacity, reads and writes, and how busy drives are and how long they last."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvtier.tools.plan.max_load import in_users, is_within, life_years, most_users
from kvtier.tools.plan.operating_point import OperatingPoint, operate
from kvtier.tools.plan.resolve import Deployment

_HALVINGS = 24
_FIGURES = 3
"""Significant digits to which a sufficient capacity is rounded up. Tables show as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityNeed:
    """Capacity and bandwidth that tiers must have together to serve a share of the possible hits."""

    hit_share: float
    hit_rate: float
    """Hits as a share of all prompt tokens."""
    residence_s: float
    tokens: float
    bytes: float
    """Bytes of the KV as tiers store it, or as GPU memory keeps it if there are no tiers.

    A tier that fills only a share of its capacity needs more capacity than this.
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
    """Share of the drives' time that writes, and reads in bursts, take."""
    chunk_bytes: float
    """Bytes that a load reads per chunk. Layers with a window do not count, because only their last tokens are read."""
    depth: float
    """Mean number of commands in flight, over all drives."""
    written_bytes_per_day: float
    writes_per_day: float
    """Bytes written per day, divided by the capacity of all drives."""
    life_years: float
    life_selective_years: float
    """Life in years if KV is written at its second use, not as soon as it is computed."""
    write_policy: Literal["through", "selective", "budget"]
    """Write all new KV, or KV at its second use, or a budget: the first that lets drives last `target.life_years`."""
    write_share: float | None
    """Share of new KV that this policy writes at the load, or at `users` if the policy serves fewer.

    None if only a lower load helps: at `users`, the drives last with the whole `software.write_share`.
    """
    users: float
    """Users within all limits with this policy."""
    drives_for_capacity: int
    drives_for_bandwidth: int
    drives_for_life: int


def capacity(deployment: Deployment, hit_share: float) -> CapacityNeed:
    """Compute the capacity and reads that a share of the possible hits requires at the requested load."""
    load, model = deployment.workload, deployment.model
    residence_s = load.curve.residence_for(hit_share) if load.has_returns else 0.0
    curve = load.stored_curve if deployment.tiers else load.curve
    tokens = curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
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


def enough_bytes(deployment: Deployment, sizes: Sequence[Deployment]) -> dict[str, float]:
    """Find the least capacity of each tier with which the GPUs serve the requested load, at any of the sizes.

    Tiers are reduced one after the other, the slowest first. A tier is reduced only if the load needs no slower tier.
    Tiers are inclusive, so a capacity includes copies of the KV in GPU memory and faster tiers. That of drives includes
    the space that `disk.filled` leaves free. Drives keep the rates of the deployment.

    Args:
        deployment: the GPUs and tiers, at a size that serves the load if any does.
        sizes: the same hardware at each size that the plan searched.
    """
    requested, filled = deployment.workload.requests_per_s, {"disk": deployment.inputs.disk.filled}
    found = {it.name: it.capacity_bytes / filled.get(it.name, 1.0) for it in deployment.tiers}

    def serves(it: Deployment, place: int, capacity_bytes: float) -> bool:
        kept = (replace(it.tiers[place], capacity_bytes=capacity_bytes),) if capacity_bytes else ()
        return is_within(replace(it, tiers=(*it.tiers[:place], *kept)), requested)

    for place, tier in reversed([*enumerate(deployment.tiers)]):
        least = tier.capacity_bytes
        for it in (deployment, *(size for size in sizes if size is not deployment)):
            if serves(it, place, 0.0):
                least = 0.0
                break
            low, high = 0.0, least
            if it is not deployment and not serves(it, place, least * (1 - 0.1**_FIGURES)):
                continue  # this size needs no less than another one
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if serves(it, place, middle) else (middle, high)
            least = high
        if least:
            least /= filled.get(tier.name, 1.0)
            step = 10.0 ** (math.floor(math.log10(least)) + 1 - _FIGURES)
            return found | {tier.name: math.ceil(least / step) * step}
        found[tier.name] = 0.0
    return found


def drive_load(deployment: Deployment, point: OperatingPoint, enough_bytes: float) -> DriveLoad:
    """Compute the load on the drives at one operating point, and the write policy with which they last.

    Args:
        deployment: the hardware, with drives.
        point: its operating point.
        enough_bytes: capacity of drives that is enough for the load of `point`.
    """
    inputs = deployment.inputs
    disk, software, target = inputs.disk, inputs.software, inputs.target
    policy: Literal["through", "selective", "budget"]
    read, written = point.read_bytes_per_s["disk"], point.write_bytes_per_s["disk"]
    whole = sum(it.stored for it in deployment.model.spans if math.isinf(it.last_tokens))
    chunk_bytes = (whole or deployment.model.token_bytes) * software.chunk_tokens or deployment.model.state_bytes
    # Apply Little's law twice: to the requests that load from drives, and to the commands in flight for each.
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
        drives_for_capacity=max(math.ceil(enough_bytes / disk.capacity_bytes), 1),
        drives_for_bandwidth=max(math.ceil(time_used - 1e-9), 1),
        drives_for_life=max(math.ceil(disk.count * target.life_years / years - 1e-9), 1),
    )


def _writing(deployment: Deployment, share: float) -> Deployment:
    """Return the deployment with `share` of new KV written to the drives."""
    return replace(deployment, inputs=deployment.inputs.change({"software.write_share": share}))


def _budget(deployment: Deployment, requests_per_s: float, users: float) -> tuple[float | None, float]:
    """Find the largest share of new KV that can be written while the drives last, and how many users it serves.

    The drives must last `target.life_years`. Writing less means that fewer prompts find their KV and more new KV is
    computed, so the share is solved for at each load. The share is None if the limits permit only a lower load, at
    which the drives last with the whole `software.write_share`. Then only a lower load helps, not a smaller share.

    Args:
        deployment: the deployment. Its `software.write_share` is the upper bound of the share.
        requests_per_s: the load to find the share for. If the limits permit only a lower one, that is used.
        users: the users within all limits if `software.write_share` of new KV is written.
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
    # Round down to the digits shown, so that drives last with the share that a user types.
    return math.floor(found * 1000 + 1e-9) / 1000 or found, in_users(deployment, served)


def _most(holds: Callable[[float], bool], high: float) -> float:
    """Find the largest value up to `high` for which `holds` is true. `holds` must be true for all smaller values."""
    low = 0.0
    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
