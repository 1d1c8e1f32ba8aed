"""`generate` calls of Transformers, as far as they matter to copies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from tests.device_copies.movers import Command, Movers
from tests.simulated_cuda import Machine
from tests.simulated_cuda.tensors import parts

from kvtier.connect.transformers.caches import CachedLayer, Span, Spans, blank_spans, group_layers
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.types import Direction, RequestId

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
        self.machine.turns.wait_for(lambda: not row.open_copies)
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
