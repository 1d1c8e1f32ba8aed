"""Real Valkey servers that die, stop, fill up, move slots or lose parts cost misses and need no restart."""

import os
import time

import pytest
from tests.cluster.valkey_bed import Clock
from tests.cluster.valkey_world import (
    DEADLINE_S,
    MIB,
    PROBE_DEADLINE_S,
    frame_of,
    fresh_prefix,
    key_of,
    name_of,
    open_tier,
    result,
    timed,
)
from tests.shared.calls import all_fail_in_time, during_an_outage
from tests.shared.ceph import NotInstalledError
from tests.shared.proxy import Proxy
from tests.waiting import wait_until

from kvtier.errors import TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.valkey import pipeline
from kvtier.tier.valkey.parts import PART_BYTES

SIZE = 2 * MIB


@pytest.fixture
def tier(valkey):
    return open_tier(valkey, prefix=fresh_prefix(), deadline_s=DEADLINE_S, probe_deadline_s=PROBE_DEADLINE_S)


@pytest.mark.cluster_core
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_every_call_ends_within_its_deadline_and_works_again_without_a_restart(valkey, tier, fault):
    frame, into = frame_of(1, SIZE), memoryview(bytearray(SIZE))
    assert tier.write(name_of(1), frame)
    getattr(valkey, fault)()
    all_fail_in_time(tier, SIZE, DEADLINE_S, PROBE_DEADLINE_S)
    valkey.resume()
    if fault == "kill":
        valkey.restart()
        assert tier.read(name_of(1), into) is None
        assert tier.write(name_of(1), frame)
    assert tier.contains([]) == []
    assert tier.read(name_of(1), into) == SIZE
    assert into == frame


@pytest.mark.cluster_core
def test_a_short_outage_is_bridged(valkey, monkeypatch):
    frame, into = frame_of(1), memoryview(bytearray(4096))
    with Proxy(valkey.port) as proxy:
        tier = open_tier(proxy, prefix=fresh_prefix(), deadline_s=3.0)
        assert during_an_outage(proxy, lambda: tier.write(name_of(1), frame))
        assert during_an_outage(proxy, lambda: tier.read(name_of(1), into)) == 4096
        monkeypatch.setattr(pipeline, "REPEATS_MAX", 0)  # the control: without repetitions it fails
        with pytest.raises(TierError):
            during_an_outage(proxy, lambda: tier.read(name_of(1), into))


@pytest.mark.cluster_core
def test_a_network_that_stops_in_the_middle_of_a_value_ends_within_the_deadline(valkey):
    frame, into = frame_of(1, 8 * MIB), memoryview(bytearray(8 * MIB))
    with Proxy(valkey.port) as proxy:
        tier = open_tier(proxy, prefix=fresh_prefix(), deadline_s=DEADLINE_S)
        assert tier.write(name_of(1), frame)
        proxy.cut()
        proxy.heal()
        proxy.cut_answers_after(MIB)
        assert isinstance(timed(lambda: tier.read(name_of(1), into), DEADLINE_S), TierError)
        proxy.heal()
        proxy.partition()
        memory = bytearray(4 * MIB)
        with pytest.raises(TierError):
            tier.write(name_of(2), memoryview(memory))
        memory.append(0)  # a BufferError while it is in use
        proxy.heal()
        assert tier.read(name_of(1), into) == 8 * MIB
        assert into == frame


@pytest.mark.cluster_core
@pytest.mark.parametrize("dead", [{2}, {1, 3}])
def test_an_object_whose_read_hangs_fails_in_a_share_of_the_deadline_and_no_other_object_with_it(valkey, dead):
    """As in a store that lists objects of a node that is gone."""
    with Proxy(valkey.port) as proxy:
        tier = open_tier(proxy, prefix=fresh_prefix(), deadline_s=DEADLINE_S)
        keys = [key_of(tier, name_of(number)).encode() for number in dead]
        reads = [Read(name_of(number), memoryview(bytearray(SIZE))) for number in range(8)]
        for number in range(8):
            assert tier.write(name_of(number), frame_of(number, SIZE))

        def swallows(sent: bytes) -> bool:
            return b"GET" in sent and any(key in sent for key in keys)

        proxy.swallows = swallows
        proxy.cut()
        proxy.heal()
        answers = timed(lambda: tier.read_many(reads), DEADLINE_S * (2 * pipeline.STALL_SHARE + 0.2))
        assert [number for number, each in enumerate(answers) if isinstance(each, TierError)] == sorted(dead)
        for number in set(range(8)) - dead:
            assert answers[number] == SIZE
            assert reads[number].into == frame_of(number, SIZE)
        for number in dead:
            timed(lambda number=number: tier.delete(name_of(number)), DEADLINE_S)
            assert tier.contains([name_of(number)]) == [False]
            assert tier.write(name_of(number), frame_of(number, SIZE))
        proxy.swallows = lambda _sent: False
        proxy.cut()
        proxy.heal()
        assert tier.read_many(reads) == [SIZE] * 8
        assert [each.into for each in reads] == [frame_of(number, SIZE) for number in range(8)]


def test_idle_connections_that_the_server_closed_are_replaced(valkey, tier):
    assert tier.write(name_of(1), frame_of(1))
    valkey.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert tier.read(name_of(1), memoryview(bytearray(4096))) == 4096


@pytest.mark.cluster_core
def test_an_object_without_one_of_its_parts_is_a_miss_and_is_removed(valkey, tier):
    frame, into = frame_of(1, 3 * PART_BYTES), memoryview(bytearray(3 * PART_BYTES))
    key = key_of(tier, name_of(1))
    for lost in (f"{key}/1", f"{key}/2", key):
        assert tier.write(name_of(1), frame)
        assert valkey.call("DEL", lost) == 1
        assert tier.read(name_of(1), into) is None
        assert valkey.call("EXISTS", key, f"{key}/1", f"{key}/2") == 0
    assert tier.write(name_of(1), frame)
    assert tier.read(name_of(1), into) == frame.nbytes


def test_parts_that_an_evicted_object_left_are_not_mixed_with_those_of_another_frame(valkey, tier):
    one, two = frame_of(1, 3 * PART_BYTES), frame_of(2, 3 * PART_BYTES)
    into = memoryview(bytearray(3 * PART_BYTES))
    assert tier.write(name_of(1), one)
    valkey.call("DEL", key_of(tier, name_of(1)))
    assert tier.write(name_of(1), two)
    assert tier.read(name_of(1), into) == two.nbytes
    assert into == two
    valkey.call("DEL", key_of(tier, name_of(1)) + "/1")
    valkey.call("COPY", key_of(tier, name_of(1)) + "/2", key_of(tier, name_of(1)) + "/1")
    assert tier.write(name_of(2), one)
    valkey.call("COPY", key_of(tier, name_of(2)) + "/1", key_of(tier, name_of(1)) + "/1", "REPLACE")
    assert tier.read(name_of(1), into) is None, "a part of another frame"


@pytest.mark.cluster_core
def test_a_reader_between_two_writers_reads_again_and_removes_nothing(valkey, tier, monkeypatch):
    """Sealed frames of one object differ, so a second writer changes parts while a reader has some of them."""
    other = open_tier(valkey, prefix=tier._prefix, deadline_s=DEADLINE_S)
    assert tier.write(name_of(1), frame_of(1, SIZE))
    second = frame_of(2, SIZE)
    run, has_written = tier._requests.run, []

    def interrupted(requests, end_s):
        if has_written:
            return run(requests, end_s)
        run(requests[:1], end_s)
        valkey.call("DEL", key_of(tier, name_of(1)))  # evicted, so the next writer finds no object
        has_written.append(other.write(name_of(1), second))
        return run(requests[1:], end_s)

    monkeypatch.setattr(tier._requests, "run", interrupted)
    into = memoryview(bytearray(SIZE))
    assert tier.read(name_of(1), into) == SIZE
    assert has_written == [True]
    assert into == second
    assert tier.contains([name_of(1)]) == [True]


@pytest.mark.cluster_core
def test_parts_that_a_longer_object_left_do_not_hide_a_shorter_one(valkey, tier):
    into = memoryview(bytearray(3 * PART_BYTES))
    for size in (2 * PART_BYTES, 4096):
        assert tier.write(name_of(1), frame_of(1, 3 * PART_BYTES))
        valkey.call("DEL", key_of(tier, name_of(1)))
        assert tier.write(name_of(1), frame_of(2, size))
        for _ in range(2):
            assert tier.read(name_of(1), into) == size
            assert into[:size] == frame_of(2, size)
        valkey.call("FLUSHALL")


@pytest.mark.parametrize("foreign", ["", "short", "x" * 4096, "x" * 600_000])
def test_a_value_of_another_writer_is_a_miss(valkey, tier, foreign):
    valkey.call("SET", key_of(tier, name_of(1)), foreign)
    assert tier.read(name_of(1), memoryview(bytearray(4096))) is None
    assert tier.write(name_of(1), frame_of(1))
    assert tier.read(name_of(1), memoryview(bytearray(4096))) == 4096
    valkey.call("DEL", key_of(tier, name_of(2)))
    valkey.call("LPUSH", key_of(tier, name_of(2)), "item")
    assert tier.read(name_of(2), memoryview(bytearray(4096))) is None


@pytest.mark.cluster_core
def test_a_full_server_refuses_writes_and_still_reads(valkey, tier, caplog):
    frame, into = frame_of(1, SIZE), memoryview(bytearray(SIZE))
    assert tier.write(name_of(1), frame)
    used = int(valkey.info("memory")["used_memory"])
    valkey.call("CONFIG", "SET", "maxmemory", used + 100_000)
    assert [tier.write(name_of(n), frame) for n in (2, 3, 4)] == [False] * 3
    assert tier.write_many([Write(name_of(5), frame), Write(name_of(6), frame_of(6))])[0] is False
    assert valkey.call("EXISTS", *(key_of(tier, name_of(2)) + part for part in ("", "/1", "/2"))) == 0
    assert tier.read(name_of(1), into) == SIZE
    assert [record.getMessage().count("is full") for record in caplog.records].count(1) == 1
    # With an eviction policy it takes new objects for old ones.
    valkey.call("CONFIG", "SET", "maxmemory", used + 8 * MIB, "maxmemory-policy", "allkeys-lru")
    assert all(tier.write(name_of(n), frame_of(n, SIZE)) for n in range(10, 30))
    found = [n for n in range(10, 30) if tier.read(name_of(n), into) == SIZE and into == frame_of(n, SIZE)]
    assert 1 <= len(found) < 20


def test_values_stay_below_the_smallest_limit_of_a_server(valkey, tier):
    valkey.call("CONFIG", "SET", "proto-max-bulk-len", MIB)
    frame, into = frame_of(1, 8 * MIB), memoryview(bytearray(8 * MIB))
    assert tier.write(name_of(1), frame)
    assert tier.read(name_of(1), into) == 8 * MIB
    assert into == frame


def test_a_value_over_the_servers_limit_is_an_error_and_the_next_one_works(valkey, tier, monkeypatch):
    """Without parts: the server closes the connection in the middle of a value."""
    monkeypatch.setattr("kvtier.tier.valkey.parts.PART_BYTES", 16 * MIB)
    valkey.call("CONFIG", "SET", "proto-max-bulk-len", MIB)
    assert isinstance(timed(lambda: tier.write(name_of(1), frame_of(1, 8 * MIB)), DEADLINE_S), TierError)
    assert tier.write(name_of(2), frame_of(2))


def test_a_use_renews_an_objects_lifetime_and_a_lookup_does_not(valkey):
    tier = open_tier(valkey, prefix=fresh_prefix(), lifetime_s=100.0)
    frame, into = frame_of(1, 2 * PART_BYTES), memoryview(bytearray(2 * PART_BYTES))
    assert tier.write(name_of(1), frame)
    keys = [key_of(tier, name_of(1)) + part for part in ("", "/1")]

    def lives():
        return [valkey.call("PTTL", key) for key in keys]

    assert all(90_000 < left <= 100_000 for left in lives())
    for key in keys:
        valkey.call("PEXPIRE", key, 50_000)
    assert tier.contains([name_of(1)]) == [True]
    looker = open_tier(valkey, prefix=tier._prefix, lifetime_s=100.0, is_user=False)
    assert looker.read(name_of(1), into) == frame.nbytes
    assert all(left <= 50_000 for left in lives())
    assert tier.read(name_of(1), into) == frame.nbytes
    assert all(90_000 < left <= 100_000 for left in lives())
    for key in keys:
        valkey.call("PEXPIRE", key, 1)
    time.sleep(0.01)
    assert tier.read(name_of(1), into) is None


def test_a_servers_clock_that_jumps_ends_lifetimes_early_or_late_and_nothing_else(start, tmp_path):
    try:
        clock = Clock(tmp_path)
    except NotInstalledError as error:
        pytest.skip(str(error))
    server = start(**clock.variables)
    tier = open_tier(server, prefix=fresh_prefix(), lifetime_s=600.0, deadline_s=DEADLINE_S)
    frame, into = frame_of(1, SIZE), memoryview(bytearray(SIZE))
    assert tier.write(name_of(1), frame)
    for offset_s, expected in ((-86400, SIZE), (0, None), (1200, None), (0, SIZE), (300, SIZE)):
        clock.jump_to(offset_s)
        assert abs(int(server.call("TIME")[0]) - time.time() - offset_s) < 5
        # At -86400 its lifetime was renewed, so that back at 0 it is over; what is written at 1200 is there at 0.
        assert tier.read(name_of(1), into) == expected, offset_s
        assert tier.contains([]) == []
        assert tier.write(name_of(1), frame)
    assert into == frame


def test_a_server_that_loads_its_data_is_waited_for_or_is_an_error(start):
    server = start()
    tier = open_tier(server, prefix=fresh_prefix(), deadline_s=DEADLINE_S)
    assert tier.write(name_of(1), frame_of(1))
    server.call("DEBUG", "POPULATE", "1000", "filler", "1000")
    server.call("SAVE")
    server.kill()
    server.command += ["--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024"]
    server.start()
    wait_until(lambda: "LOADING" in str(result(lambda: tier.contains([name_of(1)]))), "loading", 20)
    with pytest.raises(TierError, match="LOADING"):
        tier.read(name_of(1), memoryview(bytearray(4096)))
    wait_until(lambda: result(lambda: tier.read(name_of(1), memoryview(bytearray(4096)))) == 4096, "the data", 20)


def test_a_forked_child_uses_nothing_of_it(valkey, tier):
    assert tier.write(name_of(1), frame_of(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer = result(lambda: tier.read(name_of(1), memoryview(bytearray(4096))))
            tier.close()
            code = 0 if isinstance(answer, TierError) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.read(name_of(1), memoryview(bytearray(4096))) == 4096
