"""Store and cold load through the whole path, next to the hardware's limit in the same run.

    host        engine blocks to host slots and back, through core and mover     ceiling: a plain copy of memory
    directory   host slot to file (seal, write), file to host slot (read, open)  ceiling: fio with direct I/O
    disk        host slot to segment and back, likewise

The tiers are full, as in use: every store replaces victims, and fio overwrites its files. With `is_fresh` both write
new files, which also measures the file system's allocation. A mix stores and loads at the same time, like an engine
under load; with several streams the objects of as many engines are interleaved.

Every checksum is verified inside the timed part of a load; afterwards the slots are compared with what was stored. The
two sides of a ratio alternate, A B A B, because machines drift. `device_share` shows reads that a cache served.
"""

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.bench.fio import Fio, IoLatency, has_fio
from kvtier.bench.io_workloads import FullTier, IoSample, engine_blocks, host_sample, memcpy, trial_settings
from kvtier.bench.ratio import Span, ratio
from kvtier.bench.repeats import Advance, repeated
from kvtier.config import tier_list
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.probe.facts import read_facts
from kvtier.probe.warnings import busy_warnings
from kvtier.tier import registry
from kvtier.tier.direct import can_direct

SIZES = (32 << 20, 4 << 20, 512 << 10, 64 << 10)
SIZE_LEAST, SIZE_MOST = 4096, 256 << 20
TIERS = tuple(kind for kind in registry.names() if registry.measures_directories(kind))
SPARE_BYTES = 192 << 20
"""Bytes that a kind may hold beyond its objects."""
HOST_THREADS = 2
QUICK_S = 120.0
"""Deadline without options; on a drive of 40 MB/s the last repeat ends within another minute."""
CEILING = "fio psync, direct=1, buffers in huge pages, as many jobs as threads"
BUFFERED = "fio psync, buffered (the file system has no direct I/O), as many jobs as threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRow:
    """One measurement. GB is 10^9 bytes."""

    tier: str
    op: str
    """``store``, ``load`` or ``mix``."""
    chunk_bytes: int
    gb_per_s: float
    ceiling_gb_per_s: float
    ratio: float
    """Of the two before."""
    ratio_span: Span
    plain_gb_per_s: float
    """fio without huge pages; on host rows the ceiling again."""
    cpu_s_per_gb: float
    threads: int
    mix: str
    """Reads/writes in per cent of bytes."""
    direct_io: bool
    samples: tuple[tuple[float, float, float], ...]
    """GB/s, ceiling GB/s and plain fio's GB/s of each repeat."""
    streams: int = 1
    """Engines whose objects were interleaved."""
    latency_us: IoLatency | None = None
    """Latency of one object: seal and write, or read and verify; in a mix, of loads. All repeats together."""
    ceiling_latency_us: IoLatency | None = None
    """Latency of one request of fio; medians of the repeats."""
    device_share: float | None = None
    """Bytes read from the device over bytes loaded; None if the kernel does not report it."""


class IoPair(NamedTuple):
    """One repeat of a row: the measured side and the ceiling."""

    ours: IoSample
    ceiling_gb_per_s: float
    plain_gb_per_s: float
    ceiling_latency_us: IoLatency | None = None


def io_row(
    pairs: Sequence[IoPair],
    tier: str,
    op: str,
    size: int,
    count: int,
    threads: int,
    *,
    reads: int | None = None,
    streams: int = 1,
    frame: int = 0,
    direct_io: bool = False,
) -> IoRow:
    """The medians of all repeats.

    Args:
        pairs: the repeats.
        tier: name of the tier.
        op: the operation.
        size: payload bytes of a chunk.
        count: chunks that one repeat moved.
        threads: of the tier.
        reads: per cent of reads of a mix.
        streams: engines whose objects were interleaved.
        frame: bytes of an object in the tier.
        direct_io: whether the tier bypassed the page cache.
    """
    gigabytes = count * size / 1e9
    samples = [(gigabytes / it.ours.seconds, it.ceiling_gb_per_s, it.plain_gb_per_s) for it in pairs]
    ours, ceiling, plain = zip(*samples, strict=True)
    latencies_s = [seconds for it in pairs for seconds in it.ours.latencies_s]
    device = [it.ours.device_bytes for it in pairs if it.ours.device_bytes is not None]
    has_share = op != "store" and latencies_s and len(device) == len(pairs)
    share = reads if reads is not None else 0 if op == "store" else 100
    found = ratio(ours, ceiling)
    limits = [it.ceiling_latency_us for it in pairs if it.ceiling_latency_us is not None]
    return IoRow(
        tier=tier,
        op=op,
        chunk_bytes=size,
        gb_per_s=round(statistics.median(ours), 3),
        ceiling_gb_per_s=round(statistics.median(ceiling), 3),
        ratio=found.value,
        ratio_span=found.span,
        plain_gb_per_s=round(statistics.median(plain), 3),
        cpu_s_per_gb=round(statistics.median(it.ours.cpu_s for it in pairs) / gigabytes, 4),
        threads=threads,
        mix=f"{share}/{100 - share}",
        direct_io=direct_io,
        samples=tuple((round(ours, 3), round(top, 3), round(plain, 3)) for ours, top, plain in samples),
        streams=streams,
        latency_us=_percentiles(latencies_s) if latencies_s else None,
        ceiling_latency_us=_medians(limits) if limits else None,
        device_share=round(sum(device) / (frame * len(latencies_s)), 3) if has_share else None,
    )


@dataclass(frozen=True, slots=True)
class IoResult:
    """All rows and their conditions."""

    results: tuple[IoRow, ...]
    ceiling: str
    bytes_per_sample: int
    repeats: int
    is_fresh: bool
    cut_after_s: float | None = None
    """The deadline, if sizes or repeats were left out because of it."""
    warnings: tuple[str, ...] = ()
    """What makes all figures doubtful, such as a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _IoRun:
    """Settings that all rows of a run share."""

    root: Path
    tiers: Mapping[str, str]
    """Kind or tier as it was given, by name."""
    repeats: int
    is_fresh: bool
    mixes: Sequence[int]
    streams: int
    direct: bool
    advance: Advance
    until_s: float
    """Monotonic time after which only the first repeat of a row begins."""


def run(
    directory: Path | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    threads: Sequence[int] = (1, 2, 4),
    tiers: Sequence[str] = TIERS,
    repeats: int = 5,
    sample_bytes: int = 1 << 30,
    keep_all: bool = False,
    is_fresh: bool = False,
    mixes: Sequence[int] = (),
    streams: int = 1,
    advance: Advance = lambda _steps: None,
    keep: Callable[[IoResult], None] = lambda _result: None,
    deadline_s: float | None = None,
) -> IoResult:
    """Measure every size.

    Args:
        directory: on the drive in question; all files go to a temporary directory in it.
        sizes: payload bytes of a chunk.
        tiers: kinds or tiers (`trial_settings`), measured in turn, with the same ceiling.
        threads: thread counts; without `keep_all` only the fastest row of each tier, op and size is kept.
        repeats: pairs of samples per row.
        sample_bytes: bytes moved by one sample.
        keep_all: keep the rows of all thread counts.
        is_fresh: store to new files instead of into a full tier.
        mixes: per cent of reads of each additional mix of reads and writes.
        streams: engines whose objects are interleaved.
        advance: called with 1 after each repeat of a row.
        keep: called with the result after each size.
        deadline_s: after it no further size begins, and only the first repeat of a row; None: no deadline.

    Raises:
        ConfigError: fio is not installed or fails, the directory cannot be used, or a size is not allowed.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and its rate is the ceiling; allowed: install the package fio")
    named = [trial_settings(word, Path()).name for word in tiers]
    tier_list.refuse_equal_names(named, "--tier")
    for size in sizes:
        if not SIZE_LEAST <= size <= SIZE_MOST or size % SIZE_LEAST:
            raise ConfigError(f"--size {size}: allowed: multiples of 4 KiB up to {size_text(SIZE_MOST)}")
    rows: list[IoRow] = []
    result = IoResult((), CEILING, sample_bytes, repeats, is_fresh, warnings=tuple(busy_warnings(read_facts())))
    until_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        it = _IoRun(
            root=Path(place),
            tiers=dict(zip(named, tiers, strict=True)),
            repeats=repeats,
            is_fresh=is_fresh,
            mixes=mixes,
            streams=streams,
            direct=can_direct(place),
            advance=advance,
            until_s=until_s,
        )
        _check_room(it, max(sample_bytes, 2 * max(sizes)), max(sizes))
        for size in sizes:
            if rows and time.monotonic() > until_s:
                break
            count = max(2, sample_bytes // size)
            rows += [host_row(op, size, count, repeats, advance) for op in ("store", "load")]
            by_threads = [_tier_rows(it, size, count, n) for n in threads]
            for alternatives in zip(*by_threads, strict=True):
                rows += alternatives if keep_all else [max(alternatives, key=lambda row: row.gb_per_s)]
            result = replace(result, results=tuple(rows), ceiling=CEILING if it.direct else BUFFERED)
            keep(result)
    return replace(result, cut_after_s=deadline_s) if time.monotonic() > until_s else result


def host_row(op: str, size: int, count: int, repeats: int, advance: Advance) -> IoRow:
    """`count` chunks of `size` bytes, stored to host memory or loaded from it, `repeats` times."""
    engine = engine_blocks(size, count)
    twin = [np.zeros_like(blocks) for blocks in engine]

    def once(_number: int) -> dict[str, IoPair]:
        ceiling = memcpy(engine, twin, HOST_THREADS)
        return {op: IoPair(host_sample(op, size, count, engine, HOST_THREADS), ceiling, ceiling)}

    pairs = repeated(once, repeats, advance=advance)[op]
    return io_row(pairs, "host", op, size, count, HOST_THREADS)


def _check_room(it: _IoRun, sample_bytes: int, size: int) -> None:
    """Fail before the first sample if the files will not fit."""
    needed = sample_bytes * (1 + 2 * len(it.tiers)) + max(SPARE_BYTES, 6 * size)
    free = shutil.disk_usage(it.root).free
    if needed > free:
        raise ConfigError(
            f"{size_text(free)} are free in {str(it.root.parent)!r}, and samples of {size_text(sample_bytes)} need up "
            f"to {size_text(needed)}; allowed: a smaller --sample, one --tier, another --dir"
        )


def _tier_rows(it: _IoRun, size: int, count: int, threads: int) -> list[IoRow]:
    """The rows of store, load and every mix of each tier."""
    ops: list[tuple[str, int | None]] = [("store", None), ("load", None), *(("mix", reads) for reads in it.mixes)]
    ceiling: Fio | None = None
    tiers: list[FullTier] = []

    def once(number: int) -> dict[tuple[int, str, int | None], IoPair]:
        nonlocal ceiling
        if ceiling is None or it.is_fresh:
            _remove(ceiling, tiers)
            ceiling = Fio(it.root, block_bytes=size, threads=threads, total_bytes=count * size, is_direct=it.direct)
            for name, word in it.tiers.items():
                place, least = it.root / f"{name}-{size}-{threads}-{number}", min(it.mixes, default=100)
                tiers.append(FullTier(word, place, size, count, threads, streams=it.streams, read_percent=least))
            if not it.is_fresh:
                _fill(ceiling, tiers)
        pairs: dict[tuple[int, str, int | None], IoPair] = {}
        for op, reads in ops:
            plain = ceiling.measure(op, read_percent=reads, is_plain=True)
            if it.is_fresh and op == "store":
                ceiling.close()  # fio creates new files too
            allowed = ceiling.measure(op, read_percent=reads)
            for place, tier in enumerate(tiers):
                ours = _sample(tier, op, reads)
                pairs[place, op, reads] = IoPair(ours, allowed.gb_per_s, plain.gb_per_s, allowed.latency_us)
        return pairs

    try:
        found = repeated(once, it.repeats, until_s=it.until_s, advance=it.advance)
        return [
            io_row(
                found[place, op, reads],
                tier.name,
                op,
                size,
                count,
                threads,
                reads=reads,
                streams=it.streams,
                frame=tier.frame_bytes,
                direct_io=tier.direct_io,
            )
            for place, tier in enumerate(tiers)
            for op, reads in ops
        ]
    finally:
        _remove(ceiling, tiers)


def _sample(tier: FullTier, op: str, reads: int | None) -> IoSample:
    if reads is not None:
        tier.store()  # replaces what the last mix evicted
        return tier.mix(reads)
    return tier.store() if op == "store" else tier.load()


def _fill(ceiling: Fio, tiers: list[FullTier]) -> None:
    """Store twice, so that spare segments have been written to as well."""
    ceiling.measure("store")
    for tier in tiers:
        tier.store()
        tier.store()


def _remove(ceiling: Fio | None, tiers: list[FullTier]) -> None:
    if ceiling is not None:
        ceiling.close()
    while tiers:
        tier = tiers.pop()
        tier.close()
        shutil.rmtree(tier.root)


def _percentiles(seconds: Sequence[float]) -> IoLatency:
    return IoLatency(*(round(float(it) * 1e6, 1) for it in np.percentile(seconds, (50, 95, 99))))


def _medians(latencies: Sequence[IoLatency]) -> IoLatency:
    return IoLatency(
        *(round(statistics.median(getattr(it, name) for it in latencies), 1) for name in ("p50", "p95", "p99"))
    )
