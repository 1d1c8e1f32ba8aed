"""Moves chunks between vLLM's blocks and host slots, and can be told that blocks have changed hands.

vLLM may give a block to another request while a copy of it is still under way. The scheduler knows when, and names the
requests whose copies no longer count (`BlockCopier.revoke`), before the next step writes to the block:

- none of their copies begins any more;
- a gather that runs fails when it ends, whatever it has read, so the step need not wait for it;
- a scatter that runs is waited for, since it writes.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from kvtier.connect.vllm.cpu_copy import CpuPageCopy
from kvtier.connect.vllm.cuda_copy import CudaPageCopy
from kvtier.connect.vllm.geometry import NULL_BLOCK, SKIP, Geometry
from kvtier.connect.vllm.pages import BlockIds, EnginePages, engine_pages
from kvtier.connect.vllm.vllm_types import KvCacheConfig, Layer
from kvtier.device.base import Fence
from kvtier.errors import UnsupportedModelError
from kvtier.layout import KvLayout
from kvtier.types import RequestId

REVOKED_MAX = 1 << 16
"""Requests that are remembered as revoked. The session has released them, so that the commands of those forgotten have
been withdrawn long before."""

_POLL_S = 100e-6
"""How often a device is asked whether a copy has ended."""


class PageCopy(Protocol):
    """What differs between devices. Thread-safe; ids and sizes have been checked."""

    def gather(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        """Start copying the pages of these blocks into `payload`; None when that is complete on return."""
        ...

    def scatter(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        """Start copying `payload` into the pages of these blocks, but those that are `SKIP`."""
        ...

    def done(self, fence: Fence) -> bool:
        """Whether the copy behind `fence` is complete. Never blocks."""
        ...


class RevokedError(RuntimeError):
    """The blocks of this request may belong to another one by now."""


class _Running:
    """A copy under way; the fence of the copier."""

    def __init__(self, request: RequestId, *, is_scatter: bool) -> None:
        self.request = request
        self.is_scatter = is_scatter
        self.below: Fence | None = None
        """The device's own fence; None while the copy is being started, or ends before it returns."""


class _Group(NamedTuple):
    table_blocks: tuple[int, ...]
    """Blocks that an address names of each table."""
    payload_bytes: int


class BlockCopier:
    """The copier of one worker. Thread-safe.

    An address is the block ids of a group's tables, one table after the other (see `geometry`).

    Args:
        pages: the worker's KV memory.
        copy: copies on its device.
    """

    def __init__(self, pages: EnginePages, copy: PageCopy) -> None:
        self._groups = [
            _Group(tuple(table.blocks for table in tables), told.layer_offsets[-1] + told.layer_bytes[-1])
            for tables, told in zip(pages.groups, pages.layout.groups, strict=True)
        ]
        self._block_count = pages.block_count
        self._copy = copy
        self._running: set[_Running] = set()
        self._revoked: dict[RequestId, None] = {}
        self._ended = threading.Condition()

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying vLLM's blocks into `payload`; None when the copy is complete on return.

        Raises:
            RevokedError: the request was revoked, before or meanwhile.
            ValueError: no such group, an address that is none of its, or a payload that is too small.
        """
        if SKIP in blocks:
            raise ValueError(f"a chunk with blocks that are not there cannot be stored, got {blocks}")
        ids = self._checked(group, blocks, payload)
        return self._run(_Running(request, is_scatter=False), lambda: self._copy.gather(group, ids, payload))

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Start copying `payload` into vLLM's blocks, but those that are `SKIP`.

        Raises:
            RevokedError: the request was revoked, before or meanwhile.
            ValueError: see `gather`.
        """
        ids = self._checked(group, blocks, payload)
        return self._run(_Running(request, is_scatter=True), lambda: self._copy.scatter(group, ids, payload))

    def done(self, fence: Fence) -> bool:
        """Whether the copy behind `fence` is complete. Never blocks.

        Raises:
            RevokedError: the request was revoked meanwhile.
        """
        assert isinstance(fence, _Running)
        assert fence.below is not None
        if not self._copy.done(fence.below):
            return False
        self._end(fence)
        return True

    def revoke(self, requests: Collection[RequestId], wait_s: float) -> bool:
        """Let no copy of `requests` count any more.

        Args:
            requests: ids that were given to stores and loads; those we never met are remembered, too, since their
                commands may still be on their way.
            wait_s: seconds to wait at most for scatters that run.

        Returns:
            Whether no scatter of theirs runs any more. If one does, its blocks must not be given away yet.
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
        if running.request in self._revoked:
            raise RevokedError(f"the blocks of {running.request} were taken back")

    def _checked(self, group: int, blocks: tuple[int, ...], payload: memoryview) -> BlockIds:
        """Everything that could make a copy go astray is checked before the first byte moves."""
        if not 0 <= group < len(self._groups):
            raise ValueError(f"no KV group {group}; there are {len(self._groups)}")
        known = self._groups[group]
        if len(blocks) != sum(known.table_blocks):
            raise ValueError(f"an address of group {group} has {sum(known.table_blocks)} blocks, got {len(blocks)}")
        if min(blocks) < SKIP or max(blocks) >= self._block_count or NULL_BLOCK in blocks:
            raise ValueError(f"blocks are numbered 1 to {self._block_count - 1}, got {blocks}")
        if payload.nbytes < known.payload_bytes:
            raise ValueError(
                f"a payload of group {group} has at least {known.payload_bytes} bytes, got {payload.nbytes}"
            )
        ids = iter(blocks)
        return [list(islice(ids, count)) for count in known.table_blocks]


class Opened(NamedTuple):
    """What a worker needs to open its rank."""

    copier: BlockCopier
    layout: KvLayout
    """The worker's own: the names of its objects depend on it. Sizes and rules are those of `Geometry.layout`."""
    device: torch.device


def open_copier(
    geometry: Geometry, config: KvCacheConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> Opened:
    """The copier of a worker.

    Args:
        geometry: made of the same `config`.
        config: the worker's `KVCacheConfig`.
        tensors: what vLLM registers (`register_kv_caches`).
        layers: the model's layers, `compilation_config.static_forward_context`.

    Raises:
        UnsupportedModelError: KV does not lie as the configuration says, or on a device that we do not know.
    """
    pages = engine_pages(geometry, config, tensors, layers)
    if pages.device.type not in _COPIES:
        raise UnsupportedModelError(f"KV lies on {pages.device}; allowed: {' or '.join(_COPIES)}")
    return Opened(BlockCopier(pages, _COPIES[pages.device.type](pages)), pages.layout, pages.device)


_COPIES: dict[str, Callable[[EnginePages], PageCopy]] = {"cpu": CpuPageCopy, "cuda": CudaPageCopy}
