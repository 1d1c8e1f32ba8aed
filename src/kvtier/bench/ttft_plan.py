"""What the planner would have chosen, given what was measured, and what the best split would have been."""

from collections.abc import Sequence

import numpy as np

from kvtier.core.planner import Piece, Planner
from kvtier.types import Lookup, Offer, Presence

Measured = Sequence[tuple[int, float]]
"""(tokens, seconds)."""


def choose(context: int, offered: Sequence[int], *, computed: Measured, loaded: Measured, place: str = "host") -> int:
    """How many of the leading tokens of a prompt the planner loads.

    Args:
        context: tokens of the prompt.
        offered: how many leading tokens can be had, from the fewest on; 0 among them means computing everything.
        computed: prompts that were computed.
        loaded: loads; the cost of others is taken to lie on straight lines through these and through nothing.
        place: where they are.
    """
    planner = Planner()
    for tokens, seconds in computed:
        planner.prefilled([Piece(tokens, 0)], seconds)
    offers = tuple(
        Offer(tokens, place, seconds := between(loaded, tokens), seconds / 2, is_known=bool(loaded))
        for tokens in offered
        if tokens
    )
    most = max(offered)
    lookup = Lookup(most, most, Presence.READY if most else Presence.ABSENT, offers=offers)
    plan = planner.plan(lookup, context, now_s=0.0)
    # A trial is not what it believes to be best: it is cut when it does not pay, within an allowance.
    return 0 if plan.is_trial or plan.tokens not in offered else plan.tokens


def every_split(context: int, step: int, *, computed: Measured, loaded: Measured) -> dict[int, float]:
    """What loading the leading tokens and computing the rest takes, for each number of tokens that could be loaded.

    A load takes what was measured of loads, the rest what the whole prompt took longer to compute than its leading
    tokens; on straight lines between the measured lengths. No formula of the planner's enters.

    Args:
        context: tokens of the prompt.
        step: tokens of a chunk.
        computed: prompts that were computed, one of at least `context` tokens among them.
        loaded: loads.

    Returns:
        Loaded tokens to seconds; 0 computes everything.
    """
    whole_s = between(computed, context)
    loads = [*range(0, context, step), context]
    return {tokens: between(loaded, tokens) + whole_s - between(computed, tokens) for tokens in loads}


def between(measured: Measured, tokens: int) -> float:
    """Seconds by straight lines through what was measured and through nothing; in proportion behind the last."""
    points = sorted({0: 0.0, **dict(measured)}.items())
    last, seconds = points[-1]
    if tokens > last:
        return seconds * tokens / last if last else 0.0
    return float(np.interp(tokens, [point[0] for point in points], [point[1] for point in points]))
