"""Does the worker's part of each engine step: keeps copies off reused blocks, and reports loads that have ended."""

import threading
from collections.abc import Callable, Sequence

from kvtier.connect.vllm.checkpoint_reads import AdapterRead, AdaptersRead
from kvtier.connect.vllm.step_metadata import LOADED_NOTE, LoadReport, StepDone, StepOrders
from kvtier.runtime.protocol import Note
from kvtier.types import RequestId

IDLE_WAIT_S = 0.002
"""Seconds that an empty step waits for a report (`Worker.results`). A request that arrives meanwhile waits, too."""

FENCE_WAIT_S = 30.0
"""Seconds that a revoked copy into vLLM's blocks may continue. After that, the device counts as hung."""


def no_look(*, is_reset: bool) -> str:  # noqa: ARG001
    """Report that nothing has changed, without looking at any weights."""
    return ""


class Worker:
    """One worker. A load ends once it has ended on every rank, so all workers of an engine report the same loads.

    Args:
        revoke: stops all copies of some requests in its rank's copier. It returns False if a copy still runs after the
            wait.
        look: returns what has changed the weights; see `WeightSample.look`.
        adapters: watches the adapters that vLLM reads in this process. None if the engine has no adapters.
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
        """Whether the weights or the KV have no memory, so that nothing may look at them."""
        self._changed = threading.Condition()
        self._loaded: list[LoadReport] = []
        """Reports of ended loads, bounded by the number of open loads."""
        self._received_once: set[RequestId] = set()
        """Loads that either a note or step metadata has reported, but not yet both."""
        self._bad_blocks: set[int] = set()
        self._orders = StepOrders(0)

    def receive(self, note: Note) -> None:
        """Receive a note from the scheduler side. Any thread may call this."""
        if note.subject == LOADED_NOTE:
            self._receive(LoadReport(note.request, note.numbers, note.flag))

    def begin(self, orders: StepOrders) -> None:
        """Start a step. After this call, no copy touches the blocks that vLLM reuses in the step."""
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
        """Return requests whose loads ended since the last call, and those whose loads failed. Call after the forward.

        The worker looks at its weights here. A change before or during the forward makes the step's loads fail. Then
        `done` keeps the scheduler from storing what the step has computed. A step that neither computes nor reports a
        load leaves the look to the next step.

        vLLM runs empty steps in a loop while it has nothing to compute, in the process whose threads copy the KV. Each
        system call of these threads then waits for the GIL, up to 5 ms (`sys.getswitchinterval`). So an empty step
        waits here for the next report, and thereby releases the GIL. Reading 31 files of 0.5 MB on two cores took 14 ms
        with the wait. Without the wait, the median was 51 ms, or 21 ms with a switch interval of 0.5 ms, or 149 ms with
        one of 20 ms. (More and smaller reads took 2.6 s without the wait.)
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
        """Return the blocks, new since the last call, that vLLM considers filled but that no load filled."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    @property
    def done(self) -> StepDone:
        """Metadata for the scheduler, after every step."""
        return StepDone(self._orders.step, self._changed_weights, self._adapters_read)

    def look_now(self) -> str:
        """Return what has changed the weights since the start or the last reset; empty if nothing has."""
        self._changed_weights = self._look(is_reset=False)
        return self._changed_weights

    def look_anew(self) -> None:
        """Compare the weights with the present ones from now on."""
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
        """Stop copies. A copy that cannot be stopped would overwrite computed KV, so the engine must not continue."""
        if not self._revoke(requests, FENCE_WAIT_S):
            raise TimeoutError(f"a KV copy did not end within {FENCE_WAIT_S:g} s; the device appears to hang")
