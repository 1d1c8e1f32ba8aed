"""A prior from a probe's record counts until the link is measured."""

import json
import time

import numpy as np
import pytest
from tests.rig import stored

from kvtier.config.loader import load
from kvtier.core.cache import Cache
from kvtier.core.host_memory import HOST
from kvtier.core.limits import Limits, TierRules
from kvtier.core.link_estimates import LinkEstimator, LinkPrior
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.runtime.link_priors import link_priors
from kvtier.runtime.open import open_session
from kvtier.testing.host_copier import HostCopier
from kvtier.types import ChunkKey, Place, Prefix, Presence, RequestId

MIB = 1 << 20
SLOW = LinkPrior(first_s=0.1, first_bytes=4 * MIB, bytes_per_s=50e6)


def measure(op, size, depth, rate, latency_us):
    figures = {"gb_per_s": rate, "latency_us_p50": latency_us, "latency_us_p99": latency_us}
    return {"op": op, "bytes": size, "depth": depth, **figures}


def config_with(tmp_path, *links, flags=(), tiers=("disk:/x",)):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"links": [{"name": name, "measures": list(it)} for name, it in links]}))
    return load(environ={}, flags=[f"planner.probe_file={path}", *flags], tiers=tiers).config


def test_a_believed_link_is_told_as_it_was_measured():
    estimator = LinkEstimator.from_prior(SLOW)
    assert estimator.is_known
    assert estimator.seconds(54 * MIB, 0, 0.0) == (0.1, pytest.approx(0.1 + 50 * MIB / 50e6))


def test_without_a_belief_nothing_is_known():
    assert LinkEstimator.from_prior(None) == LinkEstimator()
    assert not LinkEstimator().is_known


@pytest.mark.parametrize(("took_s", "least", "most"), [(0.4, 0.4, 0.4), (0.001, 0.005, 0.05)])
def test_what_is_seen_corrects_the_belief(took_s, least, most):
    estimator = LinkEstimator.from_prior(SLOW)
    estimator.began(MIB, 0.0)
    estimator.ended(MIB, took_s, is_moved=True)
    # Bad news is believed at once, good news half the way.
    assert least <= estimator.first_s <= most


def test_the_flow_is_not_guessed_from_the_first_objects_again():
    estimator = LinkEstimator.from_prior(SLOW)
    estimator.began(MIB, 0.0)
    estimator.ended(MIB, 0.1, is_moved=True)
    assert estimator.bytes_per_s == SLOW.bytes_per_s


def test_a_record_gives_the_nearest_measure_and_the_time_to_verify(tmp_path):
    config = config_with(
        tmp_path,
        ("host", [measure("copy", MIB, 1, 8.0, 125), measure("copy", 32 * MIB, 1, 6.0, 5000)]),
        ("checksum", [measure("hash", MIB, 1, 10.0, 100)]),
        ("disk", [measure("read", 4 * MIB, depth, depth / 2, 9000) for depth in (1, 4, 16)]),
        ("directory", [measure("write", 4 * MIB, 4, 9.0, 100)]),
    )
    priors = link_priors(config, 4 * MIB)
    assert set(priors) == {HOST, "disk"}
    # A copy that was measured with a quarter of the bytes takes four times as long.
    assert priors[HOST] == LinkPrior(pytest.approx(4 * 125e-6), 4 * MIB, pytest.approx(8e9))
    # Four reading threads are the default. Two GB/s, and ten for the checksum, one after the other.
    first_s, first_bytes, rate = priors["disk"]
    assert (first_bytes, rate) == (16 * MIB, pytest.approx(1e9 / (1 / 2 + 1 / 10)))
    assert first_s == pytest.approx(9e-3 + 4 * MIB / 10e9)


def test_threads_and_limits_choose_the_depth(tmp_path):
    links = ("disk", [measure("read", MIB, depth, 1.0, 1000 * depth) for depth in (1, 4, 16)])
    for flags, depth in (
        (["tiers.disk.read_threads=16"], 16),
        (["tiers.disk.read_threads=16", "tiers.disk.loads_in_flight=1"], 1),
    ):
        assert link_priors(config_with(tmp_path, links, flags=flags), MIB)["disk"].first_bytes == depth * MIB


def test_a_gpus_link_is_host_memorys_way_to_the_engine(tmp_path):
    links = [("host", [measure("copy", MIB, 1, 8.0, 125)]), ("gpu", [measure("to_gpu", MIB, 1, 50.0, 20)])]
    assert link_priors(config_with(tmp_path, *links), MIB)[HOST].bytes_per_s == pytest.approx(50e9)


def test_without_a_record_there_are_no_priors():
    assert link_priors(load(environ={}).config, MIB) == {}


def test_a_record_that_is_none_stops_the_start(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    config = load(environ={}, flags=[f"planner.probe_file={path}"]).config
    with pytest.raises(ConfigError, match=r"planner\.probe_file = .*not a probe record"):
        link_priors(config, MIB)


def test_the_core_starts_with_them():
    cache = Cache(
        layout=KvLayout(16, (GroupLayout(History(), (4096,), "x"),)),
        slots=(4,),
        tiers=[TierRules(name="disk"), TierRules(name="other")],
        evictor=lambda: make_evictor("lru"),
        limits=Limits(),
        link_priors={"disk": SLOW},
    )
    assert cache._estimators["disk"].seconds(4 * MIB, 0, 0.0)[1] == pytest.approx(0.1)
    assert not cache._estimators["other"].is_known


def open_with(config):
    layout = KvLayout(16, (GroupLayout(History(), (4096,), "x"),))
    return open_session(config, layout, bytes(32), HostCopier(layout, [[np.zeros((4, 1024), np.uint8)]])).session


def offered(session, prefix):
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        priors = session.lookup(RequestId("b"), prefix)
        if priors.presence is not Presence.PROBING:
            return priors.options[0]
        time.sleep(0.001)
    raise AssertionError("the directory did not answer")


def test_a_session_plans_with_what_the_probe_measured(tmp_path):
    links = [("host", [measure("copy", MIB, 1, 8.0, 100)]), ("directory", [measure("read", 4096, 4, 0.001, 5e6)])]
    tiers = [f"directory:{tmp_path / 'kv'}"]
    flags = ["host.capacity_bytes=1MiB", "store.chunk_tokens=16"]
    plain = load(environ={}, flags=flags, tiers=tiers).config
    prefix = Prefix((ChunkKey(bytes(32)),), 16)
    session = open_with(plain)
    stored(session, "a", prefix, [Place(0, 0, (0, 1, 2, 3))])
    session.close(30)
    for config, is_known in ((config_with(tmp_path, *links, flags=flags, tiers=tiers), True), (plain, False)):
        session = open_with(config)
        try:
            option = offered(session, prefix)
        finally:
            session.close(30)
        # Five seconds for an object by the probe's record. Without a record an unmeasured link counts as fast.
        assert option.is_known is is_known
        assert (option.seconds > 4.9) is is_known
