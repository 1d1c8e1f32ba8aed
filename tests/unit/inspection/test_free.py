"""`kvtier inspect free` removes frames of earlier formats, or those of a model or an age, and nothing else."""

import io
import json
import sys

import pytest
from tests.frames import patched
from tests.golden.small_stores import CHUNKS, KINDS, placed, text_of

from kvtier.cli.main import run

OBJECTS = 2 * CHUNKS


@pytest.fixture(params=[kind for kind in KINDS if kind != "valkey"])
def kind(request):
    return request.param


def told(capsys, *words) -> dict:
    assert run(["inspect", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_store_of_format_2_is_freed(kind, tmp_path, capsys):
    with placed(kind, tmp_path / "store", 2) as tier:
        text = text_of(tier)
        found = told(capsys, "stat", text, "--heads")
        assert found["objects"] == OBJECTS
        assert found["formats"] == {"2": {"objects": OBJECTS, "bytes": found["bytes"]}}
        counts = {"objects": OBJECTS, "bytes": found["bytes"]}
        assert told(capsys, "free", text, "--dry-run") == counts
        assert told(capsys, "stat", text)["objects"] == OBJECTS
        assert told(capsys, "free", text, "--yes") == counts
        left = told(capsys, "stat", text, "--heads")
        assert (left["objects"], left["formats"], left["states"]) == (0, {}, {})
        assert told(capsys, "free", text)["objects"] == 0  # there is nothing to ask


def test_a_store_of_the_present_format_loses_nothing(kind, tmp_path, capsys):
    with placed(kind, tmp_path / "store") as tier:
        assert told(capsys, "free", text_of(tier), "--yes")["objects"] == 0
        assert told(capsys, "stat", text_of(tier), "--heads")["formats"]["3"]["objects"] == OBJECTS
        assert told(capsys, "verify", text_of(tier))["bad"] == 0


def test_later_and_damaged_frames_are_kept(tmp_path, capsys):
    with placed("directory", tmp_path / "store") as tier:
        paths = sorted(path for path in tier.path.glob("objects/*/*"))
        frames = [path.read_bytes() for path in paths]
        paths[0].write_bytes(patched(frames[0], 8, "I", 4))
        paths[1].write_bytes(frames[1][:8] + b"\2" + frames[1][9:])  # of format 3, its version damaged
        paths[2].write_bytes(b"\0" * 4096)
        paths[3].write_bytes(patched(frames[3], 8, "I", 1))
        assert told(capsys, "free", str(tier.path), "--yes")["objects"] == 1
        assert [path.exists() for path in paths] == [True, True, True, False, True, True]


def test_it_asks(tmp_path, capsys, monkeypatch):
    with placed("directory", tmp_path / "store", 2) as tier:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert run(["inspect", "free", str(tier.path)]) == 2
        error = capsys.readouterr().err
        assert f" {OBJECTS} objects of earlier formats" in error
        assert "give --yes" in error
        assert told(capsys, "stat", str(tier.path))["objects"] == OBJECTS


def test_objects_of_a_model_are_removed_and_no_others(kind, tmp_path, capsys):
    with placed(kind, tmp_path / "store") as tier:
        text = text_of(tier)
        (model,) = told(capsys, "stat", text)["models"]
        assert told(capsys, "free", text, "--model", "0" if model[0] != "0" else "1", "--yes")["objects"] == 0
        assert told(capsys, "stat", text)["objects"] == OBJECTS
        assert told(capsys, "free", text, "--model", model[:6].upper(), "--dry-run")["objects"] == OBJECTS
        assert told(capsys, "free", text, "--model", model[:6], "--yes")["objects"] == OBJECTS
        assert told(capsys, "stat", text)["objects"] == 0


def test_objects_of_an_age_are_removed_where_a_store_records_their_use(kind, tmp_path, capsys):
    with placed(kind, tmp_path / "store") as tier:
        text = text_of(tier)
        if kind not in ("directory", "disk"):
            assert run(["inspect", "free", text, "--age", "0", "--yes"]) == 2
            assert "does not record when an object was used; allowed: --model" in capsys.readouterr().err
            assert told(capsys, "stat", text)["objects"] == OBJECTS
            return
        (model,) = told(capsys, "stat", text)["models"]
        assert told(capsys, "free", text, "--age", "1e10", "--yes")["objects"] == 0
        assert told(capsys, "free", text, "--model", model, "--age", "1e10", "--yes")["objects"] == 0
        assert told(capsys, "stat", text)["objects"] == OBJECTS
        engines = [it.read_bytes() for it in tmp_path.rglob("kvtier-status.json")]
        assert told(capsys, "free", text, "--age", "0", "--yes")["objects"] == OBJECTS
        # A tool has no cap of its own: `kvtier inspect health` goes on to show the engine's.
        assert [it.read_bytes() for it in tmp_path.rglob("kvtier-status.json")] == engines
        assert len(engines) == (kind == "disk")


def test_digits_of_a_model_and_an_age_must_make_sense(tmp_path, capsys):
    with placed("directory", tmp_path / "store") as tier:
        for words, error in ((["--model", "xyz"], "allowed: the first hexadecimal"), (["--age", "-1"], "--age")):
            assert run(["inspect", "free", str(tier.path), *words, "--yes"]) == 2
            assert error in capsys.readouterr().err
        assert told(capsys, "stat", str(tier.path))["objects"] == OBJECTS
