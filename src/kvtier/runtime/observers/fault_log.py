"""Logs repeated faults: the first immediately, then one line per kind and interval with the number of faults."""

import logging
import threading
import time
from collections.abc import Callable

LOG_EVERY_S = 30.0
KINDS_MAX = 256
"""Maximum number of kinds with their own lines. Further kinds share one."""

_log = logging.getLogger(__name__)


class FaultLog:
    """Rate-limits warnings by kind. Thread-safe.

    Args:
        every_s: minimum time between two lines of the same kind.
        clock: returns seconds.
    """

    def __init__(self, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (time of the last line, faults since)

    def report(self, kind: str, detail: str) -> None:
        """Log "kind: detail", unless a line of this kind was logged within `every_s`."""
        now_s = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind = "fault"
            last_s, suppressed = self._kinds.get(kind, (float("-inf"), 0))
            if now_s - last_s < self._every_s:
                self._kinds[kind] = (last_s, suppressed + 1)
                return
            self._kinds[kind] = (now_s, 0)
        more = f" ({suppressed} similar ones since the last line)" if suppressed else ""
        _log.warning("%s: %s%s", kind, detail, more)
