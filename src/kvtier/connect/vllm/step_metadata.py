"""Defines the metadata of engine steps. vLLM pickles it and carries it between the scheduler and the workers.

Orders to copy do not travel with steps, because the core sends them to the rank's mover directly. Step metadata carries
only what must be ordered with the forward: blocks that copies must not touch, and loads that have ended.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier.connect.vllm.checkpoint_reads import AdapterRead
from kvtier.connect.vllm.vllm_types import LoraRequest
from kvtier.keys.weights import FileVersion
from kvtier.types import RequestId

LOADED_NOTE = "loaded"
"""Subject of the notes about ended loads (`runtime.protocol.Note`)."""


class LoadReport(NamedTuple):
    """A load that has ended, as a worker reports it to vLLM."""

    load: RequestId
    """The load's id, which contains vLLM's request id after a slash."""
    bad_blocks: tuple[int, ...]
    """Blocks that vLLM considers filled, but that the load did not fill."""
    is_failed: bool
    """Whether the load delivered nothing that vLLM can use."""
    adapter: LoraRequest | None = None
    """The request's adapter. Only orders report a load with an adapter, because the worker checks the adapter first."""

    @property
    def request(self) -> str:
        """Request id in vLLM."""
        return self.load.partition("/")[2]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Step metadata from the scheduler to every worker."""

    step: int
    revoked: tuple[RequestId, ...] = ()
    """Stores and loads whose blocks vLLM reuses in this step. Their copies no longer count."""
    ended: tuple[LoadReport, ...] = ()
    """All loads that ended since the last step. A note has already announced most of them."""
    named: Mapping[int, Collection[Mapping[Path, FileVersion]]] = field(
        default_factory=dict[int, Collection[Mapping[Path, FileVersion]]]
    )
    """The versions of the adapter files to which the KV of the loads in `ended` belongs, by adapter number."""
    is_empty: bool = False
    """Whether the step computes nothing."""
    is_waiting: bool = False
    """Whether the step computes nothing and a load is open."""
    is_off: bool = False
    """Whether loads and stores are off (`Invalidation.is_off`). Then even loads reported as complete have failed."""
    is_reset: bool = False
    """Whether this step is the first after a cache reset. Weights that changed before it count as unchanged."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step metadata from a worker to the scheduler: the forward of `step` has run."""

    step: int
    changed: str = ""
    """What changed the worker's weights between the last reset and the step's end; empty if nothing did."""
    adapters: tuple[AdapterRead, ...] = ()
    """The adapters that were loaded since the previous step."""

    def aggregate(self, other: "StepDone") -> "StepDone":
        """Combine two workers' metadata. vLLM calls this."""
        changed = self.changed or other.changed
        return StepDone(min(self.step, other.step), changed, self.adapters + other.adapters)
