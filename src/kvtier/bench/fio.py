"""fio in the same directory, with the same sizes and as many threads: the ceiling of `kvtier bench io`.

The ceiling uses huge pages for fio's buffers, like kvtier's arena. On a virtual disk plain fio is up to 3 times slower,
since each request is then a list of thousands of small pages, and would be too low a ceiling. Both are measured.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError

DEADLINE_S = 300.0

HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""Makes malloc request transparent huge pages (glibc 2.35 and later; earlier ones ignore it)."""


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


@dataclass(frozen=True, slots=True)
class IoLatency:
    """Percentiles of one operation in microseconds."""

    p50: float
    p95: float
    p99: float


class FioResult(NamedTuple):
    """One run of fio."""

    gb_per_s: float
    """10^9 bytes, both directions together."""
    latency_us: IoLatency
    """Latency of one request; in a mix, of a read."""


class Fio:
    """fio's files in `directory`, created once and then overwritten and read, like a full store.

    Args:
        directory: of the files; `close` removes them.
        block_bytes: size of one request.
        threads: jobs, each with a file of its own and one request at a time.
        total_bytes: of all jobs in one measurement, rounded up to whole blocks.
        is_direct: direct I/O; otherwise through the page cache, invalidated before each run.
    """

    def __init__(
        self, directory: Path, *, block_bytes: int, threads: int, total_bytes: int, is_direct: bool = True
    ) -> None:
        blocks = -(-total_bytes // (block_bytes * threads))
        self._directory = directory
        self._common = [
            "fio",
            "--name=fio",
            f"--directory={directory}",
            f"--direct={int(is_direct)}",
            "--invalidate=1",
            "--ioengine=psync",
            "--thread",
            f"--bs={block_bytes}",
            f"--size={block_bytes * blocks}",
            f"--numjobs={threads}",
            "--iomem_align=2M",
            "--group_reporting",
            "--output-format=json",
        ]

    def measure(self, op: str, *, read_percent: int | None = None, is_plain: bool = False) -> FioResult:
        """Run a ``"store"`` (writes, to new files at the first call), a ``"load"`` or a mix.

        Args:
            op: the operation.
            read_percent: of a mix.
            is_plain: without huge pages.

        Raises:
            ConfigError: fio failed; the message has its output.
        """
        pattern = "write" if op == "store" else "randread"
        if read_percent is not None:
            pattern = f"randrw --rwmixread={read_percent}"
        command = [*self._common, *f"--rw={pattern}".split()]
        job = _run(command if is_plain else ["env", HUGE_PAGES, *command])["jobs"][0]
        sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
        runtime_s = max(max(side["runtime"] for side in sides) / 1e3, 1e-3)
        rate = sides[0]["bw_bytes"] if len(sides) == 1 else sum(side["io_bytes"] for side in sides) / runtime_s
        percentiles = sides[0]["clat_ns"]["percentile"]
        latency_us = IoLatency(*(round(percentiles[f"{percent}.000000"] / 1e3, 1) for percent in (50, 95, 99)))
        return FioResult(rate / 1e9, latency_us)

    def close(self) -> None:
        """Remove the files."""
        for file in self._directory.glob("fio.*"):
            file.unlink()


def _run(command: list[str]) -> Any:  # noqa: ANN401 - JSON
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"fio took longer than {DEADLINE_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"fio failed: {' '.join((done.stderr or done.stdout).split())[:300]}")
    return json.loads(done.stdout)
