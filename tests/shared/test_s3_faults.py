"""An S3 server that is killed, paused, cut off, slow or full of bad objects costs misses and needs no restart."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from tests.rig import Engine, load_places, loaded, local, looked_up, places_of, prefix_of, stored
from tests.shared.node_sessions import damages
from tests.shared.s3_world import frame_of, fresh_prefix, key_of, name_of, open_tier

from kvtier.errors import TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.s3 import tier as s3_tier

DEADLINE_S, PROBE_DEADLINE_S = 2.0, 0.5
SLACK_S = 1.5
"""A busy machine, and the time that a failed write waits for its connection."""
MIB = 1 << 20


def killed(gateway, ceph):
    gateway.daemon.kill()


def paused(gateway, ceph):
    gateway.daemon.pause()


def partitioned(gateway, ceph):
    gateway.proxy.partition()


def cut(gateway, ceph):
    gateway.proxy.cut()


def storage_paused(gateway, ceph):
    """The gateway accepts and does not answer."""
    ceph.osd.pause()


def healed(gateway, ceph):
    gateway.proxy.heal()
    gateway.daemon.resume()
    ceph.osd.resume()
    if not gateway.daemon.is_running:
        gateway.daemon.start()
        ceph.wait_gateway()


@pytest.fixture
def tier(gateway):
    tier = open_tier(gateway.access, fresh_prefix(), deadline_s=DEADLINE_S, probe_deadline_s=PROBE_DEADLINE_S)
    yield tier
    tier.close()


@pytest.mark.shared_core
@pytest.mark.parametrize("fault", [killed, paused, partitioned, cut, storage_paused])
def test_every_call_ends_within_its_deadline_and_works_again_without_a_restart(gateway, ceph, tier, fault):
    frame, into = frame_of(1, MIB), memoryview(bytearray(MIB))
    assert tier.write(name_of(1), frame)
    calls = {
        "read": (lambda: tier.read(name_of(1), into), DEADLINE_S),
        "write": (lambda: tier.write(name_of(2), frame), DEADLINE_S),
        "delete": (lambda: tier.delete(name_of(3)), DEADLINE_S),
        "contains": (lambda: tier.contains([name_of(n) for n in range(23)]), PROBE_DEADLINE_S),
        "read_many": (lambda: tier.read_many([Read(name_of(1), into)] * 2), DEADLINE_S),
        "write_many": (lambda: tier.write_many([Write(name_of(4), frame), Write(name_of(5), frame)]), DEADLINE_S),
    }

    def call(act, deadline_s):
        start_s = time.monotonic()
        try:
            answer = act()
        except TierError as error:
            answer = error
        assert time.monotonic() - start_s < deadline_s + SLACK_S
        return answer[0] if isinstance(answer, list) else answer

    fault(gateway, ceph)
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = dict(zip(calls, threads.map(lambda each: call(*each), calls.values()), strict=True))
    assert all(isinstance(answer, TierError) for answer in answers.values()), answers
    with pytest.raises(TierError):
        tier.contains([])
    healed(gateway, ceph)
    assert tier.contains([]) == []
    assert tier.read(name_of(1), into) == MIB
    assert into == frame
    assert tier.write(name_of(2), frame)
    assert tier.contains([name_of(2), name_of(3)]) == [True, False]
    assert tier.read_many([Read(name_of(1), into)] * 2) == [MIB] * 2


@pytest.mark.shared_core
def test_a_short_outage_is_bridged(gateway, tier, monkeypatch):
    frame, into = frame_of(1), memoryview(bytearray(4096))

    def during_an_outage(act):
        gateway.proxy.cut()
        timer = threading.Timer(0.3, gateway.proxy.heal)
        timer.start()
        try:
            return act()
        finally:
            timer.join(10)

    assert during_an_outage(lambda: tier.write(name_of(1), frame))
    assert during_an_outage(lambda: tier.read(name_of(1), into)) == 4096
    assert during_an_outage(lambda: tier.read_many([Read(name_of(1), into)] * 2)) == [4096] * 2
    monkeypatch.setattr(s3_tier, "pause_s", lambda *_: None)  # the control: without further attempts it fails
    with pytest.raises(TierError):
        during_an_outage(lambda: tier.read(name_of(1), into))


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
    other.close()


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
    tier.close()


@pytest.mark.shared_core
def test_a_session_stores_and_another_one_loads_equal_bytes_and_bad_objects_are_misses(gateway):
    prefix_text = fresh_prefix()
    writer, prefix = Engine(64, seed=1), prefix_of(4)
    tier = open_tier(gateway.access, prefix_text)
    session, _, _ = local(writer.copier(), {"s3": tier})
    stored(session, "a", prefix, places_of(range(4)))
    session.close()

    def load(seed):
        engine = Engine(64, seed=seed)
        tier = open_tier(gateway.access, prefix_text)
        session, _, _ = local(engine.copier(), {"s3": tier})
        try:
            tokens = looked_up(session, "b", prefix).tokens
            if not tokens:
                return 0, True
            done = loaded(session, "b", prefix, tokens, load_places(tokens))
            return done.tokens, engine.same(writer, load_places(done.tokens))
        finally:
            session.close()

    assert load(2) == (64, True)
    root = tier._root.rstrip("/")
    objects = [row["path"] for page in obstore.list(gateway.raw, root) for row in page]
    assert len(objects) == 8
    whole = {path: bytes(obstore.get(gateway.raw, path).bytes()) for path in objects}
    longer = {"longer": lambda content: content + b"x" * 4096}
    for what, damage in (damages(list(whole.values())) | longer).items():
        for path in objects:
            obstore.put(gateway.raw, path, damage(whole[path]))
        tokens, is_equal = load(3)
        assert is_equal, what
        assert tokens == (64 if what == "longer" else 0), what  # what follows a whole frame is not read
    for path in objects:
        obstore.put(gateway.raw, path, whole[path])
    assert load(4) == (64, True), "the control: whole objects load again"


def test_key_of_is_where_objects_are(gateway, tier):
    assert tier.write(name_of(1), frame_of(1))
    assert bytes(obstore.get(gateway.raw, key_of(tier, name_of(1))).bytes()) == frame_of(1)
