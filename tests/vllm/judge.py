"""When two answers are the same, and how far apart they are when not."""

import math
import random
from collections.abc import Sequence

from harness import Answer
from models import FIRST_TOKEN, VOCABULARY

TOLERANCE = 1e-4
"""Of log probabilities, with float32: what another order of additions changes (measured: 5e-6 at most)."""

ALLOWED = {"qwen3-next": 0.1}
"""For a model that runs with bfloat16 only. A prompt that is computed in another number of pieces differs in the last
bits there; so it does in vLLM without us."""


def prompt(count: int, seed: int) -> list[int]:
    """Tokens without a special meaning."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def apart(one: Answer, other: Answer) -> float:
    """The largest difference of a top-5 log probability; infinity when the tokens differ.

    A token that only one side lists counts as if the other had it just below its last.
    """
    if one.tokens != other.tokens or len(one.logprobs) != len(other.logprobs):
        return math.inf
    worst = 0.0
    for row, other_row in zip(one.logprobs, other.logprobs, strict=True):
        left, right = dict(row), dict(other_row)
        for token in left.keys() | right.keys():
            difference = left.get(token, min(left.values())) - right.get(token, min(right.values()))
            worst = max(worst, abs(difference))
    return worst


def is_same(model: str, answer: Answer, wanted: Answer) -> bool:
    """Whether nothing differs but what the order of additions changes."""
    return apart(answer, wanted) <= ALLOWED.get(model, TOLERANCE)


def furthest(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest distance of all pairs."""
    return max(apart(one, other) for one, other in zip(answers, others, strict=True))
