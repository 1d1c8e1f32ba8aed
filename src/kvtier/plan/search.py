"""The size that serves most users within the limits, with tiers and with GPU memory alone, and the GPUs for a load.

A larger size reads weights and computes prompts faster and holds more KV; it exchanges more, and fewer copies share the
load. A size that is larger than memory needs is taken for its users only.
"""

import math
from dataclasses import dataclass
from functools import cache

from kvtier.plan.hardware import COUNT_MAX
from kvtier.plan.inputs import Inputs
from kvtier.plan.limits import highest_load, most_users
from kvtier.plan.queueing import operate
from kvtier.plan.resolve import SEARCHED, Deployment, deployments, resolve

_ALMOST_NO_LOAD = 1e-9
CLOSE = 1e-9
NEARLY = 0.95
"""A smaller size that serves this share of the most users is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSize:
    """One size that holds the model, and what it serves within all limits."""

    tp: int
    """GPUs that share one copy of the model."""
    dp_attention: bool
    copies: int
    users_with_tiers: float
    users_without_tiers: float


def search(sizes: list[Deployment]) -> tuple[list[PlannedSize], Deployment, Deployment]:
    """The users at each size, the best deployment for any load, and the best one for the requested load."""
    found = {with_tiers: [most_users(it, with_tiers=with_tiers) for it in sizes] for with_tiers in (True, False)}
    rows = [
        PlannedSize(
            tp=it.inputs.model.tp,
            dp_attention=it.inputs.model.dp_attention,
            copies=it.copies,
            users_with_tiers=tiered,
            users_without_tiers=alone,
        )
        for it, tiered, alone in zip(sizes, found[True], found[False], strict=True)
    ]
    load = sizes[0].workload
    return rows, best(sizes, found[True]), best(sizes, found[True], load.requests_per_s * load.interval_s)


def gpus_for(inputs: Inputs, deployment: Deployment, loads: list[float]) -> list[int | None]:
    """The fewest GPUs that serve each of `loads` requests a second within the limits, in whole copies of any size.

    Each number is checked as a plan of that many GPUs, with the tiers of its hosts. Copies share tiers whose total is
    given, so the users of one copy are where the search begins.

    Args:
        inputs: as given, so that totals follow the number of hosts.
        deployment: the same, resolved, with the tiers to count with.
        loads: requests a second.
    """
    basis, kept = deployment.basis, {it.name for it in deployment.tiers}
    # Every size of one host is tried, those larger than the given GPUs as well.
    hosts = inputs.change({"gpu.count": max(inputs.gpu.count, inputs.host.gpus)})
    sizes = [(it.inputs.model.tp, it.inputs.model.dp_attention) for it in deployments(hosts, basis)]

    @cache
    def most(tp: int, dp: bool, copies: int) -> float:  # noqa: FBT001 - a key of the cache
        size = {"gpu.count": tp * copies, "model.tp": tp, "model.dp_attention": dp}
        changed = resolve(inputs.change(size, SEARCHED), basis)
        changed = changed.without(*({it.name for it in changed.tiers} - kept))
        return highest_load(changed, with_tiers=bool(kept), near=most(tp, dp, 1) * copies if copies > 1 else 0.0)

    def least(load: float) -> int | None:
        best = COUNT_MAX + 1
        for tp, dp in reversed(sizes):
            copies = 1
            while copies * tp < best and (served := most(tp, dp, copies)):
                if served >= load * (1 - CLOSE):
                    best = copies * tp
                copies = max(copies + 1, math.ceil(copies * load / served * (1 - CLOSE)))
        return best if best <= COUNT_MAX else None

    return [least(it) for it in loads]


def best(sizes: list[Deployment], users: list[float], requested: float = 0.0) -> Deployment:
    """The smallest size that serves nearly the most users, and the requested ones where any size serves those.

    Where none serves a user, it is the one with the shortest time to first token.

    Args:
        sizes: with the tiers to count with, the smallest first.
        users: that each of them serves.
        requested: the users to serve; 0: as many as possible.
    """
    most = max(users)
    if not most:
        return min(sizes, key=lambda it: operate(it, _ALMOST_NO_LOAD, with_tiers=True).ttft_s)
    wanted = max(NEARLY * most, requested * (1 - CLOSE) if is_served(requested, most) else 0.0)
    return next(it for it, served in zip(sizes, users, strict=True) if served >= wanted)


def is_served(requested: float, users: float) -> bool:
    """Whether the requested users are within the limits, but for the errors of a search."""
    return users >= requested * (1 - CLOSE)
