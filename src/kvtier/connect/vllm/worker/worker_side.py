"""Opens the worker side at the start of a worker's process, and closes it at the end."""

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvtier.connect.model_files import note_fingerprint
from kvtier.connect.vllm import engine_hooks, support
from kvtier.connect.vllm.checkpoint_reads import AdaptersRead
from kvtier.connect.vllm.engine_setup import EngineSetup
from kvtier.connect.vllm.rank_parts import parts_of_rank
from kvtier.connect.vllm.worker import weight_changes
from kvtier.connect.vllm.worker.copier import open_copier
from kvtier.connect.vllm.worker.worker_step import FENCE_WAIT_S, Worker, no_look
from kvtier.device.page_lock import cuda_page_lock
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer
from kvtier.runtime.shared_memory import Exchange, share
from kvtier.runtime.tier_encoding import in_class

logger = logging.getLogger(__name__)

LEAVE_S = 4.0
"""Seconds that a worker waits for its pending writes when it shuts down. vLLM gives it 5 s in all
(`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`)."""


class WorkerSide:
    """What kvtier runs in a vLLM worker's process, on its KV memory: a rank, which copies, and a `Worker`.

    Args:
        setup: settings and identity of the engine.
        kv_caches: the tensors that vLLM registers, by layer.
        exchange: exchanges values with all workers of the engine.

    Raises:
        UnsupportedModelError: the KV memory does not match vLLM's configuration.
        ConfigError: a setting is wrong, a tier's path cannot be used, or another worker has failed.
    """

    def __init__(self, setup: EngineSetup, kv_caches: Mapping[str, Any], exchange: Exchange) -> None:
        config = setup.config
        self._close_deadline_s = config.limits.close_deadline_s
        layers = setup.vllm_config.compilation_config.static_forward_context
        try:
            copier = open_copier(setup.geometry, setup.kv_cache_config, kv_caches, layers)
            parts = parts_of_rank(
                setup.vllm_config, setup.kv_cache_config, setup.geometry, setup.rank, setup.first_layers
            )
            layout = copier.pages.layout.with_parts(parts)
            layout, _ = in_class(config, layout, setup.identity.fingerprint.digest)  # the class decides a slot's size
        except BaseException:
            exchange(None)  # the other workers wait for this one
            raise
        self._copier = copier
        # vLLM registers one tensor or several for each layer.
        lists = [cast("list[Any]", it) if isinstance(it, (list, tuple)) else [it] for it in kv_caches.values()]
        self._kv = {it.untyped_storage().data_ptr() for it in itertools.chain.from_iterable(lists)}
        self.launched = copier.note_step if support.looks_ahead(setup.vllm_config) else lambda: None
        """Notes that a step was launched. Its draft model may still run on the GPU after the step has returned."""
        memory = share(layout, config.host.capacity_bytes, exchange)
        self._rank = open_rank(
            config,
            layout,
            setup.identity.fingerprint.digest,
            copier,
            rank=setup.rank,
            ranks=setup.ranks,
            engine_chunk_bytes=memory.chunk_bytes,
            shared=memory.regions,
            page_lock=cuda_page_lock(config.host.page_lock) if copier.pages.device.type == "cuda" else None,
        )
        if setup.rank == 0:
            note_fingerprint(config, setup.identity.fingerprint)
        models, look = look_at_weights(has_moving_experts=setup.vllm_config.parallel_config.enable_eplb)
        self._models = models if config.vllm.weights_names == "digest" else []
        self.worker = Worker(
            copier.revoke,
            look,
            None if setup.vllm_config.lora_config is None else AdaptersRead(engine_hooks.on_stack("lora_manager")),
        )
        self.layout = self._rank.counted
        self.server = RankServer(self._rank, self.worker.receive)

    # ---- called by the scheduler side in all workers, between two steps ----------------------------------------------

    def sleep(self) -> None:
        """Stop copying KV and looking at weights, because vLLM is about to free their memory.

        Raises:
            TimeoutError: a copy does not end. The memory must stay.
        """
        self.worker.is_asleep = True
        if not self._copier.close(FENCE_WAIT_S):
            raise TimeoutError(f"a KV copy did not end within {FENCE_WAIT_S:g} s; the device appears to hang")

    def wake_up(self) -> None:
        """Resume copying KV and looking at weights."""
        self._copier.open()
        self.worker.is_asleep = False

    def digest_weights(self) -> bytes | None:
        """Return a digest of the weights. Later looks compare with these weights.

        Return None if the weights cannot be read or have random names (`vllm.weights_names`).
        """
        self.worker.look_anew()
        try:
            return weight_changes.digest_of(self._models, self._kv) if self._models else None
        except Exception as error:  # noqa: BLE001 - vLLM's models are many
            logger.warning("the weights cannot be digested: %r", error)
            return None

    def digest_unchanged(self) -> bytes | None:
        """Return a digest of the weights, or None if they have changed since the start or the last reset."""
        return None if self.worker.look_now() else self.digest_weights()

    def free_host(self) -> tuple[int, int]:
        """Give host memory, which must contain no objects, back to the system.

        Return how many shared bytes and how many page-locked bytes stay (`Arena.free`).
        """
        return self._rank.arena.free()

    def take_host(self) -> None:
        """Take back the memory that `free_host` gave up."""
        self._rank.arena.take()

    def close(self) -> None:
        """Close the rank once the core no longer needs it."""
        is_here = self.server.is_here
        self.server.leave(self._close_deadline_s if is_here else min(self._close_deadline_s, LEAVE_S))
        self._rank.close(1.0)
        self.server.close(1.0)


def look_at_weights(*, has_moving_experts: bool) -> tuple[list[Any], Callable[..., str]]:
    """Return the models of the worker whose method is running, drafts included, and `WeightSample.look` for them."""
    try:
        model, draft = engine_hooks.on_stack("get_model")(), engine_hooks.on_stack("get_draft_model")()
        models = [model] if draft is None else [model, draft]
        return models, weight_changes.WeightSample(*models, has_moving_experts=has_moving_experts).look
    except Exception as error:  # noqa: BLE001 - vLLM's models are many, and the engine must start
        logger.warning(
            "kvtier cannot inspect the model's weights (%r), so it notices only changes made by calling vLLM", error
        )
    return [], no_look
