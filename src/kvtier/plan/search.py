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
_CLOSE = 1e-9
NEARLY = 0.95
"""Of the most users: a smaller size that serves them is preferred."""


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
    """The users at each size; the best deployment with tiers, and the best with GPU memory alone."""
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
    return rows, _best(sizes, found[True], with_tiers=True), _best(sizes, found[False], with_tiers=False)


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
                if served >= load * (1 - _CLOSE):
                    best = copies * tp
                copies = max(copies + 1, math.ceil(copies * load / served * (1 - _CLOSE)))
        return best if best <= COUNT_MAX else None

    return [least(it) for it in loads]


def _best(sizes: list[Deployment], users: list[float], *, with_tiers: bool) -> Deployment:
    """The smallest size that serves nearly the most users; the same for any requested load.

    Where none serves a user, it is the one with the shortest time to first token.
    """
    if len(sizes) == 1:
        return sizes[0]
    if most := max(users):
        return next(it for it, served in zip(sizes, users, strict=True) if served >= NEARLY * most)
    return min(sizes, key=lambda it: operate(it, _ALMOST_NO_LOAD, with_tiers=with_tiers).ttft_s)
