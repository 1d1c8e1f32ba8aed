"""Copies pages on a CPU, at the speed of memory.

NumPy makes the copies. It releases the GIL, so several threads copy in parallel while the engine computes. It uses no
thread of torch's pool, which would take cores from the model. Reacquiring the GIL may take a switch interval of 5 ms.
So one call copies a run of blocks of all layers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.connect.vllm.geometry import SKIP
from kvtier.connect.vllm.worker.pages import BlockIds, EnginePages
from kvtier.device.copier import Fence

Bytes = npt.NDArray[np.uint8]


class BlockRun(NamedTuple):
    """Blocks that are adjacent both in the chunk and in the engine."""

    position: int
    """Index of the first block in the chunk."""
    first: int
    """Id of the first block."""
    blocks: int


class CpuPageCopy:
    """Copies pages on a CPU. Copies are complete on return."""

    def __init__(self, pages: EnginePages) -> None:
        self._groups = [
            [(table, [(stack, stack.pages.numpy()) for stack in table.stacks]) for table in tables]
            for tables in pages.groups
        ]

    def gather(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        """Copy the pages of these blocks into `payload`."""
        for slot, engine in self._pairs(group, ids, payload):
            np.copyto(slot, engine)
        return None

    def scatter(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        """Copy `payload` into the pages of these blocks, except `SKIP`."""
        for slot, engine in self._pairs(group, ids, payload):
            np.copyto(engine, slot)
        return None

    def done(self, fence: Fence) -> bool:  # noqa: ARG002
        """Return True: no copy has a fence."""
        return True

    def _pairs(self, group: int, ids: BlockIds, payload: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield (slot, engine) arrays of equal shape, for each run of blocks and stack of layers."""
        for (table, stacks), blocks in zip(self._groups[group], ids, strict=True):
            runs = runs_of(blocks)
            for stack, engine in stacks:
                layers, _, *pieces = engine.shape
                # In the slot a page is contiguous, however many pieces it has in the engine.
                strides = [math.prod(pieces[number + 1 :]) for number in range(len(pieces))]
                shape, steps = (layers, table.blocks, *pieces), (stack.step, table.page_bytes, *strides)
                slot: Bytes = np.ndarray(shape, np.uint8, payload, stack.offset, steps)
                for run in runs:
                    there = slice(run.position, run.position + run.blocks)
                    yield slot[:, there], engine[:, run.first : run.first + run.blocks]


def runs_of(ids: Sequence[int]) -> list[BlockRun]:
    """Return the runs of consecutive ids, without `SKIP`."""
    runs: list[BlockRun] = []
    start = 0
    for position in range(1, len(ids) + 1):
        # `SKIP` + 1 is the null block. No address contains it, so `SKIP` always forms a separate run.
        if position == len(ids) or ids[position] != ids[position - 1] + 1:
            if ids[start] != SKIP:
                runs.append(BlockRun(start, ids[start], position - start))
            start = position
    return runs
