"""Limits the read bandwidth of the directory tiers of a process."""

import os
import threading
import time

from kvtier.tier.directory.tier import DirectoryTier
from kvtier.types import ObjectName

RATE = "BENCH_READ_BYTES_PER_S"


def throttle_reads() -> None:
    """Limit all reads together to the rate in the environment."""
    bytes_per_s = float(os.environ[RATE])
    lock = threading.Lock()
    free_s = 0.0
    read = DirectoryTier.read_one

    def slowly(self: DirectoryTier, name: ObjectName, into: memoryview, offset: int) -> int | None:
        nonlocal free_s
        count = read(self, name, into, offset)
        with lock:
            free_s = max(free_s, time.monotonic()) + (count or 0) / bytes_per_s
            until_s = free_s
        time.sleep(max(0.0, until_s - time.monotonic()))
        return count

    DirectoryTier.read_one = slowly  # type: ignore[method-assign]
