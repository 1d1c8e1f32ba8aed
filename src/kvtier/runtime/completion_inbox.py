"""Completions on their way to a caller that waits for them; a session has an inbox of its own."""

from queue import Empty, SimpleQueue

from kvtier.runtime.executor import Completion


class CompletionInbox:
    """A queue of completions: any thread puts them, one takes them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Completion] = SimpleQueue()
        self.put = self._queue.put

    def take(self, wait_s: float = 0.0) -> list[Completion]:
        """The completions since the last call; waits up to `wait_s` seconds for the first."""
        taken: list[Completion] = []
        try:
            if wait_s > 0:
                taken.append(self._queue.get(timeout=wait_s))
            while True:
                taken.append(self._queue.get_nowait())
        except Empty:
            return taken
