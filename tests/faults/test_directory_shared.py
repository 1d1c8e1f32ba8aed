"""Several processes in one directory: the cap holds at every moment, the count is exact, no reader sees other bytes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.directory.tier import DirectoryTier, _open_for_reading
from kvtier.tier.files.store_paths import Paths, charge_bytes

WRITER = Path(__file__).with_name("directory_writer.py")
CAPACITY = 40 * BLOCK_BYTES
DEADLINE_S = 120.0


def start_writer(root, seed, count, capacity_bytes=CAPACITY):
    writer = subprocess.Popen(
        [sys.executable, str(WRITER), str(root), str(capacity_bytes), str(seed), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n", writer.stderr.read() if writer.stderr else ""
    return writer


def sizes_under(root):
    """Path to size of every object and draft, read from the file system alone."""
    sizes = {}
    for folder in ("objects", "drafts"):
        for where, _, names in os.walk(root / folder):
            for name in names:
                with suppress(FileNotFoundError):
                    sizes[os.path.join(where, name)] = os.lstat(os.path.join(where, name)).st_size
    return sizes


def bytes_under(root):
    """At most what is there: a file that was renamed between two looks is counted once, by its inode."""
    found = {}
    for folder in ("objects", "drafts"):
        for where, _, names in os.walk(root / folder):
            for name in names:
                try:
                    told = os.lstat(os.path.join(where, name))
                except FileNotFoundError:
                    continue
                found[told.st_ino] = min(found.get(told.st_ino, told.st_size), told.st_size)
    return found


def used_exactly(root):
    return sum(charge_bytes(size) for size in sizes_under(root).values())


class Watcher:
    """Measures the directory again and again.

    One look takes a while and files come and go meanwhile, so a sum over one look may count a victim and what replaced
    it. What is in two looks in a row with the same inode and size was there at the moment between them.
    """

    def __init__(self, root):
        self.root, self.looks, self.worst = root, 0, 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        before = bytes_under(self.root)
        while not self.stop.is_set():
            after = bytes_under(self.root)
            self.worst = max(self.worst, sum(min(size, after[ino]) for ino, size in before.items() if ino in after))
            self.looks += 1
            before = after

    def finish(self):
        self.stop.set()
        self.thread.join(DEADLINE_S)
        return self.worst


def test_two_writers_never_exceed_the_cap_and_never_read_other_bytes(root, open_directory):
    keeper = open_directory(root, capacity_bytes=CAPACITY)
    watcher = Watcher(root)
    writers = [start_writer(root, seed, 1500) for seed in (1, 2)]
    told = []
    for writer in writers:
        out, err = writer.communicate(timeout=DEADLINE_S)
        assert writer.returncode == 0, err
        told.append(json.loads(out))
    assert 0 < watcher.finish() <= CAPACITY
    assert watcher.looks > 10
    for one in told:
        assert one["wrong"] == 0
        assert one["errors"] == 0
        assert one["hits"] > 0
        assert one["evictions"] > 0
    assert keeper.used_bytes == used_exactly(root)  # no process was killed, so the count is exact without a recount
    keeper.close()
    tier = open_directory(root, capacity_bytes=CAPACITY)
    assert tier.used_bytes == used_exactly(root) <= CAPACITY


def test_a_process_finds_and_evicts_what_another_wrote(root, open_directory):
    reader = open_directory(root, capacity_bytes=8 * BLOCK_BYTES)
    writer = open_directory(root, capacity_bytes=8 * BLOCK_BYTES)
    for number in range(4):
        assert writer.write(object_name(number), frame_of(number))
    assert reader.contains([object_name(0), object_name(9)]) == [True, False]
    into = empty_frame(2 * BLOCK_BYTES)
    assert reader.read(object_name(3), into) == 2 * BLOCK_BYTES
    assert into == frame_of(3)
    for number in range(10, 14):  # it knows of two of the four files, and must not evict only its own
        assert reader.write(object_name(number), frame_of(number))
    assert reader.contains([object_name(number) for number in range(10, 14)]) == [True] * 4
    assert reader.used_bytes == 8 * BLOCK_BYTES
    assert writer.read(object_name(0), into) is None
    assert writer.contains([object_name(0)]) == [False]


def test_a_use_by_another_process_spares_a_file_once(root, open_directory):
    tier = open_directory(root, capacity_bytes=4 * BLOCK_BYTES)
    for number in (1, 2):
        assert tier.write(object_name(number), frame_of(number))
    later = time.time_ns() + 10**9
    os.utime(root / "objects" / object_name(1).hex()[:2] / object_name(1).hex(), ns=(later, later))
    assert tier.write(object_name(3), frame_of(3))
    assert tier.contains([object_name(1), object_name(2)]) == [True, False]
    assert tier.write(object_name(4), frame_of(4))
    assert tier.write(object_name(5), frame_of(5))
    assert tier.contains([object_name(1)]) == [False]


def test_reads_tell_other_processes_of_the_use_with_the_next_write_and_not_each_time(root):
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    assert tier.write(object_name(1), frame_of(1))
    path = root / "objects" / object_name(1).hex()[:2] / object_name(1).hex()
    into = empty_frame(BLOCK_BYTES)
    fresh = path.stat().st_mtime_ns
    tier.read(object_name(1), into)
    assert path.stat().st_mtime_ns == fresh
    tier.close()
    os.utime(path, ns=(10**18, 10**18))
    (root / "index").unlink()
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    tier.read(object_name(1), into)
    assert path.stat().st_mtime_ns == 10**18, "a read writes nothing"
    assert tier.write(object_name(2), frame_of(2))
    told = path.stat().st_mtime_ns
    assert told >= fresh
    tier.read(object_name(1), into)
    tier.close()
    assert path.stat().st_mtime_ns == told
    os.utime(path, ns=(10**18, 10**18))
    (root / "index").unlink()
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    tier.read(object_name(1), into)
    tier.close()
    assert path.stat().st_mtime_ns > told, "or when it is closed"


def test_a_file_that_is_being_read_is_not_written_over(root, open_directory):
    """A victim's file becomes the next draft, unless a reader holds it: its bytes must stay what they were."""
    tier = open_directory(root, capacity_bytes=2 * BLOCK_BYTES)
    assert tier.write(object_name(1), frame_of(1))
    path = root / "objects" / object_name(1).hex()[:2] / object_name(1).hex()
    free = path.stat().st_ino
    assert tier.write(object_name(2), frame_of(2))
    path = root / "objects" / object_name(2).hex()[:2] / object_name(2).hex()
    assert path.stat().st_ino == free, "the file of a victim should have been used again"
    descriptor, _ = _open_for_reading(Paths(str(root)), object_name(2), is_direct=False)
    assert tier.write(object_name(3), frame_of(3))
    assert not path.exists()
    assert os.pread(descriptor, 2 * BLOCK_BYTES, 0) == bytes(frame_of(2))
    os.close(descriptor)
    assert tier.used_bytes == 2 * BLOCK_BYTES


def test_a_stopped_process_with_the_lock_cannot_stall_us(root, open_directory):
    tier = open_directory(root, capacity_bytes=CAPACITY, lock_deadline_s=0.2)
    assert tier.write(object_name(1), frame_of(1))
    program = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(root / "ledger")],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(TierError, match=r"held the lock of .* for 0\.2 s"):
            tier.write(object_name(2), frame_of(2))
        with pytest.raises(TierError, match=r"held the lock of .* for 0\.2 s"):
            tier.delete(object_name(1))
        assert time.monotonic() - started < 30
        into = empty_frame(2 * BLOCK_BYTES)
        assert tier.read(object_name(1), into) == 2 * BLOCK_BYTES  # reading needs no lock
        assert tier.contains([object_name(1), object_name(2)]) == [True, False]
    finally:
        holder.kill()
        holder.communicate(timeout=DEADLINE_S)
    assert tier.write(object_name(2), frame_of(2))
    assert tier.used_bytes == used_exactly(root)
