"""Background work on a bucket, and the store's clock, by which objects age.

`S3Rewriter` and `S3Sweeper` are the two kinds of work. Each has a thread of its own. No read or write waits for it.
"""

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

import obstore
from obstore.store import S3Store

from kvtier.tier.s3.errors import refusal_of

logger = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 3600.0
"""The store's time is measured this often."""
IDLE_S = 0.5
"""How long a thread rests that has nothing to do."""
CLOSE_DEADLINE_S = 10.0


class Upkeep(NamedTuple):
    """What is done in the background to the objects of a bucket. By default nothing."""

    lifetime_s: float = 0.0
    """Age at which the bucket's lifecycle rule expires objects; 0: there is none, and nothing is rewritten."""
    rewrite_bytes_per_s: int = 16 << 20
    """Budget of this process for rewriting objects that are read in the second half of their lifetime."""
    capacity_bytes: int = 0
    """Cap of all objects of the secret; the oldest are deleted. 0: none, and no object is listed."""
    sweep_interval_s: float = 3600.0
    """How often the objects are listed for the cap, by all nodes together."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds. The store's time is this plus a measured difference."""


NO_UPKEEP = Upkeep()


class StoreClock:
    """The store's time, from the modification time of an object that this process has just written.

    The node's own wall clock is not used. Times are right within a few seconds, because S3 shows whole seconds.

    Args:
        store: client of the bucket.
        folder: where the object is written; ends with a slash.
        clock: monotonic seconds.
    """

    def __init__(self, store: S3Store, folder: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._key = f"{folder}clock/{secrets.token_hex(8)}"
        self._clock = clock
        self._ahead_s: float | None = None
        """The store's Unix time minus `clock`; None: not measured yet."""
        self._measured_s = 0.0

    def measure(self) -> None:
        """Write the empty object and ask for its time, unless that was done within `CLOCK_INTERVAL_S`. Two requests."""
        now_s = self._clock()
        if self._ahead_s is not None and now_s - self._measured_s < CLOCK_INTERVAL_S:
            return
        obstore.put(self._store, self._key, b"", use_multipart=False)
        self._ahead_s = obstore.head(self._store, self._key)["last_modified"].timestamp() - now_s
        self._measured_s = now_s

    def age_s(self, modified: datetime) -> float | None:
        """Seconds since `modified` by the store's clock; None before the first measurement."""
        ahead_s = self._ahead_s
        return None if ahead_s is None else self._clock() + ahead_s - modified.timestamp()

    def remove(self) -> None:
        """Delete the object, if it was written."""
        if self._ahead_s is not None:
            obstore.delete(self._store, self._key)


class BucketWork(ABC):
    """A thread that repeats one kind of work until `close`. A failure is logged once and followed by a rest.

    Args:
        tier: the tier's name in the log.
        what: the work, in the log.
        clock: the store's clock.
        failure_pause_s: rest after a failure.
    """

    def __init__(self, tier: str, what: str, clock: StoreClock, failure_pause_s: float) -> None:
        self._clock = clock
        self._stopping = threading.Event()
        self._what = f"tier {tier}: {what}"
        self._failure_pause_s = failure_pause_s
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{tier}-{what}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the request that it has in flight."""
        self._stopping.set()
        self._thread.join(CLOSE_DEADLINE_S)

    @abstractmethod
    def _work(self) -> float | None:
        """One step. Returns the seconds until the next one; None: there was nothing to do."""

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                self._clock.measure()
                rest_s = self._work()
                if rest_s is not None:
                    self._is_failing = False
                pause_s = IDLE_S if rest_s is None else rest_s
            except Exception as error:  # noqa: BLE001 - of the client, of which some have no common class
                if not self._is_failing:
                    logger.warning("%s fails and is tried again: %s", self._what, refusal_of(error).cause)
                self._is_failing = True
                pause_s = self._failure_pause_s
        if not self._is_failing:
            with suppress(Exception):
                self._clock.remove()
