"""Many operations on a device that fails now and then, with restarts, kills, forks, damaged and removed files between.

Nothing wrong is ever read, every store opens again, and with the device well the tier is well again. Both tiers on a
local drive.
"""

import errno
import gc
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.faults.disk_world import SEGMENT_BYTES, abandon, check_accounts, look, open_tier
from tests.tier_soak import FRAMES, NAMES, Worker

from kvtier.cli.main import run
from kvtier.errors import DamagedStoreError, TierError
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.marker import MARKER_NAME
from kvtier.tier.disk.status import STATUS_NAME
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files.directory_marker import MARKER_NAME as DIRECTORY_MARKER_NAME
from kvtier.tier.files.store_paths import charge_bytes

CAPACITY_BYTES = 8 * SEGMENT_BYTES


class SickDevice:
    """While `is_sick`, one system call of some fails: with an error, half done, or with a bit turned on the way."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.is_sick = False
        self.counts: Counter[str] = Counter()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Between the tier and the device."""
        instead = {
            "preadv": self._read,
            "pwritev": self._write,
            "fdatasync": self._refuse,
            "posix_fallocate": self._refuse,
        }
        patches = [patch.object(os, name, self._around(getattr(os, name), act)) for name, act in instead.items()]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    def _around(self, real: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if self.is_sick and self.chance.random() < 0.1:
                return act(real, *given)
            return real(*given)

        return call

    def _refuse(self, *_: Any) -> None:
        self.counts["refused"] += 1
        raise OSError(self.chance.choice([errno.EIO, errno.ENOSPC, errno.EROFS]), "planned")

    def _read(self, real: Callable[..., int], descriptor: int, views: list[memoryview], offset: int) -> int:
        fate = self.chance.random()
        if fate < 0.4:
            self._refuse()
        count = real(descriptor, views, offset)
        if fate < 0.6:
            self.counts["short"] += 1
            return max(0, count - 4096)
        view = self.chance.choice(views)
        view[self.chance.randrange(len(view))] ^= 1 << self.chance.randrange(8)
        self.counts["flipped"] += 1
        return count

    def _write(self, real: Callable[..., int], descriptor: int, views: list[memoryview], offset: int) -> int:
        fate = self.chance.random()
        if fate < 0.4:
            self._refuse()
        if fate < 0.7:
            self.counts["lost"] += 1
            return sum(len(view) for view in views)
        self.counts["torn"] += 1
        part = b"".join(views)
        done = self.chance.randrange(len(part) // 4096) * 4096
        if done:
            torn = empty_frame(done)
            torn[:] = part[:done]
            real(descriptor, [torn], offset)
        return len(part) if fate < 0.85 else done or self._refuse() or 0


class Soak:
    """A disk tier, a sick device, and what was seen of it."""

    places = ("segments", STATUS_NAME)
    """What is removed under the tier in use; of a directory sometimes a part."""
    files = (MARKER_NAME, STATUS_NAME)
    """Structure that is damaged between two processes, beside that of the segments."""

    def __init__(self, root: Path, seed: float, counts: Counter[str] | None = None) -> None:
        self.root = root
        self.chance = random.Random(seed)
        self.device = SickDevice(self.chance)
        self.tier = self._opened()
        self.worker = Worker(self.tier, self.chance, counts)
        self.counts = self.worker.counts

    def run(self, operations: int) -> None:
        """Run operations; the device fails in every second stretch of them."""
        steps = [self.worker.step, self.sync, self.turn]
        with self.device.attached():
            for number in range(operations):
                self.device.is_sick = number // 500 % 2 == 1
                (step,) = self.chance.choices(steps, [73, 1, 1])
                try:
                    step()
                except TierError:
                    self.counts["failed"] += 1
                if number % 997 == 0:
                    self.device.is_sick = False
                    self.begin_again()
                if number % 701 == 700:
                    self.device.is_sick = False
                    self.fork()
                    self.lose()

    def sync(self) -> None:
        self.tier.sync()

    def turn(self) -> None:
        self.tier._upkeep()

    def begin_again(self) -> None:
        """The accounts are exact; the store is closed, or left as a kill would, damaged, and found again."""
        self.check()
        if self.chance.random() < 0.5:
            self.abandon()
        else:
            self.tier.close()
        if self.counts["begun"] % 2:
            self.damage()
        self.tier = self.worker.tier = self._opened()
        self.check()
        self.counts["begun"] += 1
        self.counts["found"] += self.tier.object_count

    def fork(self) -> None:
        """A child that ends as programs do; the parent's store is as it was."""
        with ExitStack() as still:
            if isinstance(self.tier, DiskTier):  # its maintenance thread, which writes to segments, waits for these
                still.enter_context(self.tier._pool._turn)
                still.enter_context(self.tier._pool._sync)
            before = self._content()
            child = os.fork()
            if child == 0:
                with suppress(TierError):
                    self.tier.write(object_name(NAMES), FRAMES[0])
                self.tier.close()
                del self.tier, self.worker
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert self._content() == before
        self.counts["forked"] += 1

    def lose(self) -> None:
        """Something is removed or replaced under the tier; its next look around mends that."""
        path = self.root / self.chance.choice(self.places)
        if path.is_dir() and self.chance.random() < 0.5:
            # A single segment that is removed stays in use until the store is closed.
            inside = [below for below in path.rglob("*") if below.is_file() and below.suffix != ".segment"]
            path = self.chance.choice(inside or [path])
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.chance.random() < 0.3:
            make = self.chance.choice([Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
            if path.parent.is_dir() and path.name != MARKER_NAME:
                make(path)
        self.turn()
        number = self.chance.randrange(NAMES)
        self.tier.delete(object_name(number))
        self._write_at_last(number)
        self.counts["lost"] += 1

    def damage(self) -> None:
        """A bit of the structure is flipped, or a file of it is cut off, filled with garbage, or a FIFO."""
        self.counts["damaged"] += 1
        segments = sorted(path for path in (self.root / "segments").glob("*.segment") if path.is_file())
        if segments and self.chance.random() < 0.6:
            path = self.chance.choice(segments)
            at = self.chance.choice([self.chance.randrange(64), SEGMENT_BYTES - 1 - self.chance.randrange(8192)])
            _flip(path, at, self.chance)
            return
        path = self.root / self.chance.choice(self.files)
        fate = self.chance.randrange(4)
        if fate == 0 and path.is_file() and path.stat().st_size:
            _flip(path, self.chance.randrange(path.stat().st_size), self.chance)
        elif fate == 1 and path.is_file():
            os.truncate(path, self.chance.randrange(path.stat().st_size + 1))
        elif fate == 2 and path.is_file():
            path.write_bytes(self.chance.choice([b"[" * 4000, b"\xff" * 300, self.chance.randbytes(2000)]))
        else:
            planted = self.root / "segments" / "00000077.segment"
            with suppress(OSError):
                self.chance.choice([os.mkfifo, _make_sparse])(planted)

    def check(self) -> None:
        """The accounts are exact, as soon as the tier's own thread, which a reopened store wakes, has no turn."""
        end_s = time.monotonic() + 5.0
        (self.root / "segments" / "00000077.segment").unlink(missing_ok=True)
        while True:
            for _ in range(3):  # what it copies may take blocks of the file system, and what it gives up for them, too
                self.tier._upkeep()
            try:
                return check_accounts(self.tier, self.root, CAPACITY_BYTES)
            except AssertionError:
                if time.monotonic() > end_s:
                    raise

    def abandon(self) -> None:
        """Let go of the store as a kill would."""
        abandon(self.tier)

    def _content(self) -> dict[Path, bytes | None]:
        """All files but the status, which the tier's own thread writes at any time."""
        paths = [path for path in self.root.rglob("*") if STATUS_NAME not in path.name]
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    def finish(self) -> None:
        """With the device well all is well."""
        for number in range(5):
            self.tier.delete(object_name(number))
            self._write_at_last(number)
            assert look(self.tier, number) == "right"
        self.check()
        self.tier.close()

    def _write_at_last(self, number: int) -> None:
        """A device that had no room a moment ago may have a write refused, but no more than a few."""
        assert any(self.tier.write(object_name(number), FRAMES[number]) for _ in range(5))

    def _opened(self) -> DiskTier:
        try:
            return self._made()
        except DamagedStoreError:
            assert run(["inspect", "repair", str(self.root)]) == 0
            return self._made()

    def _made(self) -> DiskTier:
        return open_tier(self.root, CAPACITY_BYTES)


class DirectorySoak(Soak):
    """The same of a directory tier, which has no keeper."""

    places = ("objects", "drafts", "ledger", "index")
    files = (DIRECTORY_MARKER_NAME, "ledger", "index")

    def sync(self) -> None:
        self.counts["found"] += sum(1 for _ in self.tier.scan())

    def turn(self) -> None:
        self.tier.contains([object_name(number) for number in range(NAMES)])

    def check(self) -> None:
        """No object is left out of the count, and the cap holds."""
        assert sum(charge_bytes(size) for _, size in self.tier.scan()) <= self.tier.used_bytes <= CAPACITY_BYTES

    def abandon(self) -> None:
        self.tier._guard.close()
        self.tier._release()

    def _write_at_last(self, number: int) -> None:
        """A store is counted at most once a second. Until then it refuses what the old count has no room for."""
        end_s = time.monotonic() + 5.0
        while not self.tier.write(object_name(number), FRAMES[number]):
            assert time.monotonic() < end_s, "the tier has room and refuses all writes"
            time.sleep(0.02)

    def _made(self) -> DirectoryTier:
        return DirectoryTier(self.root, capacity_bytes=CAPACITY_BYTES)


def _flip(path: Path, at: int, chance: random.Random) -> None:
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)


def _make_sparse(path: Path) -> None:
    with open(path, "xb") as file:
        file.truncate(1 << 40)


def soak(world: Soak, operations: int) -> None:
    """Nothing wrong on the way; all that can happen did; and with the device well the tier is well again."""
    world.run(operations)
    counts, faults = world.counts, world.device.counts
    assert min(faults[what] for what in ("refused", "short", "flipped", "lost", "torn")) > operations / 1000
    assert counts["right"] > operations / 4
    assert min(counts[what] for what in ("absent", "refused", "failed", "found")) > operations / 1000
    assert min(counts[what] for what in ("forked", "lost")) > operations / 1000
    assert counts["damaged"] > operations / 10_000
    world.finish()


def disk_soak(root: Path, seed: int, operations: int) -> None:
    """The same, with what only the disk tier has."""
    world = Soak(root, seed)
    soak(world, operations)
    assert all(not segment.pins and not segment.writers for segment in world.tier._pool._segments.values())


def test_some_thousand_operations_on_a_sick_device(tmp_path: Path) -> None:
    disk_soak(tmp_path / "store", 1, 3000)


def test_some_thousand_operations_of_the_directory_tier(tmp_path: Path) -> None:
    soak(DirectorySoak(tmp_path / "store", 1), 3000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_million_operations_on_a_sick_device(tmp_path: Path, seed: int) -> None:
    disk_soak(tmp_path / "store", seed, 250_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_million_operations_of_the_directory_tier(tmp_path: Path, seed: int) -> None:
    soak(DirectorySoak(tmp_path / "store", seed), 250_000)
