"""A queue whose waits end in time."""

import threading
import time
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class Mailbox(Generic[_T]):
    """Items for one thread that waits for them. If several wait, one of them wakes for one or more items.

    Not `queue.SimpleQueue`: in CPython 3.11 its `get` waits for ever if a signal interrupts it at its deadline. A
    signal handler or finalizer may call `put` anywhere, also in the middle of `get`.
    """

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._has_items = threading.Lock()
        self._has_items.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> int:
        """Add an item. Never blocks. Returns how many there are."""
        self._items.append(item)
        try:  # noqa: SIM105 - this runs for every event, and `suppress` is three calls of Python
            self._has_items.release()
        except RuntimeError:
            pass  # there are others
        return len(self._items)

    def get(self, wait_s: float = 0.0) -> _T | None:
        """Take the first item, for which it waits; None if none has come."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                return self._items.popleft()
            except IndexError:
                left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            self._has_items.acquire(timeout=left_s)

    def get_all(self: "Mailbox[_Item | None]", wait_s: float = 0.0) -> "list[_Item]":
        """Take all items, for the first of which it waits; a None that was put ends them.

        One call, because an error between two calls would lose what the first one took.
        """
        items: list[_Item] = []
        item = self.get(wait_s)
        while item is not None:
            items.append(item)
            try:
                item = self._items.popleft()
            except IndexError:
                break
        return items
