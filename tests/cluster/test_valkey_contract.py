"""The Valkey tier keeps the tier's contract on a real server and on a real cluster."""

import pytest
from tests.cluster.valkey_world import fresh_prefix, open_tier

from kvtier.testing.tier_contract import TierContract, empty_frame, frame_of, object_name
from kvtier.tier.base import Read, Write
from kvtier.tier.valkey.parts import PART_BYTES


class Shared(TierContract):
    has_cap = False
    odd_sizes = (*TierContract.odd_sizes, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5)

    def servers(self, request):
        raise NotImplementedError

    @pytest.fixture
    def make_tier(self, request):
        patient = {"deadline_s": 30.0, "probe_deadline_s": 10.0}
        return lambda _: open_tier(*self.servers(request), prefix=fresh_prefix(), **patient)

    def test_a_frame_of_several_parts_is_read_from_any_offset(self, tier):
        size = 3 * PART_BYTES + 100
        frame = frame_of(7, size)
        assert tier.write(object_name(7), frame)
        for offset in (0, 5, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 9, size - 1, size, size + PART_BYTES):
            for wanted in (0, 1, PART_BYTES, 2 * PART_BYTES + 3, size + 3 * PART_BYTES):
                into = empty_frame(wanted)
                count = tier.read(object_name(7), into, offset)
                expected = frame[offset : offset + wanted]
                assert (count, into[:count]) == (expected.nbytes, expected), (offset, wanted)
                assert into[count:] == bytes(wanted - count)
        tier.delete(object_name(7))
        assert tier.read(object_name(7), empty_frame(size)) is None
        shorter = frame_of(8, 2 * PART_BYTES)
        assert tier.write(object_name(7), shorter)
        into = empty_frame(size)
        assert tier.read(object_name(7), into) == shorter.nbytes
        assert into[: shorter.nbytes] == shorter

    def test_a_batch_of_objects_of_one_part_and_of_several(self, tier):
        sizes = [100, 2 * PART_BYTES + 1, PART_BYTES, 4096, 3 * PART_BYTES]
        frames = [frame_of(n, size) for n, size in enumerate(sizes)]
        writes = [Write(object_name(n), frame) for n, frame in enumerate(frames)]
        assert tier.write_many(writes) == [True] * 5
        assert tier.write_many(writes) == [True] * 5
        assert tier.figures().write_bytes == {"frames": sum(sizes)}
        reads = [Read(object_name(n), empty_frame(3 * PART_BYTES)) for n in range(6)]
        assert tier.read_many(reads) == [*sizes, None]
        assert all(read.into[:size] == frame for read, size, frame in zip(reads, sizes, frames, strict=False))


@pytest.mark.cluster_core
class TestServer(Shared):
    def servers(self, request):
        return [request.getfixturevalue("valkey")]


@pytest.mark.cluster_core
class TestCluster(Shared):
    def servers(self, request):
        return request.getfixturevalue("cluster").nodes[:2]


def test_the_suite_finds_a_wrong_tier(valkey, monkeypatch):
    """Its writes replace what is there."""
    monkeypatch.setattr("kvtier.tier.valkey.parts.NEW_ONLY", b"KEEPTTL")
    tier = open_tier(valkey, prefix=fresh_prefix())
    with pytest.raises(AssertionError):
        TierContract().test_an_existing_name_is_not_overwritten(tier)
