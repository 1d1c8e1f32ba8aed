"""Samples the machine once a second while a server is measured. Each sample is a line of `samples.jsonl`.

Counters are cumulative, as in the kernel and the server. An unknown figure is null, because the sampler estimates
nothing. NVML's counter or `nvidia-smi` gives the energy of a GPU, and RAPL the energy of processor packages.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtier.device.control_groups import text_of
from kvtier.tools.bench.serve.machine_limits import Drive, MachineLimits
from kvtier.tools.bench.serve.server import Server, ServerError, get

DEADLINE_S = 5.0
"""Longest wait for one call of nvidia-smi, in seconds."""
_POWERCAP = Path("/sys/class/powercap")


class Nvml:
    """Reads a GPU through NVML, NVIDIA's library. Its counter gives the energy since the driver was loaded."""

    def __init__(self, handle: Any, nvml: Any) -> None:  # noqa: ANN401 - of an optional module
        self._handle = handle
        self._nvml = nvml

    def joules(self) -> float | None:
        """Return the device's cumulative energy in joules, or None if it has no such counter."""
        return self._asked("nvmlDeviceGetTotalEnergyConsumption", 1e3)

    def watts(self) -> float | None:
        """Return the current power in watts, or None if the device does not report it."""
        return self._asked("nvmlDeviceGetPowerUsage", 1e3)

    def utilisation(self) -> float | None:
        """Return the share (0 to 1) of the last sampling period in which a kernel ran, or None if unknown."""
        return self._asked("nvmlDeviceGetUtilizationRates", 100)

    def _asked(self, function: str, unit: float) -> float | None:
        try:
            found = getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:
            return None
        return getattr(found, "gpu", found) / unit  # rates are a structure, the others a number


class NvidiaSmi:
    """Runs nvidia-smi, for machines without NVML's Python package. It has no counter and takes about 20 ms a sample."""

    def __init__(self, device: str) -> None:
        self._command = ["nvidia-smi", "-i", device, "--format=csv,noheader,nounits"]

    def joules(self) -> float | None:
        """Return None, because the program reports no counter."""
        return None

    def watts(self) -> float | None:
        """Return the current power in watts, or None if the device does not report it."""
        return self._asked("power.draw")

    def utilisation(self) -> float | None:
        """Return the share (0 to 1) of the last sampling period in which a kernel ran, or None if unknown."""
        found = self._asked("utilization.gpu")
        return None if found is None else found / 100

    def _asked(self, field: str) -> float | None:
        command = [*self._command, f"--query-gpu={field}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
            return float(done.stdout.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None


class Rapl:
    """Energy counters of Intel's and AMD's processor packages, in /sys/class/powercap.

    Args:
        root: folder of the zones.
    """

    def __init__(self, root: Path = _POWERCAP) -> None:
        self._zones = [it for it in sorted(root.glob("*-rapl:*")) if it.name.count(":") == 1]
        self._before = [_number(it / "energy_uj") for it in self._zones]
        self._microjoules = 0

    def joules(self) -> float | None:
        """Return the joules of all packages since this object was made, or None if a counter is missing or unreadable.

        A counter wraps to zero after minutes to hours, so the method must be called more often than that.
        """
        now = [_number(it / "energy_uj") for it in self._zones]
        for zone, before, after in zip(self._zones, self._before, now, strict=True):
            if before is None or after is None:
                return None
            span = (_number(zone / "max_energy_range_uj") or 0) if after < before else 0
            self._microjoules += after - before + span
        self._before = now
        return self._microjoules / 1e6 if self._zones else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


Sensor = Nvml | NvidiaSmi


def first_gpu() -> Sensor | None:
    """Return a sensor of the machine's first GPU, or None if there is none. The function works without torch."""
    if find_spec("pynvml") is not None:
        nvml: Any = import_module("pynvml")
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return Nvml(nvml.nvmlDeviceGetHandleByIndex(0), nvml)
    smi = NvidiaSmi("0") if shutil.which("nvidia-smi") else None
    return smi if smi is not None and smi.watts() is not None else None


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
"""Metrics of vLLM that are kept. All metrics of kvtier are kept as well."""
OWN = "vllm:kvtier_"
_LEFT_OUT = {"engine", "model_name"}
"""Labels that are dropped, because every sample has the same ones."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Figures summed over processes."""

    cpu_s: float = 0.0
    rss_bytes: int | None = 0
    """Resident memory. Processes that share a page split it equally. None if the kernel refuses access."""
    read_bytes: int = 0
    """Bytes read from storage, not from the page cache."""
    written_bytes: int = 0
    """Bytes written to storage: direct writes and dirtied pages."""

    def __add__(self, other: "ProcessFigures") -> "ProcessFigures":
        return ProcessFigures(
            self.cpu_s + other.cpu_s,
            None if self.rss_bytes is None or other.rss_bytes is None else self.rss_bytes + other.rss_bytes,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


class Processes:
    """Sums figures over processes that start and end. The last counters of an ended process still count."""

    def __init__(self) -> None:
        self._known: dict[int, ProcessFigures] = {}

    def figures(self, pids: Iterable[int]) -> ProcessFigures:
        """Return the current sum."""
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
    """Return the resident bytes (``Pss``) of a process. Processes that share a page split it equally."""
    rows = text_of(place / "smaps_rollup").splitlines()
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:")), None)


def drive_figures(drive: Drive) -> dict[str, Any] | None:
    """Return the counters in a drive's ``stat`` since the machine's start, or None if the drive is gone."""
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
    """Parse Prometheus' text format. Return the values of `WANTED` and of kvtier's metrics, by name and labels.

    Buckets of histograms are left out.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, _ = line.partition("{")
        name = name.partition(" ")[0]
        is_wanted = name in WANTED or name.startswith(OWN)
        if not is_wanted or line.startswith("#") or name.endswith(("_bucket", "_created")):
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
    """Writes a line each second until it is closed.

    Args:
        path: path of `samples.jsonl`.
        server: the measured server.
        client_pids: processes of the load generator.
        drive: the drive of the tiers; None if unknown.
        limits: the server's control group, if any.
        gpu: sensor of the GPU, if any.
        has_processors: whether the server runs on this machine's processors, so that their energy counts.
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
        """Stop the sampling."""
        self._stop.set()
        self._thread.join(2 * _METRICS_S)

    def sample(self) -> dict[str, Any]:
        """Return a sample of the current state."""
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
