"""The drive is full, read-only, fails, hangs or disappears: errors and misses, never other bytes, and then it works."""

import errno
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_world import CAPACITY_BYTES, SEGMENT_BYTES, abandon, check_accounts, look, open_tier, sealed

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier import disk_pool
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.tier.disk_segment import Segment

DEADLINE_S = 30.0


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for three segments and a half."""
    where = tmp_path / "disk"
    where.mkdir()
    size = f"size={7 * SEGMENT_BYTES // 2 // 1024}k"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(where)], capture_output=True, check=False, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        pytest.skip("needs a small file system of its own: mounting a tmpfs is only for root")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=DEADLINE_S)


def write_many(tier, numbers):
    for number in numbers:
        assert tier.write(object_name(number), sealed(number))
        assert look(tier, number) == "right"


def test_a_disk_with_too_little_room_is_used_as_far_as_it_goes(small_disk):
    root = small_disk / "s"
    tier = open_tier(root)
    write_many(tier, range(60))
    assert tier.used_bytes == 3 * SEGMENT_BYTES
    check_accounts(tier, root)
    tier.close()


def test_a_full_disk_is_an_error_until_there_is_room(small_disk):
    root = small_disk / "s"
    tier = open_tier(root)
    stranger = small_disk / "stranger"
    stranger.write_bytes(bytes(3 * SEGMENT_BYTES))
    with pytest.raises(TierError, match="No space left on device"):
        tier.write(object_name(1), sealed(1))
    assert tier.used_bytes == 0
    assert list((root / "segments").iterdir()) == []
    stranger.unlink()
    write_many(tier, range(5))
    check_accounts(tier, root)
    tier.close()


def test_a_reserve_that_leaves_nothing_is_named(tmp_path):
    tier = open_tier(tmp_path / "s", reserve_bytes=1 << 60)
    with pytest.raises(TierError, match=f"No space left .* disk.reserve_bytes leaves {1 << 60} to others"):
        tier.write(object_name(1), sealed(1))
    tier.close()


def test_room_is_given_back_to_others(small_disk):
    root = small_disk / "s"
    tier = open_tier(root, reserve_bytes=SEGMENT_BYTES)
    write_many(tier, range(40))
    assert tier.used_bytes == 2 * SEGMENT_BYTES  # a third one would leave too little
    stranger = small_disk / "stranger"
    stranger.write_bytes(bytes(SEGMENT_BYTES))
    tier._pool.prepare()
    assert tier.used_bytes == SEGMENT_BYTES
    check_accounts(tier, root)
    write_many(tier, range(40, 60))
    stranger.unlink()
    write_many(tier, range(60, 80))
    assert tier.used_bytes == 2 * SEGMENT_BYTES
    check_accounts(tier, root)
    tier.close()


def test_a_disk_that_is_read_only_is_refused_and_comes_back(small_disk):
    root = small_disk / "s"
    tier = open_tier(root)
    write_many(tier, range(3))
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=DEADLINE_S)
    with pytest.raises(TierError, match="Read-only file system"):
        open_tier(root)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True, timeout=DEADLINE_S)
    tier = open_tier(root)
    assert look(tier, 1) == "right"
    tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENODEV])
@pytest.mark.parametrize("call", ["pwritev", "preadv", "fdatasync", "posix_fallocate"])
def test_a_failing_system_call_is_an_error_and_then_it_works_again(tmp_path, monkeypatch, call, number):
    root = tmp_path / "s"
    tier = open_tier(root)
    write_many(tier, range(4))

    def fail(*_arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        failures: list[str] = []
        for at in range(60):
            try:
                if tier.write(object_name(100 + at), sealed(100 + at)):
                    assert look(tier, 100 + at) == "right"
                tier.sync()
            except TierError as error:
                failures.append(str(error))
        assert all(os.strerror(number) in failure for failure in failures)
        assert failures or (call, number) in {("posix_fallocate", errno.ENOSPC), ("posix_fallocate", errno.EDQUOT)}
    write_many(tier, range(200, 230))
    tier.sync()
    check_accounts(tier, root)
    held = [at for at in range(230) if tier.contains([object_name(at)])[0]]
    abandon(tier)
    tier = open_tier(root)
    assert {look(tier, at) for at in held} == {"right"}
    check_accounts(tier, root)
    tier.close()


def test_a_directory_that_disappears_and_comes_back_is_used_again(tmp_path):
    """As when a disk is unmounted."""
    root, away = tmp_path / "store", tmp_path / "away"
    tier = open_tier(root)
    write_many(tier, range(3))
    root.rename(away)
    with pytest.raises(TierError):  # when it needs a new segment
        write_many(tier, range(100, 160))
    root.mkdir()  # a mount point without its disk
    with pytest.raises(TierError, match="is gone"):
        tier.write(object_name(50), sealed(50))
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert look(tier, 1) == "right"
    write_many(tier, range(60, 90))
    check_accounts(tier, root)
    tier.close()


def test_a_directory_that_was_replaced_is_taken_over(tmp_path):
    root, away = tmp_path / "store", tmp_path / "away"
    tier = open_tier(root)
    write_many(tier, range(3))
    root.rename(away)
    other = open_tier(root)
    write_many(other, range(10, 13))
    tier._is_suspect = True  # as an I/O error makes it
    with pytest.raises(TierError, match="in use by another process"):
        tier.read(object_name(1), empty_frame(BLOCK_BYTES))
    other.close()
    assert [look(tier, number) for number in (1, 11)] == ["absent", "right"]
    write_many(tier, range(20, 60))
    check_accounts(tier, root)
    tier.close()


def test_a_store_is_for_one_process(tmp_path):
    tier = open_tier(tmp_path / "s")
    with pytest.raises(TierError, match="in use by another process"):
        open_tier(tmp_path / "s", open_deadline_s=0.05)
    tier.close()
    open_tier(tmp_path / "s").close()


def test_other_things_are_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"precious")
    (tmp_path / "segments").mkdir()  # a name that we use, too
    segment = tmp_path / "segments" / "00000001.segment"
    segment.write_bytes(b"also precious")
    with pytest.raises(ConfigError, match=r"holds other things \('photo\.jpg', 'segments'\) and no store of ours"):
        open_tier(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.jpg", "segments"]
    assert segment.read_bytes() == b"also precious"
    (tmp_path / "photo.jpg").unlink()
    with pytest.raises(ConfigError, match=r"holds other things \('segments'\)"):
        open_tier(tmp_path)
    assert segment.read_bytes() == b"also precious"
    DirectoryTier(tmp_path / "d", capacity_bytes=1 << 20).close()
    with pytest.raises(ConfigError, match="holds other things"):
        open_tier(tmp_path / "d")
    open_tier(tmp_path / "s").close()
    with pytest.raises(ConfigError, match="no store of ours"):
        DirectoryTier(tmp_path / "s", capacity_bytes=1 << 20)


@pytest.mark.parametrize("segments", [1, 6])
def test_what_is_being_read_is_not_written_over(tmp_path, monkeypatch, segments):
    """A read hangs in the device while everything around it is given up and written anew."""
    monkeypatch.setattr(disk_pool, "LEAVE_DEADLINE_S", 0.01)
    tier = open_tier(tmp_path / "s", capacity_bytes=segments * SEGMENT_BYTES)
    assert tier.write(object_name(0), sealed(0))
    begun, go_on = threading.Event(), threading.Event()
    read = Segment._read_whole

    def slow(segment, into, offset):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(DEADLINE_S)
        return read(segment, into, offset)

    monkeypatch.setattr(Segment, "_read_whole", slow)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(look, tier, 0)
        assert begun.wait(DEADLINE_S)
        written = [tier.write(object_name(number), sealed(number)) for number in range(1, 100)]
        assert all(written) == (segments > 1)  # another segment made room, and where there is none nothing does
        go_on.set()
        assert answer.result(DEADLINE_S) == "right"
    check_accounts(tier, tmp_path / "s", segments * SEGMENT_BYTES)
    write_many(tier, range(100, 160))
    tier.close()


def test_a_write_that_hangs_holds_up_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_pool, "LEAVE_DEADLINE_S", 0.05)
    tier = open_tier(tmp_path / "s")
    write_many(tier, range(3))
    begun, go_on = threading.Event(), threading.Event()
    write = Segment._write_whole

    def slow(segment, frame, offset):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(DEADLINE_S)
        write(segment, frame, offset)

    monkeypatch.setattr(Segment, "_write_whole", slow)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(tier.write, object_name(50), sealed(50))
        assert begun.wait(DEADLINE_S)
        assert tier.contains([object_name(1), object_name(50)]) == [True, False]
        for number in range(100, 200):
            assert tier.write(object_name(number), sealed(number))
        tier.sync()
        go_on.set()
        assert answer.result(DEADLINE_S)
    assert look(tier, 50) == "right"
    tier.sync()
    abandon(tier)
    tier = open_tier(tmp_path / "s")
    assert look(tier, 50) == "right"
    check_accounts(tier, tmp_path / "s")
    tier.close()


def test_nothing_is_admitted_while_everything_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_pool, "LEAVE_DEADLINE_S", 0.05)
    tier = open_tier(tmp_path / "s", capacity_bytes=SEGMENT_BYTES)
    assert tier.write(object_name(0), sealed(0))
    (extent,) = tier._pool.find([object_name(0)])
    refused = [number for number in range(1, 30) if not tier.write(object_name(number), sealed(number))]
    assert refused
    tier._pool.unpin([extent.segment])
    write_many(tier, range(100, 130))
    tier.close()


def test_the_cap_holds_with_the_default_segments(tmp_path):
    capacity = 1 << 20
    with_default = DiskTier(tmp_path / "s", capacity_bytes=capacity, sync_interval_s=3600.0)
    for number in range(300):
        assert with_default.write(object_name(number), frame_of(number))
        assert with_default.used_bytes <= capacity
    check_accounts(with_default, tmp_path / "s", capacity)
    assert with_default.used_bytes > 0.9 * capacity
    with_default.close()
    assert CAPACITY_BYTES % SEGMENT_BYTES == 0
