"""What a probe found, as plain values: links with their measures, the places behind them, warnings."""

from dataclasses import dataclass

from kvtier.config.kinds import size_text

VERSION = 1


@dataclass(frozen=True, slots=True)
class Measure:
    """One operation of one size at one depth. GB is 10^9 bytes."""

    op: str
    bytes: int
    """Of one operation."""
    depth: int
    """Operations under way at once, each in a thread of its own."""
    gb_per_s: float
    latency_us_p50: float
    latency_us_p99: float
    count: int
    """Operations behind the figures."""


@dataclass(frozen=True, slots=True)
class LinkMeasures:
    """One link: host memory, a GPU, a tier, the checksum, a codec."""

    name: str
    measures: tuple[Measure, ...]

    def best(self, op: str) -> Measure | None:
        """The fastest measure of `op`; None where there is none."""
        return max((it for it in self.measures if it.op == op), key=lambda it: it.gb_per_s, default=None)


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """What lies under one tier."""

    tier: str
    path: str
    """What was to be measured."""
    measured_in: str
    """The directory in which the temporary sub-store was; on the same file system."""
    file_system: str
    source: str
    """Device or server that is mounted there."""
    mount_options: tuple[str, ...]
    size_bytes: int
    free_bytes: int
    direct_io: bool
    alignment_bytes: int | None
    """Smallest alignment of offset, length and memory that direct reads accept; None: no direct I/O."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a probe may take at most."""

    points: int
    """Measures."""
    seconds: float
    """All measures together; filling and cleaning up come on top."""
    write_bytes: int
    """Written to all tiers together."""
    hold_bytes: int
    """Held on disk at one time."""

    def __str__(self) -> str:
        written = (
            f"{size_text(self.write_bytes)} written, {size_text(self.hold_bytes)} held" if self.write_bytes else ""
        )
        return f"{self.points} measures in at most about {self.seconds:.0f} s; {written or 'nothing written'}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Everything a probe found."""

    version: int
    links: tuple[LinkMeasures, ...]
    warnings: tuple[str, ...]
    places: tuple[PlaceFacts, ...]
    skipped: tuple[str, ...]
    """What was not measured, and why."""
    bounds: Bounds
    is_complete: bool
    """Whether every tier that was asked for could be measured."""

    def link(self, name: str) -> LinkMeasures | None:
        """The link of that name."""
        return next((it for it in self.links if it.name == name), None)
