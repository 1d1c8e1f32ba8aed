"""The figures of `kvtier bench io` as text, for the terminal and the report alike."""

from collections.abc import Iterator

from kvtier.bench.io import IoResult
from kvtier.bench.io_row import Latency, Row
from kvtier.config.kinds import size_text
from kvtier.plan.tables import Table

FROM_DEVICE = 0.9
"""Below this share of the loaded bytes something between us and the device gave the rest."""


def table(result: IoResult) -> Table:
    """One line for each row."""
    return Table(
        title=f"Medians of {result.repeats}; ceilings: memcpy for host, {result.ceiling} for the others",
        columns=(
            "tier", "op", "mix", "chunk", "threads", "GB/s", "ceiling", "ratio", "plain fio", "CPU s/GB", "p50", "p99",
        ),
        rows=tuple(_cells(row) for row in result.results),
        numeric=8,
        note=(
            "GB are 10^9 bytes. Every load is verified inside the timed part. p50 and p99 are times of one object in "
            "the thread that seals and writes, or reads and verifies it; in a mix, of loads."
        ),
    )  # fmt: skip


def notes(result: IoResult) -> Iterator[str]:
    """What one must know to believe the figures."""
    if result.cut_after_s is not None:
        yield (
            f"Cut after {result.cut_after_s:g} s: sizes or repeats are missing. --thorough takes as long as they need."
        )
    disk = [row for row in result.results if row.tier != "host"]
    if not all(row.direct_io for row in disk):
        yield "The file system there has no direct I/O: reads and writes go through the page cache."
    cached = [row for row in disk if row.device_share is not None and row.device_share < FROM_DEVICE]
    for row in cached:
        yield (
            f"{row.tier} {row.op} {size_text(row.chunk_bytes)}: only {row.device_share:.0%} of the bytes came from the "
            "device, the rest from a cache or from memory that is mounted as a disk."
        )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.tier,
        row.op,
        row.mix,
        size_text(row.chunk_bytes),
        str(row.threads),
        f"{row.gb_per_s:.2f}",
        f"{row.ceiling_gb_per_s:.2f}",
        f"{row.ratio:.2f}",
        f"{row.plain_gb_per_s:.2f}",
        f"{row.cpu_s_per_gb:.3f}",
        *_micros(row.latency_us),
    )


def _micros(latency: Latency | None) -> tuple[str, str]:
    if latency is None:
        return "-", "-"
    return f"{latency.p50:,.0f} us", f"{latency.p99:,.0f} us"
