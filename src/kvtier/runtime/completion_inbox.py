"""Completions on their way to the session: any thread puts them, the owner thread takes them and can be woken."""

from queue import Empty, SimpleQueue

from kvtier.runtime.executor import Completion


class CompletionInbox:
    """A queue of completions. `take` is for one owner thread, the other methods for any."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Completion]] = SimpleQueue()
        """An empty list is a wake-up."""
        self._is_woken = False

    def put(self, completion: Completion) -> None:
        """Queue a completion."""
        self._queue.put([completion])

    def put_all(self, completions: list[Completion]) -> None:
        """Queue completions and wake the owner once."""
        self._queue.put(completions)

    def take(self, wait_s: float = 0.0) -> list[Completion]:
        """The completions since the last call; waits up to `wait_s` seconds for the first, or until `wake`."""
        taken: list[Completion] = []
        try:
            if wait_s > 0:
                self._unpack(self._queue.get(timeout=wait_s), taken)
            while True:
                self._unpack(self._queue.get_nowait(), taken)
        except Empty:
            return taken

    def wake(self) -> None:
        """Make a waiting `take` return, or the next one that would wait."""
        # One wake-up in the queue is enough; `take` allows the next one.
        if not self._is_woken:
            self._is_woken = True
            self._queue.put([])

    def _unpack(self, item: list[Completion], taken: list[Completion]) -> None:
        if item:
            taken += item
        else:
            self._is_woken = False
