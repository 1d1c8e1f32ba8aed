"""A file system that is full before a tier's cap is reached: what the tier may hold then."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeGuard

logger = logging.getLogger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

FULL = "the file system is full"
"""The end of an error's text that `FoundCap` has logged already."""

QUIET_S = 60.0
"""After the last write that found no room, the cap stays what it is for this long."""

REGROWTH_S = 3600.0
"""Then it grows at a rate that takes this long from nothing to the configured cap."""


class FoundCap:
    """The configured cap, or less while the file system has no room for that.

    A write that finds no room makes the cap what the tier holds. From then on a write replaces what it evicts, so that
    a file of another program that grows does not empty the tier. Other processes that share a store have found caps of
    their own. Thread-safe.

    Args:
        tier: name of the tier, for the log.
        capacity_bytes: the configured cap.
        clock: seconds.
    """

    def __init__(self, tier: str, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._found: tuple[int, float] | None = None  # (bytes held, when the last write found no room)

    @property
    def is_found(self) -> bool:
        """Whether the cap is less than the configured one."""
        return self.now_bytes < self._capacity_bytes

    @property
    def now_bytes(self) -> int:
        """The cap. It grows by itself, and the end of that is logged once."""
        with self._lock:
            if self._found is None:
                return self._capacity_bytes
            held_bytes, found_s = self._found
            growing_s = max(0.0, self._clock() - found_s - QUIET_S)
            now_bytes = held_bytes + int(self._capacity_bytes * growing_s / REGROWTH_S)
            if now_bytes < self._capacity_bytes:
                return now_bytes
            self._found = None
        logger.info("tier %s: the file system has room again for %d bytes", self._tier, self._capacity_bytes)
        return self._capacity_bytes

    def allows(self, used_bytes: int) -> int:
        """The most bytes to hold after a write: what is held (`used_bytes`) or the cap, whichever is more."""
        return min(self._capacity_bytes, max(self.now_bytes, used_bytes))

    def found(self, held_bytes: int, error: OSError) -> None:
        """A write found no room (`error`) in a tier that holds `held_bytes`. Only the first of many is logged."""
        with self._lock:
            is_news, self._found = self._found is None, (held_bytes, self._clock())
        if is_news:
            logger.warning(
                "tier %s: %s (%s): the cap is %d of %d bytes until there is room",
                self._tier,
                FULL,
                error.strerror,
                held_bytes,
                self._capacity_bytes,
            )


def is_no_room(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether `error` is that of a file system or a quota without room."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def with_cause(error: OSError) -> str:
    """The text of `error`; where there was no room it ends with `FULL`."""
    return f"{error}; {FULL}" if is_no_room(error) else str(error)
