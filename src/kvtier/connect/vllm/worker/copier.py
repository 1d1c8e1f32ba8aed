"""Copies chunks between vLLM's blocks and host slots. Copies can be revoked when blocks are reused.

vLLM may give a block to another request while it is still being copied. The scheduler detects this and revokes the
request's copies (`BlockCopier.revoke`) before the next step writes to the block:

- copies that have not started never start;
- a running gather fails when it ends, whatever it has read, so the step need not wait for it;
- `revoke` waits for a running scatter, because it writes.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import TypeAlias

import torch

from kvtier.connect.vllm.geometry import NULL_BLOCK, SKIP, Geometry
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Layer
from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy
from kvtier.connect.vllm.worker.cuda_copy import CudaPageCopy
from kvtier.connect.vllm.worker.pages import BlockIds, EnginePages, engine_pages
from kvtier.device.copier import Fence
from kvtier.errors import UnsupportedModelError
from kvtier.types import RequestId

REVOKED_MAX = 1 << 16
"""Maximum number of revoked requests to remember. Beyond this many, the oldest is forgotten: the session released it
long ago, and its commands are canceled."""

_POLL_S = 100e-6
"""Seconds between polls of a device for the end of a copy."""


PageCopy: TypeAlias = CpuPageCopy | CudaPageCopy
"""Copies pages on one kind of device. Thread-safe. Callers check ids and sizes."""


class RevokedError(RuntimeError):
    """The blocks of this request may have been reused."""


class _Running:
    """A running copy. It is the fence that callers of the copier receive."""

    def __init__(self, request: RequestId, *, is_scatter: bool) -> None:
        self.request = request
        self.is_scatter = is_scatter
        self.below: Fence | None = None
        """The device's fence. None while the copy starts, or if it completes immediately."""


class BlockCopier:
    """The copier of one worker. Thread-safe.

    An address is the block ids of a group's tables, one table after the other (see `geometry`).

    Args:
        pages: the worker's KV memory.
        copy: copies pages on the device that has them.
    """

    def __init__(self, pages: EnginePages, copy: PageCopy) -> None:
        self.pages = pages
        self._copy = copy
        self._running: set[_Running] = set()
        self._revoked: dict[RequestId, None] = {}
        self._is_closed = False
        """Whether the blocks have no memory, because vLLM sleeps."""
        self._ended = threading.Condition()

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start to copy vLLM's blocks into `payload`. Return the copy's fence, or None if it is already complete.

        Raises:
            RevokedError: the request was revoked, before or during the copy.
            ValueError: the group is unknown, the address invalid, or the payload too small.
        """
        if SKIP in blocks:
            raise ValueError(f"a chunk with missing blocks cannot be stored, got the blocks {blocks}")
        ids = self._checked(group, blocks, payload)
        return self._run(_Running(request, is_scatter=False), lambda: self._copy.gather(group, ids, payload))

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start to copy `payload` into vLLM's blocks, except `SKIP`.

        Raises:
            RevokedError: the request was revoked, before or during the copy.
            ValueError: as for `gather`.
        """
        ids = self._checked(group, blocks, payload)
        return self._run(_Running(request, is_scatter=True), lambda: self._copy.scatter(group, ids, payload))

    def note_step(self) -> None:
        """Order all later copies after the step that the calling thread has launched. On a CPU the step has ended."""
        if isinstance(self._copy, CudaPageCopy):
            self._copy.note_step()

    def done(self, fence: Fence) -> bool:
        """Return whether the copy that `fence` stands for is complete. Never blocks.

        Raises:
            RevokedError: the request was revoked during the copy.
        """
        assert isinstance(fence, _Running)
        assert fence.below is not None
        if not self._copy.done(fence.below):
            return False
        self._end(fence)
        return True

    def revoke(self, requests: Collection[RequestId], wait_s: float) -> bool:
        """Stop all copies of `requests`, including those whose commands arrive later.

        Args:
            requests: ids of stores and loads; unknown ids are remembered, too.
            wait_s: seconds to wait for running scatters.

        Returns:
            False if a scatter still runs. Its blocks must not be reused yet.
        """
        until_s = time.monotonic() + wait_s
        wanted = frozenset(requests)
        with self._ended:
            self._revoked.update(dict.fromkeys(requests))
            while len(self._revoked) > REVOKED_MAX:
                del self._revoked[next(iter(self._revoked))]
            while mine := [copy for copy in self._running if copy.request in wanted and self._writes(copy)]:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                has_fence = any(copy.below is not None for copy in mine)
                self._ended.wait(min(left_s, _POLL_S) if has_fence else left_s)
        return True

    def close(self, wait_s: float) -> bool:
        """Stop all copies until `open`, because vLLM is about to remove its blocks' memory.

        Args:
            wait_s: seconds to wait for running copies.

        Returns:
            False if a copy still runs. The memory must stay.
        """
        until_s = time.monotonic() + wait_s
        with self._ended:
            self._is_closed = True
            while [copy for copy in self._running if copy.below is None or not self._copy.done(copy.below)]:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._ended.wait(min(left_s, _POLL_S))
        return True

    def open(self) -> None:
        """Allow copies again, because the blocks have memory."""
        with self._ended:
            self._is_closed = False

    def _writes(self, copy: _Running) -> bool:
        return copy.is_scatter and (copy.below is None or not self._copy.done(copy.below))

    def _run(self, running: _Running, start: Callable[[], Fence | None]) -> Fence | None:
        with self._ended:
            self._refuse_revoked(running)
            self._running.add(running)
        try:
            below = start()
        except BaseException:
            with self._ended:
                self._running.discard(running)
                self._ended.notify_all()
            raise
        if below is not None:
            running.below = below
            return running
        self._end(running)
        return None

    def _end(self, running: _Running) -> None:
        with self._ended:
            self._running.discard(running)
            self._ended.notify_all()
            self._refuse_revoked(running)

    def _refuse_revoked(self, running: _Running) -> None:
        if running.request in self._revoked or self._is_closed:
            raise RevokedError(f"the blocks of {running.request} may have been reused")

    def _checked(self, group: int, blocks: tuple[int, ...], payload: memoryview) -> BlockIds:
        """Return the block ids per table. All bounds are checked before the first byte is copied."""
        pages = self.pages
        if not 0 <= group < len(pages.groups):
            raise ValueError(f"no KV group {group}; there are {len(pages.groups)}")
        table_blocks = [table.blocks for table in pages.groups[group]]
        if len(blocks) != sum(table_blocks):
            raise ValueError(f"an address of group {group} has {sum(table_blocks)} blocks, got {len(blocks)}")
        if min(blocks) < SKIP or max(blocks) >= pages.block_count or NULL_BLOCK in blocks:
            raise ValueError(f"blocks are numbered 1 to {pages.block_count - 1}, got {blocks}")
        layout = pages.layout.groups[group]
        least_bytes = layout.layer_offsets[-1] + layout.layer_bytes[-1]
        if payload.nbytes < least_bytes:
            raise ValueError(f"a payload of group {group} has at least {least_bytes} bytes, got {payload.nbytes}")
        ids = iter(blocks)
        return [list(islice(ids, count)) for count in table_blocks]


def open_copier(
    geometry: Geometry, config: KvCacheConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> BlockCopier:
    """Return the copier of a worker. Its `pages` contain the layout of the worker's KV, which is part of object names.

    Args:
        geometry: the geometry of `config`.
        config: the worker's `KVCacheConfig`.
        tensors: the tensors that vLLM registers (`register_kv_caches`).
        layers: the model's layers, `compilation_config.static_forward_context`.

    Raises:
        UnsupportedModelError: the KV contradicts its configuration, or is on an unknown kind of device.
    """
    pages = engine_pages(geometry, config, tensors, layers)
    if pages.device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"KV is on device {pages.device}; allowed: cpu or cuda")
    return BlockCopier(pages, CpuPageCopy(pages) if pages.device.type == "cpu" else CudaPageCopy(pages))
