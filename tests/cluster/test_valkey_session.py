"""Sessions of several nodes share KV through Valkey; servers that fail cost them misses only."""

import json

import pytest
from tests.cluster.valkey_world import fresh_prefix
from tests.golden import small_stores
from tests.golden.other_versions import checked_out, used
from tests.rig import Engine, load_places, loaded, looked_up
from tests.shared.node_sessions import QUICK, ServerSessionContract, SessionContract
from tests.shared.tool_store import Store, use_tools

from kvtier.tier.valkey.kind import ValkeySettings
from kvtier.tier.valkey.parts import HEADER


def servers(*nodes, prefix) -> ValkeySettings:
    return ValkeySettings(addresses=",".join(f"127.0.0.1:{node.port}" for node in nodes), prefix=prefix, **QUICK)


@pytest.mark.cluster_core
class TestServer(ServerSessionContract):
    @pytest.fixture
    def places(self, valkey):
        self.valkey, self.prefix = valkey, fresh_prefix()
        return (servers(valkey, prefix=self.prefix),) * 2

    @pytest.fixture
    def server(self, valkey):
        return valkey.kill, valkey.restart

    @pytest.fixture
    def faults(self, valkey):
        return (valkey.pause, valkey.resume), (valkey.kill, valkey.restart)

    def frames(self):
        """Behind the headers of values; `test_valkey_faults` damages headers."""
        keys = [key for key in self.valkey.call("KEYS", f"{self.prefix}/*") if key.endswith(b"}")]
        values = {key: self.valkey.call("GET", key) for key in keys}
        self.headers = {key: value[: HEADER.size] for key, value in values.items()}
        return {key: value[HEADER.size :] for key, value in values.items()}

    def replace(self, key, frame):
        self.valkey.call("SET", key, self.headers[key] + frame)


@pytest.mark.cluster_core
def test_what_a_node_stores_in_a_cluster_another_loads(cluster, tmp_path):
    places = (servers(*cluster.nodes[:2], prefix=fresh_prefix()),) * 2
    SessionContract().test_what_one_node_stores_another_loads_and_other_secrets_do_not(places, tmp_path)


@pytest.mark.cluster_core
def test_the_values_of_an_earlier_version_give_their_prompt(valkey, tmp_path):
    store, target = small_stores.unpacked("valkey", tmp_path / "store"), Engine(4 * small_stores.CHUNKS, seed=9)
    for key, value in small_stores.files("valkey", store).items():
        valkey.call("SET", key, value)
    session = small_stores.opened(small_stores.settings("valkey", store, valkey.port), target, store).session
    assert looked_up(session, "a", small_stores.PREFIX).tokens == small_stores.TOKENS
    places = load_places(small_stores.TOKENS)
    assert loaded(session, "a", small_stores.PREFIX, small_stores.TOKENS, places).tokens == small_stores.TOKENS
    assert target.same(small_stores.engine(), places)
    session.close()


@pytest.mark.cluster_core
@pytest.mark.parametrize(("other", "freed"), [("2", 2 * small_stores.CHUNKS), ("4", 0)])
def test_objects_of_another_format_are_misses_that_stay(valkey, tmp_path, other, freed):
    """As `tests/golden/test_golden_upgrade.py` has it for other kinds."""
    if other == "2" and checked_out(tmp_path / "format-2") is None:
        pytest.skip("no history here")
    place = {"port": valkey.port, "prefix": (prefix := fresh_prefix())}
    others = place | ({"top": tmp_path / "format-2"} if other == "2" else {"later": 1})
    folder, objects = tmp_path / "store", 2 * small_stores.CHUNKS
    assert [used("valkey", folder, **it) for it in (place, others, place, others)] == [0, 0, *[small_stores.TOKENS] * 2]
    store = Store(f"valkey:127.0.0.1:{valkey.port}?prefix={prefix}", tmp_path)
    formats = json.loads(store.kvtier("inspect", "stat", store.url, "--heads", "--json"))["formats"]
    assert {version: it["objects"] for version, it in formats.items()} == {"3": objects, other: objects}
    assert json.loads(store.kvtier("inspect", "free", store.url, "--yes", "--json"))["objects"] == freed
    assert used("valkey", folder, **place) == small_stores.TOKENS


@pytest.mark.parametrize("store_of", ["valkey", "cluster"])
def test_the_tools_on_a_store_in_use(request, store_of, tmp_path):
    given = request.getfixturevalue(store_of)
    nodes = [given] if store_of == "valkey" else given.masters()
    prefix = fresh_prefix()
    store = Store(f"valkey:127.0.0.1:{nodes[0].port}?prefix={prefix}", tmp_path)
    use_tools(store, "valkey", ("raw", "tier", "session") if store_of == "valkey" else ("tier", "session"))
    err = store.kvtier("bench", "tier", f"{store.url}&password=secret-word", code=2)
    assert err.count("\n") == 1
    assert "secret-word" not in err
