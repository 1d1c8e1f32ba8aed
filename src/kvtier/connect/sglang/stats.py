"""Exports metrics in SGLang's `/metrics`: SGLang's own for a storage backend, and kvtier's with the prefix ``sglang:``.

SGLang fetches its figures in the scheduler's thread (`KvtierStorage.get_stats`). The same call exports kvtier's
figures, at most four times a second.
"""

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

from kvtier.connect.engine_metrics import PromMetrics, StatsReader
from kvtier.observe.metrics import Metrics

CALLS_MAX = 4096
"""Maximum number of calls of each kind whose figures wait for SGLang. Beyond this number, the oldest are dropped."""

GB = 1e9

CallKind: TypeAlias = Literal["prefetch", "backup"]
"""SGLang's words for reading pages from the store and for writing pages to it."""

_places: dict[tuple[str, ...], int] = {}
_values: dict[int, tuple[str, ...]] = {}
"""Label values of each rank in this process, by number. Only tests have several ranks in one process."""


class StorageStats:
    """Collects figures until SGLang fetches them.

    Args:
        is_wanted: whether SGLang's metrics are enabled.
        labels: name and value of each label of this process.
    """

    def __init__(self, is_wanted: bool, labels: Mapping[str, str]) -> None:  # noqa: FBT001 - one flag
        self._is_wanted = is_wanted
        self._labels = labels
        self._reader: StatsReader | None = None
        self._calls: dict[str, deque[tuple[int, float]]] = {
            way: deque(maxlen=CALLS_MAX) for way in ("prefetch", "backup")
        }

    def read(self, metrics: Metrics) -> None:
        """Export these metrics from now on."""
        self._reader = StatsReader(metrics)

    def called(self, way: CallKind, pages: int, page_bytes: int, seconds: float) -> None:
        """Record the number of pages and the bandwidth of a call, for SGLang's own metrics."""
        if self._is_wanted and pages:
            self._calls[way].append((pages, pages * page_bytes / max(seconds, 1e-9) / GB))

    def take(self, make: Callable[[], Any]) -> Any:  # noqa: ANN401 - SGLang's `StorageMetrics`
        """Return SGLang's figures since the last call, and export kvtier's."""
        figures = make()
        for way, calls in self._calls.items():
            while calls:
                pages, speed = calls.popleft()
                getattr(figures, f"{way}_pgs").append(pages)
                getattr(figures, f"{way}_bandwidth").append(speed)
        increase = self._reader.take() if self._is_wanted and self._reader is not None else None
        if increase is not None:
            values = tuple(self._labels.values())
            place = _places.setdefault(values, len(_places))
            _values[place] = values
            _exported(tuple(self._labels)).observe(increase.data, place)
        return figures


@cache  # a process registers each metric once, even if a backend is attached again
def _exported(labels: tuple[str, ...]) -> PromMetrics:
    prometheus: Any = importlib.import_module("prometheus_client")
    types = {kind: kind for kind in (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)}
    return PromMetrics(types, labels, _values, prefix="sglang:")
