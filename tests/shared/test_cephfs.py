"""The shared directory tier on CephFS, mounted twice: two nodes with a network file system between them."""

import fcntl
import itertools
import os
import threading
import time
from contextlib import suppress

import pytest
from tests.tier_makers import kept

from kvtier.errors import TierError
from kvtier.testing.tier_contract import TierContract, empty_frame, frame_of, object_name
from kvtier.tier.base import OneByOneTier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.shared_directory import sweep as shared_sweep
from kvtier.tier.shared_directory import tier as shared_directory
from kvtier.tier.shared_directory.kind import SharedDirectorySettings
from kvtier.tier.shared_directory.tier import SharedDirectoryTier
from kvtier.types import ObjectName

KEY, MODEL = b"k" * 16, b"f" * 16
MIB = 1 << 20
TRANSFER_DEADLINE_S = SharedDirectorySettings(path="/").transfer_deadline_s
WAIT_S = 60.0
CUT_OFF_S = 5.0
"""`mds_cap_revoke_eviction_timeout` in `ceph.py`."""
SETTLE_S = 3.0
"""After this long a client has given back the exclusive use of closed files (`client_caps_release_delay`, 1 s)."""


def sweep(tier):
    """What the keeper does when a sweep is due."""
    tier._cap._sweep(tier._cap._claims.usage(), 0)


@pytest.fixture
def nodes(mounts):
    """Makes a tier on each of both mounts, of one new store."""

    def make(capacity_bytes=256 * MIB, kind=SharedDirectoryTier):
        store = f"store-{os.urandom(4).hex()}"
        settings = {"key_id": KEY, "model": MODEL, "capacity_bytes": capacity_bytes, "wait_s": WAIT_S}
        return [kept(kind(mount / store, **settings)) for mount in mounts]

    return make


def read(tier, number, byte_count=MIB):
    into = empty_frame(byte_count)
    count = tier.read(object_name(number), into)
    return None if count is None else bytes(into[:count])


def drafts(root):
    return list(root.glob("*/*/*/draft_*"))


def settle(tier):
    """Wait until the keeper thread has nothing to do."""
    cap = tier._cap
    with cap._changed:
        assert cap._changed.wait_for(lambda: not cap._is_due() and cap._began_s is None, WAIT_S)


class AcrossNodes(OneByOneTier):
    """Writes on one node; reads, looks and deletes on another."""

    def __init__(self, writer, reader):
        super().__init__("across")
        self.writer, self.reader = writer, reader

    def contains(self, names):
        return self.reader.contains(names)

    def read_one(self, name, into, offset):
        return self.reader.read(name, into, offset)

    def write_one(self, name, frame, about):
        held = self.writer.write(name, frame, about)
        settle(self.writer)
        return held

    def delete(self, name):
        self.reader.delete(name)

    def scan(self):
        return self.reader.scan()

    def figures(self):
        return self.writer.figures()

    def close(self):
        self.writer.close()
        self.reader.close()


@pytest.mark.timeout(300)
class TestAcrossNodes(TierContract):
    forgets_below_capacity = True

    @pytest.fixture
    def make_tier(self, nodes):
        return lambda capacity_bytes: AcrossNodes(*nodes(capacity_bytes))


class InPlace(SharedDirectoryTier):
    """A wrong tier: it writes under the object's name."""

    def _publish(self, name, frame, fan):
        descriptor = os.open(name.hex(), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600, dir_fd=fan)
        for start in range(0, frame.nbytes, MIB // 4):
            os.pwrite(descriptor, frame[start : start + MIB // 4], start)
        os.close(descriptor)
        return True


@pytest.mark.parametrize(("kind", "is_whole"), [(SharedDirectoryTier, True), (InPlace, False)])
def test_writers_of_one_name_on_both_nodes_show_whole_objects_only(nodes, kind, is_whole):
    a, b = nodes(kind=kind)
    frame = frame_of(1, 4 * MIB)
    whole = bytes(frame)
    done, torn, seen = threading.Event(), [], itertools.count()

    def write(tier):
        for _ in range(12):
            tier.write(object_name(1), frame)
            tier.delete(object_name(1))
        done.set()

    def look(tier):
        while not done.is_set():
            found = read(tier, 1, 4 * MIB)
            if found is not None:
                next(seen)
                if found != whole:
                    torn.append(len(found))

    threads = [threading.Thread(target=act, args=(tier,)) for act in (write, look) for tier in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert next(seen) > 0
    assert bool(torn) != is_whole


def lock_all(root):
    """Lock every file of the store, as a stopped process of another node might; they are unlocked when closed."""
    held = []
    for path in root.rglob("*"):
        if path.is_file():
            held.append(path.open("rb+"))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
            fcntl.lockf(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


@pytest.mark.shared_core
def test_no_operation_takes_a_lock(nodes):
    a, b = nodes(16 * MIB)
    for number in range(4):
        assert a.write(object_name(number), frame_of(number, MIB))
    held = lock_all(a.root)
    assert len(held) > 6
    for number in range(4, 40):
        assert b.write(object_name(number), frame_of(number, MIB))
        assert read(b, number) == bytes(frame_of(number, MIB))
    assert b.figures().evictions > 0
    b.delete(object_name(39))
    sweep(b)
    for file in held:
        file.close()


def test_the_directory_of_one_machine_does_wait_for_locks(mounts):
    """The control of the test before: a lock on another node stops this kind, so it is not for several nodes."""
    store = f"store-{os.urandom(4).hex()}"
    tier = DirectoryTier(mounts[1] / store, capacity_bytes=16 * MIB, lock_deadline_s=1.0)
    with (mounts[0] / store / "ledger").open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TierError, match="another process held the lock"):
            tier.write(object_name(1), frame_of(1))
    tier.close()


def within(deadline_s, act):
    """The answer of `act`, or the error that it raised; fails when it takes longer than `deadline_s`."""
    answers = []

    def run():
        try:
            answers.append(act())
        except TierError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    assert answers, f"no answer within {deadline_s} s"
    return answers[0]


class KeepsUse(SharedDirectoryTier):
    """A wrong tier: it keeps exclusive use of what it wrote."""

    def _share_use(self, spelled, fan):
        pass


@pytest.mark.parametrize(("kind", "is_shared"), [(SharedDirectoryTier, True), (KeepsUse, False)])
def test_published_objects_need_nothing_from_their_writers_node(ceph, mounts, nodes, kind, is_shared):
    a, b = nodes(kind=kind)
    for number in range(8):
        assert a.write(object_name(number), frame_of(number, MIB))
    names = [object_name(number) for number in range(8)]
    # Else the other node is the only user of their directories, too.
    assert not any(b.contains([ObjectName(name[:-1] + bytes([name[-1] ^ 1])) for name in names]))
    time.sleep(SETTLE_S)
    ceph.clients[0].pause()
    try:
        found = []
        reader = threading.Thread(target=lambda: found.extend(read(b, number) for number in range(8)), daemon=True)
        reader.start()
        reader.join(CUT_OFF_S / 2)
        assert (len(found) == 8) == is_shared
    finally:
        if is_shared:
            ceph.clients[0].resume()
            assert a.contains([object_name(1)]) == [True]  # it was not cut off
        else:
            reader.join(WAIT_S)
            ceph.remount(mounts[0])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["kill", "pause", "partition"])
def test_a_node_that_is_gone_costs_the_other_only_misses(ceph, mounts, nodes, monkeypatch, how):
    if how == "partition" and ceph.network is None:
        pytest.skip(f"no network namespaces: {ceph.no_network}")
    a, b = nodes()
    for number in range(8):
        assert a.write(object_name(number), frame_of(number, MIB))
        assert b.write(object_name(100 + number), frame_of(number, MIB))
    time.sleep(SETTLE_S)
    written = itertools.count(200)

    def write_on():
        while True:
            try:
                number = next(written)
                a.write(object_name(number), frame_of(number, 4 * MIB))
            except TierError:
                return  # the node is gone

    writers = [threading.Thread(target=write_on, daemon=True) for _ in range(2)]
    for writer in writers:
        writer.start()
    while next(written) < 215:
        time.sleep(0.01)
    spelled = object_name(0).hex()
    (fan,) = a.root.glob(f"*/*/{spelled[:2]}")
    unfinished = fan / f"draft_{a._owner}_9999999"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_WRONLY)  # one more write that does not end
    os.write(descriptor, bytes(MIB))
    os.fsync(descriptor)
    client = ceph.clients[0]
    getattr(ceph.network if how == "partition" else client, how)()
    try:
        for number in range(8):  # what was published before is there, without a wait for the other node
            assert within(TRANSFER_DEADLINE_S, lambda n=number: read(b, n)) == bytes(frame_of(number, MIB))
        for number in (*range(100, 108), *range(200, 220)):
            size = MIB if number < 200 else 4 * MIB
            found = within(TRANSFER_DEADLINE_S, lambda n=number, size=size: read(b, n, size))
            assert (
                found is None
                or found == bytes(frame_of(number % 100 if size == MIB else number, size))
                or (
                    number >= 200 and len(found) < size  # its frame shows that it is not whole
                )
            )
        for number in range(300, 330):
            assert within(TRANSFER_DEADLINE_S, lambda n=number: b.write(object_name(n), frame_of(n, MIB))) is True
            assert within(TRANSFER_DEADLINE_S, lambda n=number: b.contains([object_name(n)])) == [True]
        within(TRANSFER_DEADLINE_S, lambda: b.delete(object_name(3)))
        within(TRANSFER_DEADLINE_S, lambda: sweep(b))
    finally:
        client.resume()
        if ceph.network:
            ceph.network.heal()
        for writer in writers:
            writer.join(2 * TRANSFER_DEADLINE_S)
        ceph.remount(mounts[0])
    assert within(TRANSFER_DEADLINE_S, lambda: read(a, 310)) == bytes(frame_of(310, MIB))  # without opening it again
    with suppress(OSError):
        os.close(descriptor)
    assert unfinished.name in {path.name for path in drafts(b.root)}
    monkeypatch.setattr(shared_sweep, "TEMP_AGE_NS", 0)
    sweep(b)
    assert drafts(b.root) == []


@pytest.mark.shared_core
def test_a_file_that_grows_or_vanishes_while_it_is_read(nodes, monkeypatch):
    a, b = nodes()
    assert a.write(object_name(1), frame_of(1, MIB))
    (path,) = [path for path in a.root.glob("*/*/*/*") if path.is_file()]
    whole = path.read_bytes()
    os.truncate(path, MIB // 2)
    assert read(b, 1) == whole[: MIB // 2]  # the frame shows that it is not whole

    read_part = shared_directory.read_part

    def read_slowly(descriptor, view, offset):
        count = read_part(descriptor, view, offset)
        path.write_bytes(whole)  # the size that the reader knows is too small now
        return count

    monkeypatch.setattr(shared_directory, "read_part", read_slowly)
    assert read(b, 1) == whole

    def vanish(descriptor, view, offset):
        if path.exists():
            path.unlink()
        return read_part(descriptor, view, offset)

    monkeypatch.setattr(shared_directory, "read_part", vanish)
    assert read(b, 1) in (whole, None)
    assert read(b, 1) is None
    assert b.contains([object_name(1)]) == [False]
