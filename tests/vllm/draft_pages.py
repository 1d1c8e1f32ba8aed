"""Pages of all layers in an engine's process, and what is broken on purpose in those of a draft model."""

import hashlib
from collections.abc import Callable
from typing import Any

_freed: list[tuple[list[int], ...]] = []


def watch(engine: Any) -> None:
    """Remember the blocks of each request that ends from now on. A freed block keeps its bytes until it is reused."""
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager

    def watched(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def free(request: Any) -> Any:
            _freed.append(manager.get_block_ids(request.request_id))
            return inner(request)

        return free

    # The second, while a step that writes into the blocks is under way.
    manager.free, manager.pop_blocks_for_free = watched(manager.free), watched(manager.pop_blocks_for_free)


def last(engine: Any, tokens: int) -> dict[str, list[str]]:
    """By layer: a digest of each block of the leading `tokens` of the last request that has ended.

    On a CPU a block holds its keys in the order in which the kernel reads them, so a position is no slice of it.
    """
    core = engine.engine_core.engine_core
    layers = core.model_executor.driver_worker.model_runner.compilation_config.static_forward_context
    found: dict[str, list[str]] = {}
    for table, group in zip(_freed[-1], core.scheduler.kv_cache_config.kv_cache_groups, strict=True):
        blocks = table[: tokens // group.kv_cache_spec.block_size]
        for name in group.layer_names:
            pages = (layers[name].kv_cache[block].contiguous().numpy().tobytes() for block in blocks)
            found[name] = [hashlib.sha256(page).hexdigest() for page in pages]
    return found


def by_rank(engine: Any, tokens: int) -> list[list[str]]:
    """For each worker: digests of the blocks of the leading `tokens` of the last request; see `context_parallel`."""
    core = engine.engine_core.engine_core
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    executor, blocks = core.model_executor, _freed[-1][0][: tokens // manager.block_size]
    # Of the class: kvtier watches calls of the executor, and would take one that it does not know for new weights.
    return type(executor).collective_rpc(executor, "digests", args=(blocks,))


def by_token(engine: Any, tokens: int) -> list[dict[int, str]]:
    """By layer: a digest of each of the leading `tokens` of the last request, whichever worker holds it."""
    core = engine.engine_core.engine_core
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    executor, blocks = core.model_executor, _freed[-1][0][: tokens // manager.block_size]
    whole: list[dict[int, str]] = []
    for rank in type(executor).collective_rpc(executor, "rows", args=(blocks, tokens)):
        whole = whole or [{} for _ in rank]
        for layer, found in zip(whole, rank, strict=True):
            assert all(layer.get(position, digest) == digest for position, digest in found.items())
            layer.update(found)
    assert all(sorted(layer) == list(range(tokens)) for layer in whole)
    return whole


def look_at_no_next_token() -> None:
    """Keys cover the chunk alone: the control of the tests."""
    from kvtier.connect.vllm.requests import keys as request_keys

    request_keys.looks_ahead = lambda config: False


def restore_no_drafts() -> None:
    """The second layer of two, a draft model's, is not restored: the control of the acceptance rate."""
    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    inner = CpuPageCopy.scatter

    def scatter(self: CpuPageCopy, group: int, ids: Any, payload: memoryview) -> Any:
        half = len(payload) // 2
        payload[half:] = bytes(len(payload) - half)
        return inner(self, group, ids, payload)

    CpuPageCopy.scatter = scatter  # type: ignore[method-assign]
