"""A probe's figures as text, for the terminal and the report alike."""

from collections.abc import Iterator

from kvtier.config.kinds import size_text
from kvtier.plan.tables import Table
from kvtier.probe.result import PlaceFacts, ProbeResult


def table(result: ProbeResult) -> Table:
    """One row for each measure."""
    rows = tuple(
        (
            link.name,
            it.op,
            size_text(it.bytes),
            str(it.depth),
            f"{it.gb_per_s:.2f}",
            _micros(it.latency_us_p50),
            _micros(it.latency_us_p99),
        )
        for link in result.links
        for it in link.measures
    )
    return Table(
        title="Links of this machine",
        columns=("link", "op", "size", "depth", "GB/s", "p50", "p99"),
        rows=rows,
        numeric=5,
        note=(
            "GB are 10^9 bytes; depth is how many operations are under way at once, each in a thread of its own; "
            "p50 and p99 are times of one operation at that depth."
        ),
    )


def place_lines(result: ProbeResult) -> Iterator[str]:
    """One line on each place."""
    for place in result.places:
        yield f"{place.tier}: {place_text(place)}"


def place_text(place: PlaceFacts) -> str:
    """The file system under a tier, and how it was measured."""
    direct = "no direct I/O"
    if place.alignment_bytes is not None:
        used = "used" if place.direct_io else "not used"
        direct = f"direct I/O {used}, aligned to {place.alignment_bytes} bytes"
    return (
        f"{place.file_system} on {place.source}, {direct}, {size_text(place.free_bytes)} free; "
        f"measured in a temporary store in {place.measured_in}"
    )


def _micros(latency_us: float) -> str:
    if latency_us < 1000:
        return f"{latency_us:.0f} us"
    return f"{latency_us / 1e3:.1f} ms" if latency_us < 1e6 else f"{latency_us / 1e6:.2f} s"
