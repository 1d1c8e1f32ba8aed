"""Opening a directory tier: what is made, what is found again, what is refused and with which words."""

import json
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ConfigError, DamagedStoreError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import About
from kvtier.tier.directory.snapshot import load_snapshot
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.directory_marker import open_store, read_marker

CAPACITY = 64 * BLOCK_BYTES


def fill(root, numbers, **settings):
    tier = DirectoryTier(root, capacity_bytes=CAPACITY, **settings)
    for number in numbers:
        assert tier.write(object_name(number), frame_of(number))
    return tier


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_makes_a_private_store_with_parents(tmp_path, umask):
    root = tmp_path / "a" / "b"
    old = os.umask(umask)
    try:
        tier = fill(root, [1])
        shutil.rmtree(root / "objects")
        shutil.rmtree(root / "drafts")
        assert tier.write(object_name(1), frame_of(1))
    finally:
        os.umask(old)
    tier.close()
    for where, folders, files in os.walk(tmp_path):
        for folder in folders:
            assert stat.S_IMODE(os.stat(os.path.join(where, folder)).st_mode) == 0o700
        for file in files:
            assert stat.S_IMODE(os.stat(os.path.join(where, file)).st_mode) == 0o600, file
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    spelled = object_name(1).hex()
    assert (root / "objects" / spelled[:2] / spelled).stat().st_size == 2 * BLOCK_BYTES
    assert sorted(path.name for path in root.iterdir()) == ["drafts", "index", "kvtier-store.json", "ledger", "objects"]
    assert list((root / "drafts").iterdir()) == []


def test_a_restart_remembers_uses_and_parents(tmp_path):
    tier = DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    for number in range(4):
        parent = object_name(number - 1) if number in (1, 2) else None
        assert tier.write(object_name(number), frame_of(number), About(parent, number % 3))
    into = empty_frame(2 * BLOCK_BYTES)
    for number in (2, 1, 0):
        tier.read(object_name(number), into)
    tier.close()
    # Oldest use: 3. Then 2, the leaf of the prompt 0-1-2; then 1; its start last, although all three are as old.
    for gone in (3, 2, 1):
        left = [number for number in range(4) if tier_holds(tmp_path / "s", number)]
        DirectoryTier(tmp_path / "s", capacity_bytes=2 * (len(left) - 1) * BLOCK_BYTES).close()
        assert [number for number in left if not tier_holds(tmp_path / "s", number)] == [gone]


def tier_holds(root, number):
    spelled = object_name(number).hex()
    return (root / "objects" / spelled[:2] / spelled).exists()


@pytest.mark.parametrize("damage", ["absent", "empty", "flipped", "cut", "version", "longer", "folder"])
def test_a_hint_that_is_no_use_is_rebuilt(tmp_path, damage):
    fill(tmp_path / "s", range(10)).close()
    hint = tmp_path / "s" / "index"
    told = bytearray(hint.read_bytes())
    if damage == "flipped":
        told[len(told) // 2] ^= 1
    elif damage == "cut":
        told = told[:-1]
    elif damage == "version":
        told[8] ^= 2
    elif damage == "longer":
        told += b"x"
    hint.write_bytes(b"" if damage == "empty" else told)
    if damage in ("absent", "folder"):
        hint.unlink()
    if damage == "folder":
        hint.mkdir()
    tier = DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    assert (tier.object_count, tier.used_bytes) == (10, 20 * BLOCK_BYTES)
    assert tier.contains([object_name(3)]) == [True]
    tier.close()
    if damage != "folder":
        assert {row.name for row in load_snapshot(str(hint)) or ()} == {object_name(number) for number in range(10)}


def test_what_a_hint_says_is_not_believed(tmp_path, open_directory):
    """It names a file that is gone, and does not know of another."""
    fill(tmp_path / "s", [1, 2]).close()
    hint = (tmp_path / "s" / "index").read_bytes()
    tier = fill(tmp_path / "s", [3])
    tier.delete(object_name(1))
    tier.close()
    (tmp_path / "s" / "index").write_bytes(hint)
    alone = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    assert alone.object_count == 2
    second = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)  # reads only the hint
    assert second.contains([object_name(number) for number in (1, 2, 3)]) == [True, True, True]
    assert second.read(object_name(1), empty_frame(BLOCK_BYTES)) is None
    assert second.contains([object_name(number) for number in (1, 2, 3)]) == [False, True, True]
    for number in range(10, 45):
        assert second.write(object_name(number), frame_of(number))
    assert second.used_bytes == alone.used_bytes <= CAPACITY


def test_a_lower_cap_evicts_the_oldest_at_open(tmp_path, open_directory):
    fill(tmp_path / "s", range(20)).close()
    tier = open_directory(tmp_path / "s", capacity_bytes=10 * BLOCK_BYTES)
    assert (tier.used_bytes, tier.object_count, tier.evictions) == (10 * BLOCK_BYTES, 5, 15)
    assert tier.contains([object_name(number) for number in range(20)]) == [False] * 15 + [True] * 5


def test_files_that_are_not_ours_are_left_alone_and_not_counted(tmp_path):
    fill(tmp_path / "s", [1]).close()
    objects = tmp_path / "s" / "objects"
    foreign = [objects / "note", objects / "zz" / "file", objects / "ab" / ("cd" + "0" * 62), objects / "ab" / "AB"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    link = objects / object_name(5).hex()[:2] / object_name(5).hex()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(foreign[0])
    tier = DirectoryTier(tmp_path / "s", capacity_bytes=4 * BLOCK_BYTES)
    assert (tier.used_bytes, tier.object_count) == (2 * BLOCK_BYTES, 1)
    assert tier.contains([object_name(5)]) == [False]
    assert tier.read(object_name(5), empty_frame(BLOCK_BYTES)) is None
    for number in range(10, 14):
        assert tier.write(object_name(number), frame_of(number))
    tier.close()
    assert all(path.exists() for path in foreign)


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "drafts").mkdir()  # a name that we use, too
    with pytest.raises(
        DamagedStoreError, match=r"holds other files \('drafts', 'thesis.txt'\) and no kvtier store; .*"
    ):
        DirectoryTier(tmp_path, capacity_bytes=CAPACITY)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(DamagedStoreError, match=r"\('a', 'b', 'c' and 2 more\)"):
        DirectoryTier(tmp_path, capacity_bytes=CAPACITY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "drafts", "thesis.txt"]


def test_a_fresh_file_system_is_accepted(tmp_path):
    for name in ("lost+found", ".snapshot", ".Trash-1000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".nfs00a1").touch()
    DirectoryTier(tmp_path, capacity_bytes=CAPACITY).close()


def test_a_place_where_the_disk_tier_was_first_is_accepted(tmp_path):
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-of-mine").mkdir()
    with pytest.raises(DamagedStoreError, match=r"holds other files \('rank-of-mine'\)"):
        DirectoryTier(tmp_path, capacity_bytes=CAPACITY)
    (tmp_path / "rank-of-mine").rmdir()
    DirectoryTier(tmp_path, capacity_bytes=CAPACITY).close()


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DamagedStoreError, match=r"is not a directory|cannot be used: .*Not a directory"):
            DirectoryTier(path, capacity_bytes=CAPACITY)


@pytest.mark.parametrize("path", ["nul\0byte", "x" * 300])
def test_an_impossible_path_is_refused(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"root .* cannot be used"):
        DirectoryTier(path, capacity_bytes=CAPACITY)


def test_several_that_make_a_store_at_once_agree(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(open_store, [tmp_path / "s"] * 8))
    assert len({marker.store_id for marker in made}) == 1
    assert read_marker(tmp_path / "s") == made[0]
    assert json.loads((tmp_path / "s" / "kvtier-store.json").read_text())["version"] == 1
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["kvtier-store.json"]


def test_several_open_and_close_at_once(tmp_path, open_directory):
    def live(number):
        tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
        try:
            assert tier.write(object_name(number), frame_of(number))
        finally:
            tier.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(live, range(24)))
    tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    assert (tier.object_count, tier.used_bytes) == (24, 48 * BLOCK_BYTES)


@pytest.fixture
def ramfs(tmp_path):
    """A file system without direct I/O."""
    where = tmp_path / "ram"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(where)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs a file system without direct I/O: mounting a ramfs is only for root")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_without_direct_io_it_goes_buffered_or_says_so(ramfs):
    tier = fill(ramfs / "s", [1])
    assert not tier.direct_io
    into = empty_frame(2 * BLOCK_BYTES)
    assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES
    assert into == frame_of(1)
    tier.close()
    with pytest.raises(ConfigError, match=r"direct_io is 'on', but the file system .* allowed there: 'auto', 'off'"):
        DirectoryTier(ramfs / "s", capacity_bytes=CAPACITY, direct_io="on")
    assert list((ramfs / "s" / "drafts").iterdir()) == []


def test_direct_io_is_what_the_setting_says(tmp_path, open_directory):
    off = open_directory(tmp_path / "s", capacity_bytes=CAPACITY, direct_io="off")
    assert not off.direct_io
    off.close()
    auto = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    if auto.direct_io:
        open_directory(tmp_path / "s", capacity_bytes=CAPACITY, direct_io="on").close()
