"""How much of what can be reused is still there, as a function of how long a tier keeps it.

Under LRU a tier keeps what it is not asked for during about the same time T, its residence time (Denning's working
set, 1968; Che, Tung, Wang, "Hierarchical Web Caching Systems", 2002: the approximation of one characteristic time).
Then a reuse after a pause g is found when g <= T, and each use occupies the tier for min(g, T), or for T when nothing
reuses it. Capacity decides T, and T decides the hits: one curve serves all tiers and any number of users.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_STEPS = 600
_CV_LEAST = 1e-3
"""Below it every pause is the same, for all a plan can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCurve:
    """Found share and occupation by residence time, as a table between whose lines is interpolated."""

    residence_s: tuple[float, ...]
    """Rising."""
    found: tuple[float, ...]
    """Share of reuses that come within it, 0 to 1, never falling."""
    held_token_s: tuple[float, ...]
    """Token-seconds that one request occupies, never falling: times requests a second, that is the tokens held."""

    def found_within(self, residence_s: float) -> float:
        """Share of reuses that come within so many seconds."""
        return _interpolate(self.residence_s, self.found, residence_s)

    def tokens_held(self, residence_s: float, requests_per_s: float) -> float:
        """Tokens that a tier holds which keeps everything for so long."""
        return requests_per_s * _interpolate(self.residence_s, self.held_token_s, residence_s)

    def residence(self, capacity_tokens: float, requests_per_s: float) -> float:
        """How long a tier of that capacity keeps what it is not asked for, in seconds."""
        return _interpolate(self.held_token_s, self.residence_s, capacity_tokens / requests_per_s)

    def residence_for(self, share: float) -> float:
        """The shortest residence time, in seconds, within which that share of the reuses comes."""
        place = next((n for n, found in enumerate(self.found) if found >= share), len(self.found) - 1)
        if place == 0 or self.found[place] == self.found[place - 1]:
            return self.residence_s[place]
        part = (share - self.found[place - 1]) / (self.found[place] - self.found[place - 1])
        return self.residence_s[place - 1] + min(part, 1.0) * (self.residence_s[place] - self.residence_s[place - 1])


def lognormal_curve(mean_s: float, cv: float, *, tokens: float, last_share: float) -> ReuseCurve:
    """The curve of conversations whose pauses are log-normal.

    Measured pauses are: Mooncake's conversation trace has 114, 519 and 1,578 s at 50, 90 and 99 %, which is a
    log-normal distribution with sigma 1.15 to 1.18, a coefficient of variation of 1.7.

    Args:
        mean_s: mean pause between two queries of a conversation.
        cv: standard deviation over mean of the pauses; 0 means all the same.
        tokens: what a request occupies.
        last_share: share of requests that are the last of their conversation: what they occupy is never reused.
    """
    if cv < _CV_LEAST:
        times = [*_grid(mean_s * 1e-3, mean_s * (1 - 1e-9), _STEPS // 2), *_grid(mean_s, mean_s * 1e7, _STEPS // 2)]
        found = [1.0 if time >= mean_s else 0.0 for time in times]
        live = [min(time, mean_s) for time in times]
    else:
        sigma = math.sqrt(math.log1p(cv * cv))
        pauses, shifted = NormalDist(math.log(mean_s) - sigma**2 / 2, sigma), NormalDist(0.0, 1.0)
        times = _grid(mean_s * 1e-5, mean_s * 1e7, 2 * _STEPS)
        found = [pauses.cdf(math.log(time)) for time in times]
        # E[min(g, T)] of a log-normal g: its mean below T, and T where g is longer.
        live = [
            mean_s * shifted.cdf((math.log(time) - pauses.mean - sigma**2) / sigma) + time * (1 - share)
            for time, share in zip(times, found, strict=True)
        ]
    held = [tokens * ((1 - last_share) * stay + last_share * time) for time, stay in zip(times, live, strict=True)]
    return ReuseCurve(residence_s=(0.0, *times), found=(0.0, *found), held_token_s=(0.0, *held))


def _grid(least: float, most: float, count: int) -> list[float]:
    step = (most / least) ** (1 / (count - 1))
    return [least * step**n for n in range(count - 1)] + [most]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x` on straight lines between the points; at the ends, that of the end."""
    place = bisect_right(xs, x)
    if place == 0:
        return ys[0]
    if place == len(xs):
        return ys[-1]
    part = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + part * (ys[place] - ys[place - 1])
