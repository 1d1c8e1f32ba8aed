"""What the machine does, once a second, while a server is measured: a line of `samples.jsonl` each.

Counters are cumulative, as the kernel and the server keep them; a figure that is unknown is null.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.serve.machine_limits import Drive, MachineLimits
from kvtier.bench.serve.power import Rapl, Sensor
from kvtier.bench.serve.server import Server, ServerError, get
from kvtier.device.control_groups import text_of

INTERVAL_S = 1.0
_METRICS_S = 10.0
_SECTOR_BYTES = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_METRICS_MAX = 2_000

WANTED = {
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prefill_time_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
}
"""Metrics of vLLM that are kept, besides kvtier's own."""
OWN = "vllm:kvtier_"
_LEFT_OUT = {"engine", "model_name"}
"""Labels that are the same in every sample."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Figures of processes, summed."""

    cpu_s: float = 0.0
    rss_bytes: int | None = 0
    """Resident memory. A page that processes share counts in equal parts for each; None if the kernel refuses it."""
    read_bytes: int = 0
    """From storage, not from the page cache."""
    written_bytes: int = 0
    """To storage: direct writes, and pages made dirty."""

    def __add__(self, other: "ProcessFigures") -> "ProcessFigures":
        return ProcessFigures(
            self.cpu_s + other.cpu_s,
            None if self.rss_bytes is None or other.rss_bytes is None else self.rss_bytes + other.rss_bytes,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


class Processes:
    """Sums over processes that come and go: those that have ended keep their last counters."""

    def __init__(self) -> None:
        self._known: dict[int, ProcessFigures] = {}

    def figures(self, pids: Iterable[int]) -> ProcessFigures:
        """The sum now."""
        ended = {pid: ProcessFigures(it.cpu_s, 0, it.read_bytes, it.written_bytes) for pid, it in self._known.items()}
        self._known = ended | {pid: found for pid in pids if (found := _process(pid)) is not None}
        return sum(self._known.values(), ProcessFigures())


def _process(pid: int) -> ProcessFigures | None:
    place = Path("/proc") / str(pid)
    resident = _resident_bytes(place)
    try:
        fields = (place / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        rows = (place / "io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = {name: int(value) for name, _, value in (row.partition(": ") for row in rows)}
    ticks = int(fields[11]) + int(fields[12])
    return ProcessFigures(ticks / _TICKS_PER_S, resident, counts["read_bytes"], counts["write_bytes"])


def _resident_bytes(place: Path) -> int | None:
    """Of a process, shared pages in parts, as ``Pss`` of its smaps_rollup has them."""
    rows = text_of(place / "smaps_rollup").splitlines()
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:")), None)


def drive_figures(drive: Drive) -> dict[str, Any] | None:
    """Counters of a drive since the machine started, from its ``stat``; None if it has gone."""
    fields = [int(word) for word in text_of(Path("/sys/block") / drive.name / "stat").split()]
    if not fields:
        return None
    return {
        "name": drive.name,
        "reads": fields[0],
        "read_bytes": fields[2] * _SECTOR_BYTES,
        "writes": fields[4],
        "written_bytes": fields[6] * _SECTOR_BYTES,
        "in_flight": fields[8],
        "weighted_s": fields[10] / 1e3,
    }


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of `WANTED` and of kvtier in Prometheus' text format, by name with labels, no buckets."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, _ = line.partition("{")
        name = name.partition(" ")[0]
        if line.startswith("#") or name.endswith(("_bucket", "_created")):
            continue
        if name not in WANTED and not name.startswith(OWN):
            continue
        labels = line[len(name) :].rpartition("}")[0].lstrip("{")
        kept = [it for it in labels.split(",") if it and it.partition("=")[0] not in _LEFT_OUT]
        with suppress(ValueError, IndexError):
            value = float(line[len(name) :].rpartition("}")[2].split()[0])
            found[name + ("{" + ",".join(kept) + "}" if kept else "")] = value
        if len(found) >= _METRICS_MAX:
            break
    return found


class Sampler:
    """Writes a line each second from now until it is closed.

    Args:
        path: of `samples.jsonl`.
        server: that is measured.
        client_pids: processes of the load generator.
        drive: of the tiers; None if it is unknown.
        limits: the server's control group, if any.
        gpu: sensor of the GPU, if any.
        has_processors: whether this machine's processors are the server's, so that their energy counts.
        tick: called after each sample.
    """

    def __init__(
        self,
        path: Path,
        server: Server,
        *,
        client_pids: Callable[[], Iterable[int]],
        drive: Drive | None,
        limits: MachineLimits | None,
        gpu: Sensor | None,
        has_processors: bool = True,
        tick: Callable[[], None],
    ) -> None:
        self._path = path
        self._server = server
        self._client_pids = client_pids
        self._drive = drive
        self._limits = limits
        self._gpu = gpu
        self._tick = tick
        self._rapl = Rapl() if has_processors else None
        self._own, self._client = Processes(), Processes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier bench sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write no more lines."""
        self._stop.set()
        self._thread.join(2 * _METRICS_S)

    def sample(self) -> dict[str, Any]:
        """One line, now."""
        pids = self._server.pids()
        own = self._own.figures(pids)
        gpu = self._gpu
        line: dict[str, Any] = {
            "time_s": time.time(),
            "cpu_s": own.cpu_s if pids else None,
            "client_cpu_s": self._client.figures(self._client_pids()).cpu_s,
            "rss_bytes": own.rss_bytes if pids else None,
            "memory_bytes": None if self._limits is None else self._limits.memory_used(),
            "read_bytes": own.read_bytes if pids else None,
            "written_bytes": own.written_bytes if pids else None,
            "device": None if self._drive is None else drive_figures(self._drive),
            "gpu": None
            if gpu is None
            else {"utilisation": gpu.utilisation(), "watts": gpu.watts(), "joules": gpu.joules()},
            "package_joules": None if self._rapl is None else self._rapl.joules(),
        }
        try:
            line["metrics"] = parse_metrics(get(f"{self._server.url}/metrics", limit_s=_METRICS_S))
        except ServerError:
            line["metrics"] = {}
        return line

    def _run(self) -> None:
        next_s = time.monotonic()
        with self._path.open("a", encoding="utf-8") as file:
            while True:
                file.write(json.dumps(self.sample()) + "\n")
                file.flush()
                self._tick()
                next_s = max(next_s + INTERVAL_S, time.monotonic())
                if self._stop.wait(next_s - time.monotonic()):
                    return
