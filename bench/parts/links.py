"""Bandwidth of each link, next to a plain copy of the same bytes in the same run. Imports torch."""

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np
import torch

from kvtier.connect.transformers.caches import CachedLayer, blank_spans, group_layers
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.device.copier import Fence
from kvtier.device.page_lock import CudaRegistrar, cuda_page_lock
from kvtier.runtime.arena import page_aligned
from kvtier.types import RequestId

CHUNK_BYTES = 32 << 20
CHUNKS = 16
"""The number in a copy, unless the command says otherwise."""
CHUNK_TOKENS = 256
LAYERS, HEADS, HEAD_DIM = 32, 8, 128
"""A model whose chunk has `CHUNK_BYTES` in bf16; a head has 64 KiB in one layer of a chunk."""
_READ_THREADS = 4
_WAIT_S = 60.0
_IN, _OUT = RequestId("in"), RequestId("out")


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One link. GB is 10^9 bytes."""

    name: str
    gb_per_s: float
    """Through kvtier's copier; for the disk the plain read itself."""
    plain_gb_per_s: float
    note: str

    @property
    def ratio(self) -> float:
        """Share of the plain copy's bandwidth."""
        return self.gb_per_s / self.plain_gb_per_s if self.plain_gb_per_s else 0.0


class Device(Protocol):
    """What the measurements need of a device that torch and kvtier's copies know."""

    name: str
    """As torch names it."""

    def registrar(self) -> CudaRegistrar:
        """Page-locks memory."""
        ...

    def settle(self) -> None:
        """Wait for all queued work."""
        ...

    def settle_current(self) -> None:
        """Wait for the work of the current stream."""
        ...

    def beside(self, number: int) -> AbstractContextManager[object]:
        """Make another stream the current one: number 0 or 1."""
        ...


class CudaDevice:
    """A CUDA device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = torch.device(name)
        self._others: list[Any] = [torch.cuda.Stream(self._device) for _ in range(2)]

    def registrar(self) -> CudaRegistrar:
        """See `Device`."""
        return CudaRegistrar()

    def settle(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self._device)

    def settle_current(self) -> None:
        """See `Device`."""
        torch.cuda.current_stream(self._device).synchronize()

    def beside(self, number: int) -> AbstractContextManager[object]:
        """See `Device`."""
        return cast("Any", torch.cuda).stream(self._others[number])


class CopyBed:
    """Page-locked host memory and scattered device memory of the same size, for each direction.

    A context manager: the memory stays locked until its end.
    """

    def __init__(self, device: Device, chunks: int) -> None:
        self.size_bytes = CHUNK_BYTES * chunks
        self._host = [page_aligned(self.size_bytes) for _ in range(2)]
        for region in self._host:
            region[:: mmap.PAGESIZE] = 1
        lock = cuda_page_lock("on", device.registrar())
        assert lock is not None
        self._unlocks = [lock(address_of(region), self.size_bytes) for region in self._host]
        self._device = device
        engine = [torch.empty(self.size_bytes, dtype=torch.uint8, device=device.name) for _ in range(2)]
        self._engine, self._tensors = engine, [cast("Any", torch).from_numpy(region) for region in self._host]
        layers = [
            CachedLayer(number, None, HEADS, HEAD_DIM, HEADS, HEAD_DIM, torch.bfloat16, engine[0].device)
            for number in range(LAYERS)
        ]
        shape = group_layers(None, layers)
        self._copier = CacheCopier(shape, shape.layout(CHUNK_TOKENS))
        for request in (_IN, _OUT):
            self._copier.expose(request, 0, 0, blank_spans(shape, (0,), CHUNK_TOKENS * chunks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.settle()
        for unlock in self._unlocks:
            with suppress(RuntimeError):  # what was measured is good
                unlock()

    def plain_in(self) -> None:
        """One contiguous copy to the device, queued."""
        self._engine[0].copy_(self._tensors[0], non_blocking=True)

    def plain_out(self) -> None:
        """One contiguous copy from the device, queued."""
        self._tensors[1].copy_(self._engine[1], non_blocking=True)

    def plain_both(self) -> None:
        """Both at once."""
        self.plain_in()
        with self._device.beside(0):
            self.plain_out()

    def scatter(self) -> list[Fence | None]:
        """Copy to the device with kvtier."""
        return [self._copier.scatter(_IN, 0, blocks, payload) for blocks, payload in self._chunks(self._host[0])]

    def gather(self) -> list[Fence | None]:
        """Copy from the device with kvtier."""
        return [self._copier.gather(_OUT, 0, blocks, payload) for blocks, payload in self._chunks(self._host[1])]

    def finish(self, fences: Sequence[Fence | None]) -> None:
        """Wait for these copies.

        Raises:
            TimeoutError: a copy has not ended within a minute.
        """
        until = time.monotonic() + _WAIT_S
        while not all(fence is None or self._copier.done(fence) for fence in fences):
            if time.monotonic() > until:
                raise TimeoutError(f"a copy has not ended within {_WAIT_S:g} s")
            time.sleep(20e-6)

    @staticmethod
    def _chunks(region: Any) -> Iterator[tuple[tuple[int, int], memoryview]]:  # noqa: ANN401 - an array of bytes
        for number in range(region.size // CHUNK_BYTES):
            start, first = number * CHUNK_BYTES, number * CHUNK_TOKENS
            yield (first, first + CHUNK_TOKENS), region.data[start : start + CHUNK_BYTES]


def measure_links(device: str, place: Path, repeats: int, chunks: int = CHUNKS) -> list[LinkSpeed]:
    """The links between a device, host memory and the drive at `place`, with copies of so many chunks."""
    read = plain_read(place, CHUNK_BYTES * chunks, repeats)
    if not device.startswith("cuda"):
        return [read]
    with CopyBed(cuda := CudaDevice(device), chunks) as bed:
        return [read, *copies(cuda, bed, repeats)]


def plain_read(place: Path, size_bytes: int, repeats: int) -> LinkSpeed:
    """Read a file from the drive, with direct I/O where the file system supports it."""
    path = place / "plain"
    region = page_aligned(size_bytes)
    region[:] = np.random.default_rng(1).integers(0, 256, region.size, np.uint8)
    flags = os.O_RDWR | os.O_CREAT
    is_direct = True
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        file, is_direct = os.open(path, flags), False
    try:
        step = min(CHUNK_BYTES, size_bytes)
        starts = range(0, size_bytes, step)
        view = region.data
        with ThreadPoolExecutor(_READ_THREADS) as pool:

            def write(start: int) -> int:
                return os.pwrite(file, view[start : start + step], start)

            def read(start: int) -> int:
                return os.preadv(file, [view[start : start + step]], start)

            list(pool.map(write, starts))
            os.fsync(file)
            rates: list[float] = []
            for _ in range(repeats):
                if not is_direct:
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                done = sum(pool.map(read, starts))
                rates.append(done / (time.perf_counter() - began) / 1e9)
    finally:
        os.close(file)
        path.unlink()
    rate = statistics.median(rates)
    return LinkSpeed("disk", rate, rate, f"preadv, {_READ_THREADS} threads, {'direct' if is_direct else 'page cache'}")


def copies(device: Device, bed: CopyBed, repeats: int) -> list[LinkSpeed]:
    """Copies with kvtier in each direction and in both at once, in turn with plain ones."""
    arms: list[tuple[str, int, Callable[[], None], Callable[[], Sequence[Fence | None]]]] = [
        ("host to device", 1, bed.plain_in, bed.scatter),
        ("device to host", 1, bed.plain_out, bed.gather),
        ("both ways at once", 2, bed.plain_both, lambda: [*bed.scatter(), *bed.gather()]),
    ]
    found: list[LinkSpeed] = []
    for name, ways, plain, ours in arms:
        rates: list[tuple[float, float]] = []
        moved = ways * bed.size_bytes
        for _ in range(repeats + 1):
            device.settle()
            began = time.perf_counter()
            plain()
            device.settle()
            middle = time.perf_counter()
            bed.finish(ours())
            rates.append((moved / (middle - began) / 1e9, moved / (time.perf_counter() - middle) / 1e9))
        # The first of each warms up.
        plain_rate, our_rate = (statistics.median(column) for column in zip(*rates[1:], strict=True))
        found.append(
            LinkSpeed(name, our_rate, plain_rate, f"{bed.size_bytes // CHUNK_BYTES} chunks of {CHUNK_BYTES >> 20} MiB")
        )
    return found


def address_of(region: Any) -> int:  # noqa: ANN401 - an array of bytes
    """Return the address of its first byte."""
    return int(region.__array_interface__["data"][0])
