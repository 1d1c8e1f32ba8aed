"""What an `IoTrace` measures: mix, sequential share, sizes, depth, throughput, latency, and bytes read again."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.characterize.events import NO_PROCESS, IoKind, IoLayer, IoTrace, transfers
from kvtier.characterize.steps import Steps

MB = 1_000_000
WITHIN_BYTES = 64 << 10
"""W: how far behind the end of an earlier request a sequential one may start."""
LAST = 8
"""N: how many earlier requests are looked at."""
LASTS = (1, 8, 32)
"""Values of N that are shown beside each other."""
WINDOWS_S = {"1ms": 1e-3, "100ms": 0.1, "1s": 1.0}
"""Lengths of the windows of the peak throughput; they follow each other without overlap."""
PEAK = "100ms"
"""The window of `gb_per_s.peak`."""
BINS = 120
"""Points of what is shown over time."""
WINDOWS_MAX = 20_000_000
DOUBTFUL_SHARE = 0.01
"""Share of the written bytes. If more of them went to what may not be files, the amplification is unknown."""
SEQUENTIAL = (
    f"A request is sequential if it begins at most {WITHIN_BYTES >> 10} KiB after the end of one of the last N "
    f"requests of its process (or of its device), in the same direction. N is {LAST}. The first is not."
)
NO_TIMES = "All requests are at one moment: throughput, depth and shares of time are unknown, and 0 here."
_PLACE_SHIFT = 52
"""Bits of a position in bytes, below the number of its place."""


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """The requests of one layer."""

    requests: int
    bytes: int
    p50: int
    """Size of the middle request in bytes."""
    p99: int
    share_over_1mb: float
    read_share_bytes: float | None


@dataclass(frozen=True, slots=True)
class ProcessMeasures:
    """The requests of one process, as it submitted them."""

    process: int
    name: str
    requests: int
    read_bytes: int
    written_bytes: int
    sequential_share: float


@dataclass(frozen=True, slots=True)
class OverTime:
    """Means of equal intervals; the depth is that of what was submitted, if that was seen."""

    interval_s: float
    queue_depth: list[float]
    read_gb_per_s: list[float]
    write_gb_per_s: list[float]


@dataclass(frozen=True)
class IoMeasures:
    """All measures; the fields are the keys of the command's JSON. Shares are of 1, or None without requests.

    Unless a name says otherwise they are those of the chosen processes' requests at the lowest layer that was seen.
    Requests, their sizes and what is sequential are those that were submitted, if bios were seen: the block layer
    splits and merges them on their way to the device.
    """

    source: str
    layer: str
    """The lowest layer that was seen."""
    seconds: float
    requests: int
    read_share_bytes: float | None
    read_share_requests: float | None
    sequential_share: dict[str, float | None]
    """``device``: among all requests of the device. ``per_process``: among those of each process, over all of them."""
    sequential_by_last: dict[str, dict[str, float | None]]
    """The same for other numbers N of earlier requests."""
    sequential_definition: str
    request_bytes: dict[str, float]
    """Sizes of requests for data; those for metadata are left out."""
    layers: dict[str, LayerMeasures]
    queue_depth: dict[str, float]
    """Depth of the device: ``mean`` over all seconds, ``peak``, and ``busy_mean`` over those with a request in flight.
    ``submitted``: the mean of requests from submission to completion; that of the device if nothing above was seen."""
    submitted_depth: dict[str, float] | None
    """``mean``, ``peak`` and ``busy_mean`` of bios from submission to completion: with those that wait in the
    scheduler, or for a full driver. None if no completed bio was seen."""
    busy_share: float
    """Share of the time with at least one request in flight."""
    gb_per_s: dict[str, float]
    """``mean``, ``peak`` (of 100 ms), and ``busy_mean``."""
    peak_gb_per_s: dict[str, float | None]
    """Throughput in windows of each length; None if less was observed."""
    burst_factor: float | None
    """Peak over mean."""
    queue_to_driver_us: dict[str, float] | None
    """From submission until the driver gets the request, or the last part of it; None if bios were not seen."""
    latency_us: dict[str, float]
    """From the driver to completion. A driver that hands a request back has it from the first time on."""
    read_latency_us: dict[str, float]
    write_latency_us: dict[str, float]
    bytes: dict[str, int]
    """``read``, ``written``, and of them ``read_again`` and ``written_again``: addresses that were moved before."""
    write_amplification: float | None
    """Bytes that all processes and the kernel wrote to the device, over those that the application wrote. None if they
    are unknown, as those of `io_submit` are, or those of files that are closed at once."""
    whole_device: dict[str, Any]
    """``read_share_bytes``, ``requests``, ``read_bytes``, ``written_bytes`` of all processes and of the kernel."""
    not_attributed: dict[str, int]
    """Requests and written bytes that belong to no process: writeback by kernel threads."""
    metadata: int
    """Requests of the file system's own; they are among `requests`, and not in `request_bytes`."""
    flushes: int
    discards: int
    unfinished: int
    """Requests without a completion."""
    counts: dict[str, int]
    lost_events: int
    processes: list[ProcessMeasures]
    device_facts: dict[str, Any]
    over_time: OverTime
    remarks: list[str] = field(default_factory=list[str])


def measure(trace: IoTrace) -> IoMeasures:
    """All measures of a trace; without requests counts are 0 and shares None."""
    lowest = trace.lowest
    every = trace.at(lowest)
    chosen = trace.of_chosen(every)
    rows = transfers(chosen)
    all_rows = transfers(every)
    timed = rows if trace.seconds > 0 else rows[:0]
    asked_of_all = submitted_rows(trace)
    asked = trace.of_chosen(asked_of_all)
    is_above = len(asked_of_all) > 0 and asked_of_all["layer"][0] != lowest
    depth, rate = Steps.depth(timed), Steps.rate(timed)
    submitted = Steps.depth(asked if trace.seconds > 0 else asked[:0])
    has_submitted = is_above and submitted.total > 0
    depths = _depth(depth, trace.seconds)
    peaks = {name: _peak(rate, window, trace.seconds) for name, window in WINDOWS_S.items()}
    moved = int(rows["bytes"].sum())
    mean = _per(moved, trace.seconds) / 1e9
    busy_s = max(depth.busy_s, 1e-9)
    busy_mean = moved / busy_s / 1e9 if depth.total else mean
    peak = peaks[PEAK]
    peak = busy_mean if peak is None else peak
    reads, writes = rows[~rows["is_write"]], rows[rows["is_write"]]
    by_last = {str(last): _sequential_shares(asked_of_all, asked, last) for last in LASTS}
    unowned = all_rows[all_rows["process"] == NO_PROCESS]
    return IoMeasures(
        source=trace.source,
        layer=lowest.name.lower(),
        seconds=trace.seconds,
        requests=len(asked),
        read_share_bytes=_share(int(reads["bytes"].sum()), moved),
        read_share_requests=_share(int(np.count_nonzero(~asked["is_write"])), len(asked)),
        sequential_share=by_last[str(LAST)],
        sequential_by_last=by_last,
        sequential_definition=SEQUENTIAL,
        request_bytes=_sizes(asked),
        layers={layer.name.lower(): _layer(transfers(trace.of_chosen(trace.at(layer)))) for layer in trace.layers},
        queue_depth=depths | {"submitted": _per(submitted.total, trace.seconds) if has_submitted else depths["mean"]},
        submitted_depth=_depth(submitted, trace.seconds) if has_submitted else None,
        busy_share=min(1.0, _per(depth.busy_s, trace.seconds)),
        gb_per_s={"mean": mean, "peak": peak, "busy_mean": busy_mean},
        peak_gb_per_s=peaks,
        burst_factor=peak / mean if mean else None,
        queue_to_driver_us=_percentiles(asked["driver_s"] - asked["issued_s"]) if is_above else None,
        latency_us=_latency(rows),
        read_latency_us=_latency(reads),
        write_latency_us=_latency(writes),
        bytes={
            "read": int(reads["bytes"].sum()),
            "written": int(writes["bytes"].sum()),
            "read_again": _again(reads),
            "written_again": _again(writes),
        },
        write_amplification=_write_amplification(trace, all_rows),
        whole_device=_whole(all_rows),
        not_attributed={
            "requests": len(unowned) if trace.chosen is not None else 0,
            "written_bytes": int(unowned["bytes"][unowned["is_write"]].sum()) if trace.chosen is not None else 0,
        },
        metadata=int(np.count_nonzero(asked["kind"] == IoKind.METADATA)),
        flushes=int(np.count_nonzero(chosen["kind"] == IoKind.FLUSH)),
        discards=int(np.count_nonzero(chosen["kind"] == IoKind.DISCARD)),
        unfinished=int(np.count_nonzero(np.isnan(rows["completed_s"]))),
        counts=dict(trace.counts),
        lost_events=trace.lost_events,
        processes=_processes(trace, asked),
        device_facts={name: dict(facts) for name, facts in trace.device_facts.items()},
        over_time=_over_time(timed, submitted if has_submitted else depth, trace.seconds),
        remarks=[*trace.remarks, *([] if trace.seconds > 0 else [NO_TIMES])],
    )


def submitted_rows(trace: IoTrace) -> np.ndarray:
    """The requests of all processes as they were submitted, before the block layer split and merged them.

    Bios above the device; without any the requests of the lowest layer.
    """
    bios = transfers(trace.at(IoLayer.FILE_SYSTEM)) if trace.lowest is IoLayer.DEVICE else trace.requests[:0]
    return bios if len(bios) else transfers(trace.at(trace.lowest))


def is_sequential(rows: np.ndarray, last: int = LAST, *, per_process: bool, within: int = WITHIN_BYTES) -> np.ndarray:
    """Which requests are sequential, see `SEQUENTIAL`.

    Args:
        rows: requests of one layer in the order of their issue.
        last: how many earlier requests of the same stream are looked at.
        per_process: a stream is a process on a device; otherwise a device.
        within: bytes that may be skipped.
    """
    stream = np.zeros(len(rows), rows["process"].dtype) if not per_process else rows["process"]
    order = np.lexsort((stream, rows["place"]))  # stable: within a stream the order of issue remains
    sorted_ = rows[order]
    stream, place = stream[order], sorted_["place"]
    start = sorted_["position"].astype(np.int64)
    end = start + sorted_["bytes"].astype(np.int64)
    found = np.zeros(len(rows), bool)
    for back in range(1, min(last, len(rows) - 1) + 1):
        skipped = start[back:] - end[:-back]
        found[back:] |= (
            (stream[back:] == stream[:-back])
            & (place[back:] == place[:-back])
            & (sorted_["is_write"][back:] == sorted_["is_write"][:-back])
            & (skipped >= 0)
            & (skipped <= within)
        )
    result = np.zeros(len(rows), bool)
    result[order] = found
    return result


def _sequential_shares(all_rows: np.ndarray, rows: np.ndarray, last: int) -> dict[str, float | None]:
    """For the device all requests count, of any process; per process those of the measured processes."""
    own = rows[rows["process"] != NO_PROCESS]
    return {
        "device": float(is_sequential(all_rows, last, per_process=False).mean()) if len(all_rows) else None,
        "per_process": float(is_sequential(own, last, per_process=True).mean()) if len(own) else None,
    }


def _sizes(rows: np.ndarray) -> dict[str, float]:
    """Sizes of data. Metadata are small and many, and no object's; they count only where there is nothing else."""
    data = rows[rows["kind"] != IoKind.METADATA]
    rows = data if len(data) else rows
    return {
        "p50": _percentile(rows["bytes"], 50),
        "p99": _percentile(rows["bytes"], 99),
        "share_over_1mb": float((rows["bytes"] > MB).mean()) if len(rows) else 0.0,
        "share_of_bytes_over_1mb": float(rows["bytes"][rows["bytes"] > MB].sum() / max(1, rows["bytes"].sum())),
    }


def _layer(rows: np.ndarray) -> LayerMeasures:
    sizes, total = _sizes(rows), int(rows["bytes"].sum())
    reads = int(rows["bytes"][~rows["is_write"]].sum())
    return LayerMeasures(
        len(rows), total, int(sizes["p50"]), int(sizes["p99"]), sizes["share_over_1mb"], _share(reads, total)
    )


def _depth(depth: Steps, seconds: float) -> dict[str, float]:
    return {"mean": _per(depth.total, seconds), "peak": depth.peak, "busy_mean": depth.total / max(depth.busy_s, 1e-9)}


def _latency(rows: np.ndarray) -> dict[str, float]:
    return _percentiles(rows["completed_s"] - rows["issued_s"])


def _percentiles(took_s: np.ndarray) -> dict[str, float]:
    """Quantiles of the known times, in us."""
    took = took_s[~np.isnan(took_s)] * 1e6
    return {name: _percentile(took, of) for name, of in (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100))}


def _percentile(values: np.ndarray, percent: float) -> float:
    """A value that occurs; 0 without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else 0.0


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _peak(rate: Steps, window_s: float, seconds: float) -> float | None:
    count = int(seconds / window_s)
    if not 1 <= count <= WINDOWS_MAX:
        return None
    return float(rate.means(np.arange(count + 1) * window_s).max()) / 1e9


def _again(rows: np.ndarray) -> int:
    """Bytes of addresses that another of `rows` has, too, counted each time but once."""
    if not len(rows):
        return 0
    _, place = np.unique(rows["place"], return_inverse=True)
    start = (place.astype(np.int64) << _PLACE_SHIFT) + rows["position"].astype(np.int64)
    order = np.argsort(start, kind="stable")
    start = start[order]
    reach = np.maximum.accumulate(start + rows["bytes"][order].astype(np.int64))
    begin = np.concatenate([start[:1], np.maximum(start[1:], reach[:-1])])
    return int(rows["bytes"].sum()) - int(np.maximum(reach - begin, 0).sum())


def _write_amplification(trace: IoTrace, all_rows: np.ndarray) -> float | None:
    asked = transfers(trace.of_chosen(trace.at(IoLayer.APPLICATION)))
    asked_bytes = int(asked["bytes"][asked["is_write"]].sum())
    doubtful = trace.counts.get("bytes_written_to_closed_files", 0) > DOUBTFUL_SHARE * asked_bytes
    if trace.lowest is not IoLayer.DEVICE or not asked_bytes or doubtful or trace.counts.get("aio_requests"):
        return None
    return int(all_rows["bytes"][all_rows["is_write"]].sum()) / asked_bytes


def _whole(rows: np.ndarray) -> dict[str, Any]:
    reads = int(rows["bytes"][~rows["is_write"]].sum())
    total = int(rows["bytes"].sum())
    return {
        "requests": len(rows),
        "read_share_bytes": _share(reads, total),
        "read_bytes": reads,
        "written_bytes": total - reads,
    }


def _processes(trace: IoTrace, rows: np.ndarray) -> list[ProcessMeasures]:
    found: list[ProcessMeasures] = []
    sequential = is_sequential(rows, per_process=True)
    for process in np.unique(rows["process"]).tolist():
        here = rows["process"] == process
        own = rows[here]
        reads = int(own["bytes"][~own["is_write"]].sum())
        name = trace.processes.get(process, "kernel threads, or unknown" if process == NO_PROCESS else str(process))
        written = int(own["bytes"].sum()) - reads
        found.append(ProcessMeasures(process, name, len(own), reads, written, float(sequential[here].mean())))
    return sorted(found, key=lambda it: -(it.read_bytes + it.written_bytes))


def _over_time(rows: np.ndarray, depth: Steps, seconds: float) -> OverTime:
    edges = np.linspace(0.0, seconds or 1.0, BINS + 1)
    rates = [Steps.rate(rows[rows["is_write"] == is_write]).means(edges) / 1e9 for is_write in (False, True)]
    return OverTime(seconds / BINS, depth.means(edges).tolist(), rates[0].tolist(), rates[1].tolist())
