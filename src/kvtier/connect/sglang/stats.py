"""Figures for SGLang's metrics of a storage backend: pages and bandwidth of each backup and prefetch."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

CALLS_MAX = 4096
"""Calls whose figures wait for SGLang; it takes them several times a second."""

GB = 1e9


class StorageStats:
    """Collects figures until SGLang takes them.

    Args:
        is_wanted: SGLang's metrics are on.
    """

    def __init__(self, is_wanted: bool) -> None:  # noqa: FBT001 - one flag
        self._is_wanted = is_wanted
        self._calls: dict[str, deque[tuple[int, float]]] = {
            way: deque(maxlen=CALLS_MAX) for way in ("prefetch", "backup")
        }

    @contextmanager
    def timed(self, way: Literal["prefetch", "backup"], pages: int, page_bytes: int) -> Generator[None]:
        """Count a call."""
        began_s = time.perf_counter()
        yield
        seconds = max(time.perf_counter() - began_s, 1e-9)
        if self._is_wanted and pages:
            self._calls[way].append((pages, pages * page_bytes / seconds / GB))

    def take(self, make: Callable[[], Any]) -> Any:  # noqa: ANN401 - SGLang's `StorageMetrics`
        """The figures since the last call."""
        figures = make()
        for way, calls in self._calls.items():
            while calls:
                pages, speed = calls.popleft()
                getattr(figures, f"{way}_pgs").append(pages)
                getattr(figures, f"{way}_bandwidth").append(speed)
        return figures
