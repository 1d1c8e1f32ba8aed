"""Makes the report of `kvtier bench io`."""

from collections.abc import Iterator
from functools import partial

from kvtier.config.value_types import size_text
from kvtier.report.format import NONE, binary, time_text
from kvtier.report.table import Table
from kvtier.tools.bench.io import IoResult, IoRow
from kvtier.tools.bench.repeats import ratio_text
from kvtier.tools.charts.chart import Axis, Chart, Charts, Curve, Rule, few
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.run_record import machine

OPS = {"store": "Store", "load": "Cold load, verified", "mix": "Reads and writes mixed"}
CAPTION = "Share of the ceiling; dots are single repeats, lines their medians."
COLOURS = {"host": "host", "directory": "shared", "disk": "disk"}
FROM_DEVICE = 0.9
"""If the device delivers a smaller share of the loaded bytes, a note says that a cache served the rest."""
IMPOSSIBLE = 1.25
"""A figure above this multiple of the ceiling shows that the ceiling is wrong. Noise explains smaller excesses."""


def io_report(result: IoResult) -> Report:
    """Build the report of a result."""
    facts = machine()
    found: dict[str, list[float]] = {}
    for row in (it for it in result.results if it.ratio <= IMPOSSIBLE):
        found.setdefault(f"{row.tier} {row.op}", []).append(row.ratio)
    spans = [f"{name} {min(ratios):.2f} to {max(ratios):.2f}" for name, ratios in found.items()]
    if left := sum(row.ratio > IMPOSSIBLE for row in result.results):
        spans.append(f"not counted: {left} of {len(result.results)} figures, which exceed the limit")
    return Report(
        command="kvtier bench io",
        answer=f"Shares of the hardware's limit, by chunk: {', '.join(spans)}",
        sections=[
            PageSection(charts=partial(_charts, result), notes=list(notes(result)), tables=[_table(result)]),
        ],
        remark=f"{facts['processor']}, {facts['cores']} cores; samples of {size_text(result.bytes_per_sample)}, "
        f"medians of {result.repeats}.",
    )


def _table(result: IoResult) -> Table:
    return Table(
        title=f"Medians of {result.repeats}; ceilings: memcpy for host, {result.ceiling} for the others",
        columns=(
            "tier", "op", "mix", "chunk", "threads", "GB/s", "ceiling", "ratio", "plain fio", "CPU s/GB", "p50", "p99",
        ),
        rows=tuple(_cells(row) for row in result.results),
        numeric=8,
        note=(
            "GB are 10^9 bytes. Every load is verified inside the timed part. p50 and p99 are times of one object: "
            "seal and write, or read and verify; in a mix, of loads."
        ),
    )  # fmt: skip


def notes(result: IoResult) -> Iterator[str]:
    """Yield the conditions that limit what the figures mean."""
    if result.cut_after_s is not None:
        yield (f"Cut after {result.cut_after_s:g} s: sizes or repeats are missing. --thorough has no deadline.")
    yield from result.warnings
    yield from (
        f"{row.tier} {row.op} {size_text(row.chunk_bytes)}: {row.ratio:.2f} of the limit is impossible. Either the "
        f"limit's own measure was slowed down ({row.ceiling_gb_per_s:.2f} GB/s), or a cache served {row.tier}. "
        "Measure again on an idle machine, with a larger --sample."
        for row in result.results
        if row.ratio > IMPOSSIBLE
    )
    disk = [row for row in result.results if row.tier != "host"]
    if not all(row.direct_io for row in disk):
        yield "The file system has no direct I/O: reads and writes go through the page cache."
    cached = [row for row in disk if row.device_share is not None and row.device_share < FROM_DEVICE]
    for row in cached:
        yield (
            f"{row.tier} {row.op} {size_text(row.chunk_bytes)}: only {row.device_share:.0%} of the bytes came from the "
            "device; a cache, or memory mounted as a disk, served the rest."
        )


def _cells(row: IoRow) -> tuple[str, ...]:
    return (
        row.tier,
        row.op,
        row.mix,
        size_text(row.chunk_bytes),
        str(row.threads),
        f"{row.gb_per_s:.2f}",
        f"{row.ceiling_gb_per_s:.2f}",
        ratio_text(row.ratio, row.ratio_span),
        f"{row.plain_gb_per_s:.2f}",
        f"{row.cpu_s_per_gb:.3f}",
        NONE if row.latency_us is None else time_text(row.latency_us.p50 / 1e6),
        NONE if row.latency_us is None else time_text(row.latency_us.p99 / 1e6),
    )


def _charts(result: IoResult) -> Charts:
    by_op = {op: [row for row in result.results if row.op == op] for op in OPS}
    return {
        op: Chart(
            heading=OPS[op],
            marks=[*_curves(rows), Rule(at=1.0)],
            x=Axis(label="chunk", is_log=True, text=binary, ticks=few({row.chunk_bytes for row in rows})),
            y=Axis(label="of the ceiling", least=0),
            caption=CAPTION,
        )
        for op, rows in by_op.items()
        if rows
    }


def _curves(rows: list[IoRow]) -> Iterator[Curve]:
    lines: dict[str, list[IoRow]] = {}
    for row in sorted(rows, key=lambda it: it.chunk_bytes):
        lines.setdefault(_line_name(rows, row), []).append(row)
    for name, chosen in lines.items():
        colour = COLOURS.get(chosen[0].tier, "tiered")
        yield Curve(x=[it.chunk_bytes for it in chosen], y=[it.ratio for it in chosen], colour=colour, label=name)
        for row in chosen:
            shares = [ours / ceiling for ours, ceiling, _ in row.samples]
            yield Curve(x=[row.chunk_bytes] * len(shares), y=shares, colour=colour, dash="", marker="o", alpha=0.5)


def _line_name(rows: list[IoRow], row: IoRow) -> str:
    """Return a curve's label: the tier, the mix, and the number of threads if nothing else tells rows apart."""
    alike = [it for it in rows if (it.tier, it.mix, it.chunk_bytes) == (row.tier, row.mix, row.chunk_bytes)]
    threads = f" {row.threads} threads" if len(alike) > 1 else ""
    return f"{row.tier}{f' {row.mix}' if row.op == 'mix' else ''}{threads}"
