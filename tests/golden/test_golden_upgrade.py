"""Two versions of kvtier on one store, after an upgrade and after a rollback: misses, no errors, nothing lost."""

import json
import logging
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from other_versions import checked_out, used
from small_stores import CHUNKS, KINDS, PREFIX, TOKENS, engine, opened, placed, text_of
from tests.rig import Engine, load_places, loaded, looked_up

from kvtier.cli.main import run

OBJECTS = 2 * CHUNKS
LATER = 1
LATER_MARKER = json.dumps({"version": 9, "store_id": "0" * 32, "created": ""}).encode()
MARKERS = {
    "directory": "kvtier-store.json",
    "disk": "rank-0/kvtier-disk.json",
    "shared_directory": "kvtier-store.json",
}


@pytest.fixture(scope="module")
def format_2(tmp_path_factory):
    top = checked_out(tmp_path_factory.mktemp("format-2"))
    if top is None:
        pytest.skip("no history here")
    return top


@pytest.fixture(params=[kind for kind in KINDS if kind != "valkey"])
def kind(request):
    return request.param


def place(tier) -> dict[str, object]:
    """What the settings of a placed store have besides its folder."""
    return {"port": urlsplit(tier.endpoint).port} if tier.kind == "s3" else {"capacity_bytes": 1 << 30}


def has_its_prompt(tier, folder) -> bool:
    target, places = Engine(4 * CHUNKS, seed=9), load_places(TOKENS)
    session = opened(tier, target, folder).session
    found = looked_up(session, "a", PREFIX).tokens
    if found == TOKENS:
        assert loaded(session, "a", PREFIX, TOKENS, places).tokens == TOKENS
        assert target.same(engine(), places)
    session.close()
    return found == TOKENS


def printed(capsys, *words) -> dict:
    assert run(["inspect", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def formats(capsys, tier) -> dict[str, int]:
    return {name: it["objects"] for name, it in printed(capsys, "stat", text_of(tier), "--heads")["formats"].items()}


def test_the_version_before_finds_nothing_and_takes_nothing_away(kind, format_2, tmp_path, capsys):
    """A rollback from format 3 to 2, then an upgrade again."""
    folder = tmp_path / "store"
    with placed(kind, folder) as tier:
        assert used(kind, folder, format_2, **place(tier)) == 0
        assert formats(capsys, tier) == {"2": OBJECTS, "3": OBJECTS}
        assert has_its_prompt(tier, folder)
        assert used(kind, folder, format_2, **place(tier)) == TOKENS
        assert printed(capsys, "free", text_of(tier), "--yes")["objects"] == OBJECTS
        assert formats(capsys, tier) == {"3": OBJECTS}
        assert has_its_prompt(tier, folder)


def test_objects_of_a_later_format_are_misses_that_stay(kind, tmp_path, capsys):
    """A rollback from a later format to this one, and that upgrade again."""
    folder = tmp_path / "store"
    with placed(kind, folder) as tier:
        assert used(kind, folder, later=LATER, **place(tier)) == 0
        assert has_its_prompt(tier, folder)
        assert formats(capsys, tier) == {"3": OBJECTS, "4": OBJECTS}
        assert printed(capsys, "free", text_of(tier), "--yes")["objects"] == 0
        verified = printed(capsys, "verify", "--repair", text_of(tier))
        assert (verified["bad"], verified["unreadable"], verified["dropped"]) == (0, OBJECTS, 0)
        assert used(kind, folder, later=LATER, **place(tier)) == TOKENS


def test_the_same_version_in_another_process_finds_the_prompt(kind, tmp_path):
    """The tests above find nothing because of the format alone."""
    with placed(kind, tmp_path / "store") as tier:
        assert used(kind, tmp_path / "store", **place(tier)) == TOKENS


@pytest.mark.parametrize("kind", MARKERS)
def test_a_store_with_a_later_marker_is_left_alone_and_the_engine_goes_on(kind, tmp_path, caplog):
    """Not the objects, but the store itself has a later version."""
    folder = tmp_path / "store"
    with placed(kind, folder) as tier:
        marker = folder / MARKERS[kind]
        content = marker.read_bytes()
        marker.write_bytes(LATER_MARKER)
        before = {it: it.read_bytes() for it in folder.rglob("*") if it.is_file()}
        assert not has_its_prompt(tier, folder)
        (record,) = [it for it in caplog.records if it.levelno >= logging.ERROR]
        assert "version 9, newer than the one known here" in record.getMessage()
        assert {it: it.read_bytes() for it in folder.rglob("*") if it.is_file()} == before
        marker.write_bytes(content)
        assert has_its_prompt(tier, folder)


def test_a_bucket_with_a_later_marker_is_left_alone_and_the_engine_goes_on(tmp_path, caplog):
    folder = tmp_path / "store"
    with placed("s3", folder) as tier:
        (marker,) = folder.rglob("kvtier")
        place = f"{tier.endpoint}/bucket/{marker.relative_to(folder)}"
        for content, is_there in ((b"kvtier objects, format 9\n", False), (marker.read_bytes(), True)):
            urlopen(Request(place, content, method="PUT"), timeout=10).close()
            assert has_its_prompt(tier, folder) == is_there
        (record,) = [it for it in caplog.records if it.levelno >= logging.ERROR]
        assert "is of another version of kvtier" in record.getMessage()
        with urlopen(place, timeout=10) as found:
            assert found.read() == content
