"""The copier for engines whose KV lies in host memory, in pages that the engine numbers."""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Fence
from kvtier.layout import GroupLayout, KvLayout
from kvtier.types import RequestId

Blocks = npt.NDArray[np.uint8]
"""One layer's blocks in the engine: uint8 [blocks, block_bytes], the bytes of a block without gaps."""

Runs = list[tuple[int, int, int]]
"""(position in the chunk, first block, blocks) of each piece of a chunk that lies in one piece in the engine, too."""

RUN_BLOCKS_MIN = 4
"""Blocks that a run has on average from which on copying run by run is the fastest way."""

KEEP_LOCK_BYTES_MAX = 1 << 19
"""Chunks up to this size are copied without releasing the interpreter's lock: that takes some 40 microseconds, less
than it costs to give the lock away and get it back for each layer."""


class _Layer(NamedTuple):
    blocks: Blocks
    flat: Blocks | None
    """The same memory in one dimension; None where something else lies between the blocks."""
    offset: int
    """Byte offset in the payload."""
    block_bytes: int


class _Group(NamedTuple):
    layers: tuple[_Layer, ...]
    views: tuple[memoryview, ...]
    """The bytes of each layer that has a `flat`."""
    block_bytes: int
    """Of all layers together."""
    block_count: int
    """Blocks in the engine; ids are 0 to this, exclusive."""
    chunk_blocks: int
    """Blocks of a full chunk."""
    payload_bytes: int
    """Up to the end of the last layer."""

    def is_small(self, blocks: int) -> bool:
        """Whether so many blocks are best copied in one go, without numpy."""
        return len(self.views) == len(self.layers) and blocks * self.block_bytes <= KEEP_LOCK_BYTES_MAX


class CpuCopier:
    """Copies between numbered blocks and payloads, at the speed of memory.

    A chunk's address is the tuple of its block ids, in token order. Its block `i` lies in layer `l` of the payload at
    ``layer_offsets[l] + i * block_bytes``. A chunk may have fewer blocks than a full one (the end of a prompt): then
    gather sets the rest of each layer to zero, so that no bytes of an earlier chunk leave with it, and scatter leaves
    the rest out.

    Chunks of more than `KEEP_LOCK_BYTES_MAX` are copied by numpy, which releases the interpreter's lock, so that
    several threads copy at once and the engine goes on meanwhile.

    Args:
        layout: the KV groups.
        groups: for each group, the blocks of each of its layers; views of the engine's own memory. Where an engine
            keeps keys and values apart, declare each as a layer of its own.

    Raises:
        ValueError: the arrays do not fit the layout; the message says which.
    """

    def __init__(self, layout: KvLayout, groups: Sequence[Sequence[Blocks]]) -> None:
        if len(groups) != len(layout.groups):
            raise ValueError(f"{len(groups)} groups of blocks for the {len(layout.groups)} groups of the layout")
        self._groups = [
            _checked(number, group, layers)
            for number, (group, layers) in enumerate(zip(layout.groups, groups, strict=True))
        ]

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:  # noqa: ARG002
        """Copy engine blocks into `payload`; complete on return.

        Raises:
            ValueError: a block that does not exist, more blocks than a chunk has, or a payload that is too small.
        """
        known = self._check(group, blocks, payload)
        runs = _runs(blocks)
        if known.is_small(len(blocks)):
            for pages, engine in _small_pieces(known, runs or _singly(blocks), payload):
                pages[:] = engine
        else:
            self._gather(known, blocks, runs, np.frombuffer(payload, np.uint8))
        if len(blocks) < known.chunk_blocks:
            target = np.frombuffer(payload, np.uint8)
            for layer in known.layers:
                start = layer.offset + len(blocks) * layer.block_bytes
                target[start : layer.offset + known.chunk_blocks * layer.block_bytes] = 0
        return None

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:  # noqa: ARG002
        """Copy `payload` into engine blocks; complete on return.

        Raises:
            ValueError: see `gather`.
        """
        known = self._check(group, blocks, payload)
        runs = _runs(blocks)
        if known.is_small(len(blocks)):
            for pages, engine in _small_pieces(known, runs or _singly(blocks), payload):
                engine[:] = pages
        else:
            self._scatter(known, blocks, runs, np.frombuffer(payload, np.uint8))
        return None

    def done(self, fence: Fence) -> bool:  # noqa: ARG002
        """Always: the copies are complete when they return."""
        return True

    @staticmethod
    def _gather(known: _Group, blocks: tuple[int, ...], runs: Runs | None, target: Blocks) -> None:
        ids = np.array(() if runs else blocks, np.intp)
        for layer in known.layers:
            if runs is not None:
                for pages, engine in _pieces(layer, runs, target):
                    np.copyto(pages, engine)
            elif layer.flat is not None:
                pages = _pages(layer, len(blocks), target)
                # "clip" because the default would go through a copy; the ids have been checked.
                np.take(layer.blocks, ids, axis=0, out=pages, mode="clip")
            else:
                # np.take would first copy all blocks of the engine into one piece.
                for page, block in zip(_pages(layer, len(blocks), target), blocks, strict=True):
                    np.copyto(page, layer.blocks[block])

    @staticmethod
    def _scatter(known: _Group, blocks: tuple[int, ...], runs: Runs | None, source: Blocks) -> None:
        ids = np.array(() if runs else blocks, np.intp)
        for layer in known.layers:
            if runs is not None:
                for pages, engine in _pieces(layer, runs, source):
                    np.copyto(engine, pages)
            else:
                layer.blocks[ids] = _pages(layer, len(blocks), source)

    def _check(self, group: int, blocks: tuple[int, ...], payload: memoryview) -> _Group:
        """Everything that could make a copy go astray is checked before the first byte moves."""
        if not 0 <= group < len(self._groups):
            raise ValueError(f"no KV group {group}; there are {len(self._groups)}")
        known = self._groups[group]
        if not 1 <= len(blocks) <= known.chunk_blocks:
            raise ValueError(f"a chunk of group {group} has 1 to {known.chunk_blocks} blocks, got {len(blocks)}")
        if min(blocks) < 0 or max(blocks) >= known.block_count:
            raise ValueError(f"blocks of group {group} are numbered 0 to {known.block_count - 1}, got {blocks}")
        if payload.nbytes < known.payload_bytes:
            raise ValueError(
                f"a payload of group {group} has at least {known.payload_bytes} bytes, got {payload.nbytes}"
            )
        return known


def _checked(number: int, group: GroupLayout, layers: Sequence[Blocks]) -> _Group:
    if len(layers) != len(group.layer_bytes):
        raise ValueError(f"group {number}: {len(layers)} arrays of blocks for {len(group.layer_bytes)} layers")
    chunk_blocks: set[int] = set()
    for layer, (blocks, size) in enumerate(zip(layers, group.layer_bytes, strict=True)):
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or not blocks.size:
            raise ValueError(
                f"group {number}, layer {layer}: blocks must be uint8 [blocks, block_bytes], "
                f"got {blocks.dtype} {list(blocks.shape)}"
            )
        block_bytes = blocks.shape[1]
        if blocks.strides[1] != 1 or blocks.strides[0] < block_bytes or not blocks.flags.writeable:
            raise ValueError(f"group {number}, layer {layer}: each block must be writable and without gaps")
        if size % block_bytes:
            raise ValueError(
                f"group {number}, layer {layer}: {size} bytes are no whole number of {block_bytes}-byte blocks"
            )
        chunk_blocks.add(size // block_bytes)
    if len(chunk_blocks) != 1:
        raise ValueError(f"group {number}: a chunk must have as many blocks in every layer, has {sorted(chunk_blocks)}")
    count = chunk_blocks.pop()
    known = tuple(
        _Layer(blocks, blocks.reshape(-1) if blocks.flags.c_contiguous else None, offset, blocks.shape[1])
        for blocks, offset in zip(layers, group.layer_offsets, strict=True)
    )
    # A block is the same number in every layer, so the layer with the fewest says which numbers there are.
    return _Group(
        layers=known,
        views=tuple(layer.flat.data for layer in known if layer.flat is not None),
        block_bytes=sum(layer.block_bytes for layer in known),
        block_count=min(len(blocks) for blocks in layers),
        chunk_blocks=count,
        payload_bytes=group.layer_offsets[-1] + group.layer_bytes[-1],
    )


def _runs(blocks: tuple[int, ...]) -> Runs | None:
    """The runs of consecutive ids; None when they are too short to be worth it."""
    count, first = len(blocks), blocks[0]
    if blocks[-1] - first == count - 1 and blocks == tuple(range(first, first + count)):
        return [(0, first, count)]
    runs: Runs = []
    start = 0
    for position in range(1, count + 1):
        if position == count or blocks[position] != blocks[position - 1] + 1:
            runs.append((start, blocks[start], position - start))
            start = position
    return runs if len(runs) * RUN_BLOCKS_MIN <= count else None


def _pages(layer: _Layer, count: int, payload: Blocks) -> Blocks:
    """The first `count` blocks of the layer in a payload: uint8 [count, block_bytes]."""
    return payload[layer.offset : layer.offset + count * layer.block_bytes].reshape(count, layer.block_bytes)


def _pieces(layer: _Layer, runs: Runs, payload: Blocks) -> Generator[tuple[Blocks, Blocks]]:
    """For each run its bytes in the payload and in the engine, in one dimension where that is possible."""
    size = layer.block_bytes
    for position, first, count in runs:
        start = layer.offset + position * size
        pages = payload[start : start + count * size]
        if layer.flat is not None:
            yield pages, layer.flat[first * size : (first + count) * size]
        else:
            yield pages.reshape(count, size), layer.blocks[first : first + count]


def _singly(blocks: tuple[int, ...]) -> Runs:
    return [(position, block, 1) for position, block in enumerate(blocks)]


def _small_pieces(known: _Group, runs: Runs, payload: memoryview) -> Generator[tuple[memoryview, memoryview]]:
    """`_pieces` of all layers, as plain bytes."""
    flat = payload.cast("B")
    for layer, view in zip(known.layers, known.views, strict=True):
        size = layer.block_bytes
        for position, first, count in runs:
            start = layer.offset + position * size
            yield flat[start : start + count * size], view[first * size : (first + count) * size]
