"""Choices of tiers: what the given GPUs serve with each, which are worth buying, and why a tier is not.

All is about the hardware and independent of the requested load: users within all limits, each choice at its own best
size. Choices that serve nearly the most are near each other; the smallest of them are worth buying, one of them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from kvtier.plan.cost import tier_prices, worn
from kvtier.plan.limits import highest_load, life_years, most_users
from kvtier.plan.queueing import GPU, operate
from kvtier.plan.resolve import Deployment, TierHardware, resolve
from kvtier.plan.search import PlannedSize, search
from kvtier.report.format import bytes_text, time_text

LEAST_GAIN = 1.1
"""A smaller ratio of users does not count as a gain: the plan itself is off by as much."""
TIER_NAMES = {"gpu": "GPU memory", "host": "host memory", "disk": "local drives", "shared": "shared storage"}
_NEARLY_ALL = 0.9
_INTERVALS = tuple(4.0**step for step in range(1, 9))
"""Multiples of the interval between two queries at which a tier may pay."""
_INTERVAL_MOST_S = 1e7
_HALVINGS = 4
"""They narrow the ratio of 4 between a multiple at which it pays and the one before to a tenth."""
_HOST_HALVINGS = 9
"""They narrow the ratio between host memory and one conversation, which is some 1,000, to 2 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Some of the given tiers on the given GPUs, at the size that serves most users."""

    tiers: tuple[str, ...]
    """Their names, the fastest first; none is GPU memory alone."""
    sizes: tuple[PlannedSize, ...]
    """Every size that holds the model, the smallest first."""
    deployment: Deployment
    """At the size for any load."""
    for_load: Deployment
    """At the size for the requested load: another one where only that serves it."""
    users: float
    """Users within all limits at the size for any load."""
    life_years: float | None
    """Life of its drives at that load; None without drives."""
    price: float | None
    """The price of its tiers, with drives that replace worn ones; None where one is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameMoney:
    """Users for the money of host memory and drives together, spent on one of them."""

    money: float
    host_bytes: int
    users_host: float
    drives: int
    users_drives: float


def choices(sizes: Sequence[Deployment]) -> list[Choice]:
    """Each choice of the tiers: none of them first, all of them last.

    Args:
        sizes: the deployment with all tiers at each size that holds the model.
    """
    names = [it.name for it in sizes[0].tiers]
    return [_choice(sizes, kept) for count in range(len(names) + 1) for kept in combinations(names, count)]


def only(deployment: Deployment, names: Collection[str]) -> Deployment:
    """The deployment without other tiers than `names`."""
    return deployment.without(*(it.name for it in deployment.tiers if it.name not in names))


def _choice(sizes: Sequence[Deployment], kept: tuple[str, ...]) -> Choice:
    found, best, for_load = search([only(it, kept) for it in sizes])
    users, years = most_users(best), None
    if "disk" in kept:
        rate = users / best.workload.interval_s
        written = operate(best, rate, with_tiers=True).write_bytes_per_s["disk"] if 0 < rate < math.inf else 0.0
        years = life_years(best, written)
    prices = tier_prices(best)
    return Choice(
        tiers=kept,
        sizes=tuple(found),
        deployment=best,
        for_load=for_load,
        users=users,
        life_years=years,
        price=sum(prices.values()) + worn(best, years) if all(prices.values()) else None,
    )


def worth_buying(found: Sequence[Choice]) -> list[Choice]:
    """The choices that serve nearly the most and of which no part does: the cheapest first, or else the smallest.

    It is GPU memory alone where that serves nearly the most, or where nothing serves a user.
    """
    load = found[0].deployment.workload
    users = {it.tiers: load.counted(it.users) for it in found}  # a part of a user is no reason to buy
    near = [tiers for tiers, count in users.items() if load.is_any(count) and count * LEAST_GAIN >= max(users.values())]
    kept = smallest(near) or [()]
    best = [it for it in found if it.tiers in kept]
    return best if any(it.price is None for it in best) else sorted(best, key=lambda it: it.price or 0.0)


def smallest(found: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The sets of tiers of which no part is among them."""
    return [it for it in found if not any(set(other) < set(it) for other in found)]


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


def why_not(deployment: Deployment, tier: TierHardware) -> str:
    """Why `tier` brings nothing beside the other tiers of `deployment`, at the most users that it serves."""
    load, names = deployment.workload, [it.name for it in deployment.tiers]
    most, place = highest_load(deployment, with_tiers=True), names.index(tier.name)
    holds = (
        f"{TIER_NAMES[tier.name]} hold{'' if tier.name == 'disk' else 's'} {bytes_text(tier.capacity_bytes)}, less than"
    )
    above, above_bytes = (
        (names[place - 1], deployment.tiers[place - 1].capacity_bytes)
        if place
        else (GPU, deployment.kv_bytes * deployment.replicas * deployment.inputs.software.gpu_reuse)
    )
    if not load.reuse:
        return "no prompt repeats tokens of an earlier one"
    if not load.is_any(most * load.interval_s):
        return "no load is within the limits, with it or without"
    if tier.capacity_bytes < deployment.model.stored_bytes(load.session_tokens):
        return f"{holds} one conversation"
    if tier.capacity_bytes < above_bytes:
        return f"{holds} the {bytes_text(above_bytes)} of {TIER_NAMES[above]}"
    point = operate(deployment, most, with_tiers=True)
    if point.write_bytes_per_s[tier.name] * LEAST_GAIN < point.given_bytes_per_s[tier.name]:
        stored = point.write_bytes_per_s[tier.name] / point.given_bytes_per_s[tier.name]
        return f"new KV is written too slowly, {stored:.0%} of it in time"
    if point.read_bytes_per_s[tier.name] < point.wanted_bytes_per_s[tier.name] / 2:
        return "prompts compute faster than they load from it"
    if names[place + 1 :]:
        return f"{TIER_NAMES[names[-1]]} alone serve{'' if names[-1] == 'disk' else 's'} as much"
    residence_s = point.residence_s[above] if above_bytes else 0.0
    if (within := load.curve.found_within(residence_s)) > _NEARLY_ALL:
        kept = f"{TIER_NAMES[above]} keeps KV for {time_text(residence_s)} at the most users"
        return f"{kept}, and {within:.1%} of the reuses come within that"
    return "other limits are met first"


def pays_from(deployment: Deployment, tier: TierHardware) -> float | None:
    """About the shortest interval between two queries of a user at which `tier` brings users beside the others."""
    load, inputs = deployment.workload, deployment.inputs
    if not load.has_users or not load.reuse:
        return None
    near = 0.0

    def pays(interval_s: float) -> bool:
        nonlocal near
        changed = resolve(inputs.change({"traffic.interval_s": interval_s}), deployment.basis)
        changed = only(changed, {it.name for it in deployment.tiers})
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
