"""`kvtier cache` speaks to an engine's control socket, or says clearly why it cannot."""

import io
import json
import socket
import sys
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.runtime.control_socket import ANSWER_BYTES_MAX, ControlError, ControlSocket

FOUND = {
    "tokens": 700,
    "chunk_tokens": 256,
    "hit_tokens": 512,
    "end": "the prompt: the rest",
    "ranges": [
        {"from": 0, "to": 256, "places": {"host": "all", "disk": "part"}},
        {"from": 256, "to": 512, "places": {}},
    ],
    "silent": {"far": "is down"},
}
WHY = {
    "request": "chat-1",
    "ended_ago_s": 2.5,
    "prompt_tokens": 700,
    "computed_tokens": 188,
    "loaded_tokens": {"host": 512},
    "reasons": [{"code": "absent", "text": "the chunk at token 512 was in no place that answered"}],
    "missing_chunk_now": ["disk"],
}
HEALTH = {
    "live": True,
    "ready": False,
    "problem": "rank 1 is lost",
    "tiers": {"disk": {"reads": True, "writes": False, "detail": "no space"}},
}
CLEARED = {"freed_objects": 7, "kept_objects": 2, "notes": ["objects in disk are kept"]}


@pytest.fixture
def at(tmp_path, monkeypatch):
    """A socket whose engine gives these answers, and what it was asked."""
    asked = []

    def answer(command: str, arguments: dict, _until_s: float) -> dict:
        asked.append((command, arguments))
        if "refuse" in arguments.values():
            raise ControlError("request 'refuse' is unknown")
        return {"find": FOUND, "why": WHY, "health": HEALTH, "clear": CLEARED}[command]

    (tmp_path / "run").mkdir(mode=0o700)
    server = ControlSocket(tmp_path / "run" / "kv-{pid}", answer)
    server.asked = asked
    monkeypatch.setenv("KVTIER_CONTROL__SOCKET", str(server.path))
    yield server
    server.close()


def told(capsys, *words: str, code: int = 0) -> str:
    assert run(["cache", *words]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", '{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3], "token_strs": null}']
)
def test_find_takes_a_list_or_the_answer_of_tokenize(at, capsys, monkeypatch, tmp_path, text):
    (tmp_path / "prompt").write_text(text)
    out = told(capsys, "find", str(tmp_path / "prompt"), "--adapter", "poet")
    assert out.startswith("512 of 700 tokens would be loaded. End of the run: the prompt: the rest\n")
    assert "host, disk (part)" in out
    assert "absent" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setenv("KVTIER_CACHE_SALT", "tenant")
    assert json.loads(told(capsys, "find", "--json")) == FOUND
    assert at.asked == [
        ("find", {"tokens": [1, 2, 3], "salt": "", "adapter": "poet"}),
        ("find", {"tokens": [1, 2, 3], "salt": "tenant", "adapter": ""}),
    ]


@pytest.mark.parametrize("text", ["", "hello", "{}", '{"tokens": "x"}', "[1, true]", "[1.5]", "[" * 100_000])
def test_find_refuses_what_is_no_list_of_tokens(at, capsys, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert run(["cache", "find"]) == 2
    assert "no JSON list of token ids" in capsys.readouterr().err
    assert at.asked == []


@pytest.mark.parametrize("content", [bytes(range(256)), b"[1, 2, \xff]", b"[1]" + b" " * ANSWER_BYTES_MAX])
def test_find_refuses_a_file_that_is_no_text_or_too_long(at, capsys, tmp_path, content):
    (tmp_path / "prompt").write_bytes(content)
    assert run(["cache", "find", str(tmp_path / "prompt")]) == 2
    assert f"at most {ANSWER_BYTES_MAX} characters" in capsys.readouterr().err
    assert at.asked == []


def test_why_clear_and_health_answer_first(at, capsys):
    out = told(capsys, "why", "chat-1")
    assert out.startswith("chat-1: of 700 tokens 188 were computed; loaded: 512 from host; ended: 2 s ago\n")
    assert "absent" in out
    assert out.endswith("the missing chunk is now in: disk\n")
    assert told(capsys, "clear", "--all").startswith("cleared: 7 objects left host memory, 2 stay until")
    assert told(capsys, "clear", "--salt", "a")
    out = told(capsys, "health", code=1)
    assert out.startswith("alive, but not ready: rank 1 is lost\n")
    assert "no space" in out
    told(capsys, "health", "--live")
    assert [command for command, _ in at.asked] == ["why", "clear", "clear", "health", "health"]
    assert at.asked[1:3] == [("clear", {"all": True}), ("clear", {"salt": "a"})]


def test_an_error_of_the_engine_is_printed(at, capsys):
    assert run(["cache", "why", "refuse"]) == 2
    assert capsys.readouterr().err == "kvtier: request 'refuse' is unknown\n"


def test_no_engine_is_an_error_that_names_path_and_setting_and_an_unhealthy_engine(tmp_path, capsys):
    path = str(tmp_path / "none")
    assert run(["cache", "why", "r", "--socket", path]) == 2
    assert f"no engine listens at {path} (control.socket): No such file" in capsys.readouterr().err
    assert run(["cache", "why", "r"]) == 2
    assert "no engine is named; set control.socket = PATH" in capsys.readouterr().err
    for way, where in (("--live", path), ("--ready", path), ("--ready", f"{path}-{{pid}}")):
        health = json.loads(told(capsys, "health", way, "--socket", where, "--json", code=1))
        assert health["problem"].startswith("no engine listens")
    assert run(["cache", "why", "r", "--socket", f"{path}-{{pid}}"]) == 2
    assert "stands for no socket" in capsys.readouterr().err


def test_a_path_that_names_the_process_stands_for_the_only_engine(at, capsys, monkeypatch):
    pattern = str(at.path.with_name("kv-{pid}"))
    assert told(capsys, "why", "chat-1", "--set", f"control.socket={pattern}")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(at.path.with_name("kv-1")))
    assert told(capsys, "why", "chat-1", "--socket", pattern), "a killed engine has left its socket"
    other = ControlSocket(at.path.with_name("kv-2"), lambda *_: FOUND)
    assert run(["cache", "why", "chat-1", "--socket", pattern]) == 2
    error = capsys.readouterr().err
    assert "stands for 2 sockets" in error
    assert str(at.path) in error
    other.close()


def test_a_deadline_is_bounded(at, capsys):
    assert run(["cache", "health", "--deadline", "61"]) == 2
    assert "--deadline" in capsys.readouterr().err
    assert Path(at.path).exists()
