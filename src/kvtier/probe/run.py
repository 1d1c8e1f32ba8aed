"""A whole probe: its bounds, the measures, and the warnings that follow from them."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kvtier.codec import registry
from kvtier.config.loader import Loaded
from kvtier.config.machine_checks import check
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.errors import KvError
from kvtier.probe import links, tiers, warnings
from kvtier.probe.facts import Facts, Mount, mount_of, read_facts
from kvtier.probe.links import CodecRead, LinkMeasures, MeasureLimits, Tick
from kvtier.probe.tiers import Effort, TierFacts
from kvtier.tier.direct import can_direct

VERSION = 1
MEMORY_SIZES = (64 << 10, 1 << 20, 32 << 20)
UNLIMITED = 1 << 50
"""Copies in memory cause no wear, so only time limits them."""
CODEC_MEASURES = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of a probe."""

    points: int
    """Number of measures."""
    seconds: float
    """All measures together, without filling and cleaning up."""
    write_bytes: int
    """Written to all tiers together."""
    hold_bytes: int
    """Largest size of a temporary store."""

    def __str__(self) -> str:
        written = (
            f"{size_text(self.write_bytes)} written, {size_text(self.hold_bytes)} held" if self.write_bytes else ""
        )
        return f"{self.points} measures in at most about {self.seconds:.0f} s; {written or 'nothing written'}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    version: int
    links: tuple[LinkMeasures, ...]
    warnings: tuple[str, ...]
    places: tuple[TierFacts, ...]
    skipped: tuple[str, ...]
    """Measurements left out, each with the reason."""
    bounds: Bounds
    is_complete: bool
    """Whether every tier was measured."""
    codec_reads: tuple[CodecRead, ...] = ()


USUAL = Effort(sizes=(64 << 10, 512 << 10, 4 << 20, 32 << 20), depths=(1, 4, 16), seconds=0.5, write_bytes=8 << 30)
QUICK = Effort(sizes=(512 << 10, 4 << 20), depths=(1, 4), seconds=0.15, write_bytes=512 << 20)


class ProbeRun:
    """One probe. The constructor changes nothing; `run` measures.

    Args:
        loaded: the settings and their origins.
        directory: measure both kinds of tier here instead of the configured ones.
        effort: sizes, depths and limits.
        facts: of this machine; None: read them.

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
        """Upper bounds of `run`."""
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
        """Measure.

        Args:
            tick: called before each measure.

        Raises:
            KvError: a link other than a tier failed. A failed tier is a warning.
        """
        bounds = self.bounds
        found_links, skipped, is_locked = self._machine_links(tick)
        findings = [str(it) for it in check(self._loaded.config, self._loaded.origins, self._loaded.file)]
        texts: list[str] = [
            *findings,
            *warnings.machine_warnings(self._loaded.config, self._facts, is_locked=is_locked),
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
            texts += warnings.tier_warnings(
                place, mount, self._facts, wants_direct=target.wants_direct, needs_drive=target.kind.needs_drive
            )
        if not self.targets:
            skipped.append("tiers: none is configured; allowed: --dir for a directory, --tier or --file for a tier")
        if all(target.is_configured for target in self.targets):
            texts += warnings.sharing_warnings(places, under)
            texts += warnings.order_warnings([target.name for target in self.targets], found_links)
        texts += warnings.speed_warnings(found_links)
        unique = tuple(dict.fromkeys(texts))
        return ProbeResult(
            VERSION,
            tuple(found_links),
            unique,
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
            f"{target.name}: {size >> 10} KiB at depth {depth} exceeds a measure's share of --bytes"
            for size, depth in product(self._points.sizes, self._points.depths)
            if (size, depth) not in fitting
        ]


def where_text(config: Config, directory: Path | None) -> str:
    """The directories that a probe will write to."""
    named = tiers.targets(config, directory)
    if not named:
        return "writes nothing: no tier is configured and no --dir given"
    shown: list[str] = []
    for target in named:
        parent = tiers.parent_of(target)
        shown.append(f"{target.name}: " + (f"objects in {target.where}" if parent is None else f"in {parent}"))
    return f"temporary stores, removed at the end ({'; '.join(shown)}); existing stores are not opened"
