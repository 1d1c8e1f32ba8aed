"""Tiered replays: plans and their regret, sums over time, interruption and the journal."""

import gzip
import itertools
import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tools.charts.test_report import check_page
from tests.tools.replay.test_replay_tiers import BLOCK, CHUNK, agents, hits, replayed, tier
from tests.traces import MAGAGENT, MINISWE

from kvtier.cli.main import run
from kvtier.core import planner as planner_module
from kvtier.core.limits import WritePolicy
from kvtier.core.load_budget import LoadBudget
from kvtier.core.planner import Planner
from kvtier.tools.options import noted_signals
from kvtier.tools.replay import sweep as sweep_module
from kvtier.tools.replay.results import PARTS, PrefillSpeed, best_split
from kvtier.tools.replay.sweep import FinishedReplays
from kvtier.tools.replay.tiered import TieredSetup, replay_tiers, sweep_tiers
from kvtier.tools.replay.virtual_tiers import SPAN_MAX_S, SecondSums

TWO = (list(range(1, 9)), list(range(11, 19)))


def in_turn(count, pause_s=10.0):
    """Two prompts of eight blocks in turn, of which host memory holds one."""
    return [(pause_s * turn, TWO[turn % 2], None) for turn in range(count)]


def test_the_best_split_is_the_least_of_all():
    prefill = PrefillSpeed(tokens_per_s=100.0, attention_tokens=float("inf"))
    shared = {"chunk_tokens": 100, "input_tokens": 450, "prefill": prefill}
    # A chunk takes a second to compute.
    assert best_split([0.5, 1.0, 9.0], ahead_s=0.0, **shared) == (2, 1.0 + 2.5)
    assert best_split([0.5, 1.0, 9.0], ahead_s=9.5, **shared) == (3, 9.5 + 1.5)
    assert best_split([2.0, 4.0], ahead_s=0.0, **shared) == (0, 4.5)
    assert best_split([], ahead_s=1.0, **shared) == (0, 5.5)


def test_plans_are_close_to_the_best_split_on_steady_links():
    result = replayed(in_turn(24), tier("host", 8), tier("disk", 100, bytes_per_s=CHUNK / 0.02)).planning
    assert result.loads == result.requests == 22
    assert result.loaded_tokens == 22 * 8 * BLOCK
    assert result.taken_s < 0.5 * result.recompute_s
    assert 0 <= result.regret_s < 0.02 * result.best_s
    assert result.taken_s == pytest.approx(result.best_s + result.regret_s)
    # The first load has no estimate of its link.
    assert result.predicted_load_s == pytest.approx(result.load_s, rel=0.1)


def test_a_load_that_waits_for_an_earlier_load_has_no_regret():
    # The link to the engine moves a chunk in 10 ms; computing a chunk takes 100 ms, so loading all 40 is always best.
    ids = [list(range(100 * turn, 100 * turn + 40)) for turn in range(2)]
    rows = [(1000.0 * turn, ids[turn], None) for turn in range(2)] + [(2000.0, it, None) for it in ids]
    prefill = PrefillSpeed(tokens_per_s=10 * BLOCK, attention_tokens=float("inf"))
    host = tier("host", 100, bytes_per_s=CHUNK / 0.01)
    it = replayed(rows, host, servers=2, prefill=prefill, is_planned=False).planning
    assert (it.requests, it.loaded_tokens) == (2, 2 * 40 * BLOCK)
    # The first load ends after 40 chunks, the second after 80; then each computes the one token that is left.
    last_token_s, latency_s = 1 / (10 * BLOCK), 1e-4
    assert it.best_s == pytest.approx((40 + 80) * 0.01 + 2 * (last_token_s + latency_s))
    assert it.taken_s == pytest.approx(it.best_s)
    assert it.regret_s == pytest.approx(0, abs=1e-9)


def test_loads_that_would_queue_too_long_are_computed():
    # Twelve loads queue on one known link, which is faster than computing for the first of them only.
    ids = [list(range(100 * turn, 100 * turn + 8)) for turn in range(12)]
    known = [(10.0 * turn, ids[turn % 12], None) for turn in range(24)]
    rush = [(1000.0 + turn / 1000, ids[turn], None) for turn in range(12)]
    tiers = tier("host", 32), tier("disk", 200, bytes_per_s=CHUNK / 0.04)
    wise, blind = (replayed([*known, *rush], *tiers, servers=12, is_planned=it) for it in (True, False))
    assert wise.skipped_tokens + wise.planning.cut_tokens > 0
    assert 0 < wise.planning.loaded_tokens < blind.planning.loaded_tokens
    assert wise.planning.regret_s < 0.3 * blind.planning.regret_s
    assert wise.ttft.p99_s < 0.5 * blind.ttft.p99_s


def further_ratio(seconds_per_chunk):
    """Mean time to first token with a third tier over that without. The trials of the planner, too.

    Only the third tier holds the ends of the prompts. Each request comes after all back-offs are over.
    """
    ids = [[*range(45), *range(100 * end, 100 * end + 5)] for end in range(1, 26)]
    rows = [(40.0 * turn, ids[turn % 25], None) for turn in range(150)]
    two = tier("host", 75), tier("disk", 100)
    further = replace(tier("further", 10_000), read_bytes_per_s=CHUNK / seconds_per_chunk)
    without, outcome = replayed(rows, *two), replayed(rows, *two, further)
    assert outcome.tiers[2].trials == outcome.planning.trials <= outcome.tiers[2].loads
    return outcome.ttft.mean_s / without.ttft.mean_s, outcome.planning.trials


@pytest.mark.parametrize("seconds_per_chunk", [10.0, 1.0, 0.1])
def test_a_further_tier_that_is_too_slow_costs_next_to_nothing(seconds_per_chunk):
    ratio, trials = further_ratio(seconds_per_chunk)
    assert ratio < 1.02
    assert trials > 0


def test_a_further_tier_that_is_fast_enough_is_used():
    assert further_ratio(0.01)[0] < 0.8


def test_trials_without_a_budget_make_a_further_tier_costly(monkeypatch):
    monkeypatch.setattr(planner_module, "TRIAL_SHARE", 1.0)
    assert further_ratio(10.0)[0] > 1.1


def test_concurrent_prompts_are_loaded_if_that_is_faster_for_all():
    # Six concurrent loads, beyond the budget of a link that is four times as fast as computing.
    ids = [list(range(100 * turn, 100 * turn + 12 + 4 * (turn % 3))) for turn in range(6)]
    rows = [(20.0 * (turn // 6), ids[turn % 6], None) for turn in range(60)]
    tiers = tier("host", 200, bytes_per_s=CHUNK / 0.004), tier("disk", 400)
    wise, blind = (replayed(rows, *tiers, is_planned=it) for it in (True, False))
    assert wise.planning.cut_loads == 0
    assert wise.ttft.mean_s < 1.01 * blind.ttft.mean_s < 0.5 * wise.ttft_without.mean_s


@pytest.mark.parametrize(
    ("policy", "chunks"),
    [
        (WritePolicy.THROUGH, 24),  # each once
        (WritePolicy.BACK, 16),  # evicted chunks; the last prompt is still cached
        (WritePolicy.SELECTIVE, 8),  # one prompt is used again before its eviction
    ],
)
def test_writes_of_each_write_policy(policy, chunks):
    rows = [(10.0 * turn, ids, None) for turn, ids in enumerate([*TWO, TWO[0], *TWO, list(range(31, 39))])]
    outcome = replayed(rows, tier("host", 8), tier("disk", 100), write_policy=policy)
    disk = outcome.tiers[1]
    assert disk.writes.total_bytes == chunks * CHUNK
    assert disk.drive_writes_per_day == pytest.approx(chunks / 100 * 86_400 / outcome.duration_s, rel=1e-3)


def test_sums_over_time_are_the_totals():
    rows = [(10.0 * turn, TWO[turn // 2 % 2], None) for turn in range(24)]
    outcome = replayed(rows, tier("host", 8), tier("disk", 100, drive_bytes=400 * CHUNK), nodes=2)
    over_time = outcome.over_time
    assert len(over_time.input_tokens_per_s) == PARTS
    assert sum(over_time.input_tokens_per_s) * over_time.part_s == pytest.approx(outcome.input_tokens)
    for it in outcome.tiers:
        result = over_time.tiers[it.name]
        assert sum(result.hit_tokens_per_s) * over_time.part_s == pytest.approx(it.hit_tokens)
        assert sum(result.read_bytes_per_s) * over_time.part_s == pytest.approx(it.reads.total_bytes)
        assert sum(result.written_bytes_per_s) * over_time.part_s == pytest.approx(it.writes.total_bytes)
        waited_s = sum(result.write_depth) * over_time.part_s
        assert waited_s == pytest.approx(it.writes.mean_depth * it.count * outcome.duration_s, rel=1e-3)
        peak, together = it.reads.peak_bytes_per_s, it.reads.peak_together_bytes_per_s
        assert 0 < 0.99 * peak <= together <= 2e9
    assert over_time.tiers["host"].held_bytes[-1] == 2 * 8 * CHUNK
    assert over_time.tiers["disk"].held_bytes[-1] == outcome.tiers[1].writes.total_bytes
    disk = outcome.tiers[1]
    assert disk.drive_writes_per_day == pytest.approx(disk.writes_per_day / 4)
    assert outcome.ttft.quantiles_s == tuple(sorted(outcome.ttft.quantiles_s))


def test_a_link_that_outlasts_the_last_request_does_not_exceed_its_bandwidth():
    rows = [(turn / 10, list(range(8 * turn, 8 * turn + 8)), None) for turn in range(6)]
    outcome = replayed(rows, tier("host", 48), tier("disk", 100, bytes_per_s=CHUNK), is_planned=False, servers=6)
    written = outcome.tiers[1].writes
    assert written.total_bytes > CHUNK * outcome.duration_s  # the link outlasts the last request
    assert 0.95 < written.used_share <= 1.0
    assert written.mean_bytes_per_s <= 1.001 * written.peak_bytes_per_s
    assert written.mean_depth <= written.peak_depth
    assert outcome.tiers[1].drive_writes_per_day <= 86_400 / 100


def test_second_sums_spread_an_amount_evenly():
    series = SecondSums()
    assert (series.span_s, series.peak) == (0.0, 0.0)
    series.add(0.25, 0.75, 3.0)
    series.add(0.5, 2.5, 4.0)
    assert series.peak == 4.0  # 3 and half a second's share of 4 in two seconds
    assert series.span_s == 3.0
    assert series.means(3.0, 3).tolist() == [4.0, 2.0, 1.0]
    assert series.means(4.0, 2).tolist() == [3.0, 0.5]
    series.add(5.0 * SPAN_MAX_S, 6.0 * SPAN_MAX_S, 7.0)
    assert series.means(SPAN_MAX_S, 1).sum() * SPAN_MAX_S == pytest.approx(14.0)


def test_the_first_ctrl_c_stops_and_the_second_kills():
    with noted_signals(signal.SIGINT) as noted:
        assert noted() is None
        signal.raise_signal(signal.SIGINT)
        assert noted() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def interrupted(add):
    def add_and_interrupt(journal, task, outcome):
        add(journal, task, outcome)
        signal.raise_signal(signal.SIGINT)

    return add_and_interrupt


REQUESTS = 200


@pytest.fixture(scope="session")
def several(tmp_path_factory):
    """Arguments of a replay of six variants of the first requests of a public trace."""
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    trace.write_bytes(b"".join(gzip.decompress(MAGAGENT.read_bytes()).splitlines(keepends=True)[:REQUESTS]))
    return [
        *("replay", str(trace), "--tier", "host=2GiB", "--tier", "disk=20GiB", "--model", "llama-3.1-8b"),
        *("--policy", "lru,fifo", "--nodes", "1,2", "--router", "prefix,session"),
    ]


def test_all_combinations_are_replayed(several, capsys):
    assert run([*several, "--jobs", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    ways = [(1, "prefix"), (2, "prefix"), (2, "session")]  # with one node all routers are the same
    assert [(it["policy"], it["nodes"], it["router"]) for it in result] == [
        (policy, *way) for policy in ("lru", "fifo") for way in ways
    ]
    assert run([*several[:-6], "--policy", "fifo", "--nodes", "2", "--router", "session", "--json"]) == 0
    assert {**json.loads(capsys.readouterr().out), "ttft_unplanned": None} == result[-1]  # only a single setup has it
    assert run([*several[:-4], "--jobs", "1"]) == 0
    table = capsys.readouterr().out
    for it in (result[0], result[3]):
        assert re.search(rf"{it['policy']} +1 +- +{REQUESTS} +{it['hit_rate']:.4f} ", table), table


@pytest.mark.parametrize("is_hasty", [False, True])
def test_a_planner_that_loses_is_warned_of(several, is_hasty, capsys, monkeypatch):
    if is_hasty:  # each load is cut at once
        monkeypatch.setattr(LoadBudget, "cut_s", lambda budget, lowest_s, saved_s: 1e-6)
        monkeypatch.setattr(Planner, "_is_acceptable", lambda planner, plan, now_s: True)
    one = [*several[:8], "--jobs", "1"]
    assert run([*one, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [it in err for it in result["warnings"]] == [True] * is_hasty
    assert (result["ttft"]["mean_s"] > 1.01 * result["ttft_unplanned"]["mean_s"]) == is_hasty
    assert run(one) == 0
    assert re.search(rf"with tiers, no planner +{result['ttft_unplanned']['mean_s']:.3f} ", capsys.readouterr().out)
    assert run([*one, "--no-planner", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["ttft"], alone["ttft_unplanned"], alone["warnings"]) == (result["ttft_unplanned"], None, [])


def test_interrupted_tiered_replays_continue_from_the_journal(several, capsys, tmp_path, monkeypatch):
    keep = tmp_path / "kept"
    arguments = [*several[:-4], "--jobs", "1", "--json"]
    assert run(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    with monkeypatch.context() as patched:
        patched.setattr(FinishedReplays, "add", interrupted(FinishedReplays.add))
        assert run([*arguments, "--keep", str(keep)]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out) == whole[:1]
    assert "Interrupted: 1 of 2 replays" in err
    # The changed value shows that the journal is used.
    entry = json.loads(keep.read_text().replace('"convoys": ', '"convoys": 9'))
    entry["checksum"] = sweep_module._checksum(entry["task"], entry["outcome"])
    keep.write_text(f"{json.dumps(entry)}\n")
    assert run([*arguments, "--keep", str(keep)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [str(it["convoys"]) for it in again] == [f"9{whole[0]['convoys']}", str(whole[1]["convoys"])]
    assert lines(keep) == 2


@pytest.mark.parametrize(("form", "result"), [((), ""), (("--json",), "[]")])
def test_ctrl_c_before_the_first_replay(several, capsys, monkeypatch, form, result):
    opened = FinishedReplays.__init__

    def interrupted_at_once(journal, *arguments):
        opened(journal, *arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FinishedReplays, "__init__", interrupted_at_once)
    assert run([*several[:-6], "--policy", "lru", "--jobs", "1", "--keep", "kept", *form]) == 130
    out, err = capsys.readouterr()
    assert (out.strip(), "Interrupted: 0 of 1 replays" in err) == (result, True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_partial_results_are_returned_and_not_kept(jobs, tmp_path):
    packed, keep = agents(), tmp_path / "kept"
    setups = [
        TieredSetup(tiers=(tier("host", 400), tier("disk", 4000)), token_bytes=1024.0, evictor=evictor)
        for evictor in ("lru", "fifo", "adaptive")
    ]
    asked = []

    def stop():
        asked.append(1)
        return len(asked) >= (50 if jobs == 1 else 1)

    done = sweep_tiers(packed, setups, jobs=jobs, keep=keep, should_stop=stop)
    assert all(not it.is_complete for it in done.values())
    assert lines(keep) == 0
    if jobs == 1:
        ((setup, result),) = done.items()
        assert (setup.evictor, result.requests) == ("lru", 49)
        assert result.input_tokens == int(packed.input_tokens[:49].sum())
    whole = sweep_tiers(packed, setups, jobs=jobs, keep=keep)
    assert whole == {it: replay_tiers(packed, it) for it in setups}
    assert sweep_tiers(packed, setups, keep=keep, should_stop=lambda: True) == whole


def test_the_tiered_report_has_charts_and_tables(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "report.html", tmp_path / "charts.png"
    trace = str(MINISWE)
    tiers = "--tier host=1GiB --tier disk=1xpm1753 --tier shared_directory=1TiB --nodes 2"
    options = "--block 512 --model qwen3-0.6b"
    assert (
        run(["replay", trace, *tiers.split(), *options.split(), "--report", str(path), "--picture", str(picture)]) == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = path.read_text()
    check_page(page)
    assert page.count("<svg") == page.count("<figure>") == 6
    regret = re.search(r"regret, sum and maximum +([0-9.]+ s)", capsys.readouterr().out)[1]
    assert regret in page


def test_the_report_of_several_setups(several, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    assert run([*several[:-4], "--jobs", "1", "--report", str(path), "--json"]) == 0
    page = path.read_text()
    assert page.count("<svg") == page.count("<figure>") == 2 * 5 + 1
    check_page(page)
    assert page.index("eviction lru") < page.index("eviction fifo")
    assert page.count("first turns") == 1


def test_a_trace_of_one_request():
    outcome = replayed([(5.0, [1, 2], None)], tier("host", 8))
    assert (outcome.requests, hits(outcome)) == (1, {"host": 0})
    assert (outcome.planning.requests, outcome.planning.regret_s) == (0, 0.0)


def test_the_documents_python_runs(tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    lines = MINISWE
    monkeypatch.chdir(tmp_path)
    with gzip.open(lines) as source, gzip.open("conversation.jsonl.gz", "wb") as target:
        target.writelines(itertools.islice(source, 60))
    names = {}
    exec(snippet, names)
    assert 0 < names["rates"]["lru"] <= names["rates"]["min"]
    assert names["saved_s"] > 0
    assert names["result"].is_complete
