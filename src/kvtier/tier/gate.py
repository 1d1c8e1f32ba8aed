"""Counts the operations inside a tier, for closing to wait for; refuses later ones, and those of a forked child."""

import os
import threading
from types import TracebackType

from kvtier.errors import TierError


class Gate:
    """`with gate:` around each operation of the tier `tier`; raises `TierError` once it is closed, and in a child.

    A child that was forked shares the open files of its parent. What it locks, writes or removes there is the parent's.
    In the child the gate is closed from the start.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._process = os.getpid()
        self._inside = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """Whether operations are refused."""
        return self._is_closed or self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened the tier."""
        return self._process != os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # before any lock
            raise TierError(self._tier, f"is open in process {self._process}, of which this is a fork")
        with self._changed:
            if self._is_closed:
                raise TierError(self._tier, "is closed")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():  # forked inside: the parent's threads count theirs
            return
        with self._changed:
            self._inside -= 1
            if self._is_closed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse further operations. Whether this call was the one that closed the gate: never in a forked child."""
        if self.is_forked:
            return False
        with self._changed:
            is_first = not self._is_closed
            self._is_closed = True
            return is_first

    def wait_empty(self, deadline_s: float) -> bool:
        """Whether all operations ended within `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout=deadline_s)
