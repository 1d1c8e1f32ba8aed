"""How long computing a prompt takes, learned from the engine's steps.

A step costs `a` whatever it does (weights are read, kernels launched), `b` for each token and `c` for each pair of a
token and one before it (attention). The three are fitted to what was seen, none below zero. Steps of about the same
size are kept as one running mean, so that memory is bounded and the thousandth small step does not drown the one large
one; a mean forgets what is older than a few steps of its size.
"""

from collections.abc import Collection, Sequence
from itertools import combinations
from math import sqrt
from typing import NamedTuple

PRIOR_PER_TOKEN_S = 4e-4
"""What is believed before anything was seen: 2,500 tokens a second. That is slow, so that the first load of a process
is given time; what it may lose is bounded all the same."""
PRIOR_STEP_TOKENS = 100
"""A step is believed to cost as much as so many tokens. This, unlike the speed, differs little between machines."""
PRIOR_WEIGHT = 1e-6
"""How little that counts as soon as it can be seen."""
NEWS = 0.25
"""Share of the newest step in the mean of its size."""
OUTLIER = 3.0
"""A step that takes this many times as long as others of its size had another reason; so much of it counts."""
SIZES_MAX = 64
FIT_STEPS = 16
"""A fit takes some 0.2 ms; it serves for so many steps of known sizes."""
SINGULAR = 1e-12
TOKENS_MIN = 16
"""Steps in which no request computes this many tokens are no prefill: their attention is bound by memory."""


class Piece(NamedTuple):
    """One request's share of a step."""

    tokens: int
    """Tokens computed."""
    context_tokens: int
    """Tokens before them, which they attend to."""

    @property
    def pairs(self) -> float:
        """How often one token attends to one before it."""
        return self.tokens * (self.context_tokens + self.tokens / 2)


class PrefillCosts(NamedTuple):
    """Seconds for each step, token and pair."""

    per_step_s: float = PRIOR_STEP_TOKENS * PRIOR_PER_TOKEN_S
    per_token_s: float = PRIOR_PER_TOKEN_S
    per_pair_s: float = 0.0


class _Seen(NamedTuple):
    tokens: float
    pairs: float
    seconds: float


class PrefillEstimator:
    """The speed of one engine."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._costs = PrefillCosts()
        self._news = 0
        """Steps that the costs do not know of."""

    @property
    def costs(self) -> PrefillCosts:
        """What fits best."""
        if self._news >= FIT_STEPS:
            self._costs, self._news = _fitted(self._seen.values()), 0
        return self._costs

    def add(self, pieces: Sequence[Piece], seconds: float) -> None:
        """A step that computed `pieces` took `seconds`. Steps that tell nothing of prefill are left out."""
        if seconds <= 0 or max((piece.tokens for piece in pieces), default=0) < TOKENS_MIN:
            return
        tokens = float(sum(piece.tokens for piece in pieces))
        pairs = sum(piece.pairs for piece in pieces)
        size = (int(tokens).bit_length(), int(pairs).bit_length())
        known = self._seen.pop(size, None)  # and in again at the end, so that the first is the one not seen for longest
        if known is not None:
            # Steps of one size differ by up to two in tokens; per token they can be compared.
            usual_s = known.seconds * max(tokens / known.tokens, pairs / known.pairs)
            news = _Seen(tokens, pairs, min(seconds, OUTLIER * usual_s))
            known = _Seen(*(old + NEWS * (new - old) for old, new in zip(known, news, strict=True)))
        elif len(self._seen) >= SIZES_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[size] = known or _Seen(tokens, pairs, seconds)
        self._news += 1 if known is not None else FIT_STEPS


Matrix = list[list[float]]


def _fitted(seen: Collection[_Seen]) -> PrefillCosts:
    """Non-negative least squares: of three unknowns, every choice of those that may be above zero is tried.

    Each size gives an equation `terms . costs = 1`, what a step should take over what it took: so all count alike. What
    they leave open, because all steps were of about one size, is taken to be as elsewhere, at this engine's speed.
    """
    largest = max(seen, key=lambda one: one.tokens)
    per_token_s = largest.seconds / (PRIOR_STEP_TOKENS + largest.tokens)
    usual = [_Seen(n, n * n / 2, per_token_s * (PRIOR_STEP_TOKENS + n)) for n in (256.0, 8192.0)]
    weighed = [*((one, 1.0) for one in seen), *((one, PRIOR_WEIGHT) for one in usual)]
    equations = [
        (1 / one.seconds, one.tokens / one.seconds, one.pairs / one.seconds, weight) for one, weight in weighed
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
    """The costs that fit best when only those that are `chosen` are not zero; None when that cannot be told."""
    scale = [sqrt(normal[one][one]) for one in chosen]
    table = [
        [normal[one][other] / (by * along) for other, along in zip(chosen, scale, strict=True)] + [normal[one][3] / by]
        for one, by in zip(chosen, scale, strict=True)
    ]
    for pivot, line in enumerate(table):  # Gauss-Jordan; sums of squares need no exchange of lines
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
    """Sum of squares of what the costs leave unexplained, up to a constant."""
    return sum(
        cost * (sum(a * b for a, b in zip(line, costs, strict=False)) - 2 * line[3])
        for line, cost in zip(normal, costs, strict=True)
    )
