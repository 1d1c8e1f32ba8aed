"""`KvtierConnector`: what vLLM calls, passed on to the half that lives in this process.

vLLM makes one connector in the scheduler's process and one in every worker; with one worker and no multiprocessing all
of them live in one process. This file is the only one that knows vLLM's interface, and the one place where mishaps of
ours end: a guest never makes the engine fail.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvtier.connect.vllm.block_pool import BlockPins, Pins
from kvtier.connect.vllm.events import Events, Movements
from kvtier.connect.vllm.meta import StepDone, StepOrders
from kvtier.connect.vllm.scheduler import Scheduler
from kvtier.connect.vllm.sides import Opening, SchedulerSide, WorkerSide
from kvtier.connect.vllm.stats import PromMetrics, Stats
from kvtier.connect.vllm.vllm_imports import (
    BlockRemoved,
    BlockStored,
    CacheHitSource,
    ConnectorBase,
    ConnectorRole,
    SupportsHMA,
    TransferResults,
    external_hash,
)
from kvtier.connect.vllm.vllm_types import BlockTables, KvCacheConfig, Request, VllmConfig

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_SOURCES = {"host": CacheHitSource.HOST, "directory": CacheHitSource.DISK, "disk": CacheHitSource.DISK}
_OTHER_SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED


class KvtierConnector(ConnectorBase, SupportsHMA):
    """KV that outlives the GPU's memory and the process. What a method is for stands at vLLM's `KVConnectorBase_V1`."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KvCacheConfig) -> None:  # noqa: ANN401
        ConnectorBase.__init__(self, vllm_config, role, kv_cache_config)
        self._is_broken = False
        opening = Opening.of(vllm_config, kv_cache_config)
        is_scheduler = role is ConnectorRole.SCHEDULER
        self._upper = (
            SchedulerSide(opening, self._tables, self._resident, self._open_pins, _events) if is_scheduler else None
        )
        self._lower = None if is_scheduler else WorkerSide(opening)

    def _tables(self, request: str) -> BlockTables:
        return self._kv_cache_manager.get_block_ids(request)

    def _resident(self, request: Request) -> BlockTables:
        return self._kv_cache_manager.get_computed_blocks(request)[0].get_block_ids()

    def _open_pins(self, on_reuse: Callable[[int], None]) -> Pins:
        def guarded(act: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda block: self._guarded(lambda: act(block), None)

        return BlockPins(self._kv_cache_manager.block_pool, on_reuse, guarded)

    def _guarded(self, act: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What `act` gives; once it has raised, for good `otherwise`."""
        if not self._is_broken:
            try:
                return act()
            except Exception:
                self._is_broken = True
                logger.exception("kvtier has failed and is not used any more; requests are computed from now on")
        return otherwise

    def _asked(self, act: Callable[[Scheduler], Answer], otherwise: Answer) -> Answer:
        """What `act` gives for our half of the scheduler; `otherwise` until all workers are up."""
        scheduler = self._scheduler
        return otherwise if scheduler is None else self._guarded(lambda: act(scheduler), otherwise)

    @property
    def _scheduler(self) -> Scheduler | None:
        """Our half of the scheduler; None in a worker, and until all workers are up."""
        return None if self._upper is None else self._upper.scheduler

    @property
    def _rank(self) -> WorkerSide:
        assert self._lower is not None, "vLLM has called the scheduler's connector as a worker's"
        return self._lower

    # ---- scheduler: requests ---------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """All workers are up."""
        assert self._upper is not None
        self._upper.connect(list(metadata.values()))

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self._asked(lambda scheduler: scheduler.arrived(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much can be loaded."""
        nothing: tuple[int | None, bool] = (0, False)
        return self._asked(lambda scheduler: scheduler.matched(request, num_computed_tokens), nothing)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """There is room for it."""
        if num_external_tokens > 0:
            tables = blocks.get_block_ids()
            self._asked(lambda scheduler: scheduler.allocated(request, tables, num_external_tokens), None)
            if self._is_broken and (scheduler := self._scheduler) is not None:
                # It was promised before, perhaps, and from now on vLLM waits for it.
                scheduler.allocated_in_vain(request, tables)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Where it comes from."""
        nothing: list[tuple[str, int]] = []
        found: dict[Any, int] = {}
        for place, tokens in self._asked(lambda scheduler: scheduler.sources(request), nothing):
            source = _SOURCES.get(place, _OTHER_SOURCE)
            found[source] = found.get(source, 0) + tokens
        return found if sum(found.values()) == num_external_tokens else {_OTHER_SOURCE: num_external_tokens}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; vLLM may have its blocks, because nothing waits for a store."""
        self._asked(lambda scheduler: scheduler.finished(request, block_ids), None)
        if self._is_broken and (scheduler := self._scheduler) is not None:
            scheduler.forget(request)
        return False, None

    # ---- scheduler: steps ------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:  # noqa: ANN401
        """A step goes out."""
        scheduler = self._scheduler
        if scheduler is None:
            return StepOrders(0)
        orders = self._guarded(lambda: scheduler.orders(scheduler_output), None)
        return self._last_orders(scheduler) if orders is None else orders

    def _last_orders(self, scheduler: Scheduler) -> StepOrders:
        orders = StepOrders(0)
        try:
            orders = scheduler.last_orders()
            scheduler.let_go()
        except Exception:
            if scheduler.is_awaited:
                raise  # the forward would read blocks that nothing has filled
            logger.exception("kvtier has failed again; loads that have not ended are reported with the next step")
        return orders

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """A step has come back."""
        done = connector_output.kv_connector_worker_meta
        bad_blocks = connector_output.invalid_block_ids
        scheduler = self._scheduler
        if isinstance(done, StepDone) and scheduler is not None:
            if bad_blocks:
                self._guarded(lambda: scheduler.hide(bad_blocks), None)
                if self._is_broken:
                    scheduler.hide(bad_blocks)  # not guarded: where they could be found, the engine must not go on
            self._guarded(lambda: scheduler.stepped(done), None)

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM can have blocks in the next step without preempting anybody."""
        return self._asked(lambda scheduler: scheduler.has_freed_blocks(), otherwise=False)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine has to take a step for us."""
        upper = self._upper
        return upper is not None and self._guarded(lambda: upper.has_news, otherwise=False)

    def take_events(self) -> list[Any]:
        """What routers are to be told."""
        nothing: list[Any] = []
        return self._asked(lambda scheduler: scheduler.take_events(), nothing)

    def get_kv_connector_stats(self) -> Stats | None:
        """What was counted; by the scheduler's half for all."""
        return None if self._upper is None else self._guarded(self._upper.stats, None)

    def reset_cache(self) -> bool:
        """Nothing from before is found any more."""
        return self._upper is not None and self._guarded(self._upper.reset, otherwise=False)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later on, and nothing worse."""
        return False

    # ---- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The worker's KV is there."""
        self._rank.open(kv_caches)

    def get_handshake_metadata(self) -> Any:  # noqa: ANN401
        """How the scheduler's half reaches this rank."""
        return self._rank.handshake

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """A step begins. Not guarded: where copies cannot be kept off blocks, the engine must not go on."""
        self._rank.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """The forward needs what is waited for here; before it, or in a step that waits for nothing behind it."""
        self._rank.worker.wait_for_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are waited for as a whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: stores begin when the step has come back."""

    def wait_for_save(self) -> None:
        """Nothing: no store needs the engine to wait."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Which loads have ended."""
        received, failed = self._rank.worker.results()
        return TransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM believes filled and that are not."""
        return self._rank.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepDone:
        """The step has run."""
        return self._rank.worker.done

    # ---- both ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The engine ends."""
        self._is_broken = False  # what is open has to be closed, whatever went wrong before
        self._guarded(self._rank.close if self._upper is None else self._upper.close, None)

    # ---- the process with the server: there is no instance ---------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counts that have travelled."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,  # noqa: ARG003
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Shows them in `/metrics`."""
        return PromMetrics(metric_types, labelnames, per_engine_labelvalues)


def _events(movements: Movements, hash_tokens: int, table: int) -> Events:
    return Events(
        movements,
        hash_tokens=hash_tokens,
        table=table,
        stored=BlockStored,
        removed=BlockRemoved,
        external=external_hash,
    )
