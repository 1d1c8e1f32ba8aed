"""Store and cold load through the whole path, next to what the hardware allows in the same run.

    host        the engine's blocks to host slots and back, through core and mover    ceiling: a plain copy of memory
    directory   host slot to file (seal, write) and file to verified slot (read, open) ceiling: fio with direct I/O
    disk        host slot to segment and back, likewise

The tiers are full, as a cache's are: every store takes the place of victims, and fio writes over its files likewise.
With `fresh` all write new files instead, which measures the file system's allocation as well. A mix does both at the
same time, as an engine under load does; with several streams the objects of as many engines come interleaved.

A load counts only when every checksum has been verified, inside the timed part; afterwards a sample of slots is
compared with what was stored. The two sides of a ratio are measured in turn, A B A B, because machines drift. What
came from a cache instead of the device shows in `device_share`.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtier.bench.fio import Fio, Told, has_fio
from kvtier.bench.io_disk import SEGMENTS, Disk, Mix, Spent, latency, segment_bytes
from kvtier.bench.io_host import host_row
from kvtier.bench.io_row import Row, Sample, Tick
from kvtier.config.kinds import size_text
from kvtier.errors import ConfigError
from kvtier.tier.direct import can_direct

SIZES = (32 << 20, 4 << 20, 512 << 10, 64 << 10)
SIZE_LEAST, SIZE_MOST = 4096, 256 << 20
TIERS = ("directory", "disk")
QUICK_S = 120.0
"""Deadline of a run without options; what has begun by then ends within a minute on a drive of 40 MB/s."""
CEILING = "fio psync, direct=1, buffers in huge pages, as many jobs as threads"
BUFFERED = "fio psync, buffered (the file system has no direct I/O), as many jobs as threads"


@dataclass(frozen=True, slots=True)
class IoResult:
    """All rows, and what the ceiling of the disk was measured with."""

    results: tuple[Row, ...]
    ceiling: str
    bytes_per_sample: int
    repeats: int
    is_fresh: bool
    cut_after_s: float | None = None
    """Sizes and repeats that had not begun by then were left out; None: there was time for all."""


Keep = Callable[[IoResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What all rows of one run share."""

    root: Path
    tiers: Sequence[str]
    repeats: int
    is_fresh: bool
    mixes: Sequence[Mix]
    streams: int
    direct: bool
    tick: Tick
    until_s: float
    """Of the monotonic clock: no repeat but the first of a row begins later."""

    @property
    def ops(self) -> list[tuple[str, Mix | None]]:
        """Store, load, then every mix."""
        return [("store", None), ("load", None), *(("mix", mix) for mix in self.mixes)]


@dataclass(slots=True)
class _Series:
    """All repeats of one row."""

    samples: list[Sample] = field(default_factory=list[Sample])
    cpu: list[float] = field(default_factory=list[float])
    latencies_s: list[float] = field(default_factory=list[float])
    ceilings: list[Told] = field(default_factory=list[Told])
    device_bytes: int | None = 0
    direct_io: bool = False

    def add(self, spent: Spent, gigabytes: float, allowed: Told, plain: Told) -> None:
        self.samples.append((gigabytes / spent.seconds, allowed.gb_per_s, plain.gb_per_s))
        self.cpu.append(spent.cpu_s / gigabytes)
        self.latencies_s += spent.latencies_s
        self.ceilings.append(allowed)
        known = self.device_bytes is not None and spent.device_bytes is not None
        self.device_bytes = (self.device_bytes or 0) + (spent.device_bytes or 0) if known else None


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
    tick: Tick = lambda _what: None,
    keep: Keep = lambda _result: None,
    deadline_s: float | None = None,
) -> IoResult:
    """Measure every size.

    Args:
        directory: where the files go, on the drive in question; a temporary directory is made in it and removed.
        sizes: payload bytes of a chunk.
        tiers: which of `TIERS`, measured in turn beside the same ceiling.
        threads: thread counts to try; without `keep_all` only the best row of each tier, op and size is kept.
        repeats: pairs of samples behind each row.
        sample_bytes: bytes moved by one sample.
        keep_all: keep the rows of all thread counts.
        is_fresh: store to new files instead of into a full directory.
        mixes: per cent of reads of each mix of reads and writes that is measured besides.
        streams: engines whose objects are stored and loaded interleaved.
        tick: told before each pair of samples.
        keep: given what there is after each size, so that a run that is cut short was not for nothing.
        deadline_s: no size but the first, and no repeat but the first of a row, begins later; None: no deadline.

    Raises:
        ConfigError: fio is not installed or fails, the directory cannot be used, or a size is not allowed.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and without it there is no ceiling; allowed: install the package fio")
    for size in sizes:
        if not SIZE_LEAST <= size <= SIZE_MOST or size % SIZE_LEAST:
            raise ConfigError(f"--size {size}: allowed: multiples of 4 KiB up to {size_text(SIZE_MOST)}")
    rows: list[Row] = []
    result = IoResult((), CEILING, sample_bytes, repeats, is_fresh)
    until_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        it = _Run(
            root=Path(place),
            tiers=tiers,
            repeats=repeats,
            is_fresh=is_fresh,
            mixes=[Mix(percent) for percent in mixes],
            streams=streams,
            direct=can_direct(place),
            tick=tick,
            until_s=until_s,
        )
        _check_room(it, max(sample_bytes, 2 * max(sizes)), max(sizes))
        for size in sizes:
            if rows and time.monotonic() > until_s:
                break
            count = max(2, sample_bytes // size)
            rows += [host_row(op, size, count, repeats, tick) for op in ("store", "load")]
            found = [_disk_rows(it, size, count, n) for n in threads]
            for rows_of_op in zip(*found, strict=True):
                rows += rows_of_op if keep_all else [max(rows_of_op, key=lambda row: row.gb_per_s)]
            result = replace(result, results=tuple(rows), ceiling=CEILING if it.direct else BUFFERED)
            keep(result)
    return replace(result, cut_after_s=deadline_s) if time.monotonic() > until_s else result


def _check_room(it: _Run, sample_bytes: int, size: int) -> None:
    """Refuse before an hour is spent, not after."""
    needed = sample_bytes * (1 + 2 * len(it.tiers)) + SEGMENTS * segment_bytes(size)
    free = shutil.disk_usage(it.root).free
    if needed > free:
        raise ConfigError(
            f"{size_text(free)} are free in {str(it.root.parent)!r}, and samples of {size_text(sample_bytes)} need up "
            f"to {size_text(needed)}; allowed: a smaller --sample, one --tier, another --dir"
        )


def _disk_rows(it: _Run, size: int, count: int, threads: int) -> list[Row]:
    """The rows of store, load and every mix of each tier."""
    series = {(name, op, mix): _Series() for name in it.tiers for op, mix in it.ops}
    gigabytes = count * size / 1e9
    frame = 0
    ceiling: Fio | None = None
    disks: list[Disk] = []
    try:
        for repeat in range(it.repeats):
            if repeat and time.monotonic() > it.until_s:
                break
            it.tick(f"{', '.join(it.tiers)} {size} x{threads}")
            if ceiling is None or it.is_fresh:
                _remove(ceiling, disks)
                ceiling = Fio(it.root, block_bytes=size, threads=threads, total_bytes=count * size, is_direct=it.direct)
                widest = min(it.mixes, key=lambda mix: mix.read_percent, default=None)
                for name in it.tiers:
                    place = it.root / f"{name}-{size}-{threads}-{repeat}"
                    disks.append(Disk(name, place, size, count, threads, streams=it.streams, mix=widest))
                frame = disks[0].frame_bytes
                if not it.is_fresh:
                    _fill(ceiling, disks)
            for op, mix in it.ops:
                reads = None if mix is None else mix.read_percent
                plain = ceiling.measure(op, read_percent=reads, is_plain=True)
                if it.is_fresh and op == "store":
                    ceiling.close()  # the ceiling makes files of its own, as the tiers do
                allowed = ceiling.measure(op, read_percent=reads)
                for disk in disks:
                    one = series[disk.name, op, mix]
                    one.add(_sample(disk, op, mix), gigabytes, allowed, plain)
                    one.direct_io = disk.tier.direct_io
    finally:
        _remove(ceiling, disks)
    return [
        Row.of(
            name,
            op,
            size,
            samples=one.samples,
            cpu=one.cpu,
            threads=threads,
            mix=mix.text if mix else ("0/100" if op == "store" else "100/0"),
            direct_io=one.direct_io,
            streams=it.streams,
            latency_us=latency(one.latencies_s),
            ceiling_latency_us=Told.median([told.latency_us for told in one.ceilings]),
            device_share=_device_share(one, op, frame * len(one.latencies_s)),
        )
        for (name, op, mix), one in series.items()
    ]


def _device_share(series: _Series, op: str, loaded_bytes: int) -> float | None:
    if op == "store" or series.device_bytes is None or not loaded_bytes:
        return None
    return round(series.device_bytes / loaded_bytes, 3)


def _sample(disk: Disk, op: str, mix: Mix | None) -> Spent:
    if mix is not None:
        disk.store()  # what the last mix did not leave alone
        return disk.mixed(mix)
    return disk.store() if op == "store" else disk.load()


def _fill(ceiling: Fio, disks: list[Disk]) -> None:
    """Twice, so that what is kept empty has been written to as well."""
    ceiling.measure("store")
    for disk in disks:
        disk.store()
        disk.store()


def _remove(ceiling: Fio | None, disks: list[Disk]) -> None:
    if ceiling is not None:
        ceiling.close()
    while disks:
        disk = disks.pop()
        disk.close()
        shutil.rmtree(disk.tier.root)
