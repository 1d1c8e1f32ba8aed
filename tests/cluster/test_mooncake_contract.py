"""The Mooncake tier keeps the tier's contract on real servers, and its master's tenants apart."""

import pytest

from kvtier.testing.tier_contract import TierContract, empty_frame, frame_of, object_name

SIZE = 1 << 20


@pytest.mark.cluster_core
class TestMooncake(TierContract):
    has_cap = False
    lists = False
    reads_past_deletes = False  # ADR 17

    @pytest.fixture
    def make_tier(self, mooncake):
        return lambda _: mooncake.tier(transfer_deadline_s=30.0, probe_deadline_s=10.0)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory, running_mooncake):
    """A store whose master knows its default tenant, `wide`, and `narrow` with half an object's quota."""
    folder = tmp_path_factory.mktemp("tenants")
    names = {"default": 64 << 20, "wide": 64 << 20, "narrow": SIZE // 2}
    rows = "".join(f"  - name: {name}\n    quota: {quota}\n" for name, quota in names.items())
    (folder / "quotas.yaml").write_text(f"version: 1\ntenants:\n{rows}")
    flags = ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={folder / 'quotas.yaml'}"]
    store = type(running_mooncake)(folder, nodes=1, flags=flags)
    try:
        store.start()
        yield store
    finally:
        store.close()


def test_a_tenant_of_mooncake_is_passed_on_and_its_refusals_are_named(tenants, caplog):
    prefix, into = tenants.settings().prefix, empty_frame(SIZE)
    tiers = {it: tenants.tier(prefix=prefix, tenant_id=it) for it in ("", "default", "wide", "narrow", "nobody")}
    written = {it: tier.write(object_name(1), frame_of(1, SIZE)) for it, tier in tiers.items() if it != "default"}
    assert written == {"": True, "wide": True, "narrow": False, "nobody": False}
    found = {it: tier.read(object_name(1), into) for it, tier in tiers.items()}
    assert found == {"": SIZE, "default": SIZE, "wide": SIZE, "narrow": None, "nobody": None}
    tiers["wide"].delete(object_name(1))
    assert [tiers[it].contains([object_name(1)]) for it in ("wide", "")] == [[False], [True]]
    said = [record.getMessage() for record in caplog.records if "refuses writes" in record.getMessage()]
    assert [text.rpartition(": ")[2] for text in said] == [
        "the quota of its tenant (tenant_id) has no room",
        "the master does not know its tenant (tenant_id); add it to the master's tenant quotas",
    ]


@pytest.mark.cluster_core
def test_a_master_without_tenants_ignores_them(mooncake):
    prefix = mooncake.settings().prefix
    one, other = mooncake.tier(prefix=prefix, tenant_id="one"), mooncake.tier(prefix=prefix, tenant_id="other")
    assert one.write(object_name(1), frame_of(1))
    assert other.contains([object_name(1)]) == [True]
