"""Our metrics on their way into vLLM's `/metrics`: counted beside the scheduler, shown by the process with the server.

What travels is plain: for each metric of `observe.table` and each set of label values what has been added since the
last time. The names in `/metrics` are those of the table behind ``vllm:``, which is how vLLM knows its own.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.observe.metrics import Metrics, Series
from kvtier.observe.table import CAPACITY_BYTES, METRICS, Metric, MetricKind

INTERVAL_S = 0.25
"""Counts travel this often; with every step they would be most of what travels."""

FIRST_S = 2.0
"""How long an engine that has started takes empty steps for its gauges; the session sets them in its first second."""

LABEL_SEPARATOR = "\x1f"

Row = list[float]
"""The value; of a histogram the sum, and the number of observations in each bucket."""

_BY_NAME = {metric.name: metric for metric in METRICS}


class Stats:
    """What was counted in an interval. Has the shape of vLLM's `KVConnectorStats`, as which it travels.

    Args:
        data: by metric, by joined label values: what was added, or for a gauge how it stands.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, dict[str, Row]] = data or {}

    def to_dict(self) -> dict[str, Any]:
        """What travels."""
        return self.data

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: "Stats") -> "Stats":
        """Take in what was counted after this."""
        for name, rows in other.data.items():
            is_gauge = _BY_NAME[name].kind is MetricKind.GAUGE
            mine = self.data.setdefault(name, {})
            for labels, row in rows.items():
                before = [0.0] * len(row) if is_gauge else mine.get(labels, [0.0] * len(row))
                mine[labels] = [a + b for a, b in zip(before, row, strict=True)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few figures for vLLM's log."""
        return {
            "loaded tokens": self._total("kvtier_load_tokens_total"),
            "stored chunks": self._total("kvtier_store_chunks_total", "held"),
            "dropped chunks": self._total("kvtier_store_chunks_total", "dropped"),
            "moved MB": round(self._total("kvtier_transfer_bytes_total") / 1e6, 1),
        }

    def _total(self, name: str, labels: str | None = None) -> float:
        rows = self.data.get(name, {})
        return sum(row[0] for told, row in rows.items() if labels in (None, told))


class Meters:
    """Reads the session's metrics now and then.

    Args:
        metrics: of the session.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[tuple[str, str], Row] = {}
        self._next_s = 0.0
        self._changes = metrics.changes
        self._first_until_s: float | None = time.monotonic() + FIRST_S

    def hurry(self) -> bool:
        """An engine is idle: whether it is to take another step, since something was counted; that one gets it at once.

        Otherwise the engine would take empty steps until the interval is over, hundreds of them. One that has just
        started takes them until the session has set its gauges, which `/metrics` would otherwise lack until a request.
        """
        if self._first_until_s is not None and time.monotonic() > self._first_until_s:
            self._first_until_s = None
        has_news = self._first_until_s is not None or self._metrics.changes != self._changes
        if has_news:
            self._next_s = 0.0
        return has_news

    def take(self) -> Stats | None:
        """What was counted since the last call; None when that was just now, or nothing was."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        self._changes = self._metrics.changes
        stats = Stats()
        for series in self._metrics.series():
            row = self._news(series)
            if row is not None:
                stats.data.setdefault(series.metric.name, {})[LABEL_SEPARATOR.join(series.values)] = row
        if CAPACITY_BYTES.name in stats.data:
            self._first_until_s = None
        return None if stats.is_empty() else stats

    def _news(self, series: Series) -> Row | None:
        place = (series.metric.name, LABEL_SEPARATOR.join(series.values))
        row = [series.number, *series.counts]
        is_gauge = series.metric.kind is MetricKind.GAUGE
        # A gauge at zero is news once: a tier that is down from the start.
        before = self._before.get(place, [] if is_gauge else [0.0] * len(row))
        if row == before:
            return None
        self._before[place] = row
        return row if is_gauge else [a - b for a, b in zip(row, before, strict=True)]


class PromMetrics:
    """Shows `Stats` as Prometheus metrics. Has the shape of vLLM's `KVConnectorPromMetrics`.

    Args:
        types: the classes to make metrics of, by those of `prometheus_client`.
        labels: names of vLLM's own labels.
        values: of vLLM's own labels, by engine.
    """

    def __init__(self, types: Mapping[Any, Any], labels: Sequence[str], values: Mapping[int, Sequence[object]]) -> None:
        kinds = {kind.__name__.lower(): made for kind, made in types.items()}
        self._values = values
        self._shown = {metric.name: _shown(metric, kinds[metric.kind.value], labels) for metric in METRICS}

    def observe(self, transfer_stats_data: dict[str, dict[str, Row]], engine_idx: int = 0) -> None:
        """Add what an engine has counted."""
        for name, rows in transfer_stats_data.items():
            metric = _BY_NAME[name]
            for labels, row in rows.items():
                own: list[str] = labels.split(LABEL_SEPARATOR) if metric.labels else []
                series = self._shown[name].labels(*self._values[engine_idx], *own)
                if metric.kind is MetricKind.COUNTER:
                    series.inc(row[0])
                elif metric.kind is MetricKind.GAUGE:
                    series.set(row[0])
                else:
                    for value in observations(metric, row):
                        series.observe(value)


def observations(metric: Metric, row: Row) -> list[float]:
    """Values that fall in the buckets of `row`, and together give its sum: a histogram only takes single ones.

    All values lie at the same share of their bucket's width.
    """
    total, counts = row[0], [int(count) for count in row[1:]]
    lows = (0.0, *metric.buckets)
    # What is beyond the last bound has none above; so much is left for it if all others are at their lowest.
    rest = (total - sum(count * low for count, low in zip(counts, lows, strict=True))) / max(counts[-1], 1)
    widths = [high - low for low, high in zip(lows, metric.buckets, strict=False)]
    widths.append(max(rest, 0.0))
    lowest = sum(count * low for count, low in zip(counts, lows, strict=True))
    spread = sum(count * width for count, width in zip(counts, widths, strict=True))
    share = min(max((total - lowest) / spread, 1e-9), 1.0) if spread > 0 else 1.0
    return [low + share * width for count, low, width in zip(counts, lows, widths, strict=True) for _ in range(count)]


def _shown(metric: Metric, made: Any, labels: Sequence[str]) -> Any:  # noqa: ANN401 - a metric of prometheus_client
    buckets = {"buckets": metric.buckets} if metric.kind is MetricKind.HISTOGRAM else {}
    return made(
        name=f"vllm:{metric.name.removesuffix('_total')}",
        documentation=metric.help,
        labelnames=[*labels, *(label.name for label in metric.labels)],
        **buckets,
    )
