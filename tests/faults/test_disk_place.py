"""The drive is full, read-only, fails, hangs or disappears: errors and misses, never other bytes, and then it works."""

import errno
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_world import CAPACITY_BYTES, SEGMENT_BYTES, abandon, check_accounts, look, open_tier, sealed
from tests.system import in_child, small_file_system, until

from kvtier.cli.main import run
from kvtier.errors import DamagedStoreError, TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import Read
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk import segment_pool
from kvtier.tier.disk.marker import MARKER_NAME
from kvtier.tier.disk.segment import Segment
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files import full_disk as effective_cap

DEADLINE_S = 30.0


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for three segments and a half."""
    with small_file_system(tmp_path / "disk", f"{7 * SEGMENT_BYTES // 2 // 1024}k") as where:
        yield where


def write_many(tier, numbers):
    for number in numbers:
        assert tier.write(object_name(number), sealed(number))
        assert look(tier, number) == "right"


def test_a_disk_with_too_little_room_is_used_as_far_as_it_goes(small_disk, open_disk):
    root = small_disk / "s"
    tier = open_disk(root)
    write_many(tier, range(60))
    assert tier.used_bytes == 3 * SEGMENT_BYTES
    check_accounts(tier, root)


def test_a_full_disk_is_an_error_until_there_is_room(small_disk, open_disk):
    root = small_disk / "s"
    tier = open_disk(root)
    stranger = small_disk / "stranger"
    stranger.write_bytes(bytes(3 * SEGMENT_BYTES))
    with pytest.raises(TierError, match="No space left on device"):
        tier.write(object_name(1), sealed(1))
    assert tier.used_bytes == 0
    assert list((root / "segments").iterdir()) == []
    stranger.unlink()
    write_many(tier, range(5))
    check_accounts(tier, root)


def test_a_quota_makes_the_cap_what_is_held_until_there_is_room(tmp_path, monkeypatch, caplog, open_disk):
    """A quota shows only when a file is made. It is logged once, and seldom tried again."""
    now_s = [0.0]
    monkeypatch.setattr(effective_cap.EffectiveCap.__init__, "__defaults__", (lambda: now_s[0],))
    caplog.set_level("INFO", "kvtier")
    tier = open_disk(tmp_path / "s")
    write_many(tier, range(60))
    allocate, asked = os.posix_fallocate, []

    def refuse(*given):
        asked.append(given)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    tier.close()
    tier = open_disk(tmp_path / "s", capacity_bytes=2 * CAPACITY_BYTES)
    used_bytes = tier.used_bytes
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    evictions = tier.evictions
    for number in range(100, 300):
        write_many(tier, [number])
    assert tier.used_bytes == tier.limit_bytes == used_bytes
    assert tier.evictions > evictions
    assert len(asked) == 1
    (said,) = [record.message for record in caplog.records if effective_cap.FULL in record.message]
    assert said.endswith(
        f"(Disk quota exceeded): the cap is {used_bytes} of {2 * CAPACITY_BYTES} bytes until there is room"
    )
    assert tier._current_status(is_open=True).limit_bytes == used_bytes
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    now_s[0] += effective_cap.QUIET_S + effective_cap.REGROWTH_S * SEGMENT_BYTES / (2 * CAPACITY_BYTES)
    write_many(tier, range(300, 400))
    assert tier.used_bytes == used_bytes + SEGMENT_BYTES, "as far as the cap has grown"
    now_s[0] += effective_cap.REGROWTH_S
    write_many(tier, range(400, 600))
    assert tier.used_bytes > used_bytes + SEGMENT_BYTES
    assert caplog.records[-1].message.endswith("has room again for 3145728 bytes")
    check_accounts(tier, tmp_path / "s", 2 * CAPACITY_BYTES)


def test_a_reserve_that_leaves_nothing_is_named(tmp_path, open_disk):
    tier = open_disk(tmp_path / "s", reserve_bytes=1 << 60)
    with pytest.raises(TierError, match=f"No space left .* disk.reserve_bytes keeps {1 << 60}"):
        tier.write(object_name(1), sealed(1))


def test_room_is_given_back_to_others(small_disk, open_disk):
    root = small_disk / "s"
    tier = open_disk(root, reserve_bytes=SEGMENT_BYTES)
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


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENODEV])
@pytest.mark.parametrize("call", ["pwritev", "preadv", "fdatasync", "posix_fallocate"])
def test_a_failing_system_call_is_an_error_and_then_it_works_again(root, monkeypatch, call, number, open_disk):
    tier = open_disk(root)
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
    tier = open_disk(root)
    assert {look(tier, at) for at in held} == {"right"}
    check_accounts(tier, root)


def test_a_directory_that_was_replaced_is_taken_over(tmp_path, open_disk):
    root, away = tmp_path / "store", tmp_path / "away"
    tier = open_disk(root)
    write_many(tier, range(3))
    root.rename(away)
    other = open_disk(root)
    write_many(other, range(10, 13))
    tier._is_suspect = True  # as an I/O error makes it
    with pytest.raises(TierError, match="in use by another process"):
        tier.read(object_name(1), empty_frame(BLOCK_BYTES))
    other.close()
    assert [look(tier, number) for number in (1, 11)] == ["absent", "right"]
    write_many(tier, range(20, 60))
    check_accounts(tier, root)


def test_other_things_are_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"precious")
    (tmp_path / "segments").mkdir()  # a name that we use, too
    segment = tmp_path / "segments" / "00000001.segment"
    segment.write_bytes(b"also precious")
    with pytest.raises(DamagedStoreError, match=r"holds other files \('photo\.jpg', 'segments'\) and no kvtier store"):
        open_tier(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.jpg", "segments"]
    assert segment.read_bytes() == b"also precious"
    (tmp_path / "photo.jpg").unlink()
    with pytest.raises(DamagedStoreError, match=r"holds other files \('segments'\)"):
        open_tier(tmp_path)
    assert segment.read_bytes() == b"also precious"
    DirectoryTier(tmp_path / "d", capacity_bytes=1 << 20).close()
    with pytest.raises(DamagedStoreError, match="holds other files"):
        open_tier(tmp_path / "d")
    open_tier(tmp_path / "s").close()
    with pytest.raises(DamagedStoreError, match="no kvtier store"):
        DirectoryTier(tmp_path / "s", capacity_bytes=1 << 20)


@pytest.mark.parametrize("segments", [1, 6])
def test_what_is_being_read_is_not_written_over(tmp_path, monkeypatch, segments, open_disk):
    """A read hangs in the device while everything around it is given up and written anew."""
    monkeypatch.setattr(segment_pool, "LEAVE_DEADLINE_S", 0.01)
    tier = open_disk(tmp_path / "s", capacity_bytes=segments * SEGMENT_BYTES)
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


def test_a_write_that_hangs_holds_up_nobody_else(tmp_path, monkeypatch, open_disk):
    monkeypatch.setattr(segment_pool, "LEAVE_DEADLINE_S", 0.05)
    tier = open_disk(tmp_path / "s")
    write_many(tier, range(3))
    begun, go_on = threading.Event(), threading.Event()
    write = Segment._write_file

    def slow(segment, frame, offset):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(DEADLINE_S)
        write(segment, frame, offset)

    monkeypatch.setattr(Segment, "_write_file", slow)
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
    tier = open_disk(tmp_path / "s")
    assert look(tier, 50) == "right"
    check_accounts(tier, tmp_path / "s")


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


# ---- what lies below a store is opened as what it should be, or not at all -------------------------------------------


def precious(root):
    """A directory that is not ours, with names that we use, and its content."""
    (root / "segments").mkdir(parents=True)
    for name in ("photo.jpg", "00000000.segment", "segments/00000001.segment", "kvtier-status.json"):
        (root / name).write_bytes(name.encode() * 1000)
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_no_link_below_a_store_is_followed(tmp_path):
    """Neither when it is opened nor by the commands that look into it, verify it or remove it."""
    elsewhere = tmp_path / "elsewhere"
    before = precious(elsewhere)
    links = {
        "segments": elsewhere,
        "segments/00000000.segment": elsewhere / "00000000.segment",
        "segments/00000007.segment": elsewhere / "photo.jpg",
        "kvtier-status.json": elsewhere / "kvtier-status.json",
    }
    commands = ("ls", "stat", "health", "verify", "verify --repair", "purge --yes")
    for number, (name, target) in enumerate(links.items()):
        root = tmp_path / f"store{number}"
        tier = open_tier(root)
        write_many(tier, range(3))
        tier.close()
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        for command in commands[:-1]:
            assert run(["inspect", *command.split(), str(root)]) in {0, 1}, (name, command)
        tier = open_tier(root)
        write_many(tier, range(10, 60))
        tier._write_status(is_open=False)
        assert tier.used_bytes <= CAPACITY_BYTES
        tier.close()
        assert run(["inspect", *commands[-1].split(), str(root)]) == 0
        assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before, name


@pytest.mark.parametrize("name", ["segments/00000000.segment", "segments/00000007.segment", MARKER_NAME])
@pytest.mark.parametrize("is_ours", [False, True])
def test_a_file_that_has_another_name_is_not_written_to(tmp_path, name, is_ours):
    """Neither a file from outside that was linked into the store, nor one of ours in a backup of links."""
    root, outside = tmp_path / "store", tmp_path / "precious"
    tier = open_tier(root)
    write_many(tier, range(3))
    tier.close()
    if is_ours:
        (root / "segments/00000007.segment").write_bytes((root / "segments/00000000.segment").read_bytes())
        os.link(root / name, outside)
    else:
        outside.write_bytes(b"precious".ljust(SEGMENT_BYTES if name != MARKER_NAME else 100, b"!"))
        (root / name).unlink(missing_ok=True)
        os.link(outside, root / name)
    before = outside.read_bytes()
    for segment_bytes in (SEGMENT_BYTES, 2 * SEGMENT_BYTES):
        try:
            tier = open_tier(root, segment_bytes=segment_bytes)
        except TierError as error:
            if name != MARKER_NAME or not any(
                it in str(error) for it in ("another hard link", "is not a valid marker")
            ):
                raise
            continue
        write_many(tier, range(10, 200))
        tier.close()
        assert outside.read_bytes() == before
    assert outside.read_bytes() == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_segment_is_neither_opened_nor_removed(root, make):
    tier = open_tier(root)
    write_many(tier, range(3))
    tier.close()
    for number in (1, 3, 4):
        make(root / "segments" / f"{number:08d}.segment")
    for start in (100, 200):
        tier = open_tier(root)
        write_many(tier, range(start, start + 60))
        used = sum(path.stat().st_blocks * 512 for path in (root / "segments").iterdir() if path.is_file())
        assert tier.used_bytes == used <= CAPACITY_BYTES
        tier.close()
    assert not any((root / "segments" / f"{number:08d}.segment").is_file() for number in (1, 3, 4))


@pytest.mark.parametrize("mask", [0, 0o777])
def test_whatever_the_umask_only_the_owner_may_enter(tmp_path, mask):
    root = tmp_path / "above" / "rank-0"
    before = os.umask(mask)
    try:
        tier = open_tier(root)
        write_many(tier, range(3))
        tier._write_status(is_open=False)
        tier.close()
    finally:
        os.umask(before)
    paths = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert len(paths) == 6
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths} == {(True, 0o700), (False, 0o600)}


# ---- what is removed or replaced under a store in use ----------------------------------------------------------------


def no_segments(root):
    shutil.rmtree(root / "segments")


def a_file_for_segments(root):
    shutil.rmtree(root / "segments")
    (root / "segments").write_bytes(b"stray")


def a_link_for_segments(root):
    shutil.rmtree(root / "segments")
    (root / "segments").symlink_to(root.parent)


def nothing_left(root):
    no_segments(root)
    for path in root.iterdir():
        path.unlink()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(
    "break_it",
    [
        no_segments, a_file_for_segments, a_link_for_segments, nothing_left,
    ],
)  # fmt: skip
def test_what_is_removed_under_a_store_in_use_is_made_anew(root, break_it, is_full, open_disk):
    """What was removed is forgotten; what is written afterwards is there, and is found by the next process, too."""
    tier = open_disk(root)
    write_many(tier, range(60 if is_full else 20))
    tier.sync()
    break_it(root)
    tier._upkeep()  # as its keeper does once in an interval
    assert {look(tier, number) for number in range(60)} <= {"right", "absent"}
    for number in range(100, 110):
        assert tier.write(object_name(number), sealed(number))
    tier._upkeep()
    assert [look(tier, number) for number in range(100, 110)] == ["right"] * 10
    write_many(tier, range(110, 160))
    held = [number for number in range(160) if look(tier, number) == "right"]
    assert tier.used_bytes <= CAPACITY_BYTES
    tier.close()
    tier = open_disk(root)
    assert {look(tier, number) for number in held} == {"right"}
    write_many(tier, range(200, 230))


def test_the_keeper_notices_what_was_removed(tmp_path, root, open_disk):
    tier = open_disk(root, sync_interval_s=0.01)
    write_many(tier, range(3))
    shutil.rmtree(root / "segments")
    until(lambda: not tier.object_count)
    write_many(tier, range(3))
    check_accounts(tier, root)
    root.rename(tmp_path / "away")
    until(lambda: tier._is_suspect)
    with pytest.raises(TierError, match="is gone"):
        tier.contains([object_name(1)])
    (tmp_path / "away").rename(root)
    assert look(tier, 1) == "right"


def test_a_child_can_have_a_store_of_its_own(tmp_path, open_disk):
    """Its thread has a queue of asynchronous reads that it inherited and cannot use."""
    tier = open_disk(tmp_path / "store")
    write_many(tier, range(8))
    reads = [Read(object_name(number), empty_frame(sealed(number).nbytes)) for number in (0, 3, 7)]
    assert None not in tier.read_many(reads)

    def act():
        own = open_disk(tmp_path / "own")
        write_many(own, range(8))
        assert own.read_many(reads) == [sealed(number).nbytes for number in (0, 3, 7)]
        own.close()

    assert in_child(act) == 0


def test_no_descriptor_is_left_to_a_program_that_is_started(tmp_path, open_disk):
    tier = open_disk(tmp_path / "store")
    write_many(tier, range(30))
    told = subprocess.run(
        ["sh", "-c", "ls -l /proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False, timeout=60
    )
    assert str(tmp_path) not in told.stdout
