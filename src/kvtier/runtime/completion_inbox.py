"""CompletionInbox on their way to their one owner: any thread puts them, the owner takes them and can be woken."""

from queue import Empty, SimpleQueue

from kvtier.runtime.jobs import Completion


class CompletionInbox:
    """A queue of answers. `take` is for one owner thread, everything else for any."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Completion]] = SimpleQueue()
        """An empty one is a wake-up call."""
        self._is_woken = False

    def put(self, completion: Completion) -> None:
        """Keep an answer for the owner."""
        self._queue.put([completion])

    def put_all(self, completions: list[Completion]) -> None:
        """Keep answers for the owner, who is woken once for all of them."""
        self._queue.put(completions)

    def take(self, wait_s: float = 0.0) -> list[Completion]:
        """The answers since the last call; waits at most `wait_s` seconds for the first.

        Returns early, perhaps with nothing, when somebody calls `wake`.
        """
        taken: list[Completion] = []
        try:
            if wait_s > 0:
                self._open(self._queue.get(timeout=wait_s), taken)
            while True:
                self._open(self._queue.get_nowait(), taken)
        except Empty:
            return taken

    def wake(self) -> None:
        """Make a `take` that waits return, or the next one that would."""
        # One note is enough: until a `take` has found it, no other is needed.
        if not self._is_woken:
            self._is_woken = True
            self._queue.put([])

    def _open(self, note: list[Completion], taken: list[Completion]) -> None:
        if note:
            taken += note
        else:
            self._is_woken = False
