"""What a mover is given and what it answers."""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvtier.types import Command, Drop, Outcome, Probe, Tell, Transfer

Work = Transfer | Probe | Drop | Tell
"""The commands that are answered. A `Cancel` is not: the transfers that it names are."""


class Completion(NamedTuple):
    """The one answer to a command."""

    command: Work
    outcome: Outcome
    """For a probe, drop or tell DONE, FAILED or CANCELLED."""
    present: tuple[bool, ...] = ()
    """For a probe that is DONE: which of its objects the tier holds."""
    size_bytes: int = 0
    """Bytes moved; 0 unless DONE. Of engine blocks for gather and scatter, of the frame for demote and promote."""
    seconds: float = 0.0
    """How long the work took; 0 when it never began."""
    waited_s: float = 0.0
    """How long it waited for a thread before."""
    detail: str = ""
    """Why it is not DONE, for people."""
    is_tier_fault: bool = False
    """The tier failed or kept it waiting past its deadline: what a circuit breaker counts. A refusal is no fault."""


class Executor(Protocol):
    """Executes a session's commands: one rank's `Mover`, a `RemoteRank` or a `RankGroup`.

    Every command but a `Cancel` is completed exactly once, and its completion carries the object that was submitted.
    """

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order. Never blocks; a command that cannot run is completed as FAILED.

        A `Cancel` completes the transfers and probes that it names as CANCELLED if they have not begun.
        """
        ...

    def take(self, wait_s: float = 0.0) -> list[Completion]:
        """The completions since the last call; waits up to `wait_s` seconds for the first, or until `wake`."""
        ...

    def wake(self) -> None:
        """Make a waiting `take` return, or the next one that would wait. May be called from any thread."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Cancel commands that have not begun and wait for the others; whether all have ended."""
        ...


class Observer(Protocol):
    """Whoever counts. Called by the session's owner thread only, so it needs no lock of its own."""

    def submitted(self, command: Work) -> None:
        """`command` was given to the mover."""
        ...

    def completed(self, completion: Completion) -> None:
        """Its answer was taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Threads of each worker queue. The device has one queue, each tier has three."""

    device: int = 2
    read: int = 4
    write: int = 2
    probe: int = 1


class Figures(NamedTuple):
    """How full a tier is and what it wrote. None: the tier has no such figure."""

    used_bytes: int | None = None
    capacity_bytes: int | None = None
    """The cap now: less than its setting while the file system is full."""
    evictions: int | None = None
    """Objects evicted since the start."""
    write_bytes: Mapping[str, int] = MappingProxyType({})
    """Bytes since the start, by what they were."""


class TierView:
    """What the threads of one tier and the threads that decide leave for each other.

    Plain values. A thread that decides has this in place of the tier, so it cannot do the tier's I/O.
    """

    __slots__ = ("figures", "is_up", "stuck_queues")

    def __init__(self) -> None:
        self.figures = Figures()
        """Left by the tier's threads about once a second while there is work for it."""
        self.is_up: bool | None = None
        """Left by the session: whether it reads the tier. None: no session has left it yet."""
        self.stuck_queues: Callable[[], int] = lambda: 0
        """How many of the tier's queues have all their threads in calls that do not return. Does no I/O."""


class Job:
    """One command on its way through a queue.

    Args:
        command: which.
        submitted_s: when it came.
        together: how many jobs of its kind a thread may take at once, when they wait; 1 is each by itself.
    """

    __slots__ = ("after", "command", "deadline_s", "is_answered", "is_in_tier", "over", "submitted_s", "together")

    def __init__(self, command: Work, submitted_s: float, together: int = 1) -> None:
        self.command = command
        self.submitted_s = submitted_s
        self.together = together
        self.deadline_s = math.inf if isinstance(command, Drop | Tell) else command.deadline_s
        """After it the answer no longer counts; a drop or tell has none."""
        self.is_in_tier = False
        """A tier is being called, so what is raised is the tier's fault."""
        self.is_answered = False
        self.over: threading.Event | None = None
        """Of a drop: set when it has been answered."""
        self.after: threading.Event | None = None
        """Of a demotion: `over` of a drop of the same object that came before."""
