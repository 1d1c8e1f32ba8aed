"""The planner's choice of how many tokens to load, against the best split of the measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.planner import Piece, Planner
from kvtier.types import LoadOption, Lookup, Presence

Measured = Sequence[tuple[int, float]]
"""(tokens, seconds)."""


@dataclass(frozen=True, slots=True)
class PlannerChoice:
    """The planner's choice for one prompt and tier, and the best one."""

    context: int
    best_tokens: int
    best_s: float
    chosen_tokens: int
    chosen_s: float
    place: str = "host"
    is_tried: bool = True
    """Whether each split was measured; False: computed by `every_split`."""

    @property
    def regret(self) -> float:
        """How much longer the planner's choice takes than the best one, as a share of the best."""
        return self.chosen_s / self.best_s - 1


def choices(
    context: int, step: int, *, computed: Measured, loaded: Mapping[str, Measured], splits: Mapping[int, float]
) -> list[PlannerChoice]:
    """The planner's choices for a prompt, given the loads and prefills measured so far.

    Args:
        context: tokens of the prompt.
        step: tokens of a chunk.
        computed: prompts that were computed.
        loaded: loads, by tier.
        splits: measured time to first token by tokens restored from host memory.
    """
    found: list[PlannerChoice] = []
    for place, loads in loaded.items():
        if not loads or not computed:
            continue
        tables = [(splits, True)] if place == "host" and len(splits) > 1 else []
        tables.append((every_split(context, step, computed=computed, loaded=loads), False))
        for seconds, is_tried in tables:
            best = min(seconds, key=lambda tokens: seconds[tokens])
            chosen = choose(context, sorted(seconds), computed=computed, loaded=loads, place=place)
            found.append(PlannerChoice(context, best, seconds[best], chosen, seconds[chosen], place, is_tried))
    return found


def choose(context: int, offered: Sequence[int], *, computed: Measured, loaded: Measured, place: str = "host") -> int:
    """The number of leading tokens that the planner loads.

    Args:
        context: tokens of the prompt.
        offered: numbers of leading tokens that can be loaded, in ascending order; 0 computes everything.
        computed: prompts that were computed.
        loaded: loads; the cost of others is interpolated.
        place: the tier that holds the tokens.
    """
    planner = Planner()
    for tokens, seconds in computed:
        planner.prefilled([Piece(tokens, 0)], seconds)
    options = tuple(
        LoadOption(tokens, place, seconds := between(loaded, tokens), seconds / 2, is_known=bool(loaded))
        for tokens in offered
        if tokens
    )
    most = max(offered)
    lookup = Lookup(most, most, Presence.READY if most else Presence.ABSENT, options=options)
    plan = planner.plan(lookup, context, now_s=0.0)
    # A trial explores an unknown link; it is not the planner's best estimate.
    return 0 if plan.is_trial or plan.tokens not in offered else plan.tokens


def every_split(context: int, step: int, *, computed: Measured, loaded: Measured) -> dict[int, float]:
    """Time to load the leading tokens and compute the rest, for each number of chunks.

    The load time is interpolated. The compute time is that of the whole prompt less that of its leading tokens. No
    formula of the planner is used.

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
    """Seconds for `tokens`: linear between (0, 0) and the measured points, proportional beyond the last one."""
    points = sorted({0: 0.0, **dict(measured)}.items())
    last, seconds = points[-1]
    if tokens > last:
        return seconds * tokens / last if last else 0.0
    return float(np.interp(tokens, [point[0] for point in points], [point[1] for point in points]))
