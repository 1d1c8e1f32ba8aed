"""`kvtier cache` speaks to an engine's control socket, or says clearly why it cannot."""

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from operator import getitem
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
    "engine_request": "cmpl-chat-1",
    "ended_ago_s": 2.5,
    "prompt_tokens": 700,
    "resident_tokens": 0,
    "found_tokens": {"host": 512},
    "computed_tokens": 188,
    "loaded_tokens": {"host": 512},
    "reasons": [{"code": "absent", "text": "the chunk at token 512 was in no place that answered"}],
    "missing_chunk_now": ["disk"],
    "cuts": [
        {
            "request": "chat-0",
            "at_token": 50,
            "is_exact": True,
            "lost_tokens": 650,
            "repeated_tokens": 640,
            "before": {"ids": [3, 4], "text": "It is "},
            "earlier": {"ids": [5, 7], "text": "Monday"},
            "this": {"ids": [6, 7], "text": None},
        }
    ],
}
HEALTH = {
    "live": True,
    "ready": False,
    "problem": "rank 1 is lost",
    "up_s": 7.5,
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
    assert out.startswith("512 of 700 tokens would be loaded. What ends the hit: the prompt: the rest\n")
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
    assert "a list of token ids" in capsys.readouterr().err
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
    assert "the missing chunk is now in: disk\n" in out
    assert "equals that of request chat-0 up to token 50. 650 tokens after it are lost; 640 of them occur in" in out
    assert out.endswith("both, before  It is\nchat-0        Monday\nchat-1        6 7\n")
    assert told(capsys, "clear", "--all").startswith("cleared: 7 objects left host memory, 2 stay until")
    assert told(capsys, "clear", "--salt", "a")
    out = told(capsys, "health", code=1)
    assert out.startswith("alive, but not ready: rank 1 is lost\n")
    assert "no space" in out
    told(capsys, "health", "--live")
    assert [command for command, _ in at.asked] == ["why", "clear", "clear", "health", "health"]
    assert at.asked[1:3] == [("clear", {"all": True}), ("clear", {"salt": "a"})]


def test_why_shows_ids_as_text_with_a_tokenizer_and_escapes_what_could_drive_a_terminal(at, capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "two\nlines": 5, "\x1b[2J": 6, "end": 7}, "a"))
    words.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        out = told(capsys, "why", "chat-1", "--tokenizer", str(path))
        assert "chat-0        two\\nlines end\nchat-1        \\x1b[2J end\n" in out
    (cut,) = json.loads(told(capsys, "why", "chat-1", "--tokenizer", str(tmp_path), "--json"))["cuts"]
    assert cut["earlier"] == {"ids": [5, 7], "text": "two\\nlines end"}
    at.asked.clear()
    for path, wrong in (
        (tmp_path / "none", "is not a file; allowed: a tokenizer.json"),
        (at.path.parent, "not a file"),
    ):
        assert run(["cache", "why", "chat-1", "--tokenizer", str(path)]) == 2
        assert wrong in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert run(["cache", "why", "chat-1", "--tokenizer", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert at.asked == []


def test_why_draws_a_cut_that_only_chunk_keys_tell(at, capsys, monkeypatch):
    nothing = {"ids": [], "text": None}
    cut = {"request": "a", "at_token": 512, "is_exact": False, "lost_tokens": 88, "repeated_tokens": None}
    monkeypatch.setitem(WHY, "cuts", [cut | dict.fromkeys(("before", "earlier", "this"), nothing)])
    out = told(capsys, "why", "chat-1")
    assert out.endswith("request a up to a token of the chunk at 512. 88 tokens after it are lost\n")
    monkeypatch.setitem(WHY, "cuts", [])
    assert told(capsys, "why", "chat-1").endswith("the missing chunk is now in: disk\n")


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
    assert "matches no socket" in capsys.readouterr().err


def test_a_path_that_names_the_process_stands_for_the_only_engine(at, capsys, monkeypatch):
    pattern = str(at.path.with_name("kv-{pid}"))
    assert told(capsys, "why", "chat-1", "--set", f"control.socket={pattern}")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(at.path.with_name("kv-1")))
    assert told(capsys, "why", "chat-1", "--socket", pattern), "a killed engine has left its socket"
    other = ControlSocket(at.path.with_name("kv-2"), lambda *_: FOUND)
    assert run(["cache", "why", "chat-1", "--socket", pattern]) == 2
    error = capsys.readouterr().err
    assert "matches 2 sockets" in error
    assert str(at.path) in error
    other.close()


RESULTS = {
    "find": FOUND,
    "why": WHY,
    "prefetch": {"tokens": 700, "stored_tokens": 512, "host_tokens": 512},
    "pin": {"tokens": 700, "stored_tokens": 512, "host_tokens": 512, "pinned_tokens": 512, "seconds": 60.0},
    "unpin": {"tokens": 700, "unpinned_tokens": 512},
    "clear": CLEARED,
    "health": HEALTH,
}
CALLS = {"why": ["chat-1"], "clear": ["--all"], "health": []}
"""Arguments of a command; of the others a prompt."""
OTHER_VALUES = [
    None,
    True,
    -1.5,
    float("nan"),
    float("inf"),
    10**400,
    "x",
    [],
    [None],
    [[]],
    {},
    {"a": None},
    {"a": {}},
]


def changed(result: dict, *path: object, value: object) -> bytes:
    """An answer with `result`, in which the value at `path` is another."""
    made = json.loads(json.dumps(result))
    inside = made
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    return json.dumps({"version": 1, "result": made}).encode() + b"\n"


def paths(value: object, *before: object) -> list[tuple[object, ...]]:
    """Where the values of a result are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [it for key, below in inner for it in ((*before, key), *paths(below, *before, key))]


@contextmanager
def answering(path: Path, answers: list[bytes]) -> Iterator[None]:
    """A program that gives each client one of `answers`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        listener.settimeout(60)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(60)


def asked(command: str, path: Path, prompt: Path, capsys, *more: str) -> tuple[int, str]:
    """The exit code of a command, and all that it printed."""
    code = run(["cache", command, *CALLS.get(command, [str(prompt)]), "--socket", str(path), *more])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("command", RESULTS)
def test_no_form_of_an_answer_ends_in_a_traceback(command, tmp_path, capsys):
    """Neither another release's engine nor a hostile program makes `kvtier cache` fail with anything but a message."""
    prompt, path, result = tmp_path / "prompt", tmp_path / "s", RESULTS[command]
    prompt.write_text("[1]")
    answers = [changed(result, *at, value=value) for at in paths(result) for value in OTHER_VALUES]
    answers += [
        json.dumps({"version": 1, "result": {**result, "more": 1}} | more).encode() + b"\n"
        for more in ({"result": {}}, {"result": []}, {"result": None}, {"version": [1] * 9**5}, {"version": 10**400})
    ]
    answers += [
        json.dumps({"version": 1, "error": it}).encode() + b"\n" for it in (*OTHER_VALUES, "x" * 10**6, "\ud800")
    ]
    answers += [
        b'{"version":1,"result":' + b'{"a":' * 10**5 + b"\n",
        b"[" * 10**6 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"{}\n",
    ]
    answers += [b'{"version":1,"error":' + b"[" * 900 + b"]" * 900 + b"}\n", b'{"version":1,"error":"cut']
    said = []
    with answering(path, answers):
        for _ in answers:
            code, printed = asked(command, path, prompt, capsys)
            assert code in {0, 1, 2}
            assert len(printed) < 5000
            said.append(printed)
    assert sum("does not have the form of this release" in it for it in said) > len(answers) / 3


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("command", RESULTS)
def test_no_text_of_an_answer_steers_a_terminal(command, as_json, tmp_path, capsys):
    prompt, path, result = tmp_path / "prompt", tmp_path / "s", RESULTS[command]
    prompt.write_text("[1]")
    evil = "\x1b]0;pwn\x07\x9b2J\u202e\ud800\r"
    texts = [at for at in paths(result) if isinstance(reduce(getitem, at, result), str)]
    answers = [changed(result, *at, value=evil) for at in texts]
    answers += [changed(result, *at[:-1], evil, value="x") for at in texts if isinstance(at[-1], str)]
    answers.append(json.dumps({"version": 1, "error": evil}).encode() + b"\n")
    shown = 0
    with answering(path, answers):
        for _ in answers:
            _, printed = asked(command, path, prompt, capsys, *as_json)
            assert not set(evil) - {"0", ";", "]", "p", "w", "n", "2", "J"} & set(printed)
            printed.encode()
            shown += "pwn" in printed
    assert shown, "the texts are shown, with escapes"


def test_an_answer_of_the_right_form_is_shown_whole(at, capsys, tmp_path):
    """The control of the two tests above: these results are as an engine gives them."""
    prompt, path = tmp_path / "prompt", tmp_path / "s"
    prompt.write_text("[1]")
    whole = [json.dumps({"version": 1, "result": it}).encode() + b"\n" for it in RESULTS.values()]
    with answering(path, whole):
        for command, result in RESULTS.items():
            code, printed = asked(command, path, prompt, capsys, "--json")
            assert (json.loads(printed), code in {0, 1}) == (result, True)


def test_a_deadline_is_bounded(at, capsys):
    assert run(["cache", "health", "--deadline", "61"]) == 2
    assert "--deadline" in capsys.readouterr().err
    assert Path(at.path).exists()
