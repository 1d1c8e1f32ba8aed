"""A Mooncake store that fails costs misses within the deadline: nodes and masters are killed, paused and restarted."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster.hostile import Hostile
from tests.shared.calls import SLACK_S, result, timed
from tests.shared.proxy import Proxy
from tests.waiting import wait_until

from kvtier.errors import TierError
from kvtier.testing.tier_contract import empty_frame, frame_of, object_name
from kvtier.tier.base import Read, Write
from kvtier.tier.mooncake.client import LANES, STALL_S
from kvtier.tier.mooncake.socket_filter import data_port, split_address

SIZE = 1 << 20
COUNT = 12
DEADLINE_S = 4.0


def written(tier, count=COUNT, size=SIZE):
    assert tier.write_many([Write(object_name(n), frame_of(n, size)) for n in range(count)]) == [True] * count


def loaded(tier, count=COUNT, size=SIZE) -> list[bool]:
    """Which objects a read finds, each with its own bytes, one after the other."""
    found = []
    for number in range(count):
        into = empty_frame(size)
        answer = tier.read(object_name(number), into)
        assert answer in {None, size}
        assert answer is None or into == frame_of(number, size), "other bytes"
        found.append(answer is not None)
    return found


def took_s(act) -> float:
    start_s = time.monotonic()
    act()
    return time.monotonic() - start_s


@pytest.fixture
def filled(mooncake):
    """A tier with `COUNT` objects, some of them on each node: the store selects a node for each."""
    for _ in range(10):
        written(tier := mooncake.tier())
        if all(loaded(tier)) and len(nodes_of(mooncake, tier)) == len(mooncake.nodes):
            return tier
    raise AssertionError("all objects are on one node")


def fails_in_time(act, limit_s: float, match: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(TierError, match=match):
        act()
    assert time.monotonic() - start_s < limit_s + SLACK_S


def nodes_of(mooncake, tier) -> dict[str, object]:
    """The node of each endpoint that the tier has met."""
    ports = {}
    for node in mooncake.nodes:
        inodes = set()
        for entry in os.scandir(f"/proc/{node.pid}/fd"):
            link = os.readlink(entry.path)
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
        for line in Path(f"/proc/{node.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports[int(fields[1].split(":")[1], 16)] = node
    return {
        endpoint: ports[int(endpoint.rpartition(":")[2])]
        for endpoint in tier._nodes._met_until
        if int(endpoint.rpartition(":")[2]) in ports
    }


@pytest.mark.cluster_core
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_with_two_copies_the_other_one_is_found(mooncake, how, caplog):
    """The first read that meets the silent node finds it out; the others take a few ms."""
    tier = mooncake.tier(copies=2)
    written(tier)
    assert all(loaded(tier))
    getattr(mooncake.nodes[0], how)()
    times = []
    for number in range(COUNT):
        into = empty_frame(SIZE)
        start_s = time.monotonic()
        assert tier.read(object_name(number), into) == SIZE
        times.append(time.monotonic() - start_s)
        assert into == frame_of(number, SIZE)
    assert max(times) < DEADLINE_S
    assert sorted(times)[-2] < 0.5, "the node is asked once only"
    assert tier.contains([object_name(n) for n in range(COUNT)]) == [True] * COUNT
    assert sum("is not used for" in record.getMessage() for record in caplog.records) == 1
    reads = [Read(object_name(n), empty_frame(SIZE)) for n in range(COUNT)]
    assert tier.read_many(reads) == [SIZE] * COUNT
    assert all(read.into == frame_of(n, SIZE) for n, read in enumerate(reads))


@pytest.mark.cluster_core
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_with_one_copy_what_was_on_the_node_is_a_miss_in_time(mooncake, filled, how):
    getattr(mooncake.nodes[0], how)()
    found = timed(lambda: loaded(filled), DEADLINE_S)
    assert any(found), "the other node's"
    assert not all(found)
    # The master still knows the others; the tier knows better.
    assert filled.contains([object_name(n) for n in range(COUNT)]) == found
    assert took_s(lambda: loaded(filled)) < 1.0
    mooncake.heal()
    if how == "pause":
        wait_until(lambda: all(loaded(filled)) or filled._nodes.has_silent is False, "the node", 30.0)


def test_a_batch_with_a_silent_node_brings_what_the_other_one_has(mooncake, filled):
    mooncake.nodes[1].pause()
    reads = [Read(object_name(n), empty_frame(SIZE)) for n in range(COUNT)]
    found = timed(lambda: filled.read_many(reads), DEADLINE_S)
    assert set(found) == {SIZE, None}
    for number, (read, answer) in enumerate(zip(reads, found, strict=True)):
        assert answer is None or read.into == frame_of(number, SIZE)


@pytest.mark.cluster_core
def test_a_slot_of_a_failed_read_gets_no_byte_later(mooncake, monkeypatch):
    """A paused node sends what it was asked for as soon as it goes on. By then the slot may have other bytes."""
    tier = mooncake.tier()
    written(tier, size=8 << 20)
    mooncake.nodes[0].pause()
    into = [empty_frame(8 << 20) for _ in range(COUNT)]
    missed = [n for n in range(COUNT) if tier.read(object_name(n), into[n]) is None]
    assert missed
    for number in missed:
        into[number][:] = b"\x5a" * (8 << 20)
    mooncake.nodes[0].resume()
    time.sleep(1.0)
    assert all(into[number] == b"\x5a" * (8 << 20) for number in missed)


@pytest.mark.cluster_core
def test_a_connection_of_the_engine_to_a_silent_node_stays_open(mooncake, filled):
    """A node names any address as that of its data, such as one of the engine's own connections."""
    endpoint = next(each for each, node in nodes_of(mooncake, filled).items() if node is mooncake.nodes[0])
    with socket.create_connection(("127.0.0.1", data_port(endpoint, 1.0))) as link:
        mooncake.nodes[0].pause()
        assert not all(loaded(filled))
        link.settimeout(0.2)
        with pytest.raises(TimeoutError):
            link.recv(1)


@contextlib.contextmanager
def between(tier, monkeypatch):
    """A proxy before the first node's data; the tier reads copies on that node by way of it."""
    (found,) = tier._client.copies([tier._root + object_name(0).hex()], DEADLINE_S).values()
    endpoint = found[0].endpoint

    def named(_asked):
        host, port = split_address(endpoint)
        with socket.create_connection((host, port)) as link:
            link.sendall(struct.pack("<QB", 3, 1) + b"{}")
            size = struct.unpack("<Q", link.recv(8, socket.MSG_WAITALL))[0]
            answer = link.recv(size, socket.MSG_WAITALL)
        told = answer[:1] + json.dumps(json.loads(answer[1:]) | {"tcp_data_port": proxy.port}).encode()
        return [struct.pack("<Q", len(told)) + told]

    with Proxy(data_port(endpoint, 1.0)) as proxy, Hostile(named) as front:
        copies = tier._client.copies

        def moved(keys, deadline_s):
            return {
                key: [it._replace(endpoint=f"127.0.0.1:{front.port}") if it.endpoint == endpoint else it for it in each]
                for key, each in copies(keys, deadline_s).items()
            }

        monkeypatch.setattr(tier._client, "copies", moved)
        yield proxy


@pytest.mark.cluster_core
def test_an_object_whose_read_stalls_on_a_node_that_lives_has_failed_and_can_be_replaced(mooncake, monkeypatch):
    """Others of its batch have their bytes, be they before or behind it."""
    tier, count = mooncake.tier(transfer_deadline_s=10.0), 3 * LANES
    names = [object_name(number) for number in range(count)]
    assert tier.write_many([Write(each, frame_of(n, SIZE)) for n, each in enumerate(names)]) == [True] * count
    with between(tier, monkeypatch) as proxy:
        found = tier._client.copies([tier._root + each.hex() for each in names], DEADLINE_S)
        front = found[tier._root + names[0].hex()][0].endpoint
        there = [n for n, each in enumerate(names) if found[tier._root + each.hex()][0].endpoint == front]
        dead = sorted({there[0], there[-1]})
        places = [struct.pack("<Q", found[tier._root + names[n].hex()][0].address) for n in dead]
        proxy.swallows = lambda sent: any(each in sent for each in places)
        reads = [Read(each, empty_frame(SIZE)) for each in names]
        answers = timed(lambda: tier.read_many(reads), STALL_S + SLACK_S)
        assert [n for n, each in enumerate(answers) if isinstance(each, TierError)] == dead
        assert [each for n, each in enumerate(answers) if n not in dead] == [SIZE] * (count - len(dead))
        assert all(each.into == frame_of(n, SIZE) for n, each in enumerate(reads) if n not in dead)
        assert tier.contains(names) == [True] * count, "the node is not left alone"
        for number in dead:
            tier.delete(names[number])
            assert tier.write(names[number], frame_of(number, SIZE))
        proxy.swallows = lambda _sent: False
        assert tier.read_many(reads) == [SIZE] * count
        assert all(each.into == frame_of(n, SIZE) for n, each in enumerate(reads))


def test_many_small_objects_on_a_silent_node_wait_for_it_once(mooncake):
    """The library sends what finds no free connection one after the other, each with a wait of its own."""
    tier = mooncake.tier(transfer_deadline_s=10.0)
    reads = [Read(object_name(n), empty_frame(4096)) for n in range(64)]
    assert tier.write_many([Write(each.name, frame_of(n, 4096)) for n, each in enumerate(reads)]) == [True] * 64
    assert tier.read_many(reads) == [4096] * 64
    mooncake.nodes[0].pause()  # within the second in which its last sign of life counts
    assert took_s(lambda: tier.read_many(reads)) < 3.0 + 2 * SLACK_S
    assert took_s(lambda: tier.write_many([Write(object_name(100 + n), frame_of(n, 4096)) for n in range(64)])) < 8.0


def test_a_read_that_cannot_be_ended_keeps_its_memory(mooncake, monkeypatch, caplog):
    """The control of the test above: without the library's limits, the read ends only when the node goes on."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "60")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "60")
    tier = mooncake.tier(transfer_deadline_s=1.0)
    written(tier)
    first = nodes_of(mooncake, tier)
    tier.read_many([Read(object_name(n), empty_frame(SIZE)) for n in range(COUNT)])
    assert first or nodes_of(mooncake, tier)
    mooncake.nodes[0].pause()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(loaded(tier)))
    thread.start()
    thread.join(4.0)
    assert thread.is_alive()
    assert not answers
    mooncake.nodes[0].resume()
    thread.join(10.0)
    assert len(answers) == 1
    assert any("keeps its memory" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("node", [0, 1])
def test_writes_to_a_silent_node_end_and_are_refused(mooncake, node):
    """Although the tier has written little and read nothing."""
    tier = mooncake.tier(transfer_deadline_s=2.0)
    assert all(tier.write(object_name(n), frame_of(n, SIZE)) for n in range(8))
    mooncake.nodes[node].pause()
    answers: dict[int, bool] = {}

    def write(number: int) -> float:
        return took_s(lambda: answers.update({number: tier.write(object_name(100 + number), frame_of(number, SIZE))}))

    with ThreadPoolExecutor(8) as threads:
        longest_s = max(threads.map(write, range(8)))
    mooncake.nodes[node].resume()
    assert longest_s < 2.0 + 2 * SLACK_S
    for number, answer in answers.items():
        into = empty_frame(SIZE)
        found = tier.read(object_name(100 + number), into)
        assert found in {None, SIZE}
        assert found is None or into == frame_of(number, SIZE)
        assert answer or found is None


@pytest.mark.cluster_core
def test_a_master_that_is_killed_is_an_error_and_comes_back_empty(mooncake, filled):
    mooncake.master.kill()
    into = empty_frame(SIZE)
    for act in (
        lambda: filled.contains([object_name(1)]),
        lambda: filled.contains([]),
        lambda: filled.read(object_name(1), into),
        lambda: filled.write(object_name(99), frame_of(99, SIZE)),
        lambda: filled.delete(object_name(1)),
    ):
        fails_in_time(act, DEADLINE_S, "master")
    mooncake.start_master()
    wait_until(lambda: result(lambda: filled.contains([])) == [], "the master", 60.0)
    wait_until(lambda: result(lambda: filled.write(object_name(200), frame_of(200, SIZE))) is True, "the store", 60.0)
    assert filled.contains([object_name(n) for n in range(COUNT)]) == [False] * COUNT
    assert loaded(filled) == [False] * COUNT
    assert filled.read(object_name(200), into) == SIZE
    assert into == frame_of(200, SIZE)


@pytest.mark.cluster_core
def test_writes_that_are_not_tried_while_the_master_is_away_are_errors(mooncake, filled, monkeypatch):
    """A refusal counts as an answer of the tier, which would be up again."""
    mooncake.master.kill()
    writes = [Write(object_name(number), frame_of(number, 4096)) for number in range(100, 100 + LANES + 4)]
    answers = filled.write_many(writes)
    assert [type(it) for it in answers] == [TierError] * len(writes), "the last four are not tried"
    monkeypatch.setattr(filled, "_deadline_s", 0.1)
    monkeypatch.setattr(filled, "_may_write", threading.Semaphore(0))  # other writes wait for the master
    fails_in_time(lambda: filled.write(object_name(99), frame_of(99, 4096)), DEADLINE_S, "master")


@pytest.mark.cluster_core
def test_a_master_that_is_silent_is_an_error_in_time(mooncake, filled):
    mooncake.master.pause()
    for act in (
        lambda: filled.contains([object_name(1)]),
        lambda: filled.contains([]),
        lambda: filled.read(object_name(1), empty_frame(SIZE)),
        lambda: filled.write(object_name(99), frame_of(99, SIZE)),
    ):
        fails_in_time(act, 1.0, r"master .* answer")  # one call waits, further ones fail immediately
    mooncake.master.resume()
    wait_until(lambda: result(lambda: filled.contains([object_name(1)])) is True, "the master", 20.0)
    assert sum(loaded(filled)) > 0


@pytest.mark.cluster_core
@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize("what", ["write", "read", "delete"])
def test_the_first_call_after_the_master_has_failed_ends_in_time(mooncake, filled, how, what):
    """In the library a write waits for 30 s for a paused master, and for 4 s at each step for a dead one."""
    getattr(mooncake.master, how)()
    act = {
        "write": lambda: filled.write(object_name(99), frame_of(99, SIZE)),
        "read": lambda: filled.read(object_name(1), empty_frame(SIZE)),
        "delete": lambda: filled.delete(object_name(1)),
    }[what]
    for _ in range(2):
        fails_in_time(act, DEADLINE_S, r"delete|master")


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_writes_that_run_when_the_master_fails_end(mooncake, how):
    """Until then the library has their memory. With its own limits it kept that of a paused master's for 30 s."""
    tier = mooncake.tier()
    longest_s, ends = [0.0], threading.Event()

    def write(first: int) -> None:
        for number in range(first, first + 100_000):
            start_s = time.monotonic()
            with contextlib.suppress(TierError):
                tier.write(object_name(number), frame_of(number % 7, SIZE))
            longest_s[0] = max(longest_s[0], time.monotonic() - start_s)
            if ends.wait(0.001):
                return

    with ThreadPoolExecutor(2) as threads:
        for number in range(2):
            threads.submit(write, number * 100_000)
        time.sleep(1.0)
        getattr(mooncake.master, how)()
        time.sleep(1.0)
        ends.set()
    assert longest_s[0] < 9.0 + SLACK_S


def test_a_full_store_evicts_or_refuses_and_never_lies(mooncake):
    tier = mooncake.tier(copies=1)
    size, count = 8 << 20, 96  # 768 MiB into 512
    answers = [tier.write(object_name(n), frame_of(n % 7, size)) for n in range(count)]
    found = 0
    for number in range(count):
        into = empty_frame(size)
        if tier.read(object_name(number), into) == size:
            found += 1
            assert into == frame_of(number % 7, size)
    assert 0 < found < count
    assert sum(answers) >= found
    assert tier.write(object_name(1000), frame_of(1, size)) in {True, False}


@pytest.mark.cluster_core
def test_an_object_of_another_size_fills_no_more_than_the_slot(mooncake):
    settings = mooncake.settings()
    tier = mooncake.tier(prefix=settings.prefix)
    assert tier.write(object_name(1), frame_of(1, 3 * 4096))
    into = empty_frame(4 * 4096)
    assert tier.read(object_name(1), into[:4096]) == 4096
    assert into[4096:] == bytes(3 * 4096)
    assert tier.read(object_name(1), into) == 3 * 4096
    assert tier.read(object_name(1), into[:0]) == 0
    assert tier.write(object_name(2), memoryview(b"")) is False
    twice = [Write(object_name(3), frame_of(3)), Write(object_name(4), frame_of(4)), Write(object_name(3), frame_of(3))]
    assert tier.write_many(twice) == [True] * 3
    assert tier.contains([object_name(2)]) == [False]
    # The library's own call refuses a smaller buffer.
    raw = tier._client.store
    with tier._client.registered([into]) as (place,):
        assert raw.get_into(tier._root + object_name(1).hex(), place, 4096) == -600
