"""The command that soaks every kind of tier: what it reports, and that it finds other bytes."""

import json
import subprocess
import sys

from tests.soak import Row

COMPARED_MIN = 500


def soak(folder, *arguments):
    command = [sys.executable, "-m", "tests.soak", "--seed", "1", "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_local_kinds_pass_and_are_recorded(tmp_path):
    record = tmp_path / "record" / "soak.json"
    done = soak(tmp_path, "--operations", "4000", "--kinds", "disk,shared_directory", "--out", str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [row["kind"] for row in rows[:2]] == ["disk", "shared_directory"]
    assert all(row["kind"].startswith("object store on ") for row in rows[2:])
    assert sum(row["compared"] for row in rows) > COMPARED_MIN
    assert sum(row["wrong"] for row in rows) == 0
    assert sum(row["kills"] + row["stops"] + row["faults"] for row in rows) > 0


def test_other_bytes_are_found(tmp_path):
    done = soak(tmp_path, "--operations", "50000", "--kinds", "liar")
    assert done.returncode == 1
    assert "wrong bytes as object 7" in done.stdout


def test_a_kind_with_fewer_operations_or_hardly_a_byte_compared_fails(tmp_path):
    row = Row("disk", tmp_path / "row", 1000)
    seen = []
    for operations, right in ((999, 900), (1000, 10), (1000, 900)):
        row.table[0, :2] = operations, right
        seen.append(row.is_right)
    row.fail("a process ended")
    assert [*seen, row.is_right] == [False, False, True, False]
