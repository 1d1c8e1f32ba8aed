"""`bench/vllm.py`: damage and salt in each arm; what is killed goes on with the arms that are left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import gpu
from bench.parts.gpu_slices import QUICK

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

TOP = Path(__file__).parents[2]


def test_a_killed_run_goes_on_with_the_arms_that_are_left(tmp_path: Path) -> None:
    record, the_slice = tmp_path / "gpu_vllm.json", QUICK["vllm"]
    command = [*gpu.command_of("vllm", the_slice, tmp_path), "--dir", str(tmp_path)]
    environment = gpu.environment_of(the_slice)
    with subprocess.Popen(command, cwd=TOP, env=environment, start_new_session=True) as process:
        until_s = time.monotonic() + 300
        while not record.exists():
            assert time.monotonic() < until_s
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    cut = json.loads(record.read_text())
    assert [(it["part"], it["arm"]) for it in cut["samples"]] == [("damaged", "native")]
    assert (cut["results"]["measured"], cut["results"]["is_complete"]) == ([], False)
    assert gpu.state_of("vllm", the_slice, tmp_path) == "begun"
    script = [sys.executable, str(TOP / "bench" / "gpu.py"), "--quick", "vllm", "--out", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(record.read_text())
    assert whole["samples"][0] == cut["samples"][0]
    assert [(it["part"], it["arm"]) for it in whole["samples"]] == [
        (part, arm) for part in ("damaged", "salt") for arm in ("native", "kvtier")
    ]
    assert gpu.state_of("vllm", the_slice, tmp_path) == "complete"
    assert whole["results"]["damaged"]["kvtier"] == {"files": 15, "restored": 0, "of": 3000, "same_tokens": True}
    for found in (whole["results"]["salt"][arm]["restored"] for arm in ("native", "kvtier")):
        assert found["own"] > 2000
        assert (found["stored"], found["other"], found["none"]) == (0, 0, 0)
    assert all(whole["results"]["salt"][arm]["same_tokens"] for arm in ("native", "kvtier"))
