"""Compare choices of tiers: how many users each serves on the given GPUs, and which are worth buying.

Users within all limits are counted on the given hardware, with each choice at its own best size. If all prices are
given, the best choice has the lowest price per user; otherwise it has the most users. If the requested load does not
fit on the given GPUs, prices are for the hardware of this load. Among the choices nearly as good as the best, the
smallest ones are alternatives worth buying.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from kvtier.report.format import decimal, digits, time_text
from kvtier.tools.plan.cost import Cost, cost, tier_prices, worn
from kvtier.tools.plan.max_load import best, highest_load, life_years, most_users
from kvtier.tools.plan.operating_point import GPU, operate
from kvtier.tools.plan.resolve import Deployment, resolve

LEAST_GAIN = 1.1
"""A smaller ratio of users or prices does not count as a gain, because the error of a plan is equally large."""
TIER_NAMES = {"gpu": "GPU memory", "host": "host memory", "disk": "local drives", "shared": "shared storage"}
_NEARLY_ALL = 0.9
_INTERVALS = tuple(4.0**step for step in range(1, 9))
"""Multiples of the given interval between two queries that are tried, to find where a tier pays."""
_INTERVAL_MOST_S = 1e7
_HALVINGS = 4
"""Bisections between two adjacent `_INTERVALS`. They narrow the factor of 4 to one of 1.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSize:
    """One size that holds the model, and the users that it serves within all limits."""

    tp: int
    """GPUs that share one copy of the model."""
    dp_attention: bool
    copies: int
    users_with_tiers: float
    users_without_tiers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Some of the given tiers on the given GPUs, at the size that serves most users."""

    tiers: tuple[str, ...]
    """Names of the tiers, the fastest first; empty for GPU memory alone."""
    sizes: tuple[PlannedSize, ...]
    """Every size that holds the model, the smallest first."""
    deployment: Deployment
    users: float
    """Users within all limits."""
    life_years: float | None
    """Life of the drives in years, at the load of `users`; None without drives."""
    price: float | None
    """Price of the tiers, with drives that replace worn ones; None if a price is missing."""
    cost: Cost | None
    """Cost at the most users; None if not even one user is within the limits."""

    @property
    def whole_users(self) -> float:
        """`users` rounded down, unless that is 0. Prices and power are divided by this number, which is also shown."""
        return self.deployment.workload.counted(self.users) or self.users

    @property
    def user_price(self) -> float | None:
        """Price per user of all hardware and its energy over the years of the prices; None if a price is missing."""
        if self.cost is None or self.cost.total is None or self.cost.missing:
            return None
        return self.cost.total / self.whole_users


def choices(sizes: Sequence[Deployment]) -> list[Choice]:
    """List every choice of tiers: no tier first, all tiers last.

    Args:
        sizes: the deployment with all tiers, at each size that holds the model.
    """
    names = [it.name for it in sizes[0].tiers]
    alone = [most_users(it.only(())) for it in sizes]
    kinds = (kept for count in range(len(names) + 1) for kept in combinations(names, count))
    return [_choice([it.only(kept) for it in sizes], alone, kept) for kept in kinds]


def _choice(sizes: Sequence[Deployment], alone: Sequence[float], kept: tuple[str, ...]) -> Choice:
    found = [most_users(it) for it in sizes] if kept else alone
    deployment = best(sizes, found)
    users, load, years = found[sizes.index(deployment)], deployment.workload, None
    rate = users / load.interval_s
    point = operate(deployment, rate) if 0 < rate < math.inf else None
    if "disk" in kept:
        years = life_years(deployment, point.write_bytes_per_s["disk"] if point else 0.0)
    prices = tier_prices(deployment)
    return Choice(
        tiers=kept,
        sizes=tuple(
            PlannedSize(
                tp=it.inputs.model.tp,
                dp_attention=it.inputs.model.dp_attention,
                copies=it.copies,
                users_with_tiers=with_tiers,
                users_without_tiers=without,
            )
            for it, with_tiers, without in zip(sizes, found, alone, strict=True)
        ),
        deployment=deployment,
        users=users,
        life_years=years,
        price=sum(prices.values()) + worn(deployment, years) if all(prices.values()) else None,
        cost=cost(deployment, point, life_years=years) if point and load.is_any(users) else None,
    )


def worth_buying(
    found: Sequence[Choice], prices: Mapping[tuple[str, ...], float], *, for_load: bool = False
) -> list[Choice]:
    """Find the choices that are nearly as good as the best and have no superfluous tier. Sort them by price if known.

    With prices the best choice has the lowest price per user, otherwise it has the most users. The result is GPU memory
    alone if that is nearly as good, or if no choice serves a user.

    Args:
        found: all choices.
        prices: price per user of each choice of tiers; empty if one is missing.
        for_load: whether prices are for the hardware that the requested load requires, not for the given hardware.
    """
    load = found[0].deployment.workload
    able = [it for it in found if load.is_any(it.users)]
    if prices:
        first = min((it for it in found if it.tiers in prices), key=lambda it: prices[it.tiers])
        most = prices[first.tiers] * LEAST_GAIN
        near = [
            it for it in found if prices.get(it.tiers, math.inf) <= most or (not for_load and _is_as_good(it, first))
        ]
    else:
        first = max(able, key=lambda it: it.users, default=found[0])
        near = [it for it in able if it.users * LEAST_GAIN >= first.users or _is_as_good(it, first)]
    kept = smallest([it.tiers for it in near]) or [()]
    chosen = [it for it in found if it.tiers in kept]
    keys = [prices.get(it.tiers, it.price) for it in chosen]
    if None in keys:
        return chosen
    return [it for _, it in sorted(zip(keys, chosen, strict=True), key=lambda it: it[0] or 0.0)]


def saving(amounts: Mapping[tuple[str, ...], float]) -> list[tuple[str, ...]]:
    """Find the choices that need nearly the fewest GPUs, or the least money, for one load, in ascending order of need.

    The result is empty if GPU memory alone needs nearly as little. It has no choice with a superfluous tier.
    """
    most = min(amounts.values()) * LEAST_GAIN
    near = [] if math.isinf(most) else [it for it, amount in amounts.items() if amount <= most]
    return [] if () in near else sorted(smallest(near), key=lambda it: amounts[it])


def user_prices(found: Sequence[Choice]) -> dict[tuple[str, ...], float]:
    """Return the price per user of each choice of tiers; empty unless every choice that serves a user has a price."""
    prices = {it.tiers: it.user_price for it in found if it.cost and it.user_price is not None}
    return prices if len(prices) == sum(it.cost is not None for it in found) else {}


def _is_as_good(choice: Choice, first: Choice) -> bool:
    """Return whether `choice` serves as many whole users as `first` for no more money.

    A fraction of a user is no reason to buy.
    """
    counted = choice.deployment.workload.counted
    mine, least = (it.cost.total if it.cost else None for it in (choice, first))
    return (mine is None or least is None or mine <= least) and counted(choice.users) >= counted(first.users)


def smallest(found: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Keep the sets of tiers that contain none of the other sets."""
    return [it for it in found if not any(set(other) < set(it) for other in found)]


def why_not(deployment: Deployment, name: str) -> str:
    """Explain why the tier `name` adds nothing to the other tiers, at the highest load within the limits."""
    load, names = deployment.workload, [it.name for it in deployment.tiers]
    most, place, gpu_reuse = highest_load(deployment), names.index(name), deployment.inputs.software.gpu_reuse
    tier = deployment.tiers[place]
    holds = (
        f"{TIER_NAMES[tier.name]} hold{'' if tier.name == 'disk' else 's'} {decimal(tier.capacity_bytes)}, less than"
    )
    above, above_bytes = (
        (names[place - 1], deployment.tiers[place - 1].capacity_bytes)
        if place
        else (GPU, deployment.gpu_stored_bytes * gpu_reuse)
    )
    if not load.reuse:
        return "no prompt repeats tokens of an earlier one"
    holder, held_bytes = (GPU, deployment.gpu_stored_bytes) if gpu_reuse else (above, above_bytes)
    if not load.has_returns:
        is_held = held_bytes >= deployment.model.stored_bytes(load.prefix_tokens)
        held = f", and {TIER_NAMES[holder]} hold{'s' * (holder != 'disk')} it" * is_held
        return f"only the system prompt repeats{held}"
    if not load.is_any(most * load.interval_s):
        return "no load is within the limits, with it or without"
    if tier.capacity_bytes < deployment.model.stored_bytes(load.stored_tokens):
        return f"{holds} one conversation"
    if tier.capacity_bytes < above_bytes:
        counted = "" if place else " as tiers store it"
        return f"{holds} the {decimal(above_bytes)} that {TIER_NAMES[above]} holds{counted}"
    point, unit = operate(deployment, most), "users" if load.has_users else "queries/s"
    if point.write_bytes_per_s[tier.name] * LEAST_GAIN < point.given_bytes_per_s[tier.name]:
        stored = point.write_bytes_per_s[tier.name] / point.given_bytes_per_s[tier.name]
        at_load = digits(load.counted(most * load.interval_s))
        return f"new KV is written too slowly, {stored:.0%} of it in time at {at_load} {unit}"
    if point.read_bytes_per_s[tier.name] < point.wanted_bytes_per_s[tier.name] / 2:
        return "prompts compute faster than they load from it"
    if names[place + 1 :]:
        serve = "serve" if names[-1] == "disk" else "serves"
        return f"{TIER_NAMES[names[-1]]} alone {serve} nearly as many {unit}"
    residence_s = point.residence_s[above] if above_bytes else 0.0
    if (within := load.curve.found_within(residence_s)) > _NEARLY_ALL:
        keep = "keep" if above == "disk" else "keeps"
        kept = f"{TIER_NAMES[above]} {keep} KV for {time_text(residence_s)} at the most {unit}"
        return f"{kept}, and {within:.1%} of the reuses come within that"
    return "other limits are met first"


def pays_from(deployment: Deployment, name: str) -> float | None:
    """Estimate the shortest interval between two queries, in seconds, at which the tier `name` adds users."""
    load, inputs = deployment.workload, deployment.inputs
    if not load.has_users or not load.has_returns:
        return None
    near, names = 0.0, {it.name for it in deployment.tiers}

    def pays(interval_s: float) -> bool:
        nonlocal near
        changed = resolve(inputs.change({"traffic.interval_s": interval_s}), deployment.basis).only(names)
        near = highest_load(changed, near)
        return near > highest_load(changed.only(names - {name}), near) * LEAST_GAIN

    tried = [inputs.traffic.interval_s, *(inputs.traffic.interval_s * times for times in _INTERVALS)]
    for before_s, interval_s in pairwise(it for it in tried if it <= _INTERVAL_MOST_S):
        if pays(interval_s):
            low, high = before_s, interval_s
            for _ in range(_HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if pays(middle) else (middle, high)
            return high
    return None
