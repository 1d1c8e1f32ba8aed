"""The ceiling: what fio gets from the same directory with direct I/O, the same sizes and as many threads.

The ceiling is fio with its buffers in huge pages, as our arena's are. As it comes it is up to 3 times slower on a
virtual disk, since every request is then a list of thousands of small pages; such a ceiling would flatter us. Both are
measured.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

DEADLINE_S = 300.0

HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""Makes the C library ask for transparent huge pages (glibc 2.35 and later; others ignore it)."""


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


class Fio:
    """Files of fio's own in `directory`, laid out once and then overwritten and read, as a full store's are.

    Args:
        directory: where the files go; `close` removes them.
        block_bytes: size of one request.
        threads: jobs, each with a file of its own and one request at a time.
        total_bytes: moved by all jobs together in one measurement, rounded up to whole blocks.
    """

    def __init__(self, directory: Path, *, block_bytes: int, threads: int, total_bytes: int) -> None:
        blocks = -(-total_bytes // (block_bytes * threads))
        self._directory = directory
        self._common = [
            "fio",
            "--name=fio",
            f"--directory={directory}",
            "--direct=1",
            "--ioengine=psync",
            "--thread",
            f"--bs={block_bytes}",
            f"--size={block_bytes * blocks}",
            f"--numjobs={threads}",
            "--iomem_align=2M",
            "--group_reporting",
            "--output-format=json",
        ]

    def measure(self, op: str, *, is_plain: bool = False) -> float:
        """GB/s (10^9 bytes) of ``"store"`` (writes over the files, or to new ones at the first call) or ``"load"``.

        Args:
            op: which.
            is_plain: fio as it comes, its buffers in small pages.

        Raises:
            ConfigError: fio failed; the message tells what it said.
        """
        side = "write" if op == "store" else "read"
        command = [*self._common, f"--rw={'write' if op == 'store' else 'randread'}"]
        told = _run(command if is_plain else ["env", HUGE_PAGES, *command])
        return told["jobs"][0][side]["bw_bytes"] / 1e9

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
