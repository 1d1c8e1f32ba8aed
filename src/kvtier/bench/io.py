"""Store and cold load through the whole path, next to what the hardware allows in the same run.

    host        the engine's blocks to host slots and back, through core and mover    ceiling: a plain copy of memory
    directory   host slot to file (seal, write) and file to verified slot (read, open) ceiling: fio with direct I/O
    disk        host slot to segment and back, likewise

The tiers are full, as a cache's are: every store takes the place of victims, and fio writes over its files likewise.
With `fresh` all write new files instead, which measures the file system's allocation as well.

A load counts only when every checksum has been verified, inside the timed part; afterwards a sample of slots is
compared with what was stored. The two sides of a ratio are measured in turn, A B A B, because machines drift.
"""

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.bench.fio import Fio, has_fio
from kvtier.codec.frame import frame_bytes
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits
from kvtier.device.cpu import CpuCopier
from kvtier.errors import ConfigError, KvError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_admitter, make_evictor
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import Mover, Threads
from kvtier.runtime.session import LocalSession
from kvtier.tier.base import Tier
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.types import ChunkKey, Event, Hint, Link, LoadDone, Outcome, Place, Prefix, RequestId, StoreDone, Transfer

SIZES = (32 << 20, 4 << 20, 512 << 10)
TIERS = ("directory", "disk")
FINGERPRINT = bytes(32)
CHUNK_TOKENS = 256
BLOCKS = 16
"""Blocks of a chunk, as with vLLM's 16 tokens."""
DEADLINE_S = 120.0
CEILING = "fio psync, direct=1, buffers in huge pages, as many jobs as threads"

Tick = Callable[[str], None]
Sample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. GB is 10^9 bytes."""

    tier: str
    op: str
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


@dataclass(frozen=True, slots=True)
class IoResult:
    """All rows, and what the ceiling of the disk was measured with."""

    results: tuple[Row, ...]
    ceiling: str
    bytes_per_sample: int
    repeats: int
    is_fresh: bool


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
    tick: Tick = lambda _what: None,
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
        tick: told before each pair of samples.

    Raises:
        ConfigError: fio is not installed or fails, or the directory cannot be used.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and without it there is no ceiling; allowed: install the package fio")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        root = Path(place)
        for size in sizes:
            count = max(2, sample_bytes // size)
            for op in ("store", "load"):
                rows += _best([_host_row(op, size, count, repeats, tick)], keep_all=True)
            found = [
                _disk_rows(root, size, count, n, tiers=tiers, repeats=repeats, is_fresh=is_fresh, tick=tick)
                for n in threads
            ]
            for rows_of_op in zip(*found, strict=True):
                rows += _best(list(rows_of_op), keep_all=keep_all)
    return IoResult(tuple(rows), CEILING, sample_bytes, repeats, is_fresh)


def _best(rows: list[Row], *, keep_all: bool) -> list[Row]:
    return rows if keep_all else [max(rows, key=lambda row: row.gb_per_s)]


def _layout(size: int) -> KvLayout:
    layers = max(1, size >> 20)
    return KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (size // layers,) * layers, "bench"),))


# ---- host: engine blocks <-> slots, through core and mover -----------------------------------------------------------


def _host_row(op: str, size: int, count: int, repeats: int, tick: Tick) -> Row:
    threads = 2
    layout = _layout(size)
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
    return _row("host", op, size, samples=samples, cpu=cpu, threads=threads, direct_io=False)


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
        evictor=lambda: make_evictor("lru"),
        admitter=make_admitter("all"),
        limits=Limits(waiting_chunks=count),
    )
    session = LocalSession(cache, mover)
    try:
        prefix = Prefix(tuple(ChunkKey(_key(number)) for number in range(count)), CHUNK_TOKENS)
        places = [Place(0, n, tuple(range(n * BLOCKS, (n + 1) * BLOCKS))) for n in range(count)]
        stored = _timed(lambda: _session_store(session, prefix, places))
        if op == "store":
            return stored
        wanted = [blocks.copy() for blocks in engine]
        for blocks in engine:
            blocks[:] = 0
        loaded = _timed(lambda: _session_load(session, prefix, places))
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


# ---- directory and disk: slot <-> file, through the mover -----------------------------------------------------------


def _open_tier(name: str, root: Path, frame: int, count: int) -> DirectoryTier | DiskTier:
    """A tier that `count` frames fill."""
    if name == "directory":
        return DirectoryTier(root, capacity_bytes=count * frame)
    # Whole segments are given up, and one is kept empty: room for two more keeps what the last round wrote.
    segment = max(64 << 20, 8 * frame)
    return DiskTier(root, capacity_bytes=count * frame + 3 * segment, segment_bytes=segment)


class _Disk:
    """A tier of `count` objects and a mover, without core and engine."""

    def __init__(self, name: str, root: Path, size: int, count: int, threads: int) -> None:
        self.name = name
        self.layout = _layout(size)
        self.count = count
        self.slots = 4 * threads
        self.round = 0
        frame = frame_bytes(self.layout.groups[0])
        self.tier = _open_tier(name, root, frame, count + threads)
        self.arena = Arena(self.layout, (self.slots,), populate=True)
        for slot in range(self.slots):
            payload = np.frombuffer(self.arena.payload(0, slot), np.uint8)
            payload[:] = np.random.default_rng(slot).integers(0, 256, len(payload), np.uint8)
        self.origin: list[int] = []
        layers = self.layout.groups[0].layer_bytes
        tiers: dict[str, Tier] = {name: self.tier}
        self.mover = Mover(
            layout=self.layout,
            rank=0,
            fingerprint=FINGERPRINT,
            arena=self.arena,
            copier=CpuCopier(self.layout, [[np.zeros((1, layer), np.uint8) for layer in layers]]),
            tiers=tiers,
            threads=Threads(read=threads, write=threads),
        )

    def store(self) -> tuple[float, float]:
        """Store `count` new objects; (seconds, CPU seconds)."""
        self.round += 1
        self.origin.clear()
        return _timed(lambda: self.origin.extend(self._move(Link.DEMOTE)))

    def load(self) -> tuple[float, float]:
        """Load the objects of the last store; (seconds, CPU seconds). The slots' bytes are checked afterwards."""
        samples = [bytes(self.arena.payload(0, slot)[:4096]) for slot in range(self.slots)]
        target: list[int] = []
        times = _timed(lambda: target.extend(self._move(Link.PROMOTE)))
        last = {slot: number for number, slot in enumerate(target)}
        if any(bytes(self.arena.payload(0, slot)[:4096]) != samples[self.origin[n]] for slot, n in last.items()):
            raise KvError("the benchmark read back other bytes than it stored")
        # The slots hold other objects now: give each its own bytes again for the next store.
        for slot, sample in enumerate(samples):
            self.arena.payload(0, slot)[:4096] = sample
        return times

    def close(self) -> None:
        self.mover.close(10.0)
        self.arena.close()
        self.tier.close()

    def _move(self, link: Link) -> list[int]:
        """Move `count` objects, one per slot at a time, and require each to be DONE; returns the slot of each."""
        free = list(range(self.slots))
        used: list[int] = []
        until = time.monotonic() + DEADLINE_S
        while len(used) < self.count or len(free) < self.slots:
            while free and len(used) < self.count:
                slot = free.pop()
                self.mover.submit(self._transfer(len(used), link, slot))
                used.append(slot)
            for settled in self.mover.take(1.0):
                if settled.outcome is not Outcome.DONE:
                    raise KvError(f"the benchmark's {link.value} failed: {settled.detail}")
                command = settled.command
                assert isinstance(command, Transfer)
                free.append(command.slot)
            if time.monotonic() > until:
                raise KvError(f"the benchmark's {link.value}s took longer than {DEADLINE_S:g} s")
        return used

    def _transfer(self, number: int, link: Link, slot: int) -> Transfer:
        deadline_s = time.monotonic() + DEADLINE_S
        key = ChunkKey(_key(self.round * self.count + number))
        return Transfer(number, link, key, 0, slot, self.name, None, (), None, number, deadline_s, Hint())


def _disk_rows(
    root: Path,
    size: int,
    count: int,
    threads: int,
    *,
    tiers: Sequence[str],
    repeats: int,
    is_fresh: bool,
    tick: Tick,
) -> list[Row]:
    """The rows of store and load of each tier."""
    pairs = [(name, op) for name in tiers for op in ("store", "load")]
    samples: dict[tuple[str, str], list[Sample]] = {pair: [] for pair in pairs}
    cpu: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    gigabytes = count * size / 1e9
    direct_io: dict[str, bool] = {}
    ceiling: Fio | None = None
    disks: list[_Disk] = []
    try:
        for repeat in range(repeats):
            tick(f"{', '.join(tiers)} {size} x{threads}")
            if ceiling is None or is_fresh:
                _remove(ceiling, disks)
                ceiling = Fio(root, block_bytes=size, threads=threads, total_bytes=count * size)
                places = {name: root / f"{name}-{size}-{threads}-{repeat}" for name in tiers}
                disks += [_Disk(name, place, size, count, threads) for name, place in places.items()]
                if not is_fresh:
                    _fill(ceiling, disks)
            for op in ("store", "load"):
                plain = ceiling.measure(op, is_plain=True)
                allowed = ceiling.measure(op)
                for disk in disks:
                    seconds, cpu_s = disk.store() if op == "store" else disk.load()
                    samples[disk.name, op].append((gigabytes / seconds, allowed, plain))
                    cpu[disk.name, op].append(cpu_s / gigabytes)
                    direct_io[disk.name] = disk.tier.direct_io
    finally:
        _remove(ceiling, disks)
    return [
        _row(name, op, size, samples=samples[name, op], cpu=cpu[name, op], threads=threads, direct_io=direct_io[name])
        for name, op in pairs
    ]


def _fill(ceiling: Fio, disks: list[_Disk]) -> None:
    """Twice, so that what is kept empty has been written to as well."""
    ceiling.measure("store")
    for disk in disks:
        disk.store()
        disk.store()


def _remove(ceiling: Fio | None, disks: list[_Disk]) -> None:
    if ceiling is not None:
        ceiling.close()
    while disks:
        disk = disks.pop()
        disk.close()
        shutil.rmtree(disk.tier.root)


# ---- small things ----------------------------------------------------------------------------------------------------


def _timed(act: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process)."""
    cpu, start = time.process_time(), time.perf_counter()
    act()
    return time.perf_counter() - start, time.process_time() - cpu


def _row(
    tier: str,
    op: str,
    size: int,
    *,
    samples: list[Sample],
    cpu: list[float],
    threads: int,
    direct_io: bool,
) -> Row:
    return Row(
        tier=tier,
        op=op,
        chunk_bytes=size,
        gb_per_s=round(statistics.median(ours for ours, _, _ in samples), 3),
        ceiling_gb_per_s=round(statistics.median(ceiling for _, ceiling, _ in samples), 3),
        ratio=round(statistics.median(ours / ceiling for ours, ceiling, _ in samples), 3),
        plain_gb_per_s=round(statistics.median(plain for _, _, plain in samples), 3),
        cpu_s_per_gb=round(statistics.median(cpu), 4),
        threads=threads,
        mix="0/100" if op == "store" else "100/0",
        direct_io=direct_io,
        samples=tuple((round(ours, 3), round(ceiling, 3), round(plain, 3)) for ours, ceiling, plain in samples),
    )


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")
