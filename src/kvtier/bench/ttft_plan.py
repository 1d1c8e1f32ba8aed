"""What the planner would have chosen, given what was measured."""

from collections.abc import Sequence

from kvtier.core.planner import Piece, Planner
from kvtier.types import Lookup, Offer, Presence


def choose(
    context: int, offered: Sequence[int], *, computed: Sequence[tuple[int, float]], loaded: Sequence[tuple[int, float]]
) -> int:
    """How many of the leading tokens of a prompt the planner loads.

    Args:
        context: tokens of the prompt.
        offered: how many leading tokens can be had, from the fewest on; 0 among them means computing everything.
        computed: (tokens, seconds) of prompts that were computed.
        loaded: (tokens, seconds) of loads; the cost of others is taken to lie on a line through these.
    """
    planner = Planner()
    for tokens, seconds in computed:
        planner.prefilled([Piece(tokens, 0)], seconds)
    offers = tuple(
        Offer(tokens, "host", seconds := _load_s(tokens, loaded), seconds / 2, is_known=bool(loaded))
        for tokens in offered
        if tokens
    )
    most = max(offered)
    lookup = Lookup(most, most, Presence.READY if most else Presence.ABSENT, offers=offers)
    plan = planner.plan(lookup, context, now_s=0.0)
    # A trial is not what it believes to be best: it is cut when it does not pay, within an allowance.
    return 0 if plan.is_trial or plan.tokens not in offered else plan.tokens


def _load_s(tokens: int, loaded: Sequence[tuple[int, float]]) -> float:
    """By the nearest load that was measured, in proportion."""
    if not loaded:
        return 0.0
    near, seconds = min(loaded, key=lambda it: abs(it[0] - tokens))
    return seconds * tokens / near if near else seconds
