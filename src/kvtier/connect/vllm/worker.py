"""The worker's part of each engine step, and the metadata that vLLM carries between scheduler and workers (pickled).

Copies do not travel with steps: the core sends them to the rank's mover directly. Step metadata carries only what must
be ordered with the forward: blocks that copies must keep off, and loads that have ended.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier.connect.vllm.files_read import AdapterRead, AdaptersRead
from kvtier.connect.vllm.vllm_types import LoraRequest
from kvtier.keys.weights import FileVersion
from kvtier.runtime.protocol import Note
from kvtier.types import RequestId

LOADED_NOTE = "loaded"
"""Subject of the notes about ended loads (`runtime.protocol.Note`)."""

IDLE_WAIT_S = 0.002
"""How long an empty step waits for a report (`Worker.results`). A request that arrives meanwhile waits, too."""

FENCE_WAIT_S = 30.0
"""How long a revoked copy into vLLM's blocks may go on running. After this the device counts as hung."""


class LoadReport(NamedTuple):
    """An ended load, as a worker reports it to vLLM."""

    load: RequestId
    """Contains vLLM's request id, after a slash."""
    bad_blocks: tuple[int, ...]
    """Blocks that vLLM takes for filled, but that the load did not fill."""
    is_failed: bool
    """The load delivered nothing that vLLM can use."""
    adapter: LoraRequest | None = None
    """The request's adapter. Only orders report such a load, because the worker looks at the adapter first."""

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
    """All loads that ended since the last step. Most were already announced by a note."""
    named: Mapping[int, Collection[Mapping[Path, FileVersion]]] = field(
        default_factory=dict[int, Collection[Mapping[Path, FileVersion]]]
    )
    """The versions of files that the KV of these loads belongs to, by number of the adapter."""
    is_empty: bool = False
    """The step computes nothing."""
    is_waiting: bool = False
    """The step computes nothing, and a load is open."""
    is_off: bool = False
    """The weights have changed: all loads have failed, even those that have been reported as complete."""
    is_reset: bool = False
    """The first step after a cache reset: weights that have changed before count as unchanged."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step metadata from a worker to the scheduler: the forward of `step` has run."""

    step: int
    changed: str = ""
    """What has changed the worker's weights before the step's end, since the last reset; empty if nothing has."""
    adapters: tuple[AdapterRead, ...] = ()
    """The adapters that were loaded since the step before."""

    def aggregate(self, other: "StepDone") -> "StepDone":
        """Combine two workers' metadata; called by vLLM."""
        changed = self.changed or other.changed
        return StepDone(min(self.step, other.step), changed, self.adapters + other.adapters)


def no_look(*, is_reset: bool) -> str:  # noqa: ARG001
    """Look at no weights: nothing has changed."""
    return ""


class Worker:
    """One worker. A load ends when it has ended on every rank, so all workers of an engine report the same loads.

    Args:
        revoke: stops all copies of some requests, in its rank's copier; False if one still runs at the end of its wait.
        look: what has changed the weights; see `weights.WeightSample.look`.
        adapters: watches the adapters that vLLM reads in this process; None without any.
    """

    def __init__(
        self,
        revoke: Callable[[Sequence[RequestId], float], bool],
        look: Callable[..., str] = no_look,
        adapters: AdaptersRead | None = None,
    ) -> None:
        self._revoke = revoke
        self._look = look
        self._adapters = adapters
        self._adapters_read: tuple[AdapterRead, ...] = ()
        self._changed_weights = ""
        self.is_asleep = False
        """The weights or the KV have no memory, so nothing looks at them."""
        self._changed = threading.Condition()
        self._loaded: list[LoadReport] = []
        """Bounded by the number of open loads."""
        self._received_once: set[RequestId] = set()
        """Loads reported by either a note or step metadata, but not yet by both."""
        self._bad_blocks: set[int] = set()
        self._orders = StepOrders(0)

    def receive(self, note: Note) -> None:
        """Take a note from the scheduler side. Any thread."""
        if note.subject == LOADED_NOTE:
            self._receive(LoadReport(note.request, note.numbers, note.flag))

    def begin(self, orders: StepOrders) -> None:
        """Begin a step. After this no copy touches the blocks that vLLM reuses in it."""
        self._orders = orders
        if orders.is_reset and not self.is_asleep:
            self._changed_weights = self._look(is_reset=True)
        if orders.revoked:
            self._fence(orders.revoked)
        for report in orders.ended:
            if report.adapter is None:
                self._receive(report)
            else:
                named = orders.named.get(report.adapter.lora_int_id, ())
                is_read = self._adapters is not None and self._adapters.has_read(report.adapter, named)
                with self._changed:
                    self._loaded.append(report._replace(is_failed=report.is_failed or not is_read))

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them whose loads failed. After the forward.

        This is where the worker looks at its weights: a change before or during the forward makes the step's loads
        fail, and `done` keeps the scheduler from storing what the step has computed. A step that neither computes nor
        reports a load leaves the look to the next one.

        While vLLM has nothing to compute it runs empty steps in a loop, in the process whose threads copy the KV. Each
        of their system calls then waits for the GIL, up to 5 ms (`sys.getswitchinterval`). So an empty step waits here
        for the next report, which releases the GIL. Measured with 31 files of 0.5 MB on two cores: 14 ms with the
        wait; without it 51 ms in the median, 21 ms with a switch interval of 0.5 ms, 149 ms with one of 20 ms. (With
        more and smaller reads it took 2.6 s.)
        """
        with self._changed:
            if self._orders.is_waiting and not self._loaded:
                self._changed.wait(IDLE_WAIT_S)
            loaded, self._loaded = self._loaded, []
        if (loaded or not self._orders.is_empty) and not self.is_asleep:
            self._changed_weights = self._look(is_reset=False)
        if self._adapters is not None:
            self._adapters_read = self._adapters.take()
        if self._orders.is_off or self._changed_weights:
            loaded = [each._replace(is_failed=True) for each in loaded]
        # vLLM computes the tokens of unfilled blocks, possibly in other blocks.
        self._bad_blocks.update(*(each.bad_blocks for each in loaded))
        # After an internal error a load may end while one of its copies still runs.
        incomplete = [each.load for each in loaded if each.bad_blocks or each.is_failed]
        if incomplete:
            self._fence(incomplete)
        return {each.request for each in loaded}, {each.request for each in loaded if each.is_failed}

    def take_bad_blocks(self) -> set[int]:
        """Blocks since the last call that vLLM takes for filled, but that no load filled."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    @property
    def done(self) -> StepDone:
        """Metadata for the scheduler, after every step."""
        return StepDone(self._orders.step, self._changed_weights, self._adapters_read)

    def look_now(self) -> str:
        """What has changed the weights since the start or the last reset; empty if nothing has."""
        self._changed_weights = self._look(is_reset=False)
        return self._changed_weights

    def look_anew(self) -> None:
        """From now on compare the weights with what they are now."""
        self._changed_weights = self._look(is_reset=True)

    def _receive(self, report: LoadReport) -> None:
        with self._changed:
            if report.load in self._received_once:
                self._received_once.discard(report.load)
                return
            self._received_once.add(report.load)
            self._loaded.append(report)
            self._changed.notify_all()

    def _fence(self, requests: Sequence[RequestId]) -> None:
        """Stop copies. A copy that cannot be stopped would overwrite computed KV, so the engine must not go on."""
        if not self._revoke(requests, FENCE_WAIT_S):
            raise TimeoutError(f"a KV copy has not ended within {FENCE_WAIT_S:g} s; the device hangs")
