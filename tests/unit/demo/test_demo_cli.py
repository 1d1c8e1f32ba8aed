"""`kvtier demo`: every mistake is refused with one clear line before any pass is run."""

import pytest

from kvtier.cli.main import run
from kvtier.demo import run as demo_run


@pytest.fixture(autouse=True)
def no_pass(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("a pass was started")

    monkeypatch.setattr(demo_run, "pass_events", refuse)
    monkeypatch.setattr(demo_run, "check_libraries", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "huge"], "--model must be one of smollm2, tiny, small, medium, got 'huge'"),
        (["--model", "smollm2", "--seed", "1"], "--seed 1 is for random weights; the model smollm2 is pretrained"),
        (["--seed", "-1"], "'--seed': -1 is not in the range 0<=x<="),
        (["--new-tokens", "0"], "'--new-tokens': 0 is not in the range 1<=x<=256"),
        (["--sessions", "13"], "--sessions must be in 1..12 (the conversations of the trace), got 13"),
        (["--sessions", "1", "--requests", "7"], "--requests must be in 1..6 (the requests of 1 conversations), got 7"),
        (["--threads", "-2"], "'--threads': -2 is not in the range 0<=x<=1024"),
        (["--requests", "x"], "'x' is not a valid integer"),
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


def test_missing_libraries_are_named_with_what_brings_them(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(demo_run, "NEEDED", ("json", "no_such_library"))
    assert run(["demo", "--json"]) == 2
    told = capsys.readouterr().err
    assert "needs no_such_library" in told
    assert "pip install 'tokenizers>=0.22' 'torch>=2.11' 'transformers>=5.17'" in told
