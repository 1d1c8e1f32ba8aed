"""Passes kvtier's metrics to vLLM's tiering manager, in the form that it takes from a secondary tier."""

from typing import Any

from kvtier.connect.engine_metrics import Stats, changes_of, exported_name
from kvtier.observe.metric_definitions import METRICS, MetricKind

_ADD_IN_TIERING = {
    MetricKind.COUNTER: "increase_counter",
    MetricKind.GAUGE: "set_gauge",
    MetricKind.HISTOGRAM: "observe_histogram",
}
"""Methods of vLLM's `OffloadingConnectorStats`."""


def tiering_metrics(offload: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's `v1.kv_offload.base`
    """Return kvtier's metrics by their names in `/metrics`, as vLLM's tiering expects them from a tier."""
    found: dict[str, Any] = {}
    for metric in METRICS:
        more = {"buckets": metric.buckets} if metric.kind is MetricKind.HISTOGRAM else {}
        described = getattr(offload, f"Offloading{metric.kind.value.capitalize()}Metadata")
        found[exported_name(metric)] = described(metric.help, tuple(label.name for label in metric.labels), **more)
    return found


def add_to(stats: Any, increase: Stats) -> None:  # noqa: ANN401 - vLLM's `OffloadingConnectorStats`
    """Add the changes of one interval to the statistics that vLLM's tiering takes from a tier."""
    for metric, own, changes in changes_of(increase.data):
        for value in changes:
            getattr(stats, _ADD_IN_TIERING[metric.kind])(exported_name(metric), value, own)
