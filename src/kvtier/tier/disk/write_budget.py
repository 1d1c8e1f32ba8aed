"""The write budget of the disk tier, which limits the bytes written per day because flash wears out."""

import threading
from collections import OrderedDict

DAY_S = 86400.0
SAVED_S = 3600.0
"""Unspent budget accumulates for this long, so an hour's budget may be spent in one burst."""

SCARCE_SHARE = 0.5
"""Below this fill level of the bucket, only names that were offered before are written."""

REMEMBERED_MAX = 1 << 16


class WriteBudget:
    """A token bucket of bytes.

    Every object is admitted while the bucket is well filled. A name is admitted on its second offer when the bucket
    runs low, because most objects offered once are never read.

    Args:
        bytes_per_day: fill rate; 0 means no limit.
        now_s: current time on the clock of `admits`.
    """

    def __init__(self, bytes_per_day: int, now_s: float) -> None:
        self._rate = bytes_per_day / DAY_S
        self._capacity = self._rate * SAVED_S
        self._level = self._capacity
        self._updated_s = now_s
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, name: bytes, size_bytes: int, now_s: float) -> bool:
        """Return whether `name` may be written now. If so, charge the bucket for its bytes.

        A frame larger than the bucket is admitted when the bucket is full, and overdraws it.
        """
        if not self._rate:
            return True
        with self._lock:
            self._level = min(self._capacity, self._level + (now_s - self._updated_s) * self._rate)
            self._updated_s = now_s
            was_offered = name in self._offered
            self._offered[name] = None
            self._offered.move_to_end(name)
            if len(self._offered) > REMEMBERED_MAX:
                self._offered.popitem(last=False)
            if self._level < min(size_bytes, self._capacity):
                return False
            if self._level < SCARCE_SHARE * self._capacity and not was_offered:
                return False
            self._level -= size_bytes
            return True
