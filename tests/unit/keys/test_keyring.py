"""Keys of sealed frames: which seals, which opens, and that a wrong line is named without a digit of a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from kvtier.cli.config import rows
from kvtier.cli.engine_settings import given as given_flags
from kvtier.config.loader import load
from kvtier.config.sections import Config, StoreConfig
from kvtier.errors import ConfigError
from kvtier.keys.seal_keys import BYTES_MAX, EPOCH_MAX, FORM, LINES_MAX, Keyring, SealKey, hkdf, parse

HEX = "c0ffee5eed1e55ab" * 4
OTHER = "0ddba11decade5ad" * 4
MATERIAL = bytes.fromhex(HEX)


def hides(text, *secrets):
    """`text` has no eight digits in a row of any of `secrets`."""
    lowered = str(text).lower()
    return not any(secret[at : at + 8].lower() in lowered for secret in secrets for at in range(len(secret) - 7))


def test_the_highest_epoch_of_a_tenant_seals_and_every_listed_one_opens():
    lines = f"10 a {HEX}\n9 a {OTHER}\n3 - {HEX}\n11 b {OTHER}"
    ring = parse(lines.encode(), "here")
    old, new, none = (
        SealKey.of("a", 9, bytes.fromhex(OTHER)),
        SealKey.of("a", 10, MATERIAL),
        SealKey.of("", 3, MATERIAL),
    )
    assert (ring.sealing("a"), ring.sealing("")) == (new, none)
    assert ring.sealing("b").epoch == 11
    assert ring.sealing("c") is None  # no fallback to the key of none
    assert ring.knows(old.check) == old
    assert ring.knows(none.check) == none
    assert ring.knows(new.check) == new
    assert ring.knows(bytes(16)) is None


def test_the_derivation_is_that_of_rfc_5869():
    material = bytes([0x0B] * 22)
    first = hkdf(material, bytes(range(0xF0, 0xFA)), bytes(range(13)))  # test case 1
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert (
        hkdf(material, b"").hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    )  # test case 3


def test_equal_material_gives_each_tenant_and_epoch_its_own_key():
    owners = [("", 0), ("", 1), ("a", 0), ("a", 1), ("b", 0), ("\0", 0)]
    keys = [SealKey.of(tenant, epoch, MATERIAL) for tenant, epoch in owners]
    assert len({key.key for key in keys}) == len({key.check for key in keys}) == len(owners)
    assert not {key.key[:16] for key in keys} & {key.check for key in keys}


def test_comments_blank_lines_and_line_ends_of_other_systems():
    text = f"\ufeff# keys\r\n\r\n  0\t-   {HEX.upper()}  # until May\r\n\n# 1 a {OTHER}\n"
    assert parse(text.encode(), "here").keys == {SealKey.of("", 0, MATERIAL)}


@pytest.mark.parametrize("tenant", ["a", "A-1._", "0", "--", "." * 64])
@pytest.mark.parametrize("epoch", [0, EPOCH_MAX])
def test_the_limits_of_a_line_are_allowed(tenant, epoch):
    assert parse(f"{epoch} {tenant} {HEX}".encode(), "here").sealing(tenant).epoch == epoch


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("1 a", "is not a key"),
        (f"1 {HEX}", "is not a key"),
        (HEX, "is not a key"),
        (f"1 a {HEX} b", "is not a key"),
        (f"1 a {HEX[:-1]}", "is not a key"),
        (f"1 a {HEX}0", "is not a key"),
        (f"1 a {HEX[:-1]}g", "is not a key"),
        (f"1 a 0x{HEX[2:]}", "is not a key"),
        ("1 a " + "\u0661" * 64, "is not a key"),
        (f"{EPOCH_MAX + 1} a {HEX}", "is not a key"),
        (f"99999999999 a {HEX}", "is not a key"),
        (f"-1 a {HEX}", "is not a key"),
        (f"1.0 a {HEX}", "is not a key"),
        (f"\u0661 a {HEX}", "is not a key"),
        (f"{HEX} a 1", "is not a key"),
        (f"1 {HEX}0 {HEX}", "is not a key"),
        (f"1 a/b {HEX}", "is not a key"),
        (f"1 \u00e9 {HEX}", "is not a key"),
        (f"1 a\x0b{HEX}", "is not a key"),
        (f"7 x {HEX}", "repeats"),
        (f"007 x {HEX}", "repeats"),
    ],
)
def test_a_wrong_line_is_named_without_what_it_holds(line, why):
    with refuses("/etc/keys", f"line 3 {why}", allowed=FORM if "key" in why else "") as caught:
        parse(f"7 x {OTHER}\n# comment\n{line}\n8 x {HEX}".encode(), "/etc/keys")
    assert hides(caught.value, HEX, OTHER)
    assert caught.value.__cause__ is caught.value.__context__ is None


@given(st.binary(max_size=200), st.sampled_from([HEX, OTHER]))
def test_no_content_shows_a_key_or_ends_otherwise(junk, key):
    content = junk + key.encode() + junk
    message = ""
    try:
        parse(content, "here")
    except ConfigError as error:
        message = str(error)
    assert hides(message, key)


def test_bytes_that_are_no_text_are_a_wrong_line():
    with refuses("here", "line 2"):
        parse(f"1 a {HEX}\n2 ".encode() + b"\xff\xfe " + OTHER.encode(), "here")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# none\n#"])
def test_lines_may_hold_no_key(content):
    assert parse(content, "here").keys == frozenset()


def test_a_key_that_only_opens_does_not_seal():
    ring = parse(f"1 a {HEX}\n2 a {OTHER} open\n".encode(), "here")
    assert ring.sealing("a").epoch == 1
    new = SealKey.of("a", 2, bytes.fromhex(OTHER))
    assert ring.knows(new.check).key == new.key
    assert parse(f"1 a {HEX}\n2 a {OTHER}\n".encode(), "here").sealing("a").key == new.key
    assert parse(f"1 a {HEX} open".encode(), "here").sealing("a") is None
    with refuses("here", "line 1"):
        parse(f"1 a {HEX} opens".encode(), "here")


def test_lines_and_bytes_have_limits():
    lines = [f"{number} a {HEX}" for number in range(LINES_MAX)]
    assert len(parse("\n".join([*lines, ""]).encode(), "here").keys) == LINES_MAX
    with refuses("here", "10001 lines", allowed=f"at most {LINES_MAX} lines and {BYTES_MAX} bytes"):
        parse("\n".join([*lines, f"0 b {HEX}"]).encode(), "here")
    key = f"1 a {HEX} ".encode()
    assert parse(key.ljust(BYTES_MAX, b"#"), "here")
    with refuses("here", "1 lines", allowed=f"at most {LINES_MAX} lines and {BYTES_MAX} bytes"):
        parse(key.ljust(BYTES_MAX + 1, b"#"), "here")


def test_nothing_shows_a_key():
    ring = parse(f"1 a {HEX}".encode(), "here")
    shown = f"{ring} {ring!r} {ring.keys} {[*ring.keys]}"
    assert hides(shown, HEX, ring.sealing("a").key.hex())
    assert repr(ring.sealing("a").key)[2:-1] not in shown


def test_an_empty_keyring_seals_nothing():
    assert Keyring([]).sealing("") is None


# ---- settings --------------------------------------------------------------------------------------------------------


def test_keys_as_a_setting_are_lines_or_have_semicolons():
    for text in (f"1 a {HEX}; 2 a {OTHER}", f"1 a {HEX}\n2 a {OTHER}\n"):
        kept = StoreConfig(keys=text).keys
        assert parse(kept.reveal().encode(), "here").sealing("a").epoch == 2
        assert StoreConfig(keys=kept).keys == kept
        assert hides(repr(StoreConfig(keys=text)), HEX, OTHER)
        assert hides(f"{kept} {kept!r}", HEX, OTHER)


def test_wrong_keys_in_a_setting_name_the_line_and_stay_hidden():
    with refuses("store.keys", "line 2") as caught:
        StoreConfig(keys=f"1 a {HEX};2 a {OTHER[1:]}")
    assert hides(caught.value, HEX, OTHER)
    with refuses("store.keys", "not a string"):
        StoreConfig(keys=MATERIAL)


def test_keys_of_the_environment_are_never_shown():
    loaded = load(environ={"KVTIER_STORE__KEYS": f"1 a {HEX}", "KVTIER_STORE__TENANT": "a"})
    assert loaded.config.store.tenant == "a"
    shown = rows(loaded)
    assert shown["store.keys"]["text"] == shown["store.keys"]["value"] == "(set)"
    assert hides(f"{shown} {loaded} {loaded.config!r}", HEX)
    with refuses("store.keys", origin="flag --set store.keys", allowed="--set store.keys_file=PATH"):
        given_flags(load(environ={}, flags=[f"store.keys=1 a {HEX}"]))


@pytest.mark.parametrize("tenant", ["a b", "a/b", "-", "a" * 65, "\u00e9", "a\n"])
def test_what_is_no_tenant(tenant):
    with refuses("store.tenant", value="(hidden)", allowed="letters, digits, dots, underscores and hyphens, but"):
        StoreConfig(tenant=tenant)


@pytest.mark.parametrize("command", ["vault 'read", " "])
def test_what_is_no_command(command):
    with refuses("store.keys_command", allowed="a program and its arguments"):
        StoreConfig(keys_command=command)


def test_keys_come_from_one_source(tmp_path):
    sources = {"keys_file": tmp_path / "keys", "keys_command": "vault read", "keys": f"1 a {HEX}"}
    for left, right in (("keys_file", "keys_command"), ("keys_file", "keys"), ("keys_command", "keys")):
        with refuses(f"store.{left}, store.{right}", allowed="one of them"):
            StoreConfig(**{left: sources[left], right: sources[right]})
        StoreConfig(**{left: sources[left]})


def test_a_tier_that_seals_needs_a_key(tmp_path):
    from kvtier.tier.directory.kind import DirectorySettings

    tier = DirectorySettings(path=tmp_path, seal="on", codec="zstd")
    with refuses("tiers.directory.seal", "set store.keys_file", value="on"):
        Config(tiers=(tier,))
    for store in (StoreConfig(secret=HEX), StoreConfig(keys=f"0 - {HEX}"), StoreConfig(keys_command="vault read")):
        assert Config(tiers=(tier,), store=store).tiers[0].codec == "zstd"
    with refuses("tiers.directory.codec", value="'gzip'", allowed="empty, raw, zstd"):
        DirectorySettings(path=tmp_path, codec="gzip")
    with refuses("tiers.directory.seal", value="'yes'", allowed="auto, on, off"):
        DirectorySettings(path=tmp_path, seal="yes")
