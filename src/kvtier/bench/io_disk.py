"""A tier of so many objects and a mover, without core and engine: host slot to tier, and tier to verified slot."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.bench.io_row import DEADLINE_S, FINGERPRINT, Latency, chunk_key, layout_of
from kvtier.codec.frame import frame_bytes
from kvtier.config.sections import LimitsConfig
from kvtier.device.cpu import CpuCopier
from kvtier.errors import KvError
from kvtier.layout import align_up
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import Mover, Threads
from kvtier.tier.base import Tier
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.types import Hint, Link, Outcome, Transfer

SAMPLE_BYTES = 4096
"""Of each slot, compared after the timed part; within it every checksum is verified."""
SEGMENTS = 3
"""Whole segments are given up, and one is kept empty: room for two more keeps what the last round wrote."""
PROC_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class Mix:
    """Reads and writes at the same time."""

    read_percent: int

    @property
    def text(self) -> str:
        """``reads/writes``."""
        return f"{self.read_percent}/{100 - self.read_percent}"


@dataclass(slots=True)
class Spent:
    """What one sample took."""

    seconds: float
    cpu_s: float
    latencies_s: list[float] = field(default_factory=list[float])
    device_bytes: int | None = None
    """That the kernel read from a device for us."""


class Disk:
    """A full tier.

    Args:
        name: ``directory`` or ``disk``.
        root: where its store is made.
        size: payload bytes of an object.
        count: objects of one store or load.
        threads: that read, and that write.
        streams: engines whose objects come interleaved, each in its own order.
        mix: the mix that will be asked for, if any: its stores need room beside the objects that are loaded.
        seed: draws the order in which streams take turns.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        size: int,
        count: int,
        threads: int,
        *,
        streams: int = 1,
        mix: Mix | None = None,
        seed: int = 1,
    ) -> None:
        self.name = name
        self.layout = layout_of(size)
        self.count = count
        self._in_flight = in_flight(size, threads)
        self.slots = self._in_flight * (1 if mix is None else 2)
        self.streams = min(streams, count)
        self._round = 0
        self._random = random.Random(seed)  # noqa: S311 - an order, no secret
        self.frame_bytes = frame_bytes(self.layout.groups[0])
        extra = 0 if mix is None else -(-count * (100 - mix.read_percent) // 100)
        self.tier = _open_tier(name, root, self.frame_bytes, count + extra + threads)
        self.arena = Arena(self.layout, (self.slots,), populate=True)
        for slot in range(self.slots):
            payload = np.frombuffer(self.arena.payload(0, slot), np.uint8)
            payload[:] = np.random.default_rng(slot).integers(0, 256, len(payload), np.uint8)
        self._samples = [bytes(self.arena.payload(0, slot)[:SAMPLE_BYTES]) for slot in range(self.slots)]
        self._kept: dict[int, int] = {}
        """Number of each object of the last store to the slot whose bytes it has."""
        layers = self.layout.groups[0].layer_bytes
        tiers: dict[str, Tier] = {name: self.tier}
        self._mover = Mover(
            layout=self.layout,
            rank=0,
            fingerprint=FINGERPRINT,
            arena=self.arena,
            copier=CpuCopier(self.layout, [[np.zeros((1, layer), np.uint8) for layer in layers]]),
            tiers=tiers,
            threads=Threads(read=threads, write=threads),
        )

    def store(self) -> Spent:
        """Store `count` new objects."""
        self._round += 1
        first = self._round * self.count
        return self._run([(Link.DEMOTE, first + n) for n in self._order()], replaces=True)

    def load(self) -> Spent:
        """Load the objects of the last store; what is in the slots then is compared with what was stored."""
        first = min(self._kept)
        return self._run([(Link.PROMOTE, first + n) for n in self._order()])

    def mixed(self, mix: Mix) -> Spent:
        """Load `mix.read_percent` of `count` objects of the last store and store new ones for the rest."""
        first = min(self._kept)
        self._round += 1
        new = self._round * self.count
        stores = self.count * (100 - mix.read_percent) // 100
        writes = set(self._random.sample(range(self.count), max(1, stores)))
        work = [
            (Link.DEMOTE, new + place) if place in writes else (Link.PROMOTE, first + n)
            for place, n in enumerate(self._order())
        ]
        return self._run(work)

    def close(self) -> None:
        """End the threads and the tier."""
        self._mover.close(10.0)
        self.arena.close()
        self.tier.close()

    def _order(self) -> list[int]:
        return interleaved(self.count, self.streams, self._random)

    def _run(self, work: Sequence[tuple[Link, int]], *, replaces: bool = False) -> Spent:
        before = read_bytes()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        used, latencies_s = self._move(work)
        spent = Spent(time.perf_counter() - start_s, time.process_time() - cpu_s, latencies_s)
        after = read_bytes()
        if before is not None and after is not None:
            spent.device_bytes = after - before
        self._check(work, used)
        if replaces:
            self._kept = {number: slot for (_, number), slot in zip(work, used, strict=True)}
        return spent

    def _check(self, work: Sequence[tuple[Link, int]], used: Sequence[int]) -> None:
        """Compare what the loads left in the slots, and give each slot its own bytes again for the next store."""
        last = {slot: number for (link, number), slot in zip(work, used, strict=True) if link is Link.PROMOTE}
        for slot, number in last.items():
            payload = self.arena.payload(0, slot)
            if bytes(payload[:SAMPLE_BYTES]) != self._samples[self._kept[number]]:
                raise KvError("the benchmark read back other bytes than it stored")
            payload[:SAMPLE_BYTES] = self._samples[slot]

    def _move(self, work: Sequence[tuple[Link, int]]) -> tuple[list[int], list[float]]:
        """Do it all, one object per slot at a time, and require each to be DONE: (slot of each, seconds of each).

        Loads and stores have slots of their own, so that a store's bytes are known. In a mix only loads are timed.
        """
        kinds = {link for link, _ in work}
        free = {
            link: list(range(number, self._in_flight * len(kinds), len(kinds)))
            for number, link in enumerate(sorted(kinds, key=str))
        }
        used: list[int] = []
        latencies_s: list[float] = []
        out = 0
        until = time.monotonic() + DEADLINE_S
        while len(used) < len(work) or out:
            transfers: list[Transfer] = []
            while len(used) < len(work) and free[work[len(used)][0]]:
                link, number = work[len(used)]
                slot = free[link].pop()
                transfers.append(self._transfer(len(used), number, link, slot))
                used.append(slot)
            self._mover.submit_all(transfers)
            out += len(transfers)
            for completion in self._mover.take(1.0):
                command = completion.command
                assert isinstance(command, Transfer)
                if completion.outcome is not Outcome.DONE:
                    raise KvError(f"the benchmark's {command.link.value} failed: {completion.detail}")
                free[command.link].append(command.slot)
                out -= 1
                if len(kinds) == 1 or command.link is Link.PROMOTE:
                    latencies_s.append(completion.seconds)
            if time.monotonic() > until:
                raise KvError(f"the benchmark's transfers took longer than {DEADLINE_S:g} s")
        return used, latencies_s

    def _transfer(self, number: int, key: int, link: Link, slot: int) -> Transfer:
        deadline_s = time.monotonic() + DEADLINE_S
        return Transfer(number, link, chunk_key(key), 0, slot, self.name, None, (), None, number, deadline_s, Hint())


def in_flight(size: int, threads: int) -> int:
    """How many objects of `size` bytes are on their way at once: as many for each thread as the core allows.

    A session's defaults have 4 for each thread, and small objects up to a number of bytes.
    """
    return max(4 * threads, LimitsConfig().small_bytes_in_flight // size)


def interleaved(count: int, streams: int, draw: random.Random) -> list[int]:
    """The numbers 0 to `count`, cut into `streams` runs that take turns at random, each in its own order."""
    if streams == 1:
        return list(range(count))
    edges = [count * stream // streams for stream in range(streams + 1)]
    turns = [stream for stream in range(streams) for _ in range(edges[stream + 1] - edges[stream])]
    draw.shuffle(turns)
    places = edges[:-1]
    order: list[int] = []
    for stream in turns:
        order.append(places[stream])
        places[stream] += 1
    return order


def latency(seconds: Sequence[float]) -> Latency:
    """Percentiles of these times."""
    if len(seconds) < 2:
        only = round(seconds[0] * 1e6, 1)
        return Latency(only, only, only)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Latency(*(round(cuts[percent - 1] * 1e6, 1) for percent in (50, 95, 99)))


def read_bytes(path: Path = PROC_IO) -> int | None:
    """Bytes that the kernel has read from devices for this process; None where it does not tell."""
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:")), None)


def segment_bytes(frame: int) -> int:
    """Of the disk tier's segments here, for frames of so many bytes."""
    return max(64 << 20, 8 * align_up(frame))


def _open_tier(name: str, root: Path, frame: int, count: int) -> DirectoryTier | DiskTier:
    """A tier that `count` frames fill."""
    if name == "directory":
        return DirectoryTier(root, capacity_bytes=count * frame)
    segment = segment_bytes(frame)
    return DiskTier(root, capacity_bytes=count * frame + SEGMENTS * segment, segment_bytes=segment)
