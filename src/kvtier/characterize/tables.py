"""The tables of `kvtier characterize`, for the terminal and for its report."""

from collections.abc import Iterator

from kvtier.characterize.measures import LASTS, IoMeasures
from kvtier.report.format import NONE, bytes_text, digits, rate_text, share_text, time_text
from kvtier.report.table import Table

PROCESSES_SHOWN = 12


def headline(it: IoMeasures) -> str:
    """The answer in one line."""
    if not it.requests:
        return f"No request of {it.seconds:.3g} s reached the {it.layer.replace('_', ' ')}"
    sequential = it.sequential_share["per_process"]
    if sequential is None:
        sequential = it.sequential_share["device"]
    return (
        f"{share_text(it.read_share_bytes)} reads; median request {bytes_text(it.request_bytes['p50'])}; "
        f"{share_text(sequential)} sequential; "
        f"{rate_text(it.gb_per_s['mean'] * 1e9)}, {digits(it.queue_depth['submitted'])} in flight"
    )


def tables(it: IoMeasures) -> Iterator[Table]:
    """All tables, the answer first."""
    yield main_table(it)
    if it.layers:
        yield layers_table(it)
    if len(it.processes) > 1:
        yield processes_table(it)


def main_table(it: IoMeasures) -> Table:
    """The figures of the lowest layer."""
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
                f"{share_text(it.request_bytes['share_over_1mb'])} over 1 MB"
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
        kept = {"whole device", *it.device_facts}
        return Table(("", ""), [row for row in rows if row[0] in kept], title=headline(it))
    return Table(("", ""), rows, title=headline(it), note=it.sequential_definition)


def layers_table(it: IoMeasures) -> Table:
    """Sizes from the application down."""
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


def processes_table(it: IoMeasures) -> Table:
    """The processes that moved most."""
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
    """What limits the figures."""
    yield from it.remarks
    if it.lost_events:
        yield (
            f"{it.lost_events:,} events were lost: requests are missing or without completion, and counts are too low. "
            "The capture did not keep up; measure a shorter time, or one device."
        )
    if it.unfinished:
        yield f"{it.unfinished:,} requests have no completion; depth and latency leave them out."
    if it.not_attributed["written_bytes"]:
        written = bytes_text(it.not_attributed["written_bytes"])
        yield (
            f"{written} were written by kernel threads, as writeback or journal. They belong to no process and count "
            "only for the whole device."
        )
    if it.counts.get("aio_requests"):
        yield (
            f"{it.counts['aio_requests']:,} requests of io_submit are not among the application's: the kernel's event "
            "has no sizes. The row of the file system has them."
        )
    if it.counts.get("calls_on_closed_files"):
        yield (
            f"{it.counts['calls_on_closed_files']:,} calls were on files that were closed at once, or whose process "
            "had ended; they count as calls on this device, though they may be on a pipe or another device."
        )


def _depth(it: dict[str, float]) -> str:
    return f"mean {digits(it['mean'])} ({digits(it['busy_mean'])} while busy), peak {it['peak']:.0f}"


def _latency(it: dict[str, float]) -> str:
    if not it["max"]:
        return NONE
    return ", ".join(f"{name} {time_text(value / 1e6)}" for name, value in it.items())
