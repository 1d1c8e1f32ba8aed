"""Runs vLLM's own tiered offloading on a CPU, for the arm ``native`` of `kvtier bench serve` and of `bench/vllm.py`.

vLLM refuses tiered offloading on a CPU, because its worker copies with CUDA. This worker copies in a separate thread,
with one call of torch for each tensor of a chunk. Everything else is unchanged: the scheduler side, tiers in host
memory and in a file system, eviction, back-pressure. `spec_name` and `spec_module_path` in `kv_connector_extra_config`
select this module.
"""
# pyright: basic, reportMissingImports=false

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyRun(NamedTuple):
    """Blocks of one tensor that are adjacent in one chunk of host memory."""

    tensor: int
    blocks: torch.Tensor
    """The numbers of the blocks."""
    chunk: int
    place: int
    """Position of the first block in the chunk."""


class MemcpyWorker(OffloadingWorker):
    """Copies between vLLM's blocks and vLLM's host tier.

    Args:
        caches: vLLM's KV memory, a tensor of [blocks, bytes of a page] for each layer.
        blocks_per_chunk: number of blocks that the host tier keeps together.
        region: the host tier's memory.
    """

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._layers = caches.group_data_refs
        # View the memory as 8-byte words, because torch indexes element by element.
        self._blocks = [it.tensor.view(it.tensor.shape[0], -1).view(torch.int64) for it in caches.tensors]
        self._host = [
            region.create_next_worker_view(it.page_size_bytes * blocks_per_chunk).view(torch.int64)
            for it in caches.tensors
        ]
        self._thread = ThreadPoolExecutor(1, "native-tiering")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks to host memory."""
        return self._submit(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: BlockIDsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002, FBT001, FBT002 - vLLM 0.33 and later; one thread cannot overtake
    ) -> bool:
        """Copy blocks from host memory."""
        return self._submit(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call."""
        ended = [job for job, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job).result(0) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these transfers end."""
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

    def shutdown(self) -> None:
        """End the thread, then release the memory."""
        self._thread.shutdown()
        self._host.clear()
        self._blocks.clear()
        self._region.cleanup()

    def _submit(self, job: int, blocks: GPULoadStoreSpec, chunks: Sequence[int], *, is_store: bool) -> bool:
        self._jobs[job] = self._thread.submit(self._copy, job, blocks, chunks, is_store=is_store)
        return True

    def _copy(self, job: int, blocks: GPULoadStoreSpec, chunks: Sequence[int], *, is_store: bool) -> TransferResult:
        began = time.perf_counter()
        moved = 0
        for run in self._runs(blocks, chunks):
            below, count = self._blocks[run.tensor], len(run.blocks)
            words = below.shape[1]
            first = run.place * words
            host = self._host[run.tensor][run.chunk, first : first + count * words].view(count, words)
            if is_store:
                torch.index_select(below, 0, run.blocks, out=host)
            else:
                below.index_copy_(0, run.blocks, host)
            moved += host.nbytes
        return TransferResult(job, success=True, transfer_size=moved, transfer_time=time.perf_counter() - began)

    def _runs(self, blocks: GPULoadStoreSpec, chunks: Sequence[int]) -> Iterator[CopyRun]:
        numbers = torch.from_numpy(np.array(blocks.block_ids, np.int64))
        whole = self._blocks_per_chunk
        block_at = chunk_at = 0
        for layers, count, first in zip(self._layers, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = first % whole
            for number in range(-(-(count + skipped) // whole) if count else 0):
                begin, end = max(0, number * whole - skipped), min(count, (number + 1) * whole - skipped)
                some, place = numbers[block_at + begin : block_at + end], (begin + skipped) % whole
                for layer in layers:
                    yield CopyRun(layer.tensor_idx, some, int(chunks[chunk_at]), place)
                chunk_at += 1
            block_at += count


class MemcpyTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with `MemcpyWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker of this process. The first call creates it."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
