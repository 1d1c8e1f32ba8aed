"""Builds the report of `kvtier probe`."""

from collections.abc import Callable, Iterator
from functools import partial

from kvtier.config.value_types import size_text
from kvtier.report.format import binary, time_text
from kvtier.report.table import Table
from kvtier.tools.charts.chart import DASHED, Axis, Chart, Charts, Curve, few
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.probe.links import CodecRead, Measure
from kvtier.tools.probe.run import ProbeResult
from kvtier.tools.probe.tiers import TierFacts

COLOURS = {"host": "host", "gpu": "gpu", "directory": "shared", "disk": "disk"}
"""Colors of the links. Other tiers share one color, and other links are not drawn."""


def probe_report(result: ProbeResult) -> Report:
    """Build the report of a probe."""
    best = [
        f"{link.name} {op.replace('_', ' ')} {it.gb_per_s:.2f} GB/s"
        for link in result.links
        for op in ("copy", "to_gpu", "read", "write", "hash")
        if (it := link.best(op)) is not None
    ]
    facts = [
        *(
            (f"{link.name}, lookup", f"an absent name takes {time_text(link.round_trip_us / 1e6)}")
            for link in result.links
            if link.round_trip_us is not None
        ),
        *((f"{it.tier}, codec {it.codec}", _codec_text(it)) for it in result.codec_reads),
        *((it.tier, _place_text(it)) for it in result.places),
        *(("not measured", it) for it in result.skipped),
    ]
    return Report(
        command="kvtier probe",
        answer=f"At its best: {', '.join(best)}" if best else "Nothing was measured",
        sections=[
            PageSection(
                texts=[] if result.warnings else ["No misconfiguration found."],
                problems=result.warnings,
                charts=partial(_charts, result),
                tables=[_table(result), *([Table(("", ""), facts)] if facts else [])],
            )
        ],
        remark=f"{result.bounds}.",
    )


def _table(result: ProbeResult) -> Table:
    rows = tuple(
        (
            link.name,
            it.op,
            size_text(it.bytes),
            str(it.depth),
            f"{it.gb_per_s:.2f}",
            time_text(it.latency_us_p50 / 1e6),
            time_text(it.latency_us_p99 / 1e6),
        )
        for link in result.links
        for it in link.measures
    )
    return Table(
        columns=("link", "op", "size", "depth", "GB/s", "p50", "p99"),
        rows=rows,
        numeric=5,
        note=(
            "GB are 10^9 bytes; depth is the number of concurrent operations, each in a thread of its own; p50 and p99 "
            "are times of one operation at that depth."
        ),
    )


def _place_text(place: TierFacts) -> str:
    direct = "no direct I/O"
    if place.alignment_bytes is not None:
        used = "used" if place.direct_io else "not used"
        direct = f"direct I/O {used}, aligned to {place.alignment_bytes} bytes"
    return (
        f"{place.file_system} on {place.source}, {direct}, {size_text(place.free_bytes)} free; "
        f"measured in a temporary store in {place.measured_in}"
    )


def _codec_text(it: CodecRead) -> str:
    gain = it.coded_gb_per_s / it.raw_gb_per_s
    return (
        f"{'coded' if gain > 1 else 'raw'} is {max(gain, 1 / gain) - 1:.0%} faster to read: raw {it.raw_gb_per_s:.2f} "
        f"GB/s, coded {it.coded_gb_per_s:.2f} GB/s"
    )


def _charts(result: ProbeResult) -> Charts:
    sizes = few({it.bytes for _, _, measures in _series(result) for it in measures})
    size = Axis(label="size of an operation", is_log=True, text=binary, ticks=sizes)
    return {
        "rates": Chart(
            heading="Bandwidth",
            marks=list(_curves(result, lambda it: -it.gb_per_s, ("gb_per_s", "gb_per_s"))),
            x=size,
            y=Axis(label="GB/s, at the best depth", is_log=True),
        ),
        "latencies": Chart(
            heading="Latency of one operation",
            marks=list(_curves(result, lambda it: it.depth, ("latency_us_p50", "latency_us_p99"))),
            x=size,
            y=Axis(label="microseconds, one operation; band: up to p99", is_log=True),
        ),
    }


def _curves(result: ProbeResult, cost: Callable[[Measure], float], names: tuple[str, str]) -> Iterator[Curve]:
    """Yield a curve over sizes for each link and operation. At each size, the depth with the least `cost` counts.

    `names` holds the fields for the curve and for the upper end of its band.
    """
    for link, op, measures in _series(result):
        sizes = sorted({it.bytes for it in measures})
        least = [min((it for it in measures if it.bytes == size), key=cost) for size in sizes]
        low, high = ([getattr(it, name) for it in least] for name in names)
        yield Curve(
            x=[it.bytes for it in least],
            y=low,
            band=(low, high),
            colour=COLOURS.get(link, "tiered"),
            dash=DASHED if op in ("write", "from_gpu") else "-",
            marker="o",
            label=f"{link} {op.replace('_', ' ')}",
        )


def _series(result: ProbeResult) -> Iterator[tuple[str, str, list[Measure]]]:
    for link in result.links:
        if link.name in COLOURS or any(it.op == "read" for it in link.measures):
            for op in dict.fromkeys(it.op for it in link.measures if not it.op.endswith("pageable")):
                yield link.name, op, [it for it in link.measures if it.op == op]
