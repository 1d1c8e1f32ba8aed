"""Writers are killed at random moments; files are damaged, cut off, stale or of another format: misses, never lies."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk_world import (
    CAPACITY_BYTES,
    SEGMENT_BYTES,
    abandon,
    check_accounts,
    copy_store,
    look,
    open_tier,
    sealed,
)

from kvtier.testing.tier import empty_frame, object_name
from kvtier.tier.disk_format import BLOCK_BYTES

NAMES = 60
ROUNDS = 3
ROOMY_BYTES = 40 * SEGMENT_BYTES
"""Nothing is ever given up in it, so that everything synced must be found."""
DEADLINE_S = 30.0
WRITER = Path(__file__).with_name("disk_writer.py")


def seen(tier):
    return {number: look(tier, number) for number in range(NAMES)}


def fill(root, count=NAMES):
    tier = open_tier(root)
    for number in range(count):
        assert tier.write(object_name(number), sealed(number))
    held = {number for number, what in seen(tier).items() if what == "right"}
    tier.close()
    return held


def kill_rounds(root, rounds, capacity_bytes):
    """Kill writers on one store again and again; how many objects were found, and how many of them were promised."""
    chance = random.Random(5)
    found = promised = 0
    for seed in range(rounds):
        command = [sys.executable, WRITER, root, str(capacity_bytes), str(seed)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # After some lines, not after some time: how fast this machine is must not matter. At first nothing is held.
        lines = [""]
        while lines[-1] in {"", "ready", "[]"} and writer.poll() is None:
            lines.append(writer.stdout.readline().strip())
        lines += [writer.stdout.readline().strip() for _ in range(chance.randrange(12))]
        writer.kill()
        out, _ = writer.communicate(timeout=DEADLINE_S)
        lines += out.strip().split("\n")
        assert "wrong" not in lines
        tier = open_tier(root, capacity_bytes)
        check_accounts(tier, root, capacity_bytes)
        after = seen(tier)
        assert set(after.values()) <= {"right", "absent"}  # the data came before the index, and the machine lived on
        synced = [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]")]
        if synced and capacity_bytes == ROOMY_BYTES:
            assert [after[number] for number in synced[-1]] == ["right"] * len(synced[-1])
            promised += len(synced[-1])
        found += list(after.values()).count("right")
        abandon(tier)
        if chance.random() < 0.3:
            shutil.rmtree(root)
    return found, promised


@pytest.mark.parametrize("capacity_bytes", [CAPACITY_BYTES, ROOMY_BYTES])
def test_killed_writers_leave_only_what_is_right(tmp_path, capacity_bytes):
    found, promised = kill_rounds(tmp_path / "store", ROUNDS, capacity_bytes)
    assert found > ROUNDS
    assert (promised > 0) == (capacity_bytes == ROOMY_BYTES)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capacity_bytes", [CAPACITY_BYTES, ROOMY_BYTES])
def test_killed_writers_leave_only_what_is_right_hundreds_of_times(tmp_path, capacity_bytes):
    assert kill_rounds(tmp_path / "store", 250, capacity_bytes)[0] > 250


def test_what_was_synced_is_found_after_a_kill(tmp_path):
    """With room for everything, so that nothing is given up."""
    tier = open_tier(tmp_path / "store", capacity_bytes=ROOMY_BYTES)
    for number in range(NAMES):
        assert tier.write(object_name(number), sealed(number))
        if number == 40:
            tier.sync()
    abandon(tier)
    tier = open_tier(tmp_path / "store", capacity_bytes=ROOMY_BYTES)
    assert [look(tier, number) for number in range(NAMES)] == ["right"] * 41 + ["absent"] * (NAMES - 41)
    check_accounts(tier, tmp_path / "store", ROOMY_BYTES)
    tier.close()


def test_a_closed_store_is_found_again_whole(tmp_path):
    held = fill(tmp_path / "store")
    assert len(held) > 15
    for _ in range(3):
        tier = open_tier(tmp_path / "store")
        assert {number for number, what in seen(tier).items() if what == "right"} == held
        check_accounts(tier, tmp_path / "store")
        tier.close()


def test_a_deleted_object_does_not_come_back(tmp_path):
    tier = open_tier(tmp_path / "store")
    for number in range(6):
        assert tier.write(object_name(number), sealed(number))
    tier.delete(object_name(1))  # its index is not written yet
    tier.sync()
    tier.delete(object_name(2))  # and here it is
    abandon(tier)
    tier = open_tier(tmp_path / "store")
    assert [look(tier, number) for number in range(6)] == ["right", "absent", "absent", "right", "right", "right"]
    assert tier.write(object_name(2), sealed(2))
    tier.close()
    tier = open_tier(tmp_path / "store")
    assert look(tier, 2) == "right"
    tier.close()


def test_flipped_bits_are_refused_and_no_more_than_what_they_hit(tmp_path):
    root = tmp_path / "store"
    held = fill(root)
    chance = random.Random(2)
    refused = absent = 0
    for round_number in range(24):
        place = tmp_path / f"flipped{round_number}"
        copy_store(root, place)
        file = chance.choice(sorted((place / "segments").iterdir()))
        with open(file, "r+b") as target:
            at = chance.choice([chance.randrange(SEGMENT_BYTES), SEGMENT_BYTES - 1 - chance.randrange(2 * BLOCK_BYTES)])
            target.seek(at)
            byte = target.read(1)[0]
            target.seek(at)
            target.write(bytes([byte ^ 1 << chance.randrange(8)]))
        tier = open_tier(place)
        check_accounts(tier, place)
        after = {number: what for number, what in seen(tier).items() if number in held}
        assert "wrong" not in after.values()
        refused += list(after.values()).count("refused")
        absent += list(after.values()).count("absent")
        assert list(after.values()).count("refused") <= 1
        abandon(tier)
        shutil.rmtree(place)
    assert refused > 2
    assert absent > 2


def test_segments_of_the_past_give_what_belongs_to_their_names(tmp_path):
    """As when a disk's snapshot is mixed with its present: stale files, each sound by itself."""
    root, past = tmp_path / "store", tmp_path / "past"
    fill(root)
    copy_store(root, past)
    tier = open_tier(root)
    for number in range(100, 130):
        assert tier.write(object_name(number), sealed(number))
    tier.close()
    for at, file in enumerate(sorted((root / "segments").iterdir())):
        if at % 2:
            shutil.copy(past / "segments" / file.name, file)
    tier = open_tier(root)
    check_accounts(tier, root)
    assert set(seen(tier).values()) <= {"right", "absent"}
    abandon(tier)
    # A header of the past over the frames of the present: names and places that no longer fit.
    for file in (root / "segments").iterdir():
        with open(file, "r+b") as target:
            target.write((past / "segments" / file.name).read_bytes()[:BLOCK_BYTES])
            target.seek(SEGMENT_BYTES - BLOCK_BYTES)
            target.write((past / "segments" / file.name).read_bytes()[-BLOCK_BYTES:])
    tier = open_tier(root)
    check_accounts(tier, root)
    after = [look(tier, number) for number in range(130)]
    assert "wrong" not in after
    assert "refused" in after
    abandon(tier)


def test_index_blocks_of_an_earlier_use_of_the_segment_do_not_count(tmp_path):
    tier = open_tier(tmp_path / "store", capacity_bytes=SEGMENT_BYTES)
    for number in range(3):
        assert tier.write(object_name(number), sealed(number))
    tier.sync()
    segment = tier._pool._filling
    segment.begin(tier._pool._store_id, segment.generation + 1)
    abandon(tier)
    tier = open_tier(tmp_path / "store", capacity_bytes=SEGMENT_BYTES)
    assert tier.object_count == 0
    tier.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda block: b"\0" * 8 + block[8:], "wrong magic"),
        (lambda block: block[:8] + b"\x02" + block[9:], "unknown version 2"),
        (lambda block: block[:100] + b"\x01" + block[101:], "checksum does not match"),
    ],
)
def test_segments_of_a_foreign_format_are_empty_with_a_message(tmp_path, caplog, damage, message):
    root = tmp_path / "store"
    fill(root)
    for file in (root / "segments").iterdir():
        with open(file, "r+b") as target:
            block = target.read(BLOCK_BYTES)
            target.seek(0)
            target.write(damage(block))
    with caplog.at_level(logging.WARNING):
        tier = open_tier(root)
    assert [record.message for record in caplog.records if message in record.message]
    assert tier.object_count == 0
    check_accounts(tier, root)
    assert tier.write(object_name(1), sealed(1))
    assert look(tier, 1) == "right"
    tier.close()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "junk", '{"version": 99, "store_id": "00", "segment_bytes": 1}'])
def test_a_marker_of_a_foreign_format_is_an_empty_store(tmp_path, text):
    root = tmp_path / "store"
    fill(root)
    (root / "kvtier-disk.json").write_text(text)
    tier = open_tier(root)
    assert tier.object_count == 0
    assert tier.write(object_name(1), sealed(1))
    tier.close()
    tier = open_tier(root)
    assert look(tier, 1) == "right"
    check_accounts(tier, root)
    tier.close()


def test_a_file_that_is_cut_off_while_it_is_used_is_a_miss(tmp_path):
    tier = open_tier(tmp_path / "store")
    for number in range(3):
        assert tier.write(object_name(number), sealed(number))
    os.truncate(tmp_path / "store" / "segments" / "00000000.segment", 2 * BLOCK_BYTES)
    assert [look(tier, number) for number in range(3)] == ["absent"] * 3
    assert tier.read(object_name(0), empty_frame(BLOCK_BYTES)) is None
    abandon(tier)
    tier = open_tier(tmp_path / "store")  # a segment of another length is none
    assert tier.object_count == 0
    assert tier.write(object_name(0), sealed(0))
    check_accounts(tier, tmp_path / "store")
    tier.close()


def test_a_lower_cap_gives_segments_back_and_a_higher_one_keeps_all(tmp_path):
    held = fill(tmp_path / "store")
    tier = open_tier(tmp_path / "store", capacity_bytes=3 * SEGMENT_BYTES)
    check_accounts(tier, tmp_path / "store", 3 * SEGMENT_BYTES)
    kept = {number for number, what in seen(tier).items() if what == "right"}
    assert kept
    assert kept < held
    tier.close()
    tier = open_tier(tmp_path / "store", capacity_bytes=2 * CAPACITY_BYTES)
    assert {number for number, what in seen(tier).items() if what == "right"} == kept
    tier.close()
    tier = open_tier(tmp_path / "store", segment_bytes=2 * SEGMENT_BYTES)
    assert tier.object_count == 0
    assert tier.write(object_name(1), sealed(1))
    check_accounts(tier, tmp_path / "store")
    tier.close()


def test_damaged_places_in_an_index_are_left_out(tmp_path):
    """Entries that lie outside of their segment: a sound checksum says only that somebody wrote it."""
    tier = open_tier(tmp_path / "store")
    assert tier.write(object_name(1), sealed(1))
    segment = tier._pool._filling
    segment.pending[object_name(2)] = (0, 4096)
    segment.pending[object_name(3)] = (SEGMENT_BYTES // BLOCK_BYTES - 1, 4096)
    segment.pending[object_name(4)] = (1 << 31, 1 << 31)
    tier.sync()
    abandon(tier)
    tier = open_tier(tmp_path / "store")
    assert [name for name, _ in tier.scan()] == [object_name(1)]
    tier.close()
