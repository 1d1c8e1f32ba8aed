"""No answer of an S3 server makes the process's memory grow without end: bodies are read up to what was asked for."""

import math
import time

import pytest
from tests.small_s3 import KEY_ID, MIB, SmallS3, marker_key, name_of, open_tier, peak_bytes

from kvtier.errors import DamagedStoreError, TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.s3.errors import TEXT_MAX, refusal_of
from kvtier.tier.s3.sweep import S3Sweeper

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
