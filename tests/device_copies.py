"""An engine and mover threads on a simulated device, for any seed: what they copy, and when memory is reused.

The movers run kvtier's own `CommandRunner` with its copiers and a page-locked arena. The engine computes on the default
stream, one step ahead of its output. It reuses blocks, as vLLM does, once their copies are revoked, and its tensors, as
Transformers does, once they are forgotten. A slot gets other bytes as soon as its command has ended.

`run_vllm` and `run_transformers` return what went wrong in one schedule.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.simulated_cuda import Machine, begin
from tests.simulated_cuda.machine import POISON, DeviceError, StalledError
from tests.simulated_cuda.tensors import parts
from tests.vllm_recorded import Recorded, recorded
from tests.vllm_world import made

from kvtier.connect.transformers.caches import CachedLayer, Span, Spans, blank_spans, group_layers
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.vllm.copier import BlockCopier, RevokedError, open_copier
from kvtier.connect.vllm.geometry import Geometry
from kvtier.device.copier import Copier
from kvtier.layout import KvLayout
from kvtier.runtime import command_runner
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Job
from kvtier.runtime.worker_queues import Scratch
from kvtier.types import ChunkKey, Direction, Outcome, RequestId, Transfer

HOST_PART_BYTES = 4096
SLOTS = 3
MOVERS = 2
POLLS_MAX = 2000
REFUSED = 0.02
"""Share of the calls that the driver refuses, in schedules with errors."""


@dataclass
class Command:
    """A gather or scatter."""

    direction: Direction
    request: str
    group: int
    blocks: tuple[int, ...]
    wanted: Callable[[memoryview], bool]
    """Whether a payload holds the right bytes."""
    fill: Callable[[memoryview], None]
    """Write the right bytes to a payload."""
    ended: Callable[[bool], None]
    """Called at the end: whether it succeeded."""


@dataclass
class Movers:
    """Commands, and the threads that execute them. One thread runs at a time."""

    machine: Machine
    rng: random.Random
    copier: Copier
    layout: KvLayout
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Slots are page-locked, pageable, or the first of them only are locked by now.
        locked = self.rng.choice((SLOTS, SLOTS, 0, 1))

        def lock(address: int, size_bytes: int, slot_bytes: int) -> Callable[[], None]:
            if locked:
                assert self.machine.register(address, slot_bytes * locked) == 0
            return lambda: None

        self.arena = Arena(self.layout, [SLOTS] * len(self.layout.groups), page_lock=lock)
        self.runner = CommandRunner(
            layout=self.layout,
            model=bytes(16),
            arena=self.arena,
            copier=self.copier,
            tiers={},
            common=(),
            forms={},
            clock=lambda: 0.0,
        )
        self.free: list[list[int]] = [[] for _ in self.layout.groups]
        self.queue: deque[tuple[Command, int]] = deque()
        self.running = 0
        self.is_over = False
        self._ids = count()
        for group in range(len(self.layout.groups)):
            for slot in range(SLOTS):
                self._reuse(group, slot)

    def submit(self, command: Command) -> None:
        """Queue a command, with a slot that holds the right bytes if it is a scatter."""
        self.machine.wait_for(lambda: self.free[command.group])
        slot = self.free[command.group].pop()
        payload = self.arena.payload(command.group, slot)
        self.machine.host_writes(f"use of slot {slot}", payload)
        if command.direction is Direction.SCATTER:
            command.fill(payload)
        self.queue.append((command, slot))
        self.machine.switch()

    def work(self) -> None:
        """Execute commands until the engine is over."""
        while self.queue or not self.is_over:
            self.machine.wait_for(lambda: self.queue or self.is_over)
            if not self.queue:
                return
            command, slot = self.queue.popleft()
            self.running += 1
            with self.machine.label(f"{command.direction.value} {command.request}"):
                is_done = self._run(command, slot)
            self.running -= 1
            payload = self.arena.payload(command.group, slot)
            if is_done and command.direction is Direction.GATHER:
                self.machine.host_reads(f"a reader of {command.request}", payload)
                if not command.wanted(payload):
                    self.problems.append(f"gather of {command.request}: wrong bytes")
            self._reuse(command.group, slot)
            command.ended(is_done)

    def wait(self) -> None:
        """Wait until nothing is queued or runs."""
        self.machine.wait_for(lambda: not self.queue and not self.running)

    def _run(self, command: Command, slot: int) -> bool:
        key, request = ChunkKey(bytes(16)), RequestId(command.request)
        what = command.group, slot, "", request, command.blocks
        transfer = Transfer(next(self._ids), command.direction, key, *what, None, 0, math.inf, None)
        polls = count()

        def sleep(_s: float) -> None:
            self.machine.switch()
            if next(polls) > POLLS_MAX:
                raise StalledError("the copy waits for a stream that is held")

        clock = SimpleNamespace(sleep=sleep)
        try:
            with mock.patch.object(command_runner, "time", clock):
                (result,) = self.runner.run([Job(transfer, 0.0)], Scratch())
        except StalledError as error:
            self.problems.append(f"{command.direction.value} of {command.request}: {error}")
            return False
        except (DeviceError, RevokedError, LookupError) as error:
            if isinstance(error, DeviceError) and "refused" not in str(error):
                self.problems.append(f"{command.direction.value} of {command.request}: {error}")
            return False
        assert not isinstance(result, Exception)
        return result.outcome is Outcome.DONE

    def _reuse(self, group: int, slot: int) -> None:
        """Give the slot to another object."""
        payload = self.arena.payload(group, slot)
        self.machine.host_writes(f"reuse of slot {slot}", payload)
        np.frombuffer(payload, np.uint8)[:] = POISON
        self.free[group].append(slot)


def _options(rng: random.Random) -> dict[str, int]:
    """A pool of streams that is never empty, or so small that threads share them."""
    return {"host_part_bytes": HOST_PART_BYTES, "stream_count": rng.choice((1, 2, 32, 32))}


def run_schedule(machine: Machine, movers: Movers, engine: Callable[[], None], *, has_errors: bool) -> list[str]:
    """Run the engine and the movers in one order; what went wrong."""
    rng = random.Random(machine.rng.random())
    calls = {"allocate", "record", "wait", "copy to the device", "copy to the host"}

    def refuses(name: str) -> bool:
        is_mover = getattr(machine.local, "actor", 0) > 1
        return is_mover and (name in calls or "aten" in name) and rng.random() < REFUSED

    if has_errors:
        machine.fail_at = refuses

    def whole() -> None:
        try:
            engine()
        finally:
            movers.is_over = True

    machine.together(whole, *[movers.work] * MOVERS)
    torch.cuda.synchronize()
    return movers.problems


# ---- vLLM --------------------------------------------------------------------------------------------------------

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
    """Of each of its bytes."""
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
            while not self.copier.revoke([RequestId(chunk.request)], 1e-4):
                self.machine.switch()
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


def run_vllm(seed: int) -> list[str]:
    """What went wrong in one schedule."""
    rng = random.Random(f"vllm {seed}")
    engine, part_bytes = GEOMETRIES[seed % len(GEOMETRIES)]
    machine = begin(seed, part_bytes=part_bytes, **_options(rng))
    worker = VllmEngine(machine, engine(), rng, has_draft=rng.random() < 0.5)
    problems = run_schedule(machine, worker.movers, worker.run, has_errors=rng.random() < 0.3)
    return problems + worker.races()


# ---- Transformers ------------------------------------------------------------------------------------------------

CHUNK_TOKENS, WINDOW = 4, 6
CALLS = 4


@dataclass
class Row:
    """The tensors of one request, with a value for each chunk of each group."""

    request: str
    pad: int
    spans: Spans
    values: list[list[int]]
    open_copies: int = 0
    is_failed: bool = False


class TransformersEngine:
    """`generate` calls: restores a prompt, computes more, stores it, and forgets its tensors.

    Args:
        is_hasty: as at the end of a session whose device hangs, tensors may be forgotten while they are copied.
    """

    def __init__(self, machine: Machine, rng: random.Random, *, is_hasty: bool) -> None:
        self.machine = machine
        self.rng = rng
        self.is_hasty = is_hasty
        device = torch.device("cuda", 0)
        layers = [
            CachedLayer(number, WINDOW if number % 2 else None, 2, 4, 1, 8, torch.bfloat16, device)
            for number in range(4)
        ]
        self.shape = group_layers(None, layers)
        self.layout = self.shape.layout(CHUNK_TOKENS)
        self.copier = CacheCopier(self.shape, self.layout)
        self.movers = Movers(machine, rng, self.copier, self.layout)
        self.problems = self.movers.problems
        self._names = count()
        self._values = count()

    def run(self) -> None:
        for _ in range(CALLS):
            pad, chunks = self.rng.choice((0, CHUNK_TOKENS)), self.rng.choice((1, 2, 3))
            if self.rng.random() < 0.5:
                self._restore(pad, chunks)
            self._store(pad, chunks)
        self.movers.wait()

    def run_held(self) -> None:
        """Store and load while the default stream holds what the engine has queued since."""
        stored, loaded = self._exposed_store(0, 2), self._exposed_load(0, 2)
        torch.cuda.synchronize()
        with self.machine.held():
            self._submit_all(Direction.GATHER, stored)
            self._submit_all(Direction.SCATTER, loaded)
            self.movers.wait()

    def _row(self, what: str, pad: int, chunks: int, spans: Spans) -> Row:
        values = [[1 + next(self._values) % 250 for _ in range(chunks)] for _ in self.shape.groups]
        return Row(f"{what} {next(self._names)}", pad, spans, values)

    def _exposed_load(self, pad: int, chunks: int) -> Row:
        with self.machine.label("engine"):
            row = self._row("load", pad, chunks, blank_spans(self.shape, (pad,), pad + chunks * CHUNK_TOKENS))
            self.copier.expose(RequestId(row.request), 0, pad, row.spans)
        return row

    def _submit_all(self, direction: Direction, row: Row) -> None:
        for group, values in enumerate(row.values):
            for chunk in range(len(values)):
                self._submit(direction, row, group, chunk)

    def _restore(self, pad: int, chunks: int) -> None:
        row = self._exposed_load(pad, chunks)
        self._submit_all(Direction.SCATTER, row)
        if self.is_hasty and self.rng.random() < 0.5:
            self.copier.forget(RequestId(row.request))
            row.spans = ()
            return
        self.machine.wait_for(lambda: not row.open_copies)
        self.copier.forget(RequestId(row.request))
        if row.is_failed:
            return
        for values, layers in zip(row.values, row.spans, strict=True):
            for (span,) in layers:
                for chunk, value in enumerate(values):
                    first = max(0, pad + chunk * CHUNK_TOKENS - span.start)
                    stop = pad + (chunk + 1) * CHUNK_TOKENS - span.start
                    if stop > first:
                        self._read(span.keys[0, :, first:stop], value, row)
                        self._read(span.values[0, :, first:stop], value, row)

    def _read(self, tensor: Any, value: int, row: Row) -> None:
        near = tensor.near

        def check() -> None:
            if not bool((near == value).all()):
                self.problems.append(f"the engine reads wrong bytes of {row.request}")

        with self.machine.label("engine"):
            self.machine.launch(f"attention to {row.request}", check, parts(near, tensor.memory))

    def _store(self, pad: int, chunks: int) -> None:
        row = self._exposed_store(pad, chunks)
        self._submit_all(Direction.GATHER, row)
        row.spans = ()
        if self.is_hasty and self.rng.random() < 0.5:
            self.copier.forget(RequestId(row.request))

    def _exposed_store(self, pad: int, chunks: int) -> Row:
        row = self._row("store", pad, chunks, ())
        with self.machine.label("engine"):
            row.spans = tuple(
                tuple(
                    self._computed(layer, pad, values, in_runs=layer.window is not None and self.rng.random() < 0.5)
                    for layer in group
                )
                for group, values in zip(self.shape.groups, row.values, strict=True)
            )
            self.copier.expose(RequestId(row.request), 0, pad, row.spans)
        return row

    def _computed(self, layer: CachedLayer, pad: int, values: Sequence[int], *, in_runs: bool) -> tuple[Span, ...]:
        columns = pad + len(values) * CHUNK_TOKENS
        made = []
        for heads, dim in ((layer.key_heads, layer.key_dim), (layer.value_heads, layer.value_dim)):
            tensor = torch.empty((1, heads, columns, dim), dtype=layer.dtype, device=layer.device)
            for chunk, value in enumerate(values):
                start = pad + chunk * CHUNK_TOKENS
                tensor[:, :, start : start + CHUNK_TOKENS].fill_(value)
            made.append(tensor)
        keys, values_ = made
        if not in_runs:
            return (Span(keys, values_, 0),)
        cut = pad + CHUNK_TOKENS // 2
        return (
            Span(keys[:, :, :cut].clone(), values_[:, :, :cut].clone(), 0),
            Span(keys[:, :, cut:], values_[:, :, cut:], cut),
        )

    def _submit(self, direction: Direction, row: Row, group: int, chunk: int) -> None:
        layout, value = self.layout.groups[group], row.values[group][chunk]
        bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item()

        def layers(payload: memoryview) -> list[Any]:
            memory = np.frombuffer(payload, np.uint8)
            places = zip(layout.layer_offsets, layout.layer_bytes, strict=True)
            return [memory[start : start + size].view(np.int16) for start, size in places]

        def fill(payload: memoryview) -> None:
            for each in layers(payload):
                each[:] = bits

        def ended(is_done: bool) -> None:
            row.open_copies -= 1
            row.is_failed |= not is_done
            if not row.open_copies and direction is Direction.GATHER:
                self.copier.forget(RequestId(row.request))

        def wanted(payload: memoryview) -> bool:
            return all((each == bits).all() for each in layers(payload))

        row.open_copies += 1
        blocks = chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS
        self.movers.submit(Command(direction, row.request, group, blocks, wanted, fill, ended))


def run_transformers(seed: int) -> list[str]:
    """What went wrong in one schedule."""
    rng = random.Random(f"transformers {seed}")
    machine = begin(seed, part_bytes=32, **_options(rng))
    engine = TransformersEngine(machine, rng, is_hasty=rng.random() < 0.3)
    problems = run_schedule(machine, engine.movers, engine.run, has_errors=rng.random() < 0.3)
    return problems + machine.races


# ---- the engine's stream -----------------------------------------------------------------------------------------


def run_held(seed: int) -> list[str]:
    """Which copies wait for the engine's stream, when it holds steps that were launched ahead."""
    rng = random.Random(f"held {seed}")
    if seed % 2:
        machine = begin(seed, part_bytes=32, **_options(rng))
        engine: Any = TransformersEngine(machine, rng, is_hasty=False)
    else:
        made_of, part_bytes = GEOMETRIES[seed // 2 % len(GEOMETRIES)]
        machine = begin(seed, part_bytes=part_bytes, **_options(rng))
        engine = VllmEngine(machine, made_of(), rng, has_draft=False)
    return run_schedule(machine, engine.movers, engine.run_held, has_errors=False) + machine.races
