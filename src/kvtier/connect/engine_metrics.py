"""Exports kvtier's metrics in an engine's `/metrics`. In vLLM one process counts them, and another exports them.

The first process sends plain values to the second: for each metric of `observe.metric_definitions` and set of label
values, the increase since the last report. In `/metrics` the names have the engine's prefix, such as ``vllm:``.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from kvtier.observe.metric_definitions import CAPACITY_BYTES, LOOKUPS, METRICS, Metric, MetricKind
from kvtier.observe.metrics import Metrics, Series
from kvtier.types import Presence

INTERVAL_S = 0.25
"""Seconds between two reports. A report per step would be most of the traffic between the processes."""

FIRST_S = 2.0
"""Maximum seconds for which a new engine takes empty steps to report its gauges. The session sets the gauges in the
first second."""

LABEL_SEPARATOR = "\x1f"

Row = list[float]
"""The numbers of one series: a single value, or a histogram's sum and then its number of observations per bucket."""

_ADD = {MetricKind.COUNTER: "inc", MetricKind.GAUGE: "set", MetricKind.HISTOGRAM: "observe"}
"""The method of a `prometheus_client` metric that takes a value, by kind of metric."""

_BY_NAME = {metric.name: metric for metric in METRICS}


class Stats:
    """Metrics of one interval, with the interface of vLLM's `KVConnectorStats`.

    Args:
        data: the increase, or a gauge's value, by metric name and then by label values joined with `LABEL_SEPARATOR`.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, dict[str, Row]] = data or {}

    def to_dict(self) -> dict[str, Any]:
        """Return the data to send."""
        return self.data

    def reset(self) -> None:
        """Remove all data."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return whether there is no data."""
        return not self.data

    def aggregate(self, other: "Stats") -> "Stats":
        """Add the metrics of a later interval. Gauges take its values. Return these stats."""
        for name, rows in other.data.items():
            is_gauge = _BY_NAME[name].kind is MetricKind.GAUGE
            mine = self.data.setdefault(name, {})
            for labels, row in rows.items():
                before = [0.0] * len(row) if is_gauge else mine.get(labels, [0.0] * len(row))
                mine[labels] = [a + b for a, b in zip(before, row, strict=True)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures that vLLM writes to its log."""
        return {
            "loaded tokens": self._total("kvtier_load_tokens_total"),
            "stored chunks": self._total("kvtier_store_chunks_total", "held"),
            "dropped chunks": self._total("kvtier_store_chunks_total", "dropped"),
            "moved MB": round(self._total("kvtier_transfer_bytes_total") / 1e6, 1),
        }

    def _total(self, name: str, labels: str | None = None) -> float:
        rows = self.data.get(name, {})
        return sum(row[0] for values, row in rows.items() if labels in (None, values))


class StatsReader:
    """Reads the increase of the session's metrics, at most once per `INTERVAL_S`.

    Args:
        metrics: the session's metrics.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[tuple[str, str], Row] = {}
        self._next_s = 0.0
        self._changes = metrics.changes
        self._first_until_s: float | None = time.monotonic() + FIRST_S

    def hurry(self) -> bool:
        """Return whether an idle engine should take an empty step to report changed metrics.

        If so, the next `take` ignores the interval. Otherwise the engine would take hundreds of empty steps before the
        interval ends. A new engine takes empty steps until the session has set its gauges. Without these steps,
        `/metrics` would lack the gauges until the first request.
        """
        if self._first_until_s is not None and time.monotonic() > self._first_until_s:
            self._first_until_s = None
        has_news = self._first_until_s is not None or self._metrics.changes != self._changes
        if has_news:
            self._next_s = 0.0
        return has_news

    def take(self) -> Stats | None:
        """Return the increase since the last call; None if nothing changed or the interval has not ended."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        self._changes = self._metrics.changes
        stats = Stats()
        for series in self._metrics.series():
            row = self._increase(series)
            if row is not None:
                stats.data.setdefault(series.metric.name, {})[LABEL_SEPARATOR.join(series.values)] = row
        if CAPACITY_BYTES.name in stats.data:
            self._first_until_s = None
        return None if stats.is_empty() else stats

    def _increase(self, series: Series) -> Row | None:
        place = (series.metric.name, LABEL_SEPARATOR.join(series.values))
        row = [series.number, *series.counts]
        before = self._before.get(place)
        if row == before:
            return None
        self._before[place] = row
        # Report a new series even if it is zero. Prometheus sees no increase in a series that begins above zero, and
        # the gauge of a tier that is down from the start must appear as 0.
        if before is None or series.metric.kind is MetricKind.GAUGE:
            return row
        return [a - b for a, b in zip(row, before, strict=True)]


class PromMetrics:
    """Exports `Stats` as Prometheus metrics, with the interface of vLLM's `KVConnectorPromMetrics`.

    Args:
        types: metric classes to use, by the class of `prometheus_client` that each replaces.
        labels: names of vLLM's own labels.
        values: values of vLLM's own labels, per engine.
        prefix: prefix of the exported names.
    """

    def __init__(
        self,
        types: Mapping[Any, Any],
        labels: Sequence[str],
        values: Mapping[int, Sequence[object]],
        prefix: str = "vllm:",
    ) -> None:
        kinds = {kind.__name__.lower(): made for kind, made in types.items()}
        self._values = values
        self._exported = {
            metric.name: _exported(metric, kinds[metric.kind.value], labels, prefix) for metric in METRICS
        }
        # An engine whose kvtier is off from the start reports nothing. Export zero lookups, so that an alert can fire.
        for presence, own in product(Presence, values.values()):
            self._exported[LOOKUPS.name].labels(*own, presence.value)

    def observe(self, transfer_stats_data: dict[str, dict[str, Row]], engine_idx: int = 0) -> None:
        """Add an engine's metrics of one interval."""
        for metric, own, changes in changes_of(transfer_stats_data):
            series = self._exported[metric.name].labels(*self._values[engine_idx], *own)
            for value in changes:
                getattr(series, _ADD[metric.kind])(value)


def changes_of(data: Mapping[str, Mapping[str, Row]]) -> Iterator[tuple[Metric, tuple[str, ...], list[float]]]:
    """For each series, yield its metric, the values of the metric's own labels, and a list.

    The list contains the increase of a counter, the value of a gauge, or the observations of a histogram.
    """
    for name, rows in data.items():
        metric = _BY_NAME[name]
        for labels, row in rows.items():
            own = tuple(labels.split(LABEL_SEPARATOR)) if metric.labels else ()
            yield metric, own, observations(metric, row) if metric.kind is MetricKind.HISTOGRAM else row[:1]


def exported_name(metric: Metric, prefix: str = "vllm:") -> str:
    """Return the metric's name in `/metrics`."""
    return f"{prefix}{metric.name.removesuffix('_total')}"


def observations(metric: Metric, row: Row) -> list[float]:
    """Return single values that together have the bucket counts and the sum of `row`.

    They are necessary because a Prometheus histogram accepts only single values. All values lie at the same fraction of
    their bucket's width.
    """
    total, counts = row[0], [int(count) for count in row[1:]]
    lows = (0.0, *metric.buckets)
    # The last bucket has no upper bound. Its width is the part of the sum above all lower bounds, divided by its count.
    rest = (total - sum(count * low for count, low in zip(counts, lows, strict=True))) / max(counts[-1], 1)
    widths = [high - low for low, high in zip(lows, metric.buckets, strict=False)]
    widths.append(max(rest, 0.0))
    lowest = sum(count * low for count, low in zip(counts, lows, strict=True))
    spread = sum(count * width for count, width in zip(counts, widths, strict=True))
    share = min(max((total - lowest) / spread, 1e-9), 1.0) if spread > 0 else 1.0
    return [low + share * width for count, low, width in zip(counts, lows, widths, strict=True) for _ in range(count)]


def _exported(metric: Metric, made: Any, labels: Sequence[str], prefix: str) -> Any:  # noqa: ANN401 - a metric of prometheus_client
    more: dict[str, Any] = {"buckets": metric.buckets} if metric.kind is MetricKind.HISTOGRAM else {}
    if metric.kind is MetricKind.GAUGE:
        # A server may have several processes, and an engine reports each change to one of them. Use the latest value.
        more = {"multiprocess_mode": "mostrecent"}
    return made(
        name=exported_name(metric, prefix),
        documentation=metric.help,
        labelnames=[*labels, *(label.name for label in metric.labels)],
        **more,
    )
