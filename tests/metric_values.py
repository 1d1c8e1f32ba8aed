"""Reads the figures of `Metrics` by their names in Prometheus."""

from kvtier.observe.metric_definitions import MetricKind
from kvtier.observe.metrics import Metrics


def values_of(metrics: Metrics) -> dict[str, float]:
    """Return every series, such as ``kvtier_evictions_total{place="host"}``. Histograms have sum and count only."""
    found: dict[str, float] = {}
    for metric, values, number, counts in metrics.series():
        pairs = ",".join(f'{label.name}="{value}"' for label, value in zip(metric.labels, values, strict=True))
        labels = f"{{{pairs}}}" if pairs else ""
        if metric.kind is MetricKind.HISTOGRAM:
            found[f"{metric.name}_sum{labels}"] = number
            found[f"{metric.name}_count{labels}"] = sum(counts)
        else:
            found[metric.name + labels] = number
    return found
