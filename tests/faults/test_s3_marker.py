"""A damaged marker in a bucket takes the tier away and does not stop the engine's start; repair writes it again."""

import re
import shlex
import ssl
from dataclasses import replace

import pytest
from tests.rig import LAYOUT
from tests.small_s3 import BUCKET, FINGERPRINT, KEY_ID, SmallS3, key_of, marker_key, name_of, open_tier

from kvtier.cli.main import run as kvtier
from kvtier.config import tier_list
from kvtier.config.value_types import PrivateText
from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.tier.registry import TierContext, kind_of
from kvtier.tier.s3.kind import KIND, S3Settings

MARKER = b"kvtier objects, format 1\n"
OTHER_KEY_ID = bytes(16)
repair = KIND.repair
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


def settings_of(server, **others) -> S3Settings:
    return S3Settings(
        url=f"s3://{BUCKET}/kv", endpoint=server.endpoint, allow_http=True, region="us-east-1",
        access_key_id=PrivateText("key"), secret_access_key=PrivateText("secret"), transfer_deadline_s=1.0, **others,
    )  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_marker_is_a_damaged_store_that_repair_mends(server, damage, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    open_tier(server.endpoint).close()
    frame = memoryview(b"frame" * 100)
    server.objects[key_of(name_of(1))] = bytes(frame)
    server.objects[marker_key()] = DAMAGES[damage]
    before = dict(server.objects)
    with pytest.raises(DamagedStoreError, match="kvtier inspect repair 's3:") as raised:
        open_tier(server.endpoint)
    assert repr(DAMAGES[damage][:40]) in str(raised.value)
    spec = re.search(r"repair '(s3:[^']+)'", str(raised.value))[1]
    assert tier_list.parse(spec, spec).url == settings_of(server).url
    assert server.objects == before, "a start writes nothing there"
    assert kvtier(["inspect", "repair", spec]) == 0
    assert marker_key() in capsys.readouterr().out
    assert server.objects == before | {marker_key(): MARKER}
    assert repair(settings_of(server)) == []
    tier = open_tier(server.endpoint)
    into = memoryview(bytearray(len(frame)))
    assert tier.read(name_of(1), into) == len(frame)
    assert into == frame
    tier.close()


def test_repair_leaves_whole_markers_and_writes_those_of_other_secrets(server):
    server.objects[marker_key()] = MARKER
    server.objects[f"kv/{OTHER_KEY_ID.hex()}/{FINGERPRINT.hex()[:32]}/{name_of(1).hex()}"] = b"frame"
    server.objects["kv/notes/read.me"] = server.objects["elsewhere"] = b"of another program"
    (line,) = repair(settings_of(server))
    assert "is missing. It was written again" in line
    assert server.objects[marker_key(OTHER_KEY_ID)] == MARKER
    assert len(server.objects) == 5


@pytest.mark.parametrize("found", [None, b"a letter", MARKER])
def test_repair_leaves_another_programs_folder_that_is_named_like_a_key_id(server, found):
    own = f"kv/{OTHER_KEY_ID.hex()}/"
    server.objects |= {f"{own}thesis.tex": b"years of work"} | ({f"{own}kvtier": found} if found else {})
    before = dict(server.objects)
    lines = repair(settings_of(server))
    assert len(lines) == (found != MARKER)
    assert all("thesis.tex' is not kvtier's" in line for line in lines)
    assert server.objects == before


def test_a_marker_of_another_format_is_never_overwritten(server):
    """Nodes of that version read what is there, and would lose it."""
    server.objects[marker_key()] = MARKER.replace(b"1", b"12")
    before = dict(server.objects)
    with pytest.raises(DamagedStoreError, match="of another version of kvtier"):
        open_tier(server.endpoint)
    (line,) = repair(settings_of(server))
    assert "stays: it is of another version" in line
    assert server.objects == before


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


def test_the_command_has_every_setting_that_it_needs_and_no_secret(server, tmp_path):
    file = tmp_path / "an authority's.pem"
    file.write_text(ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0]))
    settings = settings_of(server, ca_file=file)
    server.objects[marker_key()] = b"damaged"
    with pytest.raises(DamagedStoreError) as raised:
        kind_of(settings).open(settings, TierContext(layout=LAYOUT, key_id=KEY_ID, fingerprint=FINGERPRINT))
    command = shlex.split(str(raised.value).rpartition(": ")[2])
    assert command[:3] == ["kvtier", "inspect", "repair"]
    found = tier_list.parse(command[3])
    hidden = {"access_key_id": PrivateText(), "secret_access_key": PrivateText(), "transfer_deadline_s": 10.0}
    assert found == replace(settings, **hidden)


def test_repair_without_an_answer_is_an_error_without_secrets(server):
    server.answers.append(lambda request: not request.head(403, Content_Length=0))
    with pytest.raises(OSError, match="HTTP 403") as raised:
        repair(settings_of(server))
    assert "secret" not in str(raised.value)


def test_a_marker_that_a_lifecycle_rule_removed_before_younger_objects_is_written_again(server):
    own = f"kv/{KEY_ID.hex()}/"
    server.objects[key_of(name_of(1))] = b"frame"
    server.objects[f"{own}swept"] = b"5\n"
    server.objects[f"{own}{FINGERPRINT.hex()[:32]}/clock/0011223344556677"] = b""
    tier = open_tier(server.endpoint)
    assert tier.contains([name_of(1)]) == [True]
    tier.close()
    assert server.objects[marker_key()] == MARKER


def test_no_marker_is_written_among_objects_of_another_program(server):
    server.objects[f"kv/{KEY_ID.hex()}/thesis.tex"] = b"of another program"
    before = dict(server.objects)
    with pytest.raises(DamagedStoreError, match=r"thesis\.tex.*another prefix"):
        open_tier(server.endpoint)
    assert server.objects == before


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
