"""Sums over time: what passed, waited or was asked for in each second."""

from array import array

import numpy as np
import numpy.typing as npt

SPAN_MAX_S = 10_000_000
"""What comes later counts for the last second: eight bytes are kept for each."""


class Series:
    """A sum for each second, from 0."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = array("d")

    def add(self, start_s: float, end_s: float, amount: float) -> None:
        """Spread `amount` evenly over the time from `start_s` to `end_s`."""
        first, last = int(start_s), int(end_s)
        sums = self._sums
        if last >= len(sums):
            if last >= SPAN_MAX_S:
                first, last, end_s = min(first, SPAN_MAX_S - 1), SPAN_MAX_S - 1, start_s
            sums.frombytes(bytes(8 * max(0, last + 1 - len(sums))))
        if first == last or end_s <= start_s:
            sums[first] += amount
            return
        rate = amount / (end_s - start_s)
        sums[first] += (first + 1 - start_s) * rate
        for second in range(first + 1, last):
            sums[second] += rate
        sums[last] += (end_s - last) * rate

    @property
    def span_s(self) -> float:
        """From 0 to the end of the last second in which something was added."""
        return float(len(self._sums))

    @property
    def peak(self) -> float:
        """The largest sum of a second."""
        return max(self._sums, default=0.0)

    def parts(self, span_s: float, count: int) -> npt.NDArray[np.float64]:
        """The mean of a second in each of `count` equal parts of the time from 0 to `span_s`.

        What was added in a second counts as spread evenly over it.
        """
        total = np.concatenate([[0.0], np.cumsum(np.frombuffer(self._sums, np.float64))])
        edges = np.linspace(0.0, span_s, count + 1)
        within = np.interp(edges, np.arange(len(total)), total)
        return np.diff(within) * (count / max(span_s, 1e-9))
