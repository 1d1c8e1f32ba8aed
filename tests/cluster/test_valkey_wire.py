"""What a hostile, broken or wrong server sends costs one connection and a bounded time, and never memory."""

import socket
import time
import tracemalloc
from contextlib import suppress

import pytest
from tests.cluster.hostile import Hostile, opens
from tests.cluster.valkey_world import MIB, frame_of, name_of, open_tier

from kvtier.errors import ConfigError, TierError
from kvtier.tier.base import Read
from kvtier.tier.valkey.connection import Access, Node, RefusedError, Wire
from kvtier.tier.valkey.parts import HEADER, MAGIC, PART_BYTES
from kvtier.tier.valkey.pipeline import AHEAD_BYTES

pytestmark = pytest.mark.cluster_core
DEADLINE_S = 0.3
SLACK_S = 2.0


def drip(_data):
    while True:
        yield b"x"
        yield 0.05


def endless_line(_data):
    while True:
        yield b"-" + b"x" * 65536


def endless_number(_data):
    while True:
        yield b"$" + b"1" * 65536


def much_in_one_reply(_data):
    yield b"*100000\r\n"
    while True:
        yield b"$200000\r\n" + b"x" * 200_000 + b"\r\n"


def cut(_data):
    yield b"$500\r\nabc"
    raise OSError  # closes the connection


def flood(_data):
    while True:
        yield b"*1\r\n" * 10000


def drip_value(_data):
    yield b"$1016\r\n" + HEADER.pack(MAGIC, 1, 1000)
    yield from drip(_data)


SAYINGS = {
    "a length of 2^63": lambda _: [b"$9223372036854775807\r\n"],
    "a length below nothing": lambda _: [b"$-2\r\n"],
    "a length of 100 MB": lambda _: [b"$100000000\r\nabc"],
    "no number": lambda _: [b"$12x\r\n"],
    "too many items": lambda _: [b"*1000000000\r\n"],
    "items in items": flood,
    "another type": lambda _: [b"+OK\r\n" * 50],
    "no protocol": lambda _: [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    "nothing": lambda _: [5.0],
    "an early close": cut,
    "much in one reply": much_in_one_reply,
    "an endless line": endless_line,
    "an endless number": endless_number,
    "a slow drip": drip,
    "a value drop by drop": drip_value,
    "a refusal": lambda _: [b"-ERR \x1b[31m\xff nonsense\r\n" * 50],
}


@pytest.mark.parametrize("saying", SAYINGS)
def test_after_the_start(saying):
    with Hostile(opens(SAYINGS[saying])) as server:
        tier = open_tier(server, deadline_s=10.0)
        tier._deadline_s = tier._probe_deadline_s = DEADLINE_S
        into = memoryview(bytearray(2 * MIB))
        calls = {
            "read": lambda: tier.read(name_of(1), into),
            "read_many": lambda: tier.read_many([Read(name_of(1), into)])[0],
            "write": lambda: tier.write(name_of(1), frame_of(1)),
            "contains": lambda: tier.contains([name_of(1)]),
            "health": lambda: tier.contains([]),
            "delete": lambda: tier.delete(name_of(1)),
            "scan": lambda: list(tier.scan()),
        }
        tracemalloc.start()
        try:
            for what, call in calls.items():
                start_s = time.monotonic()
                try:
                    answer = call()
                except TierError as error:
                    answer = error
                assert time.monotonic() - start_s < DEADLINE_S + SLACK_S, what
                assert isinstance(answer, TierError) or not answer or saying == "another type", (what, answer)
                assert str(answer).isprintable()
            assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("saying", SAYINGS)
def test_from_the_start(saying):
    with Hostile(SAYINGS[saying]) as server:
        start_s = time.monotonic()
        with pytest.raises((ConfigError, TierError)) as caught:
            open_tier(server, deadline_s=DEADLINE_S)
        assert time.monotonic() - start_s < DEADLINE_S + SLACK_S
        assert len(str(caught.value)) < 700
        assert str(caught.value).isprintable()


def test_a_store_of_which_a_part_is_refused_is_not_acknowledged():
    def say(data):
        if b"EXISTS" in data:
            return [b":0\r\n"]
        if not data.endswith(b"EXEC\r\n"):
            return []
        return [b"+OK\r\n+QUEUED\r\n-OOM command not allowed\r\n+QUEUED\r\n-EXECABORT discarded\r\n"]

    with Hostile(opens(say)) as server:
        tier = open_tier(server)
        assert tier.write(name_of(1), frame_of(1, 3 * PART_BYTES)) is False
        assert tier.figures().write_bytes == {"frames": 0}


def test_a_reader_asks_for_no_more_ahead_than_the_limit(monkeypatch):
    """The server sends a part only after a pause, in which it would hear of every part that the reader asks for."""
    asked, sent, ahead = 0, 0, []
    parts = 3 * AHEAD_BYTES // PART_BYTES
    frame = frame_of(1, parts * PART_BYTES)

    def say(data):
        nonlocal asked, sent
        asked += data.count(b"GET")
        while sent < asked:
            ahead.append(asked - sent)
            yield 0.01
            content = bytes(frame[sent * PART_BYTES : (sent + 1) * PART_BYTES])
            yield b"$%d\r\n%b\r\n" % (HEADER.size + PART_BYTES, HEADER.pack(MAGIC, 1, frame.nbytes) + content)
            sent += 1

    for limit, most in ((AHEAD_BYTES, AHEAD_BYTES // PART_BYTES), (1 << 30, parts)):
        monkeypatch.setattr("kvtier.tier.valkey.pipeline.AHEAD_BYTES", limit)
        asked = sent = 0
        ahead.clear()
        with Hostile(opens(say)) as server:
            into = memoryview(bytearray(frame.nbytes))
            assert open_tier(server, is_user=False).read(name_of(1), into) == frame.nbytes
            assert into == frame
        assert max(ahead) == most


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "\x1b[31m", "%s%n", "."])
def test_a_redirection_to_what_is_no_host_is_an_error(host):
    rows = "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%s\r\n:%d\r\n"
    named = "127.0.0.1"

    def slots():
        return (rows % (len(named), named, server.port)).encode()

    with Hostile(opens(lambda data: [f"-MOVED 1 {host}:6379\r\n".encode() * data.count(b"*")], slots)) as server:
        tier = open_tier(server)
        with suppress(TierError):
            assert tier.read(name_of(1), memoryview(bytearray(4096))) is None
        named = host
        with pytest.raises((ConfigError, TierError)) as caught:
            open_tier(server)
        assert str(caught.value).isprintable()


def test_a_host_that_a_server_does_not_name_is_its_own():
    rows = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n:%d\r\n"
    with Hostile(lambda data: [rows % server.port] if b"SLOTS" in data else []) as server:
        tier = open_tier(server, is_user=False)
        own = Node("127.0.0.1", server.port)
        for text, node in (
            ("MOVED 1 :7000", Node("127.0.0.1", 7000)),
            ("MOVED 1 ?:7001", Node("127.0.0.1", 7001)),
            ("MOVED 1 fd00::1:7000", Node("fd00::1", 7000)),
        ):
            tier.servers.moved(RefusedError(text))
            assert tier.servers.node_of(1) == node
        for text in ("MOVED 2 host:0", "MOVED 99999 host:1", "MOVED 2", "ASK 2 host:1"):
            tier.servers.moved(RefusedError(text))
            assert tier.servers.node_of(2) == own


def test_all_addresses_of_a_host_share_the_deadline(monkeypatch):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 20)
        start_s = time.monotonic()
        with pytest.raises(TimeoutError):
            Wire(Node("host", full.getsockname()[1]), Access(), start_s + DEADLINE_S)
        assert time.monotonic() - start_s < DEADLINE_S + SLACK_S
        for each in waiting:
            each.close()


def test_a_server_of_another_kind_is_a_mistake_in_the_settings():
    with Hostile(SAYINGS["no protocol"]) as server, pytest.raises(ConfigError, match="not a Valkey server"):
        open_tier(server, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("word", ["MOVED", "ASK"])
def test_two_servers_that_send_everything_to_each_other_are_left(word):
    rows = "*2\r\n" + "".join(
        f"*3\r\n:{first}\r\n:{last}\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" for first, last in ((0, 8191), (8192, 16383))
    )

    def slots():
        return (rows % (one.port, two.port)).encode()

    def sends_to(other):
        return opens(
            lambda data: [b"-%b 1 127.0.0.1:%d\r\n" % (word.encode(), other().port) * data.count(b"*")],
            slots,
        )

    with Hostile(sends_to(lambda: two)) as one, Hostile(sends_to(lambda: one)) as two:
        tier = open_tier(one, two, deadline_s=10.0, probe_deadline_s=10.0)
        before = one.blocks + two.blocks
        if word == "ASK":  # as of a slot that is on its way
            assert tier.contains([name_of(1)]) == [False]
        else:
            with pytest.raises(TierError, match=word):
                tier.contains([name_of(1)])
        with suppress(TierError):
            assert tier.read(name_of(1), memoryview(bytearray(4096))) is None
        assert one.blocks + two.blocks - before < 30, "a bounded number of requests"
