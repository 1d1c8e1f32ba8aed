"""Builds the report of `kvtier characterize`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.report.format import NONE, bytes_text, digits, rate_text, share_text, time_text
from kvtier.report.table import Table
from kvtier.tools.characterize.io_trace import IoTrace, transfers
from kvtier.tools.characterize.measures import LASTS, IoMeasures, submitted_rows
from kvtier.tools.charts.chart import POINTS_MAX, Axis, Chart, Charts, Curve, Rule
from kvtier.tools.charts.report import PageSection, Report

PROCESSES_SHOWN = 12
WAYS = (("reads", "disk", False), ("writes", "tiered", True))
"""Name and color of reads and of writes, and the value of `is_write`."""
LAYER_COLOURS = ("shared", "gpu", "disk")


def io_report(trace: IoTrace, measures: IoMeasures) -> Report:
    """Build the report of the measures of a trace."""
    it = measures
    return Report(
        command="kvtier characterize",
        answer=_headline(it),
        sections=[
            PageSection(
                charts=partial(_charts, trace, it) if it.requests else dict,
                notes=list(notes(it)),
                tables=list(_tables(it)),
            )
        ],
        remark=f"{it.requests:,} requests; the lowest layer: {it.layer.replace('_', ' ')}; source: {it.source}.",
    )


def _headline(it: IoMeasures) -> str:
    if not it.requests:
        return f"No request of {it.seconds:.3g} s reached the {it.layer.replace('_', ' ')}"
    sequential = it.sequential_share["per_process"]
    if sequential is None:
        sequential = it.sequential_share["device"]
    return (
        f"{share_text(it.read_share_bytes)} reads; median request {bytes_text(it.request_bytes['p50'])}, "
        f"{share_text(it.request_bytes['share_of_bytes_over_1mb'])} of the bytes in requests over 1 MB; "
        f"{share_text(sequential)} sequential; "
        f"{rate_text(it.gb_per_s['mean'] * 1e9)}, {digits(it.queue_depth['submitted'])} in flight"
    )


def _tables(it: IoMeasures) -> Iterator[Table]:
    yield _main_table(it)
    if it.layers:
        yield _layers_table(it)
    if len(it.processes) > 1:
        yield _processes_table(it)


def _main_table(it: IoMeasures) -> Table:
    """Return the table of the lowest layer's figures."""
    depth, rate, sequential = it.queue_depth, it.gb_per_s, it.sequential_share
    moved = {name: bytes_text(count) for name, count in it.bytes.items()}
    peaks = ", ".join(
        f"{rate_text(peak * 1e9)} in {window}" for window, peak in it.peak_gb_per_s.items() if peak is not None
    )
    by_last = ", ".join(
        f"N = {last}: {share_text(it.sequential_by_last[str(last)]['device'])} and "
        f"{share_text(it.sequential_by_last[str(last)]['per_process'])}"
        for last in LASTS
    )
    back = f"; {it.counts['requeues']:,} times handed back" if it.counts.get("requeues") else ""
    waited = it.queue_to_driver_us
    rows = [
        ("requests", f"{it.requests:,} in {time_text(it.seconds)}; {share_text(it.busy_share)} of it busy"),
        ("reads", f"{share_text(it.read_share_bytes)} of bytes, {share_text(it.read_share_requests)} of requests"),
        (
            "bytes",
            (
                f"{moved['read']} read, {moved['written']} written; "
                f"{moved['read_again']} read again, {moved['written_again']} written again"
            ),
        ),
        (
            "sequential",
            f"{share_text(sequential['device'])} for the device, {share_text(sequential['per_process'])} per process",
        ),
        ("  by N", by_last),
        (
            "size",
            (
                f"p50 {bytes_text(it.request_bytes['p50'])}, p99 {bytes_text(it.request_bytes['p99'])}; "
                f"over 1 MB: {share_text(it.request_bytes['share_over_1mb'])} of them, "
                f"{share_text(it.request_bytes['share_of_bytes_over_1mb'])} of the bytes"
                + (f"; without {it.metadata:,} for metadata" if it.metadata else "")
            ),
        ),
        ("queue depth", _depth(it.submitted_depth or depth)),
        *([] if it.submitted_depth is None else [("  at the driver", _depth(depth) + back)]),
        ("throughput", f"mean {rate_text(rate['mean'] * 1e9)} ({rate_text(rate['busy_mean'] * 1e9)} while busy)"),
        ("  peaks", f"{peaks or NONE}; {NONE if it.burst_factor is None else digits(it.burst_factor)} times the mean"),
        *([] if waited is None else [("queue to driver", _latency(waited))]),
        ("latency" if waited is None else "driver to end", _latency(it.latency_us)),
        ("  reads", _latency(it.read_latency_us)),
        ("  writes", _latency(it.write_latency_us)),
        (
            "whole device",
            (
                f"{bytes_text(it.whole_device['read_bytes'])} read and "
                f"{bytes_text(it.whole_device['written_bytes'])} written by all processes and the kernel"
            ),
        ),
    ]
    if it.write_amplification is not None:
        rows.append(("amplification", f"{it.write_amplification:.2f} bytes reach the device for each byte written"))
    for device, facts in it.device_facts.items():
        rows.append((device, ", ".join(f"{name} {value}" for name, value in facts.items())))
    if not it.requests:
        rows = [row for row in rows if row[0] in {"whole device", *it.device_facts}]
    return Table(("", ""), rows, note=it.sequential_definition if it.requests else "")


def _layers_table(it: IoMeasures) -> Table:
    """Return the table of request sizes by layer, from the application downwards."""
    rows = [
        (
            name.replace("_", " "),
            f"{layer.requests:,}",
            bytes_text(layer.bytes),
            share_text(layer.read_share_bytes),
            bytes_text(layer.p50),
            bytes_text(layer.p99),
            share_text(layer.share_over_1mb),
        )
        for name, layer in it.layers.items()
    ]
    if it.counts.get("aio_requests"):
        unseen = "not seen"
        rows.insert(0, ("io_submit", f"{it.counts['aio_requests']:,}", unseen, unseen, unseen, unseen, unseen))
    others = {name: count for name, count in it.counts.items() if count and name != "aio_requests"}
    merged = "; ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in others.items())
    columns = ("layer", "requests", "bytes", "reads", "p50", "p99", "over 1 MB")
    return Table(columns, rows, numeric=6, title="Request sizes", note=merged)


def _processes_table(it: IoMeasures) -> Table:
    """Return the table of the processes that moved the most bytes."""
    rows = [
        (
            row.name,
            str(row.process or NONE),
            f"{row.requests:,}",
            bytes_text(row.read_bytes),
            bytes_text(row.written_bytes),
            share_text(row.sequential_share),
        )
        for row in it.processes[:PROCESSES_SHOWN]
    ]
    left = len(it.processes) - len(rows)
    columns = ("process", "id", "requests", "read", "written", "sequential")
    return Table(columns, rows, numeric=5, title="Processes", note=f"and {left} more" if left > 0 else "")


def notes(it: IoMeasures) -> Iterator[str]:
    """Yield notes on the limits of the figures."""
    written = it.not_attributed["written_bytes"]
    counts = (
        (
            it.lost_events,
            (
                "events were lost: requests are missing or without completion, and counts are too low. The capture did "
                "not keep up; measure a shorter time, or one device."
            ),
        ),
        (it.unfinished, "requests have no completion; depth and latency leave them out."),
        (
            written,
            (
                f"bytes ({bytes_text(written)}) were written by kernel threads, as writeback or journal. They belong "
                "to no process and count only for the whole device."
            ),
        ),
        (
            it.counts.get("aio_requests", 0),
            (
                "requests of io_submit are not among the application's: the kernel's event has no sizes. The row of "
                "the file system has them."
            ),
        ),
        (
            it.counts.get("calls_on_closed_files", 0),
            (
                "calls were on files that were closed at once, or whose process had ended; they count as calls on this "
                "device, though they may be on a pipe, another device or, with --dir, elsewhere."
            ),
        ),
    )
    yield from it.remarks
    yield from (f"{count:,} {text}" for count, text in counts if count)


def _depth(it: dict[str, float]) -> str:
    return f"mean {digits(it['mean'])} ({digits(it['busy_mean'])} while busy), peak {it['peak']:.0f}"


def _latency(it: dict[str, float]) -> str:
    if not it["max"]:
        return NONE
    return ", ".join(f"{name} {time_text(value / 1e6)}" for name, value in it.items())


def _charts(trace: IoTrace, it: IoMeasures) -> Charts:
    rows = transfers(trace.of_chosen(trace.at(trace.lowest)))
    over, drawn = it.over_time, rows[:: max(1, -(-len(rows) // POINTS_MAX))]
    ends = over.interval_s * np.arange(len(over.queue_depth) + 1)
    groups = list(_group_begins(it, drawn))
    of_size, of_time = Axis(label="bytes", is_log=True, text=bytes_text), Axis(label="s")
    return {
        "sizes": Chart(
            heading="Request sizes",
            marks=list(_sizes(trace.of_chosen(submitted_rows(trace)))),
            x=of_size,
            y=Axis(label="share of requests", least=0),
            caption="Share of all requests; two steps double the size.",
        ),
        "layers": Chart(
            heading="Sizes by layer",
            marks=list(_layers(trace)),
            x=of_size,
            y=Axis(label="share of bytes", least=0, most=1.02),
            caption="Share of the bytes in requests of at most this size.",
        ),
        "depth": Chart(
            heading="Queue depth over time",
            marks=[_steps(ends, over.queue_depth, "gpu"), Rule(at=it.queue_depth["submitted"])],
            x=of_time,
            y=Axis(label="requests in flight", least=0),
            caption="Mean of each interval, exact; dashed: over all time.",
        ),
        "throughput": Chart(
            heading="Throughput over time",
            marks=[
                _steps(ends, values, colour, name)
                for values, (name, colour, _) in zip((over.read_gb_per_s, over.write_gb_per_s), WAYS, strict=True)
            ],
            x=of_time,
            y=Axis(label="GB/s", least=0),
            caption="Reads and writes.",
        ),
        "latency": Chart(
            heading="Latency",
            marks=list(_latencies(rows)),
            x=Axis(label="us", is_log=True),
            y=Axis(label="share of requests", least=0, most=1),
            caption="Share of requests that took at most this long.",
        ),
        "addresses": Chart(
            heading="Addresses over time",
            marks=[
                Curve(x=of["issued_s"], y=of["position"] / 1e9, colour=colour, dash="", marker=".", label=name)
                for name, colour, is_write in WAYS
                if len(of := drawn[drawn["is_write"] == is_write])
            ]
            + [Rule(at=begin / 1e9, dash=":") for begin in groups],
            x=of_time,
            y=Axis(label="address, GB"),
            caption="One point for a request, or for every n-th."
            + (" Dotted: where the file system's allocation groups begin." if groups else ""),
        ),
    }


def _group_begins(it: IoMeasures, rows: np.ndarray) -> Iterator[int]:
    """Yield the start addresses of the allocation groups with requests."""
    facts = list(it.device_facts.values())
    for groups in facts[0].get("allocation_groups", ()) if len(facts) == 1 and len(rows) else ():
        size, begin = groups["bytes"], groups["begin"]
        last = (int(rows["position"].max()) - begin) // size + 1
        yield from (begin + group * size for group in range(min(last, groups["count"]) + 1))


def _steps(ends: npt.NDArray[Any], values: Sequence[float], colour: str, label: str = "") -> Curve:
    """Return a curve with the mean of each interval."""
    return Curve(x=ends, y=[*values, values[-1]], colour=colour, width=1.6, label=label, is_step=True)


def _sizes(rows: np.ndarray) -> Iterator[Curve]:
    sizes = rows["bytes"].astype(float)
    edges = np.exp2(np.arange(np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max() + 1)) + 0.5, 0.5))
    for name, colour, is_write in WAYS:
        of = sizes[rows["is_write"] == is_write]
        if len(of):
            share = [*(np.histogram(of, edges)[0] / len(sizes)), 0.0]
            yield Curve(
                x=edges,
                y=share,
                colour=colour,
                label=name,
                width=1.0,
                band=(np.zeros(len(edges)), share),
                band_alpha=0.6,
                is_step=True,
            )


def _layers(trace: IoTrace) -> Iterator[Curve]:
    for layer, colour in zip(trace.layers, LAYER_COLOURS, strict=False):
        sizes = np.sort(transfers(trace.of_chosen(trace.at(layer)))["bytes"])
        if len(sizes):
            steps, first = np.unique(sizes, return_index=True)
            share = np.append(np.cumsum(sizes)[first[1:] - 1], sizes.sum()) / sizes.sum()
            name = layer.name.lower().replace("_", " ")
            yield Curve(x=[steps[0], *steps], y=[0.0, *share], colour=colour, label=name, width=1.8, is_step=True)


def _latencies(rows: np.ndarray) -> Iterator[Curve]:
    for name, colour, is_write in WAYS:
        of = rows[rows["is_write"] == is_write]
        took = np.sort((of["completed_s"] - of["issued_s"])[~np.isnan(of["completed_s"])]) * 1e6
        if len(took):
            chosen = np.unique(np.linspace(0, len(took) - 1, min(len(took), 400)).astype(int))
            yield Curve(x=np.maximum(took[chosen], 1), y=(chosen + 1) / len(took), colour=colour, label=name)
