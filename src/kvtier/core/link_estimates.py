"""How fast the links are, by watching what goes over them.

A link is told as two numbers: how long the first objects of a burst take, and how many bytes a second follow them. Both
are seen directly, so nothing has to be fitted: a burst begins when an idle link is given work, what travels side by
side with its first object comes together with it, and the flow is what comes after that. Bad news is believed at once;
of good news and what was believed, the geometric mean. So a plan counts on what a link does on its worse days, and one
good look at a link that was bad is half the way back.

Nothing is known of a link that nobody used. It is then believed to be fast, because only a try can tell; unless
somebody has measured it before (`LinkPrior`).
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

UNKNOWN_BYTES_PER_S = 20e9
UNKNOWN_FIRST_S = 1e-3
LOOK_S = 0.25
"""A link that is never idle is looked at this often."""
INSTANT_S = 1e-6
TOGETHER = 0.5
"""What comes within this share of the first wait has come together with the first object."""


class LinkPrior(NamedTuple):
    """What is believed of a link before anything went over it; as in `LinkEstimator`."""

    first_s: float
    first_bytes: int
    bytes_per_s: float


@dataclass(slots=True)
class LinkEstimator:
    """One link."""

    first_s: float = UNKNOWN_FIRST_S
    """How long the first objects of a burst take."""
    first_bytes: int = 0
    """How much comes together then."""
    bytes_per_s: float = UNKNOWN_BYTES_PER_S
    """How fast a burst goes on after that."""
    lead_s: float = 0.0
    """How long it takes until a load has what it can use: its first chunk, which need not come first."""
    is_known: bool = False
    out: int = 0
    out_bytes: int = 0
    """What is on its way."""
    _knows_flow: bool = field(default=False, init=False)
    _is_waiting: bool = field(default=False, init=False)
    """Nothing of this burst has come yet."""
    _moved_s: float = field(default=0.0, init=False)
    """When something came last, or the burst began."""
    _together_until_s: float = field(default=0.0, init=False)
    _together_bytes: int = field(default=0, init=False)
    _flow_since_s: float = field(default=0.0, init=False)
    _flow_bytes: int = field(default=0, init=False)

    @classmethod
    def from_prior(cls, belief: LinkPrior | None) -> "LinkEstimator":
        """A link of which `belief` says what to expect, until it is seen; None: nothing is known."""
        if belief is None:
            return cls()
        estimator = cls(first_s=belief.first_s, first_bytes=belief.first_bytes, bytes_per_s=belief.bytes_per_s)
        estimator.is_known = estimator._knows_flow = True
        return estimator

    def began(self, size_bytes: int, now_s: float) -> None:
        """An object is on its way."""
        if not self.out:
            self._is_waiting = True
            self._flow_since_s = self._moved_s = now_s
        self.out += 1
        self.out_bytes += size_bytes

    def ended(self, size_bytes: int, now_s: float, *, is_moved: bool) -> None:
        """It has arrived, or will not: failed, cancelled, absent."""
        self.out -= 1
        self.out_bytes -= size_bytes
        if is_moved:
            self._moved(size_bytes, now_s)
        elif self._is_waiting and not self.out:
            # Given up. It would have taken longer than this, and this may be news.
            self._update_first(max(self.first_s, now_s - self._moved_s))

    def seconds(self, size_bytes: int, queue_bytes: int, now_s: float) -> tuple[float, float]:
        """Expected seconds until some of `size_bytes` more is of use, and until all have come.

        Args:
            size_bytes: what would be added.
            queue_bytes: what comes before it, whether on its way or not yet.
            now_s: the time.
        """
        first_s = self.first_s
        if self.out:
            # What has not come for a while will not come at once either: as long again, for want of a better guess.
            first_s = max(first_s, now_s - self._moved_s)
        queue_s = queue_bytes / self.bytes_per_s
        flow_s = max(0, size_bytes - self.first_bytes) / self.bytes_per_s
        lead_s = max(first_s, self.lead_s)
        return queue_s + lead_s, queue_s + max(lead_s, first_s + flow_s)

    def record_lead(self, seconds: float, *, has_come: bool) -> None:
        """A load that had the link to itself had its first chunk after so long, or gave up then."""
        seconds = seconds if has_come else max(seconds, self.lead_s)
        self.lead_s = max(seconds, sqrt(self.lead_s * seconds))

    def _moved(self, size_bytes: int, now_s: float) -> None:
        if self._is_waiting:
            wait_s = now_s - self._moved_s
            self._update_first(wait_s)
            self._is_waiting = False
            self._flow_since_s, self._flow_bytes = now_s, 0
            self._together_until_s, self._together_bytes = now_s + TOGETHER * wait_s, 0
        if now_s <= self._together_until_s:
            self._together_bytes += size_bytes
            self.first_bytes = max(self.first_bytes, self._together_bytes)
            if not self._knows_flow:
                self.bytes_per_s = self.first_bytes / self.first_s  # at least, if the next take as long as these
        else:
            self._flow_bytes += size_bytes
            self.first_bytes = self._together_bytes  # no more than that, though there was more on its way
            flow_s = now_s - self._flow_since_s
            # Less than what travels side by side, or a shorter time than it takes, tells nothing of how it goes on.
            if self._flow_bytes >= self.first_bytes and flow_s >= self.first_s and (not self.out or flow_s >= LOOK_S):
                self._update_flow(self._flow_bytes / flow_s)
                self._flow_since_s, self._flow_bytes = now_s, 0
        self._moved_s = now_s

    def _update_first(self, seconds: float) -> None:
        seconds = max(seconds, INSTANT_S)
        self.first_s = max(seconds, sqrt(self.first_s * seconds)) if self.is_known else seconds
        self.is_known = True

    def _update_flow(self, bytes_per_s: float) -> None:
        usual = sqrt(self.bytes_per_s * bytes_per_s) if self._knows_flow else bytes_per_s
        self.bytes_per_s = min(bytes_per_s, usual)
        self._knows_flow = True
