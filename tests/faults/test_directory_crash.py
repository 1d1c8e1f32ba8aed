"""Writers are killed at random moments: nothing partial shows, nothing stays behind, and the count is exact again."""

import json
import os
import random
import shutil
import time

import pytest
from directory_writer import content
from test_directory_shared import CAPACITY, DEADLINE_S, start_writer, used_exactly

from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.temp_files import TEMP_AGE_S


def check_objects(tier):
    """Every object is whole: its length and bytes are those that belong to its name."""
    known = {object_name(number): content(number) for number in range(60)}
    into = empty_frame(16 * BLOCK_BYTES)
    for name, size in tier.scan():
        assert size == len(known[name])
        assert tier.read(name, into) == size
        assert into[:size] == known[name]


@pytest.mark.parametrize("rounds", [5, pytest.param(40, marks=pytest.mark.nightly)])
def test_killed_writers_leave_nothing_wrong(root, rounds):
    chance = random.Random(11)
    found = 0
    for seed in range(rounds):
        writer = start_writer(root, seed, 1_000_000)
        # After some number of operations, not after some time: how fast this machine is must not matter.
        assert writer.stderr.read(wanted := chance.randrange(1, 200)) == "." * wanted
        writer.kill()
        writer.communicate(timeout=DEADLINE_S)
        tier = DirectoryTier(root, capacity_bytes=CAPACITY)
        assert os.listdir(root / "drafts") == []
        assert tier.used_bytes == used_exactly(root) <= CAPACITY
        assert tier.object_count == len(list(tier.scan()))
        found += tier.object_count
        check_objects(tier)
        tier.close()
    assert found > 0


def test_a_writer_dies_beside_a_living_one(root, open_directory):
    # On a busy machine a writer that holds the lock may be without a processor for longer than the usual deadline.
    tier = open_directory(root, capacity_bytes=CAPACITY, lock_deadline_s=DEADLINE_S)
    survivor = start_writer(root, 100, 600)
    for seed in range(2):
        victim = start_writer(root, seed, 1_000_000)
        assert victim.stderr.read(1) == "."
        tier.write(object_name(seed), memoryview(content(seed)))
        victim.kill()
        victim.communicate(timeout=DEADLINE_S)
        assert tier.used_bytes <= CAPACITY
    out, err = survivor.communicate(timeout=DEADLINE_S)
    assert survivor.returncode == 0, err
    assert json.loads(out)["wrong"] == 0
    newcomer = open_directory(
        root, capacity_bytes=CAPACITY, lock_deadline_s=DEADLINE_S
    )  # not alone: what the dead left counts until it is old
    assert used_exactly(root) <= newcomer.used_bytes <= CAPACITY
    check_objects(newcomer)
    newcomer.close()
    tier.close()
    tier = open_directory(root, capacity_bytes=CAPACITY)
    assert tier.used_bytes == used_exactly(root)
    assert os.listdir(root / "drafts") == []


def test_a_count_that_is_too_high_is_mended_when_room_is_needed(root, open_directory):
    """What a kill between reserving and writing leaves behind, while another process keeps the store open."""
    keeper = open_directory(root, capacity_bytes=4 * BLOCK_BYTES)
    with keeper._cap_file.locked():
        keeper._cap_file.write(4 * BLOCK_BYTES)
    assert keeper.used_bytes == 4 * BLOCK_BYTES
    for number in range(2):
        assert keeper.write(object_name(number), frame_of(number))
    assert keeper.used_bytes == used_exactly(root) == 4 * BLOCK_BYTES
    assert keeper.object_count == 2


def test_stale_drafts_count_until_they_are_cleared(root, open_directory):
    keeper = open_directory(root, capacity_bytes=8 * BLOCK_BYTES)
    dead = root / "drafts" / f"0123456789abcdef-0-{2 * BLOCK_BYTES}"
    with keeper._cap_file.locked():
        keeper._cap_file.write(2 * BLOCK_BYTES)
        dead.write_bytes(b"x" * 100)
    os.utime(dead, (time.time() - TEMP_AGE_S - 1,) * 2)
    for number in range(3):
        assert keeper.write(object_name(number), frame_of(number))
    assert keeper.used_bytes == 8 * BLOCK_BYTES
    open_directory(root, capacity_bytes=8 * BLOCK_BYTES).close()  # not alone
    assert not dead.exists()
    assert keeper.used_bytes == used_exactly(root) == 6 * BLOCK_BYTES


def test_a_directory_that_disappears_and_comes_back_is_used_again(tmp_path, open_directory):
    """As when a disk is unmounted: errors and nothing made in its place, and afterwards everything works again."""
    from kvtier.errors import TierError

    root, away = tmp_path / "store", tmp_path / "away"
    tier = open_directory(root, capacity_bytes=CAPACITY)
    assert tier.write(object_name(1), frame_of(1))
    into = empty_frame(2 * BLOCK_BYTES)
    root.rename(away)
    with pytest.raises(TierError, match="No such file"):
        tier.write(object_name(2), frame_of(2))
    root.mkdir()  # a mount point without its disk
    with pytest.raises(TierError, match="No such file"):
        tier.write(object_name(2), frame_of(2))
    with pytest.raises(TierError, match="No such file"):
        tier.read(object_name(1), into)
    with pytest.raises(TierError, match="No such file"):
        tier.contains([object_name(2)])
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert tier.write(object_name(2), frame_of(2))
    assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES
    # And when another store has taken its place meanwhile.
    shutil.rmtree(root)
    other = open_directory(root, capacity_bytes=CAPACITY)
    assert other.write(object_name(5), frame_of(5))
    assert tier.write(object_name(6), frame_of(6))
    assert tier.used_bytes == other.used_bytes == used_exactly(root) == 4 * BLOCK_BYTES
