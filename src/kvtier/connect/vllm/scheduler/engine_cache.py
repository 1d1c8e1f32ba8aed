"""Handles vLLM's own prefix cache, and what prevents its reset: blocks of requests that wait for loads.

vLLM resets its cache only while no block is in use. It can first preempt running requests. But it cannot preempt a
request that waits for a load, or whose load has ended and which could not start yet. Only a connector causes these.
So kvtier restarts them before each reset. Blocks to which a copy may still write stay with their request until vLLM has
the load's report. The reset counts these blocks as free, because no other request can find or get them.
"""

from collections.abc import Callable, Collection, Iterable

from kvtier.connect.vllm.engine_hooks import (
    SCHEDULER_STATE,
    deferred_blocks,
    forget_reservation,
    resident_blocks,
    watch_resets,
)
from kvtier.connect.vllm.geometry import NULL_BLOCK
from kvtier.connect.vllm.scheduler.block_pool import BlockPins
from kvtier.connect.vllm.vllm_types import BlockTables, Request, VllmScheduler, plain_name
from kvtier.errors import ConfigError

_LOADING = "WAITING_FOR_REMOTE_KVS"
_WAITING = ("WAITING", "PREEMPTED")


class EngineCache:
    """vLLM's own prefix cache. Only the scheduler's thread uses it.

    Args:
        scheduler: vLLM's scheduler.
        is_alone: whether all loads, and all finished requests that still have blocks, belong to kvtier, because there
            is no other connector.
        has_prefix_caching: whether requests find the blocks that others have loaded.
        protects_prefixes: whether to look up what vLLM's cache has for waiting requests (`PrefixProtection`).
        guarded: wraps a callback so that it cannot raise into vLLM.

    Raises:
        ConfigError: the scheduler lacks attributes of vLLM's schedulers.
    """

    def __init__(
        self,
        scheduler: VllmScheduler,
        *,
        is_alone: bool,
        has_prefix_caching: bool,
        protects_prefixes: bool,
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        missing = [name for name in SCHEDULER_STATE if not hasattr(scheduler, name)]
        if missing:
            raise ConfigError(
                f"{type(scheduler).__qualname__} has no {', '.join(missing)}: kvtier could not keep vLLM's own prefix "
                "cache correct across a reset; use one of vLLM's schedulers (--scheduler-cls)"
            )
        self._scheduler = scheduler
        self._is_alone, self.has_prefix_caching = is_alone, has_prefix_caching
        self._guarded = guarded
        self.resident = self._resident if protects_prefixes else None
        """Returns the blocks in the cache that match a request. None if nothing looks them up."""

    def tables(self, name: str) -> BlockTables:
        """Return the current block ids of a request."""
        return self._scheduler.kv_cache_manager.get_block_ids(name)

    def _resident(self, request: Request) -> BlockTables:
        return resident_blocks(self._scheduler.kv_cache_manager, request)

    def open_pins(self, on_reuse: Callable[[int], None]) -> BlockPins:
        """Open vLLM's block pool. It calls `on_reuse` when a watched block is handed out."""
        return BlockPins(self._scheduler.kv_cache_manager.block_pool, on_reuse, self._guarded)

    def restart(self, names: Collection[str]) -> None:
        """Restart these requests if they hold blocks while they wait. KV that their loads delivered is discarded."""
        for request in [it for name in names if (it := self._scheduler.requests.get(name)) is not None]:
            status = plain_name(request.status)
            if status == _LOADING:
                # vLLM itself does this for a failed load.
                self._scheduler.failed_recving_kv_req_ids.add(request.request_id)
                request.num_computed_tokens = 0
                if request.request_id in self._scheduler.finished_recving_kv_req_ids:
                    self._free(request)
            elif status in _WAITING and request.num_computed_tokens:
                self._free(request)
                request.num_computed_tokens = 0

    def reported(self, names: Iterable[str]) -> None:
        """Free the blocks of requests that start anew, now that vLLM gets the reports of their loads.

        vLLM itself frees these blocks only when it reaches the request in its queue. But it stops at the first request
        for which it has too few blocks, and requests behind that one may hold the missing blocks.
        """
        for request in [it for name in names if (it := self._scheduler.requests.get(name)) is not None]:
            if self._starts_anew(request) and not request.is_finished():
                self._free(request)

    def _free(self, request: Request) -> None:
        self._scheduler.kv_cache_manager.free(request)
        forget_reservation(self._scheduler, request)

    def watch_resets(self, begins: Callable[[bool], None], ended: Callable[[bool], None]) -> None:
        """Call `begins` before each reset and `ended` after it.

        Args:
            begins: receives True if requests are running. The reset will then fail.
            ended: receives True if the cache was reset.
        """

        def before() -> int:
            is_running = bool(self._scheduler.running)
            begins(is_running)
            return 0 if is_running else len(self._leaving())

        watch_resets(self._scheduler.kv_cache_manager, before, ended)

    def _leaving(self) -> set[int]:
        """Return blocks in use that no request computes with. vLLM frees them after a load's report or a step's end."""
        manager = self._scheduler.kv_cache_manager
        leaving = [
            it.request_id
            for it in self._scheduler.requests.values()
            if (self._is_alone if it.is_finished() else self._starts_anew(it))
        ]
        blocks = {block for name in leaving for table in manager.get_block_ids(name) for block in table}
        blocks.update(block.block_id for block in deferred_blocks(self._scheduler))
        return blocks - {NULL_BLOCK}

    def _starts_anew(self, request: Request) -> bool:
        return request.request_id in self._scheduler.failed_recving_kv_req_ids and not request.num_computed_tokens
