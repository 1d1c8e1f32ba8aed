"""A whole probe: what will be measured and within which bounds, then the measures, then what they say."""

from dataclasses import dataclass
from pathlib import Path

from kvtier.codec import registry
from kvtier.config.loader import Loaded
from kvtier.config.machine import check
from kvtier.config.sections import Config
from kvtier.errors import ConfigError, KvError
from kvtier.probe import gpu, memory, tiers, warn
from kvtier.probe.direct import direct_alignment
from kvtier.probe.facts import Facts, read_facts
from kvtier.probe.mounts import Mount, mount_of
from kvtier.probe.result import VERSION, Bounds, LinkMeasures, PlaceFacts, ProbeResult
from kvtier.probe.substore import choose_parent, sub_store
from kvtier.probe.timing import Limits, Tick
from kvtier.tier.direct import can_direct

MEMORY_SIZES = (64 << 10, 1 << 20, 32 << 20)
UNLIMITED = 1 << 50
"""Nothing is worn by copies in memory; time bounds them."""
CODEC_MEASURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much may be spent."""

    sizes: tuple[int, ...]
    """Bytes of an object."""
    depths: tuple[int, ...]
    seconds: float
    """Of each measure."""
    write_bytes: int
    """Written to all tiers together, at most."""

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 4096 or any(size % 4096 for size in self.sizes):
            raise ConfigError(f"sizes {self.sizes}: allowed: multiples of 4 KiB")
        if not self.depths or min(self.depths) < 1 or max(self.depths) > 256:
            raise ConfigError(f"depths {self.depths}: allowed: 1 to 256")
        if not 0.001 <= self.seconds <= 600:
            raise ConfigError(f"seconds {self.seconds:g}: allowed: 0.001 to 600 for each measure")


USUAL = Effort(sizes=(64 << 10, 512 << 10, 4 << 20, 32 << 20), depths=(1, 4, 16), seconds=0.5, write_bytes=8 << 30)
QUICK = Effort(sizes=(512 << 10, 4 << 20), depths=(1, 4), seconds=0.15, write_bytes=512 << 20)


class Probe:
    """One probe. Made without touching anything; `run` measures.

    Args:
        loaded: the settings and where they came from.
        directory: measure both kinds of tier here instead of where the settings say; None: what the settings say.
        effort: how much.
        facts: of this machine; None: look around.

    Raises:
        ConfigError: the effort is too small to write one object of the smallest size.
    """

    def __init__(self, loaded: Loaded, directory: Path | None, effort: Effort, facts: Facts | None = None) -> None:
        self._loaded = loaded
        self._effort = effort
        self._facts = facts or read_facts()
        self.targets = tiers.targets(loaded.config, directory)
        count = len(self.targets) * len(effort.sizes) * len(effort.depths)
        share = effort.write_bytes // max(count, 1) // 4096 * 4096
        self._points = tiers.Points(effort.sizes, effort.depths, effort.seconds, share)
        if self.targets and not self._points.fitting():
            least = min(effort.sizes) * min(effort.depths) * count
            raise ConfigError(f"--bytes {effort.write_bytes} is too little for {count} measures; allowed: from {least}")

    @property
    def bounds(self) -> Bounds:
        """What `run` may take, at most."""
        fitting = len(self._points.fitting()) * len(self.targets)
        others = (len(MEMORY_SIZES) + 1) * len(self._copy_depths) + CODEC_MEASURES * len(registry.names())
        if self._facts.has_gpu:
            others += 4 * len(MEMORY_SIZES)
        points = 2 * fitting + others
        return Bounds(
            points=points,
            seconds=points * self._effort.seconds,
            write_bytes=fitting * self._points.write_bytes,
            hold_bytes=self._points.capacity_bytes if self.targets else 0,
        )

    def run(self, tick: Tick) -> ProbeResult:
        """Measure.

        Args:
            tick: told before each measure.

        Raises:
            KvError: a link failed in a way that says nothing about it. A tier that fails is a warning instead.
        """
        bounds = self.bounds
        links, skipped, is_locked = self._machine_links(tick)
        findings = [str(it) for it in check(self._loaded.config, self._loaded.origins, self._loaded.file)]
        found: list[str] = [*findings, *warn.machine_warnings(self._loaded.config, self._facts, is_locked=is_locked)]
        places: list[PlaceFacts] = []
        under: list[Mount | None] = []
        failed = 0
        for target in self.targets:
            try:
                link, place = self._tier(target, tick)
            except (KvError, OSError) as error:
                failed += 1
                found.append(f"{target.name} ({target.path}): could not be measured: {error}")
                continue
            links.append(link)
            skipped += self._left_out(target)
            mount = mount_of(Path(place.measured_in).resolve(), self._facts.mounts)
            places.append(place)
            under.append(mount)
            found += warn.place_warnings(place, mount, self._facts, wants_direct=target.direct_io != "off")
        if not self.targets:
            skipped.append("tiers: none is configured; --dir names a directory to be measured, --set or --file a tier")
        if all(target.is_configured for target in self.targets):
            found += warn.sharing_warnings(places, under)
            found += warn.order_warnings([target.name for target in self.targets], links)
        found += warn.speed_warnings(links)
        unique = tuple(dict.fromkeys(found))
        return ProbeResult(VERSION, tuple(links), unique, tuple(places), tuple(skipped), bounds, is_complete=not failed)

    @property
    def _copy_depths(self) -> tuple[int, ...]:
        return tuple(sorted({1, min(4, self._facts.cores), min(16, self._facts.cores)}))

    def _machine_links(self, tick: Tick) -> tuple[list[LinkMeasures], list[str], bool | None]:
        limits = Limits(self._effort.seconds, UNLIMITED)
        links = [memory.copies(MEMORY_SIZES, self._copy_depths, limits, tick)]
        links.append(memory.checksums(limits, self._copy_depths, tick))
        encoded, skipped = memory.codecs(limits, tick)
        links += encoded
        is_locked: bool | None = None
        reason = gpu.why_not(has_gpu=self._facts.has_gpu)
        if reason is None:
            link, is_locked = gpu.gpu_copies(MEMORY_SIZES, limits, tick)
            links.append(link)
        else:
            skipped.append(reason)
        return links, skipped, is_locked

    def _tier(self, target: tiers.Target, tick: Tick) -> tuple[LinkMeasures, PlaceFacts]:
        parent = choose_parent(target.path) if target.is_configured else target.path
        with sub_store(parent) as place:
            tiers.check_room(place, self._points)
            alignment = direct_alignment(place) if can_direct(str(place)) else None
            link, is_direct = tiers.tier_measures(target, place, self._points, tick)
        size, free = tiers.free_bytes(parent)
        mount = mount_of(parent.resolve(), self._facts.mounts)
        return link, PlaceFacts(
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

    def _left_out(self, target: tiers.Target) -> list[str]:
        fitting = set(self._points.fitting())
        missing = [(s, d) for s in self._points.sizes for d in self._points.depths if (s, d) not in fitting]
        return [
            f"{target.name}: {size >> 10} KiB at depth {depth} takes more than a measure's share of --bytes"
            for size, depth in missing
        ]


def where_text(config: Config, directory: Path | None) -> str:
    """Where a probe will write, for people, before it does."""
    named = tiers.targets(config, directory)
    if not named:
        return "nothing is written: no tier is configured and no --dir given"
    shown: list[str] = []
    for target in named:
        parent = choose_parent(target.path) if target.is_configured else target.path
        shown.append(f"{target.name}: in {parent}")
    return f"temporary stores of its own, removed at the end ({'; '.join(shown)}); existing stores are not touched"
