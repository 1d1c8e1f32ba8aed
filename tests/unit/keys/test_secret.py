"""The secret: created once even in a race, never readable by others, never shown."""

import logging
import multiprocessing
import os
import pickle
import stat

import pytest
from tests.refusals import refuses

from kvtier.config.sections import StoreConfig
from kvtier.keys.secret import Secret, load_or_create, redacted

HEX = "00112233445566778899aabbccddeeff" * 2


def test_a_secret_is_made_once_and_found_again(tmp_path):
    path = tmp_path / "secret"
    made = load_or_create(path)
    assert len(made) == 32
    assert load_or_create(str(path)) == made == path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert load_or_create(tmp_path / "other") != made


def test_the_mode_is_0600_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        load_or_create(tmp_path / "secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_processes_that_race_get_the_same_secret(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map_async(load_or_create, [tmp_path / "secret"] * 12, chunksize=1).get(60)
    assert {bytes(secret) for secret in found} == {(tmp_path / "secret").read_bytes()}


def test_one_that_comes_late_keeps_the_secret_of_the_first(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    original = os.fsync

    def slow_fsync(handle):
        original(handle)
        if not path.exists():  # the other process comes in between
            path.write_bytes(bytes.fromhex(HEX))
            path.chmod(0o600)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    assert load_or_create(path) == bytes.fromhex(HEX)
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_secret_behind_a_link_is_read(tmp_path):
    made = load_or_create(tmp_path / "secret")
    (tmp_path / "link").symlink_to("secret")
    assert load_or_create(tmp_path / "link") == made


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    load_or_create(path)
    path.chmod(mode)
    with refuses("secret file", f"mode {mode:04o}", value=str(path), allowed="chmod 600"):
        load_or_create(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_file_of_another_user_is_refused_unless_its_store_may_be_anothers(tmp_path):
    path = tmp_path / "secret"
    made = load_or_create(path)
    os.chown(path, 12345, -1)
    for is_inside in (False, True):
        with refuses("secret file", "user 12345", value=str(path), allowed="chown 0 "):
            load_or_create(path, is_inside=is_inside)
    assert load_or_create(path, is_inside=True, any_owner=True) == made
    os.chown(path, 0, -1)
    assert load_or_create(path) == made


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_file_of_another_length_is_refused(tmp_path, length):
    path = tmp_path / "secret"
    path.write_bytes(b"s" * length)
    path.chmod(0o600)
    with refuses("secret file", f"must hold 32 bytes, but holds {length}", value=str(path)):
        load_or_create(path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("directory", "fifo"):
        with refuses("secret file", "not a regular file", value=name):
            load_or_create(tmp_path / name)


def test_a_place_where_nothing_can_be_made_is_a_clear_error(tmp_path):
    with refuses("secret file", "No such file or directory", value="missing"):
        load_or_create(tmp_path / "missing" / "secret")
    (tmp_path / "file").write_bytes(b"")
    with refuses("secret file", "Not a directory", value="file/secret"):
        load_or_create(tmp_path / "file" / "secret")


def test_a_link_to_nowhere_is_a_clear_error(tmp_path):
    (tmp_path / "secret").symlink_to("nowhere")
    with refuses("secret file", "was removed", value="secret"):
        load_or_create(tmp_path / "secret")


def test_a_configured_secret_is_parsed():
    for text in (HEX, f" {HEX.upper()}\n", bytes.fromhex(HEX)):
        assert StoreConfig(secret=text).secret == bytes.fromhex(HEX)


@pytest.mark.parametrize("text", ["abc", HEX[:-2], HEX + "00", HEX[:-1] + "g", HEX[:-3] + " 00", "\u0661" * 64])
def test_what_is_no_secret_is_refused_without_being_shown(text):
    with refuses("store.secret", value="(hidden)", allowed="64 hexadecimal digits") as caught:
        StoreConfig(secret=text)
    assert text not in str(caught.value)


def test_a_secret_shows_itself_nowhere(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        secret = load_or_create(tmp_path / "secret")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", repr([secret]), caplog.text]
    assert shown[0] == "Secret(32 bytes)"
    for text in shown:
        assert secret.hex() not in text
        assert repr(bytes(secret))[2:-1] not in text
    assert isinstance(pickle.loads(pickle.dumps(secret)), Secret)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("disk:/mnt/a@b/kv", "disk:/mnt/a@b/kv"),
        ("s3:bucket/prefix", "s3:bucket/prefix"),
        ("user:p w@h:1", "user:(hidden)@h:1"),
        ("valkey:a%b@h", "valkey:(hidden)@h"),
        ("valkey:user:p@ss@h:1", "valkey:(hidden)@h:1"),
        ("https://user@h/x", "https:(hidden)@h/x"),
        ("valkey:u%3Ap%40h", "valkey:(hidden)@h"),
        ("h?Password = x y", "h?Password =(hidden)"),
        ('{"store.secret": "x"}', '{"store.secret":(hidden)'),
        (f"for {HEX}.", "for (hidden)."),
        ("deadbeef", "deadbeef"),
    ],
)
def test_texts_are_shown_without_what_may_be_a_secret(text, shown):
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "part", [":", "a", "@", "0", "0g", "pass", "pass ", "%40", "//:", "secret_", "api.key", "\u0130:"]
)
def test_redacting_a_long_text_takes_time_in_proportion_to_it(part):
    """With time that grows with the square or the cube of a text, a million characters would not end."""
    assert redacted(part * (10**6 // len(part)))
