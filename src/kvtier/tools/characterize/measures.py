"""Measures an `IoTrace`: mix, sequential share, sizes, depth, throughput, latency, and bytes read again.

Step functions over time give requests in flight and the rate of bytes exactly, without sampling.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kvtier.tools.characterize.io_trace import NO_PROCESS, IoKind, IoLayer, IoTrace, transfers

INSTANT_S = 1e-6
"""Duration of a request whose source gives no duration or a shorter one."""


class Steps:
    """A quantity that is constant between moments of change.

    Args:
        begin: start of each contribution, in seconds.
        end: end of each contribution, in seconds.
        weight: amount that each contribution adds in between.
    """

    def __init__(self, begin: np.ndarray, end: np.ndarray, weight: np.ndarray) -> None:
        times = np.concatenate([begin, end])
        change = np.concatenate([weight, -weight]).astype(np.float64)
        # Ends come before simultaneous starts: a request that is issued when another completes does not overlap it.
        order = np.lexsort((change, times))
        self._times = times[order]
        self._values = np.cumsum(change[order])
        spans = np.diff(self._times)
        self._integral = np.concatenate([[0.0], np.cumsum(self._values[:-1] * spans)]) if len(times) else np.zeros(0)
        self._spans = spans

    @classmethod
    def depth(cls, rows: np.ndarray) -> Self:
        """Count requests in flight. Requests without a completion are left out."""
        rows = rows[~np.isnan(rows["completed_s"])]
        return cls(rows["issued_s"], _end(rows), np.ones(len(rows)))

    @classmethod
    def rate(cls, rows: np.ndarray) -> Self:
        """Compute bytes per second, if each request moves its bytes evenly from issue to completion."""
        end = _end(rows)
        return cls(rows["issued_s"], end, rows["bytes"] / (end - rows["issued_s"]))

    @property
    def peak(self) -> float:
        """Return the highest value at any moment."""
        return float(self._values.max()) if len(self._values) else 0.0

    @property
    def busy_s(self) -> float:
        """Return the seconds for which the quantity was above 0."""
        return float(self._spans[self._values[:-1] > 0.5].sum()) if len(self._values) else 0.0

    @property
    def total(self) -> float:
        """Return the integral over all time."""
        return float(self._integral[-1]) if len(self._integral) else 0.0

    def means(self, edges: np.ndarray) -> np.ndarray:
        """Return the mean value between adjacent `edges`, which are in seconds."""
        if not len(self._times):
            return np.zeros(len(edges) - 1)
        return np.diff(np.interp(edges, self._times, self._integral)) / np.diff(edges)


def _end(rows: np.ndarray) -> np.ndarray:
    end = np.where(np.isnan(rows["completed_s"]), rows["issued_s"], rows["completed_s"])
    return np.maximum(end, rows["issued_s"] + INSTANT_S)


MB = 1_000_000
WITHIN_BYTES = 64 << 10
"""Most bytes between the end of an earlier request and the start of a sequential one."""
LAST = 8
"""N in `SEQUENTIAL`: number of earlier requests that are considered."""
LASTS = (1, 8, 32)
"""Values of N whose results are shown together."""
WINDOWS_S = {"1ms": 1e-3, "100ms": 0.1, "1s": 1.0}
"""Lengths of the windows for peak throughput. Windows do not overlap."""
PEAK = "100ms"
"""The window for ``peak`` in `IoMeasures.gb_per_s`."""
BINS = 120
"""Number of points in figures over time."""
WINDOWS_MAX = 20_000_000
DOUBTFUL_SHARE = 0.01
"""If more than this share of the written bytes may not be in files, the write amplification is unknown."""
SEQUENTIAL = (
    f"A request is sequential if it begins at most {WITHIN_BYTES >> 10} KiB after the end of one of the last N "
    f"requests of its process (or of its device), in the same direction. N is {LAST}. The first is not."
)
NO_TIMES = "All requests have the same time: throughput, depth and shares of time are unknown, and shown as 0."
_PLACE_SHIFT = 52
"""Bits of a position in bytes. The number of the place is above them."""


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """The requests of one layer."""

    requests: int
    bytes: int
    p50: int
    """Median size of a request in bytes."""
    p99: int
    share_over_1mb: float
    read_share_bytes: float | None


@dataclass(frozen=True, slots=True)
class ProcessMeasures:
    """The requests of one process at submission."""

    process: int
    name: str
    requests: int
    read_bytes: int
    written_bytes: int
    sequential_share: float


@dataclass(frozen=True, slots=True)
class OverTime:
    """Means over equal intervals. The depth counts submitted requests if they were seen."""

    interval_s: float
    queue_depth: list[float]
    read_gb_per_s: list[float]
    write_gb_per_s: list[float]


@dataclass(frozen=True)
class IoMeasures:
    """All measures. The fields are the keys of the command's JSON. Shares are 0 to 1, or None without requests.

    Unless a name says otherwise, fields measure the chosen processes' requests at the lowest layer that was seen. The
    block layer splits and merges requests on their way to the device. So the number and sizes of requests and the
    sequential shares are those at submission, if bios were seen.
    """

    source: str
    layer: str
    """The lowest layer that was seen."""
    seconds: float
    requests: int
    read_share_bytes: float | None
    read_share_requests: float | None
    sequential_share: dict[str, float | None]
    """``device`` compares a request with all requests of the device, ``per_process`` only with those of its process."""
    sequential_by_last: dict[str, dict[str, float | None]]
    """`sequential_share` for other numbers N of earlier requests."""
    sequential_definition: str
    request_bytes: dict[str, float]
    """Sizes in bytes of requests for data, without requests for metadata."""
    layers: dict[str, LayerMeasures]
    queue_depth: dict[str, float]
    """Depth of the device: ``mean`` over all time, ``peak``, and ``busy_mean`` over the time with a request in flight.
    ``submitted``: the mean of requests from submission to completion, or of the device if nothing above was seen."""
    submitted_depth: dict[str, float] | None
    """``mean``, ``peak`` and ``busy_mean`` of bios from submission to completion. They include bios that wait in the
    scheduler or for a full driver. None if no completed bio was seen."""
    busy_share: float
    """Share of the time with at least one request in flight."""
    gb_per_s: dict[str, float]
    """Throughput as ``mean``, ``peak`` (over 100 ms) and ``busy_mean``."""
    peak_gb_per_s: dict[str, float | None]
    """Peak throughput in windows of each length; None if less time was observed."""
    burst_factor: float | None
    """Peak throughput divided by mean throughput."""
    queue_to_driver_us: dict[str, float] | None
    """Time from submission until the driver gets the request or its last part; None if bios were not seen."""
    latency_us: dict[str, float]
    """Time from arrival at the driver to completion. If the driver hands a request back, the first arrival counts."""
    read_latency_us: dict[str, float]
    write_latency_us: dict[str, float]
    bytes: dict[str, int]
    """``read`` and ``written``. The parts ``read_again`` and ``written_again`` repeat an address."""
    write_amplification: float | None
    """Bytes that all processes and the kernel wrote to the device, divided by the application's written bytes. None if
    the latter are unknown, as with `io_submit` or files that are closed immediately."""
    whole_device: dict[str, Any]
    """``read_share_bytes``, ``requests``, ``read_bytes`` and ``written_bytes`` of all processes and the kernel."""
    not_attributed: dict[str, int]
    """Requests and written bytes that belong to no process: writeback by kernel threads. 0 if no process was chosen."""
    metadata: int
    """Number of the file system's own requests. `requests` includes them, and `request_bytes` does not."""
    flushes: int
    discards: int
    unfinished: int
    """Number of requests without a completion."""
    counts: dict[str, int]
    lost_events: int
    processes: list[ProcessMeasures]
    device_facts: dict[str, Any]
    over_time: OverTime
    remarks: list[str] = field(default_factory=list[str])


def measure(trace: IoTrace) -> IoMeasures:
    """Compute all measures of a trace. Without requests, counts are 0 and shares are None."""
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
    busy_mean = moved / max(depth.busy_s, 1e-9) / 1e9 if depth.total else mean
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
    """Return the requests of all processes as submitted, before the block layer split and merged them.

    They are the bios above the device, or the requests of the lowest layer if there are no bios.
    """
    bios = transfers(trace.at(IoLayer.FILE_SYSTEM)) if trace.lowest is IoLayer.DEVICE else trace.requests[:0]
    return bios if len(bios) else transfers(trace.at(trace.lowest))


def is_sequential(rows: np.ndarray, last: int = LAST, *, per_process: bool, within: int = WITHIN_BYTES) -> np.ndarray:
    """Return whether each request is sequential, as `SEQUENTIAL` defines it.

    Args:
        rows: requests of one layer in the order of their issue.
        last: number of earlier requests of the same stream to consider.
        per_process: whether a stream is a process on a device, instead of a whole device.
        within: bytes that may be skipped.
    """
    stream = np.zeros(len(rows), rows["process"].dtype) if not per_process else rows["process"]
    order = np.lexsort((stream, rows["place"]))  # stable, so a stream stays in the order of issue
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
    """Return the sequential shares: of all requests of the device, and per process of the measured processes."""
    own = rows[rows["process"] != NO_PROCESS]
    return {
        "device": float(is_sequential(all_rows, last, per_process=False).mean()) if len(all_rows) else None,
        "per_process": float(is_sequential(own, last, per_process=True).mean()) if len(own) else None,
    }


def _sizes(rows: np.ndarray) -> dict[str, float]:
    """Return the sizes of requests for data. The many small ones for metadata count only if there is no other."""
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
    """Return the percentiles, in us, of the known times."""
    took = took_s[~np.isnan(took_s)] * 1e6
    return {name: _percentile(took, of) for name, of in (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100))}


def _percentile(values: np.ndarray, percent: float) -> float:
    """Return the percentile as one of the values, or 0 without values."""
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
    """Return how many bytes were moved again: all moved bytes, minus one for each different address."""
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
