"""Decides how long a load may continue: as long as it pays.

The regret of a running load is its elapsed time minus the computing time that the delivered tokens save. It is the time
that would be lost, compared with computing everything, if the load stopped now. The load is cut (stopped early) when
its regret exceeds its lowest value so far by `allowance_s`. Until `free_s` the engine computes for other requests, so
that time does not count, and ending earlier would gain nothing. Whatever the links do, a request is late by at most the
allowance and the time that the cut takes, compared with the best possible stop or with no load at all. (Page's test for
a change of drift, Biometrika 1954, used as a stopping rule.)
"""

from typing import NamedTuple


class LoadBudget(NamedTuple):
    """A limit on the loss of a load. The planner sets it, and the core applies it."""

    allowance_s: float
    """Seconds that the load may lose."""
    per_token_s: float
    """Computing time per token, without attention."""
    per_pair_s: float = 0.0
    """Attention time for one pair of tokens."""
    free_s: float = 0.0
    """Seconds from the start of the load during which the engine computes for other requests."""

    def regret_s(self, elapsed_s: float, saved_s: float) -> float:
        """Return the loss if the load ends after `elapsed_s` with tokens that save `saved_s`. A gain is negative."""
        return max(0.0, elapsed_s - self.free_s) - saved_s

    def cut_s(self, lowest_s: float, saved_s: float) -> float:
        """Return how many seconds after its start a load is cut.

        Its tokens so far save `saved_s`, and its lowest regret was `lowest_s`.
        """
        return self.free_s + lowest_s + saved_s + self.allowance_s

    def saved_s(self, start: int, end: int) -> float:
        """Return the computing time that tokens `start` to `end` save."""
        if end <= start:
            return 0.0
        return self.per_token_s * (end - start) + self.per_pair_s * (end * end - start * start) / 2
