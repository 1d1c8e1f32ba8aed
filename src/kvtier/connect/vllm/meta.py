"""What the scheduler's half and the workers' half say to each other with each engine step. vLLM carries it, pickled.

Both are plain values that vLLM only passes on; they need none of its base classes, and are tested without it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.types import RequestId

ASYNC_NOTE = "loaded"
SYNC_NOTE = "ready"
"""Subjects of the notes about loads that have ended (`runtime.rank_group.Note`)."""


class Ended(NamedTuple):
    """A load has ended: what a worker has to report to vLLM."""

    load: RequestId
    """Ends with vLLM's name of the request, behind a slash."""
    bad_blocks: tuple[int, ...]
    """Blocks that vLLM believes filled and that are not."""
    is_failed: bool
    """Nothing of the load counts."""
    is_async: bool
    """VLLM waits for the report; otherwise it is the worker that waits, before the forward."""

    @property
    def request(self) -> str:
        """VLLM's name of the request."""
        return self.load.partition("/")[2]


class Awaited(NamedTuple):
    """A load that must have ended before the forward."""

    load: RequestId
    blocks: tuple[int, ...]
    """Where it goes."""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """From the scheduler to every worker, with each step."""

    step: int
    revoked: tuple[RequestId, ...] = ()
    """Stores whose blocks vLLM hands out again in this step: what they read from the forward on does not count."""
    awaited: tuple[Awaited, ...] = ()
    ended: tuple[Ended, ...] = ()
    """All loads that have ended since the step before; most of them were told already."""
    is_waiting: bool = False
    """There is nothing to compute, and some load is under way."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """From a worker back to the scheduler: the forward of `step` has run."""

    step: int

    def aggregate(self, other: "StepDone") -> "StepDone":
        """What two workers say together."""
        return StepDone(min(self.step, other.step))
