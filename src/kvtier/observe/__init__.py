"""Metrics."""

from kvtier.observe.metrics import CONTENT_TYPE, Metrics
from kvtier.observe.table import METRICS, Label, Metric, MetricKind

__all__ = ["CONTENT_TYPE", "METRICS", "Label", "Metric", "MetricKind", "Metrics"]
