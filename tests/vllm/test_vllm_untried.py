"""A build of vLLM that was never tried is refused, unless its test has passed here; that test sees wrong bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import PROMPTS
from harness import ENVIRONMENT, EngineError
from judge import prompt
from server import Server
from settings import connector

pytestmark = pytest.mark.engine

VERSION = "0.1.dev7+g0123456.cpu"
SIZES = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20))

MISREADS = """
import sys
if any("connect.vllm.selftest" in each for each in sys.orig_argv):
    from kvtier.connect.vllm.cpu_copy import CpuPageCopy
    inner = CpuPageCopy.scatter
    def scatter(self, group, ids, payload):
        return inner(self, group, ids, memoryview(bytes(payload[100:]) + bytes(payload[:100])))
    CpuPageCopy.scatter = scatter
"""
"""A page that lies in another way than is believed."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path, where the vLLM that is installed calls itself a build of the sources."""
    where = tmp_path / "path"
    about = where / f"vllm-{VERSION}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(where), os.environ.get("PYTHONPATH", "")]))
    return where


def given(store: Path) -> str:
    return json.dumps(connector(store, vllm__unsupported="allow", tiers__directory__capacity_bytes="1GiB"))


def selftest(store: Path, model: Path) -> tuple[int, str]:
    """Exit code of the doctor, and the finding of the test."""
    command = [sys.executable, "-m", "kvtier.cli.main", "vllm", "doctor", given(store), "--selftest"]
    command += ["--model", str(model), "--engine-args", " ".join((*SIZES, "--enforce-eager")), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, env=os.environ | ENVIRONMENT
    )
    (record,) = [each["found"] for each in json.loads(done.stdout)["findings"] if each["about"] == "selftest"]
    return done.returncode, record


def test_an_untried_build_is_taken_after_its_test(path: Path, checkpoints: Path, tmp_path: Path) -> None:
    model, store, log = checkpoints / "llama", tmp_path / "kv", tmp_path / "server.log"
    refused = json.loads(given(store))
    del refused["kv_connector_extra_config"]["vllm.unsupported"]
    for transfer, record in (
        (json.dumps(refused), f"vLLM {VERSION} is not supported by this release of kvtier"),
        (given(store), f"{store} holds no self-test result"),
    ):
        with pytest.raises(EngineError, match="the server has ended"), Server(model, log, transfer, *SIZES):
            pass
        assert record in log.read_text()
    code, record = selftest(store, model)
    assert (code, record[:7]) == (0, "passed:"), record
    with Server(model, log, given(store), *SIZES) as server:
        assert len(server.complete(prompt(*PROMPTS["short"]), 4)) == 4
        assert "kvtier is ready" in server.printed()


def test_the_test_fails_where_pages_are_misread(path: Path, checkpoints: Path, tmp_path: Path) -> None:
    (path / "sitecustomize.py").write_text(MISREADS)
    code, record = selftest(tmp_path / "kv", checkpoints / "llama")
    assert code == 1
    assert "from restored KV differ from vLLM's own" in record
    assert not (tmp_path / "kv").exists(), "no result"
