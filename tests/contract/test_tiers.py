"""Every tier through the shared contract suite."""

import ctypes
import itertools
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tests.memory_tier import MemoryTier
from tests.tier_makers import makes

from kvtier.errors import TierError
from kvtier.policy.fifo import Fifo
from kvtier.testing import tier_contract as suite
from kvtier.testing.example_tier import Shelf
from kvtier.testing.tier_contract import BLOCK_BYTES, TierContract
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier

NUMBERS = itertools.count()


def fresh(folder: Path) -> Path:
    """The place of a new store."""
    return folder / f"store{next(NUMBERS)}"


class TestMemory(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes)


class TestMemoryFifo(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes, evictor=Fifo())


class DirectoryContract(TierContract):
    settings: ClassVar = {}

    @pytest.fixture
    def make_tier(self, tmp_path):
        yield from makes(
            lambda capacity_bytes: DirectoryTier(fresh(tmp_path), capacity_bytes=capacity_bytes, **self.settings)
        )


class TestDirectory(DirectoryContract):
    pass


class TestDirectoryBuffered(DirectoryContract):
    settings: ClassVar = {"direct_io": "off"}


class TestDirectoryFifoAlone(DirectoryContract):
    @property
    def settings(self):
        return {"shared": False, "evictor": Fifo()}


class DiskContract(TierContract):
    settings: ClassVar = {}

    @pytest.fixture
    def make_tier(self, tmp_path):
        def opened(capacity_bytes: int) -> DiskTier:
            # One segment, with a header and two index blocks beside the frames; a sync would take another.
            whole = capacity_bytes + 3 * BLOCK_BYTES
            sizes = {"capacity_bytes": whole, "segment_bytes": whole}
            return DiskTier(fresh(tmp_path), **sizes, sync_interval_s=3600.0, **self.settings)

        yield from makes(opened)


class TestDisk(DiskContract):
    pass


class TestDiskBuffered(DiskContract):
    settings: ClassVar = {"direct_io": "off"}


class TestDiskOfManySegments(TierContract):
    """Whole segments are given up, so that less is held than could be; what is given is right all the same."""

    forgets_below_capacity = True

    @pytest.fixture
    def make_tier(self, tmp_path):
        def opened(capacity_bytes: int) -> DiskTier:
            segment_bytes = max(capacity_bytes // 64 // BLOCK_BYTES, 8) * BLOCK_BYTES
            if capacity_bytes <= 4 * BLOCK_BYTES:
                pytest.skip("too small for several segments")
            sizes = {"capacity_bytes": max(capacity_bytes, segment_bytes), "segment_bytes": segment_bytes}
            return DiskTier(fresh(tmp_path), **sizes, sync_interval_s=0.01)

        yield from makes(opened)


class TestOutside(TierContract):
    """A tier as another package writes it."""

    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity_bytes: Shelf(fresh(tmp_path), capacity_bytes)


class Torn(MemoryTier):
    """A wrong tier: it loses the last byte. The suite must see it."""

    def write_one(self, name, frame, about):
        return super().write_one(name, frame[:-1], about)


class Overwrites(MemoryTier):
    """A wrong tier: a name changes its bytes. The suite must see it."""

    def write_one(self, name, frame, about):
        self.delete(name)
        return super().write_one(name, frame, about)


class Repeats(MemoryTier):
    """A wrong tier: it takes a name once only. The suite must see it."""

    def write_one(self, name, frame, about):
        return not self.contains([name])[0] and super().write_one(name, frame, about)


class Shortens(MemoryTier):
    """A wrong tier: it says that it holds a name, and holds another's bytes. The suite must see it."""

    def contains(self, names):
        return super().contains([name[:16] for name in names])

    def read_one(self, name, into, offset):
        return super().read_one(name[:16], into, offset)

    def write_one(self, name, frame, about):
        return super().write_one(name[:16], frame, about)


class Boundless(MemoryTier):
    """A wrong tier: its cap is none. The suite must see it."""

    def _make_room(self, target_bytes):
        return True


class Keeps(MemoryTier):
    """A wrong tier: it keeps a part of the buffer. The suite must see it."""

    def read_one(self, name, into, offset):
        self.last = into[1:]
        return super().read_one(name, into, offset)


class Cycles(MemoryTier):
    """A wrong tier: garbage that only a collection finds refers to the buffer. The suite must see it."""

    def write_one(self, name, frame, about):
        part = [frame[1:]]
        part.append(part)
        return super().write_one(name, frame, about)


class ReportsAnErrorFirst(MemoryTier):
    """Its library reports an error for each read, and writes to the buffer later."""

    def __init__(self, *, keeps_views: bool):
        super().__init__(capacity_bytes=1 << 20)
        self.keeps_views, self.pending = keeps_views, []

    def read_one(self, name, into, offset):
        address = np.frombuffer(into, np.uint8).ctypes.data
        self.pending.append((address, into.nbytes, into[:] if self.keeps_views else None))
        raise TierError(self.name, "no such object")

    def write_late(self):
        while self.pending:
            address, size, _view = self.pending.pop()
            ctypes.memset(address, 0xFF, size)


class ReportsAnErrorFirstContract(TierContract):
    @contextmanager
    def failing(self, tier):
        yield tier.write_late


@pytest.mark.parametrize("keeps_views", [False, True])
def test_the_suite_finds_a_tier_whose_library_writes_after_an_error(keeps_views):
    """A tier that gives its library an address is wrong. One whose library refers to the buffer is waited for."""
    right = nullcontext() if keeps_views else pytest.raises(AssertionError, match="bytes arrived after the read")
    with right:
        ReportsAnErrorFirstContract().test_a_write_after_a_reported_error_spoils_no_other_object(
            ReportsAnErrorFirst(keeps_views=keeps_views)
        )


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (Keeps, "test_nothing_refers_to_a_buffer_after_a_call"),
        (Cycles, "test_nothing_refers_to_a_buffer_after_a_call"),
        (Torn, "test_behaves_like_a_dict"),
        (Overwrites, "test_an_existing_name_is_not_overwritten"),
        (Repeats, "test_an_existing_name_is_not_overwritten"),
        (Shortens, "test_names_that_differ_in_one_byte_are_different"),
        (Boundless, "test_keeps_to_its_capacity_and_keeps_the_newest"),
    ],
)
def test_the_suite_finds_wrong_tiers(wrong, test, monkeypatch):
    monkeypatch.setattr(suite, "_LET_GO_S", 0.2)

    def make(capacity_bytes):
        return wrong(capacity_bytes=capacity_bytes)

    given = make(1 << 20) if "name" in test or "buffer" in test else make
    with pytest.raises(AssertionError):
        getattr(TierContract(), test)(given)
