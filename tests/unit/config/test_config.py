"""Settings: precedence, origins and error messages."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config.loader import load
from kvtier.config.schema import settings
from kvtier.config.sections import SECTIONS, Config, HostConfig, LimitsConfig, StoreConfig
from kvtier.config.tier_list import parse, spec
from kvtier.config.value_types import (
    SIZE_UNITS,
    parse_count,
    parse_number,
    parse_seconds,
    parse_size,
    shown_place,
    size_text,
)
from kvtier.errors import ConfigError
from kvtier.tier.directory.kind import DirectorySettings

DIGITS = "0123456789abcdef" * 4


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refused(message: str, **given_to_load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": {}, **given_to_load})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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
        "limits.stores_in_flight = 'many'",
        environ={"KVTIER_LIMITS__STORES_IN_FLIGHT": "many"},
        flags=["limits.stores_in_flight=5"],
    )


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("host.capacity_bytes=1KiB", "too small"),
        ("host.capacity_bytes=-1", "not a size"),
        ("host.capacity_bytes=9999999TiB", "too large"),
        ("host.capacity_bytes=1.5", "not a size"),
        ("host.capacity_bytes=", "not a size"),
        ("host.page_lock=maybe", "not one of the choices; allowed: auto, on, off"),
        ("host.populate=perhaps", "neither true nor false"),
        ("host.evictor=random", "not one of the choices; allowed: adaptive, lru"),
        ("limits.stores_in_flight=0", "too small; allowed: a whole number from 1 to 1024"),
        ("limits.stores_in_flight=2.5", "not a whole number"),
        ("limits.stores_in_flight=٣", "not a whole number"),
        ("limits.stores_in_flight=" + "9" * 5000, "not a whole number"),
        ("limits.load_deadline_s=nan", "not a duration"),
        ("limits.load_deadline_s=inf", "not a duration"),
        ("limits.load_deadline_s=5m", "not a duration"),
        ("limits.load_deadline_s=0s", "too small; allowed: seconds as a number, or a number with us, ms, s, min, h, d"),
        ("trace.path=a\0b", "not a path"),
        ("trace.path=a\ud800b", "surrogates not allowed; allowed: a path"),
        ("store.secret_file=~nobody-of-that-name/x", "unknown home directory"),
    ],
)
def test_impossible_values_are_refused(flag, why):
    refused(why, flags=[flag])


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[limits]\nstores_in_flight = '4'\n", "limits.stores_in_flight = '4' (from file "),
        ("[limits]\nstores_in_flight = true\n", "not a whole number"),
        ("[limits]\nstores_in_flight = 4.0\n", "not a whole number"),
        ("[host]\ncapacity_bytes = 4.0e9\n", "not a size"),
        ("[host]\npopulate = 'true'\n", "neither true nor false"),
        ("[host]\npage_lock = true\n", "not one of the choices"),
        ("[trace]\npath = 7\n", "not a path"),
        ("[limits]\nload_deadline_s = true\n", "not a duration"),
        ("[limits]\nload_deadline_s = [1]\n", "not a duration"),
    ],
)
def test_wrong_types_in_a_file_are_refused(tmp_path, toml, why):
    refused(why, file=write(tmp_path / "kvtier.toml", toml))


def test_unknown_names_are_errors_that_name_the_known_ones(tmp_path):
    refused(
        "host.capcity_bytes (from environment KVTIER_HOST__CAPCITY_BYTES): unknown setting; did you mean "
        "capacity_bytes or staging_bytes? known here: capacity_bytes, evictor,",
        environ={"KVTIER_HOST__CAPCITY_BYTES": "1"},
    )
    refused("shelf (from flag --set shelf.x): unknown section; known here: host, store,", flags=["shelf.x=/y"])
    refused("did you mean limits?", file=write(tmp_path / "a.toml", "[limit]\n"))
    refused("limits.reqests (from file", file=write(tmp_path / "b.toml", "[limits]\nreqests = 1\n"))
    refused("capacity_bytes (from file", file=write(tmp_path / "c.toml", "capacity_bytes = 1\n"))
    refused("below a line [host]", file=write(tmp_path / "d.toml", "host = 1\n"))


@pytest.mark.parametrize("flag", ["limits.stores_in_flight", "stores_in_flight=1", "", "=", "limits=3"])
def test_a_flag_of_another_shape_is_refused(flag):
    refused("not section.key=value", flags=[flag])


def test_a_single_underscore_is_a_slip_but_other_peoples_variables_are_theirs():
    refused("did you mean KVTIER_TRACE__PATH?", environ={"KVTIER_TRACE_PATH": "/x"})
    refused("did you mean KVTIER_TIERS?", environ={"KVTIER_TIER": "disk:/x"})
    kubernetes = {"KVTIER_PORT": "tcp://10.0.0.1:80", "KVTIER_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert load(environ=kubernetes).config == Config()


def test_files_that_can_not_be_read_are_named(tmp_path):
    refused(f"file {tmp_path / 'none.toml'}: No such file", file=tmp_path / "none.toml")
    refused("No such file", environ={"KVTIER_CONFIG": str(tmp_path / "none.toml")})
    refused("Is a directory", file=tmp_path)
    refused("line 2", file=write(tmp_path / "a.toml", "[host]\ncapacity_bytes = \n"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    refused("not TOML", file=tmp_path / "b.toml")
    (tmp_path / "c.toml").write_bytes(b"#" * 2_000_000)
    refused("longer than", file=tmp_path / "c.toml")


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
    assert "64 hexadecimal digits" in str(caught.value)


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
        shown += [str(caught.value)] * (secret in str(caught.value))
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
    refused("store.secret_file = '(hidden)' (from flag --set", flags=[f"store.secret_file={DIGITS}"])
    loaded = load(environ={}, flags=[f"store.secret_file=/{DIGITS}/s", "store.keys_file=Hunter2"])
    assert str(loaded.config.store.secret_file) == f"/{DIGITS}/s"
    assert DIGITS not in repr(loaded)
    assert "Hunter2" not in repr(loaded)
    assert "Hunter2" not in repr(load(environ={}, flags=["store.keys_command=vault -token Hunter2"]))


def test_settings_that_contradict_each_other_name_both_origins():
    refused(
        "store.secret_file is from flag --set store.secret_file; store.secret is from environment",
        environ={"KVTIER_STORE__SECRET": DIGITS},
        flags=["store.secret_file=/x"],
    )


@pytest.mark.parametrize(
    ("tier", "end"),
    [
        ("valkey:h:1?password=a&password_file=/b", "not both (tiers.valkey.password_file is from flag --tier)"),
        ("valkey:h?ca_file=/x", "needs tls = true (tiers.valkey.ca_file is from flag --tier)"),
        ("s3:BAD_B", "between slashes"),
        ("directory:", "a directory tier needs it"),
        ("shared_directory:/x", "(or set store.secret) (store.secret_file is from default)"),
    ],
)
def test_values_of_a_tier_that_do_not_go_together_name_their_origins(tier, end):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError) as caught:
        load(environ={}, tiers=[tier])
    assert str(caught.value).endswith(end)


def test_paths_are_absolute_so_that_a_later_change_of_directory_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home-of-someone")
    loaded = load(environ={}, flags=["trace.path=kv", "store.secret_file=~/secret"], tiers=["disk:kv"])
    assert loaded.config.trace.path == loaded.config.tiers[0].path == tmp_path / "kv"
    assert loaded.config.store.secret_file == Path("/home-of-someone/secret")
    assert load(environ={}, flags=["trace.path="]).config.trace.path is None


def test_constructors_check_too():
    with pytest.raises(ConfigError, match=r"host\.capacity_bytes = 1 \(from Python\): too small"):
        HostConfig(capacity_bytes=1)
    with pytest.raises(ConfigError, match=r"limits\.stores_in_flight = '3' \(from Python\)"):
        LimitsConfig(stores_in_flight="3")
    with pytest.raises(ConfigError, match="both set"):
        StoreConfig(secret=bytes(32), secret_file=Path("/x"))
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
    refused("no tier has this name", environ={**environ, "KVTIER_TIERS": "directory:/d"})


def test_where_and_values_are_percent_decoded():
    (tier,) = load(environ={}, tiers=["disk:/a%3Fb%20c%25d=e&f:g#h?capacity_bytes=1%20GiB"]).config.tiers
    assert (tier.path, tier.capacity_bytes) == (Path("/a?b c%d=e&f:g#h"), 1 << 30)


def test_texts_may_leave_out_the_unit_of_a_key():
    (tier,) = load(environ={}, tiers=["disk:/a?capacity=2GiB&retry=3s"]).config.tiers
    assert (tier.capacity_bytes, tier.retry_s) == (2 << 30, 3.0)
    refused("given twice", tiers=["disk:/a?capacity=2GiB&capacity_bytes=1GiB"])
    refused("unknown setting", tiers=["disk:/a?small=1"])


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_path_survives_a_text(name):
    assert parse(spec("disk", f"/{name}")).path == Path(f"/{name}").absolute()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not of the form [NAME=]KIND[:WHERE][?key=value&key=value], or KIND=SIZE[?key=value&key=value]; known"),
        ("disk", "tiers.disk.path (from flag --tier): missing; a disk tier needs it"),
        ("disk=4TiB", "tiers.disk.path (from flag --tier): missing; a disk tier needs it"),
        (
            "disk:/a?read=8",
            "tiers.disk.read_bytes_per_s = '8' (from flag --tier): not a rate; allowed: a size a second",
        ),
        ("valkey:h?capacity=1GiB", "tiers.valkey.capacity (from flag --tier): unknown setting of a valkey tier"),
        ("host=1KiB", "host.capacity_bytes = 1024 (from flag --tier): too small"),
        ("/mnt/kv", "not of the form"),
        ("dsk:/a", "unknown kind; did you mean disk? known here: directory, disk"),
        (":/a", "not of the form"),
        ("disk:", "tiers.disk.path (from flag --tier): missing; a disk tier needs it"),
        ("disk:?capacity_bytes=1GiB", "tiers.disk.path (from flag --tier): missing"),
        ("disk:/a?", "'' is not key=value"),
        ("disk:/a?capcity_bytes=1", "unknown setting of a disk tier; did you mean capacity_bytes or "),
        ("disk:/a?capacity_bytes", "'capacity_bytes' is not key=value"),
        ("disk:/a?=1", "is not key=value"),
        ("disk:/a?read_threads=1&&failures=1", "is not key=value"),
        ("disk:/a?read_threads=1&read_threads=1", "tiers.disk.read_threads (from flag --tier): given twice"),
        ("disk:/a?path=/b", "tiers.disk.path (from flag --tier): given twice"),
        (
            "disk:/a?capacity_bytes=12 parsecs",
            "tiers.disk.capacity_bytes = '12 parsecs' (from flag --tier): not a size",
        ),
        ("disk:/a?name=b", "tiers.disk.name (from flag --tier): unknown setting"),
        ("disk:/a%2", "'%' is not followed by two hexadecimal digits; write %25"),
        ("disk:/a%ff", "not UTF-8"),
        ("disk:/a%00b", "not a path"),
        ("Fast=disk:/a", "tier name 'Fast': allowed: a letter"),
        ("=disk:/a", "tier name ''"),
        ("host=disk:/a", "none of device, engine, gpu, host"),
        ("a__b=disk:/a", "single underscores"),
    ],
)
def test_a_tier_of_another_form_is_refused(text, why):
    refused(why, tiers=[text])


def test_a_list_that_is_none_or_has_wrong_items_is_refused(tmp_path):
    for number, (toml, why) in enumerate(
        (
            ('tiers = "disk:/a"', "not a list"),
            ("tiers = [1]", "tables [[tiers]], or texts"),
            ('[[tiers]]\npath = "/a"', "a tier without kind; known kinds: directory, disk"),
            ('[[tiers]]\nkind = 3\npath = "/a"', "a tier with kind = 3"),
            ('[[tiers]]\nkind = "disk"\nname = 3', "a tier with name = 3"),
            ('[[tiers]]\nkind = "disk"', "tiers.disk.path (from file"),
            ('[[tiers]]\nkind = "disk"\npath = "/a"\nread_threads = "4"', "tiers.disk.read_threads = '4'"),
            ('tiers = ["disk:/a", "disk:/b"]', "two tiers are named 'disk'; allowed: different names"),
            (f"tiers = {['disk:/a'] * 17}", "17 tiers; allowed: at most 16"),
        )
    ):
        refused(why, file=write(tmp_path / f"{number}.toml", toml + "\n"))
    with pytest.raises(ConfigError, match="two tiers are named 'directory'"):
        Config(tiers=(DirectorySettings(path="/a"), DirectorySettings(path="/b")))
    assert (
        load(environ={"KVTIER_TIERS": " "}, file=write(tmp_path / "x.toml", 'tiers = ["disk:/a"]')).config.tiers == ()
    )


def test_a_kind_of_tier_is_no_section(tmp_path):
    wanted = "disk (from flag --set disk.path): unknown section; known here: "
    refused(wanted, flags=["disk.path=/x"])
    refused(", tiers", environ={"KVTIER_DISK__PATH": "/x"})


@pytest.mark.parametrize("flag", ["tiers.disk", "tiers=disk:/a", "tiers.disk=3"])
def test_a_value_of_a_tier_needs_name_and_key(flag):
    refused("tiers.NAME.key=value", flags=[flag])
    refused("KVTIER_TIERS__NAME__KEY", environ={"KVTIER_TIERS__DISK": "3"})
