"""Step functions over time: how many requests are in flight, and how fast bytes move, exactly and without sampling."""

from typing import Self

import numpy as np

INSTANT_S = 1e-6
"""Duration of a request whose source has none, or less."""


class Steps:
    """A quantity that changes at moments and is constant between them.

    Args:
        begin: when each contribution begins, in seconds.
        end: when it ends.
        weight: how much it adds in between.
    """

    def __init__(self, begin: np.ndarray, end: np.ndarray, weight: np.ndarray) -> None:
        times = np.concatenate([begin, end])
        change = np.concatenate([weight, -weight]).astype(np.float64)
        # At the same moment what ends goes first: a request that is issued when another completes does not overlap it.
        order = np.lexsort((change, times))
        self._times = times[order]
        self._values = np.cumsum(change[order])
        spans = np.diff(self._times)
        self._integral = np.concatenate([[0.0], np.cumsum(self._values[:-1] * spans)]) if len(times) else np.zeros(0)
        self._spans = spans

    @classmethod
    def depth(cls, rows: np.ndarray) -> Self:
        """Requests in flight; those without completion are left out."""
        rows = rows[~np.isnan(rows["completed_s"])]
        return cls(rows["issued_s"], _end(rows), np.ones(len(rows)))

    @classmethod
    def rate(cls, rows: np.ndarray) -> Self:
        """Bytes per second: each request moves its bytes evenly from issue to completion."""
        end = _end(rows)
        return cls(rows["issued_s"], end, rows["bytes"] / (end - rows["issued_s"]))

    @property
    def peak(self) -> float:
        """The highest value at any moment."""
        return float(self._values.max()) if len(self._values) else 0.0

    @property
    def busy_s(self) -> float:
        """How long the quantity was above 0, in seconds."""
        return float(self._spans[self._values[:-1] > 0.5].sum()) if len(self._values) else 0.0

    @property
    def total(self) -> float:
        """The integral over all time."""
        return float(self._integral[-1]) if len(self._integral) else 0.0

    def means(self, edges: np.ndarray) -> np.ndarray:
        """The mean value between each pair of neighbouring `edges`, in seconds."""
        if not len(self._times):
            return np.zeros(len(edges) - 1)
        return np.diff(np.interp(edges, self._times, self._integral)) / np.diff(edges)


def _end(rows: np.ndarray) -> np.ndarray:
    end = np.where(np.isnan(rows["completed_s"]), rows["issued_s"], rows["completed_s"])
    return np.maximum(end, rows["issued_s"] + INSTANT_S)
