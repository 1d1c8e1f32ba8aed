"""How a Valkey tier opens: TLS, users, wrong settings, warnings, and its settings."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cluster.hostile import Hostile
from tests.cluster.valkey_bed import Cluster, Line, make_authority, new_port, tls_settings
from tests.cluster.valkey_world import KEY_ID, MIB, MODEL, frame_of, fresh_prefix, name_of, open_tier
from tests.refusals import refuses
from tests.rig import LAYOUT
from tests.tier_makers import kept

from kvtier.config import tier_list
from kvtier.config.value_types import PrivateText
from kvtier.errors import ConfigError, TierError
from kvtier.tier import registry
from kvtier.tier.registry import TierContext
from kvtier.tier.valkey.connection import Access
from kvtier.tier.valkey.kind import KIND, ValkeySettings
from kvtier.tier.valkey.tier import ValkeyTier

PASSWORD = "correct-horse-battery"
CONTEXT = TierContext(layout=LAYOUT, model=MODEL, key_id=KEY_ID)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.cluster_core
def test_tls_with_an_authority_of_ones_own(start, authority, tmp_path):
    port = new_port()
    start(*tls_settings(authority, port), "--bind", "127.0.0.1", "127.0.0.2")
    access = Access(tls=True, ca_file=authority.ca_file)
    tier = open_tier(SimpleNamespace(port=port), prefix=fresh_prefix(), access=access)
    frame, into = frame_of(1, 5 * MIB), memoryview(bytearray(5 * MIB))
    assert tier.write(name_of(1), frame)
    assert tier.contains([name_of(n) for n in range(300)]) == [n == 1 for n in range(300)]
    assert tier.read(name_of(1), into) == frame.nbytes
    assert into == frame
    with pytest.raises(ConfigError, match=r"not trusted.*ca_file"):
        open_tier(SimpleNamespace(port=port), access=Access(tls=True))
    other = make_authority(tmp_path / "other")
    with pytest.raises(ConfigError, match="not trusted"):
        open_tier(SimpleNamespace(port=port), access=Access(tls=True, ca_file=other.ca_file))
    with pytest.raises(ConfigError, match="not trusted"):  # the certificate is for 127.0.0.1 and localhost
        ValkeyTier(f"127.0.0.2:{port}", key_id=KEY_ID, model=MODEL, access=access)
    with pytest.raises((ConfigError, TierError)):
        open_tier(SimpleNamespace(port=port), deadline_s=1.0)


def test_a_server_that_closes_in_the_handshake_is_an_error_that_may_pass(authority):
    """A load balancer without a server behind it."""

    def closes(_data):
        raise OSError
        yield

    with Hostile(closes) as server, pytest.raises(TierError, match="handshake"):
        open_tier(server, access=Access(tls=True, ca_file=authority.ca_file), deadline_s=1.0)


def test_a_key_with_a_pass_phrase_is_a_mistake_in_the_settings(start, authority, tmp_path):
    port, key = new_port(), tmp_path / "key"
    start(*tls_settings(authority, port))
    make = ("openssl", "pkey", "-in", authority.key, "-aes256", "-passout", "pass:phrase", "-out", key)
    subprocess.run(make, timeout=60, check=True)
    access = Access(tls=True, ca_file=authority.ca_file, certificate_file=authority.certificate, key_file=key)
    with pytest.raises(ConfigError, match="TLS"):
        open_tier(SimpleNamespace(port=port), access=access)


def test_a_server_without_auth_does_not_get_the_password_into_an_error(start):
    server = start("--rename-command", "AUTH", "")
    with pytest.raises(ConfigError, match="AUTH") as caught:
        open_tier(server, access=Access("kv", PrivateText(PASSWORD)))
    assert PASSWORD[:6] not in str(caught.value)


def test_a_server_that_asks_for_a_certificate(start, authority):
    port = new_port()
    start(*tls_settings(authority, port, asks_clients=True))
    known = Access(tls=True, ca_file=authority.ca_file, certificate_file=authority.certificate, key_file=authority.key)
    tier = open_tier(SimpleNamespace(port=port), access=known)
    assert tier.write(name_of(1), frame_of(1))
    with pytest.raises((ConfigError, TierError)):
        open_tier(SimpleNamespace(port=port), access=Access(tls=True, ca_file=authority.ca_file), deadline_s=1.0)


def test_a_plain_server_where_tls_is_set(valkey, authority):
    start_s = time.monotonic()
    with pytest.raises((ConfigError, TierError)):
        open_tier(valkey, access=Access(tls=True, ca_file=authority.ca_file), deadline_s=1.0)
    assert time.monotonic() - start_s < 3


def test_a_cluster_with_tls(valkey_program, authority, tmp_path):
    port = new_port()  # of the first; each has its own
    cluster = Cluster(tmp_path, valkey_program, *tls_settings(authority, port))
    for node in cluster.nodes:
        node.command[node.command.index("--tls-port") + 1] = str(new_port())
    try:
        cluster.start()
        ports = [int(node.command[node.command.index("--tls-port") + 1]) for node in cluster.nodes]
        tier = open_tier(SimpleNamespace(port=ports[0]), access=Access(tls=True, ca_file=authority.ca_file))
        assert {node.port for node in tier.servers.masters} <= set(ports)
        assert all(tier.write(name_of(n), frame_of(n)) for n in range(20))
        assert tier.contains([name_of(n) for n in range(20)]) == [True] * 20
    finally:
        cluster.close()


@pytest.mark.cluster_core
def test_users_and_passwords(start, tmp_path):
    server = start()
    rules = "~kvtier/* +@read +@write +@transaction +@connection +info +cluster|slots"  # those of the page
    assert rules in (Path(__file__).parents[2] / "docs/tiers.md").read_text()
    server.call("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", *rules.split())
    server.call("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~kvtier/*", "+@read", "+cluster", "+ping", "+info")
    server.call("CONFIG", "SET", "requirepass", PASSWORD)
    for username in ("", "kv"):
        tier = open_tier(server, prefix="kvtier", access=Access(username, PrivateText(PASSWORD)))
        assert tier.write(name_of(1), frame_of(1))
        assert tier.write(name_of(2), frame_of(2, 2 * MIB))
        assert tier.read(name_of(1), memoryview(bytearray(4096))) == 4096
        assert sorted(tier.scan()) == sorted([(name_of(1), 4096), (name_of(2), 2 * MIB)])
        tier.delete(name_of(2))
    for username, password in (("", "wrong-secret"), ("kv", "wrong-secret"), ("nobody", PASSWORD), ("", "")):
        with pytest.raises(ConfigError, match=r"WRONGPASS|NOAUTH") as caught:
            open_tier(server, access=Access(username, PrivateText(password)))
        assert not password or password not in str(caught.value)
    tier = open_tier(server, prefix="kvtier", access=Access("reader", PrivateText(PASSWORD)))
    assert tier.read(name_of(1), memoryview(bytearray(4096))) == 4096
    with pytest.raises(TierError, match="NOPERM"):
        tier.write(name_of(2), frame_of(2))
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    settings = ValkeySettings(addresses=f"127.0.0.1:{server.port}", password_file=path)
    tier = kept(KIND.open(settings, CONTEXT))
    assert tier.contains([name_of(1)]) == [True]
    path.write_text("")
    with pytest.raises(ConfigError, match="password file"):
        KIND.open(settings, CONTEXT)
    assert PASSWORD not in repr(ValkeySettings(addresses="host", password=PrivateText(PASSWORD)))


def test_a_password_that_changes_later_is_an_error_and_then_works_again(start):
    server = start()
    tier = open_tier(server)
    server.call("CONFIG", "SET", "requirepass", PASSWORD)
    tier.servers.failed(tier.servers.masters[0])  # closes what is connected
    with pytest.raises(TierError, match="NOAUTH"):
        tier.contains([name_of(1)])


@pytest.mark.cluster_core
def test_no_server_is_an_error_that_may_pass_and_the_next_address_is_tried(valkey):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(TierError, match="no server answers"):
            open_tier(SimpleNamespace(port=port), deadline_s=1.0)
        open_tier(SimpleNamespace(port=port), valkey)
        closed.listen(0)  # takes connections and says nothing
        start_s = time.monotonic()
        with pytest.raises(TierError):
            open_tier(SimpleNamespace(port=port), deadline_s=1.0)
        open_tier(SimpleNamespace(port=port), valkey, deadline_s=2.0)
        assert time.monotonic() - start_s < 4
    with pytest.raises(TierError):
        ValkeyTier("no-such-host.invalid", key_id=KEY_ID, model=MODEL, deadline_s=2.0)


@pytest.mark.parametrize("password", ["", PASSWORD])
def test_a_server_with_too_many_clients_is_an_error_that_may_pass(start, password):
    server = start()
    server.call("CONFIG", "SET", "requirepass", password)
    access = Access(password=PrivateText(password))
    tier = open_tier(server, access=access, deadline_s=1.0)
    line = Line(server.port)
    if password:
        line.call("AUTH", password)
    line.call("CONFIG", "SET", "maxclients", 2)
    with pytest.raises(TierError, match=r"max number of clients|no server answers"):
        open_tier(server, access=access, deadline_s=0.5)
    assert tier.contains([name_of(1)]) == [False], "one that is connected"
    line.close()


def test_warnings_at_the_start(valkey, caplog):
    prefix = fresh_prefix()
    open_tier(valkey, prefix=prefix).close()
    assert "policy noeviction" in caplog.text
    assert "another secret" not in caplog.text
    caplog.clear()
    valkey.call("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")
    open_tier(valkey, prefix=prefix, model=bytes(16)).close()  # another model
    assert not caplog.text
    open_tier(valkey, prefix=prefix, key_id=bytes(16)).close()
    assert f"another secret only (key id {KEY_ID.hex()})" in caplog.text
    caplog.clear()
    open_tier(valkey, prefix=prefix, key_id=bytes(16)).close()
    assert not caplog.text, "once"


@pytest.mark.cluster_core
@pytest.mark.parametrize(
    ("values", "key", "allowed"),
    [
        ({"addresses": "host:0"}, "addresses", "HOST"),
        ({"addresses": "host:70000"}, "addresses", "HOST"),
        ({"addresses": "ho st"}, "addresses", "HOST"),
        ({"addresses": "a..b"}, "addresses", "HOST"),
        ({"addresses": "a" * 64}, "addresses", "HOST"),
        ({"addresses": "/run/valkey.sock"}, "addresses", "HOST"),
        ({"addresses": "user:secret@host:1"}, "addresses", "HOST"),
        ({"addresses": ",".join(f"host{n}" for n in range(65))}, "addresses", "at most 64"),
        ({"addresses": "host", "prefix": "a{b}"}, "prefix", "letters"),
        ({"addresses": "host", "prefix": ""}, "prefix", "1 to 100 characters"),
        ({"addresses": "host", "username": "kv"}, "username", ""),
        ({"addresses": "host", "password": PrivateText("a"), "password_file": "/x"}, "password_file", "not both"),
        ({"addresses": "host", "tls": True, "key_file": "/x"}, "certificate_file", "both files"),
        ({"addresses": "host", "ca_file": "/x"}, "ca_file", ""),
        ({"addresses": "host", "database": -1}, "database", "from 0"),
        ({"addresses": "host", "lifetime_s": -1.0}, "lifetime_s", "from 0"),
    ],
)
def test_wrong_settings_name_the_value_and_what_is_allowed(values, key, allowed):
    with refuses(f"tiers.valkey.{key}", allowed=allowed) as caught:
        ValkeySettings(**values)
    assert "secret" not in f"{caught.value}{vars(caught.value)}"


def test_a_tier_from_a_text(valkey):
    settings = tier_list.parse(f"valkey:127.0.0.1:{valkey.port},[::1]:{valkey.port},localhost?lifetime=1h&prefix=a/b")
    assert settings.addresses == f"127.0.0.1:{valkey.port},[::1]:{valkey.port},localhost:6379"
    assert (settings.lifetime_s, settings.prefix, settings.name) == (3600.0, "a/b", "valkey")
    assert "valkey" in registry.built_in()
    with refuses("store.secret_file", "tier 'valkey'"):
        KIND.open(settings, TierContext(layout=LAYOUT))
    with refuses("tiers.valkey.ca_file", "No such file", value="/no/such/file"):
        KIND.open(ValkeySettings(addresses="host", tls=True, ca_file="/no/such/file"), CONTEXT)


WITHOUT = """
import sys
sys.modules["valkey"] = None
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.registry import TierContext, built_in, by_name
assert "valkey" in built_in()
kind, layout = by_name("valkey"), KvLayout(1, (GroupLayout(History(), (4096,), "x"),))
context = TierContext(layout=layout, key_id=bytes(16))
settings = kind.settings(addresses=sys.argv[1], prefix=sys.argv[2])
tier = kind.open(settings, context)
assert tier.write(object_name(1), empty_frame(4096)) and tier.contains([object_name(1)]) == [True]
tier.close()
try:
    kind.raw(settings, context)
except ConfigError as error:
    print(error)
"""


@pytest.mark.cluster_core
def test_the_tier_needs_no_package_but_the_comparison_does(valkey):
    words = [f"127.0.0.1:{valkey.port}", fresh_prefix()]
    command = [sys.executable, "-c", WITHOUT, *words]
    done = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "the comparison with valkey-py needs its package: pip install 'valkey>=6.1'"


def test_objects_of_other_models_secrets_databases_and_prefixes_are_not_seen(valkey):
    prefix = fresh_prefix()
    first = open_tier(valkey, prefix=prefix)
    assert first.write(name_of(1), frame_of(1))
    others = [
        open_tier(valkey, prefix=prefix, model=bytes(16)),
        open_tier(valkey, prefix=prefix, key_id=bytes(16)),
        open_tier(valkey, prefix=prefix + "x"),
        open_tier(valkey, prefix=prefix, access=Access(database=3)),
    ]
    for each in others:
        assert each.contains([name_of(1)]) == [False]
        assert list(each.scan()) == []
    assert list(first.scan()) == [(name_of(1), 4096)]
    with pytest.raises(ConfigError, match="DB index"):
        open_tier(valkey, access=Access(database=999))
