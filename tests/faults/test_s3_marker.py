"""A damaged marker in a bucket takes the tier away and does not stop the engine's start."""

import pytest
from tests.small_s3 import FINGERPRINT, KEY_ID, SmallS3, key_of, marker_key, name_of, open_tier

from kvtier.errors import ConfigError, DamagedStoreError, TierError

MARKER = b"kvtier objects, format 1\n"
DAMAGES = {
    "flipped": bytes([MARKER[0] ^ 1]) + MARKER[1:],
    "empty": b"",
    "ten bytes": MARKER[:10],
    "longer": MARKER * 1000,
}


@pytest.fixture
def server():
    with SmallS3() as server:
        yield server


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
    body = f"<Error><Code>{code}</Code></Error>".encode()

    def is_full(request):
        if request.command == "PUT":
            request.head(status, Content_Length=len(body))
            request.wfile.write(body)
        return request.command == "PUT"

    server.answers.append(is_full)
    with pytest.raises(TierError, match=f"HTTP {status}"):
        open_tier(server.endpoint)
    server.answers.clear()
    open_tier(server.endpoint).close()


def test_a_marker_that_a_lifecycle_rule_removed_before_younger_objects_is_written_again(server):
    own = f"kv/{KEY_ID.hex()}/"
    server.objects[key_of(name_of(1))] = b"frame"
    server.objects[f"{own}swept"] = b"5\n"
    server.objects[f"{own}{FINGERPRINT.hex()[:32]}/clock/0011223344556677"] = b""
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
    body = f"<Error><Code>{code}</Code></Error>".encode()

    def refuses(request):
        request.head(status, Content_Length=len(body))
        request.wfile.write(body)
        return True

    server.answers.append(refuses)
    with pytest.raises(ConfigError, match=code):
        open_tier(server.endpoint)


def test_a_server_that_fails_may_open_later(server):
    server.answers.append(lambda request: not request.head(503, Content_Length=0))
    with pytest.raises(TierError, match="HTTP 503") as raised:
        open_tier(server.endpoint, deadline_s=0.3)
    assert not isinstance(raised.value, DamagedStoreError)
