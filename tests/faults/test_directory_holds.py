"""No lock of a directory tier is held for the whole store: not the index's, and not the cap file's of all processes."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from test_directory_every_step import drafted

from kvtier.errors import TierError
from kvtier.policy.lru import Lru
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import UNKNOWN
from kvtier.tier.directory import ledger_cap as byte_cap
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.index import DirectoryIndex
from kvtier.tier.directory.snapshot import SnapshotRow
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.ledger import Ledger, read_ledger
from kvtier.tier.files.store_paths import Found, Paths

DEADLINE_S = 60.0
OBJECTS = 40_000
MOST = 4096
"""Objects per hold: 10 ms at most, at any size of the store."""


class Handled:
    """How many objects the holder of a lock has handled, at most in one hold."""

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self):
        self.lock.acquire()
        self.now = 0

    def __exit__(self, *_):
        self.most = max(self.most, self.now)
        self.lock.release()


class CountingLru(Lru):
    def __init__(self, handled):
        super().__init__()
        self.handled = handled

    def added(self, held):
        self.handled.now += 1
        super().added(held)

    def removed(self, name):
        self.handled.now += 1
        super().removed(name)


@pytest.fixture(scope="module")
def names():
    return [random.Random(number).randbytes(32) for number in range(OBJECTS)]


@pytest.fixture
def handled():
    return Handled()


@pytest.fixture
def index(handled):
    index = DirectoryIndex(CountingLru(handled))
    index._lock = handled
    return index


def snapshot_rows(names):
    return [SnapshotRow(name, None, 5000, number, 0, 0) for number, name in enumerate(names)]


def test_an_index_snapshot_is_loaded_and_listed_in_slices(index, handled, names):
    index.load_snapshot(snapshot_rows(names))
    assert handled.most <= MOST
    assert sorted(row.name for row in index.rows()) == sorted(names)
    assert [row.used_ns for row in index.rows() if row.name == names[77]] == [77]
    assert index.known_bytes == OBJECTS * 2 * BLOCK_BYTES
    assert index.victim() == names[0]


def test_what_a_walk_finds_is_merged_in_slices(index, handled, names):
    half = OBJECTS // 2
    index.load_snapshot(snapshot_rows(names[:half]))
    found = [Found(name, 9000, number) for number, name in enumerate(names)][OBJECTS // 4 :]
    index.merge(sorted(found))
    assert handled.most <= MOST
    assert sorted(row.name for row in index.rows()) == sorted(names[OBJECTS // 4 :])
    assert {row.size_bytes for row in index.rows()} == {9000}
    assert index.known_bytes == len(found) * 3 * BLOCK_BYTES
    handled.most = 0
    order = []
    for _ in found:
        order.append(index.victim())
        index.forget(order[-1])
    assert order == names[OBJECTS // 4 :], "the snapshot's order first, then by mtime"
    index.merge([])
    assert index.known_bytes == len(index) == 0


def test_what_enters_during_a_walk_stays_in_the_index(index, names):
    index.load_snapshot(snapshot_rows(names[:10]))

    def walk():
        yield Found(min(names[:10]), 5000, 1)
        for name in names[10:20]:
            index.add(name, 5000, 1, UNKNOWN)

    index.merge(walk())
    assert {row.name for row in index.rows()} == {min(names[:10]), *names[10:20]}


@contextmanager
def counted_holds(monkeypatch):
    """Files that are looked at or removed in each hold of the cap file's lock."""
    handled = Handled()
    locked, stat_object, unlink = Ledger.locked, Paths.stat_object, os.unlink

    @contextmanager
    def counting(self):
        with locked(self) as is_replaced:
            handled.now = 0
            yield is_replaced
            handled.most = max(handled.most, handled.now)

    def looking(self, name):
        handled.now += 1
        return stat_object(self, name)

    def removing(*args, **kwargs):
        handled.now += 1
        return unlink(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "locked", counting)
        patch.setattr(Paths, "stat_object", looking)
        patch.setattr(os, "unlink", removing)
        yield handled


def filled(root, count, **settings):
    tier = DirectoryTier(
        root, capacity_bytes=1000 * BLOCK_BYTES, direct_io="off", lock_deadline_s=DEADLINE_S, **settings
    )
    for number in range(count):
        assert tier.write(object_name(number), frame_of(number, BLOCK_BYTES))
    return tier


@pytest.mark.parametrize("by", ["a lower cap", "a large object", "names that are gone"])
def test_evictions_let_others_in_between(tmp_path, monkeypatch, by):
    filled(tmp_path / "s", 800).close()
    tier = filled(tmp_path / "s", 0)
    with counted_holds(monkeypatch) as handled:
        if by == "a lower cap":
            tier._byte_cap._capacity_bytes = 10 * BLOCK_BYTES
            tier._byte_cap._count_again_s = time.monotonic() + DEADLINE_S
            tier._byte_cap.shrink()
            assert tier.used_bytes == 10 * BLOCK_BYTES
        elif by == "a large object":
            assert tier.write(object_name(5000), frame_of(5000, 990 * BLOCK_BYTES))
        else:
            other = filled(tmp_path / "s", 0)
            for number in range(800):
                other.delete(object_name(number))
            for number in range(2000, 2990):
                assert other.write(object_name(number), frame_of(number, BLOCK_BYTES))
            assert tier.write(object_name(5000), frame_of(5000, 20 * BLOCK_BYTES))
            other.close()
    assert handled.most <= 400
    assert tier.used_bytes == drafted(tmp_path / "s")
    tier.close()


def test_a_recount_ends_other_writes_in_time_and_lets_reads_go_on(root, monkeypatch, open_directory):
    other = filled(root, 300)
    tier = open_directory(root, capacity_bytes=1000 * BLOCK_BYTES, direct_io="off", lock_deadline_s=0.05)
    walking, go_on = threading.Event(), threading.Event()
    walk = byte_cap.walk

    def slow(paths):
        for number, found in enumerate(walk(paths)):
            if number == 100:
                walking.set()
                assert go_on.wait(DEADLINE_S)
            yield found

    monkeypatch.setattr(byte_cap, "walk", slow)
    (root / "ledger").write_bytes(b"damaged")
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(tier.write, object_name(1000), frame_of(1000))
        assert walking.wait(DEADLINE_S)
        for one in (other, tier):
            one._cap_file.deadline_s = 0.05
            with pytest.raises(TierError, match=r"lock"):
                one.write(object_name(1001), frame_of(1001))
            assert one.contains([object_name(7), object_name(1001)]) == [True, False]
            assert one.read(object_name(7), empty_frame(BLOCK_BYTES)) == BLOCK_BYTES
        go_on.set()
        assert writing.result(DEADLINE_S)
    assert tier.used_bytes == drafted(root)
    assert other.write(object_name(1001), frame_of(1001))
    other.close()


def test_a_temporary_file_of_an_odd_size_does_not_end_the_counting(tmp_path):
    tier = filled(tmp_path / "s", 5)
    (tmp_path / "s" / "drafts" / f"{tier._byte_cap._temp_files.owner}-77-123").touch()
    (tmp_path / "s" / "ledger").write_bytes(b"")
    assert tier.write(object_name(7), frame_of(7, BLOCK_BYTES))
    assert tier.used_bytes == 7 * BLOCK_BYTES
    tier.close()


def test_a_failed_recount_is_an_error_and_the_next_one_may_succeed(tmp_path, monkeypatch):
    tier = filled(tmp_path / "s", 5)

    def broken(_):
        raise OSError(5, "Input/output error")

    (tmp_path / "s" / "ledger").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(byte_cap, "walk", broken)
        with pytest.raises(TierError, match="Input/output"):
            tier.write(object_name(7), frame_of(7))
    assert tier.write(object_name(9), frame_of(9))
    assert tier.used_bytes == drafted(tmp_path / "s")
    tier.close()


@pytest.mark.parametrize("seed", range(8))
def test_the_count_is_never_below_the_bytes_in_use(root, seed):
    """Whatever processes do: reserve, publish, give up, delete, count again, and die in a write."""
    rng = random.Random(seed)
    settings = {"capacity_bytes": 60 * BLOCK_BYTES, "direct_io": "off", "lock_deadline_s": DEADLINE_S}
    tiers = [DirectoryTier(root, **settings) for _ in range(3)]
    drafts = []

    def ended():
        tier, draft = drafts.pop(rng.randrange(len(drafts)))
        os.close(draft.descriptor)
        return tier._byte_cap, draft

    for _ in range(300):
        kind, number, tier = rng.randrange(8), rng.randrange(200), rng.choice(tiers)
        if kind == 0 and drafts:
            cap, draft = ended()
            path = root / "drafts" / draft.name
            path.write_bytes(frame_of(number, BLOCK_BYTES))
            cap.publish(draft, path.stat(), object_name(number), UNKNOWN)
        elif kind == 1 and drafts:
            cap, draft = ended()
            cap.discard([draft])
        elif kind == 2 and len(drafts) < 8:
            draft = tier._byte_cap.reserve(BLOCK_BYTES, direct_io=False)
            drafts += [] if draft is None else [(tier, draft)]
        elif kind == 3:
            with tier._cap_file.locked():
                tier._byte_cap._recount()
        elif kind == 4:
            (root / "drafts" / f"{rng.randrange(16**16):016x}-0-{BLOCK_BYTES}").touch()  # of a dead process
            with tier._cap_file.locked():
                tier._cap_file.write((tier._cap_file.read() or 0) + BLOCK_BYTES)
            tier._byte_cap.attach(is_alone=False, needs_index=False)
        elif kind == 5:
            tier.delete(object_name(number))
        else:
            tier.write(object_name(number), frame_of(number, BLOCK_BYTES))
        assert read_ledger(str(root / "ledger")) == drafted(root)
    while drafts:
        cap, draft = ended()
        cap.discard([draft])
    for tier in tiers:
        tier.close()


def test_a_snapshot_keeps_no_write_waiting(tmp_path, monkeypatch):
    go_on, saving = threading.Event(), threading.Event()
    save = directory.save_snapshot

    def slow(*args):
        saving.set()
        go_on.wait(DEADLINE_S)
        save(*args)

    monkeypatch.setattr(directory, "save_snapshot", slow)
    monkeypatch.setattr(directory, "SNAPSHOT_INTERVAL_S", 0.0)
    tier = filled(tmp_path / "s", 3)
    ended = threading.Event()

    def write():
        tier.write(object_name(10), frame_of(10))
        ended.set()

    threading.Thread(target=write, daemon=True).start()
    assert saving.wait(DEADLINE_S)
    assert ended.wait(10.0)
    go_on.set()
    tier.close()
    assert (tmp_path / "s" / "index").stat().st_size == 32 + 4 * 88
