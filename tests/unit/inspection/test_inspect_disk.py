"""`kvtier inspect` on a disk store: what it tells, what it finds damaged, what it removes, and what it leaves alone."""

import json

import pytest

from kvtier.cli.main import run
from kvtier.codec.frame import frame_bytes, head_bytes, pack
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.layout import GroupLayout, History, Part
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier import registry
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier

GROUP = GroupLayout(History(), (4096, 4096), "test/bytes")
COUNT = 6
FRAME_BYTES = frame_bytes(GROUP)


def sealed(number):
    slot = empty_frame(FRAME_BYTES)
    slot[head_bytes(GROUP) :] = bytes([number]) * GROUP.payload_bytes
    identity = Identity(object_name(number), b"f" * 16, depth=number, tokens=16, part=Part(0, 1, rank=1, ranks=2))
    return pack(slot, GROUP, identity, Raw())


@pytest.fixture
def store(tmp_path):
    tier = opened(tmp_path)
    for number in range(COUNT):
        assert tier.write(object_name(number), sealed(number))
    tier.close()
    return tmp_path / "rank-0"


def opened(root):
    return DiskTier(root / "rank-0", capacity_bytes=4 << 20, segment_bytes=1 << 20, sync_interval_s=3600.0)


def told(capsys, *arguments):
    code = run(["inspect", *(str(argument) for argument in arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def damage(store):
    file = store / "segments" / "00000000.segment"
    content = bytearray(file.read_bytes())
    content[4096 + 2 * FRAME_BYTES + 5000] ^= 1
    file.write_bytes(content)


def test_ls_pages_through_all_objects(store, capsys):
    code, first = told(capsys, "ls", store, "--limit", 4)
    assert (code, first["total"], len(first["objects"])) == (0, COUNT, 4)
    _, rest = told(capsys, "ls", store, "--limit", 4, "--after", first["next"])
    rows = first["objects"] + rest["objects"]
    assert [row["name"] for row in rows] == sorted(object_name(number).hex() for number in range(COUNT))
    assert {(row["size_bytes"], row["tokens"], row["part"], row["problem"]) for row in rows} == {
        (FRAME_BYTES, 16, "layers 0-0, rank 1 of 2", None)
    }


def test_stat_counts_beside_a_running_process(store, capsys):
    tier = opened(store.parent)
    code, result = told(capsys, "stat", store)
    assert (code, result["objects"], result["bytes"], result["open_in"]) == (0, COUNT, COUNT * FRAME_BYTES, 1)
    assert result["charged_bytes"] == 1 << 20
    assert result["unreadable"] == 0
    tier.close()
    assert run(["inspect", "stat", str(store)]) == 0


def test_verify_finds_what_is_damaged_and_repair_drops_it(store, capsys):
    assert told(capsys, "verify", store)[0] == 0
    damage(store)
    code, result = told(capsys, "verify", store)
    assert (code, result["checked"], result["bad"]) == (1, COUNT, 1)
    assert result["bad_objects"][0]["name"] == object_name(2).hex()
    code, result = told(capsys, "verify", store, "--repair")
    assert (code, result["dropped"]) == (1, 1)
    code, result = told(capsys, "verify", store)
    assert (code, result["checked"], result["bad"]) == (0, COUNT - 1, 0)


def test_purge_removes_the_store_and_nothing_else(store, capsys):
    (store / "segments" / "photo.jpg").write_bytes(b"precious")
    tier = opened(store.parent)
    assert run(["inspect", "purge", str(store), "--yes"]) == 2
    assert "a running process has it open" in capsys.readouterr().err
    tier.close()
    code, result = told(capsys, "purge", store, "--yes")
    assert (code, result["objects"], result["left"]) == (0, COUNT, ["segments/photo.jpg"])
    assert [path.name for path in (store / "segments").iterdir()] == ["photo.jpg"]
    assert run(["inspect", "stat", str(store)]) == 2


def test_a_foreign_version_or_the_directory_above_is_an_error_and_no_crash(store, capsys):
    assert run(["inspect", "ls", str(store.parent)]) == 2
    assert "such as" in capsys.readouterr().err
    (store / "kvtier-disk.json").write_text('{"version": 9}')
    assert run(["inspect", "ls", str(store)]) == 2
    assert "version 9, newer than the one known here, 1; nothing was changed" in capsys.readouterr().err


def test_health_takes_a_tier_of_one_rank(store, capsys):
    for where in (store, f"disk:{store.parent}", f"disk:{store}"):
        code, result = told(capsys, "health", where)
        assert (code, result["directory"], result["status"]["objects"]) == (0, str(store), COUNT)
    (store.parent / "rank-1").mkdir()
    assert run(["inspect", "health", f"disk:{store.parent}"]) == 2
    assert "tier 'disk' has a store for each rank; give the directory of one rank" in capsys.readouterr().err
    assert told(capsys, "health", f"disk:{store}")[0] == 0


def test_the_help_names_the_kinds_of_the_registry(capsys):
    assert run(["inspect", "--help"]) == 0
    assert f"Kinds: {', '.join(registry.names())}." in capsys.readouterr().out


def test_a_store_that_records_no_health_says_so(tmp_path, capsys):
    DirectoryTier(tmp_path, capacity_bytes=1 << 20).close()
    for where in (tmp_path, f"directory:{tmp_path}"):
        assert run(["inspect", "health", str(where)]) == 2
        assert f"the store in {tmp_path} is of a kind that keeps no health information" in capsys.readouterr().err


def test_health_is_of_one_store(store, capsys):
    assert run(["inspect", "health", str(store.parent)]) == 2
    assert f"such as {store.parent / 'rank-0'}" in capsys.readouterr().err
    assert run(["inspect", "health", str(store / "segments")]) == 2
    assert "so it is not a kvtier store; allowed here: a store's directory" in capsys.readouterr().err
