"""Counts a tier's running operations, so that closing waits for them and later ones are refused."""

import os
import threading
from types import TracebackType

from kvtier.errors import TierError


class OperationGuard:
    """A context manager around each operation of tier `tier`. It raises `TierError` once closed and in a forked child.

    A forked child shares its parent's open files and locks, so a tier must not be used there.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._process = os.getpid()
        self._inside = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # before any lock, because a forked lock may be held forever
            raise TierError(self._tier, f"is open in process {self._process}, and this is a fork of it")
        with self._changed:
            if self._is_closed:
                raise TierError(self._tier, "is closed")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():  # forked during an operation, which the parent counts
            return
        with self._changed:
            self._inside -= 1
            if self._is_closed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse further operations. Return True for the first call; always False in a forked child."""
        if self._process != os.getpid():
            return False
        with self._changed:
            is_first = not self._is_closed
            self._is_closed = True
            return is_first

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait for running operations. Return False if some still run after `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout=deadline_s)
