"""An S3 server that is killed, paused, cut off, slow or full of bad objects costs misses and needs no restart."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest
from tests.shared.calls import SLACK_S, all_fail_in_time, during_an_outage
from tests.shared.s3_world import MIB, frame_of, fresh_prefix, name_of, open_tier

from kvtier.errors import TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.s3 import tier as s3_tier

DEADLINE_S, PROBE_DEADLINE_S = 2.0, 0.5


@pytest.fixture
def tier(gateway):
    return open_tier(gateway.access, fresh_prefix(), deadline_s=DEADLINE_S, probe_deadline_s=PROBE_DEADLINE_S)


@pytest.mark.shared_core
@pytest.mark.parametrize("fault", ["daemon.kill", "daemon.pause", "proxy.partition", "proxy.cut", "ceph.osd.pause"])
def test_every_call_ends_within_its_deadline_and_works_again_without_a_restart(gateway, tier, fault):
    frame, into = frame_of(1, MIB), memoryview(bytearray(MIB))
    assert tier.write(name_of(1), frame)
    attrgetter(fault)(gateway)()
    all_fail_in_time(tier, MIB, DEADLINE_S, PROBE_DEADLINE_S)
    gateway.heal()
    assert tier.contains([]) == []
    assert tier.read(name_of(1), into) == MIB
    assert into == frame
    assert tier.write(name_of(2), frame)
    assert tier.contains([name_of(2), name_of(3)]) == [True, False]
    assert tier.read_many([Read(name_of(1), into)] * 2) == [MIB] * 2


@pytest.mark.shared_core
def test_a_short_outage_is_bridged(gateway, tier, monkeypatch):
    frame, into = frame_of(1), memoryview(bytearray(4096))
    assert during_an_outage(gateway.proxy, lambda: tier.write(name_of(1), frame))
    assert during_an_outage(gateway.proxy, lambda: tier.read(name_of(1), into)) == 4096
    assert during_an_outage(gateway.proxy, lambda: tier.read_many([Read(name_of(1), into)] * 2)) == [4096] * 2
    monkeypatch.setattr(s3_tier, "pause_s", lambda *_: None)  # the control: without further attempts it fails
    with pytest.raises(TierError):
        during_an_outage(gateway.proxy, lambda: tier.read(name_of(1), into))


@pytest.mark.shared_core
def test_a_truncated_answer_is_an_error_not_a_short_object(gateway, tier):
    frame, into = frame_of(1, MIB), memoryview(bytearray(MIB))
    assert tier.write(name_of(1), frame)
    gateway.proxy.cut()
    gateway.proxy.heal()
    gateway.proxy.cut_answers_after(MIB // 2)
    with pytest.raises(TierError):
        tier.read(name_of(1), into)
    assert isinstance(tier.read_many([Read(name_of(1), into)] * 2)[0], TierError)
    gateway.proxy.cut()
    gateway.proxy.heal()
    assert tier.read(name_of(1), into) == MIB
    assert into == frame


def test_a_body_that_stops_ends_within_the_deadline(gateway, tier):
    frame, into = frame_of(1, 8 * MIB), memoryview(bytearray(8 * MIB))
    assert tier.write(name_of(1), frame)
    gateway.proxy.delay_s = 0.3  # long enough to stop it halfway
    timer = threading.Timer(0.9, gateway.proxy.partition)

    def read_until_it_fails():
        while tier.read(name_of(1), into):
            pass

    start_s = time.monotonic()
    timer.start()
    with pytest.raises(TierError):
        read_until_it_fails()
    assert time.monotonic() - start_s < 0.9 + DEADLINE_S + SLACK_S
    timer.join(10)


@pytest.mark.shared_core
def test_a_failed_write_lets_go_of_the_callers_memory(gateway, tier):
    memory = bytearray(4 * MIB)
    for fault in (gateway.proxy.partition, gateway.proxy.cut):
        fault()
        with pytest.raises(TierError):
            tier.write(name_of(1), memoryview(memory))
        assert isinstance(tier.write_many([Write(name_of(n), memoryview(memory)) for n in (1, 2)])[0], TierError)
        memory.append(0)  # a BufferError while it is in use
        memory.pop()
        gateway.proxy.heal()


@pytest.mark.shared_core
def test_writers_of_one_name_at_once_leave_one_whole_object(gateway, tier):
    other = open_tier(gateway.access, tier._bucket.prefix.rstrip("/"))
    for name in map(name_of, range(10)):
        frames = [frame_of(number, MIB) for number in range(6)]
        with ThreadPoolExecutor(6) as threads:
            writers = [(tier, other)[number % 2] for number in range(6)]
            writes = [threads.submit(w.write, name, frame) for w, frame in zip(writers, frames, strict=True)]
            assert [write.result(30) for write in writes] == [True] * 6
        into = memoryview(bytearray(2 * MIB))
        assert tier.read(name, into) == MIB
        assert into[:MIB] in frames
        tier.delete(name)


def test_a_server_without_conditional_writes_is_asked_first(gateway, tier):
    tier._is_conditional = False
    assert tier.write(name_of(1), frame_of(1))
    assert tier.write(name_of(1), frame_of(2))
    assert tier.write_many([Write(name_of(1), frame_of(2)), Write(name_of(2), frame_of(2))]) == [True, True]
    into = memoryview(bytearray(4096))
    assert tier.read(name_of(1), into) == 4096
    assert into == frame_of(1)
    assert tier.figures().write_bytes == {"frames": 2 * 4096}


def test_a_slow_line_costs_one_round_trip_for_a_lookup(gateway):
    tier = open_tier(gateway.access, fresh_prefix(), probe_deadline_s=2.0)
    assert tier.write(name_of(5), frame_of(5))
    gateway.proxy.delay_s = 0.1
    start_s = time.monotonic()
    assert tier.contains([name_of(n) for n in range(23)]) == [n == 5 for n in range(23)]
    assert time.monotonic() - start_s < 1.5, "23 round trips of 0.2 s would be 4.6 s"
