"""Metrics."""

from kvtier.observe.metric_definitions import METRICS, Label, Metric, MetricKind
from kvtier.observe.metrics import CONTENT_TYPE, Metrics

__all__ = ["CONTENT_TYPE", "METRICS", "Label", "Metric", "MetricKind", "Metrics"]
