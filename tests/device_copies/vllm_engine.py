"""A worker of vLLM and its scheduler, as far as they matter to copies."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from tests.device_copies.movers import Command, Movers
from tests.simulated_cuda import Machine
from tests.simulated_cuda.tensors import parts
from tests.vllm_recorded import Recorded, recorded
from tests.vllm_world import made

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.worker.copier import BlockCopier, open_copier
from kvtier.types import Direction, RequestId

GEOMETRIES: list[tuple[Callable[[], Recorded], int]] = [
    (partial(made, "LBHNC"), 2304),
    (partial(made, "LHBNC", 2), 1152),
    (partial(recorded, "swa_win100", 90), 16384),
    (partial(recorded, "gdn", 24), 131072),
]
"""Engines, each with the size of the parts in which accesses are compared."""

STEPS = 6


@dataclass
class Chunk:
    """A chunk in blocks of the engine."""

    request: str
    group: int
    blocks: tuple[int, ...]
    value: int
    """Each of its bytes has this value."""
    is_resident: bool = False
    """A step with it has returned, or its load has ended."""
    is_copied: bool = False
    """A store or load of it is open."""
    is_lost: bool = False


class VllmEngine:
    """A worker and its scheduler: computes, stores, loads, reuses blocks.

    Args:
        has_draft: a draft model writes each chunk's last block after the step's output.
    """

    def __init__(self, machine: Machine, engine: Recorded, rng: random.Random, *, has_draft: bool) -> None:
        self.machine = machine
        self.rng = rng
        self.has_draft = has_draft
        size = max(tensor.size for tensor in engine.config.kv_cache_tensors)
        memory = torch.empty(size, dtype=torch.int8, device="cuda")
        tensors = {
            name: memory.view(getattr(torch, view["dtype"])).as_strided(view["shape"], view["stride"], view["offset"])
            for name, view in engine.views.items()
        }
        torch.cuda.synchronize()
        self.copier: BlockCopier = open_copier(Geometry.of(engine.config), engine.config, tensors, engine.layers)
        self.pages = self.copier.pages
        self.movers = Movers(machine, rng, self.copier, self.pages.layout)
        self.free = list(range(1, self.pages.block_count))
        self.step = 0
        self.deferred: deque[tuple[int, tuple[int, ...]]] = deque()
        """Freed blocks, until the last step that may use them has returned."""
        self.chunks: list[Chunk] = []
        self.stale: set[str] = set()
        """Requests whose stores were revoked."""
        self.problems = self.movers.problems
        self._names = count()

    def run(self) -> None:
        in_flight: deque[tuple[list[Chunk], Any]] = deque()
        for self.step in range(1, STEPS + 1):
            chunks = list(filter(None, (self._new(self._group()) for _ in range(self.rng.choice((1, 1, 2))))))
            for chunk in self.chunks:
                if chunk.is_resident and not chunk.is_copied and self.rng.random() < 0.5:
                    self._read(chunk)
            with self.machine.label("engine"):
                for chunk in chunks:
                    self._compute(chunk, chunk.blocks[:-1] if self.has_draft else chunk.blocks)
                event = torch.cuda.current_stream().record_event()
                for chunk in chunks if self.has_draft else ():
                    self._compute(chunk, chunk.blocks[-1:])
            if self.has_draft:
                self.copier.note_step()
            in_flight.append((chunks, event))
            if len(in_flight) > 1:
                self._returned(*in_flight.popleft(), self.step - 1)
            if self.rng.random() < 0.6 and (chunk := self._new(self._group(), is_load=True)) is not None:
                self._load(chunk)
        while in_flight:
            self._returned(*in_flight.popleft(), self.step)
        self.movers.wait()
        for chunk in self.chunks:
            if chunk.is_resident:
                self._read(chunk)

    def run_held(self) -> None:
        """Store and load while the default stream holds later steps."""
        stored, loaded = self._new(self._group()), self._new(self._group())
        assert stored is not None
        assert loaded is not None
        self._compute(stored, stored.blocks)
        torch.cuda.synchronize()
        with self.machine.held():
            self._returned([stored], torch.cuda.Event(), 0)
            self._load(loaded)
            self.movers.wait()

    def _group(self) -> int:
        return self.rng.randrange(len(self.pages.groups))

    def _new(self, group: int, *, is_load: bool = False) -> Chunk | None:
        """A chunk in free blocks; others lose theirs if there are too few, as the scheduler preempts requests."""
        wanted = sum(table.blocks for table in self.pages.groups[group])
        for chunk in self.rng.sample(self.chunks, len(self.chunks)):
            is_settled = chunk.is_resident or chunk.is_copied
            if is_settled and (len(self.free) < wanted or self.rng.random() < 0.3):
                self._lose(chunk)
        if len(self.free) < wanted and not is_load:  # what this step writes is behind all that was launched
            self._settle(self.step)
        if len(self.free) < wanted:
            return None
        self.free = self.rng.sample(self.free, len(self.free))
        blocks, self.free = tuple(self.free[:wanted]), self.free[wanted:]
        number = next(self._names)
        chunk = Chunk(f"r{number}", group, blocks, 1 + number % 200)
        self.chunks.append(chunk)
        return chunk

    def _lose(self, chunk: Chunk) -> None:
        """Revoke the copies of a chunk, and free its blocks."""
        chunk.is_lost = True
        self.chunks.remove(chunk)
        if chunk.is_copied:
            self.stale.add(chunk.request)
            while not self.copier.revoke([RequestId(chunk.request)], 0.0):
                self.machine.turns.switch()
        self.deferred.append((self.step, chunk.blocks))

    def _compute(self, chunk: Chunk, blocks: Sequence[int]) -> None:
        for stack, ids in self._stacks(chunk):
            for block in ids:
                if block in blocks:
                    stack.pages[:, block].fill_(chunk.value)

    def _read(self, chunk: Chunk) -> None:
        """A step that attends to the chunk."""
        for stack, ids in self._stacks(chunk):
            for block in ids:
                page = stack.pages[:, block]
                check = partial(self._check, page.near, chunk.value, chunk.request)
                with self.machine.label("engine"):
                    self.machine.launch(f"attention to {chunk.request}", check, parts(page.near, page.memory))

    def _check(self, near: torch.Tensor, value: int, request: str) -> None:
        if not bool((near == value).all()):
            self.problems.append(f"the engine reads wrong bytes of {request}")

    def _settle(self, step: int) -> None:
        while self.deferred and self.deferred[0][0] <= step:
            self.free += self.deferred.popleft()[1]

    def _returned(self, chunks: list[Chunk], event: Any, step: int) -> None:
        """The output of a step has returned: its chunks are stored."""
        event.synchronize()
        self._settle(step)
        for chunk in chunks:
            if not chunk.is_lost:
                chunk.is_resident = chunk.is_copied = True
                self.movers.submit(self._command(Direction.GATHER, chunk, partial(self._stored, chunk)))

    def _stored(self, chunk: Chunk, _is_done: bool) -> None:
        chunk.is_copied = False

    def _load(self, chunk: Chunk) -> None:
        chunk.is_copied = True
        self.movers.submit(self._command(Direction.SCATTER, chunk, partial(self._loaded, chunk)))

    def _loaded(self, chunk: Chunk, is_done: bool) -> None:
        if not chunk.is_lost:
            chunk.is_copied = False
            chunk.is_resident = is_done
            if not is_done:
                self._lose(chunk)

    def _command(self, direction: Direction, chunk: Chunk, ended: Callable[[bool], None]) -> Command:
        def pages(payload: memoryview) -> list[Any]:
            memory = np.frombuffer(payload, np.uint8)
            return [
                np.lib.stride_tricks.as_strided(
                    memory[stack.offset :],
                    (stack.pages.shape[0], table.blocks, table.page_bytes),
                    (stack.step, table.page_bytes, 1),
                )
                for table in self.pages.groups[chunk.group]
                for stack in table.stacks
            ]

        def fill(payload: memoryview) -> None:
            for each in pages(payload):
                each[:] = chunk.value

        def wanted(payload: memoryview) -> bool:
            return all((each == chunk.value).all() for each in pages(payload))

        return Command(direction, chunk.request, chunk.group, chunk.blocks, wanted, fill, ended)

    def _stacks(self, chunk: Chunk) -> list[tuple[Any, tuple[int, ...]]]:
        found, start = [], 0
        for table in self.pages.groups[chunk.group]:
            ids = chunk.blocks[start : start + table.blocks]
            start += table.blocks
            found += [(stack, ids) for stack in table.stacks]
        return found

    def races(self) -> list[str]:
        """A revoked store may read what a step writes: it fails when it ends."""
        harmless = [f"gather {request}: aten.index_select" for request in self.stale]
        return [race for race in self.machine.races if not any(text in race for text in harmless)]
