"""Logs one WARNING when a tier starts to refuse writes, and one INFO when it accepts them again."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Refusals count as over when a write is accepted this long after the last refusal."""


class RefusalLog:
    """The refusals of one tier. Thread-safe.

    Args:
        tier: name of the tier.
        clock: returns seconds.
    """

    def __init__(self, tier: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._last_s = 0.0
        self._is_logged = False

    def refused(self, why: str, after: int = 1) -> None:
        """Record that the tier refused a write. Log `why` once, when `after` writes in a row were refused."""
        with self._lock:
            self._in_a_row += 1
            self._last_s = self._clock()
            is_first = self._in_a_row >= after and not self._is_logged
            self._is_logged |= is_first
        if is_first:
            logger.warning("tier %s refuses writes: %s", self._tier, why)

    def taken(self) -> None:
        """Record that the tier accepted a write."""
        if not self._in_a_row:
            return
        with self._lock:
            if self._is_logged and self._clock() < self._last_s + QUIET_S:
                return
            was_logged, self._is_logged, self._in_a_row = self._is_logged, False, 0
        if was_logged:
            logger.info("tier %s accepts writes again", self._tier)
