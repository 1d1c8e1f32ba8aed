"""`kvtier inspect` tells the truth about a store, finds what is bad, and deletes only what is ours."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from tests.frames import of_codec

from kvtier.cli.main import run
from kvtier.codec.frame import frame_bytes, head_bytes, pack
from kvtier.codec.frame_header import Identity, read_head
from kvtier.codec.raw import Raw
from kvtier.layout import GroupLayout, History, Part
from kvtier.tier.base import About
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files import fingerprint_notes as notes
from kvtier.types import ObjectName

GROUP = GroupLayout(History(), (6000, 5000, 4096), "test/pages")
FRAME = frame_bytes(GROUP)
MODELS = (hashlib.md5(b"model a").digest(), hashlib.md5(b"model b").digest())


def name_of(number: int) -> ObjectName:
    return ObjectName(hashlib.sha256(f"object {number}".encode()).digest())


def frame_of(number: int, name: bytes | None = None) -> memoryview:
    slot = memoryview(bytearray(FRAME))
    payload = slot[head_bytes(GROUP) :]
    payload[:] = bytes([number % 256]) * len(payload)
    identity = Identity(
        name or name_of(number),
        MODELS[number % 2],
        depth=number,
        tokens=256,
        group=number % 3,
        part=Part(0, 2, 4, 8),
    )
    return pack(slot, GROUP, identity, Raw())


def fill(root: Path, count: int) -> DirectoryTier:
    tier = DirectoryTier(root, capacity_bytes=2**30, direct_io="off")
    for number in range(count):
        assert tier.write(name_of(number), frame_of(number), About(depth=number))
    return tier


def path_of(root: Path, number: int) -> Path:
    spelled = name_of(number).hex()
    return root / "objects" / spelled[:2] / spelled


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything under `root`: mtime and content of each file."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.fixture
def store(tmp_path, no_settings):
    root = tmp_path / "store"
    fill(root, 10).close()
    return root


@pytest.fixture
def inspect(capsys):
    def call(*arguments: object) -> tuple[int, dict]:
        code = run(["inspect", *map(str, arguments), "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out) if told.out else {"error": told.err}

    return call


def test_ls_pages_through_all_objects_in_order(store, inspect):
    names, after = [], ""
    for _ in range(4):
        code, page = inspect("ls", store, "--limit", 3, "--after", after)
        assert code == 0
        assert page["total"] == 10
        names += [row["name"] for row in page["objects"]]
        after = page["next"]
        if after is None:
            break
    assert names == sorted(name_of(number).hex() for number in range(10))


def test_ls_tells_what_the_heads_say(store, inspect):
    _, page = inspect("ls", store)
    row = next(row for row in page["objects"] if row["name"] == name_of(5).hex())
    assert (row["group"], row["part"], row["depth"], row["tokens"]) == (2, "layers 0-1, heads 4-7", 5, 256)
    assert row["model"] == MODELS[1].hex()
    assert row["size_bytes"] == FRAME
    assert 0 <= row["age_s"] < 600
    assert row["problem"] is None
    path_of(store, 5).write_bytes(b"x" * 5000)
    code, page = inspect("ls", store)
    row = next(row for row in page["objects"] if row["name"] == name_of(5).hex())
    assert (code, row["group"]) == (0, None)
    assert "wrong magic" in row["problem"]


def test_codec_and_class_are_shown(store, inspect, capsys):
    """A lossy codec tells the class by itself. Of raw objects only the note beside the store does."""
    lossy, raw = (name_of(number).hex() for number in (0, 1))
    path_of(store, 0).write_bytes(of_codec(path_of(store, 0).read_bytes(), 5))
    models = [model.hex()[:12] for model in MODELS]

    def told() -> tuple[list[object], list[object]]:
        stat, shown = inspect("stat", store)[1], [inspect("show", store, it)[1] for it in (lossy, raw)]
        assert [it["codec"] for it in shown] == ["int4", "raw"]
        assert [it["object"]["codec"] for it in shown] == ["int4", "raw"]
        return [it["loss"] for it in shown], [stat["models"][it]["loss"] for it in models]

    assert told() == (["int4", None], ["int4", None])
    notes.write(store, MODELS[1], {"model": MODELS[1].hex(), "of": {"weights": "w", "loss": {"codec": "k8v4"}}})
    notes.write(store, MODELS[0], {"model": MODELS[0].hex(), "of": {"weights": "w"}})
    assert told() == (["int4", "k8v4"], ["int4", "k8v4"])
    notes.write(store, MODELS[1], {"model": MODELS[1].hex(), "of": {"weights": "w"}})
    assert told() == (["int4", "none"], ["int4", "none"])
    for words in (("ls", store), ("show", store, lossy), ("stat", store)):
        assert run(["inspect", *map(str, words)]) == 0
        assert "int4" in capsys.readouterr().out
    notes.write(store, MODELS[1], {"model": 7, "of": []})
    assert told() == (["int4", None], ["int4", None])


def test_stat_counts(store, inspect, monkeypatch):
    code, told = inspect("stat", store)
    assert code == 0
    assert (told["objects"], told["bytes"], told["charged_bytes"]) == (10, 10 * FRAME, 10 * FRAME)
    assert told["recorded_bytes"] == 10 * FRAME
    assert (told["temp_files"], told["temp_bytes"], told["open_in"], told["unreadable"]) == (0, 0, 0, 0)
    assert told["capacity_bytes"] is None
    assert set(told["models"]) == {model.hex()[:12] for model in MODELS}
    share = told["models"][MODELS[0].hex()[:12]]
    assert (share["objects"], share["bytes"], share["tokens"]) == (5, 5 * FRAME, 5 * 256)
    assert (share["groups"], share["parts"]) == ([0, 1, 2], ["layers 0-1, heads 4-7"])
    whole = {"objects": 10, "bytes": 10 * FRAME}
    assert (told["formats"], told["states"]) == ({"3": whole}, {"plain": whole})
    monkeypatch.setenv("KVTIER_TIERS", f"directory:{store}")
    monkeypatch.setenv("KVTIER_TIERS__DIRECTORY__CAPACITY_BYTES", "1GiB")
    assert inspect("stat", store)[1]["capacity_bytes"] == 2**30
    monkeypatch.setenv("KVTIER_TIERS__DIRECTORY__CAPACITY_BYTES", "1 parsec")
    assert inspect("stat", store)[1]["capacity_bytes"] is None  # looking must not fail for that


def test_stat_sees_who_is_in_there_and_what_is_being_written(store, inspect):
    tier = DirectoryTier(store, capacity_bytes=2**30)
    (store / "drafts" / "0123456789abcdef-0-8192").write_bytes(b"half")
    told = inspect("stat", store)[1]
    assert (told["open_in"], told["temp_files"], told["temp_bytes"]) == (1, 1, 8192)
    tier.close()
    assert inspect("stat", store)[1]["open_in"] == 0


def test_stat_without_a_ledger_makes_none(store, inspect):
    (store / "ledger").unlink()
    assert inspect("stat", store)[1]["recorded_bytes"] is None
    assert not (store / "ledger").exists()


def test_show_tells_one_object_whole(store, inspect):
    spelled = name_of(3).hex()
    code, told = inspect("show", store, spelled[:10].upper())
    assert code == 0
    assert told["object"]["name"] == spelled
    assert (told["codec"], told["version"], told["layers"], told["frame_bytes"]) == ("raw", 3, 3, FRAME)
    assert told["path"] == str(path_of(store, 3))
    assert [(row["layer"], row["raw_bytes"]) for row in told["sections"]] == [(0, 6000), (1, 5000), (2, 4096)]
    path_of(store, 3).write_bytes(b"")
    code, told = inspect("show", store, spelled[:10])
    assert code == 1
    assert "cut off" in told["object"]["problem"]


def test_show_wants_exactly_one(store, inspect):
    spelled = sorted(name_of(number).hex() for number in range(10))
    shared = next(a[:1] for a, b in pairwise(spelled) if a[0] == b[0])
    for prefix, why in (
        (shared, "objects in"),
        ("0" * 64, "begins with it"),
        ("xyz", "hexadecimal"),
        ("", "hexadecimal"),
    ):
        code, told = inspect("show", store, prefix)
        assert code == 2
        assert why in told["error"]


def test_verify_finds_nothing_in_a_good_store_and_changes_nothing(store, inspect):
    before = tree(store)
    code, told = inspect("verify", store)
    assert (code, told["checked"], told["bad"], told["bytes"]) == (0, 10, 0, 10 * FRAME)
    assert told["bad_objects"] == []
    for command in ("ls", "stat"):
        assert inspect(command, store)[0] == 0
    assert inspect("show", store, name_of(1).hex())[0] == 0
    assert tree(store) == before


def of_version_99(frame: bytes) -> bytes:
    """`frame` with another version, and with the header checksum that belongs to it."""
    head = bytearray(frame[: read_head(frame).header_bytes])
    head[8:12], head[16:24] = struct.pack("<I", 99), bytes(8)
    head[16:24] = xxhash.xxh3_64_digest(head)[::-1]
    return bytes(head) + frame[len(head) :]


def break_in_every_way(store: Path) -> dict[str, str]:
    """Spoil objects 0 to 6 and say which words each must be reported with."""
    flipped = bytearray(path_of(store, 0).read_bytes())
    flipped[-5000] ^= 1
    path_of(store, 0).write_bytes(flipped)
    path_of(store, 1).write_bytes(path_of(store, 1).read_bytes()[:-4096])
    path_of(store, 2).write_bytes(b"")
    path_of(store, 3).write_bytes(path_of(store, 9).read_bytes())
    path_of(store, 4).write_bytes(path_of(store, 4).read_bytes() + b"more")
    path_of(store, 5).write_bytes(of_version_99(path_of(store, 5).read_bytes()))
    head = bytearray(path_of(store, 6).read_bytes())
    head[200] ^= 1
    path_of(store, 6).write_bytes(head)
    told = ["checksum of the section", "bytes are stored of a frame", "cut off", "belongs to another object"]
    told += ["bytes are stored of a frame", "version 99, newer than", "header checksum"]
    return {name_of(number).hex(): words for number, words in enumerate(told)}


def test_verify_finds_everything_that_is_bad_and_a_repair_drops_it(store, inspect):
    expected = break_in_every_way(store)
    code, told = inspect("verify", store)
    assert (code, told["checked"], told["bad"], told["unreadable"], told["dropped"]) == (1, 10, 6, 1, 0)
    (unreadable,) = told["unreadable_objects"]
    assert unreadable["name"] == name_of(5).hex()  # the version
    reasons = {bad["name"]: bad["reason"] for bad in [*told["bad_objects"], unreadable]}
    assert set(reasons) == set(expected)
    assert [name for name, words in expected.items() if words not in reasons[name]] == []
    stat = inspect("stat", store)[1]
    assert (stat["objects"], stat["unreadable"]) == (10, 4)
    assert {version: it["objects"] for version, it in stat["formats"].items()} == {"3": 6, "99": 1}
    assert {state: it["objects"] for state, it in stat["states"].items()} == {
        "plain": 6,
        "damaged": 3,
        "other_version": 1,
    }
    code, told = inspect("verify", store, "--repair")
    assert (code, told["bad"], told["dropped"]) == (1, 6, 6)
    code, told = inspect("verify", store)
    assert (code, told["checked"], told["bad"], told["unreadable"]) == (0, 4, 0, 1)
    told = inspect("stat", store)[1]
    assert (told["recorded_bytes"], told["charged_bytes"]) == (4 * FRAME, 4 * FRAME)
    assert [name for name in expected if (store / "objects" / name[:2] / name).exists()] == [name_of(5).hex()]


def test_what_is_not_understood_is_kept_by_a_repair(store, inspect, capsys):
    """A codec that is not installed here, and a frame of a later version, may be good on another node."""
    encoded = of_codec(path_of(store, 0).read_bytes(), 40_001)
    path_of(store, 0).write_bytes(encoded)
    path_of(store, 1).write_bytes(of_version_99(path_of(store, 1).read_bytes()))
    before = tree(store)
    for arguments in ((), ("--repair",)):
        code, told = inspect("verify", store, *arguments)
        assert (code, told["checked"], told["bad"], told["unreadable"], told["dropped"]) == (0, 10, 0, 2, 0)
        reasons = {it["name"]: it["reason"] for it in told["unreadable_objects"]}
        assert "codec 40001 is not installed here" in reasons[name_of(0).hex()]
        assert "version 99, newer than" in reasons[name_of(1).hex()]
    assert tree(store) == before
    assert run(["inspect", "verify", str(store)]) == 0
    told = capsys.readouterr().out
    assert "unreadable here, kept: " in told
    assert "0 bad, 2 unreadable here and kept" in told
    for command in ("ls", "stat"):
        assert run(["inspect", command, str(store)]) == 0
    assert "version 99, newer than" in capsys.readouterr().out

    path_of(store, 0).write_bytes(encoded[:4100] + bytes([encoded[4100] ^ 1]) + encoded[4101:])  # damaged, too
    code, told = inspect("verify", store, "--repair")
    assert (code, told["bad"], told["unreadable"], told["dropped"]) == (1, 1, 1, 1)
    assert not path_of(store, 0).exists()


def test_repair_beside_a_running_process_keeps_its_count_exact(store, inspect):
    tier = DirectoryTier(store, capacity_bytes=2**30, direct_io="off")
    spoiled = bytearray(path_of(store, 0).read_bytes())
    spoiled[-5000] ^= 1
    path_of(store, 0).write_bytes(spoiled)
    assert inspect("verify", store, "--repair")[1]["dropped"] == 1
    assert tier.used_bytes == 9 * FRAME
    into = memoryview(bytearray(FRAME))
    assert tier.read(name_of(0), into) is None
    assert tier.read(name_of(1), into) == FRAME
    assert tier.write(name_of(0), frame_of(0))
    assert tier.used_bytes == 10 * FRAME
    tier.close()
    assert inspect("verify", store)[1]["bad"] == 0


def test_a_link_in_place_of_an_object_is_not_followed(store, inspect, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(path_of(store, 0).read_bytes())
    path_of(store, 0).unlink()
    path_of(store, 0).symlink_to(elsewhere)
    assert inspect("verify", store)[1]["checked"] == 9
    assert inspect("ls", store)[1]["total"] == 9


@pytest.mark.parametrize(
    "command", [["ls"], ["stat"], ["show", "ab"], ["verify"], ["verify", "--repair"], ["purge", "--yes"]]
)
def test_what_is_no_store_is_refused_and_not_touched(inspect, tmp_path, command):
    verb, *rest = command
    other = tmp_path / "other"
    (other / "objects" / "ab").mkdir(parents=True)
    (other / "objects" / "ab" / ("ab" * 32)).write_text("thesis")
    file = tmp_path / "file"
    file.write_text("x")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "kvtier-store.json").write_text("garbage")
    for place, why in (
        (damaged, f"kvtier inspect repair {damaged}"),
        (other, "holds no store that this release of kvtier knows"),
        (tmp_path / "none", "does not exist"),
        (file, "not a directory"),
    ):
        code, told = inspect(verb, place, *rest)
        assert code == 2
        assert why in told["error"]
    for version, why in ((0, "store version 0, older than the one known here, 1"), (2, "of kind shared_directory")):
        strange = tmp_path / f"version {version}"
        strange.mkdir()
        (strange / "kvtier-store.json").write_text(f'{{"version": {version}, "store_id": "x", "created": "y"}}')
        code, told = inspect(verb, strange, *rest)
        assert (code, why in told["error"], "damaged" in told["error"]) == (2, True, False), told
    assert (other / "objects" / "ab" / ("ab" * 32)).read_text() == "thesis"
    assert not (tmp_path / "none").exists()


def test_purge_removes_the_store_and_the_directory_can_be_used_again(store, inspect):
    notes.write(store, bytes(16), {"digest": "00"})
    (store / "secret").write_bytes(bytes(32))
    code, told = inspect("purge", store, "--yes")
    assert (code, told["objects"], told["bytes"]) == (0, 10, 10 * FRAME)
    assert (told["is_emptied_only"], told["left"]) == (False, [])
    assert list(store.iterdir()) == []
    fill(store, 1).close()


def test_purge_leaves_what_is_not_ours_and_never_follows_a_link(store, inspect, tmp_path):
    precious = tmp_path / "precious"
    (precious / "ab").mkdir(parents=True)
    victim = precious / "ab" / ("ab" * 32)
    victim.write_text("thesis")
    prefix = name_of(0).hex()[:2]
    (store / "notes.txt").write_text("mine")
    (store / "objects" / prefix / "notes.txt").write_text("mine")
    (store / "objects" / "link").symlink_to(precious)
    (store / "objects" / "zz").symlink_to(precious / "ab")
    linked = next(f"{n:02x}" for n in range(256) if not (store / "objects" / f"{n:02x}").exists())
    (store / "objects" / linked).symlink_to(precious / "ab")
    (store / "drafts" / ("c" * 16 + "-0-4096")).symlink_to(victim)
    code, told = inspect("purge", store, "--yes")
    assert code == 0
    assert told["objects"] == 10
    assert sorted(told["left"]) == sorted(
        [
            "notes.txt",
            f"objects/{prefix}/notes.txt",
            "objects/link",
            "objects/zz",
            f"objects/{linked}",
            "drafts/" + "c" * 16 + "-0-4096",
        ]
    )
    assert victim.read_text() == "thesis"
    assert (store / "notes.txt").read_text() == "mine"
    assert not (store / "kvtier-store.json").exists()


def test_purge_does_not_open_what_is_not_ours(store, inspect, tmp_path, monkeypatch):
    """As `lost+found` of another user, or a link into a file system that hangs."""
    (store / "lost+found").mkdir()
    (store / "elsewhere").symlink_to(tmp_path)
    real = os.open

    def opened(path, *arguments, **more):
        if path in {"lost+found", "elsewhere"}:
            raise PermissionError(errno.EACCES, "not yours", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", opened)
    code, told = inspect("purge", store, "--yes")
    assert (code, told["objects"], sorted(told["left"])) == (0, 10, ["elsewhere", "lost+found"])


def test_purge_does_not_go_through_a_linked_objects_directory(store, inspect, tmp_path):
    (store / "objects").rename(tmp_path / "moved")
    (store / "objects").symlink_to(tmp_path / "moved")
    code, told = inspect("purge", store, "--yes")
    assert (code, told["objects"], told["left"]) == (0, 0, ["objects"])
    assert len(list((tmp_path / "moved").rglob("?" * 64))) == 10


def test_purge_of_a_store_in_use_is_refused_and_force_empties_it_under_its_users(store, inspect):
    script = (
        "import sys; from kvtier.tier.directory.tier import DirectoryTier; "
        f"tier = DirectoryTier({str(store)!r}, capacity_bytes=2**30); "
        "print('open', flush=True); sys.stdin.readline(); print(tier.used_bytes, flush=True); tier.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout.readline() == "open\n"
        before = tree(store)
        code, told = inspect("purge", store, "--yes")
        assert code == 2
        assert "running processes have it open" in told["error"]
        assert tree(store) == before
        code, told = inspect("purge", store, "--yes", "--force")
        assert (code, told["objects"], told["is_emptied_only"]) == (0, 10, True)
        assert user.communicate("go\n", timeout=60)[0] == "0\n"
    assert (store / "kvtier-store.json").exists()
    assert inspect("stat", store)[1]["objects"] == 0


def test_purge_asks_and_takes_no_for_an_answer(store):
    command = [sys.executable, "-m", "kvtier.cli.main", "inspect", "purge", str(store)]
    for answer, told in (("n\n", "nothing was removed"), ("\n", "nothing was removed"), ("", "give --yes")):
        done = subprocess.run(command, input=answer, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert "with 10 objects" in done.stderr
    assert (store / "kvtier-store.json").exists()
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert list(store.iterdir()) == []


def test_progress_is_drawn_on_stderr_of_a_terminal_only(store):
    command = [sys.executable, "-m", "kvtier.cli.main", "inspect"]
    done = subprocess.run([*command, "stat", str(store)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    main_end, program_end = os.openpty()
    environ = {**os.environ, "COLUMNS": "130", "TERM": "xterm"}
    with subprocess.Popen(
        [*command, "stat", str(store)], stdout=program_end, stderr=program_end, env=environ
    ) as program:
        os.close(program_end)
        told = b""
        # On Linux reading a terminal whose last user has gone is an error, not an end.
        try:
            while part := os.read(main_end, 65536):
                told += part
        except OSError:
            pass
        assert program.wait(60) == 0
    os.close(main_end)
    assert b"reading heads" in told


def test_a_tier_as_text_is_inspected_like_its_directory(store, inspect):
    for words, same in (("stat", ("objects", "bytes", "models")), ("ls", ("total",)), ("verify", ("checked",))):
        found, by_kind = inspect(words, store)[1], inspect(words, f"directory:{store}")[1]
        assert [found[key] for key in same] == [by_kind[key] for key in same]
        assert found["directory"] == by_kind["directory"] == str(store)


def test_an_unknown_kind_or_a_wrong_setting_of_a_tier_is_named(inspect, store):
    assert "did you mean disk" in inspect("stat", "dsk:/x")[1]["error"]
    assert "directory tiers have no such setting" in inspect("stat", f"directory:{store}?pth=1")[1]["error"]
    assert "holds no store of kind disk" in inspect("stat", f"disk:{store}")[1]["error"]


@pytest.mark.parametrize("text", ["s3:s3://key:hunter2@bucket/p", "https://key:hunter2@bucket", "no:k:hunt?er2@bucket"])
def test_no_message_shows_a_password_in_a_tier(capsys, text):
    pytest.importorskip("obstore")
    assert run(["inspect", "stat", text]) == 2
    shown = capsys.readouterr().err
    assert "(hidden)" in shown
    assert "hunt" not in shown


def test_a_configured_tier_is_inspected_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    file = tmp_path / "kvtier.toml"
    file.write_text(f'[[tiers]]\nname = "archive"\nkind = "directory"\npath = "{tmp_path / "kv"}"\n')
    DirectoryTier(tmp_path / "kv", capacity_bytes=1 << 20).close()
    given = ["archive", "--file", str(file), "--set", "tiers.archive.capacity_bytes=3MiB", "--json"]
    assert run(["inspect", "stat", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objects"], found["capacity_bytes"]) == (0, 3 << 20)
    monkeypatch.setenv("KVTIER_CONFIG", str(file))
    assert run(["inspect", "verify", "archive"]) == 0
    assert run(["inspect", "repair", "archive"]) == 0
    assert run(["inspect", "ls", "attic"]) == 2
    assert run(["inspect", "ls", str(tmp_path / "kv"), "--set", "tiers.attic.read_threads=2"]) == 2
