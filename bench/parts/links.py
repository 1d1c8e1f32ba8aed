"""Bandwidth of each link, next to a plain copy of the same bytes in the same run. Imports torch."""

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kvtier.device.copy_descriptors import table
from kvtier.device.staged_copy import PayloadPart, StagedCopy
from kvtier.device.streams import Event
from kvtier.runtime.arena import page_aligned

CHUNK_BYTES = 32 << 20
CHUNKS = 16
CPU_CHUNKS = 2
PIECE_BYTES = 64 << 10
"""One head in one layer of a chunk: 256 tokens of 128 two-byte values."""
_READ_THREADS = 4
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One link. GB is 10^9 bytes."""

    name: str
    gb_per_s: float
    """Through kvtier's staged copy; for the disk the plain read itself."""
    plain_gb_per_s: float
    note: str

    @property
    def ratio(self) -> float:
        """Share of the plain copy's bandwidth."""
        return self.gb_per_s / self.plain_gb_per_s if self.plain_gb_per_s else 0.0


def measure_links(device: str, place: Path, repeats: int) -> list[LinkSpeed]:
    """The links between a device, host memory and the drive at `place`."""
    read = plain_read(place, CHUNK_BYTES * (CHUNKS if device.startswith("cuda") else CPU_CHUNKS), repeats)
    found = [read]
    if device.startswith("cuda"):
        found += _device_links(torch.device(device), repeats)
    return found


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


def _device_links(device: torch.device, repeats: int) -> list[LinkSpeed]:
    from kvtier.device.cuda import CudaStreams  # noqa: PLC0415 - needs a driver
    from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415

    size = CHUNK_BYTES * CHUNKS
    host = [page_aligned(size) for _ in range(2)]
    for region in host:
        region[:: mmap.PAGESIZE] = 1
    lock = cuda_page_lock("on")
    assert lock is not None
    unlocks = [lock(int(region.__array_interface__["data"][0]), size) for region in host]
    try:
        engine = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        order = torch.randperm(size // PIECE_BYTES, generator=torch.Generator().manual_seed(1)).numpy()
        parts = [_parts(region.data, tensor.data_ptr(), order) for region, tensor in zip(host, engine, strict=True)]
        staged = StagedCopy(CudaStreams(device))
        tensors: list[Any] = [cast("Any", torch).from_numpy(region) for region in host]
        second: Any = torch.cuda.Stream(device)

        def plain_in() -> None:
            engine[0].copy_(tensors[0], non_blocking=True)

        def plain_out() -> None:
            tensors[1].copy_(engine[1], non_blocking=True)

        def plain_both() -> None:
            plain_in()
            with torch.cuda.stream(second):
                plain_out()

        arms: list[tuple[str, int, Callable[[], None], Callable[[], Sequence[Event]]]] = [
            ("host to device", 1, plain_in, lambda: [staged.scatter(parts[0])]),
            ("device to host", 1, plain_out, lambda: [staged.gather(parts[1])]),
            ("both ways at once", 2, plain_both, lambda: [staged.scatter(parts[0]), staged.gather(parts[1])]),
        ]
        found: list[LinkSpeed] = []
        for name, ways, plain, ours in arms:
            rates: list[tuple[float, float]] = []
            for _ in range(repeats + 1):
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                plain()
                torch.cuda.synchronize(device)
                middle = time.perf_counter()
                _finish(ours())
                rates.append((ways * size / (middle - began) / 1e9, ways * size / (time.perf_counter() - middle) / 1e9))
            # The first of each warms up.
            plain_rate, our_rate = (statistics.median(column) for column in zip(*rates[1:], strict=True))
            found.append(LinkSpeed(name, our_rate, plain_rate, f"{CHUNKS} chunks in pieces of {PIECE_BYTES} bytes"))
        return found
    finally:
        torch.cuda.synchronize(device)
        for unlock in unlocks:
            unlock()


def _parts(payload: memoryview, address: int, order: Any) -> list[PayloadPart]:  # noqa: ANN401 - an array of whole numbers
    per_part = (1 << 20) // PIECE_BYTES
    offsets = np.arange(per_part) * PIECE_BYTES
    return [
        PayloadPart(
            payload[start : start + (1 << 20)],
            table(offsets, address + order[start // PIECE_BYTES :][:per_part] * PIECE_BYTES, PIECE_BYTES),
        )
        for start in range(0, len(payload), 1 << 20)
    ]


def _finish(events: Sequence[Event]) -> None:
    until = time.monotonic() + _WAIT_S
    while not all(event.query() for event in events):
        if time.monotonic() > until:
            raise TimeoutError(f"a copy has not ended within {_WAIT_S:g} s")
        time.sleep(20e-6)
