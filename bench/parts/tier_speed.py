"""Store and load through a tier next to its raw client library, in turn and in the same run.

A path is a way to the same store: the raw client at its best setting, the tier, a session. Every sample of a path
stores new objects with so many requests in flight, loads them into buffers of the caller, compares one of them, and
deletes them. The paths of a repeat follow each other, in an order that turns, because machines drift. A ratio is the
median over the repeats.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Protocol

from kvtier.errors import TierError
from kvtier.tier.base import Tier
from kvtier.types import ObjectName

SAMPLE_BYTES = 64 << 20
"""Bytes of a sample, and at least two objects for each request in flight."""
LOOKUP_NAMES = 23
"""Names of a lookup: what the core asks a remote tier for in one round."""
RAW = "raw"
Op = Literal["store", "load", "lookup"]


class SpeedPath(Protocol):
    """One way to a store. Thread-safe; methods raise when they fail."""

    def store(self, number: int, frame: memoryview) -> None:
        """Store `frame` as object `number`."""
        ...

    def load(self, number: int, into: memoryview) -> None:
        """Load object `number` into `into`."""
        ...

    def delete(self, number: int) -> None:
        """Delete object `number`."""
        ...

    def lookup(self, numbers: Sequence[int]) -> None:
        """Ask whether the objects exist."""
        ...


class TierPath:
    """Through the methods of a tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._salt = os.urandom(16)

    def store(self, number: int, frame: memoryview) -> None:
        """See `SpeedPath`."""
        if not self._tier.write(self._name(number), frame):
            raise TierError(self._tier.name, "an object was not admitted")

    def load(self, number: int, into: memoryview) -> None:
        """See `SpeedPath`."""
        if self._tier.read(self._name(number), into) != into.nbytes:
            raise TierError(self._tier.name, "an object that was stored is not there")

    def delete(self, number: int) -> None:
        """See `SpeedPath`."""
        self._tier.delete(self._name(number))

    def lookup(self, numbers: Sequence[int]) -> None:
        """See `SpeedPath`."""
        self._tier.contains([self._name(number) for number in numbers])

    def _name(self, number: int) -> ObjectName:
        return ObjectName(sha256(self._salt + number.to_bytes(8, "big")).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeedRow:
    """One path, operation, size and number of requests in flight. GB is 10^9 bytes."""

    tier: str
    kind: str
    op: Op
    chunk_bytes: int
    """0 for a lookup."""
    in_flight: int
    path: str
    gb_per_s: float | None
    """Median; None for a lookup."""
    ms: float | None
    """Median of a lookup of `LOOKUP_NAMES` names; None for the others."""
    ratio: float
    """Median over the repeats of this path's speed over that of `RAW`."""
    samples: tuple[float, ...]
    """GB/s or ms of each repeat."""


def measure_speed(
    tier: str,
    kind: str,
    paths: Mapping[str, SpeedPath],
    *,
    chunk_bytes: int,
    in_flight: int,
    repeats: int,
    sample_bytes: int = SAMPLE_BYTES,
) -> list[TierSpeedRow]:
    """Store and load objects of `chunk_bytes` through each of `paths`, in turn.

    Args:
        tier: the tier's name.
        kind: the name of its kind.
        paths: ways to the store by name; one is `RAW`.
        chunk_bytes: size of an object.
        in_flight: threads, each with one request at a time.
        repeats: samples of each path; the first of all is dropped.
        sample_bytes: bytes of a sample.

    Raises:
        TierError: a path fails, or loads other bytes than it stored.
    """
    count = max(2 * in_flight, sample_bytes // chunk_bytes)
    content = os.urandom(min(chunk_bytes, 1 << 20)) * -(-chunk_bytes // (1 << 20))
    frames = [memoryview(bytearray(content[:chunk_bytes])) for _ in range(in_flight)]
    buffers = [memoryview(bytearray(chunk_bytes)) for _ in range(in_flight)]
    numbers = itertools.count()
    stored: dict[str, list[float]] = {path: [] for path in paths}
    loaded: dict[str, list[float]] = {path: [] for path in paths}
    speeds: dict[Op, dict[str, list[float]]] = {"store": stored, "load": loaded}
    with ThreadPoolExecutor(in_flight) as threads:
        for repeat in range(repeats + 1):
            for name, path in _in_turn(paths, repeat):
                objects = list(itertools.islice(numbers, count))
                for buffer in buffers:
                    buffer[-8:] = bytes(8)
                store_s = _timed(threads, path.store, objects, frames)
                load_s = _timed(threads, path.load, objects, buffers)
                if buffers[0] != frames[0]:
                    raise TierError(tier, f"path {name!r} loaded other bytes than it stored")
                list(threads.map(path.delete, objects))
                if repeat:
                    stored[name].append(count * chunk_bytes / store_s / 1e9)
                    loaded[name].append(count * chunk_bytes / load_s / 1e9)
    return [
        TierSpeedRow(
            tier=tier, kind=kind, op=op, chunk_bytes=chunk_bytes, in_flight=in_flight, path=path,
            gb_per_s=statistics.median(samples[path]), ms=None,
            ratio=statistics.median(mine / raw for mine, raw in zip(samples[path], samples[RAW], strict=True)),
            samples=tuple(samples[path]),
        )
        for op, samples in speeds.items()
        for path in paths
    ]  # fmt: skip


def measure_lookups(tier: str, kind: str, paths: Mapping[str, SpeedPath], *, repeats: int) -> list[TierSpeedRow]:
    """Look up `LOOKUP_NAMES` absent names through each of `paths`, in turn."""
    spans: dict[str, list[float]] = {path: [] for path in paths}
    for repeat in range(repeats + 1):
        for name, path in _in_turn(paths, repeat):
            start_s = time.perf_counter()
            path.lookup(range(repeat * LOOKUP_NAMES, (repeat + 1) * LOOKUP_NAMES))
            if repeat:
                spans[name].append((time.perf_counter() - start_s) * 1e3)
    return [
        TierSpeedRow(
            tier=tier, kind=kind, op="lookup", chunk_bytes=0, in_flight=1, path=path,
            gb_per_s=None, ms=statistics.median(spans[path]),
            ratio=statistics.median(raw / mine for mine, raw in zip(spans[path], spans[RAW], strict=True)),
            samples=tuple(spans[path]),
        )
        for path in paths
    ]  # fmt: skip


def _in_turn(paths: Mapping[str, SpeedPath], repeat: int) -> list[tuple[str, SpeedPath]]:
    items = [*paths.items()]
    return items if repeat % 2 else items[::-1]


def _timed(
    threads: ThreadPoolExecutor,
    act: Callable[[int, memoryview], None],
    objects: Sequence[int],
    buffers: Sequence[memoryview],
) -> float:
    """Seconds to run `act` for all `objects`, one thread for each buffer."""
    left = iter(objects)

    def work(buffer: memoryview) -> None:
        for number in iter(lambda: next(left, None), None):  # one bytecode: no lock is needed
            act(number, buffer)

    start_s = time.perf_counter()
    list(threads.map(work, buffers))
    return time.perf_counter() - start_s
