"""Which tier holds which objects: tier by tier, each asked for what faster ones lack. Pure.

For a leading run a remote tier is asked in rounds, as in `core/probes.py`, because each name costs a request: the first
missing object; 23 spaced ones; 23 between the last that is there and the first that is not.
"""

from collections.abc import Callable, Sequence

from kvtier.core.probes import ROUND_NAMES
from kvtier.core.tier_state import TierState
from kvtier.types import ObjectId

Ask = Callable[[TierState, Sequence[ObjectId]], Sequence[bool] | None]
"""Asks one tier for objects. None: it has not answered."""


def search(
    tiers: Sequence[TierState], objects: Sequence[ObjectId], ask: Ask, *, is_run: bool
) -> list[TierState | None]:
    """The fastest tier that holds each object, or None.

    Args:
        tiers: fastest first.
        objects: what to look for.
        ask: asks one tier.
        is_run: only the leading run matters. Then of a remote tier's objects before one that it holds all count as
            held, although it may lack some.
    """
    found: list[TierState | None] = [None] * len(objects)
    missing = range(len(objects))
    for tier in tiers:
        asked = objects if len(missing) == len(objects) else [objects[position] for position in missing]
        if not asked:
            break
        if is_run and tier.rules.is_remote:
            run = _remote_run(tier, asked, ask)
            answers: Sequence[bool] | None = [number < run for number in range(len(asked))]
        else:
            answers = ask(tier, asked)
        if answers is None:
            continue
        if all(answers) and len(asked) == len(objects):
            return [tier] * len(objects)
        lacking: list[int] = []
        for position, is_there in zip(missing, answers, strict=True):
            if is_there:
                found[position] = tier
            else:
                lacking.append(position)
        missing = lacking
    return found


def _remote_run(tier: TierState, objects: Sequence[ObjectId], ask: Ask) -> int:
    """How many leading objects a remote tier holds: exact for 553 if there are no holes; of more, a few less."""
    if not (ask(tier, objects[:1]) or (False,))[0]:
        return 0
    low, high = 0, len(objects)
    """Positions of the last object that is there, and of the first that is not."""
    for _ in range(2):
        count = high - low - 1
        samples = min(count, ROUND_NAMES)
        positions = [low - (-(number + 1) * count // samples) for number in range(samples)]
        answers = ask(tier, [objects[position] for position in positions]) if positions else ()
        for position, is_there in zip(positions, answers or (), strict=False):
            if not is_there:
                high = position
                break
            low = position
    return low + 1
