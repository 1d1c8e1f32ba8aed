"""Settings: precedence, origins and errors."""

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from kvtier.config.loader import load, overridden
from kvtier.config.schema import settings, short
from kvtier.config.sections import SECTIONS, Config, HostConfig, LimitsConfig, StoreConfig
from kvtier.config.tier_list import FORM, SettingOrigin, parse, spec
from kvtier.config.value_types import (
    SIZE_UNITS,
    parse_count,
    parse_number,
    parse_seconds,
    parse_size,
    shown_place,
    size_text,
)
from kvtier.errors import (
    BadCallError,
    ConfigError,
    CorruptChunkError,
    TierError,
    UnreadableChunkError,
    UnusablePathError,
)
from kvtier.tier.directory.kind import DirectorySettings

DIGITS = "0123456789abcdef" * 4


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refused(setting, problem="", *, file=None, environ=None, flags=(), tiers=(), **fields):
    """The error of `load`, which has this setting, and these texts in its other fields."""
    with refuses(setting, problem, **fields) as caught:
        load(file, environ or {}, flags, tiers)
    return caught.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("the whole text"), "the whole text"),
        (
            ConfigError("not a size", setting="host.x", value="'3 parsecs'", origin="file f", allowed="bytes"),
            "host.x = '3 parsecs' (from file f): not a size; allowed: bytes",
        ),
        (ConfigError(setting="chunk_size", value="'a'", allowed="a number"), "chunk_size = 'a': allowed: a number"),
        (
            ConfigError("unknown; did you mean a?", setting="b", allowed="a, c"),
            "b: unknown; did you mean a? allowed: a, c",
        ),
        (ConfigError("is a directory", setting="--report", value="'/x'"), "--report '/x': is a directory"),
        (UnusablePathError("has mode 0644", setting="keys file", value="'/x'"), "keys file '/x': has mode 0644"),
        (TierError("disk", "full"), "tier 'disk': full"),
        (CorruptChunkError(bytes(32), "cut", "forged"), "object 000000000000: cut"),
        (UnreadableChunkError(bytes(32), "new", "version", 9), "object 000000000000: new"),
        (BadCallError("of nothing"), "of nothing"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_an_error_has_one_form_also_in_another_process(error, text):
    assert str(error) == text
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), text, vars(error))


def test_without_anything_every_value_is_a_default():
    loaded = load(environ={})
    assert loaded.config == Config()
    assert loaded.file is None
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}
    assert set(loaded.origins) == {"tiers"} | {s.name for section in SECTIONS.values() for s in settings(section)}


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path):
    file = write(
        tmp_path / "kvtier.toml",
        '[host]\ncapacity_bytes = "1GiB"\n'
        "[limits]\nstores_in_flight = 10\nload_deadline_s = 1\nscatters_in_flight = 4\n",
    )
    environ = {"KVTIER_LIMITS__STORES_IN_FLIGHT": "20", "KVTIER_LIMITS__LOAD_DEADLINE_S": "500ms"}
    loaded = load(file, environ, ["limits.stores_in_flight=25", "limits.stores_in_flight=30"])
    assert loaded.config.host.capacity_bytes == 2**30
    assert loaded.config.limits.scatters_in_flight == 4
    assert loaded.config.limits.load_deadline_s == 0.5
    assert loaded.config.limits.stores_in_flight == 30
    assert str(loaded.origins["host.capacity_bytes"]) == f"file {file}"
    assert str(loaded.origins["limits.load_deadline_s"]) == "environment KVTIER_LIMITS__LOAD_DEADLINE_S"
    assert str(loaded.origins["limits.stores_in_flight"]) == "flag --set limits.stores_in_flight"
    assert str(loaded.origins["limits.store_deadline_s"]) == "default"


def test_every_setting_can_be_set_in_each_way_and_comes_back_the_same(tmp_path):
    changed = {
        "host.capacity_bytes": ("512MiB", 2**29),
        "host.page_lock": ("off", "off"),
        "host.populate": ("yes", True),
        "trace.path": (str(tmp_path), tmp_path),
        "store.write_policy": ("selective", "selective"),
        "store.secret": (DIGITS, bytes.fromhex(DIGITS)),
        "limits.load_deadline_s": ("250ms", 0.25),
    }
    environ = {f"KVTIER_{name.replace('.', '__').upper()}": text for name, (text, _) in changed.items()}
    by_environment = load(environ=environ).config
    by_flags = load(environ={}, flags=[f"{name}={text}" for name, (text, _) in changed.items()]).config
    assert by_environment == by_flags
    for name, (_, value) in changed.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(by_flags, section), key) == value


def test_the_variable_names_the_file_and_an_argument_wins_over_it(tmp_path):
    by_variable = write(tmp_path / "a.toml", "[limits]\nstores_in_flight = 1\n")
    by_argument = write(tmp_path / "b.toml", "[limits]\nstores_in_flight = 2\n")
    environ = {"KVTIER_CONFIG": str(by_variable)}
    assert load(environ=environ).config.limits.stores_in_flight == 1
    assert load(environ=environ).file == by_variable
    assert load(by_argument, environ).config.limits.stores_in_flight == 2
    assert load(environ={"KVTIER_CONFIG": ""}).file is None


def test_by_default_the_process_environment_is_read(monkeypatch):
    monkeypatch.setitem(os.environ, "KVTIER_LIMITS__STORES_IN_FLIGHT", "77")
    assert load().config.limits.stores_in_flight == 77


def test_a_value_that_a_later_layer_replaces_is_still_checked():
    refused(
        "limits.stores_in_flight",
        value="'many'",
        environ={"KVTIER_LIMITS__STORES_IN_FLIGHT": "many"},
        flags=["limits.stores_in_flight=5"],
    )


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("host.capacity_bytes=1KiB", "too small"),
        ("host.capacity_bytes=-1", "not a size"),
        ("host.capacity_bytes=9999999TiB", "too large"),
        ("host.capacity_bytes=1.5", "not a size"),
        ("host.capacity_bytes=", "not a size"),
        ("host.page_lock=maybe", "not one of the choices"),
        ("host.populate=perhaps", "neither true nor false"),
        ("host.evictor=random", "not one of the choices"),
        ("limits.stores_in_flight=0", "too small"),
        ("limits.stores_in_flight=2.5", "not a whole number"),
        ("limits.stores_in_flight=٣", "not a whole number"),
        ("limits.stores_in_flight=" + "9" * 5000, "not a whole number"),
        ("limits.load_deadline_s=nan", "not a duration"),
        ("limits.load_deadline_s=inf", "not a duration"),
        ("limits.load_deadline_s=5m", "not a duration"),
        ("limits.load_deadline_s=0s", "too small"),
        ("trace.path=a\0b", "not a path"),
        ("trace.path=a\ud800b", "surrogates not allowed"),
        ("store.secret_file=~nobody-of-that-name/x", "unknown home directory"),
    ],
)
def test_impossible_values_are_refused(flag, problem):
    name, _, value = flag.partition("=")
    section, _, key = name.partition(".")
    kind = next(it.kind for it in settings(SECTIONS[section]) if it.key == key)
    error = refused(name, problem, origin=f"flag --set {name}", flags=[flag])
    assert (error.value, error.allowed) == (short(value), kind.allowed)


PATHS = ["trace.path", "journal.path", "control.socket", "store.secret_file", "store.keys_file", "tiers.directory.path"]


@pytest.mark.parametrize("name", [*PATHS, "KVTIER_CONFIG"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("$HOME/kv", "$HOME is not replaced here; for {home} write ~ at the beginning"),
        ("${HOME}/kv", "${HOME} is not replaced here; for {home} write ~ at the beginning"),
        ("/mnt/$(POD_NAME)/kv", "$(POD_NAME) is not replaced here"),
        ("~/kv", ""),
        ("{tmp}/a$/1$2", ""),
    ],
)
def test_variables_in_a_path_are_refused_and_the_home_directory_is_known(tmp_path, monkeypatch, name, given, named):
    """In a file, in the environment and in a tier's text alike: the text itself would be the name of a directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("POD_NAME", "Sesame")
    given = given.replace("{tmp}", str(tmp_path))
    wanted = tmp_path / "kv" if given.startswith("~") else Path(given)
    section, _, key = name.rpartition(".")
    sources: list[dict[str, object]] = [{"environ": {name: given}}]
    if name != "KVTIER_CONFIG":
        first = 'tiers = ["directory:/kv"]\n' if section.startswith("tiers") else ""
        table = f"[[tiers]]\nkind = 'directory'\n{key} = '{given}'\n" if first else f"[{section}]\n{key} = '{given}'\n"
        sources = [
            {"file": write(tmp_path / "kvtier.toml", table)},
            {"flags": [f"{name}={given}"], "tiers": ["directory:/kv"]},
        ]
        sources += [{"tiers": [f"directory:{given}"]}] if first else []
    elif not named:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        write(wanted, "")
    for source in sources:
        if named:
            error = refused(name, named.replace("{home}", str(tmp_path)), value=given, allowed="a ", **source)
            assert "Sesame" not in str(error)
        else:
            loaded = load(**{"environ": {}, **source})
            part = loaded.config.tiers[0] if section.startswith("tiers") else getattr(loaded.config, section, None)
            assert (loaded.file if part is None else getattr(part, key)) == wanted


@pytest.mark.parametrize(
    ("name", "value", "shown", "problem"),
    [
        ("limits.stores_in_flight", "'4'", "'4'", "not a whole number"),
        ("limits.stores_in_flight", "true", "True", "not a whole number"),
        ("limits.stores_in_flight", "4.0", "4.0", "not a whole number"),
        ("host.capacity_bytes", "4.0e9", "4000000000.0", "not a size"),
        ("host.populate", "'true'", "'true'", "neither true nor false"),
        ("host.page_lock", "true", "True", "not one of the choices"),
        ("trace.path", "7", "7", "not a path"),
        ("limits.load_deadline_s", "true", "True", "not a duration"),
        ("limits.load_deadline_s", "[1]", "(list)", "not a duration"),
    ],
)
def test_wrong_types_in_a_file_are_refused(tmp_path, name, value, shown, problem):
    section, _, key = name.partition(".")
    file = write(tmp_path / "kvtier.toml", f"[{section}]\n{key} = {value}\n")
    error = refused(name, problem, origin=f"file {file}", file=file)
    assert error.value == shown


def test_unknown_names_are_errors_that_name_the_known_ones(tmp_path):
    refused(
        "host.capcity_bytes",
        "did you mean capacity_bytes or staging_bytes?",
        origin="environment KVTIER_HOST__CAPCITY_BYTES",
        allowed="capacity_bytes, evictor,",
        environ={"KVTIER_HOST__CAPCITY_BYTES": "1"},
    )
    refused("shelf", origin="flag --set shelf.x", allowed="host, store,", flags=["shelf.x=/y"])
    refused("limit", "did you mean limits?", file=write(tmp_path / "a.toml", "[limit]\n"))
    refused("limits.reqests", origin="file", file=write(tmp_path / "b.toml", "[limits]\nreqests = 1\n"))
    refused("capacity_bytes", origin="file", file=write(tmp_path / "c.toml", "capacity_bytes = 1\n"))
    refused("host", allowed="below a line [host]", file=write(tmp_path / "d.toml", "host = 1\n"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("limits.stores_in_flight", "limits.(hidden)"),
        ("stores_in_flight=1", "stores_in_flight"),
        ("", "(hidden)"),
        ("=", ""),
        ("limits=3", "limits"),
    ],
)
def test_a_flag_of_another_shape_is_refused(flag, value):
    refused("--set", value=value, allowed="section.key=value", flags=[flag])


def test_a_single_underscore_is_a_slip_but_other_peoples_variables_are_theirs():
    refused("KVTIER_TRACE_PATH", "did you mean KVTIER_TRACE__PATH?", environ={"KVTIER_TRACE_PATH": "/x"})
    refused("KVTIER_TIER", "did you mean KVTIER_TIERS?", environ={"KVTIER_TIER": "disk:/x"})
    kubernetes = {"KVTIER_PORT": "tcp://10.0.0.1:80", "KVTIER_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert load(environ=kubernetes).config == Config()


def test_files_that_can_not_be_read_are_named(tmp_path):
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "c.toml").write_bytes(b"#" * 2_000_000)
    missing = tmp_path / "none.toml"
    for file, problem in (
        (missing, "No such file"),
        (tmp_path, "Is a directory"),
        (write(tmp_path / "a.toml", "[host]\ncapacity_bytes = \n"), "line 2"),
        (tmp_path / "b.toml", "is not valid TOML"),
        (tmp_path / "c.toml", "longer than"),
    ):
        assert refused("TOML file", problem, file=file).value == str(file)
    refused("TOML file", "No such file", value=str(missing), environ={"KVTIER_CONFIG": str(missing)})


def test_a_secret_is_never_shown():
    loaded = load(environ={"KVTIER_STORE__SECRET": DIGITS})
    assert loaded.config.store.secret == bytes.fromhex(DIGITS)
    for text in (repr(loaded), str(loaded.config.store), str(loaded.config.store.secret)):
        assert "0123456789" not in text
        assert bytes.fromhex(DIGITS)[:4].hex() not in text
        assert repr(bytes.fromhex(DIGITS))[2:10] not in text
    with pytest.raises(ConfigError) as caught:
        load(environ={"KVTIER_STORE__SECRET": DIGITS + "zz"})
    assert "0123" not in str(caught.value)
    assert (caught.value.setting, caught.value.value) == ("store.secret", "(hidden)")
    assert "64 hexadecimal digits" in caught.value.allowed


@pytest.mark.parametrize(
    "text",
    [
        "s3:s3://key:hunter2/+@bucket/%zz",
        "s3:key:hun?ter2@bucket/%zz",
        "s3:s3://key:hunter2%40bucket/%zz",
        "s3:s3://key:hunter2@bucket/x",
        "s3:s3://key:hunter2@bucket/x%0A",
        "disk:/x?capacity=https://key:hunter2@host",
        "s3:bucket?secret_access_key=ab&hunter2",
        "s3:bucket?secret_access_key=ab&hunter2=x",
        "one=two=s3://key:hunter2@bucket",
    ],
)
def test_no_error_about_a_tier_shows_a_password(text):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert "hunter2" not in str(caught.value)
    assert "hun" not in str(caught.value)


SLIPS = {
    "tiers": (
        "valkey:h?passwort=%s", "valkey:h?password=%s&passwrd=1", "valkey:h&password=%s", "valkey:h&pw=%s",
        "valkey:h? password=%s", "valkey:h?password=%s\n", "valkey:h?password=a%%zz%s", "valkey:h;pw=%s",
        "valkey:user:%s@h", "valkey:user%%3A%s@h", "mooncake:user:%s@h", "mooncake:user:/%s@h", "mooncake:a %s@h",
        "valkey:h?username=%s", "valkey:h:1?password=p@%s&username", "valkey:h?password=p%%40%s&username",
        "valkey:u:p?%s@h", "%s@h:1", "%s@h/0", "%s@h", "%s&db=1", "%s&db", "%s&x=valkey:h",
        "valkey:redis://user:%s@h", "valkey:h?user=a:%s", "valkey:u:%s",
        "valkey:h#pw=%s", "valkey:h,pw=%s", "valkey:h?password:%s", "valkey:h?%s", "valkey:h??password=%s",
        "valkey:h?password=%s?x=1", "valkey?password=%s", "v=valkey:h?password=%s=", "=valkey:h?password=%s",
        "host=4GiB?password=%s", "s3:b?secret_acces_key=%s", "s3:b&secret_access_key=%s", "s3:https://u:%s@h/b",
        "s3:bkt?endpoint=http://u:%s@h", "s3:bkt?endpoint=https://h?key=%s", "disk:/x?password=%s", "%s",
        "nokind:x?password=%s", "mooncake:h?token=%s", "mooncake:h&token=%s",
    ),
    "flags": (
        "store.secret:%s", "store.secret%s", "store.secrt=%s", "store.secret =%s", "stor.secret=%s", "secret=%s",
        "store.secret==%s", "store.secret:%s==", "store.keys=1 - %s", "store.keys=1 t %s opn", "store.key=1 - %s",
        "store.keys_command=echo %s '", "store.tenant=%s!", "tiers.valkey.password=%s", "valkey.password=%s",
    ),
    "file": (
        '[store]\nsecret = "%s', "[store]\nsecret = %s", '[store]\nsecret = ["%s"]', '[stor]\nsecret = "%s"',
        'secret = "%s"', '[store]\nkeys = ["1 - %s"]', 'tiers = [["%s"]]', 'tiers = "valkey:h?password=%s"',
        '[[tiers]]\nkind = "valkey"\naddresses = "u:%s@h"', '[[tiers]]\nkind = ["%s"]',
        '[[tiers]]\nkind = "valkey"\naddresses = "h"\npassword = ["%s"]',
        '[store]\nsecret = "%s"\nsecret = "%s"',
    ),
}  # fmt: skip
"""Texts with a secret, and a plausible slip of the keyboard around it."""


@pytest.mark.parametrize("secret", [DIGITS[:-1], "Hunter2"])
@pytest.mark.parametrize("source", SLIPS)
def test_no_slip_of_the_keyboard_shows_a_secret(source, secret, tmp_path):
    shown = []
    for slip in SLIPS[source]:
        text = slip.replace("%s", secret).replace("%%", "%")
        given = write(tmp_path / "c.toml", text) if source == "file" else (text,)
        with pytest.raises(ConfigError) as caught:
            load(**{"environ": {}, source: given})
        shown += [str(caught.value)] * (secret in f"{caught.value}{vars(caught.value)}")
    assert not shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("disk:/mnt/a@b/kv?capacity=1", "disk:/mnt/a@b/kv"),
        ("/mnt/a@b/kv", "/mnt/a@b/kv"),
        ("host=64GiB?x=1", "host=64GiB"),
        ("valkey?password=x", "valkey"),
        ("https://h:1/a?b", "https://h:1/a"),
        ("valkey:user:x@h:1", "valkey:(hidden)@h:1"),
    ],
)
def test_a_place_is_shown_without_what_may_be_a_secret(text, shown):
    assert shown_place(text) == shown


def test_a_secret_in_place_of_its_file_is_refused_and_the_path_of_one_is_not_shown():
    refused("store.secret_file", value="'(hidden)'", flags=[f"store.secret_file={DIGITS}"])
    loaded = load(environ={}, flags=[f"store.secret_file=/{DIGITS}/s", "store.keys_file=Hunter2"])
    assert str(loaded.config.store.secret_file) == f"/{DIGITS}/s"
    assert DIGITS not in repr(loaded)
    assert "Hunter2" not in repr(loaded)
    assert "Hunter2" not in repr(load(environ={}, flags=["store.keys_command=vault -token Hunter2"]))


def test_settings_that_contradict_each_other_name_both_origins():
    refused(
        "store.secret, store.secret_file",
        origin="environment KVTIER_STORE__SECRET and flag --set store.secret_file",
        allowed="one of them",
        environ={"KVTIER_STORE__SECRET": DIGITS},
        flags=["store.secret_file=/x"],
    )


@pytest.mark.parametrize(
    ("tier", "setting", "problem", "allowed"),
    [
        ("valkey:h:1?password=a&password_file=/b", "tiers.valkey.password_file", "", "not both"),
        ("valkey:h?ca_file=/x", "tiers.valkey.ca_file", "needs tls = true", ""),
        ("valkey:h:99999", "tiers.valkey.addresses", "", "HOST[:PORT]"),
        ("mooncake:h:99999", "tiers.mooncake.master", "", "host:port"),
        ("s3:BAD_B", "tiers.s3.url", "", "s3://BUCKET"),
        ("s3:bucket?endpoint=http://h", "tiers.s3.endpoint", "does not use TLS", "https://"),
        ("directory:", "tiers.directory.path", "every directory tier needs it", ""),
    ],
)
def test_values_of_a_tier_that_do_not_go_together_name_their_origins(tier, setting, problem, allowed):
    pytest.importorskip("obstore")
    assert refused(setting, problem, allowed=allowed, tiers=[tier]).origin == "flag --tier"


@pytest.mark.parametrize(
    ("flags", "tier", "setting", "codec", "loss"),
    [
        (["store.codec=int4"], "", "store.codec", "int4", "none"),
        (["store.codec=k8v4", "store.loss=int4"], "", "store.codec", "k8v4", "int4"),
        ([], "?codec=k8v4", "tiers.disk.codec", "k8v4", "none"),
        (["store.loss=k8v4"], "?codec=int4", "tiers.disk.codec", "int4", "k8v4"),
    ],
)
def test_a_lossy_codec_without_its_class_is_refused(flags, tier, setting, codec, loss):
    origin = "flag --tier" if tier else "flag --set store.codec"
    problem = f"store.loss is {loss}; set store.loss = {codec}"
    with refuses(setting, problem, value=codec, origin=origin, allowed="raw, "):
        load(environ={}, flags=flags, tiers=[f"disk:/mnt/nvme{tier}"])
    base = load(environ={}, flags=flags[1:], tiers=["disk:/mnt/nvme"])
    with refuses("store.codec", value="int4" if loss == "none" else codec, origin="JSON"):
        overridden(base, [("store.codec", "int4" if loss == "none" else codec)], SettingOrigin("", "JSON"))


@pytest.mark.parametrize(
    ("flags", "codecs"),
    [
        ([], ["raw", "split", "raw"]),
        (["store.codec=split2"], ["split2", "split", "raw"]),
        (["store.loss=int4"], ["int4", "split", "raw"]),
        (["store.loss=int4", "store.codec=raw", "tiers.last.codec=int4"], ["raw", "split", "int4"]),
        (["store.loss=k8v4", "store.codec=k8v4"], ["k8v4", "split", "raw"]),
    ],
)
def test_a_tier_without_a_codec_has_that_of_the_store_and_that_is_by_default_the_class(flags, codecs):
    tiers = ["disk:/a", "middle=directory:/b?codec=split", "last=directory:/c?codec=raw"]
    config = load(environ={}, flags=flags, tiers=tiers).config
    assert [config.codec_of(tier) for tier in config.tiers] == codecs


def test_a_shared_tier_without_a_secret_names_the_setting_that_is_missing():
    refused("store.secret_file", "tiers.shared_directory", origin="default", tiers=["shared_directory:/x"])


def test_paths_are_absolute_so_that_a_later_change_of_directory_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home-of-someone")
    loaded = load(environ={}, flags=["trace.path=kv", "store.secret_file=~/secret"], tiers=["disk:kv"])
    assert loaded.config.trace.path == loaded.config.tiers[0].path == tmp_path / "kv"
    assert loaded.config.store.secret_file == Path("/home-of-someone/secret")
    assert load(environ={}, flags=["trace.path="]).config.trace.path is None


def test_constructors_check_too():
    for make, setting, value, origin in (
        (lambda: HostConfig(capacity_bytes=1), "host.capacity_bytes", "1", "Python"),
        (lambda: LimitsConfig(stores_in_flight="3"), "limits.stores_in_flight", "'3'", "Python"),
        (lambda: StoreConfig(secret=bytes(32), secret_file="/x"), "store.secret, store.secret_file", "", ""),
    ):
        with refuses(setting, value=value, origin=origin):
            make()
    assert DirectorySettings(path="/x").path == Path("/x")
    assert dataclasses.replace(HostConfig(), populate=True).populate is True


def test_every_setting_is_documented_and_its_default_is_allowed():
    for section in SECTIONS.values():
        assert section.__doc__
        for setting in settings(section):
            assert setting.help.endswith(".")
            assert setting.kind.read(setting.default, is_text=False) == setting.default
            assert setting.kind.show(setting.default)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64GiB", 64 * 2**30),
        ("512 MiB", 2**29),
        ("1.5KiB", 1536),
        ("2TB", 2 * 10**12),
        ("7kB", 7000),
        ("7kb", 7000),
        ("12", 12),
        ("12B", 12),
        (" 3mib ", 3 * 2**20),
        ("0.3KiB", 307),
        ("64G", 64 * 10**9),
        ("128Ki", 128 * 2**10),
        ("1,000,000", 10**6),
        ("1_500.5kB", 1_500_500),
    ],
)
def test_sizes(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 2GiB", "1e9", "0x10", "64X", "64Gb it", "1..5GiB", "-1GiB", "+1", "∞"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1,5", "0,5", "1_5", "1000,000", "1,0000", ",500", "1,", "1,,000", "1.5,000"])
@pytest.mark.parametrize(
    ("read", "unit"), [(parse_size, " TiB"), (parse_seconds, "h"), (parse_count, "k"), (parse_number, "")]
)
def test_a_comma_stands_only_between_groups_of_three_digits(read, unit, text):
    with pytest.raises(ValueError, match="not a"):
        read(text + unit)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("2min", 120), ("1 h", 3600), ("0.25", 0.25), ("5us", 5e-6), ("7d", 604800)],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@given(st.integers(0, 2**50 // 2**40), st.sampled_from(sorted(SIZE_UNITS)))
def test_whole_sizes_are_exact_in_every_unit(number, unit):
    assert parse_size(f"{number}{unit}") == number * SIZE_UNITS[unit]


@given(st.integers(0, 2**20), st.sampled_from([2**10, 2**20, 2**30, 2**40]))
def test_a_size_that_is_shown_whole_is_read_back(number, unit):
    text = size_text(number * unit)
    if "." not in text:
        assert parse_size(text) == number * unit


# ---- tiers -----------------------------------------------------------------------------------------------------------


def test_tiers_are_an_ordered_list_of_tables_and_texts(tmp_path):
    file = write(
        tmp_path / "kvtier.toml",
        '[[tiers]]\nkind = "disk"\nname = "fast"\npath = "/a"\ncapacity_bytes = "2GiB"\n'
        '[[tiers]]\nkind = "directory"\npath = "/b"\nshared = false\n',
    )
    first, second = load(file, {}).config.tiers
    assert (first.name, first.kind, first.path, first.capacity_bytes) == ("fast", "disk", Path("/a"), 2 << 30)
    assert (second.name, second.kind, second.path, second.shared) == ("directory", "directory", Path("/b"), False)
    texts = write(tmp_path / "texts.toml", 'tiers = ["fast=disk:/a?capacity_bytes=2GiB", "directory:/b?shared=no"]\n')
    assert load(texts, {}).config.tiers == (first, second)
    environ = {"KVTIER_TIERS": "fast=disk:/a?capacity_bytes=2GiB\tdirectory:/b?shared=no"}
    assert load(environ=environ).config.tiers == (first, second)
    mixed = write(tmp_path / "mixed.toml", 'tiers = ["fast=disk:/a", {kind = "directory", path = "/b"}]\n')
    assert [tier.name for tier in load(mixed, {}).config.tiers] == ["fast", "directory"]


def test_a_later_list_replaces_the_earlier_one_whole_and_values_change_one_tier(tmp_path):
    file = write(tmp_path / "kvtier.toml", 'tiers = ["disk:/a", "directory:/b"]\n')
    environ = {"KVTIER_TIERS__DISK__READ_THREADS": "9", "KVTIER_CONFIG": str(file)}
    loaded = load(environ=environ, flags=["tiers.directory.failures=7"])
    assert [(tier.read_threads, tier.failures) for tier in loaded.config.tiers] == [(9, 3), (4, 7)]
    assert str(loaded.origins["tiers"]) == f"file {file}"
    assert str(loaded.origins["tiers.disk.path"]) == f"file {file}"
    assert str(loaded.origins["tiers.disk.read_threads"]) == "environment KVTIER_TIERS__DISK__READ_THREADS"
    assert str(loaded.origins["tiers.directory.failures"]) == "flag --set tiers.directory.failures"
    assert str(loaded.origins["tiers.directory.write_threads"]) == "default"
    replaced = load(environ=environ, tiers=["disk:/c"])
    assert [(tier.path, tier.read_threads) for tier in replaced.config.tiers] == [(Path("/c"), 4)]
    assert load(environ={**environ, "KVTIER_TIERS": "disk:/d"}).config.tiers[0].read_threads == 9
    refused("tiers.disk", "no tier has this name", environ={**environ, "KVTIER_TIERS": "directory:/d"})


def test_where_and_values_are_percent_decoded():
    (tier,) = load(environ={}, tiers=["disk:/a%3Fb%20c%25d=e&f:g#h?capacity_bytes=1%20GiB"]).config.tiers
    assert (tier.path, tier.capacity_bytes) == (Path("/a?b c%d=e&f:g#h"), 1 << 30)


def test_texts_may_leave_out_the_unit_of_a_key():
    (tier,) = load(environ={}, tiers=["disk:/a?capacity=2GiB&retry=3s"]).config.tiers
    assert (tier.capacity_bytes, tier.retry_s) == (2 << 30, 3.0)
    refused("tiers.disk.capacity_bytes", "given twice", tiers=["disk:/a?capacity=2GiB&capacity_bytes=1GiB"])
    refused("tiers.disk.small", "no such setting", tiers=["disk:/a?small=1"])


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_path_survives_a_text(name):
    assert parse(spec("disk", f"/{name}")).path == Path(f"/{name}").absolute()


@pytest.mark.parametrize(
    ("text", "setting", "problem", "allowed"),
    [
        ("", "tiers", "not a valid tier", FORM),
        ("disk", "tiers.disk.path", "missing", ""),
        ("disk=4TiB", "tiers.disk.path", "missing", ""),
        ("disk:/a?read=8", "tiers.disk.read_bytes_per_s", "not a rate", "a size a second"),
        ("valkey:h?capacity=1GiB", "tiers.valkey.capacity", "valkey tiers have no such setting", "addresses"),
        ("host=1KiB", "host.capacity_bytes", "too small", "from "),
        ("/mnt/kv", "tiers", "not a valid tier", FORM),
        ("dsk:/a", "tier kind", "did you mean disk?", "directory, disk"),
        (":/a", "tiers", "not a valid tier", FORM),
        ("disk:", "tiers.disk.path", "missing", ""),
        ("disk:?capacity_bytes=1GiB", "tiers.disk.path", "missing", ""),
        ("disk:/a?", "tiers", "'' is not key=value", FORM),
        ("disk:/a?capcity_bytes=1", "tiers.disk.capcity_bytes", "did you mean capacity_bytes or ", ""),
        ("disk:/a?capacity_bytes", "tiers", "'capacity_bytes' is not key=value", FORM),
        ("disk:/a?=1", "tiers", "is not key=value", FORM),
        ("disk:/a?read_threads=1&&failures=1", "tiers", "is not key=value", FORM),
        ("disk:/a?read_threads=1&read_threads=1", "tiers.disk.read_threads", "given twice", "once"),
        ("disk:/a?path=/b", "tiers.disk.path", "given twice", "once"),
        ("disk:/a?capacity_bytes=12 parsecs", "tiers.disk.capacity_bytes", "not a size", "GiB"),
        ("disk:/a?name=b", "tiers.disk.name", "no such setting", ""),
        ("disk:/a%2", "tiers", "'%' is not followed by two hexadecimal digits; write %25", ""),
        ("disk:/a%ff", "tiers", "not UTF-8", ""),
        ("disk:/a%00b", "tiers.disk.path", "not a path", "a path"),
        ("Fast=disk:/a", "tier name", "", "a letter"),
        ("=disk:/a", "tier name", "", "a letter"),
        ("host=disk:/a", "tier name", "", "none of device, engine, gpu, host"),
        ("a__b=disk:/a", "tier name", "", "single underscores"),
    ],
)
def test_a_tier_of_another_form_is_refused(text, setting, problem, allowed):
    assert refused(setting, problem, allowed=allowed, tiers=[text]).origin == "flag --tier"


def test_a_list_that_is_none_or_has_wrong_items_is_refused(tmp_path):
    items, kinds = "tables [[tiers]], or strings", "the kinds directory, disk"
    for number, (toml, setting, problem, allowed) in enumerate(
        (
            ('tiers = "disk:/a"', "tiers", "not a list", items),
            ("tiers = [1]", "tiers", "", items),
            ('[[tiers]]\npath = "/a"', "tiers", "a tier has no kind", kinds),
            ('[[tiers]]\nkind = 3\npath = "/a"', "tiers", "a tier has kind = 3", kinds),
            ('[[tiers]]\nkind = "disk"\nname = 3', "tiers", "a tier has name = 3", "a string"),
            ('[[tiers]]\nkind = "disk"', "tiers.disk.path", "missing", ""),
            ('[[tiers]]\nkind = "disk"\npath = "/a"\nread_threads = "4"', "tiers.disk.read_threads", "", "from 1 to"),
            ('tiers = ["disk:/a", "disk:/b"]', "tiers", "'disk'", "different names"),
            (f"tiers = {['disk:/a'] * 17}", "tiers", "17 tiers", "at most 16"),
        )
    ):
        file = write(tmp_path / f"{number}.toml", toml + "\n")
        assert refused(setting, problem, allowed=allowed, file=file).origin == f"file {file}"
    with refuses("tiers", "'directory'", allowed="different names"):
        Config(tiers=(DirectorySettings(path="/a"), DirectorySettings(path="/b")))
    assert (
        load(environ={"KVTIER_TIERS": " "}, file=write(tmp_path / "x.toml", 'tiers = ["disk:/a"]')).config.tiers == ()
    )


def test_a_kind_of_tier_is_no_section(tmp_path):
    refused("disk", "unknown section", origin="flag --set disk.path", allowed=", tiers", flags=["disk.path=/x"])
    refused("disk", "unknown section", allowed=", tiers", environ={"KVTIER_DISK__PATH": "/x"})


@pytest.mark.parametrize("flag", ["tiers.disk", "tiers=disk:/a", "tiers.disk=3"])
def test_a_value_of_a_tier_needs_name_and_key(flag):
    refused("--set", allowed="tiers.NAME.key=value", flags=[flag])
    refused("KVTIER_TIERS__DISK", allowed="KVTIER_TIERS__NAME__KEY", environ={"KVTIER_TIERS__DISK": "3"})
