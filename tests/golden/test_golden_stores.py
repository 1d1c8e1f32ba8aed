"""Small stores of every kind, written by the version that `small_stores` names, are read: a prompt comes back whole."""

import pytest
from small_stores import CHUNKS, KINDS, LAYOUT, PREFIX, ROOT, TOKENS, engine, files, opened, placed, prefix_of, unpacked
from tests.rig import Engine, load_places, loaded, looked_up

from kvtier.codec.frame import verify_frame
from kvtier.keys.object_names import object_name
from kvtier.tier.valkey.parts import HEADER, MAGIC

NAMES = {object_name(key, group, LAYOUT.part(group), LAYOUT.digest(group)) for key in PREFIX.keys for group in range(2)}


@pytest.fixture(params=[kind for kind in KINDS if kind != "valkey"])
def tier(request, tmp_path):
    with placed(request.param, tmp_path / "store") as settings:
        yield settings


def test_a_store_of_an_earlier_version_gives_its_prompt(tier, tmp_path):
    target = Engine(4 * CHUNKS, seed=9)
    session = opened(tier, target, tmp_path / "store")
    assert session.root == ROOT
    assert looked_up(session.session, "a", PREFIX).tokens == TOKENS
    places = load_places(TOKENS)
    assert loaded(session.session, "a", PREFIX, TOKENS, places).tokens == TOKENS
    assert target.same(engine(), places)
    session.session.close()


def test_another_secret_finds_nothing_and_leaves_the_store(tier, tmp_path):
    session = opened(tier, Engine(4 * CHUNKS), tmp_path / "store", secret=bytes(32))
    assert session.root != ROOT
    assert looked_up(session.session, "a", prefix_of(CHUNKS, session.root)).tokens == 0
    session.session.close()
    session = opened(tier, Engine(4 * CHUNKS), tmp_path / "store")
    assert looked_up(session.session, "a", PREFIX).tokens == TOKENS
    session.session.close()


def test_valkeys_values_are_frames_behind_a_header(tmp_path):
    """`tests/cluster` gives them to a server."""
    found = set()
    for key, value in files("valkey", unpacked("valkey", tmp_path)).items():
        magic, _, length = HEADER.unpack(value[: HEADER.size])
        assert (magic, length) == (MAGIC, len(value) - HEADER.size)
        name = verify_frame(value[HEADER.size :]).identity.name
        assert key.endswith(f"/{{{name.hex()}}}")
        found.add(name)
    assert found == NAMES
