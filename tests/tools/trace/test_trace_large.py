"""Ten million requests fit in 4 GiB: a twentieth is synthesized, read and replayed in a twentieth of that."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

REQUESTS = 500_000
FIXED_BYTES = 128 << 20
"""The interpreter, numpy and buffers, independent of the length of the trace."""
SHARE = REQUESTS / 10_000_000
ENTIRE_BYTES = 4 << 30

WORK = """
import sys
from pathlib import Path
from kvtier.cli.main import run

count, target = sys.argv[1:]
assert run(["trace", "synthesize", target, "--requests", count]) == 0
replay = ["replay", target, "--capacity-tokens", "10M", "--policy", "plain-lru", "--jobs", "1", "--json"]
assert run(replay) == 0
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print("peak", int(peak.split()[1]) * 1024)
"""


def test_memory_grows_no_faster_than_4_gib_for_ten_million(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(REQUESTS), str(tmp_path / "trace.jsonl")],
        capture_output=True,
        text=True,
        check=True,
        timeout=3000,
    )
    assert f'"requests": {REQUESTS}' in done.stdout
    peak_bytes = int(done.stdout.split()[-1])
    assert peak_bytes - FIXED_BYTES < SHARE * ENTIRE_BYTES
