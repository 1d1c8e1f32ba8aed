"""Measures links: host memory, checksum, codecs and a GPU's link, all with one timed loop.

A measure never runs in the caller's thread, so Ctrl-C is handled immediately and ends the loop at the next operation.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.config.machine_checks import memory_bytes
from kvtier.errors import ConfigError, KvError
from kvtier.layout import SECTION_BYTES_MAX
from kvtier.runtime.adaptive_coding import object_s
from kvtier.runtime.arena import page_aligned

GRACE_S = 30.0
"""Time for a running operation to return after the end of a measure."""
COPY_BYTES = 512 << 20
"""Total size of the source and target of copies in host memory, larger than any processor cache."""
MEMORY_SHARE = 16
"""Divisor of host memory: copies use at most a sixteenth of it."""
GPU_BYTES = 256 << 20
"""Size of the host buffer and of the GPU's buffer for copies between them."""

Act = Callable[[int, int], int]
"""Maps (worker, number of the operation) to bytes moved. An operation that moves 0 bytes does not count."""
Point = tuple[str, int, int, Act]
"""Name, bytes, depth and function of an operation."""
Tick = Callable[[str], None]
"""A function that is called with the operation's name before each measure."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Measure:
    """Throughput and latency measured for one kind of operation, at one size and one depth. 1 GB is 10^9 bytes."""

    op: str
    bytes: int
    """Size of one operation."""
    depth: int
    """Number of concurrent operations, with one thread for each."""
    gb_per_s: float
    latency_us_p50: float
    latency_us_p99: float
    count: int
    """Number of operations."""


@dataclass(frozen=True, slots=True)
class LinkMeasures:
    """One link: host memory, a GPU, a tier, the checksum, a codec."""

    name: str
    measures: tuple[Measure, ...]
    round_trip_us: float | None = None
    """Median time to ask a tier for one absent name; None for other links."""
    ratio: float | None = None
    """A codec's stored bytes divided by the raw bytes; None for other links and for raw objects."""

    def best(self, op: str) -> Measure | None:
        """Return the fastest measure of `op`, or None if there is none."""
        return max((it for it in self.measures if it.op == op), key=lambda it: it.gb_per_s, default=None)


@dataclass(frozen=True, slots=True)
class CodecRead:
    """A tier's reads at the depth that is fastest for raw objects, in GB/s of raw bytes.

    The figure for coded objects follows from the link, the codec's ratio and its decoding speed. Several threads are
    assumed to decode no faster than one. A tier's writer makes the same estimate before it has read a coded object
    (`runtime.adaptive_coding`).
    """

    tier: str
    codec: str
    raw_gb_per_s: float
    coded_gb_per_s: float


class LinkOperation(NamedTuple):
    """One timed operation."""

    seconds: float
    moved: int
    worker: int


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """Limits of one measure. The time limit ends no worker before its first operation."""

    seconds: float
    bytes: int


def copies(sizes: tuple[int, ...], depths: tuple[int, ...], limits: MeasureLimits, tick: Tick) -> LinkMeasures:
    """Measure plain copies in host memory, between page-aligned buffers. Each byte is read once and written once."""
    half = max(min(COPY_BYTES, memory_bytes() // MEMORY_SHARE) // 2, *sizes)
    source, target = page_aligned(half), page_aligned(half)
    source[:], target[:] = 1, 0  # touches every page

    def point(size: int, depth: int) -> Point:
        def copy(worker: int, number: int) -> int:
            start = (number * depth + worker) % (half // size) * size
            np.copyto(target[start : start + size], source[start : start + size])
            return size

        return "copy", size, depth, copy

    return LinkMeasures("host", measures((point(size, depth) for size in sizes for depth in depths), limits, tick))


def checksums(limits: MeasureLimits, depths: tuple[int, ...], tick: Tick) -> LinkMeasures:
    """Measure XXH3-64 over sections of the largest size."""
    size = SECTION_BYTES_MAX
    data = _like_kv(COPY_BYTES // 8).data
    sections = len(data) // size

    def verify(_worker: int, number: int) -> int:
        start = number % sections * size
        xxhash.xxh3_64_intdigest(data[start : start + size])
        return size

    return LinkMeasures("checksum", measures((("hash", size, depth, verify) for depth in depths), limits, tick))


def codecs(limits: MeasureLimits, tick: Tick) -> tuple[list[LinkMeasures], list[str]]:
    """Measure each installed codec in one thread, in GB/s of raw bytes. Also return why other codecs were left out.

    The data resemble KV: normally distributed bfloat16.
    """
    links: list[LinkMeasures] = []
    skipped: list[str] = []
    for name in registry.names():
        try:
            points, ratio = _codec(registry.by_name(name))
            links.append(LinkMeasures(f"codec {name}", measures(points, limits, tick), ratio=ratio))
        except ConfigError as error:
            skipped.append(f"codec {name}: {error}")
    return links, skipped


def _codec(codec: Codec) -> tuple[list[Point], float | None]:
    size = SECTION_BYTES_MAX
    raw = _like_kv(size).data
    stored = memoryview(bytearray(codec.bound(size)))
    back = memoryview(bytearray(size))
    stored_bytes = codec.encode(raw, stored, "bf16")

    def encode(_worker: int, _number: int) -> int:
        codec.encode(raw, stored, "bf16")
        return size

    def decode(_worker: int, _number: int) -> int:
        codec.decode(stored[:stored_bytes], back, "bf16")
        return size

    points: list[Point] = [("encode", size, 1, encode), ("decode", size, 1, decode)]
    return points, None if codec.id == 0 else round(stored_bytes / size, 4)


def codec_reads(links: Sequence[LinkMeasures], cores: int) -> tuple[CodecRead, ...]:
    """Return the speed of reads of raw and of coded objects for each tier and codec of `links`."""
    return tuple(
        CodecRead(
            tier.name,
            codec.name.removeprefix("codec "),
            raw.gb_per_s,
            round(1 / object_s(codec.ratio / raw.gb_per_s, 1 / decode.gb_per_s, raw.depth, cores, 0.0, raw.depth), 4),
        )
        for tier in links
        if (raw := tier.best("read")) is not None
        for codec in links
        if codec.ratio is not None and (decode := codec.best("decode")) is not None
    )


def _like_kv(size: int) -> Bytes:
    values = np.random.default_rng(0).standard_normal(min(size, SECTION_BYTES_MAX) // 2, np.float32)
    section = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.tile(section, -(-size // len(section)))[:size]


def gpu_missing(*, has_gpu: bool) -> str | None:
    """Return why a GPU cannot be measured, or None if it can. torch is imported only if there is a device."""
    if not has_gpu:
        return "gpu: no device"
    if find_spec("torch") is None:
        return "gpu: torch is not installed"
    torch: Any = import_module("torch")
    return None if torch.cuda.is_available() else "gpu: torch cannot use the device"


def gpu_copies(sizes: tuple[int, ...], limits: MeasureLimits, tick: Tick) -> tuple[LinkMeasures, bool]:
    """Measure copies between the first GPU and pageable or page-locked memory. Also return whether page-locking worked.

    Each copy is synchronized, because a mover synchronizes before it releases a slot.
    """
    from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415 - imports torch

    torch: Any = import_module("torch")
    region = page_aligned(GPU_BYTES)
    region[:] = 1
    device = torch.empty(GPU_BYTES, dtype=torch.uint8, device="cuda")
    pageable = measures(gpu_points(region, device, sizes, " pageable"), limits, tick)
    lock = cuda_page_lock("on")
    assert lock is not None
    try:
        unlock = lock(int(region.__array_interface__["data"][0]), region.nbytes)
    except ConfigError:
        return LinkMeasures("gpu", pageable), False
    try:
        locked = measures(gpu_points(region, device, sizes, ""), limits, tick)
    finally:
        torch.cuda.synchronize()
        with suppress(RuntimeError):  # then it stays locked until the probe ends
            unlock()
    return LinkMeasures("gpu", locked + pageable), True


def gpu_points(region: Bytes, device: Any, sizes: tuple[int, ...], suffix: str) -> list[Point]:  # noqa: ANN401 - torch is optional
    """Return the operations that copy between `region` and a tensor on the device, in both directions."""
    torch: Any = import_module("torch")
    host: Any = torch.from_numpy(region)

    def point(op: str, source: Any, target: Any, size: int) -> Point:  # noqa: ANN401
        def copy(_worker: int, number: int) -> int:
            start = number % (len(region) // size) * size
            target[start : start + size].copy_(source[start : start + size], non_blocking=True)
            torch.cuda.synchronize()
            return size

        return f"{op}{suffix}", size, 1, copy

    ways = (("to_gpu", host, device), ("from_gpu", device, host))
    return [point(*way, size) for size in sizes if size <= len(region) for way in ways]


def measures(points: Iterable[Point], limits: MeasureLimits, tick: Tick) -> tuple[Measure, ...]:
    """Measure each of `points`. Leave out the points that moved nothing."""
    found: list[Measure] = []
    for op, size, depth, act in points:
        tick(op)
        taken = measure(act, op=op, size=size, depth=depth, limits=limits)
        found += [taken] if taken else []
    return tuple(found)


def measure(act: Act, *, op: str, size: int, depth: int, limits: MeasureLimits) -> Measure | None:
    """Time `act` with `depth` threads. Return None if no operation moved anything.

    Args:
        act: does one operation. Several threads call it, each with its own worker number.
        op: name of the operation.
        size: bytes of one operation, for the limit.
        depth: threads.
        limits: limits at which to stop.

    Raises:
        KvError: an operation did not return within `GRACE_S` after the end.
        Exception: any error of `act`.
    """
    count = max(limits.bytes // size, 1)
    took_s, spent = timed(act, count, depth, limits.seconds, f"{op} of {size} bytes")
    counted = [it for it in spent if it.moved]
    if not counted:
        return None
    p50_s, p99_s = np.quantile([it.seconds for it in counted], (0.5, 0.99), method="inverted_cdf")
    return Measure(
        op=op,
        bytes=size,
        depth=depth,
        gb_per_s=round(sum(it.moved for it in counted) / took_s / 1e9, 4),
        latency_us_p50=round(float(p50_s) * 1e6, 1),
        latency_us_p99=round(float(p99_s) * 1e6, 1),
        count=len(counted),
    )


def timed(act: Act, count: int, depth: int, limit_s: float, what: str) -> tuple[float, list[LinkOperation]]:
    """Run `count` operations in `depth` threads that start together. Return the total seconds and each operation.

    Args:
        act: does one operation. Several threads call it, each with its own worker number.
        count: number of operations. They are numbered from 0.
        depth: threads.
        limit_s: no operation starts later than this, except the first in each thread.
        what: name of the operations in the error message.

    Raises:
        KvError: an operation did not return within `GRACE_S` after the end.
        Exception: any error of `act`.
    """
    lock, gate, stopped = threading.Lock(), threading.Event(), threading.Event()
    started, until_s = 0, 0.0
    spent: list[list[LinkOperation]] = [[] for _ in range(depth)]
    ends: list[Future[None]] = [Future() for _ in range(depth)]

    def next_number() -> int | None:
        nonlocal started
        with lock:
            # Each thread does at least one operation, even on a slow link.
            is_late = started >= depth and time.perf_counter() > until_s
            if stopped.is_set() or is_late or started >= count:
                return None
            started += 1
            return started - 1

    def work(worker: int) -> None:
        try:
            gate.wait(GRACE_S)
            while (number := next_number()) is not None:
                start_s = time.perf_counter()
                moved = act(worker, number)
                spent[worker].append(LinkOperation(time.perf_counter() - start_s, moved, worker))
            ends[worker].set_result(None)
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            stopped.set()
            ends[worker].set_exception(error)

    threads = [threading.Thread(target=work, args=(n,), name=f"kvtier {what} {n}", daemon=True) for n in range(depth)]
    try:
        for thread in threads:
            thread.start()
        began_s = time.perf_counter()
        until_s = began_s + limit_s
        gate.set()
        wait(ends, limit_s + GRACE_S, FIRST_EXCEPTION)
        took_s = time.perf_counter() - began_s
    finally:
        stopped.set()
        gate.set()
        _join(threads)
    for end in ends:
        if not end.done():
            raise KvError(f"{what} did not return within {GRACE_S:g} s after the end of its measurement")
        end.result(0)
    return max(took_s, 1e-9), [it for worker in spent for it in worker]


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join(GRACE_S)
