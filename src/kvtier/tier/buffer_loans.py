"""Memory that a tier uses during one call.

A tier may give up on a read while one of its threads or libraries still writes to the buffer. The memory belongs to the
call until nothing refers to the buffer anymore, however the call has ended.
"""

import gc
import logging
import time
from collections.abc import Sequence
from itertools import count
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvtier.tier.base import clear_frames

WAIT_S_MIN = 20e-6

ATTEMPTS_QUICK = 14
"""The wait doubles this many times, to 0.3 s. Then garbage is collected once, and after that a warning is logged."""

_BYTE = np.dtype(np.uint8)

_log = logging.getLogger(__name__)


class Loan:
    """Views of `memory` for one call of a tier. This context manager ends when nothing uses the views anymore.

    Each view has an owner object, which slices, casts and arrays of the view keep alive in any thread. A view that is
    not in use raises ValueError after the call. Addresses in native code are invisible, so a tier that uses them must
    wait.

    Args:
        memory: contiguous parts.
        tier: the tier's name, for the log.
    """

    def __init__(self, memory: Sequence[memoryview], tier: str) -> None:
        self.views: list[memoryview] = []
        """The views, in the order of `memory`."""
        self._owners: list[ref[npt.NDArray[np.uint8]]] = []
        self._tier = tier
        for part in memory:
            owner = np.frombuffer(part, _BYTE)
            self.views.append(owner.data)
            self._owners.append(ref(owner))

    def __enter__(self) -> list[memoryview]:
        return self.views

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Wait, without a deadline, until nothing uses the views. Otherwise a late write would damage later data."""
        if error is not None:
            clear_frames(error)
        if not self.is_over():
            self._wait()

    def is_over(self) -> bool:
        """Release the views. Return whether nothing uses the memory anymore."""
        is_over = True
        for view in self.views:
            try:
                view.release()
            except BufferError:  # in use by a system call or an array
                is_over = False
        for owner in self._owners:
            if owner() is not None:
                return False
        return is_over

    def _wait(self) -> None:
        for attempt in count():
            if self.is_over():
                return
            if attempt == ATTEMPTS_QUICK:
                gc.collect()  # a cycle may refer to a view
            elif attempt == ATTEMPTS_QUICK + 1:
                _log.warning(
                    "tier %s: a call has ended, but something in the tier still uses its buffer; kvtier keeps the slot "
                    "until it lets go", self._tier,
                )  # fmt: skip
            time.sleep(WAIT_S_MIN * 2 ** min(attempt, ATTEMPTS_QUICK))
