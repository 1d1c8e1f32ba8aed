"""The interface of an executor of commands, and the values that movers and sessions share."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.types import (
    ChunkKey,
    ChunkRecord,
    Command,
    Drop,
    Figures,
    Outcome,
    Probe,
    Recall,
    RecallPage,
    Tell,
    Transfer,
)

COUNT_MAX = 1 << 62
"""Largest figure accepted from a tier; larger ones are reduced to it."""

Work = Transfer | Probe | Drop | Tell | Recall
"""Commands that are completed. A `Cancel` is not, but the commands that it names are."""

QueuedWork = Transfer | Probe | Drop | Tell
"""Commands that wait in worker queues."""


class Completion(NamedTuple):
    """The result of a command."""

    command: Work
    outcome: Outcome
    """Always DONE, FAILED or CANCELLED, except for transfers."""
    present: tuple[bool, ...] = ()
    """Whether the tier holds each object, if a probe is DONE."""
    size_bytes: int = 0
    """Bytes moved, or 0 unless DONE: engine bytes for gather and scatter, frame bytes for demote and promote."""
    seconds: float = 0.0
    """Duration of the work; 0 if it never started."""
    waited_s: float = 0.0
    """Time in the queue."""
    detail: str = ""
    """Why the command is not DONE, for logs."""
    is_tier_fault: bool = False
    """Whether the tier failed or missed the deadline. Circuit breakers count faults; a refused write is not a fault."""
    reason: str = ""
    """Why a read refused the object (`CorruptChunkError`, `UnreadableChunkError`); otherwise empty."""
    page: RecallPage | None = None
    """The records, if a recall is DONE."""


class Completing:
    """Base class of executors. It stores the functions of `complete_to`, which is called before the first command."""

    _put: Callable[[Completion], None]
    _ready: Callable[[], None]

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None] = lambda: None) -> None:
        """Pass each completion to `put`, and call `ready` after one or more of them, while holding no lock."""
        self._put, self._ready = put, ready


class Executor(Protocol):
    """Executes a session's commands. It is one rank's `Mover`, a `RemoteRank` or a `RankGroup`.

    Every command except a `Cancel` is completed exactly once, and its completion carries the submitted object.
    """

    needs_flush: bool
    """Whether `flush` must follow `submit`."""

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order. Never block or do I/O; a command that cannot run is completed as FAILED.

        A `Cancel` completes the transfers and probes that it names as CANCELLED, unless they have started.
        """
        ...

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        """Pass each completion to `put`, and call `ready` after one or more of them, while holding no lock.

        Both run in the threads that complete commands, including those that call `submit`. Call this before the
        first `submit`. `put` must be quick. If it raises, it has not accepted the completion.
        """
        ...

    def flush(self) -> bool:
        """Send the commands that `submit` has queued for other processes. Return False if some remain. Never block."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Cancel commands that have not started and wait for the others. Return whether all have ended."""
        ...


class ChunkTexts(Protocol):
    """An engine adapter that knows the text of chunks: their token ids and extras.

    Both methods are called under the session's lock, from any thread. They must be quick and must not raise.
    """

    text_group: int
    """Number of the KV group whose objects carry texts. Each object of that group is a whole chunk of a history."""

    def text_of(self, key: ChunkKey) -> bytes:
        """Return the token ids of chunk `key` as little-endian u32, then at most 388 bytes of extras.

        Return empty bytes if the chunk is unknown.
        """
        ...

    def recalled(self, records: Sequence[ChunkRecord], tier: str) -> None:
        """Receive chunks that the tier has, or had a moment ago. Parents come first, perhaps in an earlier call.

        A chunk may come twice, and this engine may have stored it itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Number of threads per worker queue. The device has one queue, and each tier has three."""

    device: int = 2
    read: int = 4
    write: int = 2
    probe: int = 1


class TierView:
    """Plain values that one rank's tier and the session share.

    The session holds this instead of the tier, so it cannot do I/O under its lock. A rank in another process has its
    own view and sends the values (`protocol.TierReport`).
    """

    __slots__ = ("figures", "is_up", "stuck_queues")

    def __init__(self) -> None:
        self.figures = Figures()
        """The tier's figures; its threads set them about once a second while they work."""
        self.is_up: bool | None = None
        """Whether the session reads the tier; None until the session sets it. It is not sent to other processes."""
        self.stuck_queues: Callable[[], int] = lambda: 0
        """Returns how many of the tier's worker queues are stuck (`WorkerQueue.is_stuck`). Does no I/O."""


class Job:
    """One command in a worker queue.

    Args:
        command: the command.
        submitted_s: when it was submitted.
        together: how many jobs of this kind a thread may take as a batch; 1 for no batches.
    """

    __slots__ = ("after", "command", "deadline_s", "is_answered", "is_in_tier", "over", "submitted_s", "together")

    def __init__(self, command: QueuedWork, submitted_s: float, together: int = 1) -> None:
        self.command = command
        self.submitted_s = submitted_s
        self.together = together
        self.deadline_s = math.inf if isinstance(command, Drop | Tell) else command.deadline_s
        """Time after which the core ignores the result; infinite for drops and tells."""
        self.is_in_tier = False
        """Whether an exception now would be the tier's fault."""
        self.is_answered = False
        self.over: threading.Event | None = None
        """Set when a drop is completed; None for other commands."""
        self.after: threading.Event | None = None
        """For a demotion, the `over` of an earlier drop of the same object, which must end first."""
