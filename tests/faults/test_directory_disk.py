"""A disk that is full, read-only or loses files: errors and misses, never other bytes, and then it works again."""

import os
import subprocess

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.directory import DirectoryTier

CAPACITY = 64 * BLOCK_BYTES


def mount(where, *options):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(where)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("needs a small file system of its own: mounting a tmpfs is only for root")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount(where, "size=256k")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def path_of(root, number):
    spelled = object_name(number).hex()
    return root / "objects" / spelled[:2] / spelled


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_full_disk_is_an_error_and_room_is_given_back(small_disk, direct_io):
    tier = DirectoryTier(small_disk / "s", capacity_bytes=1 << 30, direct_io=direct_io)
    written = 0
    while written < 1000 and tier.used_bytes < 200 * 1024:
        assert tier.write(object_name(written), frame_of(written, 4 * BLOCK_BYTES))
        written += 1
    with pytest.raises(TierError, match="No space left on device"):
        tier.write(object_name(written), frame_of(written, 20 * BLOCK_BYTES))
    assert written > 3
    assert tier.used_bytes == 4 * written * BLOCK_BYTES
    assert [name for name in os.listdir(small_disk / "s" / "drafts") if not name.endswith(".lock")] == []
    assert tier.contains([object_name(written)]) == [False]
    into = empty_frame(4 * BLOCK_BYTES)
    for number in range(written):
        assert tier.read(object_name(number), into) == 4 * BLOCK_BYTES
        assert into == frame_of(number, 4 * BLOCK_BYTES)
    tier.delete(object_name(0))
    assert tier.write(object_name(written), frame_of(written, 4 * BLOCK_BYTES))  # it works again
    tier.close()


def test_a_disk_that_turns_read_only_still_gives(small_disk):
    tier = DirectoryTier(small_disk / "s", capacity_bytes=CAPACITY)
    assert tier.write(object_name(1), frame_of(1))
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(TierError, match=r"cannot be opened: .*Read-only file system"):
        DirectoryTier(small_disk / "s", capacity_bytes=CAPACITY)
    with pytest.raises(TierError, match=r"cannot be opened: .*Read-only file system"):
        DirectoryTier(small_disk / "new", capacity_bytes=CAPACITY)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    tier = DirectoryTier(small_disk / "s", capacity_bytes=CAPACITY)
    assert tier.contains([object_name(1)]) == [True]
    tier.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_vanishes_is_a_miss(tmp_path):
    root = tmp_path / "s"
    tier = DirectoryTier(root, capacity_bytes=CAPACITY, shared=False)
    for number in range(3):
        assert tier.write(object_name(number), frame_of(number))
    path_of(root, 1).unlink()
    assert tier.contains([object_name(1)]) == [True]  # a hint
    assert tier.read(object_name(1), empty_frame(BLOCK_BYTES)) is None
    assert tier.contains([object_name(1)]) == [False]
    assert tier.object_count == 2
    assert tier.write(object_name(1), frame_of(1))
    into = empty_frame(2 * BLOCK_BYTES)
    assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES
    tier.close()


def test_victims_that_vanished_do_not_stop_eviction(tmp_path):
    root = tmp_path / "s"
    tier = DirectoryTier(root, capacity_bytes=8 * BLOCK_BYTES)
    for number in range(4):
        assert tier.write(object_name(number), frame_of(number))
    for number in range(4):
        path_of(root, number).unlink()
    assert tier.write(object_name(9), frame_of(9))
    assert tier.used_bytes == 2 * BLOCK_BYTES  # counted again
    tier.close()


def test_a_file_that_was_cut_gives_what_is_there(tmp_path):
    """The reader's check of the frame makes a miss of it; the tier must neither fail nor make bytes up."""
    root = tmp_path / "s"
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    assert tier.write(object_name(1), frame_of(1))
    for length in (5000, 4096, 100, 0):
        os.truncate(path_of(root, 1), length)
        into = empty_frame(2 * BLOCK_BYTES)
        assert tier.read(object_name(1), into) == length
        assert into[:length] == frame_of(1)[:length]
    tier.delete(object_name(1))
    tier.close()


def test_a_folder_where_a_file_should_be_is_an_error_and_nothing_else_breaks(tmp_path):
    root = tmp_path / "s"
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    path_of(root, 1).mkdir(parents=True)
    with pytest.raises(TierError, match="cannot read"):
        tier.read(object_name(1), empty_frame(BLOCK_BYTES))
    with pytest.raises(TierError, match="cannot write"):
        tier.write(object_name(1), frame_of(1))
    assert tier.used_bytes == 0
    assert list(tier.scan()) == []
    assert tier.write(object_name(2), frame_of(2))
    tier.close()


def test_names_of_another_length_are_refused(tmp_path):
    tier = DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    for call in (
        lambda: tier.write(b"short", frame_of(1)),
        lambda: tier.read(b"", empty_frame(1)),
        lambda: tier.delete(b"x" * 33),
        lambda: tier.read(object_name(1), empty_frame(1), -1),
    ):
        with pytest.raises(TierError, match=r"32 bytes|negative"):
            call()
    tier.close()
