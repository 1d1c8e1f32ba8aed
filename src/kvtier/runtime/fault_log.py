"""One log line for a fault that repeats: the first at once, then at most one in a while, with how many there were."""

import logging
import threading
import time
from collections.abc import Callable

LOG_EVERY_S = 30.0
KINDS_MAX = 256
"""Kinds that are told apart; more share one line."""

_log = logging.getLogger(__name__)


class FaultLog:
    """Rate-limits warnings by their kind. Thread-safe.

    Args:
        every_s: at most one line of a kind in this time.
        clock: seconds.
    """

    def __init__(self, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (time of the last line, faults since)

    def tell(self, kind: str, detail: str) -> None:
        """Log "kind: detail" as a warning, unless a line of this kind was logged a moment ago."""
        now_s = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind = "fault"
            last_s, silent = self._kinds.get(kind, (float("-inf"), 0))
            if now_s - last_s < self._every_s:
                self._kinds[kind] = (last_s, silent + 1)
                return
            self._kinds[kind] = (now_s, 0)
        more = f" (and {silent} more like it before)" if silent else ""
        _log.warning("%s: %s%s", kind, detail, more)
