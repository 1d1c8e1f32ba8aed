"""Sessions of several nodes share KV through Mooncake, and a store that fails costs them misses only."""

import json
from dataclasses import replace

import pytest
from tests.rig import Engine, looked_up, places_of, prefix_of, stored
from tests.shared.node_sessions import QUICK, ServerSessionContract, opened
from tests.shared.tool_store import FEW, Store

from kvtier.testing.tier_contract import empty_frame
from kvtier.tier.mooncake.client import MooncakeClient
from kvtier.tier.mooncake.tier import MooncakeTier


@pytest.mark.cluster_core
class TestMooncake(ServerSessionContract):
    @pytest.fixture
    def places(self, mooncake, monkeypatch):
        settings = mooncake.settings(**QUICK | {"probe_deadline_s": 1.5})  # a busy machine is no change of health
        self.keys, put = [], MooncakeClient.put

        def noting(client, names, views):
            self.keys.extend(names)
            return put(client, names, views)

        monkeypatch.setattr(MooncakeClient, "put", noting)
        spy = self.raw = mooncake.raw(settings)
        yield settings, settings
        spy.close()

    @pytest.fixture
    def server(self, mooncake):
        return mooncake.master.kill, mooncake.restart_master

    @pytest.fixture
    def faults(self, mooncake):
        master = mooncake.master
        return (master.pause, lambda: (master.resume(), mooncake.wait())), (master.kill, mooncake.restart_master)

    def frames(self):
        return {key: self._content(key) for key in self.keys}

    def replace(self, key, frame):
        client = self.raw._client
        assert client.store.remove(key, True) in {0, -704}
        if frame:
            assert client.put([key], [memoryview(frame)]) == [0]

    def _content(self, key):
        client = self.raw._client
        into = empty_frame(client.store.get_size(key))
        with client.registered([into]) as (place,):
            assert client.store.get_into(key, place, into.nbytes) == into.nbytes
        return bytes(into)

    def test_what_one_node_stores_another_loads_and_other_secrets_do_not(self, places, tmp_path, monkeypatch):
        """Every transfer is from or to a slot, which is registered. What is sealed or coded comes from elsewhere."""
        opened_with, holds = [], []
        init = MooncakeTier.__init__

        def noted(tier, client, **arguments):
            opened_with.append(arguments["memory"])
            held = client._holds
            client._holds = lambda *given: (holds.append(held(*given)), holds[-1])[1]
            init(tier, client, **arguments)

        monkeypatch.setattr(MooncakeTier, "__init__", noted)
        places = tuple(replace(place, seal="off") for place in places)
        super().test_what_one_node_stores_another_loads_and_other_secrets_do_not(places, tmp_path)
        assert [len(memory) for memory in opened_with] == [2, 2, 2], "a mapping for each group"
        assert holds
        assert all(holds)


@pytest.mark.cluster_core
def test_a_lookup_of_512_chunks_takes_at_most_three_round_trips(mooncake, monkeypatch):
    place = mooncake.settings(transfer_deadline_s=10.0, probe_deadline_s=5.0)
    session = opened(Engine(2048, seed=1), place)
    for first in range(0, 512, 8):
        stored(session, f"store-{first}", prefix_of(first + 8), places_of(range(first, first + 8)))
    session.close()
    asked = []

    def counting(self, act, deadline_s, ask=MooncakeClient.ask):
        asked.append(act)
        return ask(self, act, deadline_s)

    session = opened(Engine(2048, seed=2), place)
    session.poll(0.1)
    monkeypatch.setattr(MooncakeClient, "ask", counting)
    contains = MooncakeTier.contains
    monkeypatch.setattr(MooncakeTier, "contains", lambda tier, names: contains(tier, names) if names else [])
    assert looked_up(session, "load", prefix_of(512)).tokens == 512 * 16
    assert 1 <= len(asked) <= 3
    session.close()


def test_the_benchmark_measures_it_and_leaves_nothing(mooncake, tmp_path):
    tools = Store(f"mooncake:127.0.0.1:{mooncake.port}?prefix=bench", tmp_path)
    rows = json.loads(tools.kvtier("bench", "tier", tools.url, *FEW))["results"]
    assert {row["path"] for row in rows} == {"raw", "tier", "session"}
    spy = mooncake.raw(mooncake.settings(prefix="bench"))
    assert spy._client.store.remove_by_regex("^bench/", True) == 0
    spy.close()
