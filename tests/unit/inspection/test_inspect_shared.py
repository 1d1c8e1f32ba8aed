"""`kvtier inspect` on a store that nodes share: by secret and model, without reading frames, never outside of it."""

import io
import json
import sys

import pytest
from tests.rig import LAYOUT, Engine, config, places_of, prefix_of, stored

from kvtier.cli.main import run
from kvtier.config.sections import StoreConfig
from kvtier.inspection import inspector
from kvtier.keys.secret import Secret, model_id
from kvtier.runtime.open import open_session
from kvtier.tier.shared_directory.kind import SharedDirectorySettings

MODELS = (bytes(range(32)), bytes(range(32, 64)))
CHUNKS, OBJECTS = 6, 12


def fill(root, model, secret) -> None:
    tier = SharedDirectorySettings(path=root, capacity_bytes=1 << 30, seal="off")
    base = config(None, host_chunks=40)
    made = type(base)(host=base.host, tiers=(tier,), store=StoreConfig(secret=Secret(secret)))
    kv = open_session(made, LAYOUT, model, Engine(64, seed=1).copier())
    assert stored(kv.session, "a", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS))).dropped == 0
    assert kv.session.close().flushed


@pytest.fixture
def store(tmp_path):
    """Two models of one secret, and one of another secret."""
    root = tmp_path / "kv"
    fill(root, MODELS[0], bytes(32))
    fill(root, MODELS[1], bytes(32))
    fill(root, MODELS[0], bytes(range(32)))
    return root


def told(capsys, *arguments) -> dict:
    run(["inspect", *map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_stat_lists_and_reads_no_frame_unless_asked(store, capsys, monkeypatch):
    full = told(capsys, "stat", f"shared_directory:{store}", "--heads")
    assert (full["objects"], full["unreadable"]) == (3 * OBJECTS, 0)
    shares = {name: share["objects"] for name, share in full["models"].items()}
    served = [(bytes(32), MODELS[0]), (bytes(32), MODELS[1]), (bytes(range(32)), MODELS[0])]
    assert shares == {model_id(secret, model).hex()[:12]: OBJECTS for secret, model in served}
    assert all(share["tokens"] > 0 for share in full["models"].values())

    def refuse(*_):
        raise AssertionError("a frame was read")

    monkeypatch.setattr(inspector, "read_head", refuse)
    listed = told(capsys, "stat", f"shared_directory:{store}")
    assert (listed["objects"], listed["bytes"]) == (full["objects"], full["bytes"])
    assert {name: share["objects"] for name, share in listed["models"].items()} == shares
    assert full["formats"]["3"] == {"objects": full["objects"], "bytes": full["bytes"]}
    assert (listed["formats"], listed["states"]) == ({}, {})
    run(["inspect", "stat", f"shared_directory:{store}"])
    assert "heads not read; --heads reads them" in capsys.readouterr().out


def test_a_page_of_a_listing_has_its_limit(store, capsys):
    url = f"shared_directory:{store}"
    first = told(capsys, "ls", url, "--limit", 20)
    assert (len(first["objects"]), first["total"]) == (20, 3 * OBJECTS)
    rest = told(capsys, "ls", url, "--limit", 20, "--after", first["next"])
    assert (len(rest["objects"]), rest["next"]) == (16, None)
    names = [row["name"] for row in first["objects"] + rest["objects"]]
    assert names == sorted(names)
    assert len(names) == 3 * OBJECTS


def test_bad_objects_are_reported_and_repaired(store, capsys):
    url = f"shared_directory:{store}?seal=off"
    assert run(["inspect", "verify", url]) == 0
    assert f"{3 * OBJECTS} objects" in capsys.readouterr().out
    broken = next(path for path in store.glob("*/*/*/*") if path.is_file())
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    found = told(capsys, "verify", url, "--repair")
    assert (found["bad"], found["dropped"], found["bad_objects"][0]["name"]) == (1, 1, broken.name)
    assert not broken.exists()
    assert run(["inspect", "verify", url]) == 0


def test_purge_asks_and_removes_only_what_it_lists(store, capsys, monkeypatch):
    url = f"shared_directory:{store}"
    foreign = [store / "notes.txt", store / "objects" / "x", store / ("f" * 32) / "y", store.parent / "z"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(["inspect", "purge", url]) == 2
    assert "not a terminal; give --yes" in capsys.readouterr().err
    assert told(capsys, "stat", url)["objects"] == 3 * OBJECTS
    assert told(capsys, "purge", url, "--yes")["objects"] == 3 * OBJECTS
    assert told(capsys, "stat", url)["objects"] == 0
    assert all(path.read_text() == "mine" for path in foreign)
    fill(store, MODELS[0], bytes(32))
    assert told(capsys, "stat", url)["objects"] == OBJECTS, "the store is still one"


@pytest.mark.parametrize("url", ["shared_directory:{}", "shared_directory:{}/missing", "shared_directory:{}/file"])
def test_where_no_store_is_it_says_so(tmp_path, capsys, url):
    (tmp_path / "file").write_text("")
    assert run(["inspect", "stat", url.format(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is not " in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
