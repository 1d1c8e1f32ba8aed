"""The ceiling: what fio gets from the same directory with direct I/O, the same sizes and as many threads.

The ceiling is fio with its buffers in huge pages, as our arena's are. As it comes it is up to 3 times slower on a
virtual disk, since every request is then a list of thousands of small pages; such a ceiling would flatter us. Both are
measured.
"""

import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.io_row import Latency
from kvtier.errors import ConfigError

DEADLINE_S = 300.0

HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""Makes the C library ask for transparent huge pages (glibc 2.35 and later; others ignore it)."""


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


class Told(NamedTuple):
    """What fio says of one run."""

    gb_per_s: float
    """10^9 bytes, both directions together."""
    latency_us: Latency
    """Of one request; in a mix of a read."""

    @staticmethod
    def median(all_of: Sequence[Latency]) -> Latency:
        """The medians of several runs."""
        return Latency(
            *(round(statistics.median(getattr(it, name) for it in all_of), 1) for name in ("p50", "p95", "p99"))
        )


class Fio:
    """Files of fio's own in `directory`, laid out once and then overwritten and read, as a full store's are.

    Args:
        directory: where the files go; `close` removes them.
        block_bytes: size of one request.
        threads: jobs, each with a file of its own and one request at a time.
        total_bytes: moved by all jobs together in one measurement, rounded up to whole blocks.
        is_direct: with direct I/O; otherwise through the page cache, which is emptied of the files before.
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

    def measure(self, op: str, *, read_percent: int | None = None, is_plain: bool = False) -> Told:
        """How fast ``"store"`` (writes over the files, or to new ones at the first call), ``"load"`` or a mix are.

        Args:
            op: which.
            read_percent: of a mix, the share of reads.
            is_plain: fio as it comes, its buffers in small pages.

        Raises:
            ConfigError: fio failed; the message tells what it said.
        """
        pattern = "write" if op == "store" else "randread"
        if read_percent is not None:
            pattern = f"randrw --rwmixread={read_percent}"
        command = [*self._common, *f"--rw={pattern}".split()]
        told = _run(command if is_plain else ["env", HUGE_PAGES, *command])["jobs"][0]
        moved = sum(told[side]["io_bytes"] for side in ("read", "write"))
        took_s = max(told[side]["runtime"] for side in ("read", "write")) / 1e3
        sides = [side for side in ("read", "write") if told[side]["io_bytes"]]
        rate = told[sides[0]]["bw_bytes"] if len(sides) == 1 else moved / max(took_s, 1e-3)
        return Told(rate / 1e9, _latency(told[sides[0]]))

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


def _latency(side: dict[str, Any]) -> Latency:
    percentiles = side["clat_ns"]["percentile"]
    return Latency(*(round(percentiles[f"{percent}.000000"] / 1e3, 1) for percent in (50, 95, 99)))
