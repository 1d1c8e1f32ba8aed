"""The engine's blocks to host slots and back, through core and mover, next to a plain copy of the same bytes."""

import threading
import time
from collections.abc import Generator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.bench.io_row import CHUNK_TOKENS, DEADLINE_S, FINGERPRINT, Row, Sample, Tick, chunk_key, layout_of, timed
from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits
from kvtier.device.cpu import CpuCopier
from kvtier.errors import KvError
from kvtier.layout import KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import Mover, Threads
from kvtier.runtime.session import LocalSession
from kvtier.types import Event, LoadDone, Place, Prefix, RequestId, StoreDone

BLOCKS = 16
"""Blocks of a chunk, as with vLLM's 16 tokens."""


def host_row(op: str, size: int, count: int, repeats: int, tick: Tick) -> Row:
    """One row: `count` chunks of `size` bytes, stored or loaded `repeats` times.

    Raises:
        KvError: a chunk was dropped, came back with other bytes, or did not come.
    """
    threads = 2
    layout = layout_of(size)
    layers = len(layout.groups[0].layer_bytes)
    page = size // layers // BLOCKS
    engine = [
        np.random.default_rng(layer).integers(0, 256, (count * BLOCKS, page), np.uint8) for layer in range(layers)
    ]
    twin = [np.zeros_like(blocks) for blocks in engine]
    samples: list[Sample] = []
    cpu: list[float] = []
    for _ in range(repeats):
        tick(f"host {op} {size}")
        ceiling = _memcpy(engine, twin, threads)
        seconds, cpu_s = _host_sample(op, layout, engine, count, threads)
        samples.append((count * size / seconds / 1e9, ceiling, ceiling))
        cpu.append(cpu_s / (count * size / 1e9))
    return Row.of(
        "host",
        op,
        size,
        samples=samples,
        cpu=cpu,
        threads=threads,
        mix="0/100" if op == "store" else "100/0",
        direct_io=False,
    )


def _host_sample(
    op: str, layout: KvLayout, engine: list[npt.NDArray[np.uint8]], count: int, threads: int
) -> tuple[float, float]:
    slots = (count + 2,)
    arena = Arena(layout, slots, populate=True)
    mover = Mover(
        layout=layout,
        rank=0,
        fingerprint=FINGERPRINT,
        arena=arena,
        copier=CpuCopier(layout, [engine]),
        tiers={},
        threads=Threads(device=threads),
    )
    cache = Cache(
        layout=layout,
        slots=slots,
        tiers=[],
        evictor=lambda: make_evictor(Config().host.evictor),
        limits=Limits(waiting_chunks=count),
    )
    session = LocalSession(cache, mover)
    try:
        prefix = Prefix(tuple(chunk_key(number) for number in range(count)), CHUNK_TOKENS)
        places = [Place(0, n, tuple(range(n * BLOCKS, (n + 1) * BLOCKS))) for n in range(count)]
        stored = timed(lambda: _session_store(session, prefix, places))
        if op == "store":
            return stored
        wanted = [blocks.copy() for blocks in engine]
        for blocks in engine:
            blocks[:] = 0
        loaded = timed(lambda: _session_load(session, prefix, places))
        if any(not np.array_equal(*pair) for pair in zip(wanted, engine, strict=True)):
            raise KvError("the benchmark read back other bytes than it stored")
        return loaded
    finally:
        session.close(5.0)
        arena.close()


def _session_store(session: LocalSession, prefix: Prefix, places: list[Place]) -> None:
    session.store(RequestId("store"), prefix, places)
    for event in _events(session):
        if isinstance(event, StoreDone):
            if event.dropped:
                raise KvError(f"the benchmark's store dropped {event.dropped} chunks")
            return


def _session_load(session: LocalSession, prefix: Prefix, places: list[Place]) -> None:
    tokens = len(prefix.keys) * CHUNK_TOKENS
    session.load(RequestId("load"), prefix, tokens, places)
    for event in _events(session):
        if isinstance(event, LoadDone):
            if event.tokens != tokens:
                raise KvError(f"the benchmark's load brought {event.tokens} of {tokens} tokens")
            return


def _events(session: LocalSession) -> Generator[Event, None, NoReturn]:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        yield from session.poll(0.5)
    raise KvError(f"the benchmark got no answer within {DEADLINE_S:g} s")


def _memcpy(source: list[npt.NDArray[np.uint8]], target: list[npt.NDArray[np.uint8]], threads: int) -> float:
    """GB/s of plain copies of the same bytes by as many threads."""

    def copy(part: int) -> None:
        for blocks, twin in zip(source, target, strict=True):
            half = len(blocks) // threads
            np.copyto(twin[part * half : (part + 1) * half], blocks[part * half : (part + 1) * half])

    workers = [threading.Thread(target=copy, args=(part,)) for part in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE_S)
    return sum(blocks.nbytes for blocks in source) / (time.perf_counter() - start) / 1e9
