"""What is wrong at the start of an S3 tier is an error that names the mistake and shows no secret."""

import logging
import multiprocessing
import traceback

import obstore
import pytest
from tests.cluster.hostile import Hostile
from tests.refusals import refuses
from tests.shared.s3_world import KEY_ID, MODEL, frame_of, fresh_prefix, name_of, open_tier
from tests.tier_makers import kept

from kvtier.config.value_types import PrivateText
from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.tier.registry import TierContext
from kvtier.tier.s3.address import Credentials
from kvtier.tier.s3.errors import ATTEMPTS_MAX, pause_s, refusal_of
from kvtier.tier.s3.kind import KIND, S3Settings

pytestmark = pytest.mark.shared_core


def shown(raised) -> str:
    """All that a log with a traceback shows."""
    return "".join(traceback.format_exception(raised.value)) + repr(raised.value)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ({"bucket": "no-such-bucket"}, "HTTP 404 NoSuchBucket: create the bucket"),
        ({"access_key": "UNKNOWNKEY0123456789"}, "HTTP 403 InvalidAccessKeyId: the access key is unknown"),
        ({"secret_key": "wrongsecret0123456789"}, "HTTP 403 SignatureDoesNotMatch: the secret access key is wrong"),
    ],
)
def test_a_wrong_setting_is_named_and_no_secret_is_shown(gateway, mistake, text, caplog):
    caplog.set_level(logging.DEBUG)
    access = gateway.access._replace(**mistake)
    with pytest.raises(ConfigError, match=text) as raised:
        open_tier(access)
    everything = shown(raised) + caplog.text
    assert access.secret_key not in everything
    assert access.access_key not in everything
    assert access.secret_key[:8] not in everything


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"HTTP/1.1 404 Not Found\r\n", ConfigError, "not the answer of an S3 server"),
        (b"HTTP/1.1 200 OK\r\n", DamagedStoreError, "does not speak S3"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ConfigError, "does not speak HTTP"),
    ],
)
def test_a_server_of_another_kind_is_named(gateway, answer, error, text):
    page = b"Content-Length: 22\r\n\r\n<html>It works!</html>"
    with Hostile(lambda _: [answer + page]) as server, pytest.raises(error, match=text):
        open_tier(gateway.access._replace(endpoint=f"http://127.0.0.1:{server.port}"))


def test_tls_at_a_port_without_it_is_named(gateway):
    endpoint = gateway.access.endpoint.replace("http:", "https:")
    with pytest.raises(ConfigError, match="scheme and port"):
        open_tier(gateway.access._replace(endpoint=endpoint))


def test_an_endpoint_that_does_not_answer_may_open_later(gateway):
    with pytest.raises(TierError, match="Connection refused"):
        open_tier(gateway.access._replace(endpoint="http://127.0.0.1:1"), deadline_s=1.0)
    gateway.proxy.partition()
    with pytest.raises(TierError, match="no answer in time"):
        open_tier(gateway.access, deadline_s=1.0)
    gateway.proxy.heal()
    open_tier(gateway.access, deadline_s=5.0).close()


@pytest.mark.parametrize(
    ("settings", "key", "value", "problem", "allowed"),
    [
        ({"url": "s3://Bucket/x"}, "url", "'s3://Bucket/x'", "", "s3://BUCKET"),
        ({"url": "s3://bucket/../x"}, "url", "", "", "s3://BUCKET"),
        ({"url": "bucket/a//b"}, "url", "", "", "s3://BUCKET"),
        ({"endpoint": "http://10.0.0.1:80"}, "endpoint", "", "does not use TLS", "with allow_http = true"),
        ({"endpoint": "ftp://host"}, "endpoint", "'ftp://host'", "", "https://HOST"),
        ({"endpoint": "https://host/path"}, "endpoint", "", "", "https://HOST"),
        ({"endpoint": "https://ho st"}, "endpoint", "", "", "https://HOST"),
        ({"endpoint": "https://user:hunter2@host"}, "endpoint", "(hidden)", "contains a user name or password", ""),
        ({"endpoint": "https://user:hunter2@host:99999"}, "endpoint", "", "not a URL", "https://HOST"),
        ({"endpoint": "https://user:hunter2@[host"}, "endpoint", "", "not a URL", "https://HOST"),
        ({"url": "s3://key:hunter2@bucket/x"}, "url", "'s3:(hidden)@bucket/x'", "", ""),
        ({"url": "key:hunter2@bucket/x"}, "url", "'s3:(hidden)@bucket/x'", "", ""),
        ({"url": "s3://key:hunter2@bucket/x\n"}, "url", "", "", ""),
        ({"access_key_id": "hunter2"}, "secret_access_key", "", "missing", "both keys"),
        (
            {"access_key_id": "hunter2", "secret_access_key": "hunter2", "profile": "p"},
            "profile",
            "'p'",
            "",
            "not both",
        ),
        ({"sweep_interval_s": 0}, "sweep_interval_s", "0", "too small", "from 1 s to"),
        ({"secret_access_key": "hunter2\n", "access_key_id": "a"}, "secret_access_key", "(hidden)", "", ""),
    ],
)
def test_settings_are_checked_without_a_server(settings, key, value, problem, allowed):
    with refuses(f"tiers.s3.{key}", problem, value=value, allowed=allowed) as raised:
        S3Settings(**{"url": "s3://bucket/prefix", **settings})
    assert "hunter2" not in shown(raised)


def test_credentials_that_may_only_read_are_named(gateway, ceph):
    prefix = fresh_prefix()
    user = ["radosgw-admin", "-n", "client.rgw.a", "user", "modify", "--uid", "kv", "--op-mask"]
    ceph.call(*user, "read")
    try:
        with pytest.raises(ConfigError, match="HTTP 403 AccessDenied: the credentials need GetObject, PutObject"):
            open_tier(gateway.access, prefix)
    finally:
        ceph.call(*user, "read, write, delete")
    open_tier(gateway.access, prefix).close()


def test_settings_never_show_a_secret():
    settings = S3Settings(url="s3://bucket", access_key_id="hunter2", secret_access_key="hunter3")
    texts = [repr(settings), str(settings), f"{settings.secret_access_key}", f"{settings.secret_access_key!s:>9}"]
    texts += [each.kind.show(getattr(settings, each.key)) for each in settings.settings()]
    assert not any("hunter" in text for text in texts)
    assert settings.secret_access_key.reveal() == "hunter3"


def test_the_kind_opens_with_a_profile_and_never_without_a_secret(gateway, tmp_path):
    access = gateway.access
    profiles = tmp_path / "credentials"
    profiles.write_text(
        f"[other]\naws_access_key_id = x\n\n[kv]\naws_access_key_id = {access.access_key}\n"
        f"aws_secret_access_key = {access.secret_key}\n"
    )
    context = TierContext(layout=None, model=MODEL, key_id=KEY_ID)
    common = {"url": f"{access.bucket}/kv", "endpoint": access.endpoint, "allow_http": True}
    common |= {"region": access.region, "credentials_file": profiles}
    tier = kept(KIND.open(S3Settings(profile="kv", **common), context))
    assert tier.write(name_of(1), frame_of(1))
    with pytest.raises(ConfigError, match="no aws_secret_access_key for profile 'other'"):
        KIND.open(S3Settings(profile="other", **common), context)
    with pytest.raises(ConfigError, match="no absent for profile 'absent'"):
        KIND.open(S3Settings(profile="absent", **common), context)
    with refuses("store.secret_file", "tier 's3'"):
        KIND.open(S3Settings(profile="kv", **common), TierContext(layout=None, model=MODEL))


def test_the_usual_chain_gives_credentials_and_its_end_is_named(gateway, monkeypatch, caplog):
    access = gateway.access
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # the machine's own metadata has none either
    with pytest.raises(ConfigError, match="no credentials in the settings, the environment or the machine"):
        open_tier(access, credentials=None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", access.secret_key)
    tier = open_tier(access, credentials=None)
    assert tier.write(name_of(1), frame_of(1))
    assert access.secret_key not in caplog.text


def test_only_objects_of_another_secret_are_one_warning(gateway, caplog):
    prefix = fresh_prefix()
    open_tier(gateway.access, prefix).close()
    assert not caplog.records
    open_tier(gateway.access, prefix, key_id=bytes(16)).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert KEY_ID.hex() in caplog.text
    open_tier(gateway.access, prefix, key_id=bytes(16)).close()
    assert len(caplog.records) == 1, "the second start finds its own marker"


def test_a_marker_of_another_program_is_refused(gateway):
    prefix = fresh_prefix()
    obstore.put(gateway.raw, f"{prefix}/{KEY_ID.hex()}/kvtier", b"something else")
    with pytest.raises(DamagedStoreError, match="another program uses this prefix"):
        open_tier(gateway.access, prefix)


def test_secrets_and_models_do_not_see_each_other(gateway):
    prefix = fresh_prefix()
    settings = [{}, {"key_id": bytes(16)}, {"model": bytes(16)}]
    mine, *others = [open_tier(gateway.access, prefix, **each) for each in settings]
    assert mine.write(name_of(1), frame_of(1))
    for other in others:
        assert other.contains([name_of(1)]) == [False]
        assert list(other.scan()) == []


def _use_in_a_fork(tier, access, answers):
    for act in (lambda: tier.contains([name_of(1)]), lambda: open_tier(access)):
        try:
            act()
            answers.put("no error")
        except TierError as error:
            answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_uses_neither_the_tier_nor_the_client(gateway):
    tier = open_tier(gateway.access, fresh_prefix())
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_use_in_a_fork, args=(tier, gateway.access, answers))
    child.start()
    assert "is a fork" in answers.get()
    assert "is a fork" in answers.get()
    child.join(10)
    assert child.exitcode == 0
    assert tier.contains([name_of(1)]) == [False], "the parent's tier works on"


def test_pauses_are_drawn_at_random_and_a_refusal_is_never_repeated():
    passing = refusal_of(Exception("Server returned non-2xx status code: 503 Slow Down: <Code>SlowDown</Code>"))
    assert passing == ("HTTP 503 SlowDown", 503, "SlowDown", True)
    pauses = [pause_s(passing, 1) for _ in range(50)]
    assert len(set(pauses)) > 40
    assert all(0.05 <= pause <= 0.1 for pause in pauses)
    assert pause_s(passing, ATTEMPTS_MAX) is None
    refused = refusal_of(Exception("status code: 403 Forbidden: <Code>AccessDenied</Code><AWSAccessKeyId>hunter2<"))
    assert pause_s(refused, 1) is None
    assert "hunter2" not in repr(refused)


def test_credentials_are_hidden():
    assert "hunter2" not in repr(Credentials(PrivateText("hunter2"), PrivateText("hunter2")))
