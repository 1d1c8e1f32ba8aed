"""Sessions of several nodes share KV through Mooncake, and a store that fails costs them misses only."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rig import Engine, looked_up, places_of, prefix_of, stored
from tests.shared.node_sessions import TOKENS, await_health, changes, damages, load, load_until, opened, store

from kvtier.testing.tier import empty_frame
from kvtier.tier.mooncake.client import MooncakeClient
from kvtier.tier.mooncake.tier import MooncakeTier


def quick(mooncake, prefix, **settings):
    common = {"transfer_deadline_s": 2.0, "probe_deadline_s": 0.5, "failures": 1, "retry_s": 0.2}
    return mooncake.settings(prefix=prefix, **common | settings)


@pytest.mark.cluster_core
def test_what_one_node_stores_another_loads_and_other_secrets_do_not(mooncake, monkeypatch):
    opened_with, holds = [], []
    init = MooncakeTier.__init__

    def noted(self, client, **arguments):
        opened_with.append(arguments["memory"])
        held = client._holds
        client._holds = lambda *given: (holds.append(held(*given)), holds[-1])[1]
        init(self, client, **arguments)

    monkeypatch.setattr(MooncakeTier, "__init__", noted)
    here, there = Engine(64, seed=1), Engine(64, seed=2)
    session = opened(here, quick(mooncake, "nodes"))
    store(session)
    session.close()
    session = opened(there, quick(mooncake, "nodes"))
    assert load(session, there, here) == TOKENS
    session.close()
    assert [len(memory) for memory in opened_with] == [2, 2], "a mapping for each group"
    assert holds
    assert all(holds), "every transfer is from or to a slot, which is registered"
    session = opened(there, quick(mooncake, "nodes"), secret=bytes(32))
    assert load(session, there, here) == 0
    session.close()


def test_a_master_that_is_away_at_the_start_or_in_the_middle_costs_misses_until_it_is_back(mooncake, caplog):
    caplog.set_level(logging.INFO)
    here, there = Engine(64, seed=1), Engine(64, seed=2)
    settings = quick(mooncake, "away", probe_deadline_s=1.5)  # a busy machine is no change of health
    mooncake.master.kill()
    start_s = time.monotonic()
    session = opened(there, settings)
    assert load(session, there, here) == 0
    assert time.monotonic() - start_s < 15
    mooncake.start_master()
    mooncake.wait()
    sender = opened(here, settings)
    store(sender)
    sender.close()
    load_until(session, there, here, TOKENS)
    session.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [sum(text in line for line in lines) for text in ("starts without this tier", "is open now")] == [1, 1]

    for break_it, mend in (
        (mooncake.master.pause, mooncake.master.resume),
        (mooncake.master.kill, mooncake.start_master),
    ):
        session = opened(there, settings)
        caplog.clear()
        break_it()
        start_s = time.monotonic()
        assert load(session, there, here) == 0
        assert time.monotonic() - start_s < 5
        await_health(session, caplog, ["down"])
        mend()
        mooncake.wait()
        await_health(session, caplog, ["down", "up"])
        sender = opened(here, settings)  # nothing is lost by a pause, and all by a restart
        store(sender)
        sender.close()
        load_until(session, there, here, TOKENS)
        session.close()


@pytest.mark.cluster_core
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_node_that_fails_costs_what_it_had_and_the_tier_stays_in_use(mooncake, how, caplog):
    caplog.set_level(logging.INFO)
    here, there = Engine(64, seed=1), Engine(64, seed=2)
    session = opened(here, quick(mooncake, f"two-{how}", copies=2))
    store(session)
    session.close()
    getattr(mooncake.nodes[0], how)()
    session = opened(there, quick(mooncake, f"two-{how}", copies=2))
    start_s = time.monotonic()
    assert load(session, there, here) == TOKENS, "the other copies"
    assert time.monotonic() - start_s < 10
    assert changes(caplog, "read") == [], "one dead node is no reason to leave the store alone"
    session.close()


def test_bytes_that_are_wrong_are_a_miss_and_the_next_store_heals_them(mooncake):
    here, there = Engine(64, seed=1), Engine(64, seed=2)
    settings = quick(mooncake, "damage")
    spy = mooncake.raw(settings)
    keys = []
    session = opened(here, settings)
    put = _noting(keys)
    store(session)
    session.close()
    put()
    assert len(keys) == 8

    def content(key: str) -> bytes:
        into = empty_frame(spy._client.store.get_size(key))
        with spy._client.registered([into]) as (place,):
            assert spy._client.store.get_into(key, place, into.nbytes) == into.nbytes
        return bytes(into)

    whole = {key: content(key) for key in keys}
    for what, damage in damages([*whole.values()]).items():
        for key, good in whole.items():
            assert spy._client.store.remove(key, True) in {0, -704}
            bad = damage(good)
            if bad:
                assert spy._client.put([key], [memoryview(bad)]) == [0]
        session = opened(there, settings)
        assert load(session, there, here) == 0, what
        session.close()
        tokens = 0
        for _ in range(8):  # each load drops what it reads; the others are found by the next one
            session = opened(here, settings)
            store(session)
            session.close()
            session = opened(there, settings)
            tokens = load(session, there, here)
            session.close()
            if tokens == TOKENS:
                break
        assert tokens == TOKENS, f"{what}: healed"
    spy.close()


@pytest.mark.cluster_core
def test_a_lookup_of_512_chunks_takes_at_most_three_round_trips(mooncake, monkeypatch):
    place = quick(mooncake, "many", transfer_deadline_s=10.0, probe_deadline_s=5.0)
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


def test_the_benchmark_measures_it_and_leaves_nothing(mooncake):
    few = ("--size", "64KiB", "--in-flight", "2", "--repeats", "1", "--sample", "128KiB", "--json")
    url = f"mooncake:127.0.0.1:{mooncake.port}?prefix=bench"
    command = [Path(sys.executable).parent / "kvtier", "bench", "tier", url, *few]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert {row["path"] for row in rows} == {"raw", "tier", "session"}
    spy = mooncake.raw(mooncake.settings(prefix="bench"))
    assert spy._client.store.remove_by_regex("^bench/", True) == 0
    spy.close()


def _noting(keys):
    """Note the keys that the session's Mooncake tier writes; call the result to stop."""
    put = MooncakeClient.put

    def noting(self, names, views):
        keys.extend(names)
        return put(self, names, views)

    MooncakeClient.put = noting

    def stop() -> None:
        MooncakeClient.put = put

    return stop
