"""Real Valkey clusters whose masters die or stop and whose slots move cost misses and need no restart."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.cluster.valkey_bed import NODE_TIMEOUT_S, own_row
from tests.cluster.valkey_world import (
    DEADLINE_S,
    MIB,
    PROBE_DEADLINE_S,
    SLACK_S,
    frame_of,
    fresh_prefix,
    key_of,
    name_of,
    open_tier,
    result,
    timed,
)
from tests.waiting import wait_until

from kvtier.errors import TierError
from kvtier.tier.base import Write
from kvtier.tier.valkey.connection import Node, Reader, Wire
from kvtier.tier.valkey.parts import PART_BYTES
from kvtier.tier.valkey.pipeline import STALL_SHARE
from kvtier.tier.valkey.servers import REFRESH_INTERVAL_S, slot_of


@pytest.fixture
def spread(cluster):
    """A tier of the cluster."""
    return open_tier(*cluster.nodes, prefix=fresh_prefix(), deadline_s=DEADLINE_S, probe_deadline_s=PROBE_DEADLINE_S)


@pytest.mark.cluster_core
def test_a_lookup_of_512_names_is_one_round_trip(valkey, cluster, spread, monkeypatch):
    tier = open_tier(valkey, prefix=fresh_prefix())
    names = [name_of(n) for n in range(512)]
    sends = []
    for each, masters in ((tier, [valkey]), (spread, cluster.masters())):
        assert each.write_many([Write(name, frame_of(1)) for name in names[::2]]) == [True] * 256
        for server in masters:
            server.call("CONFIG", "RESETSTAT")
        sends.clear()
        monkeypatch.setattr(
            Wire, "send", lambda wire, *rest, send=Wire.send: (sends.append(wire), send(wire, *rest))[1]
        )
        assert each.contains(names) == [n % 2 == 0 for n in range(512)]
        monkeypatch.undo()
        assert len(sends) == len(set(sends)) == len(masters), "one pipeline for each server"
        assert sum(server.calls("exists") for server in masters) == 512


@pytest.mark.cluster_core
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_master_that_fails_costs_misses_until_its_replica_takes_over(cluster, spread, how):
    """Nothing raises for longer than a moment, and objects of the other masters are found all the time."""
    size = MIB // 4
    frames = {n: frame_of(n, size) for n in range(30)}
    assert all(spread.write(name_of(n), frame) for n, frame in frames.items())
    victim = cluster.master_of(slot_of(name_of(0).hex().encode()))
    replica = cluster.replica_of(victim)
    cluster.wait_replicated(victim)
    theirs = {n for n in frames if cluster.master_of(slot_of(name_of(n).hex().encode())) is victim}
    into = memoryview(bytearray(size))
    getattr(victim, how)()
    start_s = time.monotonic()
    found = timed(lambda: spread.contains([name_of(n) for n in frames]), PROBE_DEADLINE_S)
    if how == "pause":  # the names of a master that has reset the connection are asked for once more
        assert [n for n in frames if found[n]] == [n for n in frames if n not in theirs]
    answers = [timed(lambda n=n: spread.read(name_of(n), into), DEADLINE_S) for n in frames]
    assert time.monotonic() - start_s < 2 * DEADLINE_S + SLACK_S, "one wait a moment"
    assert all(answers[n] == size for n in frames if n not in theirs), "those that were read later, too"
    assert sum(isinstance(answer, TierError) for answer in answers) <= 3, "the others fail immediately, as misses"
    wait_until(lambda: "master" in own_row(replica)[2], "the promotion", 30)
    wait_until(lambda: all(result(lambda n=n: spread.read(name_of(n), into)) == size for n in frames), "all", 15)
    assert into == frames[29]
    assert spread.write(name_of(100), frames[0])


def test_a_scan_finds_what_is_on_a_server_that_came_later(cluster, spread):
    assert all(spread.write(name_of(n), frame_of(n)) for n in range(30))
    spread.servers.masters = spread.servers.masters[:1]
    time.sleep(REFRESH_INTERVAL_S)
    assert sorted(spread.scan()) == sorted((name_of(n), 4096) for n in range(30))


@pytest.mark.parametrize("when", ["send", "read"])
def test_an_interrupt_leaves_no_connection_with_replies_on_their_way(cluster, spread, monkeypatch, when):
    names = [name_of(n) for n in range(30)]
    assert spread.contains(names) == [False] * 30
    calls = []

    def interrupted(*arguments, act=Wire.send if when == "send" else Reader.reply):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return act(*arguments)

    monkeypatch.setattr(*((Wire, "send") if when == "send" else (Reader, "reply")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        spread.contains(names)
    monkeypatch.undo()
    assert spread.contains(names) == [False] * 30


def test_a_server_that_has_no_slots_any_more_keeps_no_connection(cluster, spread):
    node = Node("127.0.0.1", cluster.replica_of(cluster.masters()[0]).port)
    spread.servers.ask(node, b"PING", end_s=time.monotonic() + 5)
    assert node in spread.servers._idle
    time.sleep(REFRESH_INTERVAL_S)
    spread.servers.refresh(time.monotonic() + 5)
    assert set(spread.servers._idle) <= set(spread.servers.masters)


def test_of_many_threads_that_need_a_paused_master_one_waits(cluster, spread):
    victim = cluster.masters()[0]
    theirs = [n for n in range(60) if cluster.master_of(slot_of(name_of(n).hex().encode())) is victim][:8]
    for node in cluster.nodes:  # no replica takes over meanwhile
        node.call("CONFIG", "SET", "cluster-node-timeout", 60_000)
    try:
        victim.pause()
        assert isinstance(result(lambda: spread.read(name_of(theirs[0]), memoryview(bytearray(4096)))), TierError)
        has_waited = threading.Event()

        def waits(n) -> bool:
            """Whether this thread is one that waits, among reads until the first wait has ended."""
            end_s = time.monotonic() + 10 * DEADLINE_S
            while not has_waited.is_set() and time.monotonic() < end_s:
                start_s = time.monotonic()
                result(lambda: spread.read(name_of(n), memoryview(bytearray(4096))))
                if time.monotonic() - start_s > STALL_SHARE * DEADLINE_S:  # it has tried the server
                    has_waited.set()
                    return True
                time.sleep(0.01)
            return False

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(waits, theirs)) == 1
    finally:
        victim.resume()
        for node in cluster.nodes:
            node.call("CONFIG", "SET", "cluster-node-timeout", int(NODE_TIMEOUT_S * 1000))


@pytest.mark.cluster_core
def test_slots_move_under_load_and_nothing_is_wrong(cluster, spread):
    frames = {n: bytes(frame_of(n, 3 * PART_BYTES)) for n in range(12)}
    names = {n: name_of(n) for n in frames}
    assert all(spread.write(names[n], memoryview(frame)) for n, frame in frames.items())
    stop, wrong, counts = threading.Event(), [], {"hits": 0, "misses": 0, "errors": 0}

    def load(first):
        into, extra = memoryview(bytearray(3 * PART_BYTES)), 1000 * (first + 1)
        while not stop.is_set():
            for n, frame in frames.items():
                answer = timed(lambda n=n: spread.read(names[n], into), DEADLINE_S)
                counts["errors" if isinstance(answer, TierError) else "hits" if answer else "misses"] += 1
                if isinstance(answer, TierError) or (answer and into != frame):
                    wrong.append(answer)
                if not answer:
                    timed(lambda n=n, frame=frame: spread.write(names[n], memoryview(frame)), DEADLINE_S)
            extra += 1
            timed(lambda extra=extra: spread.write(name_of(extra), memoryview(frames[0])[: 2 * PART_BYTES]), DEADLINE_S)

    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load, first) for first in range(2)]
        try:
            for n in frames:
                slot = slot_of(names[n].hex().encode())
                masters = cluster.masters()
                source = cluster.master_of(slot)
                cluster.move_slot(slot, masters[(masters.index(source) + 1) % len(masters)], keys_at_once=1)
        finally:
            stop.set()
        for each in loads:
            each.result(30)
    assert not wrong
    assert counts["hits"] > 50
    into = memoryview(bytearray(3 * PART_BYTES))
    for n, frame in frames.items():
        assert spread.read(names[n], into) in (None, 3 * PART_BYTES)
        assert spread.write(names[n], memoryview(frame))
        assert spread.read(names[n], into) == 3 * PART_BYTES


def test_a_slot_that_stays_half_way_costs_misses_of_this_slot_only(cluster, spread):
    slot = slot_of(name_of(1).hex().encode())
    source = cluster.master_of(slot)
    target = next(each for each in cluster.masters() if each is not source)
    frame, into = frame_of(1, 3 * PART_BYTES), memoryview(bytearray(3 * PART_BYTES))
    assert spread.write(name_of(1), frame)
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", own_row(source)[0])
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", own_row(target)[0])
    try:
        assert spread.read(name_of(1), into) == frame.nbytes, "its keys are still here"
        key = key_of(spread, name_of(1))
        source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", key, f"{key}/1")
        assert spread.read(name_of(1), into) is None, "two parts there, one here"
        assert spread.contains([name_of(1)]) == [False]
        answer = timed(lambda: spread.write(name_of(1), frame), DEADLINE_S)
        assert answer in (True, False)
        assert spread.write(name_of(2), frame)
    finally:
        for node in (source, target):
            node.call("CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_cluster_without_a_majority_is_an_error_and_comes_back(cluster, spread, caplog):
    caplog.set_level(logging.INFO)
    into = memoryview(bytearray(4096))
    frames = {n: frame_of(n) for n in range(9)}
    assert all(spread.write(name_of(n), frame) for n, frame in frames.items())
    victims = cluster.masters()[:2]
    replicas = [cluster.replica_of(each) for each in victims]
    for each in (*replicas, *victims):
        each.kill()
    survivor = cluster.masters()[0]
    wait_until(lambda: b"cluster_state:fail" in survivor.call("CLUSTER", "INFO"), "the failure", 30)
    assert isinstance(timed(lambda: spread.contains([]), PROBE_DEADLINE_S), TierError)
    for n in frames:
        assert not isinstance(timed(lambda n=n: spread.read(name_of(n), into), DEADLINE_S), int)
    for each in (*victims, *replicas):
        each.restart()
    cluster.wait()
    wait_until(lambda: result(lambda: spread.contains([])) == [], "the tier", 20)
    wait_until(
        lambda: all(result(lambda n=n: spread.write(name_of(n), frames[n])) is True for n in frames), "writes", 20
    )
    assert spread.read(name_of(0), into) == 4096
