"""vLLM's own prefix cache, and what keeps it from being reset: blocks of requests that wait for loads.

vLLM resets its cache only while no block is in use. It can preempt running requests before, but not a request that
waits for a load, or has one and could not begin yet. Without a connector there is no such request. So before each
reset these requests start anew. Blocks that a copy may still write to stay with their request until vLLM has the load's
report. The reset counts them as free: no other request can find them, and none gets them.
"""

from collections.abc import Callable, Collection, Iterable
from functools import wraps

from kvtier.connect.vllm.geometry import NULL_BLOCK
from kvtier.connect.vllm.vllm_types import Request, VllmScheduler, plain_name
from kvtier.errors import ConfigError

_LOADING = "WAITING_FOR_REMOTE_KVS"
_WAITING = ("WAITING", "PREEMPTED")
NEEDED = ("kv_cache_manager", "requests", "running", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids")
"""Attributes of vLLM's scheduler."""


class OwnCache:
    """vLLM's own prefix cache. Used by the scheduler's thread only.

    Args:
        scheduler: vLLM's.
        is_alone: every load and every finished request that still has blocks is kvtier's.

    Raises:
        ConfigError: the scheduler is of another kind than vLLM's.
    """

    def __init__(self, scheduler: VllmScheduler, *, is_alone: bool) -> None:
        missing = [name for name in NEEDED if not hasattr(scheduler, name)]
        if missing:
            raise ConfigError(
                f"{type(scheduler).__qualname__} has no {', '.join(missing)}: kvtier could not keep vLLM's own prefix "
                "cache right over a reset; allowed: vLLM's schedulers (--scheduler-cls)"
            )
        self._scheduler = scheduler
        self._is_alone = is_alone

    def restart(self, names: Collection[str]) -> None:
        """Let these requests start anew if they wait with blocks: what their loads have brought is not used."""
        for request in [it for name in names if (it := self._scheduler.requests.get(name)) is not None]:
            status = plain_name(request.status)
            if status == _LOADING:
                # As vLLM itself does for a failed load.
                self._scheduler.failed_recving_kv_req_ids.add(request.request_id)
                request.num_computed_tokens = 0
                if request.request_id in self._scheduler.finished_recving_kv_req_ids:
                    self._free(request)
            elif status in _WAITING and request.num_computed_tokens:
                self._free(request)
                request.num_computed_tokens = 0

    def reported(self, names: Iterable[str]) -> None:
        """Free the blocks of requests that start anew, now that vLLM gets the reports of their loads.

        vLLM frees them when it comes to the request. But it stops at a request that it has no blocks for, and those
        may be with requests behind it.
        """
        for request in [it for name in names if (it := self._scheduler.requests.get(name)) is not None]:
            if self._starts_anew(request) and not request.is_finished():
                self._free(request)

    def _free(self, request: Request) -> None:
        """Free the blocks of a request, and those that vLLM keeps free for the rest of its prompt.

        Otherwise vLLM begins no load that would need the latter. If the first request in its queue has such a load,
        nothing goes on, because this request waits behind it.
        """
        self._scheduler.kv_cache_manager.free(request)
        getattr(self._scheduler, "_inflight_prefills", set[Request]()).discard(request)  # vLLM 0.32 has it

    def watch_resets(self, begins: Callable[[bool], None], ended: Callable[[bool], None]) -> None:
        """Call `begins` before each reset and `ended` after it.

        Args:
            begins: gets whether requests are running, so that the reset will fail.
            ended: gets whether the cache was reset.
        """
        manager = self._scheduler.kv_cache_manager
        inner = manager.reset_prefix_cache

        @wraps(inner)
        def reset_prefix_cache() -> bool:
            pool, is_running = manager.block_pool, bool(self._scheduler.running)
            begins(is_running)
            leaving = 0 if is_running else len(self._leaving())
            pool.num_gpu_blocks -= leaving
            try:
                was_reset = inner()
            finally:
                pool.num_gpu_blocks += leaving
            ended(was_reset)
            return was_reset

        manager.reset_prefix_cache = reset_prefix_cache

    def _leaving(self) -> set[int]:
        """Blocks in use that no request will compute with: vLLM frees them after a load's report or a step's end."""
        manager = self._scheduler.kv_cache_manager
        leaving = [
            it.request_id
            for it in self._scheduler.requests.values()
            if (self._is_alone if it.is_finished() else self._starts_anew(it))
        ]
        blocks = {block for name in leaving for table in manager.get_block_ids(name) for block in table}
        # vLLM has it for overlapped steps. In a release without it vLLM's own answer stands.
        for _, freed in getattr(self._scheduler, "deferred_frees", ()):
            blocks.update(block.block_id for block in freed)
        return blocks - {NULL_BLOCK}

    def _starts_anew(self, request: Request) -> bool:
        return request.request_id in self._scheduler.failed_recving_kv_req_ids and not request.num_computed_tokens
