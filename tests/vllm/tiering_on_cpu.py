"""vLLM's tiering manager on a CPU: copies between its KV memory and its host memory by `memcpy`.

vLLM's own worker for them needs a GPU's streams (`CPUOffloadingSpec.get_worker` refuses a CPU). Everything else is
vLLM's: connector, scheduler, manager, host memory, and where a page lies in it.
"""

import itertools
import threading
import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with the stand-in for the worker's copies."""

    def get_worker(self, kv_caches: Any) -> "CpuWorker":
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CpuWorker(OffloadingWorker):
    """Copies whole blocks, and has done so when it returns."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._refs = kv_caches.group_data_refs
        self._width = blocks_per_chunk
        self._region = region
        self._blocks = [it.tensor for it in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(it.page_size_bytes * blocks_per_chunk) for it in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, is_store: bool) -> bool:
        block_ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        for refs, count, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = first % self._width
            rows = [next(chunk_ids) for _ in range(-(-(skipped + count) // self._width))]
            for at in range(skipped, skipped + count):
                block, row, place = next(block_ids), rows[at // self._width], at % self._width
                for ref in refs:
                    page = self._blocks[ref.tensor_idx].shape[1]
                    kept = self._chunks[ref.tensor_idx][row, place * page : place * page + ref.page_size_bytes]
                    own = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
                    (kept if is_store else own).copy_(own if is_store else kept)
        assert next(block_ids, None) is None
        assert next(chunk_ids, None) is None
        self._ended.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Everything has ended."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()


def reset(engine: Any) -> bool:
    """Reset vLLM's own cache and its host memory, as after a change of weights."""
    return engine.reset_prefix_cache(reset_connector=True)


def empty_host_memory(engine: Any) -> None:
    """As if other requests had evicted everything from vLLM's own cache and from its host memory."""
    assert engine.reset_prefix_cache()
    engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager.primary_tier.reset_cache()


def fail() -> None:
    """A bug in kvtier where a key is looked up."""
    from kvtier.connect.vllm.tiering.async_jobs import Calls

    def ask(*arguments: Any, **fields: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    Calls.ask = ask  # type: ignore[method-assign]


def split_loads() -> None:
    """A lookup is answered while vLLM asks again, key by key: it loads the last keys first, and they take a second."""
    from kvtier.connect.vllm.tiering.async_jobs import Calls
    from kvtier.runtime.tiered_object_store import ObjectStore

    ask, find, get_into = Calls.ask, Calls._find, ObjectStore.get_into
    asked: list[bytes] = []
    half, is_found, loads = threading.Event(), threading.Event(), itertools.count()

    def ask_slowly(self: Calls, request: str, key: bytes, *given: Any, **fields: Any) -> bool | None:
        asked.append(key)
        if 2 * len(asked) == 3 * len(set(asked)):
            half.set()
            assert is_found.wait(60.0)
        return ask(self, request, key, *given, **fields)

    def find_late(self: Calls, batch: Any) -> Any:
        assert half.wait(60.0)
        found = find(self, batch)
        is_found.set()
        return found

    def get_slowly(self: ObjectStore, *given: Any) -> Any:
        time.sleep(0.0 if next(loads) else 1.0)
        return get_into(self, *given)

    Calls.ask, Calls._find, ObjectStore.get_into = ask_slowly, find_late, get_slowly  # type: ignore[method-assign]


_EVENTS: list[Any] = []


def keep_events() -> None:
    """What vLLM takes from the secondary tier is kept for `stored_keys`."""
    from kvtier.connect.vllm.secondary_tier import KvtierSecondaryTier

    inner = KvtierSecondaryTier.take_events

    def take(self: KvtierSecondaryTier) -> list[Any]:
        events = inner(self)
        _EVENTS.extend(events)
        return events

    KvtierSecondaryTier.take_events = take  # type: ignore[method-assign]


def keep_events_of_slow_stores() -> None:
    """As `keep_events`; and a store takes a second, so that a reset comes before its end."""
    from kvtier.runtime.tiered_object_store import ObjectStore

    inner = ObjectStore.put_from

    def put_from(self: ObjectStore, *arguments: Any) -> Any:
        time.sleep(1.0)
        return inner(self, *arguments)

    ObjectStore.put_from = put_from  # type: ignore[method-assign]
    keep_events()


def stored_keys() -> int:
    """How many different keys were announced as stored."""
    from vllm.v1.kv_offload.base import Locality, Medium

    assert all((it.medium, it.removed, it.ownership) == (Medium.STORAGE, False, None) for it in _EVENTS)
    assert all(it.locality is Locality.LOCAL for it in _EVENTS)
    return len({key for it in _EVENTS for key in it.keys})
