"""Runs a whole probe: computes bounds, measures, and derives warnings from the measurements."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from kvtier.codec import registry
from kvtier.config.loader import Loaded
from kvtier.config.machine_checks import check
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.errors import KvError
from kvtier.tier.files.direct import can_direct
from kvtier.tools.machine_facts import Facts, Mount, mount_of, read_facts
from kvtier.tools.probe import links, tiers
from kvtier.tools.probe.links import CodecRead, LinkMeasures, MeasureLimits, Tick
from kvtier.tools.probe.tiers import Effort, TierFacts

VERSION = 1
MEMORY_SIZES = (64 << 10, 1 << 20, 32 << 20)
UNLIMITED = 1 << 50
"""Byte limit of copies in memory. They cause no wear, so only time limits them."""
CODEC_MEASURES = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of a probe."""

    points: int
    """Number of measurements."""
    seconds: float
    """Time of all measurements together, without filling and cleaning up."""
    write_bytes: int
    """Bytes written to all tiers together."""
    hold_bytes: int
    """Largest size of a temporary store."""

    def __str__(self) -> str:
        written = (
            f"{size_text(self.write_bytes)} written, {size_text(self.hold_bytes)} held" if self.write_bytes else ""
        )
        return f"{self.points} measurements in at most about {self.seconds:.0f} s; {written or 'nothing written'}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    version: int
    links: tuple[LinkMeasures, ...]
    warnings: tuple[str, ...]
    places: tuple[TierFacts, ...]
    skipped: tuple[str, ...]
    """Measures that were left out, and the reason for each."""
    bounds: Bounds
    is_complete: bool
    """Whether every tier was measured."""
    codec_reads: tuple[CodecRead, ...] = ()


USUAL = Effort(sizes=(64 << 10, 512 << 10, 4 << 20, 32 << 20), depths=(1, 4, 16), seconds=0.5, write_bytes=8 << 30)
QUICK = Effort(sizes=(512 << 10, 4 << 20), depths=(1, 4), seconds=0.15, write_bytes=512 << 20)


class ProbeRun:
    """One probe. The constructor changes nothing, and `run` measures.

    Args:
        loaded: the settings and their origins.
        directory: measure each kind of tier that keeps files in this directory, instead of the configured tiers.
        effort: sizes, depths and limits.
        facts: facts of this machine; None means to read them.

    Raises:
        ConfigError: the effort is too small to write one object of the smallest size.
    """

    def __init__(self, loaded: Loaded, directory: Path | None, effort: Effort, facts: Facts | None = None) -> None:
        self._loaded = loaded
        self._effort = effort
        self._facts = facts or read_facts()
        self.targets = tiers.targets(loaded.config, directory)
        self._points = effort.share(len(self.targets))

    @property
    def bounds(self) -> Bounds:
        """The upper bounds of `run`."""
        fitting = len(self._points.fitting()) * len(self.targets)
        others = (len(MEMORY_SIZES) + 1) * len(self._copy_depths) + CODEC_MEASURES * len(registry.names())
        if self._facts.has_gpu:
            others += 4 * len(MEMORY_SIZES)
        points = 2 * fitting + len(self.targets) + others
        return Bounds(
            points=points,
            seconds=points * self._effort.seconds,
            write_bytes=fitting * self._points.write_bytes,
            hold_bytes=self._points.capacity_bytes if self.targets else 0,
        )

    def run(self, tick: Tick) -> ProbeResult:
        """Measure every link.

        Args:
            tick: called before each measure.

        Raises:
            KvError: a link that is not a tier failed. A failed tier gives a warning.
        """
        bounds = self.bounds
        found_links, skipped, is_locked = self._machine_links(tick)
        findings = [str(it) for it in check(self._loaded.config, self._loaded.origins, self._loaded.file)]
        texts: list[str] = [
            *findings,
            *machine_warnings(self._loaded.config, self._facts, is_locked=is_locked),
        ]
        places: list[TierFacts] = []
        under: list[Mount | None] = []
        failed = 0
        for target in self.targets:
            try:
                link, place = self._tier(target, tick)
            except (KvError, OSError) as error:
                failed += 1
                texts.append(f"{target.name} ({target.where}): could not be measured: {error}")
                continue
            found_links.append(link)
            skipped += self._too_large(target)
            if place is None:
                continue
            mount = mount_of(Path(place.measured_in).resolve(), self._facts.mounts)
            places.append(place)
            under.append(mount)
            texts += tier_warnings(
                place, mount, self._facts, wants_direct=target.wants_direct, needs_drive=target.kind.needs_drive
            )
        if not self.targets:
            skipped.append("tiers: none is configured; give --dir for a directory, or --tier or --file for a tier")
        if all(target.is_configured for target in self.targets):
            texts += sharing_warnings(places, under)
            texts += order_warnings([target.name for target in self.targets], found_links)
        texts += speed_warnings(found_links)
        return ProbeResult(
            VERSION,
            tuple(found_links),
            tuple(dict.fromkeys(texts)),
            tuple(places),
            tuple(skipped),
            bounds,
            is_complete=not failed,
            codec_reads=links.codec_reads(found_links, self._facts.cores),
        )

    @property
    def _copy_depths(self) -> tuple[int, ...]:
        return tuple(sorted({1, min(4, self._facts.cores), min(16, self._facts.cores)}))

    def _machine_links(self, tick: Tick) -> tuple[list[LinkMeasures], list[str], bool | None]:
        limits = MeasureLimits(self._effort.seconds, UNLIMITED)
        host = links.copies(MEMORY_SIZES, self._copy_depths, limits, tick)
        checksum = links.checksums(limits, self._copy_depths, tick)
        codecs, skipped = links.codecs(limits, tick)
        found = [host, checksum, *codecs]
        reason = links.gpu_missing(has_gpu=self._facts.has_gpu)
        if reason is not None:
            return found, [*skipped, reason], None
        gpu, is_locked = links.gpu_copies(MEMORY_SIZES, limits, tick)
        return [*found, gpu], skipped, is_locked

    def _tier(self, target: tiers.ProbeTarget, tick: Tick) -> tuple[LinkMeasures, TierFacts | None]:
        if (parent := tiers.parent_of(target)) is None:
            return tiers.tier_measures(target, Path(), self._points, tick)[0], None
        with tiers.temporary_store(parent) as place:
            tiers.check_room(place, self._points)
            alignment = tiers.direct_alignment(place) if can_direct(str(place)) else None
            link, is_direct = tiers.tier_measures(target, place, self._points, tick)
        size, free = tiers.free_bytes(parent)
        mount = mount_of(parent.resolve(), self._facts.mounts)
        return link, TierFacts(
            tier=target.name,
            path=str(target.path),
            measured_in=str(parent),
            file_system=mount.kind if mount else "unknown",
            source=mount.source if mount else "unknown",
            mount_options=tuple(sorted(mount.options)) if mount else (),
            size_bytes=size,
            free_bytes=free,
            direct_io=is_direct,
            alignment_bytes=alignment,
        )

    def _too_large(self, target: tiers.ProbeTarget) -> list[str]:
        fitting = self._points.fitting()
        return [
            f"{target.name}: {size >> 10} KiB at depth {depth} exceeds a measurement's share of --bytes"
            for size, depth in product(self._points.sizes, self._points.depths)
            if (size, depth) not in fitting
        ]


def where_text(config: Config, directory: Path | None) -> str:
    """Return a sentence that names the directories to which a probe will write."""
    named = tiers.targets(config, directory)
    if not named:
        return "writes nothing: no tier is configured and no --dir given"
    shown: list[str] = []
    for target in named:
        parent = tiers.parent_of(target)
        shown.append(f"{target.name}: " + (f"objects in {target.where}" if parent is None else f"in {parent}"))
    return f"temporary stores, removed at the end ({'; '.join(shown)}); existing stores are not opened"


FULL_SHARE = 0.9
"""Share of a file system in use, above which it fragments files and SSDs slow down."""
BUSY = 1.5
"""Runnable processes per core, above which figures are too low."""
FASTER = 1.25
"""Smaller ratios of speeds count as noise."""
HASH_GB_PER_S_LEAST = 4.0
"""A healthy core reaches several times this speed. A lower one means emulation, throttling or a busy machine."""


def machine_warnings(config: Config, facts: Facts, *, is_locked: bool | None = None) -> Iterator[str]:
    """Yield warnings about host memory and the machine.

    Args:
        config: the settings.
        facts: facts of this machine.
        is_locked: whether page-locking for the GPU worked; None if it was not tried.
    """
    wanted = config.host.capacity_bytes
    available = facts.memory_available_bytes
    if available is not None and available < wanted <= facts.memory_bytes:
        yield (
            f"host.capacity_bytes = {size_text(wanted)}: only {size_text(available)} of memory is available; "
            "the kernel would swap, or kill a process"
        )
    locks = config.host.page_lock == "on" or (config.host.page_lock == "auto" and facts.has_gpu)
    if locks and facts.memlock_bytes is not None and facts.memlock_bytes < wanted:
        yield (
            f"memlock: the limit is {size_text(facts.memlock_bytes)}, but host memory takes {size_text(wanted)} "
            "(host.capacity_bytes); raise the limit: ulimit -l unlimited, LimitMEMLOCK= in systemd, --ulimit "
            "memlock=-1 in Docker"
        )
    if is_locked is False:
        yield "page-lock: host memory cannot be page-locked, so copies to the GPU are slower and block threads"
    if facts.swap_used_bytes > 0:
        yield (
            f"swap: {size_text(facts.swap_used_bytes)} is in use; loading a swapped-out chunk is slower than "
            "loading it from a tier; lower host.capacity_bytes, or turn swap off"
        )
    yield from busy_warnings(facts)
    if facts.huge_pages == "never":
        yield (
            "huge pages: transparent huge pages are off; direct I/O into small pages is up to three times slower; "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )


def busy_warnings(facts: Facts) -> Iterator[str]:
    """Yield a warning if the load average before the measurements shows that the cores were busy."""
    if facts.load is not None and facts.load > BUSY * facts.cores:
        yield (
            f"load: {facts.load:.1f} runnable processes on {facts.cores} cores, so the figures are too low; measure "
            "again when the machine is idle"
        )


def tier_warnings(
    place: TierFacts, mount: Mount | None, facts: Facts, *, wants_direct: bool, needs_drive: bool = False
) -> Iterator[str]:
    """Yield warnings about the file system of one tier.

    Args:
        place: facts of the tier.
        mount: mount of the tier, if known.
        facts: facts of this machine.
        wants_direct: whether the settings allow direct I/O.
        needs_drive: whether the kind requires a local drive.
    """
    where = f"{place.tier} ({place.path})"
    if mount is not None:
        yield from _kind_warnings(where, mount, needs_drive=needs_drive)
        yield from _option_warnings(where, mount)
        limit = facts.io_limit(mount.device)
        if limit is not None:
            yield f"{where}: a control group limits its drive ({limit}), and with it the tier"
    is_memory = mount is not None and mount.is_memory
    if not wants_direct:
        yield (
            f"{where}: direct I/O is turned off, so all I/O goes through the page cache: a second copy in memory and "
            "several times the CPU time"
        )
    elif not place.direct_io and not is_memory:
        yield (
            f"{where}: the file system ({place.file_system}) has no direct I/O, so reads and writes are buffered: a "
            "second copy in memory, several times the CPU time, and figures that may be those of the page cache"
        )
    if place.size_bytes and place.free_bytes < (1 - FULL_SHARE) * place.size_bytes:
        yield (
            f"{where}: the file system is nearly full, {size_text(place.free_bytes)} of {size_text(place.size_bytes)} "
            "are free; files fragment and SSDs slow down"
        )


def order_warnings(order: Sequence[str], links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Warn of tiers that precede a faster tier, and of tiers that are faster than host memory.

    Args:
        order: names of the tiers, in the order in which lookups ask them.
        links: all measurements.
    """
    by_name = {link.name: link for link in links}
    rates = [(name, best.gb_per_s) for name in order if name in by_name and (best := by_name[name].best("read"))]
    for (upper, rate), (lower, faster) in pairwise(rates):
        if faster > FASTER * rate:
            yield (
                f"{upper} comes before {lower}, but reads {rate:.2f} GB/s against {faster:.2f} GB/s; chunks in both "
                "are loaded from the slower one"
            )
    host = by_name["host"].best("copy") if "host" in by_name else None
    for name, rate in rates:
        if host is not None and rate > FASTER * host.gb_per_s:
            yield f"{name} reads faster ({rate:.2f} GB/s) than host memory copies ({host.gb_per_s:.2f} GB/s)"


def sharing_warnings(places: Sequence[TierFacts], mounts: Sequence[Mount | None]) -> Iterator[str]:
    """Warn of configured tiers on the same device, which share its bandwidth."""
    seen: dict[str, str] = {}
    for place, mount in zip(places, mounts, strict=True):
        if mount is None or mount.device.startswith("0:"):
            continue
        if mount.device in seen:
            yield f"{seen[mount.device]} and {place.tier} are on one device ({mount.source}) and share its bandwidth"
        seen[mount.device] = place.tier


def speed_warnings(links: Sequence[LinkMeasures]) -> Iterator[str]:
    """Warn of medians that no healthy machine has. Other processes affect the median less than other statistics."""
    for it in (it for link in links for it in link.measures if it.op == "hash" and it.depth == 1):
        rate = it.bytes / it.latency_us_p50 / 1e3
        if rate < HASH_GB_PER_S_LEAST:
            yield (
                f"checksum: {rate:.2f} GB/s in one thread, and every load is verified; a core reaches ten or more; "
                "xxhash lacks vector instructions, or the processor is throttled"
            )


def _kind_warnings(where: str, mount: Mount, *, needs_drive: bool) -> Iterator[str]:
    if mount.is_memory:
        yield (
            f"{where}: {mount.kind} is memory, not a disk; its content is lost at a restart and counts as used memory; "
            "raise host.capacity_bytes instead"
        )
    elif mount.kind in {"overlay", "aufs", "fuse.fuse-overlayfs"}:
        yield (
            f"{where}: {mount.kind} is a container's own layer: slower than the disk below it, and removed with the "
            "container; mount a volume there"
        )
    elif mount.kind == "zfs":
        yield f"{where}: ZFS before 2.3 accepts direct I/O but still uses its own cache"
    elif mount.is_network and needs_drive:
        yield (
            f"{where}: {mount.kind} is a network file system, and this kind of tier needs a local drive; a directory "
            "tier can be shared"
        )


def _option_warnings(where: str, mount: Mount) -> Iterator[str]:
    names = {option.partition("=")[0] for option in mount.options}
    if mount.kind.startswith("nfs") and names & {"soft", "softerr"}:
        yield (
            f"{where}: mounted soft: if the server is slow, reads and writes fail, and the tier is not used for a "
            "while; mount it with hard, because kvtier's deadlines limit the wait"
        )
    if mount.kind in {"cifs", "smb3", "smbfs"} and "hard" not in names:
        yield (
            f"{where}: {mount.kind} is mounted soft (its default): if the server is slow, reads and writes fail; mount "
            "it with hard"
        )
    if "sync" in names:
        yield f"{where}: mounted with sync: every write waits for the device; a cache does not need that"
    if "ro" in names:
        yield f"{where}: mounted read-only, so nothing can be stored"
    if "data=journal" in mount.options:
        yield f"{where}: mounted with data=journal: data are written twice, and direct I/O is buffered"
