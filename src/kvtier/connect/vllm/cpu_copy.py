"""Copies pages on a CPU, at the speed of memory.

numpy does it: it releases the interpreter's lock, so that several threads copy at once and the engine goes on
meanwhile, and it takes no thread of torch's own pool, which would take the processor from the model. To get the lock
back costs up to the 5 ms that another thread may keep it, so one call copies a run of blocks of all layers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.connect.vllm.geometry import SKIP
from kvtier.connect.vllm.pages import BlockIds, EnginePages
from kvtier.device.base import Fence

Bytes = npt.NDArray[np.uint8]


class Run(NamedTuple):
    """Blocks that follow each other in the chunk as well as in the engine."""

    position: int
    """Of the first one in the chunk."""
    first: int
    """Its id."""
    blocks: int


class CpuPageCopy:
    """A `PageCopy` whose copies are complete when they return."""

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
        """Copy `payload` into the pages of these blocks, but those that are `SKIP`."""
        for slot, engine in self._pairs(group, ids, payload):
            np.copyto(engine, slot)
        return None

    def done(self, fence: Fence) -> bool:  # noqa: ARG002
        """Always: no fence is given out."""
        return True

    def _pairs(self, group: int, ids: BlockIds, payload: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        """The bytes in the slot and in the engine of each run of blocks, in arrays of one shape."""
        for (table, stacks), blocks in zip(self._groups[group], ids, strict=True):
            runs = runs_of(blocks)
            for stack, engine in stacks:
                layers, _, *pieces = engine.shape
                # A page is in one piece here, however many it has in the engine.
                strides = [math.prod(pieces[number + 1 :]) for number in range(len(pieces))]
                shape, steps = (layers, table.blocks, *pieces), (stack.step, table.page_bytes, *strides)
                slot: Bytes = np.ndarray(shape, np.uint8, payload, stack.offset, steps)
                for run in runs:
                    there = slice(run.position, run.position + run.blocks)
                    yield slot[:, there], engine[:, run.first : run.first + run.blocks]


def runs_of(ids: Sequence[int]) -> list[Run]:
    """The runs of consecutive ids, without those that are `SKIP`."""
    runs: list[Run] = []
    start = 0
    for position in range(1, len(ids) + 1):
        # `SKIP` begins no run either: the number after it is that of the null block, which is in no address.
        if position == len(ids) or ids[position] != ids[position - 1] + 1:
            if ids[start] != SKIP:
                runs.append(Run(start, ids[start], position - start))
            start = position
    return runs
