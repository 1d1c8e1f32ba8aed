"""Several ranks as one executor: a command goes to all ranks and is completed once all have completed it."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.runtime.executor import Completion, TierView, Work
from kvtier.runtime.mover import Mover
from kvtier.runtime.protocol import Note
from kvtier.runtime.remote_rank import RemoteRank
from kvtier.types import SEVERITY, Cancel, Command, Outcome, Probe, Recall


class RankGroup:
    """An `Executor` over all ranks of one engine. The worst outcome of a rank is the outcome of the command.

    In a remote tier one rank probes for all, by its own names, because the ranks wrote theirs together. The answer is a
    hint: where another rank lacks an object, its promotion finds that out and the load is shorter. A recall is of rank
    0.

    Args:
        ranks: at least one; their completions go to the group from now on.
        remote: names of the remote tiers.

    `close` is for one owner thread, the other methods for any.
    """

    needs_flush = True

    def __init__(self, ranks: Sequence[Mover | RemoteRank], remote: Collection[str] = ()) -> None:
        self._ranks = tuple(ranks)
        self._put: Callable[[Completion], None] = lambda _completion: None
        self._ready: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._open: dict[int, _PendingCommand] = {}
        """Open commands by object identity, because a drop has no id."""
        self._asked = dict.fromkeys(remote, 0)
        """Position of the rank that probes each remote tier: the one whose call failed last. So a tier that one rank
        cannot reach is not taken for healthy."""
        for position, rank in enumerate(self._ranks):
            rank.complete_to(partial(self._answered, position), self._announce)

    @property
    def lost(self) -> str:
        """Why a rank is lost, and the group with it; empty while none is."""
        return next((rank.lost for rank in self._ranks if rank.lost), "")

    def submit(self, *commands: Command) -> None:
        """See `Executor`."""
        asked: dict[int, int] = {}
        with self._lock:
            for command in commands:
                if isinstance(command, Cancel):
                    continue
                if isinstance(command, Probe) and command.tier in self._asked:
                    asked[id(command)] = self._asked[command.tier]
                elif isinstance(command, Recall):
                    asked[id(command)] = 0
                self._open[id(command)] = _PendingCommand(command, 1 if id(command) in asked else len(self._ranks))
        for position, rank in enumerate(self._ranks):
            mine = [each for each in commands if asked.get(id(each), position) == position] if asked else commands
            if mine:
                rank.submit(*mine)

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        """See `Executor`."""
        self._put, self._ready = put, ready

    def flush(self) -> bool:
        """See `Executor`."""
        are_flushed = [rank.flush() for rank in self._ranks]
        return all(are_flushed)

    def send_note(self, note: Note) -> None:
        """Pass `note` to the adapter of every rank, in order, from any thread. A lost rank does not receive it."""
        for rank in self._ranks:
            rank.send_note(note)

    def when_leaving(self, act: Callable[[], None]) -> None:
        """Call `act` when a rank's process is about to end. `act` must be quick and may run in any thread.

        The rank then waits, up to a deadline, to be closed. So pending demotions can end before.
        """
        for rank in self._ranks:
            rank.when_leaving(act)

    def close(self, deadline_s: float) -> bool:
        """See `Executor`. Ranks close concurrently, so that one that hangs does not use up the others' deadline."""
        results = [False] * len(self._ranks)

        def close(position: int) -> None:
            results[position] = self._ranks[position].close(deadline_s)

        acts = {f"kvtier close rank {position}": partial(close, position) for position in range(len(self._ranks))}
        in_threads(acts, deadline_s + 1.0)
        return all(results)

    def _answered(self, position: int, completion: Completion) -> None:
        """Take one rank's completion, in any thread."""
        with self._lock:
            if completion.is_tier_fault and completion.command.tier in self._asked:
                self._asked[completion.command.tier] = position
            waiting = self._open[id(completion.command)]
            together = completion if waiting.completion is None else merged(waiting.completion, completion)
            # An exception up to here means that the completion was not taken.
            if waiting.left > 1:
                waiting.completion = together
                waiting.left -= 1
            else:
                self._put(together)
                del self._open[id(completion.command)]

    def _announce(self) -> None:
        self._ready()


class _PendingCommand:
    """A command that a rank has not completed."""

    __slots__ = ("command", "completion", "left")

    def __init__(self, command: Work, ranks: int) -> None:
        self.command = command  # keeps the object alive, so that no other gets its `id`
        self.left = ranks
        self.completion: Completion | None = None


def merged(one: Completion, other: Completion) -> Completion:
    """One completion of two ranks': the worst outcome with its detail and reason, and the slower rank's times.

    A probe finds only objects that both ranks hold. Bytes add up.
    """
    worst = max(one, other, key=lambda it: (SEVERITY[it.outcome], it.reason, it.detail))
    is_done = worst.outcome is Outcome.DONE
    return worst._replace(
        present=tuple(a and b for a, b in zip(one.present, other.present, strict=True)) if is_done else (),
        size_bytes=one.size_bytes + other.size_bytes if is_done else 0,
        seconds=max(one.seconds, other.seconds),
        waited_s=max(one.waited_s, other.waited_s),
        is_tier_fault=one.is_tier_fault or other.is_tier_fault,
    )


def in_threads(acts: Mapping[str, Callable[[], None]], deadline_s: float) -> None:
    """Call each of `acts` in a thread of that name, and wait up to `deadline_s` seconds for all of them."""
    started: list[threading.Thread] = []
    for name, act in acts.items():
        thread = threading.Thread(target=act, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            act()
        else:
            started.append(thread)
    until_s = time.monotonic() + deadline_s
    for thread in started:
        thread.join(max(0.0, until_s - time.monotonic()))


Ranks = Mover | RemoteRank | RankGroup
"""The executor of all ranks of one engine."""


class OpenRanks(NamedTuple):
    """The ranks below a core, and what is the same on all of them."""

    executor: Ranks
    slots: tuple[int, ...]
    """Slots of each group."""
    tiers: tuple[str, ...]
    """Names of the lower tiers, fastest first."""
    down: frozenset[str] = frozenset()
    """Tiers that some rank has not opened yet."""
    views: Sequence[Mapping[str, TierView]] = ()
    """Figures of the tiers, by name, of each rank."""
    rank_count: int = 1
    """Number of ranks."""
