"""Sessions of several nodes share KV through Valkey; servers that fail cost them misses only."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.valkey_bed import own_row
from tests.cluster.valkey_world import fresh_prefix
from tests.golden import small_stores
from tests.rig import Engine, load_places, loaded, looked_up, places_of, prefix_of, stored
from tests.shared.ceph import wait_until
from tests.shared.node_sessions import TOKENS, await_health, damages, load, load_until, opened, store

from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.valkey.kind import ValkeySettings
from kvtier.tier.valkey.parts import HEADER
from kvtier.tier.valkey.wire import Wire

SECRET = bytes(range(32))


def servers(*nodes, prefix, **settings) -> ValkeySettings:
    common = {"transfer_deadline_s": 2.0, "probe_deadline_s": 0.5, "failures": 1, "retry_s": 0.2}
    addresses = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return ValkeySettings(addresses=addresses, prefix=prefix, **common | settings)


@pytest.mark.cluster_core
def test_what_one_node_stores_another_loads_and_other_secrets_do_not(cluster, tmp_path):
    prefix, here = fresh_prefix(), Engine(64, seed=1)
    place = servers(*cluster.nodes[:2], prefix=prefix)
    session = opened(here, DiskSettings(path=tmp_path / "a", capacity_bytes=64 << 20), place)
    store(session)
    session.close()
    there = Engine(64, seed=2)
    session = opened(there, DiskSettings(path=tmp_path / "b", capacity_bytes=64 << 20), place)
    assert load(session, there, here) == TOKENS
    session.close()
    session = opened(there, place, secret=bytes(32))
    assert load(session, there, here) == 0
    session.close()


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
def test_a_server_that_is_away_at_the_start_or_in_the_middle_costs_misses_until_it_is_back(valkey, caplog):
    caplog.set_level(logging.INFO)
    prefix, here, there = fresh_prefix(), Engine(64, seed=1), Engine(64, seed=2)
    place = servers(valkey, prefix=prefix)
    valkey.kill()
    start_s = time.monotonic()
    session = opened(there, place)
    assert load(session, there, here) == 0
    assert time.monotonic() - start_s < 15
    valkey.start()
    valkey.wait()

    def store_again():
        writer = opened(here, place)
        store(writer)
        writer.close()

    store_again()
    load_until(session, there, here, TOKENS)
    session.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [sum(text in line for line in lines) for text in ("starts without this tier", "is open now")] == [1, 1]

    session = opened(there, place)
    for break_it, mend in (
        (valkey.pause, valkey.resume),
        (valkey.kill, lambda: (valkey.start(), valkey.wait(), store_again())),
    ):
        break_it()
        caplog.clear()
        start_s = time.monotonic()
        assert load(session, there, here) == 0
        assert time.monotonic() - start_s < 5
        await_health(session, caplog, ["down"])
        mend()
        await_health(session, caplog, ["down", "up"])
    load_until(session, there, here, TOKENS)
    session.close()


def test_a_cluster_loses_a_master_under_two_sessions_and_their_tokens_stay_right(cluster):
    prefix, here, there = fresh_prefix(), Engine(64, seed=1), Engine(64, seed=2)
    place = servers(*cluster.nodes, prefix=prefix, failures=3)
    writer, reader = opened(here, place), opened(there, place)
    store(writer)
    load_until(reader, there, here, TOKENS)
    reader.close()
    victim = cluster.masters()[0]
    replica = cluster.replica_of(victim)
    for node in cluster.masters():
        node.call("WAIT", 1, 5000)
    victim.kill()
    reader = opened(there, place)
    assert load(reader, there, here) <= TOKENS
    wait_until(lambda: "master" in own_row(replica)[2], "the promotion", 30)
    load_until(reader, there, here, TOKENS)
    reader.close()
    writer.close()


def test_damaged_values_are_misses(valkey):
    """Frames are damaged behind the header of their value; `test_valkey_faults` damages values."""
    prefix, here = fresh_prefix(), Engine(64, seed=1)
    place = servers(valkey, prefix=prefix)
    session = opened(here, place)
    store(session)
    session.close()
    keys = [key for key in valkey.call("KEYS", f"{prefix}/*") if key.endswith(b"}")]
    values = {key: valkey.call("GET", key) for key in keys}
    assert len(keys) == 8

    def tokens() -> int:
        there = Engine(64, seed=3)
        session = opened(there, place)
        try:
            return load(session, there, here)
        finally:
            session.close()

    assert tokens() == TOKENS
    frames = [value[HEADER.size :] for value in values.values()]
    for what, damage in damages(frames).items():
        for key, value in values.items():
            valkey.call("SET", key, value[: HEADER.size] + damage(value[HEADER.size :]))
        assert tokens() == 0, what
    for key, value in values.items():
        valkey.call("SET", key, value)
    assert tokens() == TOKENS, "the control: whole values load again"


@pytest.mark.cluster_core
def test_a_lookup_of_512_chunks_takes_at_most_three_round_trips(valkey, monkeypatch):
    prefix, here = fresh_prefix(), Engine(2048, seed=1)
    place = servers(valkey, prefix=prefix)
    session = opened(here, place)
    for first in range(0, 512, 8):
        stored(session, f"store-{first}", prefix_of(first + 8), places_of(range(first, first + 8)))
    session.close()
    assert valkey.call("DBSIZE") >= 2 * 512, "two groups"
    asked = []

    def counting(wire, buffers, *rest, send=Wire.send):
        if any(b"EXISTS" in bytes(each[:40]) for each in buffers):
            asked.append(len(buffers))
        return send(wire, buffers, *rest)

    session = opened(Engine(2048, seed=2), place)
    session.poll(0.1)
    valkey.call("CONFIG", "RESETSTAT")
    monkeypatch.setattr(Wire, "send", counting)
    found = looked_up(session, "load", prefix_of(512)).tokens
    assert found == 512 * 16
    lookups = [each for each in asked if each != 8]  # a health check asks for 8 keys
    assert 1 <= len(lookups) <= 3
    assert valkey.calls("exists") == sum(asked)
    session.close()


FEW = ("--size", "64KiB", "--in-flight", "2", "--repeats", "1", "--sample", "128KiB", "--json")


@pytest.mark.parametrize("store_of", ["valkey", "cluster"])
def test_the_tools_on_a_store_in_use(request, store_of, tmp_path):
    given = request.getfixturevalue(store_of)
    nodes = [given] if store_of == "valkey" else given.nodes[:1]
    prefix, here = fresh_prefix(), Engine(64, seed=1)
    session = opened(here, servers(*nodes, prefix=prefix), secret=SECRET)
    store(session)
    session.close()
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    url = f"valkey:127.0.0.1:{nodes[0].port}?prefix={prefix}"

    def kvtier(*arguments: object, code: int = 0) -> str:
        done = subprocess.run(
            [Path(sys.executable).parent / "kvtier", *map(str, arguments)],
            env=os.environ | {"KVTIER_STORE__SECRET_FILE": str(secret)},
            timeout=120,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def keys() -> set[bytes]:
        masters = [given] if store_of == "valkey" else given.masters()
        return {key for node in masters for key in node.call("KEYS", f"{prefix}/*")}

    before = keys()
    stat = json.loads(kvtier("inspect", "stat", url, "--json"))
    assert stat["objects"] == 8
    rows = json.loads(kvtier("bench", "tier", url, *FEW))["results"]
    assert {(row["op"], row["path"]) for row in rows} == {
        (op, path)
        for op in ("store", "load", "lookup")
        for path in ("raw", "tier", "session")
        if path != "raw" or store_of == "valkey"
    }
    kvtier("probe", "--tier", url, "--size", "64KiB", "--depth", "1", "--seconds", "50ms", "--bytes", "8MiB", "--json")
    assert keys() == before, "measurements leave nothing"
    assert "8 objects" in kvtier("inspect", "verify", url)
    assert json.loads(kvtier("inspect", "purge", url, "--yes", "--json"))["objects"] == 8
    assert json.loads(kvtier("inspect", "stat", url, "--json"))["objects"] == 0
    err = kvtier("bench", "tier", f"{url}&password=secret-word", code=2)
    assert err.count("\n") == 1
    assert "secret-word" not in err
