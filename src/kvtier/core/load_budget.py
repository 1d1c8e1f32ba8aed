"""How long a load may go on: as long as it pays.

While a load runs, its regret is the time it has taken, less the time that computing the delivered tokens would have
taken. That is what would be lost, against computing everything, if it were stopped now. The load is cut when its regret
is more than `allowance_s` above the lowest it has been. Time counts only from `free_s` on: until then the engine
computes for others, and a load that ends earlier gains nothing. So the request is never later, by more than the
allowance and the time that a cut takes, than if the load had been stopped at the best moment of all, the one before it
began included. This holds whatever the links do. (Page's test for a change of drift, Biometrika 1954, as a rule for
stopping.)
"""

from typing import NamedTuple


class LoadBudget(NamedTuple):
    """What a load is worth; made by the planner, kept by the core."""

    allowance_s: float
    """Seconds that may be lost."""
    per_token_s: float
    """Computing a token, without its attention to the tokens before it."""
    per_pair_s: float = 0.0
    """Attention of one token to one before it."""
    free_s: float = 0.0
    """Seconds from the load's beginning in which the engine computes for others."""

    def regret_s(self, elapsed_s: float, saved_s: float) -> float:
        """What is lost if the load ends after `elapsed_s` with tokens that spare `saved_s`; below zero: gained."""
        return max(0.0, elapsed_s - self.free_s) - saved_s

    def cut_s(self, lowest_s: float, saved_s: float) -> float:
        """How long the load may take while its tokens spare `saved_s` and its regret was `lowest_s` at its lowest."""
        return self.free_s + lowest_s + saved_s + self.allowance_s

    def saved_s(self, start: int, end: int) -> float:
        """Seconds of computing that tokens `start` to `end` spare once they are there."""
        if end <= start:
            return 0.0
        return self.per_token_s * (end - start) + self.per_pair_s * (end * end - start * start) / 2
