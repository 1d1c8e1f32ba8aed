"""What S3 servers do wrong: answers without end, damaged markers, refusals, and writes that end late."""

import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from tests.small_s3 import (
    KEY_ID,
    MIB,
    MODEL,
    SmallS3,
    key_of,
    marker_key,
    name_of,
    open_tier,
    peak_bytes,
    refusing,
)

from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.s3.errors import TEXT_MAX, refusal_of
from kvtier.tier.s3.sweep import S3Sweeper

MARKER = b"kvtier objects, format 1\n"
DAMAGES = {
    "flipped": bytes([MARKER[0] ^ 1]) + MARKER[1:],
    "empty": b"",
    "ten bytes": MARKER[:10],
    "longer": MARKER * 1000,
}
GROWTH_MAX = 64 * MIB
"""Without a limit it is over a GB/s."""
DEADLINE_S = 3.0
SIZE = 1 << 16


@pytest.fixture
def server():
    with SmallS3() as server:
        yield server


@pytest.fixture
def tier(server):
    tier = open_tier(server.endpoint, deadline_s=DEADLINE_S)
    yield tier
    tier.close()


def ranged(request):
    """A body without end, whose head promises the range that was asked for."""
    if request.command != "GET" or not request.headers.get("Range"):
        return False
    request.endless(206, Content_Length=SIZE, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")
    return True


def refused(act):
    """`act` raises, or its first answer is an error."""
    try:
        answers = act()
    except TierError:
        return True
    return isinstance(answers[0], TierError)


def test_a_marker_without_end(server):
    def endless(request):
        if request.command == "GET":
            request.endless(200, Content_Length=25)
        return request.command == "GET"

    server.answers.append(endless)

    def opened():
        with pytest.raises(DamagedStoreError):
            open_tier(server.endpoint, deadline_s=DEADLINE_S)

    assert peak_bytes(opened) < GROWTH_MAX


def test_reads_of_a_body_without_end(server, tier):
    server.answers.append(ranged)
    into = memoryview(bytearray(SIZE))
    assert peak_bytes(lambda: refused(lambda: tier.read_many([Read(name_of(1), into)] * 8))) < GROWTH_MAX
    assert refused(lambda: tier.read_many([Read(name_of(1), into)]))
    assert peak_bytes(lambda: refused(lambda: tier.read(name_of(1), into))) < GROWTH_MAX
    assert refused(lambda: tier.read(name_of(1), into))


def test_answers_without_end_to_writes_and_deletions(server, tier):
    def endless(request):
        if request.command in {"PUT", "DELETE"}:
            request.endless(200)
        return request.command in {"PUT", "DELETE"}

    server.answers.append(endless)
    frame = memoryview(bytearray(SIZE))

    def calls():
        assert tier.write(name_of(1), frame)
        assert tier.write_many([Write(name_of(2), frame)]) == [True]
        tier.delete(name_of(1))

    assert peak_bytes(calls) < GROWTH_MAX


def test_a_record_of_a_sweep_without_end(server, tier):
    def endless(request):
        if request.command == "GET":
            request.endless(200, Content_Length=SIZE)
        return request.command == "GET"

    server.answers.append(endless)
    sweeper = S3Sweeper("s3", tier._store, f"kv/{KEY_ID.hex()}/", MIB, 600.0)

    def work():
        assert sweeper._read_record() == math.inf

    assert peak_bytes(work) < GROWTH_MAX


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_without_end_is_bounded_by_time(server, tier, status):
    """The client reads the bodies of errors itself, without a limit of bytes. This server sends slowly."""

    def endless(request):
        if request.command != "GET":
            return False
        request.head(status, Transfer_Encoding="chunked")
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            request.wfile.write(b"400\r\n" + bytes(1024) + b"\r\n")
            time.sleep(0.01)
        return True

    server.answers.append(endless)
    into = memoryview(bytearray(SIZE))
    for act in (lambda: tier.read(name_of(1), into), lambda: tier.read_many([Read(name_of(1), into)])):
        start_s = time.monotonic()
        assert refused(act)
        assert time.monotonic() - start_s < DEADLINE_S + 2


@pytest.mark.parametrize("sent", [None, 0, SIZE // 2], ids=["nothing", "the head", "half of the body"])
def test_a_read_that_stalls_ends_in_a_share_of_the_deadline_on_its_second_connection(server, sent):
    """Reads of other objects go on meanwhile, and a read whose bytes come slowly does not stall."""
    tier, ends, asked = open_tier(server.endpoint, deadline_s=10.0), threading.Event(), []
    dead, slow, other = (name_of(number) for number in range(3))
    for name in (dead, slow, other):
        assert tier.write(name, memoryview(bytes(SIZE)))

    def answer(request):
        if request.command != "GET" or request.key not in {key_of(dead), key_of(slow)}:
            return False
        same = {"ETag": '"1"', "Last_Modified": "Mon, 05 Jan 2026 10:00:00 GMT", "Content_Length": SIZE}
        if request.key == key_of(slow):
            request.head(206, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}", **same)
            for _ in range(4):
                ends.wait(0.75)
                request.wfile.write(bytes(SIZE // 4))
            return True
        asked.append(request.client_address)
        if sent is not None:
            request.head(206, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}", **same)
            request.wfile.write(bytes(sent))
        ends.wait(20.0)
        request.close_connection = True
        return True

    server.answers.append(answer)
    ended = []

    def read(name):
        answers = tier.read_many([Read(name, memoryview(bytearray(SIZE)))])
        ended.append(name)
        return answers[0]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(read, (dead, slow, other)))
    ends.set()
    assert isinstance(answers[0], TierError)
    assert answers[1:] == [SIZE, SIZE]
    assert len(set(asked)) == len(asked) == 2
    assert ended == [other, slow, dead]
    tier.close()


def test_the_text_of_an_error_is_searched_up_to_a_limit():
    text = "Server returned non-2xx status code: 404 Not Found: <Code>NoSuchKey</Code>"
    assert refusal_of(OSError(text + "x" * (64 * MIB))).code == "NoSuchKey"
    assert refusal_of(OSError("x" * TEXT_MAX + text)).status == 0


def test_a_whole_marker_is_the_control(server, tier):
    assert server.objects[marker_key()] == b"kvtier objects, format 1\n"
    frame = memoryview(bytes(range(256)) * 256)
    assert tier.write(name_of(1), frame)
    into = memoryview(bytearray(SIZE))
    assert tier.read_many([Read(name_of(1), into), Read(name_of(2), into[:0])]) == [SIZE, None]
    assert into == frame
    assert tier.read_many([Read(name_of(1), into[:0])]) == [0]
    assert tier.read_many([Read(name_of(1), into[:100])]) == [100]


# ---- markers and refusals ------------------------------------------------------------------------------------------


def test_a_marker_of_another_format_is_never_overwritten(server):
    """Nodes of that version read what is there, and would lose it."""
    server.objects[marker_key()] = MARKER.replace(b"1", b"12")
    before = dict(server.objects)
    with pytest.raises(DamagedStoreError, match="of another version of kvtier"):
        open_tier(server.endpoint)
    assert server.objects == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_marker_is_a_damaged_store_until_it_is_removed(server, damage):
    open_tier(server.endpoint).close()
    frame = memoryview(b"frame" * 100)
    server.objects[key_of(name_of(1))] = bytes(frame)
    server.objects[marker_key()] = DAMAGES[damage]
    before = dict(server.objects)
    with pytest.raises(DamagedStoreError, match="remove the object: the next start writes it again") as raised:
        open_tier(server.endpoint)
    assert repr(DAMAGES[damage][:40]) in str(raised.value)
    assert marker_key() in str(raised.value)
    assert server.objects == before, "a start writes nothing there"
    del server.objects[marker_key()]
    tier = open_tier(server.endpoint)
    assert server.objects == before | {marker_key(): MARKER}
    into = memoryview(bytearray(len(frame)))
    assert tier.read(name_of(1), into) == len(frame)
    assert into == frame
    tier.close()


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "XMinioStorageFull"), (507, "")])
def test_a_full_bucket_without_a_marker_stops_no_start(server, status, code):
    server.answers.append(refusing(status, code, "PUT"))
    with pytest.raises(TierError, match=f"HTTP {status}"):
        open_tier(server.endpoint)
    server.answers.clear()
    open_tier(server.endpoint).close()


def test_a_marker_that_a_lifecycle_rule_removed_before_younger_objects_is_written_again(server):
    own = f"kv/{KEY_ID.hex()}/"
    server.objects[key_of(name_of(1))] = b"frame"
    server.objects[f"{own}swept"] = b"5\n"
    server.objects[f"{own}{MODEL.hex()}/clock/0011223344556677"] = b""
    tier = open_tier(server.endpoint)
    assert tier.contains([name_of(1)]) == [True]
    tier.close()
    assert server.objects[marker_key()] == MARKER


def test_a_server_that_loses_what_is_written_is_a_damaged_store(server):
    def forgets(request):
        if request.command == "PUT":
            request.head(200, Content_Length=0, ETag='"1"')
        return request.command == "PUT"

    server.answers.append(forgets)
    with pytest.raises(DamagedStoreError, match="does not speak S3"):
        open_tier(server.endpoint)


@pytest.mark.parametrize(("status", "code"), [(404, "NoSuchBucket"), (403, "AccessDenied")])
def test_a_wrong_setting_still_stops_the_start(server, status, code):
    server.answers.append(refusing(status, code))
    with pytest.raises(ConfigError, match=code):
        open_tier(server.endpoint)


def test_a_server_that_fails_may_open_later(server):
    server.answers.append(refusing(503))
    with pytest.raises(TierError, match="HTTP 503") as raised:
        open_tier(server.endpoint, deadline_s=1.0)
    assert not isinstance(raised.value, DamagedStoreError)


# ---- writes that end late ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_write_returns_when_the_client_has_let_go_of_the_callers_memory(server, monkeypatch, is_batch):
    tier = open_tier(server.endpoint, deadline_s=0.5)
    memory = bytearray(MIB)
    held = []

    def put(_store, _key, view, **_options):
        """A client whose connection reads from the memory for some time after its request has failed."""
        held.append(pickle.PickleBuffer(view))
        threading.Timer(2.0, let_go).start()
        raise OSError("no answer")

    def let_go():
        held.pop().release()

    monkeypatch.setattr(obstore, "put", put)
    if is_batch:
        writes = [Write(name_of(number), memoryview(memory)) for number in (1, 2)]
        assert all(isinstance(answer, TierError) for answer in tier.write_many(writes))
    else:
        with pytest.raises(TierError):
            tier.write(name_of(1), memoryview(memory))
    assert not held
    tier.close()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HTTP_PROXY": "http://user:hunter2@127.0.0.1:9"}, True),
        ({"http_proxy": "user:hunter2@127.0.0.1:9"}, True),
        ({"ALL_PROXY": "http://user:hun@ter2@127.0.0.1:9"}, True),
        ({"HTTPS_PROXY": "http://user:hunter2@127.0.0.1:9"}, False),
        ({"HTTP_PROXY": "http://user:hunter2@127.0.0.1:9", "NO_PROXY": "localhost,127.0.0.1"}, False),
        ({"HTTP_PROXY": "http://user:hunter2@127.0.0.1:9", "no_proxy": "localhost, 127.0.0.0/8"}, False),
    ],
)
def test_an_error_through_a_proxy_names_it_and_hides_its_login(monkeypatch, server, variables, named):
    """Nothing listens at port 9. A proxy that is not for this server is neither used nor named."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not named:
        tier = open_tier(server.endpoint, deadline_s=DEADLINE_S)
        tier.close()
        assert "proxy" not in tier._bucket.place
        return
    with pytest.raises(TierError) as caught:
        open_tier(server.endpoint, deadline_s=1.0)
    assert f"at {server.endpoint} through the proxy 127.0.0.1:9: Connection refused" in str(caught.value)
    assert "hun" not in str(caught.value)


def test_a_proxy_that_wants_a_login_is_told_from_the_server(monkeypatch, server):
    server.answers.append(refusing(407))
    monkeypatch.setenv("HTTP_PROXY", server.endpoint)
    with pytest.raises(
        ConfigError, match=r"through the proxy 127\.0\.0\.1:.*: HTTP 407: the proxy asks for a user name"
    ):
        open_tier("http://s3.invalid", deadline_s=DEADLINE_S)
