"""Tiers, measured through their own `write` and `read`, in stores of the probe's own that are full of random bytes."""

import os
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvtier.config.sections import Config
from kvtier.errors import ConfigError, KvError
from kvtier.layout import ALIGNMENT
from kvtier.probe.result import LinkMeasures, Measure
from kvtier.probe.timing import Limits, Tick, measure
from kvtier.runtime.arena import page_aligned
from kvtier.tier.base import Tier
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.tier.disk_settings import SEGMENT_BYTES_MIN
from kvtier.types import ObjectName

KINDS = ("directory", "disk")
ROOM = 3
"""The store has room for so many measures, so that what one wrote is still there to be read."""
STAMP_BYTES = 16
SEGMENT_BYTES = 64 << 20
LOCK_DEADLINE_S = 60.0
"""Longer than in an engine: on a busy machine a measure comes out slow, rather than not at all."""
FREE_SHARE = 4
"""At most one part in so many of the free space is taken."""

DirectIo = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Target:
    """One tier to be measured."""

    name: str
    """How it is called in results."""
    kind: str
    """One of `KINDS`."""
    path: Path
    """Where it keeps its store, or is asked to be measured."""
    direct_io: DirectIo
    is_configured: bool
    """Whether `path` is a tier's own from the settings; a directory to be measured is not."""


def targets(config: Config, directory: Path | None) -> list[Target]:
    """The tiers that `config` names, in the order in which they are asked; or both kinds in `directory`."""
    if directory is not None:
        path = directory.absolute()
        return [
            Target("directory", "directory", path, config.directory.direct_io, is_configured=False),
            Target("disk", "disk", path, config.disk.direct_io, is_configured=False),
        ]
    sections = (("directory", config.directory), ("disk", config.disk))
    return [
        Target(name, name, section.path, section.direct_io, is_configured=True)
        for name, section in sections
        if section.path is not None
    ]


@dataclass(frozen=True, slots=True)
class Points:
    """What to measure of each tier."""

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: float
    """Of each measure."""
    write_bytes: int
    """Of each measure, at most."""

    @property
    def segment_bytes(self) -> int:
        """Of a store of segments."""
        largest = max((size for size, _ in self.fitting()), default=ALIGNMENT)
        return max(min(SEGMENT_BYTES, self.write_bytes), SEGMENT_BYTES_MIN + 2 * largest) // ALIGNMENT * ALIGNMENT

    @property
    def capacity_bytes(self) -> int:
        """Of the store. Segments are given up whole, and one is kept spare: hence two more."""
        return ROOM * self.write_bytes + 2 * self.segment_bytes

    def fitting(self) -> list[tuple[int, int]]:
        """(size, depth) whose first operations stay within the bytes."""
        return [(size, depth) for size in self.sizes for depth in self.depths if size * depth <= self.write_bytes]


@contextmanager
def open_tier(target: Target, place: Path, points: Points) -> Generator[DirectoryTier | DiskTier]:
    """A new store in `place`, of the target's kind.

    Raises:
        ConfigError: it cannot be made there.
        TierError: the place failed.
    """
    root = place / target.name
    tier = (
        DirectoryTier(
            root,
            capacity_bytes=points.capacity_bytes,
            direct_io=target.direct_io,
            shared=False,
            lock_deadline_s=LOCK_DEADLINE_S,
        )
        if target.kind == "directory"
        else DiskTier(
            root,
            capacity_bytes=points.capacity_bytes,
            segment_bytes=points.segment_bytes,
            direct_io=target.direct_io,
            lock_deadline_s=LOCK_DEADLINE_S,
        )
    )
    try:
        yield tier
    finally:
        tier.close()


def tier_measures(target: Target, place: Path, points: Points, tick: Tick) -> tuple[LinkMeasures, bool]:
    """Bandwidth and latency by size and depth, of new objects and of objects read in random order.

    Args:
        target: which tier.
        place: an empty directory for its store.
        points: what to measure.
        tick: told before each measure.

    Returns:
        The measures, and whether the tier used direct I/O.

    Raises:
        ConfigError: the store cannot be made.
        KvError: the place failed, hangs, or gave other bytes than were written.
    """
    found: list[Measure] = []
    with open_tier(target, place, points) as tier:
        for size, depth in points.fitting():
            objects = _Objects(tier, size, depth)
            for op, limit in (("write", points.write_bytes), ("read", 2 * points.write_bytes)):
                tick(f"{target.name} {op}")
                act = objects.write if op == "write" else objects.read
                told = measure(act, op=op, size=size, depth=depth, limits=Limits(points.seconds, limit))
                if told is None:
                    raise KvError(f"tier {target.name}: {op}s of {size} bytes moved nothing")
                found.append(told)
        return LinkMeasures(target.name, tuple(found)), tier.direct_io


class _Objects:
    """Objects of one size: written under new names, read in random order."""

    def __init__(self, tier: Tier, size: int, depth: int) -> None:
        self._tier = tier
        self._size = size
        self._prefix = os.urandom(24)
        self._buffers = [page_aligned(size).data for _ in range(depth)]
        for worker, buffer in enumerate(self._buffers):
            # Random, so that neither a device nor a file system can compress it or find it twice.
            np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(worker).integers(0, 256, size, np.uint8)
        self._written: list[int] = []

    def write(self, worker: int, number: int) -> int:
        buffer = self._buffers[worker]
        name = self._name(number)
        buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = name[-STAMP_BYTES:]
        if not self._tier.write(name, buffer):
            return 0
        self._written.append(number)
        return self._size

    def read(self, worker: int, _number: int) -> int:
        if not self._written:
            return 0
        name = self._name(random.choice(self._written))  # noqa: S311 - no secret
        buffer = self._buffers[worker]
        buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = bytes(STAMP_BYTES)
        count = self._tier.read(name, buffer)
        if count is None:
            return 0
        if count != self._size or {bytes(buffer[:STAMP_BYTES]), bytes(buffer[-STAMP_BYTES:])} != {name[-STAMP_BYTES:]}:
            raise KvError(f"tier {self._tier.name}: an object of {self._size} bytes came back with other bytes")
        return count

    def _name(self, number: int) -> ObjectName:
        return ObjectName(self._prefix + number.to_bytes(8, "big"))


def free_bytes(place: Path) -> tuple[int, int]:
    """(size, free for us) of the file system of `place`.

    Raises:
        OSError: it cannot be asked.
    """
    told = os.statvfs(place)
    return told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail


def check_room(place: Path, points: Points) -> None:
    """Refuse to fill a file system.

    Raises:
        ConfigError: the store would take more than a quarter of what is free.
    """
    _, free = free_bytes(place)
    if points.capacity_bytes * FREE_SHARE > free:
        raise ConfigError(
            f"only {free >> 20} MiB are free in {str(place)!r}, and a probe takes at most a quarter of that; "
            f"this one wants {points.capacity_bytes >> 20} MiB (--bytes, --quick)"
        )
