"""The parts of the directory tier one by one: hint, aligned I/O, counting, races that are forced instead of awaited."""

import os
import random
import threading
from collections import Counter

import pytest

from kvtier.errors import TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import UNKNOWN, Read, Write
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.snapshot import SnapshotRow, load_snapshot, pack_snapshot, save_snapshot, unpack_snapshot
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.direct import aligned_buffer, is_aligned
from kvtier.tier.files.ledger import Ledger
from kvtier.tier.operation_guard import OperationGuard

CAPACITY = 64 * BLOCK_BYTES
DEADLINE_S = 30.0


@pytest.fixture
def tier(tmp_path):
    tier = DirectoryTier(tmp_path / "s", capacity_bytes=CAPACITY)
    yield tier
    tier.close()


def rows(count):
    return [
        SnapshotRow(object_name(n), object_name(n - 1) if n % 3 else None, n * 4096, 10**18 + n, n % 3, n % 2)
        for n in range(count)
    ]


def test_a_hint_with_names_that_end_in_zeros_comes_back_as_it_was():
    told = [
        SnapshotRow(bytes(31) + b"\1", bytes(32), 1, 1, 1, 1),
        SnapshotRow(b"\1" + bytes(31), None, 2**63, -5, 2**32 - 1, 65535),
    ]
    assert list(unpack_snapshot(pack_snapshot(told)) or ()) == sorted(told, key=lambda row: row.used_ns)


def test_any_flipped_bit_makes_a_hint_useless():
    told = pack_snapshot(rows(20))
    for position in random.Random(3).sample(range(8 * len(told)), 300):
        damaged = bytearray(told)
        damaged[position // 8] ^= 1 << position % 8
        assert unpack_snapshot(bytes(damaged)) is None
    for length in range(0, len(told), 7):
        assert unpack_snapshot(told[:length]) is None


def test_a_hint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save_snapshot(str(tmp_path / "index"), rows(3))
    with pytest.raises(TypeError):
        save_snapshot(str(tmp_path / "index"), [SnapshotRow("no bytes", None, 1, 1, 1, 1)])  # type: ignore[arg-type]
    assert list(load_snapshot(str(tmp_path / "index")) or ()) == rows(3)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_the_hint_is_written_now_and_then(tmp_path, tier, monkeypatch):
    monkeypatch.setattr(directory, "SNAPSHOT_INTERVAL_S", 0.0)
    assert tier.write(object_name(1), frame_of(1))
    with tier._snapshot_lock:  # until it is written
        pass
    assert [row.name for row in load_snapshot(str(tmp_path / "s" / "index")) or ()] == [object_name(1)]


def test_the_hint_has_the_last_write_before_a_pause_or_a_kill(tmp_path, tier, monkeypatch):
    monkeypatch.setattr(directory, "SNAPSHOT_INTERVAL_S", 0.2)
    for number in (1, 2):
        assert tier.write(object_name(number), frame_of(number))
    with tier._snapshot_lock:
        pass
    found = load_snapshot(str(tmp_path / "s" / "index")) or ()
    assert {row.name for row in found} == {object_name(1), object_name(2)}


def test_alignment_is_of_address_length_and_offset():
    buffer = aligned_buffer(3 * BLOCK_BYTES)
    assert is_aligned(buffer, 0)
    assert is_aligned(buffer[BLOCK_BYTES:].toreadonly(), BLOCK_BYTES)
    assert not is_aligned(buffer[:-1], 0)
    assert not is_aligned(buffer[1 : 1 + BLOCK_BYTES], 0)
    assert not is_aligned(buffer[512 : 512 + BLOCK_BYTES], 0)
    assert not is_aligned(buffer, 512)
    assert not is_aligned(buffer[:0], 0)


def test_every_file_counts_in_whole_blocks(tmp_path, open_directory):
    tier = open_directory(tmp_path / "two", capacity_bytes=2 * BLOCK_BYTES + 100)
    for number, size in enumerate((1, 0, 4096, 100)):
        assert tier.write(object_name(number), frame_of(number, size))
        assert tier.used_bytes == min(number + 1, 2) * BLOCK_BYTES
    assert tier.object_count == 2
    assert not tier.write(object_name(9), frame_of(9, 2 * BLOCK_BYTES + 1))


def test_the_slower_of_two_writers_of_a_name_leaves_nothing_behind(tier):
    """Both saw that the name was free; the first one's file stays and the second one's bytes are given back."""
    draft = tier._byte_cap.reserve(3 * BLOCK_BYTES, direct_io=False)
    assert tier.write(object_name(1), frame_of(1))
    assert tier.used_bytes == 5 * BLOCK_BYTES
    os.write(draft.descriptor, frame_of(2, 3 * BLOCK_BYTES))
    tier._byte_cap.publish(draft, os.fstat(draft.descriptor), object_name(1), UNKNOWN)
    os.close(draft.descriptor)
    assert tier.used_bytes == 2 * BLOCK_BYTES
    into = empty_frame(4 * BLOCK_BYTES)
    assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES
    assert into[: 2 * BLOCK_BYTES] == frame_of(1)
    assert not os.path.exists(f"{tier._paths.temp_files}/{draft.name}")


def test_what_is_being_written_is_not_visible_and_keeps_its_room(tier):
    draft = tier._byte_cap.reserve(CAPACITY - BLOCK_BYTES, direct_io=False)
    os.write(draft.descriptor, b"part")
    assert list(tier.scan()) == []
    assert not tier.write(object_name(1), frame_of(1))  # nothing to evict: dropped, not waited for
    assert tier.write(object_name(2), frame_of(2, BLOCK_BYTES))
    tier._byte_cap.discard([draft])
    os.close(draft.descriptor)
    assert tier.used_bytes == BLOCK_BYTES
    assert tier.write(object_name(1), frame_of(1))


def test_a_draft_that_could_not_be_removed_is_removed_later(tmp_path, open_directory):
    """Its bytes are lost only as long as the lock cannot be had."""
    tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY, lock_deadline_s=0.05)
    draft = tier._byte_cap.reserve(BLOCK_BYTES, direct_io=False)
    os.close(draft.descriptor)
    with tier._cap_file.locked():
        tier._byte_cap.discard([draft])
    assert tier.used_bytes == BLOCK_BYTES
    assert tier.write(object_name(1), frame_of(1))
    assert tier.used_bytes == 2 * BLOCK_BYTES
    assert not os.path.exists(f"{tier._paths.temp_files}/{draft.name}")


def test_victims_become_drafts_of_any_size(tmp_path, open_directory):
    tier = open_directory(tmp_path / "s", capacity_bytes=8 * BLOCK_BYTES)
    into = empty_frame(8 * BLOCK_BYTES)
    for number in range(60):
        size = random.Random(number).randrange(1, 8 * BLOCK_BYTES)
        assert tier.write(object_name(number), frame_of(number, size))
        assert tier.read(object_name(number), into) == size
        assert into[:size] == frame_of(number, size)
        assert tier.used_bytes <= 8 * BLOCK_BYTES
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "s" / "objects").rglob("*/*")) <= tier.used_bytes


def test_a_known_name_costs_no_look_at_the_directory_and_a_private_store_none_at_all(tmp_path, open_directory):
    tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY, shared=False)
    other = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    assert other.write(object_name(1), frame_of(1))
    assert tier.contains([object_name(1)]) == [False]
    assert tier.read(object_name(1), empty_frame(BLOCK_BYTES)) == BLOCK_BYTES
    assert tier.contains([object_name(1)]) == [True]


def test_a_batch_takes_the_lock_twice_and_opens_few_directories(tmp_path, open_directory, monkeypatch):
    """Every object of the batch replaces a victim; alone, each would take the lock twice and open eight directories."""
    tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    for number in (*range(100, 108), *range(32)):  # the first ones leave their directories
        assert tier.write(object_name(number), frame_of(number))
    called, evictions = Counter(), tier.evictions

    def counted(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: called.update([name]) or call(*given, **named))

    counted(Ledger, "locked")
    counted(os, "open")
    counted(os, "pwrite")
    batch = [Write(object_name(number), frame_of(number)) for number in range(100, 108)]
    assert tier.write_many(batch) == [True] * 8
    assert tier.evictions == evictions + 8
    assert called["locked"] == 2
    assert called["pwrite"] == 0, "a victim and its successor are as large, so the count is the same"
    assert called["open"] <= 8 * 3 + 4
    called.clear()
    reads = [Read(object_name(number), empty_frame(2 * BLOCK_BYTES)) for number in range(100, 108)]
    assert tier.read_many(reads) == [2 * BLOCK_BYTES] * 8
    assert [read.into for read in reads] == [write.frame for write in batch]
    assert called["open"] <= 8 * 2 + 1


@pytest.mark.parametrize("step", ["rename", "pwritev", "ftruncate"])
@pytest.mark.parametrize("is_full", [False, True])
def test_an_object_of_a_batch_that_fails_costs_no_other(tmp_path, open_directory, monkeypatch, step, is_full):
    tier = open_directory(tmp_path / "s", capacity_bytes=CAPACITY)
    for number in range(32 * is_full):
        assert tier.write(object_name(number), frame_of(number, BLOCK_BYTES))
        assert tier.write(object_name(number + 50), frame_of(number + 50, BLOCK_BYTES))
    call, calls = getattr(os, step), []

    def failing(*given, **named):
        calls.append(given)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")
        return call(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        answers = tier.write_many([Write(object_name(number), frame_of(number)) for number in range(100, 106)])
    assert len(calls) > 3
    assert sum(answer is True for answer in answers) >= 5
    assert all(answer is True or "Input/output error" in str(answer) for answer in answers)
    into = empty_frame(2 * BLOCK_BYTES)
    for number, answer in zip(range(100, 106), answers, strict=True):
        assert tier.read(object_name(number), into) == (2 * BLOCK_BYTES if answer is True else None)
        assert answer is not True or into == frame_of(number)
    assert tier.used_bytes == sum(2 * BLOCK_BYTES if size > BLOCK_BYTES else BLOCK_BYTES for _, size in tier.scan())
    assert os.listdir(tmp_path / "s" / "drafts") == []


def test_a_batch_larger_than_the_store_is_written_object_by_object(tmp_path, open_directory):
    tier = open_directory(tmp_path / "s", capacity_bytes=4 * BLOCK_BYTES)
    batch = [Write(object_name(number), frame_of(number)) for number in range(6)]
    assert tier.write_many(batch) == [True] * 6
    assert tier.used_bytes == 4 * BLOCK_BYTES
    assert tier.object_count == 2


def test_closing_waits_for_who_is_inside():
    gate = OperationGuard("t")
    inside, leave = threading.Event(), threading.Event()

    def work():
        with gate:
            inside.set()
            leave.wait(DEADLINE_S)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert inside.wait(DEADLINE_S)
    assert gate.close()
    assert not gate.close()
    assert not gate.wait_empty(0.01)
    with pytest.raises(TierError, match="is closed"), gate:
        pass
    leave.set()
    assert gate.wait_empty(DEADLINE_S)
    thread.join(DEADLINE_S)
