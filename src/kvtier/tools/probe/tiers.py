"""Measures tiers through their own `write` and `read`, in a temporary store on the same file system."""

import errno
import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.config.sections import Config
from kvtier.errors import ConfigError, KvError
from kvtier.keys.secret import key_id
from kvtier.layout import ALIGNMENT, GroupLayout, History, KvLayout
from kvtier.runtime.arena import page_aligned
from kvtier.runtime.store_secret import configured_secret
from kvtier.tier import registry
from kvtier.tier.base import Tier
from kvtier.tier.files.direct import aligned_buffer
from kvtier.tier.registry import TierContext, TierKind, TierSettings, kind_of
from kvtier.tools.probe.links import LinkMeasures, Measure, MeasureLimits, Tick, measure
from kvtier.types import ObjectName

PREFIX = ".kvtier-probe-"
LOCK_NAME = "in-use"
ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MEASURES_HELD = 3
"""Number of measures whose objects fit into the store, so that written objects can be read."""
STAMP_BYTES = 16
ASKED_MAX = 200
"""Most names that a tier is asked for, because some servers charge for each name."""
SEGMENT_BYTES = 64 << 20
SPARE_SEGMENTS = 3
FREE_SHARE = 4
"""Divisor of the free space: a store uses at most a quarter of it."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """The file system of one tier that keeps files."""

    tier: str
    path: str
    """Path of the tier, or of the directory to measure."""
    measured_in: str
    """The directory of the temporary store, on the same file system."""
    file_system: str
    source: str
    """The mounted device or server."""
    mount_options: tuple[str, ...]
    size_bytes: int
    free_bytes: int
    direct_io: bool
    alignment_bytes: int | None
    """Smallest alignment of offset, length and memory for direct reads; None without direct I/O."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """One tier to measure."""

    settings: TierSettings
    config: Config
    is_configured: bool
    """Whether the tier comes from the settings, not from ``--dir``."""

    @property
    def name(self) -> str:
        """Name of the tier in results."""
        return self.settings.name

    @property
    def kind(self) -> TierKind[Any]:
        """The tier's kind."""
        return kind_of(self.settings)

    @property
    def path(self) -> Path | None:
        """Directory of the store, or the directory to measure; None for a tier without one."""
        return self.kind.folder(self.settings)

    @property
    def where(self) -> str:
        """The location, for display."""
        return str(getattr(self.settings, self.kind.where))

    @property
    def wants_direct(self) -> bool:
        """Whether the settings allow direct I/O."""
        return getattr(self.settings, "direct_io", "off") != "off"


def targets(config: Config, directory: Path | None) -> list[ProbeTarget]:
    """Return the tiers of `config` in their order.

    If `directory` is given, return instead a tier in it of each built-in kind that keeps files in a directory.
    """
    if directory is None:
        return [ProbeTarget(tier, config, is_configured=True) for tier in config.tiers]
    named = {tier.name: tier for tier in config.tiers}
    return [
        ProbeTarget(_moved(kind, named.get(kind), directory.absolute()), config, is_configured=False)
        for kind in registry.names()
        if registry.measures_directories(kind)
    ]


def _moved(kind: str, tier: TierSettings | None, directory: Path) -> TierSettings:
    """Return settings like `tier`'s for a tier of this kind in `directory`."""
    found = registry.by_name(kind)
    place: dict[str, Any] = {found.where: directory}
    if tier is not None and tier.kind == kind:
        return replace(tier, **place)
    return found.settings(**place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes, depths and limits of a probe."""

    sizes: tuple[int, ...]
    """Bytes of an object."""
    depths: tuple[int, ...]
    seconds: float
    """Time limit of each measurement."""
    write_bytes: int
    """Limit of the bytes written by all measurements of all tiers together; see `share`."""

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 4096 or any(size % 4096 for size in self.sizes):
            raise ConfigError(f"sizes {self.sizes} are not allowed; use multiples of 4 KiB")
        if not self.depths or min(self.depths) < 1 or max(self.depths) > 256:
            raise ConfigError(f"depths {self.depths} are not allowed; use depths from 1 to 256")
        if not 0.001 <= self.seconds <= 600:
            raise ConfigError(f"{self.seconds:g} s for each measurement is not allowed; allowed: 0.001 to 600 s")

    def share(self, tiers: int) -> "Effort":
        """Return the effort of one measurement. The measurements of all `tiers` share `write_bytes` equally.

        Raises:
            ConfigError: the share is too small to write one object of the smallest size.
        """
        count = tiers * len(self.sizes) * len(self.depths)
        found = replace(self, write_bytes=self.write_bytes // max(count, 1) // 4096 * 4096)
        if tiers and not found.fitting():
            least = min(self.sizes) * min(self.depths) * count
            raise ConfigError(
                f"--bytes {self.write_bytes} is too small for {count} measurements; allowed: at least {least}"
            )
        return found

    @property
    def largest(self) -> int:
        """Bytes of the largest object."""
        return max((size for size, _ in self.fitting()), default=ALIGNMENT)

    @property
    def held_bytes(self) -> int:
        """Bytes of objects that must fit into the store."""
        return MEASURES_HELD * self.write_bytes

    @property
    def capacity_bytes(self) -> int:
        """Upper bound of the store's bytes, including spare segments."""
        segment_bytes = max(min(SEGMENT_BYTES, self.write_bytes), 2 * self.largest + ALIGNMENT)
        return self.held_bytes + SPARE_SEGMENTS * segment_bytes

    def fitting(self) -> list[tuple[int, int]]:
        """Return each (size, depth) whose first operations fit the limit."""
        return [(size, depth) for size in self.sizes for depth in self.depths if size * depth <= self.write_bytes]


class Trial(NamedTuple):
    """A tier that is open for measurements, and the settings with which it was opened."""

    tier: Tier
    settings: TierSettings
    context: TierContext


@contextmanager
def trial_place(target: ProbeTarget) -> Generator[Path]:
    """Yield an empty temporary directory on a tier's file system, or the current directory if the tier needs none.

    Raises:
        ConfigError: the directory cannot be made.
    """
    if (parent := parent_of(target)) is None:
        yield Path()
        return
    with temporary_store(parent) as place:
        yield place


@contextmanager
def open_trial(target: ProbeTarget, place: Path, held_bytes: int, largest: int) -> Generator[Trial]:
    """Open a new tier like the configured one, and close it at the end.

    The tier lies in `place`. If its kind has no temporary stores, the tier lies in the configured store with a random
    model id, and with a random key id if no secret is configured.

    Args:
        target: the tier.
        place: the directory from `trial_place`.
        held_bytes: bytes of objects that must fit into the tier.
        largest: bytes of the largest object.

    Raises:
        ConfigError: a setting is wrong.
        TierError: the storage fails.
    """
    kind, settings = target.kind, target.settings
    layout = KvLayout(1, (GroupLayout(History(), (largest,), "trial"),))
    secret = configured_secret(target.config) if kind.is_shared(settings) and kind.open_trial is None else None
    own_id = os.urandom(16) if secret is None else key_id(secret)
    context = TierContext(layout=layout, model=os.urandom(16), key_id=own_id)
    if kind.open_trial is None:
        tier = kind.open(settings, context)
    else:
        moved: dict[str, Any] = {kind.where: place / settings.name}
        settings = replace(settings, **moved)
        tier = kind.open_trial(settings, place / settings.name, held_bytes, largest)
    try:
        yield Trial(tier, settings, context)
    finally:
        tier.close()
        if kind.open_trial is None and kind.discard is not None:
            kind.discard(settings, context)


def tier_measures(target: ProbeTarget, place: Path, points: Effort, tick: Tick) -> tuple[LinkMeasures, bool]:
    """Measure writes of new objects and reads in random order, at each size and depth, and lookups of absent names.

    Args:
        target: the tier.
        place: an empty directory for its store.
        points: sizes and depths.
        tick: called before each measure.

    Returns:
        The measurements, and whether the tier uses direct I/O.

    Raises:
        ConfigError: the store cannot be created.
        KvError: an operation failed, timed out, or returned bytes that differ from the written ones.
    """
    found: list[Measure] = []
    with open_trial(target, place, points.held_bytes, points.largest) as (tier, _, _):
        for size, depth in points.fitting():
            objects = _Objects(tier, size, depth)
            for op, limit in (("write", points.write_bytes), ("read", 2 * points.write_bytes)):
                tick(f"{target.name} {op}")
                act = objects.write if op == "write" else objects.read
                taken = measure(act, op=op, size=size, depth=depth, limits=MeasureLimits(points.seconds, limit))
                if taken is None:
                    raise KvError(f"tier {target.name}: {op}s of {size} bytes moved nothing")
                found.append(taken)
            if target.kind.open_trial is None:
                objects.delete()
        tick(f"{target.name} round trip")
        asked = measure(
            lambda _worker, _number: len(tier.contains([ObjectName(os.urandom(32))])),
            op="contains",
            size=1,
            depth=1,
            limits=MeasureLimits(points.seconds, ASKED_MAX),
        )
        link = LinkMeasures(target.name, tuple(found), None if asked is None else asked.latency_us_p50)
        return link, bool(tier.figures().direct_io)


class _Objects:
    """Objects of one size, which are written under new names and read in random order."""

    def __init__(self, tier: Tier, size: int, depth: int) -> None:
        self._tier = tier
        self._size = size
        self._prefix = os.urandom(24)
        self._buffers = [page_aligned(size).data for _ in range(depth)]
        for worker, buffer in enumerate(self._buffers):
            # Random, so that no device or file system can compress or deduplicate the data.
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
            raise KvError(
                f"tier {self._tier.name}: a read of {self._size} bytes returned different bytes from those written"
            )
        return count

    def delete(self) -> None:
        for number in self._written:
            self._tier.delete(self._name(number))

    def _name(self, number: int) -> ObjectName:
        return ObjectName(self._prefix + number.to_bytes(8, "big"))


def free_bytes(place: Path) -> tuple[int, int]:
    """Return the size of the file system of `place`, and the bytes that are free for this user."""
    found = os.statvfs(place)
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def check_room(place: Path, points: Effort) -> None:
    """Check that the store fits into the free space.

    Raises:
        ConfigError: the store needs more than a quarter of the free space.
    """
    _, free = free_bytes(place)
    if points.capacity_bytes * FREE_SHARE > free:
        raise ConfigError(
            f"only {free >> 20} MiB is free in {str(place)!r}; a probe uses at most a quarter, and this one needs "
            f"{points.capacity_bytes >> 20} MiB; use --quick or a smaller --bytes"
        )


def choose_parent(path: Path) -> Path:
    """Choose the directory in which to measure a tier at `path`.

    It is the parent of `path` if that is on the same file system and writable, otherwise `path` itself. If `path` does
    not exist, it is the nearest existing directory above.

    Raises:
        ConfigError: no directory there is writable.
    """
    existing = next((it for it in (path, *path.parents) if it.is_dir()), Path("/"))
    is_beside = existing == path and path.parent != path and _is_same_file_system(path, path.parent)
    for candidate in (path.parent, existing) if is_beside else (existing,):
        if os.access(candidate, os.R_OK | os.W_OK | os.X_OK):
            return candidate
    raise ConfigError(f"{str(path)!r} cannot be measured: no write permission in {str(existing)!r}")


def parent_of(target: ProbeTarget) -> Path | None:
    """Return the directory in which a tier is measured, or None for a tier without temporary stores.

    Raises:
        ConfigError: the directory is not writable.
    """
    if target.path is None or target.kind.open_trial is None:
        return None
    return choose_parent(target.path) if target.is_configured else target.path


@contextmanager
def temporary_store(parent: Path) -> Generator[Path]:
    """Make a temporary directory in `parent`, and remove it at the end. Existing stores are never opened.

    A lock on a file in the directory marks it as in use. `sweep` removes the directories of killed probes.

    Raises:
        ConfigError: the directory cannot be created.
    """
    sweep(parent)
    try:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"{str(parent)!r} is not writable: {error.strerror or error}") from error
    try:
        lock = os.open(place / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks, where `sweep` fails as well
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield place
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove the directories of killed probes in `parent`."""
    for place in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(place / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # the directory is not a probe's, or is being created
            continue
        try:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(lock)


def _is_same_file_system(path: Path, other: Path) -> bool:
    return path.stat().st_dev == other.stat().st_dev


def direct_alignment(directory: Path) -> int | None:
    """Find by trial the smallest alignment that direct reads accept, or return None without direct I/O.

    The trial uses a temporary file in `directory`.

    Raises:
        OSError: the directory is not writable.
    """
    largest = ALIGNMENTS[-1]
    path = directory / "alignment"
    path.write_bytes(os.urandom(2 * largest))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise
    finally:
        path.unlink()
    buffer = aligned_buffer(2 * largest)
    try:
        return next((size for size in ALIGNMENTS if _accepts(descriptor, buffer[size : 2 * size], size)), None)
    finally:
        os.close(descriptor)


def _accepts(descriptor: int, into: memoryview, offset: int) -> bool:
    """Return whether a read succeeds if memory, length and offset are aligned to `offset`, and to nothing larger."""
    try:
        return os.preadv(descriptor, [into], offset) == len(into)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
