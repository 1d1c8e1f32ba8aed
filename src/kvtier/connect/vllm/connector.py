"""Implements vLLM's connector interface on top of the scheduler side and the worker side.

vLLM makes one connector in the scheduler's process and one in every worker. With one worker and no multiprocessing,
both are in one process. Only this file knows vLLM's interface. In the scheduler's process it also catches kvtier's
internal errors, which must not make the engine fail. In a worker's steps it catches none. Otherwise the engine would
compute with KV that nothing has filled or that a copy still overwrites.
"""

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from kvtier.connect.engine_metrics import PromMetrics, Stats
from kvtier.connect.vllm.engine_hooks import WorkerCall, check, let_role_load, on_stack, watch_calls
from kvtier.connect.vllm.engine_setup import EngineSetup
from kvtier.connect.vllm.geometry import TableLayout
from kvtier.connect.vllm.requests.kv_events import BlockEvent
from kvtier.connect.vllm.scheduler.lookups import UNKNOWN_PLACE
from kvtier.connect.vllm.scheduler.scheduler_side import SchedulerSide
from kvtier.connect.vllm.scheduler.weight_calls import SLEEPS
from kvtier.connect.vllm.step_metadata import StepDone, StepOrders
from kvtier.connect.vllm.support import check_alone, check_others
from kvtier.connect.vllm.vllm_imports import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheHitSource,
    ConnectorBase,
    ConnectorRole,
    SupportsHMA,
    TransferResults,
    external_hash,
    extra_keys,
    gathered,
    hash_block,
    hash_function,
    own_token_share,
    published_keys,
    spec_kind,
    transfer_group,
    wake_up,
)
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Request, VllmConfig
from kvtier.connect.vllm.worker.worker_side import WorkerSide
from kvtier.errors import described

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDENTITY, _LAYOUT = "identity", "layout"
"""Keys in the handshake of a worker with the scheduler side."""


def _waking() -> Callable[[], None]:
    """Return a function that wakes the engine's loop. It does nothing if the engine's owner calls each step itself."""
    queue = on_stack("input_queue", None)
    return (lambda: None) if queue is None else lambda: queue.put_nowait((wake_up, None))


class KvtierConnector(ConnectorBase, SupportsHMA):
    """vLLM's KV connector for kvtier. vLLM's `KVConnectorBase_V1` documents each method."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KvCacheConfig) -> None:  # noqa: ANN401
        ConnectorBase.__init__(self, vllm_config, role, kv_cache_config)
        self._is_broken = False
        self._failure = ""
        """The first internal error. Empty if there was none."""
        is_worker = role is ConnectorRole.WORKER
        is_one_of_many = is_worker and vllm_config.parallel_config.world_size > 1
        try:
            self._setup = EngineSetup.of(vllm_config, kv_cache_config)
            """The engine's setup. The scheduler's connector takes the identity from the workers once they are up."""
            check(
                "engine",
                *(("worker", "layers") if is_worker else ("core", "scheduler")),
                *(("cpu",) if is_worker and vllm_config.device_config.device_type == "cpu" else ()),
                *(("lora",) if is_worker and vllm_config.lora_config is not None else ()),
                *(("prefix_protection",) if not is_worker and self._setup.config.vllm.prefix_protection else ()),
            )
            facts = self._setup.facts(*([own_token_share()] if is_one_of_many else []))
        except BaseException:
            if is_one_of_many:
                gathered(None)  # the other workers wait for this one
            raise
        if is_worker:
            self._setup = self._setup.agreed(self._exchange(facts))
        else:
            let_role_load(vllm_config)
        self._scheduler_side: SchedulerSide | None = None
        """None in a worker, and until all workers are up. Until then every lookup is a miss."""
        self._worker_side: WorkerSide | None = None
        """None in the scheduler's connector, and until vLLM registers its KV memory."""

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        """Return the result of `act`. After an exception, return `otherwise` and turn kvtier off until a restart."""
        if not self._is_broken:
            try:
                return act()
            except Exception as error:
                # This includes a brief lack of memory, because the scheduler side may be half changed. Making keys
                # requires the most memory and has its own guards (`KeyMaker`, `Scheduler._prefix_of`).
                self._is_broken = True
                self._failure = described(error)
                logger.exception("kvtier has failed and is off until a restart; requests are computed without it")
        return otherwise

    def _guard(self, act: Callable[..., None]) -> Callable[..., None]:
        """Wrap `act`, so that vLLM can call it and never gets an exception from it."""
        return lambda *given: self._guarded(lambda: act(*given), None)

    def _ask(self, act: Callable[[SchedulerSide], T], otherwise: T) -> T:
        """Call the scheduler side, guarded. Return `otherwise` until all workers are up."""
        side = self._scheduler_side
        return otherwise if side is None else self._guarded(lambda: act(side), otherwise)

    @property
    def _others(self) -> list[Any]:
        """The other connectors of a `MultiConnector`, while vLLM opens this one."""
        group = transfer_group() if self.role is ConnectorRole.WORKER else on_stack("scheduler").get_kv_connector()
        return [it for it in getattr(group, "sub_connectors", ()) if it is not self]

    @property
    def _opened_worker_side(self) -> WorkerSide:
        assert self._worker_side is not None, "vLLM called a worker's method on the scheduler's connector"
        return self._worker_side

    # ---- scheduler: requests ---------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Open the scheduler side, now that all workers are up, including those of later pipeline stages."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Open the scheduler side, now that all workers are up. vLLM 0.33 calls this again at wake-up."""
        if self._scheduler_side is not None:
            return
        executor, handshakes = on_stack("model_executor"), list(metadata.values())
        call_all: Callable[..., list[Any]] = executor.collective_rpc
        if self._others or len(handshakes) < self._setup.ranks:  # vLLM may give two workers the same number
            handshakes = executor.collective_rpc(KvtierConnector._handshake_of_worker)

        def ask(method: str) -> list[Any]:
            answers = call_all(KvtierConnector._answer_of_worker, args=(method,))
            faults = [f"rank {rank}: {it}" for rank, (has_failed, it) in enumerate(answers) if has_failed]
            if faults:
                is_late = any(TimeoutError.__name__ in it for it in faults)
                raise (TimeoutError if is_late else RuntimeError)(f"{method}() has failed on {', '.join(faults)}")
            return [it for _, it in answers]

        handshakes = [dict(it) for it in handshakes]
        layouts = [it.pop(_LAYOUT) for it in handshakes]
        self._setup = self._setup.identified_as([it.pop(_IDENTITY) for it in handshakes].pop())
        self._scheduler_side = side = SchedulerSide(
            *(self._setup, handshakes, layouts),
            *(on_stack("scheduler"), self._guard, lambda: self._failure),
            extras_of=lambda request, start, stop: extra_keys(request, start, stop, 0)[0],
            hash_of=partial(hash_block, hash_function(self._setup.vllm_config.cache_config.prefix_caching_hash_algo)),
            wake=_waking(),
            ask=ask,
            is_alone=not self._others,
        )
        watch_calls(executor, self._around(side), side.noted)

    def _around(self, side: SchedulerSide) -> Callable[[WorkerCall], AbstractContextManager[None]]:
        """Guard `side.around`: vLLM's call proceeds whatever fails, unless it would free memory that a copy may use."""

        @contextmanager
        def around(call: WorkerCall) -> Generator[None]:
            stack, was_broken = ExitStack(), self._is_broken
            has_begun = self._guarded(lambda: stack.enter_context(side.around(call)) is None, otherwise=False)
            if call.method in SLEEPS and not has_begun:
                if not was_broken and self._failure.startswith(TimeoutError.__name__):
                    raise TimeoutError(self._failure)
                side.ask("sleep")
            try:
                yield
            except BaseException:
                self._guarded(lambda: stack.__exit__(*sys.exc_info()), otherwise=False)
                raise
            self._guarded(stack.close, None)

        return around

    def on_new_request(self, request: Request) -> None:
        """Track a new request."""
        self._ask(lambda side: side.scheduler.arrived(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded (None if vLLM must ask again), and whether vLLM has to wait for them."""
        tokens = self._ask(lambda side: side.scheduler.matched(request, num_computed_tokens), 0)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Start the load into the allocated blocks."""
        if num_external_tokens > 0:
            tables = blocks.get_block_ids()
            self._ask(lambda side: side.scheduler.allocated(request, tables, num_external_tokens), None)
            if self._is_broken and self._scheduler_side is not None:
                # The match may be older than the error, and vLLM now waits for the match's load.
                self._scheduler_side.scheduler.allocated_after_error(request, tables)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return the load's tokens by kind of place, for vLLM's metrics."""
        found = self._ask(
            lambda side: side.hit_sources(request, num_external_tokens), {UNKNOWN_PLACE: num_external_tokens}
        )
        return {CacheHitSource(name): count for name, count in found.items()}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with one KV group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. vLLM may free its blocks immediately, because pins protect the blocks that stores read."""
        announcement = self._ask(lambda side: side.scheduler.finished(request, block_ids), None)
        if self._is_broken and self._scheduler_side is not None:
            self._scheduler_side.scheduler.requests.pop(request.request_id, None)
        return False, announcement

    # ---- scheduler: steps ------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:  # noqa: ANN401
        """Return the metadata of a step for the workers."""
        if self._scheduler_side is None:
            return StepOrders(0)
        scheduler = self._scheduler_side.scheduler
        orders = self._guarded(lambda: scheduler.orders(scheduler_output), None)
        if orders is None:
            orders = StepOrders(0)
            try:
                orders = scheduler.last_orders()
                scheduler.unpin_all()
            except Exception:
                logger.exception("kvtier has failed again; loads under way are reported to vLLM with the next step")
        return orders

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Process a step's results."""
        self._ask(lambda side: side.engine_cache.reported(connector_output.finished_recving or ()), None)
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._ask(lambda side: side.scheduler.stepped(done), None)

    def has_pending_block_frees(self) -> bool:
        """Free blocks that only stores use, so that vLLM need not preempt a request. Return whether there were any."""
        return self._ask(lambda side: side.scheduler.has_freed_blocks(), otherwise=False)

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine should take a step."""
        return self._ask(lambda side: side.has_news, otherwise=False)

    def take_events(self) -> list[Any]:
        """Return KV events for routers."""
        events = self._ask(self._taken, None)
        if events is None and self._scheduler_side is not None:
            # kvtier is off, and routers must not send prompts for its KV.
            with suppress(Exception):
                events = self._taken(self._scheduler_side)
        return events or []

    def _taken(self, side: SchedulerSide) -> list[Any]:
        found = side.scheduler.take_events(is_off=self._is_broken, form=lambda it: self._event(it, side.events_table))
        return [AllBlocksCleared()] if found is None else found

    def _event(self, event: BlockEvent, table: TableLayout | None) -> Any:  # noqa: ANN401 - vLLM's class
        """Return the event as vLLM 0.32 makes it (`BlockPool.cache_full_blocks`) without `ownership` or `locality`."""
        assert table is not None
        blocks = event.blocks
        hashes = [external_hash(it) for it in blocks.hashes]
        if not event.is_there:
            return BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=table.number)
        number, name = blocks.adapter or (None, None)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if blocks.parent is None else external_hash(blocks.parent),
            token_ids=list(blocks.tokens),
            block_size=table.block_tokens,
            lora_id=number,
            medium=event.medium,
            lora_name=name,
            extra_keys=published_keys(blocks.extras),
            group_idx=table.number,
            kv_cache_spec_kind=spec_kind(self._setup.kv_cache_config.kv_cache_groups[table.number].kv_cache_spec).value,
        )

    def get_kv_connector_stats(self) -> Stats | None:
        """Return the change in metrics since the last call. The scheduler side counts for all ranks."""
        return self._ask(lambda side: side.stats.take(), None)

    def reset_cache(self) -> bool:
        """Make everything cached before now unreachable."""
        return self._ask(lambda side: side.reset(), otherwise=False)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a dropped store is only a later miss."""
        return False

    # ---- worker: not guarded, because each answer tells vLLM or the scheduler side which KV to trust -----------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check the other connectors, then open this worker's rank with vLLM's KV caches."""
        others = [type(it).__name__ for it in self._others]
        check_others(others)
        check_alone(others, self._setup.config.store.loss)
        self._worker_side = WorkerSide(self._setup, kv_caches, self._exchange)

    def _exchange(self, own: object) -> list[Any]:
        """Return what each worker's connector passes to this call, by rank. Wait for all workers."""
        return gathered(own) if self._setup.ranks > 1 else [own]

    def get_handshake_metadata(self) -> Any:  # noqa: ANN401
        """Return the address at which the scheduler side reaches this rank.

        A `MultiConnector` passes the metadata of one connector to all. If another connector has metadata, this returns
        it, and `_handshake_of_worker` finds this rank's address.
        """
        theirs = (it.get_handshake_metadata() for it in self._others)
        return next((it for it in theirs if it is not None), self._handshake)

    @property
    def _handshake(self) -> Any:  # noqa: ANN401
        """Arguments for `rank_server.connect`, plus identity and layout. None until vLLM registers its KV memory."""
        if self._worker_side is None:
            return None
        more = {_IDENTITY: self._setup.identity._replace(weights=None, versions={}), _LAYOUT: self._worker_side.layout}
        return {**self._worker_side.server.handshake, **more}

    @staticmethod
    def _of_worker() -> "KvtierConnector":
        """Return the connector of the worker in this process, with or without other connectors.

        Raises:
            StopIteration: there is no such connector.
        """
        group = transfer_group()
        return next(it for it in getattr(group, "sub_connectors", [group]) if isinstance(it, KvtierConnector))

    @staticmethod
    def _handshake_of_worker(worker: Any) -> Any:  # noqa: ANN401, ARG004 - vLLM's worker
        """Return this rank's handshake, for an engine with other connectors. vLLM calls it in each worker."""
        return KvtierConnector._of_worker()._handshake  # noqa: SLF001

    @staticmethod
    def _answer_of_worker(worker: Any, method: str) -> tuple[bool, Any]:  # noqa: ANN401, ARG004
        """Call `method` of this process's worker side. Return whether it failed, and its result or error text.

        vLLM calls this in each worker. It never raises: after an error of one rank, vLLM would mistake later ranks'
        answers for answers to its next call.
        """
        try:
            return False, getattr(KvtierConnector._of_worker()._opened_worker_side, method)()  # noqa: SLF001
        except Exception as error:
            logger.exception("%s() of kvtier has failed in this worker", method)
            return True, described(error)

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """Start a step. It raises if copies cannot be kept off reused blocks."""
        self._opened_worker_side.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """No-op: loads run between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: loads run between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """No-op: stores start when the step has returned."""

    def wait_for_save(self) -> None:
        """Record that a step has been launched. Stores copy blocks only after it, and the engine does not wait."""
        self._opened_worker_side.launched()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Return the loads that have ended. It raises if a failed load may still write to its blocks."""
        received, failed = self._opened_worker_side.worker.results()
        return TransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that vLLM considers filled, but that no load filled."""
        return self._opened_worker_side.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepDone:
        """Return the metadata for the scheduler after a step. Without it, changed weights would go unnoticed."""
        return self._opened_worker_side.worker.done

    # ---- both ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the scheduler side or the worker side, whichever is in this process."""
        self._is_broken = False  # close even after an internal error
        side = self._worker_side if self._scheduler_side is None else self._scheduler_side
        if side is not None:
            self._guarded(side.close, None)

    # ---- the server's process, which has no connector --------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Unpack the metrics of another process."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,  # noqa: ARG003
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Return the metrics for `/metrics`."""
        return PromMetrics(metric_types, labelnames, per_engine_labelvalues)
