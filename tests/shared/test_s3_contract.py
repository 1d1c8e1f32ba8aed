"""The S3 tier keeps the tier's contract on a real server."""

import obstore
import pytest
from tests.shared.s3_world import fresh_prefix, open_tier

from kvtier.testing.tier_contract import TierContract
from kvtier.tier.s3.tier import S3Tier


@pytest.mark.shared_core
class TestS3(TierContract):
    has_cap = False

    @pytest.fixture
    def make_tier(self, gateway):
        patient = {"deadline_s": 30.0, "probe_deadline_s": 10.0}
        return lambda _: open_tier(gateway.access, fresh_prefix(), **patient)


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
