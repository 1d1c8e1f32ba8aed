"""A shared directory of two nodes under many operations, while its files are damaged, removed and replaced."""

import contextlib
import os
import random
import threading

import pytest
from tests import tier_soak
from tests.faults.disk_world import group_of, identity
from tests.memory_tier import MemoryTier
from tests.tier_soak import TierSoak, flip_a_bit, stop_this_process

from kvtier.codec.frame import frame_bytes, pack
from kvtier.codec.raw import Raw
from kvtier.errors import TierError
from kvtier.testing.tier_contract import empty_frame
from kvtier.tier.shared_directory.tier import SharedDirectoryTier

CAPACITY_BYTES = 6 << 20
STOPPED_S = 0.3


def faults_of(root, chance):
    """What harms the files, and what makes the store well again."""

    def files():
        return [path for path in root.glob("*/*/*/*") if path.is_file()]

    def truncate():
        for path in chance.sample(found := files(), min(5, len(found))):
            with contextlib.suppress(FileNotFoundError):  # a sweep may evict it meanwhile
                os.truncate(path, chance.randrange(path.stat().st_size + 1))

    def replace():
        for path in chance.sample(found := files(), min(5, len(found))):
            path.unlink(missing_ok=True)
            chance.choice((os.mkfifo, os.mkdir, lambda it: it.symlink_to("/dev/zero")))(path)

    def heal():
        for path in root.glob("*/*/*/*"):
            if path.is_symlink() or path.is_fifo():
                path.unlink()
            elif path.is_dir():
                path.rmdir()

    return [lambda: flip_a_bit(files(), chance), truncate, replace], heal


def soak(root, seed, operations):
    def make():
        return SharedDirectoryTier(root, key_id=bytes(16), model=bytes(16), capacity_bytes=CAPACITY_BYTES, wait_s=60.0)

    faults, heal = faults_of(root, random.Random(seed))
    return TierSoak(make, [*faults, lambda: stop_this_process(STOPPED_S)], heal, seed).run(operations)


def test_some_thousand_operations_on_a_shared_directory(tmp_path):
    counts = soak(tmp_path / "store", 1, 4000)
    assert counts["right"] > 400
    assert min(counts["absent"], counts["faults"]) > 5


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_million_operations_on_a_shared_directory(tmp_path):
    counts = soak(tmp_path / "store", 2, 1_000_000)
    assert counts["right"] > 100_000
    assert min(counts["absent"], counts["refused"]) > 50


class Late(MemoryTier):
    """A wrong tier: some reads fail, and their bytes arrive later."""

    reads = 0

    def read_one(self, name, into, offset):
        self.reads += 1
        if self.reads % 20:
            return super().read_one(name, into, offset)
        threading.Timer(0.001, self.read_late, (name, into, offset)).start()
        raise TierError(self.name, "given up")

    def read_late(self, name, into, offset):
        with contextlib.suppress(TierError):  # it is closed by then
            super().read_one(name, into, offset)


def sealed_with_other_bytes(number):
    """A frame that verifies, as one of a slot that another object was written to before it was sealed."""
    group = group_of(number)
    slot = empty_frame(frame_bytes(group))
    return pack(slot, group, identity(number), Raw())


def test_the_soak_finds_a_read_that_writes_late():
    tier = Late(capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(AssertionError, match="new owner"):
        TierSoak(lambda: tier, [lambda: None], lambda: None, 1).run(4000)


def test_the_soak_finds_bytes_of_another_object(monkeypatch):
    frames = [*tier_soak.FRAMES[:7], sealed_with_other_bytes(7), *tier_soak.FRAMES[8:]]
    monkeypatch.setattr(tier_soak, "FRAMES", frames)
    tier = MemoryTier(capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(AssertionError, match="wrong bytes as object 7"):
        TierSoak(lambda: tier, [lambda: None], lambda: None, 1).run(4000)
