"""Several ranks as one: every command goes to all of them and is answered once, when all have answered."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvtier.core.work import SEVERITY
from kvtier.runtime.completion_inbox import CompletionInbox
from kvtier.runtime.jobs import Completion, Obedient, TierView, Work
from kvtier.runtime.mover import Mover
from kvtier.types import Cancel, Command, Outcome, RequestId

RETRY_S = 0.005
"""A rank that reads slowly gets the rest of its commands after this long."""


class Note(NamedTuple):
    """What the core's side tells every rank's engine adapter; only the adapters know what it means."""

    subject: str
    request: RequestId = RequestId("")
    numbers: tuple[int, ...] = ()
    flag: bool = False


class Ranks(Obedient, Protocol):
    """All ranks of an engine, be it one or several, as the core's process sees them."""

    @property
    def lost(self) -> str:
        """Why nothing but FAILED is answered any more; empty while all is well."""
        ...

    def tell(self, note: Note) -> None:
        """Pass `note` on to every rank, in order, from any thread. Nothing answers it; a lost rank does not hear it."""
        ...

    def when_leaving(self, act: Callable[[], None]) -> None:
        """Call `act` when some rank's process is about to end, in whatever thread hears of it. It must be quick.

        The rank then waits for a while until it is closed. So whoever wants to bring something down from it does so,
        and then closes it.
        """
        ...


class OpenRanks(NamedTuple):
    """What a core stands on: the ranks, and what is the same on all of them."""

    mover: Ranks
    slots: tuple[int, ...]
    """Slots of each group."""
    tiers: tuple[str, ...]
    """Names of the lower tiers, fastest first."""
    down: frozenset[str] = frozenset()
    """Those that some rank could not open yet."""
    views: Mapping[str, TierView] = MappingProxyType({})
    """What the tiers' threads leave for the core, where the only rank is in this process."""


class RankMover(Ranks, Protocol):
    """One rank's mover, in this process or another."""

    def answer_to(self, put: Callable[[Completion], None]) -> None:
        """From now on give each answer to `put`, in whatever thread has it; before the first `submit`.

        What `put` raises means that it has not taken the answer: it is called once more, with FAILED.
        """
        ...

    def flush(self) -> bool:
        """Send what has been submitted; False when some of it has to wait. Never blocks."""
        ...


class LocalRank:
    """A `RankMover` in this process.

    Args:
        mover: the rank's.
        on_note: hears what is told, in the thread of who tells it.
    """

    lost = ""

    def __init__(self, mover: Mover, on_note: Callable[[Note], None] = lambda _note: None) -> None:
        self._mover = mover
        self._closed = threading.Event()
        self._leaving: Callable[[], None] = lambda: None
        self.views = mover.views
        self.submit = mover.submit
        self.submit_all = mover.submit_all
        self.cancel = mover.cancel
        self.take = mover.take
        self.wake = mover.wake
        self.answer_to = mover.answer_to
        self._on_note = on_note

    def tell(self, note: Note) -> None:
        """See `Ranks`."""
        self._on_note(note)

    def flush(self) -> bool:
        """Nothing waits: `submit` gives it to the mover at once."""
        return True

    def when_leaving(self, act: Callable[[], None]) -> None:
        """See `Ranks`."""
        self._leaving = act

    def leave(self, deadline_s: float) -> bool:
        """Say that this process is about to end; whether the core has closed the rank within `deadline_s` seconds."""
        self._leaving()
        return self._closed.wait(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """See `Obedient`."""
        try:
            return self._mover.close(deadline_s)
        finally:
            self._closed.set()


class RankGroup:
    """All ranks of one engine, in the shape of one mover. The worst answer of a rank counts for all.

    Args:
        ranks: from now on theirs is the rank group's to take.

    `take` and `close` are for one owner thread, everything else for any.
    """

    def __init__(self, ranks: Sequence[RankMover]) -> None:
        if not ranks:
            raise ValueError("a rank group needs at least one rank")
        self._ranks = tuple(ranks)
        self._inbox = CompletionInbox()
        self._lock = threading.Lock()
        self._open: dict[int, _PendingCommand] = {}
        """By the identity of the command, which every answer carries: a drop has no number."""
        for rank in self._ranks:
            rank.answer_to(self._answered)

    @property
    def lost(self) -> str:
        """Why some rank is lost, and with it the whole; empty while all are well."""
        return next((rank.lost for rank in self._ranks if rank.lost), "")

    def submit(self, command: Command) -> None:
        """See `Obedient`."""
        if isinstance(command, Cancel):
            self.cancel(command.ids)
        else:
            self.submit_all((command,))

    def submit_all(self, commands: Iterable[Command]) -> None:
        """See `Obedient`."""
        commands = tuple(commands)
        with self._lock:
            for command in commands:
                if not isinstance(command, Cancel):
                    self._open[id(command)] = _PendingCommand(command, len(self._ranks))
        for rank in self._ranks:
            rank.submit_all(commands)

    def cancel(self, ids: Iterable[int]) -> None:
        """See `Obedient`. What some rank has begun is answered when it ends there."""
        wanted = tuple(ids)
        for rank in self._ranks:
            rank.cancel(wanted)

    def take(self, wait_s: float = 0.0) -> list[Completion]:
        """See `Obedient`. Also returns early, perhaps with nothing, while a rank reads slowly."""
        return self._inbox.take(wait_s if self.flush() else min(wait_s, RETRY_S))

    def wake(self) -> None:
        """See `Obedient`."""
        self._inbox.wake()

    def flush(self) -> bool:
        """See `RankMover`."""
        behind = [rank for rank in self._ranks if not rank.flush()]
        return not behind

    def tell(self, note: Note) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            rank.tell(note)

    def when_leaving(self, act: Callable[[], None]) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            rank.when_leaving(act)

    def close(self, deadline_s: float) -> bool:
        """See `Obedient`. The ranks close at the same time, so that one that hangs costs the others nothing."""
        results = [False] * len(self._ranks)

        def close(position: int) -> None:
            results[position] = self._ranks[position].close(deadline_s)

        closers = [
            threading.Thread(target=close, args=(position,), name=f"kvtier close rank {position}", daemon=True)
            for position in range(len(self._ranks))
        ]
        started: list[threading.Thread] = []
        for closer in closers:
            try:
                closer.start()
            except RuntimeError:  # the system gives no more threads
                closer.run()
            else:
                started.append(closer)
        until_s = time.monotonic() + deadline_s + 1.0
        for closer in started:
            closer.join(max(0.0, until_s - time.monotonic()))
        return all(results)

    def _answered(self, completion: Completion) -> None:
        """One rank's answer, in whatever thread has it."""
        with self._lock:
            waiting = self._open[id(completion.command)]
            together = completion if waiting.completion is None else merged(waiting.completion, completion)
            # What raises up to here has not taken the answer.
            if waiting.left > 1:
                waiting.completion = together
                waiting.left -= 1
            else:
                self._inbox.put(together)
                del self._open[id(completion.command)]


class _PendingCommand:
    """A command that some rank has not answered."""

    __slots__ = ("command", "completion", "left")

    def __init__(self, command: Work, ranks: int) -> None:
        self.command = command  # kept alive, so that its identity stays its own
        self.left = ranks
        self.completion: Completion | None = None


def merged(one: Completion, other: Completion) -> Completion:
    """What two ranks' answers to the same command say together: the worst outcome, with its reason.

    A probe finds only what both ranks hold. Bytes add up; the slower rank's times count.
    """
    worst = max(one, other, key=lambda completion: SEVERITY[completion.outcome])
    is_done = worst.outcome is Outcome.DONE
    return worst._replace(
        present=tuple(a and b for a, b in zip(one.present, other.present, strict=True)) if is_done else (),
        size_bytes=one.size_bytes + other.size_bytes if is_done else 0,
        seconds=max(one.seconds, other.seconds),
        waited_s=max(one.waited_s, other.waited_s),
        is_tier_fault=one.is_tier_fault or other.is_tier_fault,
    )
