"""Small stores of every kind: a prompt of the present format comes back whole, and earlier formats are misses."""

import pytest
from small_stores import CHUNKS, KINDS, LAYOUT, PREFIX, ROOT, TOKENS, engine, files, opened, placed, prefix_of, unpacked
from tests.rig import Engine, load_places, loaded, looked_up, places_of, stored

from kvtier.codec.frame import verify_frame
from kvtier.keys.object_names import object_name
from kvtier.tier.valkey.parts import HEADER, MAGIC

NAMES = {object_name(key, group, LAYOUT.part(group), LAYOUT.digest(group)) for key in PREFIX.keys for group in range(2)}


@pytest.fixture(params=[kind for kind in KINDS if kind != "valkey"])
def tier(request, tmp_path):
    with placed(request.param, tmp_path / "store") as settings:
        yield settings


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "valkey"])
def test_a_store_of_format_2_is_misses_and_takes_the_prompt_again(kind, tmp_path, caplog):
    with placed(kind, tmp_path / "store", 2) as settings:
        source, target = engine(), Engine(4 * CHUNKS, seed=9)
        session = opened(settings, source, tmp_path / "store")
        assert looked_up(session.session, "a", PREFIX).tokens == 0
        assert stored(session.session, "a", PREFIX, places_of(range(CHUNKS))).dropped == 0
        assert session.session.close().flushed
        session = opened(settings, target, tmp_path / "store")
        assert looked_up(session.session, "b", PREFIX).tokens == TOKENS
        places = load_places(TOKENS)
        assert loaded(session.session, "b", PREFIX, TOKENS, places).tokens == TOKENS
        assert target.same(source, places)
        session.session.close()
    assert {record.name for record in caplog.records} <= {
        "kvtier.tier.shared_directory.tier"
    }  # no drive of other nodes


def test_a_store_of_the_present_format_gives_its_prompt(tier, tmp_path):
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
