"""Limits the read bandwidth of the directory tiers of a process."""

import os
import threading
import time
from collections.abc import Sequence

from kvtier.errors import TierError
from kvtier.tier.base import Read
from kvtier.tier.directory.tier import DirectoryTier

RATE = "BENCH_READ_BYTES_PER_S"


def throttle_reads() -> None:
    """Limit all reads together to the rate in the environment."""
    bytes_per_s = float(os.environ[RATE])
    lock = threading.Lock()
    free_s = 0.0
    read = DirectoryTier.read_many

    def slowly(self: DirectoryTier, reads: Sequence[Read]) -> list[int | TierError | None]:
        nonlocal free_s
        counts = read(self, reads)
        with lock:
            free_s = max(free_s, time.monotonic()) + sum(it for it in counts if isinstance(it, int)) / bytes_per_s
            until_s = free_s
        time.sleep(max(0.0, until_s - time.monotonic()))
        return counts

    DirectoryTier.read_many = slowly  # type: ignore[method-assign]
