"""Measures stores and cold loads through the whole path, and the hardware's limit in the same run.

    host        engine blocks to host slots and back, through core and mover     ceiling: a plain copy of memory
    directory   host slot to file (pack, write), and back (read, unpack)         ceiling: fio with direct I/O
    disk        host slot to segment and back, likewise

The tiers are full, as they are in production: every store replaces victims, and fio overwrites its files. With
`is_fresh` both write new files, which also measures the file system's allocation. A mix stores and loads at the same
time, like an engine under load. Several streams interleave the objects of several engines.

The timed part of a load verifies every checksum. Afterwards the slots are compared with the stored bytes. The two sides
of a ratio alternate, A B A B, because a machine's speed drifts. `device_share` shows whether a cache served reads.

fio runs in the same directory, with the same sizes and threads. The ceiling is fio with huge pages for its buffers,
because kvtier's arena has them too. Plain fio, without huge pages, is measured as well. On a virtual disk it is up to 3
times slower, because each of its requests is a list of thousands of small pages. That would be too low a ceiling.
"""

import json
import math
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.config import tier_list
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.tier import registry
from kvtier.tier.files.direct import can_direct
from kvtier.tools.bench.io_harness import FullTier, IoSample, engine_blocks, host_sample, memcpy, trial_settings
from kvtier.tools.bench.repeats import Advance, Span, ratio, repeated
from kvtier.tools.machine_facts import read_facts
from kvtier.tools.probe.run import busy_warnings

DEADLINE_S = 300.0

HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""Makes malloc request transparent huge pages. Versions of glibc before 2.35 ignore it."""


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


@dataclass(frozen=True, slots=True)
class IoLatency:
    """Percentiles of an operation's latency in microseconds."""

    p50: float
    p95: float
    p99: float


class FioResult(NamedTuple):
    """One run of fio."""

    gb_per_s: float
    """10^9 bytes per second, in both directions together."""
    latency_us: IoLatency
    """Latency of one request. In a mix, only reads count."""


class Fio:
    """Runs fio on files in `directory`, which are created once and then overwritten and read, like a full store.

    Args:
        directory: directory of the files, which `close` removes.
        block_bytes: size of one request.
        threads: number of jobs. Each has its own file and one request at a time.
        total_bytes: bytes that all jobs move in one measurement, rounded up to whole blocks.
        is_direct: use direct I/O; otherwise use the page cache, which is invalidated before each run.
    """

    def __init__(
        self, directory: Path, *, block_bytes: int, threads: int, total_bytes: int, is_direct: bool = True
    ) -> None:
        blocks = -(-total_bytes // (block_bytes * threads))
        self._directory = directory
        self._common = [
            "fio",
            "--name=fio",
            f"--directory={directory}",
            f"--direct={int(is_direct)}",
            "--invalidate=1",
            "--ioengine=psync",
            "--thread",
            f"--bs={block_bytes}",
            f"--size={block_bytes * blocks}",
            f"--numjobs={threads}",
            "--iomem_align=2M",
            "--group_reporting",
            "--output-format=json",
        ]

    def measure(self, op: str, *, read_percent: int | None = None, is_plain: bool = False) -> FioResult:
        """Run a ``"store"`` (writes; the first call creates the files), a ``"load"`` or a mix.

        Args:
            op: the operation.
            read_percent: percentage of reads in a mix.
            is_plain: run without huge pages.

        Raises:
            ConfigError: fio failed; the message has its output.
        """
        pattern = "write" if op == "store" else "randread"
        if read_percent is not None:
            pattern = f"randrw --rwmixread={read_percent}"
        command = [*self._common, *f"--rw={pattern}".split()]
        job = _run(command if is_plain else ["env", HUGE_PAGES, *command])["jobs"][0]
        sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
        runtime_s = max(max(side["runtime"] for side in sides) / 1e3, 1e-3)
        rate = sides[0]["bw_bytes"] if len(sides) == 1 else sum(side["io_bytes"] for side in sides) / runtime_s
        percentiles = sides[0]["clat_ns"]["percentile"]
        latency_us = IoLatency(*(round(percentiles[f"{percent}.000000"] / 1e3, 1) for percent in (50, 95, 99)))
        return FioResult(rate / 1e9, latency_us)

    def close(self) -> None:
        """Remove the files."""
        for file in self._directory.glob("fio.*"):
            file.unlink()


def _run(command: list[str]) -> Any:  # noqa: ANN401 - JSON
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"fio took longer than {DEADLINE_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"fio failed: {' '.join((done.stderr or done.stdout).split())[:300]}")
    return json.loads(done.stdout)


SIZES = (32 << 20, 4 << 20, 512 << 10, 64 << 10)
SIZE_LEAST, SIZE_MOST = 4096, 256 << 20
TIERS = tuple(kind for kind in registry.names() if registry.measures_directories(kind))
SPARE_BYTES = 192 << 20
"""Bytes that a tier of any kind may take in addition to its objects."""
HOST_THREADS = 2
QUICK_S = 120.0
"""The default deadline. On a drive of 40 MB/s the last repeat ends at most a minute later."""
CEILING = "fio psync, direct=1, buffers in huge pages, as many jobs as threads"
BUFFERED = "fio psync, buffered (the file system has no direct I/O), as many jobs as threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRow:
    """One measurement. A GB is 10^9 bytes."""

    tier: str
    op: str
    """``store``, ``load`` or ``mix``."""
    chunk_bytes: int
    gb_per_s: float
    ceiling_gb_per_s: float
    ratio: float
    """`gb_per_s` divided by the ceiling."""
    ratio_span: Span
    plain_gb_per_s: float
    """The rate of fio without huge pages. Host rows repeat the ceiling here."""
    cpu_s_per_gb: float
    threads: int
    mix: str
    """Reads/writes, as percentages of the bytes."""
    direct_io: bool
    samples: tuple[tuple[float, float, float], ...]
    """GB/s of the measured side, the ceiling and plain fio, for each repeat."""
    streams: int = 1
    """Number of engines whose objects were interleaved."""
    latency_us: IoLatency | None = None
    """Latency of one object over all repeats: pack and write, or read and verify. In a mix, only loads count."""
    ceiling_latency_us: IoLatency | None = None
    """Latency of one request of fio, as medians over the repeats."""
    device_share: float | None = None
    """Bytes read from the device, divided by bytes loaded; None if the kernel does not report them."""


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
    """Return a row with the medians of all repeats.

    Args:
        pairs: the repeats.
        tier: name of the tier.
        op: the operation.
        size: payload bytes of a chunk.
        count: chunks that one repeat moved.
        threads: thread count of the tier.
        reads: percentage of reads in a mix.
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
    """All rows and the conditions of the measurement."""

    results: tuple[IoRow, ...]
    ceiling: str
    bytes_per_sample: int
    repeats: int
    is_fresh: bool
    cut_after_s: float | None = None
    """The deadline, if sizes or repeats were left out because of it."""
    warnings: tuple[str, ...] = ()
    """Reasons to doubt all figures, such as a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _IoRun:
    """Settings that all rows of a run share."""

    root: Path
    tiers: Mapping[str, str]
    """What the user gave for each tier, its kind or its URL, by the tier's name."""
    repeats: int
    is_fresh: bool
    mixes: Sequence[int]
    streams: int
    direct: bool
    advance: Advance
    until_s: float
    """Monotonic time after which a row runs only its first repeat."""


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
    """Measure stores, loads and mixes at every size.

    Args:
        directory: a directory on the drive to measure; all files go to a temporary directory in it.
        sizes: payload bytes of a chunk.
        tiers: tiers to measure in turn against the same ceiling, each as `trial_settings` takes it.
        threads: thread counts. Without `keep_all`, only the fastest row of each tier, op and size is kept.
        repeats: pairs of samples per row.
        sample_bytes: bytes that one sample moves.
        keep_all: keep the rows of all thread counts.
        is_fresh: store to new files instead of into a full tier.
        mixes: percentage of reads in each additional mix of reads and writes.
        streams: engines whose objects are interleaved.
        advance: called with 1 after each repeat of a row.
        keep: called with the result after each size.
        deadline_s: after this time no further size starts, and a row runs only its first repeat. None: no deadline.

    Raises:
        ConfigError: fio is not installed or fails, the directory cannot be used, or a size is not allowed.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and its rate is the ceiling; install the package fio")
    named = [trial_settings(word, Path()).name for word in tiers]
    tier_list.refuse_equal_names(named, "--tier")
    for size in sizes:
        if not SIZE_LEAST <= size <= SIZE_MOST or size % SIZE_LEAST:
            raise ConfigError(f"--size {size}: a size must be a multiple of 4 KiB, and at most {size_text(SIZE_MOST)}")
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
    """Store `count` chunks of `size` bytes to host memory, or load them from it, `repeats` times."""
    engine = engine_blocks(size, count)
    twin = [np.zeros_like(blocks) for blocks in engine]

    def once(_number: int) -> dict[str, IoPair]:
        ceiling = memcpy(engine, twin, HOST_THREADS)
        return {op: IoPair(host_sample(op, size, count, engine, HOST_THREADS), ceiling, ceiling)}

    pairs = repeated(once, repeats, advance=advance)[op]
    return io_row(pairs, "host", op, size, count, HOST_THREADS)


def _check_room(it: _IoRun, sample_bytes: int, size: int) -> None:
    """Fail before the first sample if the files do not fit on the drive."""
    needed = sample_bytes * (1 + 2 * len(it.tiers)) + max(SPARE_BYTES, 6 * size)
    free = shutil.disk_usage(it.root).free
    if needed > free:
        raise ConfigError(
            f"{size_text(free)} is free in {str(it.root.parent)!r}, but samples of {size_text(sample_bytes)} need up "
            f"to {size_text(needed)}; use a smaller --sample, one --tier or another --dir"
        )


def _tier_rows(it: _IoRun, size: int, count: int, threads: int) -> list[IoRow]:
    """Measure store, load and every mix on each tier."""
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
                ceiling.close()  # fio creates new files as well
            allowed = ceiling.measure(op, read_percent=reads)
            for place, tier in enumerate(tiers):
                pairs[place, op, reads] = IoPair(
                    _sample(tier, op, reads), allowed.gb_per_s, plain.gb_per_s, allowed.latency_us
                )
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
    """Fill fio's files and the tiers. Tiers are filled twice, so that spare segments have been written as well."""
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
