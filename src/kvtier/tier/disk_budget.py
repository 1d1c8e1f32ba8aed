"""Flash wears: how many bytes a day may be written, and for whom they are kept."""

import threading
from collections import OrderedDict

DAY_S = 86400.0
SAVED_S = 3600.0
"""What is not spent is saved for so long: the budget of an hour may be spent in one burst."""

SCARCE_SHARE = 0.5
"""With less than this share of the savings left, only names that were offered before are written."""

REMEMBERED_MAX = 1 << 16


class WriteBudget:
    """A bucket that fills with the bytes allowed per day, and what is offered spends.

    While it is well filled everything is admitted. When it runs low, a name is admitted the second time it is offered:
    what comes once is mostly never read, and it would use up what the others need.

    Args:
        bytes_per_day: how much; 0 is no limit.
        now_s: the time, on the clock of `admits`.
    """

    def __init__(self, bytes_per_day: int, now_s: float) -> None:
        self._rate = bytes_per_day / DAY_S
        self._most = self._rate * SAVED_S
        self._left = self._most
        self._then_s = now_s
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, name: bytes, size_bytes: int, now_s: float) -> bool:
        """Whether `name` may be written now; then its bytes are spent.

        A frame larger than all savings is admitted when they are full, and leaves a debt.
        """
        if not self._rate:
            return True
        with self._lock:
            self._left = min(self._most, self._left + (now_s - self._then_s) * self._rate)
            self._then_s = now_s
            was_offered = name in self._offered
            self._offered[name] = None
            self._offered.move_to_end(name)
            if len(self._offered) > REMEMBERED_MAX:
                self._offered.popitem(last=False)
            if self._left < min(size_bytes, self._most):
                return False
            if self._left < SCARCE_SHARE * self._most and not was_offered:
                return False
            self._left -= size_bytes
            return True
