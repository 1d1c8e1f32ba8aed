"""Counts who is inside a tier, so that closing can wait for them and nobody enters afterwards."""

import threading
from types import TracebackType

from kvtier.errors import TierError


class Gate:
    """`with gate:` around each operation of the tier `tier`; raises `TierError` once it is closed."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._inside = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """Whether nobody may enter any more."""
        return self._is_closed

    def __enter__(self) -> None:
        with self._changed:
            if self._is_closed:
                raise TierError(self._tier, "is closed")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            if self._is_closed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more. Whether this call was the one that closed it."""
        with self._changed:
            is_first = not self._is_closed
            self._is_closed = True
            return is_first

    def wait_empty(self, deadline_s: float) -> bool:
        """Whether everybody left within `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout=deadline_s)
