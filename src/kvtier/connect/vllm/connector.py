"""`KvtierConnector`: implements vLLM's connector interface on top of the scheduler side and the worker side.

vLLM makes one connector in the scheduler's process and one in every worker. With one worker and no multiprocessing both
live in one process. This file alone knows vLLM's interface. It also catches kvtier's internal errors, which must never
make the engine fail.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvtier.connect.vllm.block_pool import BlockPins
from kvtier.connect.vllm.events import Events
from kvtier.connect.vllm.scheduler import Scheduler
from kvtier.connect.vllm.sides import EngineSetup, SchedulerSide, WorkerSide
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
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Request, VllmConfig
from kvtier.connect.vllm.weights import on_stack, watch_calls
from kvtier.connect.vllm.worker import StepDone, StepOrders
from kvtier.tier.registry import kind_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OTHER_SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED


class KvtierConnector(ConnectorBase, SupportsHMA):
    """vLLM's KV connector for kvtier. vLLM's `KVConnectorBase_V1` documents each method."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KvCacheConfig) -> None:  # noqa: ANN401
        ConnectorBase.__init__(self, vllm_config, role, kv_cache_config)
        self._is_broken = False
        setup = EngineSetup.of(vllm_config, kv_cache_config)
        self._sources = {"host": CacheHitSource.HOST} | {
            tier.name: CacheHitSource.DISK for tier in setup.config.tiers if kind_of(tier).folder(tier) is not None
        }
        is_scheduler = role is ConnectorRole.SCHEDULER
        if is_scheduler and setup.role == "kv_producer":
            # vLLM's scheduler reads the role after this, and delays the reuse of blocks that a running step still
            # writes only in an engine that loads. A prefill engine of kvtier loads, too.
            vllm_config.kv_transfer_config.kv_role = "kv_both"
        self._upper = (
            SchedulerSide(
                setup,
                tables=lambda request: self._kv_cache_manager.get_block_ids(request),  # noqa: PLW0108 - set later
                resident=lambda request: self._kv_cache_manager.get_computed_blocks(request)[0].get_block_ids(),
                open_pins=self._open_pins,
                open_events=partial(Events, stored=BlockStored, removed=BlockRemoved, external=external_hash),
            )
            if is_scheduler
            else None
        )
        self._lower = None if is_scheduler else WorkerSide(setup)

    def _open_pins(self, on_reuse: Callable[[int], None]) -> BlockPins:
        def guarded(act: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda block: self._guarded(lambda: act(block), None)

        return BlockPins(self._kv_cache_manager.block_pool, on_reuse, guarded)

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        """The result of `act`. After the first exception always `otherwise`: kvtier stays off until a restart."""
        if not self._is_broken:
            try:
                return act()
            except Exception:
                self._is_broken = True
                logger.exception("kvtier has failed and is off until a restart; requests are computed without it")
        return otherwise

    def _ask(self, act: Callable[[Scheduler], T], otherwise: T) -> T:
        """Guarded call of the scheduler side; `otherwise` until all workers are up."""
        scheduler = self._scheduler
        return otherwise if scheduler is None else self._guarded(lambda: act(scheduler), otherwise)

    @property
    def _scheduler(self) -> Scheduler | None:
        """None in a worker, and until all workers are up."""
        return None if self._upper is None else self._upper.scheduler

    @property
    def _rank(self) -> WorkerSide:
        assert self._lower is not None, "vLLM called a worker's method of the scheduler's connector"
        return self._lower

    # ---- scheduler: requests ---------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """All workers are up."""
        upper = self._upper
        assert upper is not None
        watch_calls(
            on_stack("model_executor"),
            lambda method, adapter: self._guarded(lambda: upper.called(method, adapter), None),
        )
        upper.connect(list(metadata.values()))

    def on_new_request(self, request: Request) -> None:
        """Track a new request."""
        self._ask(lambda scheduler: scheduler.arrived(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded."""
        tokens = self._ask(lambda scheduler: scheduler.matched(request, num_computed_tokens), 0)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Begin the load into the allocated blocks."""
        if num_external_tokens > 0:
            tables = blocks.get_block_ids()
            self._ask(lambda scheduler: scheduler.allocated(request, tables, num_external_tokens), None)
            if self._is_broken and (scheduler := self._scheduler) is not None:
                # The match may have been made before the error, and vLLM waits for its load from now on.
                scheduler.allocated_after_error(request, tables)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Tokens of a request's load, by source."""
        nothing: list[tuple[str, int]] = []
        found: dict[Any, int] = {}
        for place, tokens in self._ask(lambda scheduler: scheduler.sources(request), nothing):
            source = self._sources.get(place, _OTHER_SOURCE)
            found[source] = found.get(source, 0) + tokens
        return found if sum(found.values()) == num_external_tokens else {_OTHER_SOURCE: num_external_tokens}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with one KV group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. vLLM may free its blocks at once: pins protect the sources of stores."""
        announcement = self._ask(lambda scheduler: scheduler.finished(request, block_ids), None)
        if self._is_broken and (scheduler := self._scheduler) is not None:
            scheduler.forget(request)
        return False, announcement

    # ---- scheduler: steps ------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:  # noqa: ANN401
        """Metadata for the workers of a step."""
        scheduler = self._scheduler
        if scheduler is None:
            return StepOrders(0)
        orders = self._guarded(lambda: scheduler.orders(scheduler_output), None)
        return self._last_orders(scheduler) if orders is None else orders

    def _last_orders(self, scheduler: Scheduler) -> StepOrders:
        orders = StepOrders(0)
        try:
            orders = scheduler.last_orders()
            scheduler.unpin_all()
        except Exception:
            logger.exception("kvtier has failed again; open loads are reported with the next step")
        return orders

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Process a step's results."""
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._ask(lambda scheduler: scheduler.stepped(done), None)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free in the next step without a preemption."""
        return self._ask(lambda scheduler: scheduler.has_freed_blocks(), otherwise=False)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should take a step."""
        upper = self._upper
        return upper is not None and self._guarded(lambda: upper.has_news, otherwise=False)

    def take_events(self) -> list[Any]:
        """KV events for routers."""
        nothing: list[Any] = []
        return self._ask(lambda scheduler: scheduler.take_events(), nothing)

    def get_kv_connector_stats(self) -> Stats | None:
        """Metrics since the last call; the scheduler side counts for all ranks."""
        return None if self._upper is None else self._guarded(self._upper.stats, None)

    def reset_cache(self) -> bool:
        """Make everything cached before now unreachable."""
        return self._upper is not None and self._guarded(self._upper.reset, otherwise=False)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is only a later miss."""
        return False

    # ---- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the rank on the worker's KV memory."""
        self._rank.open(kv_caches)

    def get_handshake_metadata(self) -> Any:  # noqa: ANN401
        """The address at which the scheduler side reaches this rank."""
        return self._rank.handshake

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """Begin a step. Not guarded: if copies cannot be kept off reused blocks, the engine must not go on."""
        self._rank.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """No-op: loads run between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: loads run between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """No-op: stores begin when the step has returned."""

    def wait_for_save(self) -> None:
        """No-op: the engine never waits for a store."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """The ended loads."""
        received, failed = self._rank.worker.results()
        return TransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM takes for filled, but that no load filled."""
        return self._rank.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepDone:
        """Metadata for the scheduler after a step."""
        return self._rank.worker.done

    # ---- both ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the side of this process."""
        self._is_broken = False  # close even after an internal error
        self._guarded(self._rank.close if self._upper is None else self._upper.close, None)

    # ---- the server's process, which has no connector --------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Unpack metrics of another process."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,  # noqa: ARG003
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Metrics for `/metrics`."""
        return PromMetrics(metric_types, labelnames, per_engine_labelvalues)
