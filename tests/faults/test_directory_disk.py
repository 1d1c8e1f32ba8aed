"""A disk that is full, read-only or loses files: errors and misses, never other bytes, and then it works again."""

import os

import pytest
from tests.rig import CHUNK_TOKENS, Engine, load_places, loaded, looked_up, opened, places_of, prefix_of, stored
from tests.system import small_file_system, until

from kvtier.errors import ConfigError, TierError
from kvtier.observe import metric_definitions as table
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files import full_disk as effective_cap
from kvtier.tier.files.full_disk import FULL

CAPACITY = 64 * BLOCK_BYTES


@pytest.fixture
def small_disk(tmp_path):
    with small_file_system(tmp_path / "disk", "256k") as where:
        yield where


def path_of(root, number):
    spelled = object_name(number).hex()
    return root / "objects" / spelled[:2] / spelled


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_full_disk_is_an_error_and_room_is_given_back(small_disk, direct_io, open_directory):
    tier = open_directory(small_disk / "s", capacity_bytes=1 << 30, direct_io=direct_io)
    written = 0
    while written < 1000 and tier.used_bytes < 200 * 1024:
        assert tier.write(object_name(written), frame_of(written, 4 * BLOCK_BYTES))
        written += 1
    with pytest.raises(TierError, match="No space left on device"):
        tier.write(object_name(written), frame_of(written, 20 * BLOCK_BYTES))
    assert written > 3
    assert tier.used_bytes == 4 * written * BLOCK_BYTES
    assert os.listdir(small_disk / "s" / "drafts") == []
    assert tier.contains([object_name(written)]) == [False]
    into = empty_frame(4 * BLOCK_BYTES)
    for number in range(written):
        assert tier.read(object_name(number), into) == 4 * BLOCK_BYTES
        assert into == frame_of(number, 4 * BLOCK_BYTES)
    tier.delete(object_name(0))
    assert tier.write(object_name(written), frame_of(written, 4 * BLOCK_BYTES))  # it works again


def fill(tier, size_bytes):
    """Write objects until one finds no room; how many are held, and what is raised."""
    for number in range(1000):
        try:
            assert tier.write(object_name(number), frame_of(number, size_bytes))
        except TierError as error:
            return number, str(error)
    raise AssertionError("the disk is not full")


def grow(path, size_bytes):
    """Another program's file grows; whether there was room."""
    with open(path, "ab", buffering=0) as file:
        try:
            return file.write(bytes(size_bytes)) == size_bytes
        except OSError:
            return False


def held(tier, numbers):
    into = empty_frame(8 * BLOCK_BYTES)
    found = [number for number in numbers if tier.read(object_name(number), into) is not None]
    assert all(tier.read(object_name(number), into) and into[:64] == frame_of(number)[:64] for number in found)
    return found


def test_another_programs_file_that_grows_does_not_empty_the_cache(small_disk, monkeypatch, caplog, open_directory):
    """What is held is the cap; a failed write costs one object at most; with room again the cap grows, slowly."""
    now_s = [0.0]
    monkeypatch.setattr(effective_cap.EffectiveCap.__init__, "__defaults__", (lambda: now_s[0],))
    caplog.set_level("INFO", "kvtier")
    tier = open_directory(small_disk / "s", capacity_bytes=4 << 20)
    foreign = small_disk / "foreign"
    assert grow(foreign, 64 << 10)
    count, trouble = fill(tier, 2 * BLOCK_BYTES)
    assert trouble.endswith(f"No space left on device; {FULL}"), "what the mover does not log again"
    assert tier.limit_bytes == tier.used_bytes == count * 2 * BLOCK_BYTES
    failures = 1
    for step in range(count, count + 200):
        grow(foreign, 4096)
        before = len(list(tier.scan()))
        try:
            assert tier.write(object_name(step), frame_of(step, 2 * BLOCK_BYTES))
            assert len(list(tier.scan())) == before
        except TierError:
            failures += 1
            assert len(list(tier.scan())) >= before - 1
        assert tier.used_bytes <= tier.limit_bytes
        assert len(held(tier, range(step + 1))) >= count - failures
    assert failures <= 4
    (said,) = [record.message for record in caplog.records if FULL in record.message]
    assert said.endswith(f"(No space left on device): the cap is {count * 8192} of 4194304 bytes until there is room")
    # A larger object waits until the room of several has come together, one for each write.
    before = len(list(tier.scan()))
    for refused in range(1, 10):
        if tier.write(object_name(5000), frame_of(5000, 5 * BLOCK_BYTES)):
            break
        assert len(list(tier.scan())) == before - refused
    assert refused == 3
    foreign.unlink()
    limit_bytes = tier.limit_bytes
    now_s[0] += effective_cap.QUIET_S
    assert tier.limit_bytes == limit_bytes
    now_s[0] += effective_cap.REGROWTH_S / 100
    assert 0 < tier.limit_bytes - limit_bytes <= (4 << 20) // 100
    before = len(list(tier.scan()))
    for number in range(6000, 6004):
        assert tier.write(object_name(number), frame_of(number))
    assert len(list(tier.scan())) == before + 4, "nothing was evicted"
    now_s[0] += effective_cap.REGROWTH_S
    assert tier.limit_bytes == 4 << 20
    assert caplog.records[-1].message == "tier directory: the file system has room again for 4194304 bytes"


def test_a_process_that_found_a_full_disk_evicts_no_more_than_it_writes(small_disk, open_directory):
    """Each process of a shared store has a cap of its own; what the others write since is no reason to evict it."""
    one = open_directory(small_disk / "s", capacity_bytes=4 << 20)
    other = open_directory(small_disk / "s", capacity_bytes=4 << 20)
    foreign = small_disk / "foreign"
    assert grow(foreign, 128 << 10)
    fill(one, 2 * BLOCK_BYTES)
    limit_bytes = one.limit_bytes
    foreign.unlink()
    for number in range(100, 110):
        assert other.write(object_name(number), frame_of(number, 2 * BLOCK_BYTES))
    assert one.used_bytes > one.limit_bytes == limit_bytes
    assert other.limit_bytes == 4 << 20
    before = len(list(one.scan()))
    assert one.write(object_name(200), frame_of(200, 2 * BLOCK_BYTES))
    assert len(list(one.scan())) == before


def test_a_full_disk_leaves_hits_as_they_are(small_disk):
    engine = Engine(64)
    prompts = [prefix_of(2, seed=seed) for seed in range(30)]
    session = opened(small_disk / "s", engine, host_chunks=16, failures=2, retry_s=60.0)
    try:
        for number, prompt in enumerate(prompts):
            stored(session.session, f"a{number}", prompt, places_of(range(2)))
            assert grow(small_disk / "foreign", 4096) or number > 3
        held_of = [looked_up(session.session, f"b{number}", prompt).tokens for number, prompt in enumerate(prompts)]
        assert 3 <= sum(tokens == 2 * CHUNK_TOKENS for tokens in held_of) < len(prompts)
        assert session.metrics.get(table.TIER_UP, tier="directory", way="read") == 1.0
        until(lambda: (session.metrics.get(table.CAPACITY_BYTES, place="directory") or 1 << 40) < 1 << 20)
        intact = [at for at, tokens in enumerate(held_of) if tokens == 2 * CHUNK_TOKENS][:3]
        for at in intact:
            done = loaded(session.session, f"b{at}", prompts[at], 2 * CHUNK_TOKENS, load_places(2 * CHUNK_TOKENS))
            assert done.tokens == 2 * CHUNK_TOKENS
    finally:
        session.session.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_vanishes_is_a_miss(root, open_directory):
    tier = open_directory(root, capacity_bytes=CAPACITY, shared=False)
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


def test_victims_that_vanished_do_not_stop_eviction(root, open_directory):
    tier = open_directory(root, capacity_bytes=8 * BLOCK_BYTES)
    for number in range(4):
        assert tier.write(object_name(number), frame_of(number))
    for number in range(4):
        path_of(root, number).unlink()
    assert tier.write(object_name(9), frame_of(9))
    assert tier.used_bytes == 2 * BLOCK_BYTES  # counted again


def test_a_file_that_was_cut_gives_what_is_there(root, open_directory):
    """The reader's check of the frame makes a miss of it; the tier must neither fail nor make bytes up."""
    tier = open_directory(root, capacity_bytes=CAPACITY)
    assert tier.write(object_name(1), frame_of(1))
    for length in (5000, 4096, 100, 0):
        os.truncate(path_of(root, 1), length)
        into = empty_frame(2 * BLOCK_BYTES)
        assert tier.read(object_name(1), into) == length
        assert into[:length] == frame_of(1)[:length]
    tier.delete(object_name(1))
