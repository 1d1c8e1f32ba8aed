"""The demo end to end: real passes of a tiny model in processes of their own, the JSON contract, and a clean end."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from kvtier.demo.model import SHAPES
from kvtier.demo.trace import plan_requests, read_trace, train_tokenizer
from kvtier.demo.worker import PassJob, run_pass

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = 5
DEADLINE_S = 200


def command(*arguments):
    return [sys.executable, "-m", "kvtier.cli.main", "demo", *arguments]


def environment(temporary: Path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    # Torch makes a directory for its compiler as soon as it is imported.
    compiled = temporary.with_name(f"{temporary.name}-torch")
    return {**clean, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}


def call(temporary: Path, *arguments):
    tiny = ("--model-size", "tiny", "--requests", str(REQUESTS), "--new-tokens", "8")
    return subprocess.run(
        command(*tiny, *arguments),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=temporary,
        env=environment(temporary),
    )


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Two calls on one directory, and where they ran."""
    temporary = tmp_path_factory.mktemp("demo")
    store = temporary / "store"
    first = call(temporary, "--dir", str(store), "--json")
    second = call(temporary, "--dir", str(store), "--json", "--record", "record.json", "--report", "page.html")
    return first, second, temporary


def passes_of(done):
    return {it["name"]: it for it in json.loads(done.stdout)["passes"]}


def test_both_calls_end_well_and_print_json_alone(calls):
    for done in calls[:2]:
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["identical"] is True
        assert isinstance(told["model"], str)
        for it in told["passes"]:
            assert it["requests"] == REQUESTS
            assert 0 < it["ttft_ms"]["p50"] <= it["ttft_ms"]["p95"]
            assert it["wall_s"] > 0
            assert it["input_tokens"] == it["restored_tokens"] + it["computed_tokens"]
            assert sum(it["restored_by_tier"].values()) == it["restored_tokens"]


def test_the_passes_are_those_of_the_contract(calls):
    assert list(passes_of(calls[0])) == ["none", "cold", "warm"]
    assert list(passes_of(calls[1])) == ["none", "cold", "warm", "reopened"]


def test_without_kvtier_nothing_is_restored(calls):
    none = passes_of(calls[0])["none"]
    assert (none["restored_tokens"], none["restorable_tokens"], none["disk_bytes"]) == (0, 0, 0)


def test_the_warm_pass_restores_from_disk_what_the_cold_pass_stored(calls):
    passes = passes_of(calls[0])
    assert passes["cold"]["written_bytes"] > 0
    assert passes["cold"]["lost"] == 0
    assert passes["warm"]["restored_by_tier"].get("directory", 0) > 0
    assert passes["warm"]["restored_tokens"] >= 0.9 * passes["warm"]["restorable_tokens"] > 0
    assert passes["warm"]["restorable_tokens"] > passes["cold"]["restorable_tokens"] > 0


def test_a_second_cold_pass_sees_nothing_of_the_first_call(calls):
    first, second = (passes_of(done)["cold"] for done in calls[:2])
    assert "directory" not in second["restored_by_tier"]
    assert second["restored_tokens"] == first["restored_tokens"]
    assert second["restorable_tokens"] == first["restorable_tokens"]


def test_the_reopened_pass_restores_what_the_earlier_call_left(calls):
    first, second = (passes_of(done) for done in calls[:2])
    reopened = second["reopened"]
    assert reopened["restorable_tokens"] == first["warm"]["restorable_tokens"]
    assert reopened["restored_tokens"] >= 0.9 * reopened["restorable_tokens"]
    assert reopened["restored_by_tier"].get("directory", 0) > 0


def test_the_record_and_the_report_are_written(calls):
    temporary = calls[2]
    record = json.loads((temporary / "record.json").read_text(encoding="utf-8"))
    assert record["benchmark"] == "demo"
    assert len(record["samples"]) == 4 * REQUESTS
    assert record["settings"]["model_size"] == {"value": "tiny", "origin": "flag"}
    assert record["settings"]["seed"]["origin"] == "default"
    assert record["settings"]["store.write_policy"]["origin"] == "default"
    assert str(temporary) not in json.dumps(record)
    assert (temporary / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_nothing_else_is_left_behind(calls):
    assert sorted(it.name for it in calls[2].iterdir()) == ["page.html", "record.json", "store"]


def test_ctrl_c_ends_the_pass_and_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        command("--report", str(tmp_path / "report.html")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    )
    try:
        until = time.monotonic() + DEADLINE_S
        # A pass that has come so far does not end by itself within moments.
        while not any(b"libtorch" in read(it.with_name("maps")) for it in passes_under(tmp_path)):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert passes_under(tmp_path) == []


def passes_under(temporary: Path) -> list[Path]:
    """The processes of passes whose job file lies under `temporary`."""
    return [it for it in Path("/proc").glob("[0-9]*/cmdline") if is_pass(it, temporary)]


def is_pass(command_line: Path, temporary: Path) -> bool:
    told = read(command_line)
    return b"kvtier.demo.worker" in told and str(temporary).encode() in told


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended meanwhile
        return b""


def do_pass(plan, directory, namespace):
    events = []
    job = PassJob(
        shape=SHAPES["tiny"],
        seed=3,
        new_tokens=4,
        threads=1,
        requests=plan.requests,
        directory=str(directory),
        namespace=namespace,
    )
    run_pass(job, events.append)
    return [sum(it["restored"].values()) for it in events if it["event"] == "request"]


def test_namespaces_in_one_directory_do_not_see_each_other(tmp_path):
    plan = plan_requests(read_trace(), sessions=12, requests=1)
    assert do_pass(plan, tmp_path / "store", "one") == [0]
    assert do_pass(plan, tmp_path / "store", "two") == [0]
    assert do_pass(plan, tmp_path / "store", "one")[0] > 0


def test_a_job_survives_the_way_to_its_process(tmp_path):
    plan = plan_requests(read_trace(), sessions=1, requests=2)
    job = PassJob(SHAPES["tiny"], 1, 2, 3, plan.requests, None, "space")
    (tmp_path / "job.json").write_text(json.dumps(asdict(job)))
    assert PassJob.read(tmp_path / "job.json") == job


def test_the_tokenizer_is_the_same_every_time():
    texts = [row.text for row in read_trace()][:20]
    assert train_tokenizer(texts).to_str() == train_tokenizer(texts).to_str()


def test_every_conversation_but_its_first_request_continues_an_earlier_one():
    plan = plan_requests(read_trace(), sessions=12, requests=None)
    assert len(plan.requests) == plan.requests_in_trace == 162
    assert all((it.parent is None) == (it.turn == 0) for it in plan.requests)
    assert all(plan.requests[it.parent].session == it.session for it in plan.requests if it.parent is not None)
