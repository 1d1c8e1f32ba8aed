"""The best split of a prompt into what is loaded and what is computed, by trying every one of them."""

from collections.abc import Iterable
from typing import NamedTuple

from kvtier.replay.cost import Prefill


class Split(NamedTuple):
    """How a prompt can be served soonest."""

    chunks: int
    """Leading chunks that are loaded."""
    seconds: float


def best_split(
    arrivals_s: Iterable[float], *, chunk_tokens: int, input_tokens: int, ahead_s: float, prefill: Prefill
) -> Split:
    """The best of all splits.

    Args:
        arrivals_s: for each leading chunk that can be loaded, seconds from now until it and all before it are there.
        chunk_tokens: tokens of each.
        input_tokens: of the prompt.
        ahead_s: seconds until the engine can begin with this prompt.
        prefill: what computing takes.
    """
    best = Split(0, ahead_s + prefill.seconds(0, input_tokens))
    for chunks, arrival_s in enumerate(arrivals_s, 1):
        seconds = max(arrival_s, ahead_s) + prefill.seconds(min(chunks * chunk_tokens, input_tokens), input_tokens)
        if seconds < best.seconds:
            best = Split(chunks, seconds)
    return best
