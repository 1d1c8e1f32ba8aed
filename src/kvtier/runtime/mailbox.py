"""A queue whose waits end at their deadline."""

import threading
import time
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class Mailbox(Generic[_T]):
    """A queue of items, meant for one waiting thread. If several threads wait, several items may wake only one of them.

    It replaces `queue.SimpleQueue`, whose `get` in CPython 3.11 waits forever if a signal interrupts it at its
    deadline. A signal handler or finalizer may call `put` anywhere, even in the middle of `get`.
    """

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._has_items = threading.Lock()
        self._has_items.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> int:
        """Add an item and return how many there are. Never block."""
        self._items.append(item)
        try:  # noqa: SIM105 - this runs for every event, and `suppress` takes three Python calls
            self._has_items.release()
        except RuntimeError:
            pass  # the queue already had items
        return len(self._items)

    def get(self, wait_s: float = 0.0) -> _T | None:
        """Wait for the first item and take it. Return None if no item arrives in time."""
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
        """Wait for the first item and take all items, up to the first None.

        One call takes them all, because an error between two calls would lose the items that the first one took.
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
