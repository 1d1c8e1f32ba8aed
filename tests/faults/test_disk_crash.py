"""Writers are killed at random moments; files are damaged, cut off, stale or of another format: misses, never lies."""

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
    write_all,
)
from tests.system import snapshot, until

from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.disk.format import BLOCK_BYTES, Header, pack_header
from kvtier.tier.disk.marker import MARKER_NAME, DiskMarker, parse_marker, repair_marker
from kvtier.tier.disk.status import STATUS_NAME, read_status

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


def test_what_was_synced_is_found_after_a_kill(tmp_path, open_disk):
    """With room for everything, so that nothing is given up."""
    tier = open_disk(tmp_path / "store", capacity_bytes=ROOMY_BYTES)
    for number in range(NAMES):
        assert tier.write(object_name(number), sealed(number))
        if number == 40:
            tier.sync()
    abandon(tier)
    tier = open_disk(tmp_path / "store", capacity_bytes=ROOMY_BYTES)
    assert [look(tier, number) for number in range(NAMES)] == ["right"] * 41 + ["absent"] * (NAMES - 41)
    check_accounts(tier, tmp_path / "store", ROOMY_BYTES)


def test_a_closed_store_is_found_again_whole(tmp_path):
    held = fill(tmp_path / "store")
    assert len(held) > 15
    for _ in range(3):
        tier = open_tier(tmp_path / "store")
        assert {number for number, what in seen(tier).items() if what == "right"} == held
        check_accounts(tier, tmp_path / "store")
        tier.close()


def test_a_deleted_object_does_not_come_back(tmp_path, open_disk):
    tier = open_disk(tmp_path / "store")
    for number in range(6):
        assert tier.write(object_name(number), sealed(number))
    tier.delete(object_name(1))  # its index is not written yet
    tier.sync()
    tier.delete(object_name(2))  # and here it is
    abandon(tier)
    tier = open_disk(tmp_path / "store")
    assert [look(tier, number) for number in range(6)] == ["right", "absent", "absent", "right", "right", "right"]
    assert tier.write(object_name(2), sealed(2))
    tier.close()
    tier = open_disk(tmp_path / "store")
    assert look(tier, 2) == "right"


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("is_synced_between", [False, True])
def test_a_copy_that_is_written_while_a_drop_of_the_former_is_under_way_stays(
    root, is_indexed, is_synced_between, open_disk
):
    """Both lie in one segment: the drop takes back the entry of the copy that it is about."""
    tier = open_disk(root)
    write_all(tier, range(3))
    if is_indexed:
        tier.sync()
    with ThreadPoolExecutor(1) as thread:
        with tier._pool._syncing():
            drop = thread.submit(tier.delete, object_name(1))
            until(lambda: tier.contains([object_name(1)]) == [False])
            assert tier.write(object_name(1), sealed(1))
            if is_synced_between:
                tier._pool._sync_one(tier._pool._filling)
        drop.result(DEADLINE_S)
    assert look(tier, 1) == "right"
    tier.sync()
    abandon(tier)
    tier = open_disk(root)
    assert look(tier, 1) == "right"


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


def test_index_blocks_of_an_earlier_use_of_the_segment_do_not_count(tmp_path, open_disk):
    tier = open_disk(tmp_path / "store", capacity_bytes=SEGMENT_BYTES)
    for number in range(3):
        assert tier.write(object_name(number), sealed(number))
    tier.sync()
    segment = tier._pool._filling
    segment.begin(tier._pool._store_id, segment.generation + 1)
    abandon(tier)
    tier = open_disk(tmp_path / "store", capacity_bytes=SEGMENT_BYTES)
    assert tier.object_count == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda block: b"\0" * 8 + block[8:], "wrong magic"),
        (lambda block: block[:8] + b"\x02" + block[9:], "version 2, newer than"),
        (lambda block: block[:100] + b"\x01" + block[101:], "checksum does not match"),
    ],
)
def test_segments_of_a_foreign_format_are_empty_with_a_message(root, caplog, damage, message, open_disk):
    fill(root)
    for file in (root / "segments").iterdir():
        with open(file, "r+b") as target:
            block = target.read(BLOCK_BYTES)
            target.seek(0)
            target.write(damage(block))
    with caplog.at_level(logging.WARNING):
        tier = open_disk(root)
    assert [record.message for record in caplog.records if message in record.message]
    assert tier.object_count == 0
    check_accounts(tier, root)
    assert tier.write(object_name(1), sealed(1))
    assert look(tier, 1) == "right"


GARBAGE = {
    "empty": b"",
    "no members": b"{}",
    "a list": b"[1]",
    "text": b"junk",
    "deep": b"[" * 4096,
    "long": b"1" * 100_000,
    "zeros": bytes(300),
    "no text": b"\xff\xfe\x00",
    "no checksum": b'{"version": 1, "store_id": "00", "segment_bytes": 1}',
    "sizes of 10^18": b'{"version": 1, "store_id": "%s", "segment_bytes": %d}' % (b"0" * 32, 10**18),
}


def works_and_goes_on(root, held, **settings):
    """The store opens with at least `held`, takes an object, gives it back, and so do two more processes."""
    for number in (1000, 1001, 1002):
        tier = open_tier(root, **settings)
        assert {at for at in held if look(tier, at) == "right"} == held
        assert tier._pool.files.segment_bytes == SEGMENT_BYTES
        assert tier.write(object_name(number), sealed(number))
        assert [look(tier, at) for at in range(1000, number + 1)] == ["right"] * (number - 999)
        check_accounts(tier, root, settings.get("capacity_bytes", CAPACITY_BYTES))
        tier.close()


def small_store(root):
    """A store of three objects, the numbers of which it gives."""
    tier = open_tier(root)
    write_all(tier, range(3))
    tier.close()
    return {0, 1, 2}


def mended(root):
    """The store is refused and stays as it is until it is repaired."""
    before = snapshot(root)
    with pytest.raises(DamagedStoreError, match="kvtier inspect repair"):
        open_tier(root)
    assert snapshot(root) == before
    assert len(repair_marker(root)) == 1


def parsed(content):
    """The marker, or why there is none."""
    try:
        return parse_marker(content, MARKER_NAME) or ""
    except (ValueError, LookupError, TypeError) as error:
        return repr(error)


def flipped(content, bits):
    """`content` with one bit changed, for each of `bits`."""
    for at in bits:
        other = bytearray(content)
        other[at // 8] ^= 1 << at % 8
        yield bytes(other)


def test_no_bit_of_a_marker_changes_what_it_says(tmp_path):
    small_store(tmp_path / "store")
    content = (tmp_path / "store" / MARKER_NAME).read_bytes()
    whole = parsed(content)
    assert isinstance(whole, DiskMarker)
    for other in (*flipped(content, range(8 * len(content))), *(content[:length] for length in range(len(content)))):
        assert parsed(other) == whole or isinstance(parsed(other), str)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_marker_of_garbage_is_repaired(root, content):
    held = small_store(root)
    (root / MARKER_NAME).write_bytes(content)
    mended(root)
    works_and_goes_on(root, held)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_damaged_marker_of_an_empty_store_is_repaired(root, content):
    root.mkdir(0o700)
    open_tier(root).close()
    shutil.rmtree(root / "segments")
    (root / "segments").write_bytes(b"is renamed, and ours all the same")
    open_tier(root).close()
    assert len(list(root.glob("segments.aside-*"))) == 1
    (root / MARKER_NAME).write_bytes(content)
    shutil.rmtree(root / "segments")
    mended(root)
    works_and_goes_on(root, set())


def test_a_marker_of_an_unknown_version_under_a_store_in_use_is_an_error_until_it_is_gone(tmp_path, root, open_disk):
    tier = open_disk(root)
    write_all(tier, range(3))
    tier.sync()
    marker = root / MARKER_NAME
    marker.rename(tmp_path / "marker")
    marker.write_text('{"version": 9}')
    tier._is_suspect = True
    for _ in range(2):
        with pytest.raises(TierError, match="version 9"):
            tier.read(object_name(1), empty_frame(BLOCK_BYTES))
    assert marker.read_text() == '{"version": 9}'
    (tmp_path / "marker").rename(marker)
    assert look(tier, 1) == "right"


@pytest.mark.parametrize("content", [b"", b"not ours", b"[" * 4096, b'{"version": 1}'])
def test_what_only_looks_like_a_damaged_store_is_left_alone(tmp_path, content):
    """Without a sound marker only a sound segment proves that a directory is ours."""
    root = tmp_path / "place"
    (root / "segments").mkdir(parents=True)
    (root / MARKER_NAME).write_bytes(content)
    (root / "segments" / "00000001.segment").write_bytes(b"precious" * 4096)
    stays_as_it_is(root, "00000001.segment is not a segment")
    (root / "segments" / "00000001.segment").unlink()
    (root / "photo.jpg").write_bytes(b"also precious")
    stays_as_it_is(root, r"holds other files \('photo.jpg'\)")


def stays_as_it_is(root, words):
    before = snapshot(root)
    with pytest.raises(DamagedStoreError, match="nothing was changed"):
        open_tier(root)
    with pytest.raises(ConfigError, match=words):
        repair_marker(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("generation", [0, 1 << 63, (1 << 64) - 1, (1 << 63) - 1])
def test_a_generation_out_of_range_stops_nothing(root, generation):
    """A head with a sound checksum: it proves only that a program wrote it."""
    small_store(root)
    store_id = parsed((root / MARKER_NAME).read_bytes()).store_id
    planted = root / "segments" / "00000001.segment"
    with open(planted, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, SEGMENT_BYTES)
        file.write(pack_header(Header(store_id, generation, SEGMENT_BYTES)))
    for start in (100, 200, 300):
        tier = open_tier(root)
        for number in range(start, start + 60):
            assert tier.write(object_name(number), sealed(number))
            assert look(tier, number) == "right"
        held = [number for number in range(start + 60) if tier.contains([object_name(number)])[0]]
        tier.close()
        tier = open_tier(root)
        assert {look(tier, number) for number in held} == {"right"}
        check_accounts(tier, root)
        tier.close()


@pytest.mark.parametrize("at", [0, SEGMENT_BYTES - BLOCK_BYTES], ids=["head", "index"])
def test_a_segment_whose_structure_cannot_be_read_is_replaced(root, monkeypatch, caplog, at):
    """Bad blocks of the device: they cost what the segment holds, and neither the start nor later writes."""
    held = fill(root)
    kept = (root / "segments" / "00000002.segment").open("rb")  # no other file gets its number
    bad, is_bad = os.fstat(kept.fileno()).st_ino, True
    read, write = os.preadv, os.pwritev

    def hits(descriptor, views, offset):
        return is_bad and os.fstat(descriptor).st_ino == bad and offset <= at < offset + sum(map(len, views))

    def preadv(descriptor, views, offset):
        if hits(descriptor, views, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, views, offset)

    def pwritev(descriptor, views, offset):
        nonlocal is_bad
        if hits(descriptor, views, offset):
            if at == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            is_bad = False  # as most drives do: a block that is written lies elsewhere then
        return write(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with caplog.at_level(logging.WARNING):
        tier = open_tier(root)
    assert [record.message for record in caplog.records if "cannot be read" in record.message]
    left = {number for number in held if look(tier, number) == "right"}
    assert len(held) > len(left) > len(held) / 2
    refusals = 0
    for number in range(200, 300):
        try:
            assert tier.write(object_name(number), sealed(number))
        except TierError:
            refusals += 1
    assert refusals <= 1
    tier.sync()
    check_accounts(tier, root)
    tier.close()
    works_and_goes_on(root, set())
    kept.close()


def test_sparse_files_of_terabytes_are_neither_read_nor_kept(root):
    held = small_store(root)
    for name in ("segments/00000001.segment", "segments/99999999.segment", STATUS_NAME, MARKER_NAME):
        (root / name).unlink(missing_ok=True)
        (root / name).touch()
        os.truncate(root / name, 1 << 41)
    assert read_status(root) is None
    mended(root)
    works_and_goes_on(root, held)
    assert (root / MARKER_NAME).stat().st_size < BLOCK_BYTES
    assert [path.name for path in (root / "segments").iterdir()] == ["00000000.segment"]


@pytest.mark.parametrize("step", [997, pytest.param(41, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_a_flipped_bit_in_the_structure_of_a_segment_costs_what_it_names(tmp_path, root, step):
    """Heads and index blocks: what such a block names is forgotten, the rest is right, and the store goes on."""
    held = fill(root)
    places = [*range(8 * 60), *range(8 * (SEGMENT_BYTES - BLOCK_BYTES), 8 * SEGMENT_BYTES)]
    chance = random.Random(4)
    for at in places[::step]:
        place = tmp_path / "flipped"
        copy_store(root, place)
        file = chance.choice(sorted((place / "segments").iterdir()))
        file.write_bytes(next(flipped(file.read_bytes(), [at])))
        tier = open_tier(place)
        left = {number for number in held if look(tier, number) == "right"}
        assert {look(tier, number) for number in held - left} <= {"absent"}
        tier.close()
        works_and_goes_on(place, left, capacity_bytes=CAPACITY_BYTES + SEGMENT_BYTES)
        shutil.rmtree(place)


def test_a_file_that_is_cut_off_while_it_is_used_is_a_miss(tmp_path, open_disk):
    tier = open_disk(tmp_path / "store")
    for number in range(3):
        assert tier.write(object_name(number), sealed(number))
    os.truncate(tmp_path / "store" / "segments" / "00000000.segment", 2 * BLOCK_BYTES)
    assert [look(tier, number) for number in range(3)] == ["absent"] * 3
    assert tier.read(object_name(0), empty_frame(BLOCK_BYTES)) is None
    abandon(tier)
    tier = open_disk(tmp_path / "store")  # a segment of another length is none
    assert tier.object_count == 0
    assert tier.write(object_name(0), sealed(0))
    check_accounts(tier, tmp_path / "store")


def test_a_lower_cap_gives_segments_back_and_a_higher_one_keeps_all(tmp_path, open_disk):
    held = fill(tmp_path / "store")
    tier = open_disk(tmp_path / "store", capacity_bytes=3 * SEGMENT_BYTES)
    check_accounts(tier, tmp_path / "store", 3 * SEGMENT_BYTES)
    kept = {number for number, what in seen(tier).items() if what == "right"}
    assert kept
    assert kept < held
    tier.close()
    tier = open_disk(tmp_path / "store", capacity_bytes=2 * CAPACITY_BYTES)
    assert {number for number, what in seen(tier).items() if what == "right"} == kept
    tier.close()
    tier = open_disk(tmp_path / "store", segment_bytes=2 * SEGMENT_BYTES)
    assert tier.object_count == 0
    assert tier.write(object_name(1), sealed(1))
    check_accounts(tier, tmp_path / "store")


def test_damaged_places_in_an_index_are_left_out(tmp_path, open_disk):
    """Entries that lie outside of their segment: a valid checksum does not make them true."""
    tier = open_disk(tmp_path / "store")
    assert tier.write(object_name(1), sealed(1))
    segment = tier._pool._filling
    segment.pending[object_name(2)] = (0, 4096)
    segment.pending[object_name(3)] = (SEGMENT_BYTES // BLOCK_BYTES - 1, 4096)
    segment.pending[object_name(4)] = (1 << 31, 1 << 31)
    tier.sync()
    abandon(tier)
    tier = open_disk(tmp_path / "store")
    assert [name for name, _ in tier.scan()] == [object_name(1)]
