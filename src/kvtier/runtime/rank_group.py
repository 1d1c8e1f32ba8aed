"""Combines several ranks into one executor: a command goes to all ranks and is completed once all have completed it."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.runtime.executor import Completing, Completion, TierView, Work
from kvtier.runtime.mover import Mover
from kvtier.runtime.protocol import Note
from kvtier.runtime.remote_rank import RemoteRank
from kvtier.types import SEVERITY, Cancel, Command, Outcome, Probe, Recall


class RankGroup(Completing):
    """An `Executor` over all ranks of one engine. The worst outcome of any rank is the outcome of the command.

    One rank probes a remote tier for all ranks, using its own names, because all ranks write their objects together.
    The answer is a hint: if another rank lacks an object, its promotion fails and the load is shorter. Only rank 0
    answers a recall.

    Args:
        ranks: at least one rank; its completions go to the group from now on.
        remote: names of the remote tiers.

    Only the owner's thread may call `close`; any thread may call the other methods.
    """

    needs_flush = True

    def __init__(self, ranks: Sequence[Mover | RemoteRank], remote: Collection[str] = ()) -> None:
        self._ranks = tuple(ranks)
        self._lock = threading.Lock()
        self._open: dict[int, _PendingCommand] = {}
        """Open commands, by object identity because a drop has no id."""
        self._asked = dict.fromkeys(remote, 0)
        """Position of the rank that probes each remote tier: the rank whose call failed last. So a tier that one rank
        cannot reach does not count as healthy."""
        for position, rank in enumerate(self._ranks):
            rank.complete_to(partial(self._answered, position), self._announce)

    @property
    def lost(self) -> str:
        """Why a rank, and so the whole group, is lost; empty if none is."""
        return next((rank.lost for rank in self._ranks if rank.lost), "")

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order."""
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

    def flush(self) -> bool:
        """Send the commands that `submit` has queued for other processes. Return False if some remain."""
        are_flushed = [rank.flush() for rank in self._ranks]
        return all(are_flushed)

    def send_note(self, note: Note) -> None:
        """Pass `note` to the adapter of every rank, in order, from any thread. A lost rank does not receive it."""
        for rank in self._ranks:
            rank.send_note(note)

    def when_leaving(self, act: Callable[[], None]) -> None:
        """Call `act` when a rank's process is about to end. `act` must be quick and may run in any thread.

        The rank then waits, up to a deadline, to be closed, so that pending demotions can finish.
        """
        for rank in self._ranks:
            rank.when_leaving(act)

    def close(self, deadline_s: float) -> bool:
        """Cancel commands that have not started and wait for the others. Return whether all have ended.

        Ranks close concurrently, so that a rank that hangs does not use up the others' deadline.
        """
        results = [False] * len(self._ranks)

        def close(position: int) -> None:
            results[position] = self._ranks[position].close(deadline_s)

        acts = {f"kvtier close rank {position}": partial(close, position) for position in range(len(self._ranks))}
        in_threads(acts, deadline_s + 1.0)
        return all(results)

    def _answered(self, position: int, completion: Completion) -> None:
        """Handle one rank's completion. Any thread may call this."""
        with self._lock:
            if completion.is_tier_fault and completion.command.tier in self._asked:
                self._asked[completion.command.tier] = position
            waiting = self._open[id(completion.command)]
            together = completion if waiting.completion is None else merged(waiting.completion, completion)
            # An exception before this point means that the completion was not accepted.
            if waiting.left > 1:
                waiting.completion = together
                waiting.left -= 1
            else:
                self._put(together)
                del self._open[id(completion.command)]

    def _announce(self) -> None:
        self._ready()


class _PendingCommand:
    """A command that not every rank has completed."""

    __slots__ = ("command", "completion", "left")

    def __init__(self, command: Work, ranks: int) -> None:
        self.command = command  # keeps the object alive, so that its `id` is not reused
        self.left = ranks
        self.completion: Completion | None = None


def merged(one: Completion, other: Completion) -> Completion:
    """Merge the completions of two ranks: the worst outcome with its detail and reason, and the slower times.

    A probe finds only objects that both ranks found. The bytes are summed.
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
    """Call each of `acts` in a thread with its name, and wait up to `deadline_s` seconds for all of them."""
    started: list[threading.Thread] = []
    for name, act in acts.items():
        thread = threading.Thread(target=act, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system cannot start another thread
            act()
        else:
            started.append(thread)
    until_s = time.monotonic() + deadline_s
    for thread in started:
        thread.join(max(0.0, until_s - time.monotonic()))


Ranks = Mover | RemoteRank | RankGroup
"""The executor of all ranks of one engine."""


class OpenRanks(NamedTuple):
    """The ranks of a core, and the values that are the same on all of them."""

    executor: Ranks
    slots: tuple[int, ...]
    """Number of slots of each group."""
    tiers: tuple[str, ...]
    """Names of the lower tiers, fastest first."""
    down: frozenset[str] = frozenset()
    """Names of tiers that some rank has not yet opened."""
    views: Sequence[Mapping[str, TierView]] = ()
    """Each rank's tier views, by name."""
    rank_count: int = 1
    """Number of ranks."""
