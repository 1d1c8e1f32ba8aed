"""The doctor knows whether a store holds KV of a model, as the engine itself would find it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import SHORT, Start
from settings import connector, tiering

pytestmark = pytest.mark.engine


def doctor(given: dict[str, object], *arguments: str) -> dict[str, list[str]]:
    """What `kvtier doctor vllm` finds, by level."""
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "doctor",
        "vllm",
        json.dumps(given),
        *arguments,
        "--json",
        "--timeout",
        "250",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == int(not result["ok"]), done.stderr
    levels: dict[str, list[str]] = {}
    for finding in result["findings"]:
        levels.setdefault(finding["level"], []).append(finding["found"])
    return levels


@pytest.mark.parametrize("place", ["connector", "below vLLM's own offloading"])
def test_the_doctor_finds_the_models_own_kv(place: str, start: Start, checkpoints: Path, tmp_path: Path) -> None:
    given = connector(tmp_path / "kv", tiers__directory__capacity_bytes="1GiB")
    wrong = [
        ("--dtype bfloat16", 'differs in: dtype is "bfloat16", there "float32"'),
        ("--dtype float33", "invalid choice: 'float33'"),
    ]
    if place != "connector":
        given = tiering(f"directory:{tmp_path / 'kv'}?capacity=1GiB")
        wrong += [
            ("--dtype float32 --prefix-caching-hash-algo xxhash", "prefix_caching_hash_algo = 'xxhash'"),
            ("--dtype float32 -pp 2", "pipeline_parallel_size = 2 below vLLM's offloading is not supported"),
        ]
    start("llama", given).ask_and_close(SHORT)

    model = ("--model", str(checkpoints / "llama"), "--engine-args")
    result = doctor(given, *model, "--dtype float32 --max-model-len 4096 --port 8000")
    assert "error" not in result
    assert any("objects of this model" in it for it in result["fine"])

    for other, expected in wrong:
        (found,) = doctor(given, *model, other)["error"]
        assert expected in found
