"""The load generator of `kvtier bench serve` without a server: aiperf's records, and what is refused."""

import io
import json
import sys
from pathlib import Path

import pytest
from tests.programs import program

from kvtier.errors import ConfigError
from kvtier.tools.bench.serve import generator
from kvtier.tools.bench.serve.generator import REQUESTS_FILE, GeneratorSettings, _EndedRequests, find_generator, run
from kvtier.tools.bench.serve.generator import served_model as ask_for_model
from kvtier.tools.bench.serve.workload import PRESETS, draw


def record(conversation: str, turn: int, **more) -> bytes:
    """A line of aiperf 0.13.0, without the fields that are not read."""
    about = {
        "x_request_id": f"{conversation}-{turn}",
        "conversation_id": conversation,
        "turn_index": turn,
        "request_start_ns": 1795394549278257730,
        "request_end_ns": 1795394549365548968,
        "was_cancelled": False,
    }
    metrics = {
        "time_to_first_token": {"value": 50.0, "unit": "ms"},
        "usage_prompt_tokens": {"value": 300, "unit": "tokens"},
        "usage_completion_tokens": {"value": 12, "unit": "tokens"},
    }
    return json.dumps({"metadata": about | more.pop("about", {}), "metrics": metrics} | more).encode() + b"\n"


def test_records_are_copied_as_they_grow_and_a_torn_one_waits(tmp_path):
    path, kept = tmp_path / "profile_export.jsonl", io.StringIO()
    requests = _EndedRequests(path, kept)
    requests.read()  # not there yet
    lines = [
        record("warm.0.0", 1),
        record("user.7.2", 1, about={"request_start_ns": 1795394550000000000, "request_end_ns": 1795394551000000000}),
        record("user.8.0", 0, error={"type": "ClientOSError", "message": "reset"}, metrics={}),
        record("user.9.0", 0, about={"was_cancelled": True}),
    ]
    with path.open("ab") as file:
        for part in (lines[0] + lines[1][:40], lines[1][40:], lines[2] + lines[3]):
            file.write(part)
            file.flush()
            requests.read()
    warm, good, failed, cancelled = (json.loads(line) for line in kept.getvalue().splitlines())
    assert (warm["user"], warm["turn"], warm["is_warm_up"]) == (0, 1, True)
    assert good == {
        "id": "user.7.2-1", "user": 7, "turn": 3, "sent_s": 1795394550.0, "first_s": pytest.approx(1795394550.05),
        "ended_s": 1795394551.0, "prompt_tokens": 300, "output_tokens": 12, "is_warm_up": False,
        "error": None,
    }  # fmt: skip
    assert (failed["error"], failed["first_s"], failed["prompt_tokens"]) == ("ClientOSError: reset", None, None)
    assert "cancelled" in cancelled["error"]
    assert (requests.count, requests.failed, requests.is_last_failed) == (3, 2, True)
    assert requests.first_sent_s == pytest.approx(1795394549.2782577)


@pytest.mark.parametrize("command", ["no-such-aiperf", sys.executable, "", "false"])
def test_a_generator_that_does_not_run_says_how_to_install_it(command):
    with pytest.raises(ConfigError, match=r"--generator .* does not run .*pip install aiperf==0\.13\.0"):
        find_generator(command)


def test_the_generator_beside_the_checkout_is_found_as_vllm_is(tmp_path, monkeypatch):
    beside = program(tmp_path / "aiperf", "#!/bin/sh\n")
    monkeypatch.setattr(generator, "BESIDE", beside)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_generator() == (str(beside),)
    with pytest.raises(ConfigError, match="'other' does not run"):
        find_generator("other")


@pytest.mark.parametrize(
    ("url", "message"),
    [("file:///etc/hostname", "is not a URL; allowed: one such as"), ("http://127.0.0.1:9", "does not answer")],
)
def test_a_server_that_is_none_is_named(url, message):
    with pytest.raises(ConfigError, match=message):
        ask_for_model(url)


def run_with(command: str, directory: Path):
    settings = GeneratorSettings(url="http://127.0.0.1:9", model="m", command=command, seconds=1.0)
    return run(draw(PRESETS["dell"].here, seed=1, number=0), settings, directory)


def test_earlier_requests_are_not_overwritten(tmp_path):
    (tmp_path / REQUESTS_FILE).write_text("{}\n")
    with pytest.raises(ConfigError, match="exists"):
        run_with("true", tmp_path)
    assert (tmp_path / REQUESTS_FILE).read_text() == "{}\n"


def test_paths_from_here_reach_aiperf_which_starts_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = '#!/bin/sh\n[ $1 = --version ] || { [ -f "$3" ] && [ -d "$HF_HUB_CACHE" ] && exit 7; }\n'
    program(tmp_path / "aiperf", script)
    Path("run").mkdir()
    ended = run_with("./aiperf", Path("run"))
    assert ended.error is not None
    assert "aiperf ended with 7" in ended.error


def test_a_run_whose_requests_all_failed_says_how_many_and_the_first_error(tmp_path):
    """aiperf ends with 1 and "Unknown Reason" as its last line."""
    lines = b"".join(record(f"user.{n}.0", 0, error={"type": "E", "message": f"refused {n}"}) for n in range(18))
    (tmp_path / "records").write_bytes(lines)
    copied = f"cp {tmp_path}/records profile_export.jsonl; echo Unknown Reason; exit 1"
    command = program(tmp_path / "aiperf", f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{copied}\n")
    (tmp_path / "run").mkdir()
    ended = run_with(str(command), tmp_path / "run")
    assert (ended.requests, ended.failed) == (18, 18)
    assert ended.error == "0 of 18 requests completed; the first error: E: refused 0"
