"""Estimates how long computing a prompt takes, from the measured times of the engine's steps.

A step costs `a` (reading weights, launching kernels), `b` for each token and `c` for each pair of tokens (attention).
The three costs are fitted to measured steps and are never negative. Steps of about equal size are kept as one moving
average. This bounds memory, and a thousand small steps do not outweigh one large step.
"""

from collections.abc import Collection, Sequence
from itertools import combinations
from math import sqrt
from typing import NamedTuple

PRIOR_PER_TOKEN_S = 4e-4
"""Estimate before the first measurement: 2,500 tokens per second. This speed is low so that the first load of a process
gets enough time. The loss of that load is bounded anyway.
"""
PRIOR_STEP_TOKENS = 100
"""The fixed cost of a step is assumed to equal the cost of this many tokens. Unlike speed, this number differs little
between machines.
"""
PRIOR_WEIGHT = 1e-6
"""Weight of `PRIOR_STEP_TOKENS` relative to measurements."""
NEWEST_SHARE = 0.25
"""Weight of the newest step in the average of its size."""
OUTLIER_FACTOR = 3.0
"""The time of a step is clipped to this many times the average for its size."""
SIZES_MAX = 64
FIT_STEPS = 16
"""Steps of known sizes between two fits. A fit takes about 0.2 ms."""
SINGULAR = 1e-12
TOKENS_MIN = 16
"""A step in which no request computes this many tokens does not count as prefill: its attention is memory-bound."""


class Piece(NamedTuple):
    """One request's share of a step."""

    tokens: int
    """Number of tokens computed."""
    context_tokens: int
    """Number of earlier tokens, to which the computed ones attend."""

    @property
    def pairs(self) -> float:
        """Number of token pairs in attention."""
        return self.tokens * (self.context_tokens + self.tokens / 2)


class PrefillCosts(NamedTuple):
    """Seconds per step, per token and per pair of tokens."""

    per_step_s: float = PRIOR_STEP_TOKENS * PRIOR_PER_TOKEN_S
    per_token_s: float = PRIOR_PER_TOKEN_S
    per_pair_s: float = 0.0


class _Average(NamedTuple):
    tokens: float
    pairs: float
    seconds: float


class PrefillEstimator:
    """Estimates the prefill speed of one engine."""

    def __init__(self) -> None:
        self._averages: dict[tuple[int, int], _Average] = {}
        self._costs = PrefillCosts()
        self._news = 0
        """Steps since the last fit. A step of a new size counts as `FIT_STEPS`."""

    @property
    def costs(self) -> PrefillCosts:
        """The fitted costs."""
        if self._news >= FIT_STEPS:
            self._costs, self._news = _fitted(self._averages.values()), 0
        return self._costs

    def add(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Add a step that computed `pieces` in `seconds`. A step without prefill is ignored."""
        if seconds <= 0 or max((piece.tokens for piece in pieces), default=0) < TOKENS_MIN:
            return
        tokens = float(sum(piece.tokens for piece in pieces))
        pairs = sum(piece.pairs for piece in pieces)
        size = (int(tokens).bit_length(), int(pairs).bit_length())
        known = self._averages.pop(size, None)  # re-added at the end, so that the first entry is the least recent
        if known is not None:
            # Steps of one size differ by a factor of up to two in tokens, so they are compared per token.
            usual_s = known.seconds * max(tokens / known.tokens, pairs / known.pairs)
            news = _Average(tokens, pairs, min(seconds, OUTLIER_FACTOR * usual_s))
            known = _Average(*(old + NEWEST_SHARE * (new - old) for old, new in zip(known, news, strict=True)))
        elif len(self._averages) >= SIZES_MAX:
            del self._averages[next(iter(self._averages))]
        self._averages[size] = known or _Average(tokens, pairs, seconds)
        self._news += 1 if known is not None else FIT_STEPS


Matrix = list[list[float]]


def _fitted(averages: Collection[_Average]) -> PrefillCosts:
    """Fit the costs by non-negative least squares: try every subset of the three costs as the positive ones.

    Each size gives an equation `terms . costs = 1`. Its left side is the estimate divided by the measurement, so all
    sizes have equal weight. If steps of few sizes do not determine the costs, two made-up steps do: they have the
    default ratio of costs and this engine's speed.
    """
    largest = max(averages, key=lambda one: one.tokens)
    per_token_s = largest.seconds / (PRIOR_STEP_TOKENS + largest.tokens)
    usual = [_Average(n, n * n / 2, per_token_s * (PRIOR_STEP_TOKENS + n)) for n in (256.0, 8192.0)]
    weighted_steps = [*((one, 1.0) for one in averages), *((one, PRIOR_WEIGHT) for one in usual)]
    equations = [
        (1 / one.seconds, one.tokens / one.seconds, one.pairs / one.seconds, weight) for one, weight in weighted_steps
    ]
    normal: Matrix = [[0.0] * 4 for _ in range(3)]
    for *terms, weight in equations:
        for line, term in zip(normal, terms, strict=True):
            weighted = weight * term
            for column, other in enumerate((*terms, 1.0)):
                line[column] += weighted * other
    choices = [chosen for count in (1, 2, 3) for chosen in combinations(range(3), count)]
    fits = [fit for fit in (_solved(normal, chosen) for chosen in choices) if fit is not None and min(fit) >= 0]
    return min(fits, key=lambda fit: _error(normal, fit), default=PrefillCosts())


def _solved(normal: Matrix, chosen: Sequence[int]) -> PrefillCosts | None:
    """Return the best costs of which only the `chosen` ones differ from 0; None if the steps do not determine them."""
    scale = [sqrt(normal[one][one]) for one in chosen]
    table = [
        [normal[one][other] / (by * along) for other, along in zip(chosen, scale, strict=True)] + [normal[one][3] / by]
        for one, by in zip(chosen, scale, strict=True)
    ]
    for pivot, line in enumerate(table):  # Gauss-Jordan; sums of squares need no pivoting
        if line[pivot] < SINGULAR:
            return None
        for number, other in enumerate(table):
            if number != pivot:
                factor = other[pivot] / line[pivot]
                table[number] = [a - factor * b for a, b in zip(other, line, strict=True)]
    costs = [0.0, 0.0, 0.0]
    for number, one in enumerate(chosen):
        costs[one] = table[number][-1] / table[number][number] / scale[number]
    return PrefillCosts(*costs)


def _error(normal: Matrix, costs: PrefillCosts) -> float:
    """Return the sum of squared residuals, up to a constant."""
    return sum(
        cost * (sum(a * b for a, b in zip(line, costs, strict=False)) - 2 * line[3])
        for line, cost in zip(normal, costs, strict=True)
    )
