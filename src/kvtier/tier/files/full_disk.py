"""The cap of a tier while its file system is full."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeGuard

logger = logging.getLogger(__name__)

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

FULL = "the file system is full"
"""Suffix of error texts that `EffectiveCap` has already logged."""

QUIET_S = 60.0
"""The reduced cap stays constant for this long after the last failed write."""

REGROWTH_S = 3600.0
"""The cap grows after `QUIET_S`, at a rate that would take it from zero to the configured cap in this time."""


class EffectiveCap:
    """The configured cap, or less while the file system is full. Thread-safe.

    A write that fails with ENOSPC or EDQUOT lowers the cap to the bytes in use. Later writes then replace the objects
    that they evict, so a growing file of another program does not empty the tier. Each process of a shared store has
    its own reduced cap.

    Args:
        tier: name of the tier, for the log.
        capacity_bytes: the configured cap.
        clock: returns seconds.
    """

    def __init__(self, tier: str, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._full: tuple[int, float] | None = None  # (bytes in use, time of the last failed write)

    @property
    def is_reduced(self) -> bool:
        """Whether the cap is below the configured one."""
        return self.now_bytes < self._capacity_bytes

    @property
    def now_bytes(self) -> int:
        """The current cap. Reaching the configured cap again is logged once."""
        with self._lock:
            if self._full is None:
                return self._capacity_bytes
            used_bytes, failed_s = self._full
            growing_s = max(0.0, self._clock() - failed_s - QUIET_S)
            now_bytes = used_bytes + int(self._capacity_bytes * growing_s / REGROWTH_S)
            if now_bytes < self._capacity_bytes:
                return now_bytes
            self._full = None
        logger.info("tier %s: the file system has room again for %d bytes", self._tier, self._capacity_bytes)
        return self._capacity_bytes

    def allows(self, used_bytes: int) -> int:
        """Return how many bytes may be in use at most after a write.

        This is the current cap or `used_bytes`, whichever is larger, up to the capacity.
        """
        return min(self._capacity_bytes, max(self.now_bytes, used_bytes))

    def record_full(self, used_bytes: int, error: OSError) -> None:
        """Record that a write failed with `error` while `used_bytes` were in use. Log only the first of a series."""
        with self._lock:
            is_first, self._full = self._full is None, (used_bytes, self._clock())
        if is_first:
            logger.warning(
                "tier %s: %s (%s): the cap is %d of %d bytes until there is room",
                self._tier,
                FULL,
                error.strerror,
                used_bytes,
                self._capacity_bytes,
            )


def is_full_error(error: BaseException | None) -> TypeGuard[OSError]:
    """Return whether `error` is ENOSPC or EDQUOT."""
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS
