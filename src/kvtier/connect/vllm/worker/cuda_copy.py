"""Copies pages on a CUDA device, concurrently with the engine's kernels.

A chunk's pages are scattered over the engine's memory in pieces of some KiB, too small for a fast transfer. So they are
gathered on the device into a buffer laid out like the payload. The buffer crosses the bus in one copy:

    gather    blocks --index_select--> buffer --copy--> payload
    scatter   payload --copy--> buffer --index_copy_--> blocks

Each thread has its own stream and buffer. Chunks are ordered on the stream, so the buffer is free when the next chunk
needs it. The fence is an event after the last copy. Without a draft model no copy waits for the engine's own stream.
Stores start after a step's output has returned, and loads write to blocks that no step uses. A draft model may still
run then, so copies wait for it (`note_step`).
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvtier.connect.vllm.geometry import SKIP
from kvtier.connect.vllm.worker.pages import BlockIds, EnginePages, Stack
from kvtier.device.copier import Fence
from kvtier.layout import align_up

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Bytes are copied in the widest of these words that fits."""

_WORD_BYTES_MAX = 8


class CudaFence:
    """An event after a copy."""

    def __init__(self, event: Any) -> None:  # noqa: ANN401 - torch has two types for it
        self.event = event


class _ThreadState(threading.local):
    """A thread's stream and buffer."""

    stream: torch.cuda.Stream | None = None
    buffer: torch.Tensor | None = None


class CudaPageCopy:
    """Copies pages on CUDA streams.

    Args:
        pages: the worker's KV memory.
    """

    def __init__(self, pages: EnginePages) -> None:
        self._pages = pages
        self._device = pages.device
        # A payload has the same parts, but more padding.
        self._buffer_bytes = max(group.payload_bytes for group in pages.layout.groups)
        self._local = _ThreadState()
        self._step: Any = None
        """An event after the last noted step."""

    def note_step(self) -> None:
        """Order all later copies after the step that the calling thread has launched, including its draft model."""
        self._step = torch.cuda.current_stream(self._device).record_event()

    def gather(self, group: int, ids: BlockIds, payload: memoryview) -> Fence:
        """Start to copy the pages of these blocks into `payload`."""
        slot = torch.frombuffer(payload, dtype=torch.uint8)
        with self._on_stream() as stream:
            for table, near, stack in self._parts(group):
                engine, dense = _worded(stack.pages, near)
                torch.index_select(engine, 1, self._index(ids[table]), out=dense)
                for part, place in _pieces(near, stack):
                    slot[place].copy_(part, non_blocking=True)
            return CudaFence(stream.record_event())

    def scatter(self, group: int, ids: BlockIds, payload: memoryview) -> Fence:
        """Start to copy `payload` into the pages of these blocks, except `SKIP`."""
        slot = torch.frombuffer(payload, dtype=torch.uint8)
        with self._on_stream() as stream:
            for table, near, stack in self._parts(group):
                for part, place in _pieces(near, stack):
                    part.copy_(slot[place], non_blocking=True)
                engine, dense = _worded(stack.pages, near)
                kept = [position for position, block in enumerate(ids[table]) if block != SKIP]
                if len(kept) < len(ids[table]):
                    dense = dense.index_select(1, self._index(kept))
                engine.index_copy_(1, self._index([ids[table][position] for position in kept]), dense)
            return CudaFence(stream.record_event())

    def done(self, fence: Fence) -> bool:
        """Return whether the copy that `fence` stands for is complete. Never blocks."""
        assert isinstance(fence, CudaFence)
        return fence.event.query()

    @contextmanager
    def _on_stream(self) -> Generator[torch.cuda.Stream]:
        if self._local.stream is None:
            # A new thread is on device 0, where it would take memory for its own context.
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
        stream = self._local.stream
        if self._step is not None:
            stream.wait_event(self._step)
        with torch.cuda.stream(stream):
            try:
                yield stream
            except BaseException:
                # Copies that have started must end before the failure is reported.
                stream.synchronize()
                raise

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _parts(self, group: int) -> Iterator[tuple[int, torch.Tensor, Stack]]:
        """Yield (number of the table, part of the buffer, stack) for each stack.

        The part of the buffer is uint8 [layers, blocks of the chunk, pieces ..., bytes], without gaps.
        """
        if self._local.buffer is None:
            self._local.buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)
        start = 0
        for number, table in enumerate(self._pages.groups[group]):
            for stack in table.stacks:
                layers, _, *pieces = stack.pages.shape
                stop = start + layers * table.blocks * table.page_bytes
                yield number, self._local.buffer[start:stop].view(layers, table.blocks, *pieces), stack
                start = align_up(stop, _WORD_BYTES_MAX)


def _pieces(near: torch.Tensor, stack: Stack) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the contiguous parts of a stack: each part in the buffer, and its position in a payload.

    There are several parts only if the payload has padding between the layers.
    """
    layers = near.view(near.shape[0], -1)
    layer_bytes = layers.shape[1]
    if layer_bytes == stack.step or len(layers) == 1:
        yield layers.view(-1), slice(stack.offset, stack.offset + layers.numel())
        return
    for number, layer in enumerate(layers):
        start = stack.offset + number * stack.step
        yield layer, slice(start, start + layer_bytes)


def _worded(engine: torch.Tensor, near: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both byte tensors as tensors of the widest word that fits."""
    numbers = [engine.storage_offset(), near.storage_offset(), engine.shape[-1], *engine.stride()[:-1]]
    words = next(words for words in _WORDS if all(number % words.itemsize == 0 for number in numbers))
    return engine.view(words), near.view(words)
