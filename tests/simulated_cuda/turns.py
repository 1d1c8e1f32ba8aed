"""Threads that run one at a time. A seed decides who goes on, so that a schedule can be repeated."""

import random
import threading
from collections.abc import Callable

STALLED_S = 30.0
"""Longest wait of the host for what only another thread can end."""


class StalledError(AssertionError):
    """The host waits for a stream that is held."""


class Turns:
    """Passes the turn from thread to thread.

    Args:
        rng: draws who goes on.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._local = threading.local()
        self._turns: dict[int, threading.Semaphore] = {}
        self._idle: dict[int, Callable[[], object]] = {}
        self._has_failed = False

    @property
    def are_taken(self) -> bool:
        """Whether threads take turns now."""
        return bool(self._turns)

    @property
    def number(self) -> int:
        """The calling thread's number: its work's position from 1, or 0 for another thread."""
        return getattr(self._local, "actor", 0)

    def together(self, *works: Callable[[], object]) -> None:
        """Run these in threads, one at a time; at each launch the seed decides who goes on. Raises what they raise."""
        errors: list[BaseException] = []

        def run(number: int, work: Callable[[], object]) -> None:
            self._local.actor = number
            try:
                self._await_turn(number)
                work()
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                errors.append(error)
                self._has_failed = True
            finally:
                del self._turns[number]
                for turn in self._turns.values() if self._has_failed else ():
                    turn.release()
                if not self._has_failed:
                    self._pass_turn(self._next())

        self._turns = {number: threading.Semaphore(0) for number in range(1, len(works) + 1)}
        threads = [threading.Thread(target=run, args=it, daemon=True) for it in enumerate(works, 1)]
        for thread in threads:
            thread.start()
        self._pass_turn(self._next())
        for thread in threads:
            thread.join(STALLED_S)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise StalledError("a thread does not end")

    def switch(self) -> None:
        """Let another thread of `together` go on, or not. Not for a thread that holds a lock which others need."""
        actor = self.number
        if actor and (turn := self._next()) != actor:
            self._pass_turn(turn)
            self._await_turn(actor)

    def wait_for(self, is_ready: Callable[[], object]) -> None:
        """Let the other threads of `together` go on until `is_ready`."""
        self._idle[self._local.actor] = is_ready
        while not is_ready():
            self.switch()
        del self._idle[self._local.actor]

    def _next(self) -> int:
        """The thread that goes on; 0: none is left."""
        if self._has_failed:
            raise StalledError("another thread has failed")
        ready = [actor for actor in self._turns if actor not in self._idle or self._idle[actor]()]
        if self._turns and not ready:
            raise StalledError("all threads wait for each other")
        return self.rng.choice(ready) if ready else 0

    def _pass_turn(self, turn: int) -> None:
        if turn:
            self._turns[turn].release()

    def _await_turn(self, actor: int) -> None:
        if not self._turns[actor].acquire(timeout=STALLED_S):
            raise StalledError("no thread passes its turn")
