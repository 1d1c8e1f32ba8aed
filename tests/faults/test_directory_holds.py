"""No lock of a directory tier is held for the whole store: not the index's, and not the cap file's of all processes."""

import fcntl
import os
import random
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from test_directory_every_step import drafted

from kvtier.errors import TierError
from kvtier.policy.lru import Lru
from kvtier.testing.tier import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import UNKNOWN
from kvtier.tier.cap_file import CapFile, read_cap_file
from kvtier.tier.directory import byte_cap
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.index import DirectoryIndex
from kvtier.tier.directory.snapshot import SnapshotRow
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.store_paths import Found, Paths

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


class CountedAbout:
    """Metadata that counts its readers."""

    depth = group = 0
    session = None

    def __init__(self, handled):
        self.handled = handled

    @property
    def parent(self):
        self.handled.now += self.handled.lock.locked()

    def held(self, name):
        return UNKNOWN.held(name)


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


def test_the_rows_of_a_snapshot_are_copied_in_slices(index, handled, names):
    about = CountedAbout(handled)
    for name in names:
        index.add(name, 5000, 1, about)
    handled.most = 0
    assert len(list(index.rows())) == OBJECTS
    assert handled.most <= MOST


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
    locked, stat_object, unlink = CapFile.locked, Paths.stat_object, os.unlink

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
        patch.setattr(CapFile, "locked", counting)
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


def test_a_recount_walks_without_the_lock_of_all_processes(tmp_path, monkeypatch):
    """Others take it, read and look up; what they write is dropped in time, and written after the recount."""
    root = tmp_path / "s"
    other = filled(root, 300)
    tier = DirectoryTier(root, capacity_bytes=1000 * BLOCK_BYTES, direct_io="off", lock_deadline_s=0.05)
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
    assert not tier.write(object_name(1000), frame_of(1000))
    assert walking.wait(DEADLINE_S)
    with open(root / "ledger", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other._cap_file.deadline_s = 0.05
    assert not other.write(object_name(1001), frame_of(1001))
    assert other.contains([object_name(7), object_name(1001)]) == [True, False]
    assert other.read(object_name(7), empty_frame(BLOCK_BYTES)) == BLOCK_BYTES
    other.delete(object_name(299))
    assert read_cap_file(str(root / "ledger")) is None
    go_on.set()
    tier._byte_cap.wait_idle(DEADLINE_S)
    assert drafted(root) <= tier.used_bytes <= drafted(root) + BLOCK_BYTES
    assert other.write(object_name(1001), frame_of(1001))
    tier.close()
    other.close()


@pytest.mark.parametrize(
    "owner", [b"0123456789abcdef", b"", b"../../../../../x", b"\0" * 16, b"\xff" * 16, b"0123456789abcdef" * 9]
)
def test_a_dead_recount_is_begun_again(tmp_path, owner):
    root = tmp_path / "s"
    tier = filled(root, 5)
    (root / "ledger").write_bytes(b"kvcounts" + owner)
    assert tier.write(object_name(7), frame_of(7))
    assert tier.used_bytes == drafted(root) == 7 * BLOCK_BYTES
    tier.close()


@contextmanager
def stopped_counter(monkeypatch, tier):
    """`tier` counts, and its walk stops after some files."""
    walking, go_on = threading.Event(), threading.Event()
    walk = byte_cap.walk

    def stopping(paths):
        for number, found in enumerate(walk(paths)):
            if paths is tier._paths and number == 3:
                walking.set()
                assert go_on.wait(DEADLINE_S)
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(byte_cap, "walk", stopping)
        with tier._cap_file.locked():
            assert tier._byte_cap._start_walk(counts=True)
        assert walking.wait(DEADLINE_S)
        yield go_on
        go_on.set()
        tier._byte_cap.wait_idle(DEADLINE_S)


def test_a_stopped_recount_is_taken_over_and_changes_nothing_when_it_goes_on(tmp_path, monkeypatch):
    root = tmp_path / "s"
    stopped = filled(root, 8)
    other = filled(root, 0)
    monkeypatch.setattr(byte_cap, "PATIENCE_S", 0.3)
    monkeypatch.setattr(other._byte_cap, "_patience_s", 0.3)
    other._cap_file.deadline_s = 0.05
    with stopped_counter(monkeypatch, stopped):
        end_s = time.monotonic() + DEADLINE_S
        while not other.write(object_name(100), frame_of(100, BLOCK_BYTES)):
            assert time.monotonic() < end_s
        for number in range(101, 110):
            assert other.write(object_name(number), frame_of(number, BLOCK_BYTES))
        assert other.used_bytes == drafted(root) == 18 * BLOCK_BYTES
    assert other.used_bytes == drafted(root)
    assert stopped.write(object_name(200), frame_of(200, BLOCK_BYTES))
    assert other.used_bytes == stopped.used_bytes == drafted(root)
    stopped.close()
    other.close()


def test_a_recount_that_goes_on_is_not_taken_over(tmp_path, monkeypatch):
    counting = filled(tmp_path / "s", 8)
    other = filled(tmp_path / "s", 0)
    other._cap_file.deadline_s = 0.05
    with stopped_counter(monkeypatch, counting):
        assert not other.write(object_name(100), frame_of(100, BLOCK_BYTES))
        with other._cap_file.locked():
            assert other._cap_file.counted_by() == counting._temp_files.owner
    assert other.write(object_name(100), frame_of(100, BLOCK_BYTES))
    counting.close()
    other.close()


def test_what_is_published_during_a_recount_is_counted_once_in_one_walk(tmp_path, monkeypatch):
    root = tmp_path / "s"
    tier = filled(root, 100)
    drafts = [tier._byte_cap.reserve(3 * BLOCK_BYTES, direct_io=False) for _ in range(20)]
    walks = []
    walk = byte_cap.walk

    def publishing(paths):
        walks.append(paths)
        for number, found in enumerate(walk(paths)):
            if number % 5 == 0 and len(drafts) > 5:
                draft = drafts.pop()
                os.write(draft.descriptor, frame_of(number, 3 * BLOCK_BYTES))
                tier._byte_cap.publish(draft, os.fstat(draft.descriptor), object_name(1000 + number), UNKNOWN)
                os.close(draft.descriptor)
            yield found

    monkeypatch.setattr(byte_cap, "walk", publishing)
    with tier._cap_file.locked():
        assert tier._byte_cap._start_walk(counts=True)
    tier._byte_cap.wait_idle(DEADLINE_S)
    assert (len(drafts), len(walks)) == (5, 1)
    assert tier.used_bytes == (100 + 20 * 3) * BLOCK_BYTES
    for draft in drafts:
        os.close(draft.descriptor)
        tier._byte_cap.discard(draft)
    assert tier.used_bytes == drafted(root)
    tier.close()


def test_a_temporary_file_of_an_odd_size_does_not_end_the_counting(tmp_path):
    tier = filled(tmp_path / "s", 5)
    (tmp_path / "s" / "drafts" / f"{tier._temp_files.owner}-77-123").touch()
    (tmp_path / "s" / "ledger").write_bytes(b"")
    assert tier.write(object_name(7), frame_of(7, BLOCK_BYTES))
    assert tier.used_bytes == 7 * BLOCK_BYTES
    tier.close()


def test_a_recount_without_a_thread_is_begun_again(tmp_path, monkeypatch):
    tier = filled(tmp_path / "s", 5)

    def broken(_):
        raise RuntimeError("can't start new thread")

    (tmp_path / "s" / "ledger").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken)
        with pytest.raises((TierError, RuntimeError)):
            tier.write(object_name(7), frame_of(7, BLOCK_BYTES))
    assert tier.write(object_name(8), frame_of(8, BLOCK_BYTES))
    assert tier.used_bytes == drafted(tmp_path / "s")
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
        with suppress(TierError, OSError):
            tier._byte_cap.wait_idle(DEADLINE_S)
    with suppress(TierError):
        tier.write(object_name(8), frame_of(8))
    assert tier.write(object_name(9), frame_of(9))
    tier._byte_cap.wait_idle(DEADLINE_S)
    assert tier.used_bytes == drafted(tmp_path / "s")
    tier.close()


def as_an_older_version(tier, number):
    """A process without recounts in the background counts under the lock, and adds an object at once."""
    with tier._cap_file.locked():
        used_bytes = tier._cap_file.read()
        if used_bytes is None:
            used_bytes = drafted(tier.root)
        tier._cap_file.write(used_bytes + BLOCK_BYTES)
        draft = tier._temp_files.create(BLOCK_BYTES, direct_io=False)
    os.write(draft.descriptor, frame_of(number, BLOCK_BYTES))
    os.close(draft.descriptor)
    with tier._cap_file.locked(), tier._paths.fan(object_name(number)) as fan:
        tier._temp_files.publish(draft, object_name(number).hex(), fan)


@pytest.mark.parametrize("seed", range(16))
def test_a_recount_is_never_below_the_bytes_in_use(tmp_path, monkeypatch, seed):
    """Whatever other processes do at any moment of its walk: reserve, publish, give up, delete, count as well."""
    rng = random.Random(seed)
    root = tmp_path / "s"
    settings = {"capacity_bytes": 60 * BLOCK_BYTES, "direct_io": "off", "lock_deadline_s": DEADLINE_S}
    counter, other, third = (DirectoryTier(root, **settings) for _ in range(3))
    for number in range(40):
        assert other.write(object_name(number), frame_of(number, BLOCK_BYTES))
    other._cap_file.deadline_s = third._cap_file.deadline_s = 0.1
    violations, ended = [], []
    drafts = [(it, it._byte_cap.reserve(BLOCK_BYTES, direct_io=False)) for it in (other, third) for _ in range(4)]
    walk = byte_cap.walk

    def act():
        kind, tier, number = rng.randrange(9), rng.choice((other, third)), rng.randrange(200)
        if kind == 0 and drafts:
            owner, draft = drafts.pop()
            os.write(draft.descriptor, frame_of(number, BLOCK_BYTES))
            owner._byte_cap.publish(draft, os.fstat(draft.descriptor), object_name(number), UNKNOWN)
            os.close(draft.descriptor)
        elif kind == 1 and drafts:
            owner, draft = drafts.pop()
            os.close(draft.descriptor)
            owner._byte_cap.discard(draft)
        elif kind == 2:
            tier.delete(object_name(rng.randrange(40)))
        elif kind == 3:
            tier.write(object_name(number), frame_of(number, BLOCK_BYTES))
        elif kind == 4 and seed % 2 and rng.random() < 0.3:
            as_an_older_version(tier, number + 1000)
        elif kind == 5 and seed % 3 == 0 and rng.random() < 0.3:
            with tier._cap_file.locked():  # finds a reason to count
                tier._byte_cap._start_walk(counts=True)

    def check():
        used_bytes = read_cap_file(str(root / "ledger"))
        if used_bytes is not None:
            ended.append(used_bytes)
            if used_bytes < drafted(root):
                violations.append((used_bytes, drafted(root)))

    def watched(paths):
        for found in walk(paths):
            if paths is counter._paths:
                with suppress(TierError):  # the lock was not free
                    act()
                check()
            yield found

    monkeypatch.setattr(byte_cap, "walk", watched)
    for _ in range(3):
        with counter._cap_file.locked():
            assert counter._byte_cap._start_walk(counts=True)
        for tier in (counter, other, third):
            tier._byte_cap.wait_idle(DEADLINE_S)
        check()
    assert ended
    assert not violations
    for tier in (counter, other, third):
        tier.close()
    while drafts:
        os.close(drafts.pop()[1].descriptor)
    alone = DirectoryTier(root, capacity_bytes=1000 * BLOCK_BYTES)
    assert alone.used_bytes == drafted(root)
    alone.close()


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
