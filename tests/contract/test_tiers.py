"""Every tier through the shared contract suite."""

import itertools

import pytest
from tests.memory_tier import MemoryTier
from tests.shelf_tier import Shelf

from kvtier.errors import ConfigError, TierError
from kvtier.policy.fifo import Fifo
from kvtier.testing.tier import BLOCK_BYTES, TierContract, empty_frame, frame_of, object_name
from kvtier.tier.base import Tier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier


class TestMemory(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes)


class TestMemoryFifo(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes, evictor=Fifo())


class DirectoryContract(TierContract):
    def settings(self):
        return {}

    @pytest.fixture
    def make_tier(self, tmp_path):
        numbers = itertools.count()
        tiers = []

        def make(capacity_bytes: int) -> DirectoryTier:
            tiers.append(
                DirectoryTier(tmp_path / f"store{next(numbers)}", capacity_bytes=capacity_bytes, **self.settings())
            )
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()


class TestDirectory(DirectoryContract):
    pass


class TestDirectoryBuffered(DirectoryContract):
    def settings(self):
        return {"direct_io": "off"}


class TestDirectoryFifoAlone(DirectoryContract):
    def settings(self):
        return {"shared": False, "evictor": Fifo()}


class DiskContract(TierContract):
    def settings(self):
        return {}

    @pytest.fixture
    def make_tier(self, tmp_path):
        numbers = itertools.count()
        tiers = []

        def make(capacity_bytes: int) -> Tier:
            # One segment, with a header and two index blocks beside the frames; a sync would take another.
            whole = capacity_bytes + 3 * BLOCK_BYTES
            tiers.append(
                DiskTier(
                    tmp_path / f"store{next(numbers)}",
                    capacity_bytes=whole,
                    segment_bytes=whole,
                    sync_interval_s=3600.0,
                    **self.settings(),
                )
            )
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()


class TestDisk(DiskContract):
    pass


class TestDiskBuffered(DiskContract):
    def settings(self):
        return {"direct_io": "off"}


class TestDiskOfManySegments(TierContract):
    """Whole segments are given up, so that less is held than could be; what is given is right all the same."""

    forgets_below_capacity = True

    @pytest.fixture
    def make_tier(self, tmp_path):
        numbers = itertools.count()
        tiers = []

        def make(capacity_bytes: int) -> DiskTier:
            segment_bytes = max(capacity_bytes // 64 // BLOCK_BYTES, 8) * BLOCK_BYTES
            if capacity_bytes <= 4 * BLOCK_BYTES:
                pytest.skip("too small for several segments")
            tiers.append(
                DiskTier(
                    tmp_path / f"store{next(numbers)}",
                    capacity_bytes=max(capacity_bytes, segment_bytes),
                    segment_bytes=segment_bytes,
                    sync_interval_s=0.01,
                )
            )
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()


class TestOutside(TierContract):
    """A tier as another package writes it."""

    @pytest.fixture
    def make_tier(self, tmp_path):
        numbers = itertools.count()
        return lambda capacity_bytes: Shelf(tmp_path / f"shelf{next(numbers)}", capacity_bytes)


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
def test_the_suite_finds_wrong_tiers(wrong, test):
    def make(capacity_bytes):
        return wrong(capacity_bytes=capacity_bytes)

    given = make(1 << 20) if "name" in test or "buffer" in test else make
    with pytest.raises(AssertionError):
        getattr(TierContract(), test)(given)


def test_memory_refuses_an_impossible_capacity():
    with pytest.raises(ConfigError, match=r"capacity_bytes must be at least 1, got 0"):
        MemoryTier(capacity_bytes=0)


def test_memory_tells_what_it_holds():
    tier = MemoryTier(capacity_bytes=4 * BLOCK_BYTES)
    for number in range(5):
        assert tier.write(object_name(number), frame_of(number))
    assert (tier.used_bytes, tier.object_count, tier.evictions) == (4 * BLOCK_BYTES, 2, 3)
    with pytest.raises(TierError, match="offset"):
        tier.read(object_name(4), empty_frame(1), -1)
