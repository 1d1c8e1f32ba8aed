"""The Mooncake tier keeps the tier's contract on real servers."""

import pytest

from kvtier.testing.tier import TierContract


@pytest.mark.cluster_core
class TestMooncake(TierContract):
    has_cap = False
    lists = False
    reads_past_deletes = False  # ADR 17

    @pytest.fixture
    def make_tier(self, mooncake):
        return lambda _: mooncake.tier(transfer_deadline_s=30.0, probe_deadline_s=10.0)
