"""The size that serves most users within the limits, with tiers and with GPU memory alone."""

from dataclasses import dataclass

from kvtier.plan.limits import most_users
from kvtier.plan.queueing import operate
from kvtier.plan.resolve import Deployment

_ALMOST_NO_LOAD = 1e-9


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


def _best(sizes: list[Deployment], users: list[float], *, with_tiers: bool) -> Deployment:
    """The smallest of the best; where none serves a user, the one with the shortest time to first token."""
    if len(sizes) == 1:
        return sizes[0]
    if any(users):
        return sizes[users.index(max(users))]
    return min(sizes, key=lambda it: operate(it, _ALMOST_NO_LOAD, with_tiers=with_tiers).ttft_s)
