"""Tiered replays: links and tiers equal counts by hand, sharing and routing matter, and slow tiers do no harm."""

import pytest
from tests.traces import MAGAGENT, MINISWE, listed, replay

from kvtier.cli.main import run
from kvtier.tools.replay.node import ReplayNode
from kvtier.tools.replay.results import PrefillSpeed, TierSpec
from kvtier.tools.replay.tiered import ROUTERS, TieredSetup, replay_tiers
from kvtier.tools.replay.virtual_tiers import EventQueue, LinkSeries, ReplayLink, link_stats
from kvtier.tools.trace.formats.base import open_trace

BLOCK, TOKEN = 64, 1024.0
CHUNK = int(BLOCK * TOKEN)


def whole_blocks(rows):
    """A trace from a list of (time, ids, session), all blocks whole, and one token more."""
    return listed([(time_s, len(ids) * BLOCK + 1, ids, session) for time_s, ids, session in rows], BLOCK)


def tier(name, chunks, bytes_per_s=1e9, **more):
    speeds = {"read_bytes_per_s": bytes_per_s, "write_bytes_per_s": bytes_per_s, "latency_s": 1e-4}
    return TierSpec(name=name, capacity_bytes=chunks * CHUNK, **speeds, **more)


def replayed(rows, *tiers, **more):
    settings = {"token_bytes": TOKEN, "prefill": PrefillSpeed(tokens_per_s=1000.0), "servers": 1, **more}
    return replay_tiers(whole_blocks(rows), TieredSetup(tiers=tiers, **settings))


def agents():
    """The first requests of a public trace."""
    trace = open_trace(MAGAGENT)
    first = [(it.time_s, it.blocks[: (it.input_tokens - 1) // BLOCK], it.session) for it in trace.requests()]
    return whole_blocks(first[:160])


def hits(outcome):
    return {it.name: it.hit_tokens // BLOCK for it in outcome.tiers}


def test_a_link_serves_one_after_the_other():
    events, ended = EventQueue(), []
    series = LinkSeries()
    link = ReplayLink(events, 100.0, 0.5, series)
    events.at(1.0, lambda: [link.send(150, lambda: ended.append(events.now_s)) for _ in range(2)])
    events.at(9.0, lambda: link.send(100, lambda: ended.append(events.now_s)))
    events.run()
    assert ended == [3.0, 4.5, 10.5]
    use = link_stats([link], series, 10.0)
    assert (use.total_bytes, use.mean_bytes_per_s, use.peak_bytes_per_s, use.peak_depth) == (400, 40.0, 100.0, 2)
    assert use.mean_depth == pytest.approx((2 * 2.0 + 1.5 + 1.5) / 10)


def test_hits_in_host_memory():
    rows = [(0.0, [1, 2, 3], None), (10.0, [1, 2, 4], None), (20.0, [1, 2, 4, 5], None), (30.0, [9], None)]
    outcome = replayed(rows, tier("host", 100))
    assert hits(outcome) == {"host": 2 + 3}
    host = outcome.tiers[0]
    assert host.reads.total_bytes == 5 * CHUNK
    assert host.writes.total_bytes == 6 * CHUNK  # 1 2 3, 4, 5, 9
    assert outcome.hit_rate == pytest.approx(5 * BLOCK / (11 * BLOCK + 4))
    assert outcome.loads == 2
    first = 193 * (1 + 193 / 2 / 53_000) / 1000
    assert outcome.ttft.p99_s == pytest.approx(first, rel=0.1)
    assert outcome.ttft.mean_s < outcome.ttft_without.mean_s


def test_chunks_beyond_host_memory_come_from_the_lower_tier():
    first, second = list(range(1, 9)), list(range(11, 19))
    rows = [(0.0, first, None), (10.0, second, None), (20.0, first, None), (30.0, second, None)]
    assert hits(replayed(rows, tier("host", 8))) == {"host": 0}
    outcome = replayed(rows, tier("host", 8), tier("disk", 100))
    assert sum(hits(outcome).values()) == 16
    assert hits(outcome)["disk"] >= 8
    disk = outcome.tiers[1]
    assert disk.writes.total_bytes == 16 * CHUNK  # written once
    assert disk.writes_per_day == pytest.approx(16 / 100 * 86_400 / outcome.duration_s, rel=1e-3)
    small = replayed(rows, tier("host", 8), tier("disk", 8))
    assert small.tiers[1].evictions > 0
    assert sum(hits(small).values()) < 16


def test_a_tier_slower_than_computing_is_not_used():
    first, second = list(range(1, 9)), list(range(11, 19))
    rows = [(10.0 * turn, first if turn % 2 else second, None) for turn in range(24)]
    slow = replayed(rows, tier("host", 8), tier("disk", 100, bytes_per_s=CHUNK / 0.3))
    fast = replayed(rows, tier("host", 8), tier("disk", 100))
    assert hits(fast)["disk"] > 8 * 15
    assert (slow.planning.loaded_tokens, hits(slow)["disk"]) == (0, 0)
    assert slow.skipped_tokens > 0
    assert 0 < slow.planning.trials < slow.planning.requests  # tried again now and then
    assert slow.planning.regret_s < 0.06 * slow.planning.best_s
    assert slow.ttft.p99_s < 1.3 * slow.ttft_without.p99_s  # of 24 requests: the first load over an unknown link
    blind = replayed(rows, tier("host", 8), tier("disk", 100, bytes_per_s=CHUNK / 0.3), is_planned=False)
    assert blind.planning.loaded_tokens > 0
    assert blind.planning.regret_s > slow.planning.best_s
    assert blind.ttft.mean_s > 2 * blind.ttft_without.mean_s


def test_without_tiers_prompts_wait_for_each_other():
    outcome = replayed([(0.0, [1], None), (0.0, [2], None), (0.0, [3], None)], tier("host", 100))
    took = 65 * (1 + 65 / 2 / 53_000) / 1000
    assert outcome.ttft_without.mean_s == pytest.approx(took * (1 + 2 + 3) / 3)
    assert outcome.ttft.mean_s == pytest.approx(outcome.ttft_without.mean_s)


def test_a_shared_tier_serves_chunks_of_other_nodes():
    rows = [(10.0 * turn, [1, 2, 3, *range(10, 10 + turn)], "s") for turn in range(6)]
    alone = replayed(rows, tier("host", 50), tier("disk", 100), nodes=2)
    shared = replayed(rows, tier("host", 50), tier("disk", 100, is_shared=True), nodes=2)
    sticky = replayed(rows, tier("host", 50), tier("disk", 100), nodes=2, router="session")
    assert sum(hits(shared).values()) > sum(hits(alone).values())
    assert sum(hits(shared).values()) == sum(hits(sticky).values())
    assert shared.tiers[1].hit_tokens > 0
    assert sticky.tiers[1].hit_tokens == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_remote_tier_is_asked_for_few_names_in_at_most_three_rounds(monkeypatch, is_remote):
    asked = []
    real = ReplayNode._probed

    def probed(self, probe, tier):
        asked.append((self._events.now_s, len(probe.objects)))
        real(self, probe, tier)

    monkeypatch.setattr(ReplayNode, "_probed", probed)
    prompt = list(range(200))
    rows = [(0.0, prompt, None), (1000.0, list(range(1000, 1300)), None), (2000.0, [*prompt, 900], None)]
    outcome = replayed(rows, tier("host", 300), tier("far", 1000, 1e12, is_remote=is_remote))
    assert hits(outcome)["far"] == 200
    rounds = [count for time_s, count in asked if time_s >= 2000]
    if is_remote:
        assert rounds[0] == 1
        assert len(rounds) <= 3
        assert sum(rounds) < 60
    else:
        assert rounds == [201]


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_are_deterministic_and_serve_all_requests(router):
    packed = agents()
    setup = TieredSetup(
        tiers=(tier("host", 400), tier("disk", 4000, is_shared=True)), token_bytes=TOKEN, nodes=3, router=router
    )
    result = []
    outcome = replay_tiers(packed, setup, result.append)
    assert sum(result) == len(packed)
    assert outcome == replay_tiers(packed, setup)
    # No request hits more than an infinite cache.
    assert 0.5 < outcome.hit_rate <= replay(packed, "infinite", None).hit_rate


def test_affinity_routers_hit_more_than_random():
    packed = agents()
    rates = {
        router: replay_tiers(
            packed, TieredSetup(tiers=(tier("host", 1000),), token_bytes=TOKEN, nodes=4, router=router)
        ).hit_rate
        for router in ("random", "session", "prefix")
    }
    assert rates["session"] > rates["random"] + 0.1
    assert rates["prefix"] > rates["random"] + 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tier", "disk=1TiB"), "host memory is missing or not first"),
        (("--tier", "host=1MiB"), "fewer than two blocks"),
        (("--tier", "host=1GiB", "--tier", "host=1GiB"), "twice"),
        (("--tier", "host=1GiB", "--router", "best"), "--router 'best'; allowed: random"),
        (("--tier", "host=1GiB", "--nodes", "0"), "--nodes 0; allowed: 1 to 65536"),
        (("--tier", "host=1GiB", "--nodes", "9999999999"), "--nodes 9999999999; allowed: 1 to 65536"),
        (("--tier", "host=1GiB", "--servers", "0"), "--servers 0; allowed: 1 to 65536"),
        (("--tier", "host=1GiB", "--servers", "9999999999"), "--servers 9999999999; allowed: 1 to 65536"),
        (("--tier", "host=1GiB", "--policy", "belady"), "unknown eviction policy 'belady'; allowed: adaptive, "),
        (
            ("--tier", "host=1GiB", "--gpu", "h1000"),
            "gpu.name = 'h1000' (from --gpu): the catalogue has no such GPU; did you mean h100-",
        ),
        (("--tier", "host=1GiB", "--probe", "nowhere.json"), "--probe = nowhere.json: No such file"),
    ],
)
def test_wrong_tiers_are_explained(capsys, arguments, message):
    assert run(["replay", str(MINISWE), *arguments]) == 2
    assert message in capsys.readouterr().err
