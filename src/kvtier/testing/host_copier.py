"""A copier for numbered blocks in host memory, for tests and benchmarks. Engines have their own copiers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.copier import Fence
from kvtier.layout import KvLayout
from kvtier.types import RequestId

Blocks = npt.NDArray[np.uint8]
"""One layer's blocks: uint8 [blocks, block_bytes], contiguous."""


class _Group(NamedTuple):
    layers: Sequence[tuple[int, int, memoryview]]
    """For each layer, its offset in the payload, the size of a block in bytes, and its memory."""
    ids: range
    """Ids of the blocks that every layer has."""
    blocks: int
    """Number of blocks of a full chunk."""
    payload_bytes: int


class HostCopier:
    """Copies between numbered blocks and payloads. A chunk's address is the tuple of its block ids, in token order.

    Block `i` of a chunk is at ``layer_offsets[l] + i * block_bytes`` of layer `l`. The last chunk of a prompt may
    have fewer blocks: gather zeroes the remaining bytes of each layer, and scatter skips them.

    Args:
        layout: the KV groups.
        groups: for each group, the blocks of each layer; views of the engine's memory.
    """

    def __init__(self, layout: KvLayout, groups: Sequence[Sequence[Blocks]]) -> None:
        self._groups = [
            _Group(
                layers=[
                    (offset, layer.shape[1], layer.reshape(-1).data)
                    for offset, layer in zip(group.layer_offsets, layers, strict=True)
                ],
                ids=range(min(len(layer) for layer in layers)),
                blocks=group.layer_bytes[0] // layers[0].shape[1],
                payload_bytes=group.layer_offsets[-1] + group.layer_bytes[-1],
            )
            for group, layers in zip(layout.groups, groups, strict=True)
        ]

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:  # noqa: ARG002
        """Copy engine blocks into `payload`. The copy is complete on return.

        Raises:
            ValueError: there are too many or unknown blocks, or the payload is too small. Nothing was copied.
        """
        known = self._groups[group]
        for slot, engine in _runs(known, blocks, payload):
            _copy(slot, engine)
        if missing := known.blocks - len(blocks):
            for offset, size, _ in known.layers:
                payload[offset + len(blocks) * size : offset + known.blocks * size] = bytes(missing * size)
        return None

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:  # noqa: ARG002
        """Copy `payload` into engine blocks. The copy is complete on return. See `gather` for errors."""
        known = self._groups[group]
        for slot, engine in _runs(known, blocks, payload):
            _copy(engine, slot)
        return None

    def done(self, fence: Fence) -> bool:  # noqa: ARG002
        """Return True, because copies are complete on return."""
        return True


def _runs(group: _Group, blocks: tuple[int, ...], payload: memoryview) -> list[tuple[memoryview, memoryview]]:
    """Return payload bytes and engine bytes of each run of consecutive blocks, for each layer."""
    count, first = len(blocks), blocks[0] if blocks else -1
    if not 1 <= count <= group.blocks or min(blocks) not in group.ids or max(blocks) not in group.ids:
        raise ValueError(f"a chunk has 1 to {group.blocks} blocks of {group.ids}, got {blocks}")
    if payload.nbytes < group.payload_bytes:
        raise ValueError(f"a payload has at least {group.payload_bytes} bytes, got {payload.nbytes}")
    if blocks == tuple(range(first, first + count)):
        runs = [(0, first, count)]
    else:
        runs = [(position, block, 1) for position, block in enumerate(blocks)]
    flat = payload.cast("B")
    return [
        (
            flat[offset + position * size : offset + (position + run) * size],
            engine[block * size : (block + run) * size],
        )
        for offset, size, engine in group.layers
        for position, block, run in runs
    ]


def _copy(target: memoryview, source: memoryview) -> None:
    # NumPy releases the GIL for this copy.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
