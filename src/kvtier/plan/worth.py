"""What each tier brings: the plan with it and without it, why it brings nothing, and when it would.

Tiers can stand in for one another, so they are judged one after another: of those without which the plan serves as
much, the dearest goes first (without prices: the lowest), and the others are judged without it. Times and tokens a
second count at a load within the limits only: beyond them a tier does not help.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kvtier.plan.cost import tier_prices
from kvtier.plan.limits import highest_load, in_users, life_years, most_users, throughput
from kvtier.plan.queueing import GPU, OperatingPoint, operate
from kvtier.plan.resolve import Deployment, TierHardware, resolve
from kvtier.report.format import bytes_text, time_text

LEAST_GAIN = 1.1
"""A smaller ratio of users, tokens a second or times to first token is no gain: the plan itself is off by as much."""
TIER_NAMES = {"gpu": "GPU memory", "host": "host memory", "disk": "local drives", "shared": "shared storage"}
_NEARLY_ALL = 0.9
_INTERVALS = tuple(4.0**step for step in range(1, 9))
"""Multiples of the interval between two queries at which a tier may pay."""
_INTERVAL_MOST_S = 1e7
_HALVINGS = 4
"""Of the ratio of 4 between a multiple at which it pays and the one before: within a tenth."""
_HOST_HALVINGS = 9
"""Of the ratio between host memory and one conversation, which is some 1,000: within 2 %."""


class Served(NamedTuple):
    """What a deployment serves."""

    users: float
    """Within all limits."""
    ttft_s: float
    """Mean at the requested load."""
    output_tokens_per_s: float
    """At the requested load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWorth:
    """One tier's own gain."""

    without: Served
    """Of the plan without this tier, and without those that were found not to be worth it before."""
    users_alone: float
    """Users within all limits with this tier and no other."""
    worth_it: bool
    why_not: str
    """Why it brings nothing; empty where it brings something."""
    pays_from_s: float | None
    """The interval between two queries of a user from which it brings users; None where it does or none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameMoney:
    """Users for the money of host memory and drives together, spent on one of them."""

    money: float
    host_bytes: int
    users_host: float
    drives: int
    users_drives: float


def served(deployment: Deployment) -> Served:
    """What a deployment with its tiers serves within its limits, and at the requested load."""
    load = deployment.workload
    rate = min(load.requests_per_s, throughput(deployment, with_tiers=True))
    point = operate(deployment, rate, with_tiers=True)
    ttft_s = point.ttft_s if rate == load.requests_per_s else math.inf
    return Served(most_users(deployment), ttft_s, rate * load.answer_tokens)


def worths(deployment: Deployment, point: OperatingPoint) -> dict[str, TierWorth]:
    """The worth of each tier.

    Args:
        deployment: with all tiers.
        point: its operating point at the highest load within the limits.
    """
    alone = {it.name: most_users(replace(deployment, tiers=(it,))) for it in deployment.tiers}
    found: dict[str, TierWorth] = {}
    prices = tier_prices(deployment)
    if "disk" in prices:  # with those that replace worn ones
        life = life_years(deployment, point.write_bytes_per_s["disk"])
        prices["disk"] *= max(1.0, deployment.inputs.price.years / life)
    kept, now = deployment, served(deployment)
    while kept.tiers:
        without = {it.name: served(kept.without(it.name)) for it in kept.tiers}
        idle = [it for it in kept.tiers if not _gains(kept, now, without[it.name])]
        tier = max(reversed(idle), key=lambda it: prices[it.name], default=None)
        for it in [tier] if tier else kept.tiers:
            found[it.name] = TierWorth(
                without=without[it.name],
                users_alone=alone[it.name],
                worth_it=tier is None,
                why_not=_why_not(kept, it, point, now) if tier else "",
                pays_from_s=_pays_from(kept, it) if tier else None,
            )
        if tier is None:
            break
        kept, now = kept.without(tier.name), without[tier.name]
    return found


def gpu_worth(deployment: Deployment) -> TierWorth:
    """The worth of reuse in GPU memory, with the tiers."""
    reuses = deployment.inputs.software.gpu_reuse
    inputs = deployment.inputs.change({"software.gpu_reuse": False})
    now, without = served(deployment), served(resolve(inputs, deployment.basis))
    return TierWorth(
        without=without,
        users_alone=most_users(deployment, with_tiers=False),
        worth_it=reuses and _gains(deployment, now, without),
        why_not="",
        pays_from_s=None,
    )


def same_money(deployment: Deployment) -> SameMoney | None:
    """Host memory against drives, at their prices; None without both, or without their prices."""
    inputs, price = deployment.inputs, deployment.inputs.price
    host, drives = inputs.host.capacity_bytes, inputs.disk.count
    if not (host and drives and price.host_memory_per_gb and price.drive):
        return None
    prices = tier_prices(deployment)
    money = prices["host"] + prices["disk"]
    host_bytes, count = int(money / price.host_memory_per_gb * 1e9), int(money / price.drive)
    users = [
        most_users(resolve(inputs.change(values), deployment.basis))
        for values in (
            {"host.capacity_bytes": host_bytes, "disk.count": 0},
            {"host.capacity_bytes": 0, "disk.count": count},
        )
    ]
    return SameMoney(money=money, host_bytes=host_bytes, users_host=users[0], drives=count, users_drives=users[1])


def least_host_bytes(deployment: Deployment) -> float | None:
    """Host memory from which on it brings `_NEARLY_ALL` of the users that all of it brings; None where it brings none.

    Tiers are inclusive: the size is that of the whole tier, with the KV that GPU memory holds as well.
    """
    host = next((it for it in deployment.tiers if it.name == "host"), None)
    if host is None:
        return None
    most, least = most_users(deployment), most_users(deployment.without("host"))
    if most <= least * LEAST_GAIN:
        return None
    wanted = least + _NEARLY_ALL * (most - least)
    low, high = deployment.model.stored_bytes(deployment.workload.session_tokens), host.capacity_bytes
    for _ in range(_HOST_HALVINGS):
        middle = math.sqrt(low * high)
        others = [it for it in deployment.tiers if it.name != "host"]
        changed = replace(deployment, tiers=(replace(host, capacity_bytes=middle), *others))
        low, high = (low, middle) if most_users(changed) >= wanted else (middle, high)
    return high


def _gains(deployment: Deployment, now: Served, without: Served) -> bool:
    if now.users > without.users * LEAST_GAIN and deployment.workload.is_any(now.users):
        return True
    fits = now.users >= in_users(deployment, deployment.workload.requests_per_s)
    return fits and (
        now.output_tokens_per_s > without.output_tokens_per_s * LEAST_GAIN or now.ttft_s * LEAST_GAIN < without.ttft_s
    )


def _why_not(deployment: Deployment, tier: TierHardware, point: OperatingPoint, now: Served) -> str:
    load, names = deployment.workload, [it.name for it in deployment.tiers]
    place = names.index(tier.name)
    holds = (
        f"{TIER_NAMES[tier.name]} hold{'' if tier.name == 'disk' else 's'} {bytes_text(tier.capacity_bytes)}, less than"
    )
    above, above_bytes = (
        (names[place - 1], deployment.tiers[place - 1].capacity_bytes)
        if place
        else (GPU, deployment.kv_bytes * deployment.replicas * deployment.inputs.software.gpu_reuse)
    )
    residence_s = point.residence_s[above] if above_bytes else 0.0
    within = load.curve.found_within(residence_s)
    if not load.reuse:
        return "no prompt repeats tokens of an earlier one"
    if not load.is_any(now.users):
        return "no load is within the limits, with it or without"
    if tier.capacity_bytes < deployment.model.stored_bytes(load.session_tokens):
        return f"{holds} one conversation"
    if tier.capacity_bytes < above_bytes:
        return f"{holds} the {bytes_text(above_bytes)} of {TIER_NAMES[above]}"
    if point.write_bytes_per_s[tier.name] * LEAST_GAIN < point.given_bytes_per_s[tier.name]:
        stored = point.write_bytes_per_s[tier.name] / point.given_bytes_per_s[tier.name]
        return f"new KV is written too slowly, {stored:.0%} of it in time"
    if point.read_bytes_per_s[tier.name] < point.wanted_bytes_per_s[tier.name] / 2:
        return "prompts compute faster than they load from it"
    if names[place + 1 :]:
        return f"{TIER_NAMES[names[-1]]} alone serve as much"
    if within > _NEARLY_ALL:
        kept = f"{TIER_NAMES[above]} keeps KV for {time_text(residence_s)} at the most users"
        return f"{kept}, and {within:.1%} of the reuses come within that"
    return "other limits are met first"


def _pays_from(deployment: Deployment, tier: TierHardware) -> float | None:
    """About the shortest interval between two queries of a user at which the tier brings users."""
    load, inputs = deployment.workload, deployment.inputs
    if not load.has_users or not load.reuse:
        return None
    near = 0.0

    def pays(interval_s: float) -> bool:
        nonlocal near
        changed = resolve(inputs.change({"traffic.interval_s": interval_s}), deployment.basis)
        changed = changed.without(*({it.name for it in changed.tiers} - {it.name for it in deployment.tiers}))
        near = highest_load(changed, with_tiers=True, near=near)
        return near > highest_load(changed.without(tier.name), with_tiers=True, near=near) * LEAST_GAIN

    tried = [inputs.traffic.interval_s, *(inputs.traffic.interval_s * times for times in _INTERVALS)]
    for before_s, interval_s in pairwise(it for it in tried if it <= _INTERVAL_MOST_S):
        if pays(interval_s):
            low, high = before_s, interval_s
            for _ in range(_HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if pays(middle) else (middle, high)
            return high
    return None
