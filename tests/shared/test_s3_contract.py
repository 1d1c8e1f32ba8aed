"""The S3 tier keeps the tier's contract on a real server."""

import obstore
import pytest
from tests.shared.s3_world import fresh_prefix, key_of, open_tier

from kvtier.errors import TierError
from kvtier.testing.tier import BLOCK_BYTES, TierContract, empty_frame, frame_of, object_name
from kvtier.tier.base import Read, Write
from kvtier.tier.s3.tier import S3Tier


@pytest.mark.shared_core
class TestS3(TierContract):
    has_cap = False

    @pytest.fixture
    def make_tier(self, gateway):
        tiers = []

        def make(_capacity_bytes):
            tiers.append(open_tier(gateway.access, fresh_prefix(), deadline_s=30.0, probe_deadline_s=10.0))
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()


class Overwrites(S3Tier):
    """A wrong tier: it does not ask for a condition. The suite must see it."""

    def _put(self, key, view):
        obstore.put(self._store, key, view, use_multipart=False)
        return True


def test_the_suite_finds_a_wrong_tier(gateway, monkeypatch):
    monkeypatch.setattr("tests.shared.s3_world.S3Tier", Overwrites)
    tier = open_tier(gateway.access, fresh_prefix())
    with pytest.raises(AssertionError):
        TierContract().test_an_existing_name_is_not_overwritten(tier)
    tier.close()


def test_a_batch_runs_concurrently_and_each_object_has_its_own_result(gateway):
    tier = open_tier(gateway.access, fresh_prefix())
    assert tier.write_many([Write(object_name(n), frame_of(n)) for n in range(60)]) == [True] * 60
    gateway.proxy.delay_s = 0.05  # a round trip takes 0.1 s: one after the other 6 s, two groups of 32 some 0.3 s
    reads = [Read(object_name(n), empty_frame(2 * BLOCK_BYTES)) for n in range(60)]
    assert tier.read_many(reads) == [2 * BLOCK_BYTES] * 60
    assert all(read.into == frame_of(n) for n, read in enumerate(reads))
    gateway.proxy.delay_s = 0.0
    obstore.put(gateway.raw, key_of(tier, object_name(61)), b"short")
    answers = tier.read_many([Read(object_name(n), empty_frame(BLOCK_BYTES)) for n in (0, 60, 61)])
    assert answers == [BLOCK_BYTES, None, 5]
    gateway.proxy.cut()
    answers = tier.read_many([Read(object_name(n), empty_frame(BLOCK_BYTES)) for n in range(2)])
    assert isinstance(answers[0], TierError)
    tier.close()
