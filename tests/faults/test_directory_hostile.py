"""What others put into a store: nothing outside changes, nothing hangs, nothing but our own errors, and it heals."""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system import snapshot

from kvtier.cli.main import run
from kvtier.codec.frame import frame_bytes, head_bytes, pack, verify_frame
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.errors import CorruptChunkError, KvError, TierError, UnreadableChunkError
from kvtier.keys.secret import load_or_create
from kvtier.layout import GroupLayout, History
from kvtier.tier.base import About
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.snapshot import SnapshotRow, save_snapshot
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.direct import write_all
from kvtier.tier.files.store_paths import charge_bytes
from kvtier.types import ObjectName

GROUP = GroupLayout(History(), (6000, 5000), "test/pages")
FRAME = frame_bytes(GROUP)
CAPACITY = 24 * FRAME
DEADLINE_S = 60
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)  # nothing hangs


def name_of(number):
    return ObjectName(hashlib.sha256(f"object {number}".encode()).digest())


def frame_of(number):
    slot = memoryview(bytearray(FRAME))
    payload = slot[head_bytes(GROUP) :]
    payload[:] = bytes([number % 256]) * len(payload)
    return pack(slot, GROUP, Identity(name_of(number)), Raw())


def path_of(root, number):
    spelled = name_of(number).hex()
    return root / "objects" / spelled[:2] / spelled


def opened(root, capacity_bytes=CAPACITY):
    return DirectoryTier(root, capacity_bytes=capacity_bytes, direct_io="off", lock_deadline_s=5.0)


def filled(root, count=8):
    tier = opened(root)
    for number in range(count):
        assert tier.write(name_of(number), frame_of(number), About(depth=number))
    return tier


def holds(tier, number):
    into = memoryview(bytearray(FRAME))
    return tier.read(name_of(number), into) == FRAME and into == frame_of(number)


def charged(tier):
    return sum(charge_bytes(size) for _, size in tier.scan())


# What may be planted, where.

LINKS = ("link to a file", "link to a directory", "link to nothing")
KINDS = (
    *LINKS, "hard link", "fifo", "socket", "directory", "full directory", "sparse file", "empty file", "garbage",
    "deep JSON", "wrong mode", "far future", "long past", "nothing",
    *(["device"] if os.geteuid() == 0 else []),
)  # fmt: skip


def places(root, chance):
    held, free = name_of(chance.randrange(8)).hex(), name_of(chance.randrange(100, 108)).hex()
    owner = chance.randbytes(8).hex()
    return [
        "kvtier-store.json", "ledger", "index", "drafts", "objects", "secret", f"index.17.{owner}",
        f".kvtier-store.json.{owner}", f"drafts/{owner}-0-{1 << 40}", f"drafts/{owner}.lock", f"drafts/probe_{owner}",
        f"objects/{held[:2]}", f"objects/{held[:2]}/{held}", f"objects/{free[:2]}", f"objects/{free[:2]}/{free}",
    ]  # fmt: skip


def outside_of(where):
    """A tree that no operation may change: among others, files with names that a store gives to its own."""
    outside = where / "outside"
    for folder in ("", "ab", "full"):
        (outside / folder).mkdir(0o700, exist_ok=True)
        for name in (
            "precious",
            "linked",
            "0123456789abcdef-0-4096",
            "0123456789abcdef.lock",
            "probe_0123456789abcdef",
            "ab" * 32,
        ):
            (outside / folder / name).write_bytes(b"years of work, all of it" + bytes(8))
            (outside / folder / name).chmod(0o600)
            os.utime(outside / folder / name, (10**9, 10**9))
    return outside


def plant(kind, path, outside):
    """Put `kind` at `path`, which may be taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20 else b""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match kind:
        case "link to a file":
            path.symlink_to(outside / "precious")
        case "link to a directory":
            path.symlink_to(outside)
        case "link to nothing":
            path.symlink_to(outside / "nothing")
        case "hard link":
            os.link(outside / "linked", path)
        case "fifo":
            os.mkfifo(path)
        case "socket":
            there = os.open(path.parent, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as listener:  # its path must be short
                listener.bind(f"/proc/self/fd/{there}/{path.name}")
            os.close(there)
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        case "directory":
            path.mkdir(0o700)
        case "full directory":
            shutil.copytree(outside, path)
            path.chmod(0o700)
        case "sparse file":
            path.write_bytes(content)
            os.truncate(path, 1 << 40)
        case "empty file":
            path.touch()
        case "garbage":
            path.write_bytes(random.Random(len(content)).randbytes(10_000))
        case "deep JSON":
            path.write_bytes(b"[" * 4096)
        case "wrong mode":
            path.write_bytes(content)
            path.chmod(0)
        case "far future" | "long past":
            path.write_bytes(content)
            at_s = (1 << 33) + (1 << 32) if kind == "far future" else -(1 << 31)
            os.utime(path, (at_s, at_s))
    if kind not in {"wrong mode", "hard link"} and stat.S_ISREG(os.lstat(path).st_mode if kind != "nothing" else 0):
        path.chmod(0o600)


def use(root, numbers):
    """Everything that an engine does; what it may not do shows as an exception other than ours."""
    tier = None
    with suppress(KvError):
        tier = opened(root)
    with suppress(KvError):
        load_or_create(root / "secret", is_inside=True)
    if tier is not None:
        operate(tier, numbers)
        tier.close()


def operate(tier, numbers):
    into = memoryview(bytearray(FRAME))
    for number in numbers:
        name = name_of(number)
        for act in (
            lambda name=name: tier.contains([name]),
            lambda name=name, number=number: tier.write(name, frame_of(number)),
            lambda name=name: check(name, into, tier.read(name, into)),
            lambda: list(tier.scan()),
            lambda name=name: tier.delete(name),
            lambda name=name, number=number: tier.write(name, frame_of(number)),
        ):
            with suppress(KvError):
                act()
    assert tier.used_bytes <= CAPACITY


def check(name, into, count):
    """What was read is the object, or its damage shows."""
    if count is not None:
        with suppress(CorruptChunkError, UnreadableChunkError):
            assert verify_frame(into[:count]).identity.name == name


def inspected(root, capsys):
    for arguments in (["repair"], ["stat"], ["ls"], ["verify"], ["verify", "--repair"], ["stat"], ["purge", "--yes"]):
        assert run(["inspect", arguments[0], str(root), *arguments[1:], "--json"]) in {0, 1, 2}
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        assert not told.out or json.loads(told.out)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_planted_nothing_outside_changes_and_nothing_hangs(tmp_path, seed, capsys):
    chance = random.Random(seed)
    root, outside = tmp_path / "store", outside_of(tmp_path)
    before = snapshot(outside)
    filled(root).close()
    load_or_create(root / "secret", is_inside=True)
    planted = []

    def plant_some():
        for _ in range(chance.randrange(1, 4)):
            kind, place = chance.choice(KINDS), chance.choice(places(root, chance))
            with suppress(NotADirectoryError, FileExistsError):  # something is planted above it
                if (root / place).parent.resolve().is_relative_to(root.resolve()):
                    plant(kind, root / place, outside)
                    planted.append(f"{kind} at {place}")

    def unharmed():
        assert snapshot(outside) == before, planted

    plant_some()
    use(root, [0, 1, chance.randrange(8), 100])
    unharmed()
    live = None
    with suppress(KvError):
        live = opened(root)
    if live is not None:
        plant_some()
        operate(live, [0, chance.randrange(8), *range(100, 108)])
        unharmed()
        live.close()
        unharmed()
    plant_some()
    inspected(root, capsys)
    unharmed()


STRUCTURE = ("ledger", "index", "drafts", "objects", f"objects/{name_of(0).hex()[:2]}", str(path_of(Path(), 0)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"wrong mode", "far future", "long past"}])
@pytest.mark.parametrize("place", STRUCTURE)
def test_a_damaged_structure_heals_at_the_next_open_and_under_a_running_tier(tmp_path, kind, place):
    outside = outside_of(tmp_path)
    for is_live in (False, True):
        root = tmp_path / f"store {is_live}"
        tier = filled(root)
        if not is_live:
            tier.close()
        plant(kind, root / place, outside)
        if not is_live:
            tier = opened(root)
        for number in (50, 0):
            if not tier.write(name_of(number), frame_of(number)) or not holds(tier, number):
                tier.delete(name_of(number))  # garbage under an object's name, which a reader drops
                assert tier.write(name_of(number), frame_of(number))
            assert holds(tier, number)
        assert sum(size for _, size in tier.scan()) <= tier.used_bytes <= CAPACITY
        other = opened(root)  # the first one's lock and count are there for it
        assert other.used_bytes == tier.used_bytes
        assert holds(other, 50)
        other.close()
        tier.close()
        again = opened(root)
        assert holds(again, 50)
        assert holds(again, 0)
        assert again.used_bytes == charged(again)
        again.close()
        for where, folders, files in os.walk(root):
            for path in [*folders, *files]:
                mode = stat.S_IMODE(os.lstat(os.path.join(where, path)).st_mode)
                if not any(planted in where + path for planted in ("aside", "full")):
                    assert mode == (0o700 if path in folders else 0o600), path


def test_a_huge_sparse_object_evicts_nothing(root):
    tier = filled(root)
    for number in (0, 60):  # one that is counted already, and a new one
        path = path_of(root, number)
        path.parent.mkdir(exist_ok=True)
        path.touch(0o600)
        os.truncate(path, 1 << 40)
    for number in range(20, 43):  # room has to be made, and so all is counted
        assert tier.write(name_of(number), frame_of(number))
    assert tier.write(name_of(60), frame_of(60))
    assert tier.used_bytes == charged(tier) <= CAPACITY
    assert all(holds(tier, number) for number in (*range(20, 43), 60))
    tier.close()
    path_of(root, 61).parent.mkdir(exist_ok=True)
    path_of(root, 61).touch(0o600)
    os.truncate(path_of(root, 61), 1 << 40)
    tier = opened(root)
    assert all(holds(tier, number) for number in (*range(20, 43), 60))
    tier.close()


def test_a_victim_that_has_another_name_is_not_written_over(tmp_path, root):
    tier = filled(root, 24)
    for number in range(24):  # as a backup of links does
        os.link(path_of(root, number), tmp_path / str(number))
    for number in range(24, 48):
        assert tier.write(name_of(number), frame_of(number))
    assert tier.evictions == 24
    assert all((tmp_path / str(number)).read_bytes() == frame_of(number) for number in range(24))
    tier.close()


def test_a_hostile_index_with_a_good_checksum_costs_nothing(root):
    filled(root, 20).close()
    far = 1 << 63
    rows = [
        SnapshotRow(name_of(number), name_of(number), far + number, (number % 3 - 1) * (far - 1), number, number)
        for number in range(40)
    ]
    save_snapshot(str(root / "index"), rows + rows)
    for shared in (True, False):
        tier = DirectoryTier(root, capacity_bytes=CAPACITY, direct_io="off", shared=shared)
        assert tier.object_count == 20
        assert tier._index.known_bytes == tier.used_bytes == charged(tier) == 20 * FRAME
        second = opened(root)  # believes the index
        for number in range(60, 90):
            assert second.write(name_of(number), frame_of(number))
            assert second.used_bytes == charged(second) <= CAPACITY
        assert all(holds(second, number) for number in range(67, 90))
        second.close()
        tier.close()
        for number in range(60, 90):
            path_of(root, number).unlink(missing_ok=True)
        filled(root, 20).close()
        save_snapshot(str(root / "index"), rows)


COUNTS = [CAPACITY + 4096, (1 << 64) - 4096, (1 << 64) - 1, 4095]
LEDGERS = [struct.pack("<8sQQ", b"kvledger", count, count ^ ((1 << 64) - 1)) for count in COUNTS]
LEDGERS += [struct.pack("<8sQQ", b"kvledger", 0, 0)]  # the second is not the first with all bits flipped
LEDGERS += [b"", b"kvledger", b"kvcounts0123456789abcdef", b"../../../../../x", bytes(24), b"\xff" * 24, b"junk" * 100]


@pytest.mark.parametrize("content", LEDGERS)
def test_a_cap_file_that_cannot_be_evicts_nothing_and_all_is_counted(root, content):
    tier, other = filled(root), opened(root)
    for each in (tier, other):
        each._byte_cap._count_again_s = 0.0
    (root / "ledger").write_bytes(content)
    assert other.write(name_of(50), frame_of(50))
    assert tier.used_bytes == other.used_bytes == charged(tier) == 9 * FRAME
    (root / "ledger").write_bytes(bytes(24))
    tier.delete(name_of(50))
    assert tier.used_bytes == charged(tier) == 8 * FRAME
    other.close()
    tier.close()


def test_a_draft_of_a_dead_process_evicts_nothing(root):
    tier = filled(root, 24)
    (root / "drafts" / f"0123456789abcdef-0-{1 << 40}").touch()
    (root / "ledger").write_bytes(b"")  # all is counted
    assert tier.write(name_of(50), frame_of(50))
    assert tier.used_bytes == charged(tier) == CAPACITY
    tier.close()


@pytest.fixture
def timeless():
    """A directory on a file system that keeps times of any year."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        yield Path(where)


@pytest.mark.parametrize("at_s", [(1 << 33) + (1 << 32), 1 << 40, -(1 << 31), -(1 << 40)])
def test_a_time_of_any_year_does_no_harm(timeless, at_s, capsys):
    root = timeless / "store"
    tier = filled(root)
    os.utime(path_of(root, 0), (at_s, at_s))
    for number in range(20, 60):
        assert tier.write(name_of(number), frame_of(number))
        assert tier.used_bytes <= CAPACITY
    assert not path_of(root, 0).exists()
    os.utime(path_of(root, 59), (at_s, at_s))
    tier.close()
    (root / "index").unlink()
    opened(root).close()
    tier = opened(root)
    assert holds(tier, 59)
    tier.close()
    os.utime(path_of(root, 59), (at_s, at_s))
    for arguments in (["ls"], ["stat"], ["show"]):
        more = [name_of(59).hex()] if arguments == ["show"] else []
        assert run(["inspect", *arguments, str(root), *more]) == 0
    capsys.readouterr()


def test_a_directory_that_stands_at_the_path_instead_is_not_touched(tmp_path, root):
    """As when a disk is unmounted under a running tier, and files lie where it was mounted."""
    tier = filled(root)
    root.rename(tmp_path / "unmounted")
    for name in ("index", "ledger", "kvtier-status.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"years of work, all of it")
    fan = root / "objects" / name_of(0).hex()[:2]
    fan.mkdir(parents=True)
    (fan / name_of(0).hex()).write_bytes(b"years of work, all of it")
    (root / "drafts").mkdir()
    before = snapshot(root)
    for number in range(4):
        with suppress(TierError):
            tier.read(name_of(0), memoryview(bytearray(FRAME)))
        with suppress(TierError):
            tier.write(name_of(30 + number), frame_of(30 + number))
        with suppress(TierError):
            tier.delete(name_of(0))
    tier.close()
    assert snapshot(root) == before


def test_a_child_of_a_write_keeps_no_object_from_being_read(tmp_path, monkeypatch):
    """The file of a victim is locked while it is written over, and the child inherits the lock."""
    tier = filled(tmp_path / "store", 24)
    children = []

    def fork_and_write(descriptor, frame, **sized):
        child = os.fork()
        if child == 0:
            time.sleep(DEADLINE_S)
            os._exit(0)
        children.append(child)
        write_all(descriptor, frame, **sized)

    monkeypatch.setattr(directory, "write_all", fork_and_write)
    try:
        assert tier.write(name_of(30), frame_of(30))
        assert tier.evictions == 1
        assert holds(tier, 30)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    tier.close()
