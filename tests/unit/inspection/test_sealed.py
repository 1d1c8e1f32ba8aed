"""`kvtier inspect` on sealed frames: what it shows without keys, what it verifies with them, what it seals anew."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from tests.frames import patched
from tests.golden.small_stores import SECRET, placed, text_of

from kvtier.cli.main import run
from kvtier.codec import registry
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Seals,
    frame_bytes,
    open_seal,
    pack,
    pack_scratch_bytes,
    unpack_in_place,
)
from kvtier.codec.frame_header import Identity, read_head
from kvtier.errors import UnreadableChunkError
from kvtier.inspection import inspector
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.layout import GroupLayout, History, Part, Run
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.base import Write
from kvtier.tier.directory.tier import DirectoryTier

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

GROUP = GroupLayout(History(), (6000, 65536), "test", runs=((Run("kv", "bf16", 6000),), (Run("kv", "bf16", 65536),)))
MATERIAL = {("a", 1): "11" * 32, ("a", 2): "22" * 32, ("b", 1): "33" * 32, ("", 1): "44" * 32}
OF_STORES = {("", 0): SECRET.hex(), ("", 2): "55" * 32}
"""Of the stores of several nodes among the golden ones."""
KEYS = {owner: SealKey.of(*owner, bytes.fromhex(digits)) for owner, digits in MATERIAL.items()}
MODEL = b"m" * 16


def payload_of(number: int) -> bytes:
    return bytes([number + 1, 0]) * (GROUP.payload_bytes // 2)


def identity_of(number: int) -> Identity:
    return Identity(object_name(number), MODEL, b"\xa5" * 32, number, 256, 0, Part(0, 2, 4, 6))


def frame_of(number: int, owner: tuple[str, int] | None, codec: str = "raw") -> bytes:
    slot = empty_frame(frame_bytes(GROUP))
    slot[-GROUP.payload_bytes :] = payload_of(number)
    used = registry.by_name(codec)
    scratch = empty_frame(pack_scratch_bytes(GROUP, used, is_sealed=True))
    return bytes(pack(slot, GROUP, identity_of(number), used, scratch, key=None if owner is None else KEYS[owner]))


@pytest.fixture
def keys(tmp_path):
    """Writes a file with the keys of some epochs."""

    def write(*owners: tuple[str, int]) -> str:
        file = tmp_path / "keys"
        file.write_text(
            "".join(f"{epoch} {tenant or '-'} {(OF_STORES | MATERIAL)[tenant, epoch]}\n" for tenant, epoch in owners)
        )
        file.chmod(0o600)
        return str(file)

    return write


@pytest.fixture
def inspect(capsys, no_settings):
    def call(*arguments: object) -> tuple[int, dict]:
        code = run(["inspect", *map(str, arguments), "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out) if told.out else {"error": told.err}

    return call


@pytest.fixture
def store(tmp_path):
    """A frame of each key, of two codecs, and one without a seal."""
    tier = DirectoryTier(tmp_path / "store", capacity_bytes=1 << 30, direct_io="off")
    for number, owner in enumerate([*MATERIAL, None]):
        frame = frame_of(number, owner, "split" if number == 1 else "raw")
        assert tier.write(object_name(number), memoryview(frame))
    tier.close()
    return tmp_path / "store"


def path_of(store, number):
    spelled = object_name(number).hex()
    return store / "objects" / spelled[:2] / spelled


def forge(store, number) -> None:
    """Change a section as a writer without the key can: its checksum and the header's are right."""
    path = path_of(store, number)
    frame = bytearray(path.read_bytes())
    section = read_head(frame).sections[0]
    frame[section.offset] ^= 1
    extent = bytes(frame[section.offset : section.offset + section.extent_bytes])
    struct.pack_into("<Q", frame, 256 + 8, xxhash.xxh3_64_intdigest(extent))
    path.write_bytes(patched(bytes(frame), 8, "I", 3))


def damage(store, number) -> None:
    path = path_of(store, number)
    frame = bytearray(path.read_bytes())
    frame[read_head(frame).sections[0].offset] ^= 1
    path.write_bytes(frame)


def test_a_sealed_frame_shows_what_is_not_sealed(store, inspect, capsys):
    _, page = inspect("ls", store)
    rows = {row["name"]: row for row in page["objects"]}
    sealed, plain = rows[object_name(0).hex()], rows[object_name(4).hex()]
    assert (sealed["state"], sealed["model"], sealed["version"]) == ("sealed", MODEL.hex(), 3)
    assert {sealed[field] for field in ("parent", "depth", "tokens", "group", "part", "problem")} == {None}
    assert (plain["state"], plain["depth"]) == ("plain", 4)
    code, told = inspect("show", store, object_name(1).hex())
    assert (code, told["codec"], told["layers"], told["key_check"]) == (0, "split", 2, KEYS["a", 2].check.hex())
    assert [section["layer"] for section in told["sections"]] == [0, 1]
    assert run(["inspect", "show", str(store), object_name(1).hex()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("parent", "group", "depth"))] == ["sealed"] * 3
    assert run(["inspect", "ls", str(store)]) == 0
    assert capsys.readouterr().out.count("sealed") == 4
    states = {state: it["objects"] for state, it in inspect("stat", store)[1]["states"].items()}
    assert states == {"plain": 1, "sealed": 4}


def test_without_keys_a_frame_is_sealed_or_damaged_but_never_good(store, inspect, capsys):
    forge(store, 0)
    damage(store, 2)
    code, told = inspect("verify", store)
    assert (code, told["outcomes"]) == (1, {"damaged": 1, "good": 1, "sealed": 3})
    assert run(["inspect", "verify", str(store)]) == 1
    assert "3 sealed with keys that are not known here" in capsys.readouterr().out


def test_with_keys_tags_are_verified_and_a_repair_drops_what_is_forged(store, inspect, keys):
    file = keys(*MATERIAL)
    assert inspect("verify", store, "--keys", file)[1]["outcomes"] == {"good": 4, "plain": 1}
    forge(store, 0)
    damage(store, 2)
    code, told = inspect("verify", store, "--keys", file)
    assert (code, told["outcomes"]) == (1, {"damaged": 1, "forged": 1, "good": 2, "plain": 1})
    assert {it["name"]: it["outcome"] for it in told["bad_objects"]} == {
        object_name(0).hex(): "forged",
        object_name(2).hex(): "damaged",
    }
    assert inspect("verify", store, "--keys", keys(("a", 1)))[1]["outcomes"] == {
        "damaged": 1,
        "forged": 1,
        "plain": 1,
        "sealed": 2,
    }
    code, told = inspect("verify", store, "--keys", keys(*MATERIAL), "--repair")
    assert (told["bad"], told["dropped"]) == (2, 2)
    assert [path_of(store, number).exists() for number in range(5)] == [False, True, False, True, True]


def test_objects_with_token_ids_are_counted_where_their_key_is_known_and_no_token_is_shown(store, keys, capsys):
    group, text = replace(GROUP, chunk_tokens=8), struct.pack("<8I", *range(70_000, 70_008)) + b"extras"
    tier = DirectoryTier(store, capacity_bytes=1 << 30, direct_io="off")
    for number in (10, 11):
        slot = empty_frame(frame_bytes(group))
        scratch = empty_frame(pack_scratch_bytes(group, registry.by_name("raw"), is_sealed=True))
        identity = identity_of(number)._replace(key=bytes(32), text=text)
        assert tier.write(
            identity.name, pack(slot, group, identity, registry.by_name("raw"), scratch, key=KEYS["a", 2])
        )
    tier.close()
    assert run(["inspect", "verify", str(store), "--keys", keys(*MATERIAL)]) == 0
    shown = capsys.readouterr().out
    assert "2 with token ids of their chunk" in shown
    assert run(["inspect", "verify", str(store), "--keys", keys(*MATERIAL), "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told)["with_token_ids"] == 2
    assert "70000" not in shown + told
    assert run(["inspect", "verify", str(store), "--keys", keys(("b", 1)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["with_token_ids"] == 0


def test_in_a_tier_that_seals_a_frame_without_a_seal_is_bad(store, inspect, keys):
    code, told = inspect("verify", f"directory:{store}?seal=on", "--keys", keys(*MATERIAL), "--repair")
    assert (code, told["outcomes"], told["dropped"]) == (1, {"good": 4, "unsealed": 1}, 1)


def test_a_frame_of_a_later_epoch_than_the_present_one_is_left(store, inspect, keys):
    before = path_of(store, 1).read_bytes()
    file = Path(keys(("a", 1), ("a", 2)))
    file.write_text(file.read_text().rstrip() + " open\n")  # the second line
    assert inspect("reseal", store, "--keys", str(file))[1]["outcomes"].get("resealed") is None
    assert path_of(store, 1).read_bytes() == before


def test_frames_of_another_tenant_are_counted_and_kept(store, inspect, keys):
    code, told = inspect("verify", store, "--keys", keys(*MATERIAL), "--tenant", "a", "--repair")
    assert (code, told["outcomes"], told["dropped"]) == (0, {"foreign": 2, "good": 2, "plain": 1}, 0)
    assert {it["outcome"] for it in told["unreadable_objects"]} == {"foreign"}
    assert inspect("verify", store, "--keys", keys(*MATERIAL), "--tenant", "-")[1]["outcomes"]["foreign"] == 3
    assert all(path_of(store, number).exists() for number in range(5))


def test_keys_come_from_the_settings_too(store, inspect, keys, monkeypatch):
    monkeypatch.setenv("KVTIER_STORE__KEYS_FILE", keys(("a", 1), ("a", 2)))
    assert inspect("verify", store)[1]["outcomes"] == {"good": 2, "plain": 1, "sealed": 2}
    monkeypatch.setenv("KVTIER_STORE__KEYS_FILE", "nowhere")
    code, told = inspect("verify", store)
    assert code == 2
    assert "nowhere" in told["error"]


def payload_in(store, number, *owners) -> bytes:
    """What a reader with only these keys opens."""
    frame, slot = path_of(store, number).read_bytes(), empty_frame(frame_bytes(GROUP))
    slot[: len(frame)] = frame
    seals = Seals(Keyring([KEYS[owner] for owner in owners]), owners[0][0], is_demanded=True)
    scratch = empty_frame(OPEN_SCRATCH_BYTES)
    unpack_in_place(slot, len(frame), GROUP, Identity(object_name(number)), scratch, seals)
    return bytes(slot[-GROUP.payload_bytes :])


def test_after_reseal_the_earlier_key_can_be_removed(store, inspect, keys):
    before = {number: path_of(store, number).read_bytes() for number in range(5)}
    code, told = inspect("reseal", store, "--keys", keys(*MATERIAL))
    assert (code, told["outcomes"], told["bad_objects"]) == (0, {"resealed": 1, "current": 3, "left": 1}, [])
    assert told["bytes"] == len(before[0])
    after = {number: path_of(store, number).read_bytes() for number in range(5)}
    assert [number for number in range(5) if before[number] != after[number]] == [0]
    assert before[0][112:144] != after[0][112:144], "each seal has a new salt"
    with pytest.raises(UnreadableChunkError):
        payload_in(store, 0, ("a", 1))
    expected = payload_of(0)[:6000]
    assert payload_in(store, 0, ("a", 2))[:6000] == expected
    assert inspect("verify", store, "--keys", keys(("a", 2), ("b", 1), ("", 1)))[1]["outcomes"] == {
        "good": 4,
        "plain": 1,
    }
    assert inspect("reseal", store, "--keys", keys(*MATERIAL))[1]["outcomes"] == {"current": 4, "left": 1}


def test_a_forged_or_damaged_frame_is_not_resealed(store, inspect, keys):
    path_of(store, 1).write_bytes(b"")  # no frame
    tier = DirectoryTier(store, capacity_bytes=1 << 30, direct_io="off")
    assert tier.write(object_name(5), memoryview(frame_of(5, ("a", 1), "split")))
    tier.close()
    forge(store, 0)
    damage(store, 5)
    before = {number: path_of(store, number).read_bytes() for number in range(6)}
    code, told = inspect("reseal", store, "--keys", keys(*MATERIAL))
    assert (code, told["outcomes"]) == (1, {"forged": 1, "damaged": 2, "current": 2, "left": 1})
    assert {it["name"]: it["outcome"] for it in told["bad_objects"]} == {
        object_name(0).hex(): "forged",
        object_name(1).hex(): "damaged",
        object_name(5).hex(): "damaged",
    }
    assert {number: path_of(store, number).read_bytes() for number in range(6)} == before


def test_only_the_tenants_frames_are_resealed(store, inspect, keys, monkeypatch):
    for owner in (("b", 2), ("", 2)):
        monkeypatch.setitem(MATERIAL, owner, "55" * 32)
    file = keys(*MATERIAL)
    assert inspect("reseal", store, "--keys", file, "--tenant", "b")[1]["outcomes"] == {"resealed": 1, "left": 4}
    assert inspect("reseal", store, "--keys", file, "--tenant", "-")[1]["outcomes"] == {"resealed": 1, "left": 4}
    code, told = inspect("reseal", store, "--keys", file, "--tenant", "c")
    assert code == 2
    assert "no key for tenant c" in told["error"]
    assert "there is no key" in inspect("reseal", store)[1]["error"]


def test_frames_without_a_seal_are_sealed_if_asked(store, inspect, keys):
    code, told = inspect("reseal", store, "--keys", keys(*MATERIAL), "--tenant", "b", "--plain-too")
    assert (code, told["outcomes"]) == (0, {"resealed": 1, "current": 1, "left": 3})
    assert payload_in(store, 4, ("b", 1))[:6000] == payload_of(4)[:6000]
    head = read_head(path_of(store, 4).read_bytes())
    _, text = open_seal(head, Seals(Keyring([KEYS["b", 1]]), "b"))
    plain = read_head(frame_of(4, None))
    assert bytes(text) == plain.head[plain.metadata][:-16], "parent, depth and so on are kept"


def test_after_a_failed_write_no_further_object_is_touched(store, inspect, keys, monkeypatch, capsys):
    monkeypatch.setattr(DirectoryTier, "write", lambda *_: False)
    monkeypatch.setattr(inspector, "_THREADS", 1)
    keys_file = keys(("a", 1), ("a", 2))
    tier = DirectoryTier(store, capacity_bytes=1 << 30, direct_io="off")
    for number in range(6, 9):
        assert tier.write_many([Write(object_name(number), memoryview(frame_of(number, ("a", 1))))]) == [True]
    tier.close()
    code, told = inspect("reseal", store, "--keys", keys_file)
    assert (code, told["outcomes"]) == (1, {"lost": 1, "left": 6, "current": 1})
    assert "not written again" in told["bad_objects"][0]["reason"]
    assert run(["inspect", "reseal", str(store), "--keys", keys_file]) == 1
    assert "1 lost" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["directory", "disk", "shared_directory", "s3"])
def test_every_kind_of_store_can_be_sealed_and_resealed(kind, tmp_path, inspect, keys):
    if kind == "s3":
        pytest.importorskip("obstore")
    with placed(kind, tmp_path / "store") as tier:
        text = text_of(tier)
        # Stores of several nodes are sealed with their secret, as epoch 0.
        code, told = inspect("reseal", text, "--keys", keys(("", 0), ("", 1)), "--plain-too")
        assert (code, told["outcomes"]) == (0, {"resealed": 6})
        code, told = inspect("reseal", text, "--keys", keys(("", 1), ("", 2)))
        assert (code, told["outcomes"]) == (0, {"resealed": 6})
        assert inspect("verify", text, "--keys", keys(("", 2)))[1]["outcomes"] == {"good": 6}
        assert inspect("verify", text, "--keys", keys(("", 1)))[1]["outcomes"] == {"sealed": 6}
