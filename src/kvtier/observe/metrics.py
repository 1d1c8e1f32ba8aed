"""Counts events of this process. Engines export the counts with their own metrics (`connect/engine_metrics.py`).

The classes are thread-safe. A lock around a dictionary update costs about a microsecond, and each counted event moves
megabytes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import product
from threading import Lock
from typing import NamedTuple, TypeVar

from kvtier.observe.metric_definitions import METRICS, Metric, MetricKind

_Values = tuple[str, ...]
_Series = TypeVar("_Series")


class Series(NamedTuple):
    """One metric with one set of label values."""

    metric: Metric
    values: tuple[str, ...]
    """Label values, in the order of the metric's labels."""
    number: float
    """The value; for a histogram the sum of its observations."""
    counts: tuple[int, ...] = ()
    """A histogram's observations per bucket, not cumulative; the last count is for all larger values."""


class _Histogram:
    """Observations per bucket, not cumulative; the last count is for all larger values."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)
        self.total = 0.0


class Metrics:
    """The metrics of one session or process.

    Every method raises `ValueError` for metrics and labels that are not in `METRICS`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.changes = 0
        """Increases with every count. Setting a gauge does not change it."""
        self._numbers: dict[str, dict[_Values, float]] = {}
        self._histograms: dict[str, dict[_Values, _Histogram]] = {}
        for metric in METRICS:
            # All possible series exist from the start, at zero. If a series appeared with its first event, its rate
            # would miss this event.
            closed = [label.values for label in metric.labels if label.values is not None]
            known = list(product(*closed)) if len(closed) == len(metric.labels) else []
            if metric.kind is MetricKind.HISTOGRAM:
                self._histograms[metric.name] = {values: _Histogram(len(metric.buckets)) for values in known}
            else:
                self._numbers[metric.name] = dict.fromkeys(known, 0.0)

    def bind(self, metric: Metric, **labels: str) -> "Bound":
        """Check a series once and return it, for code that counts often."""
        with self._lock:
            values = self._values(metric, labels)
            if metric.kind is MetricKind.HISTOGRAM:
                return Bound(self, self._lock, metric, values, histograms=self._series(self._histograms, metric))
            return Bound(self, self._lock, metric, values, numbers=self._series(self._numbers, metric))

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` to a counter or gauge. A counter cannot decrease."""
        self.bind(metric, **labels).add(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.bind(metric, **labels).set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        self.bind(metric, **labels).observe(value)

    def count(self, amounts: Iterable[tuple["Bound", float]]) -> None:
        """Add to counters, gauges and histograms under one lock, for code that runs for each object."""
        with self._lock:
            for bound, amount in amounts:
                if bound.numbers is not None:
                    bound.numbers[bound.values] = bound.numbers.get(bound.values, 0.0) + amount
                elif bound.histograms is not None:
                    histogram = bound.histograms.get(bound.values)
                    if histogram is None:
                        histogram = bound.histograms[bound.values] = _Histogram(len(bound.metric.buckets))
                    histogram.counts[bisect_left(bound.metric.buckets, amount)] += 1
                    histogram.total += amount
            self.changes += 1

    def get(self, metric: Metric, **labels: str) -> float:
        """Return a counter's or gauge's value, or a histogram's number of observations. It is 0 before any event."""
        with self._lock:
            values = self._values(metric, labels)
            if metric.kind is MetricKind.HISTOGRAM:
                histogram = self._series(self._histograms, metric).get(values)
                return float(sum(histogram.counts)) if histogram else 0.0
            return self._series(self._numbers, metric).get(values, 0.0)

    def series(self) -> list[Series]:
        """Return all series."""
        with self._lock:
            found = [
                Series(metric, values, number)
                for metric in METRICS
                for values, number in self._numbers.get(metric.name, {}).items()
            ]
            for metric in METRICS:
                for values, histogram in self._histograms.get(metric.name, {}).items():
                    found.append(Series(metric, values, histogram.total, tuple(histogram.counts)))
        return found

    def _series(self, kind: dict[str, _Series], metric: Metric) -> _Series:
        if metric.name not in kind:
            raise ValueError(f"{metric.name} is not in the table of metrics")
        return kind[metric.name]

    def _values(self, metric: Metric, labels: Mapping[str, str]) -> _Values:
        if len(labels) != len(metric.labels) or any(label.name not in labels for label in metric.labels):
            wanted = ", ".join(label.name for label in metric.labels) or "none"
            raise ValueError(f"{metric.name} has labels {wanted}; got {', '.join(labels) or 'none'}")
        for label in metric.labels:
            if label.values is not None and labels[label.name] not in label.values:
                allowed = ", ".join(label.values)
                raise ValueError(f"{metric.name}: label {label.name} = {labels[label.name]!r}; allowed: {allowed}")
        return tuple([labels[label.name] for label in metric.labels])


class Bound:
    """One metric with one set of label values, from `Metrics.bind`.

    Methods that do not fit the metric's kind raise `ValueError`.
    """

    __slots__ = ("_lock", "_metrics", "histograms", "metric", "numbers", "values")

    def __init__(
        self,
        metrics: Metrics,
        lock: Lock,
        metric: Metric,
        values: _Values,
        *,
        numbers: dict[_Values, float] | None = None,
        histograms: dict[_Values, _Histogram] | None = None,
    ) -> None:
        self._metrics = metrics
        self._lock = lock
        self.metric = metric
        self.values = values
        self.numbers = numbers
        self.histograms = histograms

    def add(self, amount: float = 1.0) -> None:
        """Add to a counter or gauge."""
        if self.numbers is None or (amount < 0 and self.metric.kind is MetricKind.COUNTER):
            raise ValueError(f"{self.metric.name} is a {self.metric.kind.value}; cannot add {amount}")
        with self._lock:
            self.numbers[self.values] = self.numbers.get(self.values, 0.0) + amount
            self._metrics.changes += amount != 0

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self.numbers is None or self.metric.kind is not MetricKind.GAUGE:
            raise ValueError(f"{self.metric.name} is a {self.metric.kind.value}, not a gauge")
        with self._lock:
            self.numbers[self.values] = float(value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        if self.histograms is None:
            raise ValueError(f"{self.metric.name} is a {self.metric.kind.value}, not a histogram")
        self._metrics.count(((self, value),))
