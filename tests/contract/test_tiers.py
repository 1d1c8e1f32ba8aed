"""Every tier through the shared contract suite."""

import itertools
import threading

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.policy.fifo import Fifo
from kvtier.runtime.deferred_tier import DeferredAheadTier, DeferredTier
from kvtier.testing.faulty import Delay, Fail, FaultyTier, FlipBit, Hang, Truncate, Vanish
from kvtier.testing.tier import BLOCK_BYTES, TierContract, empty_frame, frame_of, object_name
from kvtier.tier.base import Tier
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.tier.memory import MemoryTier

DEADLINE_S = 20.0


class TestMemory(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes)


class TestMemoryFifo(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: MemoryTier(capacity_bytes=capacity_bytes, evictor=Fifo())


class TestFaultyWithoutFaults(TierContract):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity_bytes: FaultyTier(MemoryTier(capacity_bytes=capacity_bytes))


class TestLate(TierContract):
    @pytest.fixture
    def make_tier(self):
        def make(capacity_bytes: int) -> DeferredTier[MemoryTier]:
            deferred = DeferredTier("memory", lambda: MemoryTier(capacity_bytes=capacity_bytes), 1.0)
            deferred.opened(DEADLINE_S, is_required=True)
            return deferred

        return make


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

    def opened(self, make):
        return make()

    @pytest.fixture
    def make_tier(self, tmp_path):
        numbers = itertools.count()
        tiers = []

        def make(capacity_bytes: int) -> Tier:
            # One segment, with a header and two index blocks beside the frames; a sync would take another.
            whole = capacity_bytes + 3 * BLOCK_BYTES
            tiers.append(
                self.opened(
                    lambda: DiskTier(
                        tmp_path / f"store{next(numbers)}",
                        capacity_bytes=whole,
                        segment_bytes=whole,
                        sync_interval_s=3600.0,
                        **self.settings(),
                    )
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


class TestLateDisk(DiskContract):
    def opened(self, make):
        deferred = DeferredAheadTier("disk", make, 1.0)
        deferred.opened(DEADLINE_S, is_required=True)
        return deferred


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


class Torn(MemoryTier):
    """A wrong tier: it loses the last byte. The suite must see it."""

    def write(self, name, frame, about=...):
        return super().write(name, frame[:-1])


class Overwrites(MemoryTier):
    """A wrong tier: a name changes its bytes. The suite must see it."""

    def write(self, name, frame, about=...):
        self.delete(name)
        return super().write(name, frame)


class Boundless(MemoryTier):
    """A wrong tier: its cap is none. The suite must see it."""

    def _make_room(self, target_bytes):
        return True


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (Torn, "test_behaves_like_a_dict"),
        (Overwrites, "test_a_name_that_is_there_is_left_as_it_is"),
        (Boundless, "test_keeps_to_its_capacity_and_keeps_the_newest"),
    ],
)
def test_the_suite_finds_wrong_tiers(wrong, test):
    def make(capacity_bytes):
        return wrong(capacity_bytes=capacity_bytes)

    given = make(1 << 20) if "there_is" in test else make
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


# The tier that other tests disturb theirs with must do what it says.


@pytest.fixture
def faulty():
    tier = FaultyTier(MemoryTier(capacity_bytes=1 << 20))
    tier.write(object_name(1), frame_of(1))
    return tier


def test_the_nth_operation_fails_and_no_other(faulty):
    faulty.plan = {faulty.operation_count + 2: Fail("as told")}
    into = empty_frame(2 * BLOCK_BYTES)
    assert faulty.read(object_name(1), into) == 2 * BLOCK_BYTES
    with pytest.raises(TierError, match="as told"):
        faulty.read(object_name(1), into)
    assert faulty.read(object_name(1), into) == 2 * BLOCK_BYTES
    assert faulty.counts == {"write": 1, "read": 3}


def test_a_plan_may_be_a_function_of_the_operation(faulty):
    faulty.plan = lambda operation: Fail() if (operation.kind, operation.kind_number) == ("contains", 2) else None
    assert faulty.contains([object_name(1)]) == [True]
    with pytest.raises(TierError):
        faulty.contains([object_name(1)])
    faulty.plan = {}
    assert faulty.contains([object_name(1)]) == [True]


def test_reads_can_be_cut_damaged_or_lost(faulty):
    into = empty_frame(2 * BLOCK_BYTES)
    faulty.plan = lambda _operation: Truncate(100)
    assert faulty.read(object_name(1), into) == 100
    faulty.plan = lambda _operation: FlipBit(8 * 5000 + 3)
    assert faulty.read(object_name(1), into) == 2 * BLOCK_BYTES
    assert [at for at in range(len(into)) if into[at] != frame_of(1)[at]] == [5000]
    assert into[5000] ^ frame_of(1)[5000] == 8
    faulty.plan = lambda _operation: Vanish()
    assert faulty.read(object_name(1), into) is None
    assert faulty.contains([object_name(1)]) == [False]
    assert not faulty.write(object_name(2), frame_of(2))
    faulty.plan = {}
    assert faulty.contains([object_name(1), object_name(2)]) == [True, False]


@pytest.mark.parametrize("fault", [Hang, Delay])
def test_hangs_and_delays_last_until_they_are_released(faulty, fault):
    released = threading.Event()
    faulty.plan = lambda operation: fault(released) if operation.kind == "read" else None
    outcome = []

    def read():
        try:
            outcome.append(faulty.read(object_name(1), empty_frame(2 * BLOCK_BYTES)))
        except TierError as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert faulty.contains([object_name(1)]) == [True]  # others go on
    assert not outcome
    released.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert isinstance(outcome[0], TierError) if fault is Hang else outcome == [2 * BLOCK_BYTES]


def test_a_hang_that_nobody_releases_ends_by_itself(faulty):
    faulty.plan = lambda _operation: Delay(threading.Event(), deadline_s=0.01)
    with pytest.raises(TierError, match="deadline"):
        faulty.read(object_name(1), empty_frame(1))
