"""Keeps the objects of one secret below a cap, in a bucket without a lifecycle rule, by deleting the oldest.

A sweep lists every object below ``<prefix>/<key id>/``, of all models. Nothing else would remove those of a retired
model. Objects of other secrets have their own cap, and other keys belong to other programs. Both stay.

A sweep ends with a record of the bytes in use, ``<prefix>/<key id>/swept``. Other processes read a recent record
instead of listing. At worst, a process whose clock is wrong lists too often. Two concurrent sweeps are harmless,
because both choose the objects by the store's times.
"""

import heapq
import logging
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import obstore
from obstore.store import S3Store

from kvtier.tier.s3.bucket import pages, read_body
from kvtier.tier.s3.errors import refusal_of

logger = logging.getLogger(__name__)

RECORD_NAME = "swept"
FREE_SHARE = 0.05
"""A sweep that finds the cap exceeded leaves this share of it free."""
EVICTIONS_MAX = 1 << 16
"""Maximum number of objects that one sweep deletes. Their keys take 20 MB of memory."""
PAGE_OBJECTS = 1000
DELETED_TOGETHER = 50
DELETES_PER_S = 500.0
SWEEP_DEADLINE_S = 1800.0
AGAIN_S = 1.0
"""The next sweep starts after this time if `EVICTIONS_MAX` deletions were too few."""
FIRST_WAIT_S = 60.0
"""A random part of this delays the first check of the record, so that nodes do not start together."""
CLOSE_DEADLINE_S = 10.0

_OBJECT = re.compile(r"[0-9a-f]{32}/(?:[0-9a-f]{64}|clock/[0-9a-f]{16})")
"""Matches the key of an object below the key id, or of an empty object that earlier versions of kvtier wrote."""
_RECORD = re.compile(rb"([0-9]{1,18})\n")


class Row(NamedTuple):
    """A listed object. Older objects sort first."""

    modified_s: float
    key: str
    byte_count: int


class S3Sweeper:
    """Sweeps the objects of one secret at most once per interval, in a thread. No read or write waits for it.

    Args:
        tier: the tier's name, for the log.
        store: client of the bucket.
        own: prefix of the secret's objects, of all models; ends with a slash.
        capacity_bytes: the cap of all objects below `own`.
        interval_s: seconds between two sweeps by any node.
    """

    def __init__(self, tier: str, store: S3Store, own: str, capacity_bytes: int, interval_s: float) -> None:
        self._tier, self._store, self._own = tier, store, own
        self.capacity_bytes = capacity_bytes
        self._interval_s = interval_s
        self.used_bytes: int | None = None
        """Bytes in use after the last sweep by any node; None until known."""
        self.evictions = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{tier}-sweeps", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the request in flight."""
        self._stopping.set()
        self._thread.join(CLOSE_DEADLINE_S)

    def sweep(self) -> None:
        """List all objects and delete the oldest if they exceed the cap. Then write the record, unless they still do.

        Raises:
            TimeoutError: the sweep took longer than `SWEEP_DEADLINE_S`, or the tier is closing.
        """
        end_s = time.monotonic() + SWEEP_DEADLINE_S
        sizes = 0

        def rows() -> Iterator[Row]:
            nonlocal sizes
            for page in pages(self._store, self._own, PAGE_OBJECTS):
                self._check_time(end_s)
                for row in page:
                    if _OBJECT.fullmatch(row["path"], len(self._own)):
                        sizes += row["size"]
                        yield Row(row["last_modified"].timestamp(), row["path"], row["size"])

        oldest = heapq.nsmallest(EVICTIONS_MAX, rows())
        self.used_bytes = sizes
        if sizes > self.capacity_bytes:
            self._evict(oldest, int(self.capacity_bytes * (1 - FREE_SHARE)), end_s)
        if self.used_bytes <= self.capacity_bytes:
            obstore.put(self._store, self._own + RECORD_NAME, b"%d\n" % self.used_bytes, use_multipart=False)

    def _run(self) -> None:
        is_failing = False
        pause_s = random.uniform(0, min(FIRST_WAIT_S, self._interval_s / 4))  # noqa: S311 - no secret
        while not self._stopping.wait(pause_s):
            try:
                pause_s = self._work()
                is_failing = False
            except Exception as error:  # noqa: BLE001 - some of the client's errors have no common class
                if not is_failing:
                    cause = refusal_of(error).cause
                    logger.warning("tier %s: the bucket cannot be swept: %s", self._tier, cause)
                is_failing = True
                pause_s = self._interval_s / 4

    def _work(self) -> float:
        """Sweep, unless a node did so within the interval. Return the seconds until the next check."""
        age_s = self._read_record()
        if age_s >= self._interval_s:
            self.sweep()
            if (self.used_bytes or 0) > self.capacity_bytes:
                return AGAIN_S
            age_s = 0.0
        jitter_s = random.uniform(0, self._interval_s / 4)  # noqa: S311 - no secret
        return self._interval_s - age_s + jitter_s

    def _read_record(self) -> float:
        """Take the bytes in use from the last sweep's record. Return its age, or infinity if no record is usable."""
        try:
            found = obstore.get(self._store, self._own + RECORD_NAME)
            used = _RECORD.fullmatch(read_body(found, 20))
        except FileNotFoundError:
            return math.inf
        if used is None:
            return math.inf
        self.used_bytes = int(used[1])
        return abs(time.time() - found.meta["last_modified"].timestamp())  # a record from the future is not recent

    def _evict(self, oldest: list[Row], target_bytes: int, end_s: float) -> None:
        left_bytes = self.used_bytes or 0
        victims: list[Row] = []
        for row in oldest:
            if left_bytes <= target_bytes:
                break
            victims.append(row)
            left_bytes -= row.byte_count
        for start in range(0, len(victims), DELETED_TOGETHER):
            self._check_time(end_s)
            rows = victims[start : start + DELETED_TOGETHER]
            obstore.delete(self._store, [row.key for row in rows])
            self.evictions += len(rows)
            self.used_bytes = (self.used_bytes or 0) - sum(row.byte_count for row in rows)
            self._stopping.wait(len(rows) / DELETES_PER_S)

    def _check_time(self, end_s: float) -> None:
        if self._stopping.is_set() or time.monotonic() > end_s:
            raise TimeoutError
