"""One figure of `kvtier bench io`, and what its parts share."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.types import ChunkKey

FINGERPRINT = bytes(32)
CHUNK_TOKENS = 256
DEADLINE_S = 120.0
LAYER_BYTES = 1 << 20
"""Bytes of a layer in a chunk that is large enough."""
GRAIN_BYTES = 16 * 256
"""A layer is a multiple of this: 16 blocks of at least 256 bytes."""

Tick = Callable[[str], None]
Sample = tuple[float, float, float]
"""(GB/s, ceiling GB/s, plain fio's GB/s)."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Microseconds of one operation, in the thread that does it."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. GB is 10^9 bytes."""

    tier: str
    op: str
    """``store``, ``load`` or ``mix``."""
    chunk_bytes: int
    gb_per_s: float
    ceiling_gb_per_s: float
    ratio: float
    """Median of the ratios of neighbouring samples."""
    plain_gb_per_s: float
    """What fio does as it comes, without huge pages; on the host rows the ceiling again."""
    cpu_s_per_gb: float
    threads: int
    mix: str
    """Share of reads / writes in per cent of bytes."""
    direct_io: bool
    samples: tuple[Sample, ...]
    """(GB/s, ceiling GB/s, plain fio's GB/s) of each repeat."""
    streams: int = 1
    """Engines whose objects were stored and loaded interleaved."""
    latency_us: Latency | None = None
    """Of one object: seal and write, or read and verify; all repeats together. In a mix that of the loads."""
    ceiling_latency_us: Latency | None = None
    """Of one request of fio; medians of the repeats."""
    device_share: float | None = None
    """Bytes that the kernel says came from the device while loading, over the bytes loaded; None: it does not tell."""

    @classmethod
    def of(
        cls,
        tier: str,
        op: str,
        size: int,
        *,
        samples: Sequence[Sample],
        cpu: Sequence[float],
        threads: int,
        mix: str,
        direct_io: bool,
        streams: int = 1,
        latency_us: Latency | None = None,
        ceiling_latency_us: Latency | None = None,
        device_share: float | None = None,
    ) -> "Row":
        """The medians of all repeats."""
        return cls(
            tier=tier,
            op=op,
            chunk_bytes=size,
            gb_per_s=round(statistics.median(ours for ours, _, _ in samples), 3),
            ceiling_gb_per_s=round(statistics.median(ceiling for _, ceiling, _ in samples), 3),
            ratio=round(statistics.median(ours / ceiling for ours, ceiling, _ in samples), 3),
            plain_gb_per_s=round(statistics.median(plain for _, _, plain in samples), 3),
            cpu_s_per_gb=round(statistics.median(cpu), 4),
            threads=threads,
            mix=mix,
            direct_io=direct_io,
            samples=tuple((round(ours, 3), round(ceiling, 3), round(plain, 3)) for ours, ceiling, plain in samples),
            streams=streams,
            latency_us=latency_us,
            ceiling_latency_us=ceiling_latency_us,
            device_share=device_share,
        )


def layout_of(size: int) -> KvLayout:
    """One group whose chunk has `size` bytes, in layers of about a MiB."""
    layers = next(n for n in range(max(1, size // LAYER_BYTES), 0, -1) if size % (n * GRAIN_BYTES) == 0)
    return KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (size // layers,) * layers, "bench"),))


def chunk_key(number: int) -> ChunkKey:
    """The key of the chunk with that number."""
    return ChunkKey(number.to_bytes(32, "big"))


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process)."""
    cpu, start = time.process_time(), time.perf_counter()
    act()
    return time.perf_counter() - start, time.process_time() - cpu
