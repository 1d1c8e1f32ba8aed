"""`bench/sglang.py` measures every system in one run, checks the bytes, and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tools.bench.io import has_fio

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not has_fio(), reason="fio is not installed")
def test_all_backends_are_measured_in_one_run_and_nothing_is_left(tmp_path: Path) -> None:
    """Four pages of 8 MiB through kvtier, HiCache's files and Mooncake."""
    command = [sys.executable, str(TOP / "bench" / "sglang.py"), "--dir", str(tmp_path), "--pages", "4"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout[done.stdout.index("{\n") :])  # Mooncake prints there, too
    systems = ("fio", "kvtier disk", "hicache file", "mooncake")
    assert {(row["system"], row["op"]) for row in results["speeds"]} == {
        ("hicache file", "backup to the drive"),
        *((system, op) for system in systems for op in ("backup", "prefetch")),
    }
    assert {row["system"]: row["pages"] for row in results["questions"]} == dict.fromkeys(systems[1:], 2048)
    assert list(tmp_path.iterdir()) == []
