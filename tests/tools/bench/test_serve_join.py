"""The join of a served benchmark: known figures from files of known speeds, and what is missing, torn or wrong."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests import serve_runs
from tests.serve_runs import BASE_S, KV_BYTES, OUTPUT_S, PAIR_S, TOKEN_S, write_run

from kvtier.errors import ConfigError
from kvtier.report.output import print_json
from kvtier.tools.bench.serve.join import SOURCE_COUNTERS, join, read_run, write_joined
from kvtier.tools.bench.serve.regret import PrefillFit, join_runs, token_rates
from kvtier.tools.bench.serve.results import (
    Prices,
    arm_result,
    hit_share,
    keep_series,
    read_results,
    repetitions,
    serve_record,
    spread,
    unit_cost,
)

CONTRACT = {
    *("name", "repetition", "requests", "requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms"),
    *("computed_tokens", "tokens_by_place", "read_bytes", "written_bytes", "cpu_s", "rss_bytes", "energy_j", "failed"),
}
REQUESTS = 16
GOLDEN = Path(__file__).parents[2] / "golden" / "serve"


def change(path, edit, *, key=None):
    """Rewrite the lines of a file, or only that of request `key`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if key in (None, row.get("id")):
            edit(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, "kvtier")


@pytest.fixture
def plain(tmp_path):
    return write_run(tmp_path, "none", users=6)


def test_the_logs_of_client_engine_and_kvtier_meet_in_each_request(run):
    joined = {it.id: it for it in join(read_run(run)).requests}
    assert len(joined) == REQUESTS
    first, later = joined["u0t0"], joined["u1t2"]
    assert first.tokens_by_place == {"computed": 832, "resident": 256}
    assert first.prefill_s == pytest.approx(serve_runs.prefill_s(832, 256))
    prompt = 256 + 768 + 3 * 64 + 2 * 20
    assert later.prompt_tokens == prompt
    assert later.tokens_by_place == {"computed": prompt - 1152, "resident": 256, "host": 1152 - 256}
    assert (later.user, later.turn, later.loaded_bytes) == (1, 2, 896 * KV_BYTES)
    assert later.chosen_tokens == 1152
    assert later.tpot_s == pytest.approx(OUTPUT_S)
    assert later.ttft_s == pytest.approx(0.001 + later.load_s + later.prefill_s, rel=0.01)
    assert not any(it.is_sum_wrong for it in joined.values())


def test_hits_are_counted_by_session_of_two_or_more_requests(run):
    change(run / "requests.jsonl", lambda row: row.update(user=10 + row["turn"]) if row["user"] == 3 else None)
    for turn in (1, 2, 3):  # nothing came back for user 1
        change(run / "engine.jsonl", lambda row: row.update(cached_tokens=256), key=f"u1t{turn}")
        change(run / "kvtier.jsonl", lambda row: row.update(loaded_tokens={}), key=f"u1t{turn}")
    prompts = [256 + 768 + 64 + turn * 84 for turn in range(4)]
    loaded = [0, *(prompt // 64 * 64 - 64 - 256 for prompt in prompts[1:])]
    full = (4 * 256 + sum(loaded)) / sum(prompts)
    found = arm_result(join(read_run(run))).hits_by_session
    assert found == pytest.approx({"sessions": 3, "min": 1024 / sum(prompts), "median": full, "max": full})


def test_the_figures_of_a_run(run):
    result = arm_result(join(read_run(run)))
    assert (result.requests, result.failed, result.wrong_sums, result.unmatched, result.error) == (16, 0, 0, 0, None)
    assert sum(result.tokens_by_place.values()) == result.prompt_tokens
    assert result.computed_tokens == result.tokens_by_place["computed"]
    assert result.output_tokens_per_s == pytest.approx(20 * 16 / result.seconds)
    assert result.tpot_ms == pytest.approx(dict.fromkeys(("p50", "p95", "p99"), 10))
    assert result.cpu_s == pytest.approx(0.9 * result.seconds)
    assert result.loaded_bytes == KV_BYTES * (result.tokens_by_place["host"] + result.tokens_by_place["disk"])
    assert (result.energy_j, result.energy_source) == (None, "unknown: no meter")
    assert [row["turn"] for row in result.by_turn] == [0, 1, 2, 3]
    assert hit_share(result.by_turn[0]["tokens_by_place"]) == pytest.approx(256 / 1088)
    assert hit_share(result.by_turn[3]["tokens_by_place"]) > 0.9
    assert result.rss_bytes == (1 << 30) + 16 - 1


def test_seconds_add_up_to_the_run(run):
    joined = join(read_run(run))
    columns = joined.seconds
    edges = [0.0, *columns["at_s"]]
    widths = [after - before for before, after in itertools.pairwise(edges)]
    total = sum(rate * width for rate, width in zip(columns["output_tokens_per_s"], widths, strict=True))
    # The first sample comes with the first token of the first request, the last one before the last answer's end.
    assert 20 * 16 - 40 < total <= 20 * 16
    assert set(columns) >= {"resident_share", "host_share", "disk_share", "computed_share", "read_gb_per_s"}
    assert columns["queue_depth"] == pytest.approx([4.0] * len(edges[1:]))
    assert columns["cpu_cores"] == pytest.approx([0.9] * len(edges[1:]))
    assert "gpu_watts" not in columns


def test_warm_up_and_what_was_sent_outside_the_interval_do_not_count(run):
    change(run / "requests.jsonl", lambda row: row.update(is_warm_up=True), key="u0t0")
    change(run / "requests.jsonl", lambda row: row.update(sent_s=row["sent_s"] - 60), key="u1t0")
    change(run / "requests.jsonl", lambda row: row.update(error="HTTP 500", first_s=None), key="u2t0")
    result = arm_result(join(read_run(run)))
    assert (result.requests, result.failed) == (13, 1)


def test_a_changed_token_count_is_reported(run):
    change(run / "engine.jsonl", lambda row: row.update(cached_tokens=row["cached_tokens"] + 1), key="u1t2")
    joined = join(read_run(run))
    assert [it.id for it in joined.requests if it.is_sum_wrong] == ["u1t2"]
    result = arm_result(joined)
    assert result.wrong_sums == 1
    right = sum(it.prompt_tokens for it in joined.requests if it.id != "u1t2")
    assert sum(result.tokens_by_place.values()) == right


@pytest.mark.parametrize("missing", ["engine", "kvtier", "samples"])
def test_without_a_file_its_figures_are_unknown(run, missing):
    (run / f"{missing}.jsonl").unlink()
    result = arm_result(join(read_run(run)))
    assert result.requests == 16
    assert result.ttft_ms["p50"] > 0
    match missing:
        case "engine":
            assert (result.tokens_by_place, result.computed_tokens) == (None, None)
        case "kvtier":  # as with another connector: the engine has one sum for its own cache and the connector
            assert set(result.tokens_by_place) == {"computed", "cached"}
            assert result.load_ms["p50"] is None
        case "samples":
            assert (result.cpu_s, result.rss_bytes, result.read_bytes) == (None, None, None)


def test_counters_of_the_engine_split_what_its_log_has_as_one_sum(tmp_path):
    run = write_run(tmp_path, "native")
    metric = 'vllm:prompt_tokens_by_source_total{source="%s"}'

    def count(row):
        grown = row["time_s"] - serve_runs.BEGAN_S
        row["metrics"] = {metric % "local_cache_hit": grown, metric % "external_kv_transfer": 3 * grown}

    change(run / "samples.jsonl", count)
    result = arm_result(join(read_run(run)))
    places = result.tokens_by_place
    assert set(places) == {"computed", "resident", "external"}
    assert places["external"] == pytest.approx(3 * places["resident"], abs=2)
    assert sum(places.values()) == result.prompt_tokens


def test_torn_lines_and_foreign_data_are_left_out(run):
    path = run / "requests.jsonl"
    whole = path.read_text()
    path.write_text('null\n[1]\n{"id": \n{"sent_s": "x"}\n' + whole + whole[:30])
    files = read_run(run)
    assert (len(files.requests), files.skipped) == (REQUESTS, {"requests.jsonl": 4})
    assert arm_result(join(files)).skipped_lines == 4
    change(run / "engine.jsonl", lambda row: row.update(cached_tokens=10**400, prefill_s=float("nan")), key="u0t0")
    assert arm_result(join(read_run(run))).requests == REQUESTS
    (run / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json: .*allowed: a complete run"):
        read_run(run)


def test_a_counter_that_fell_is_unknown(run):
    change(run / "samples.jsonl", lambda row: row.update(cpu_s=-row["cpu_s"]))
    result = arm_result(join(read_run(run)))
    assert result.cpu_s is None
    assert result.client_cpu_s is not None


def test_prefill_times_are_fitted_on_the_arm_without_a_connector(plain):
    fit = PrefillFit.of(join(read_run(plain)).requests)
    for computed, before in ((500, 256), (1000, 256)):
        assert fit.seconds(computed, before) == pytest.approx(serve_runs.prefill_s(computed, before), rel=0.01)
    assert fit.seconds(10**6, 0) is None
    assert min(fit.base_s, fit.token_s, fit.pair_s) >= 0
    assert PrefillFit.of([]) is None
    assert TOKEN_S > PAIR_S < BASE_S


def test_regret_is_the_loss_against_the_faster_alternative(tmp_path, plain):
    fast = write_run(tmp_path, "kvtier", tier_ratio=0.1)
    slow = write_run(tmp_path, "kvtier", tier_ratio=3)
    _, good, bad = join_runs([plain, fast, slow])
    for it in good.requests:
        assert it.regret_s is None if it.turn == 0 else it.regret_s == pytest.approx(0, abs=0.003)
    rates = token_rates(bad)
    assert rates["disk"] == pytest.approx(1 / (3 * TOKEN_S), rel=0.01)
    wrong = [it for it in bad.requests if it.turn and "disk" in it.offered_tokens]
    assert len(wrong) == 6
    for it in wrong:  # loading took three times as long as computing
        computed = serve_runs.prefill_s(it.prompt_tokens - 256, 256)
        assert it.regret_s == pytest.approx(it.load_s + it.prefill_s - computed, rel=0.05)
    result = arm_result(bad)
    assert result.regret_ms["requests"] == 12
    assert result.regret_ms["mean"] == pytest.approx(1e3 * sum(it.regret_s for it in wrong) / 12, rel=0.05)
    (alone,) = join_runs([slow])
    assert all(it.regret_s is None for it in alone.requests)  # nothing to fit computing on


def test_medians_over_repetitions_and_a_record_that_reads_back(tmp_path):
    folders = [write_run(tmp_path, arm, repetition=number) for number in range(3) for arm in ("none", "kvtier")]
    record = serve_record(join_runs(folders), settings={}, seed=1, conditions={"model": "m"})
    results = read_results(json.loads(json.dumps(record, default=asdict)))
    assert [it.name for it in results if it.series] == ["none", "kvtier"]
    grouped = repetitions(results)
    assert [len(runs) for runs in grouped.values()] == [3, 3]
    varied = [replace(it, requests_per_s=float(number)) for number, it in enumerate(results[:3], 1)]
    found = spread(varied, lambda it: it.requests_per_s)
    assert (found.median, found.low, found.high, found.text()) == (2, 1, 3, "2 (1 to 3)")
    assert spread(varied, lambda it: it.energy_j) is None
    assert keep_series([replace(results[0], status="failed")])[0].series == {}


def test_cost_and_energy_of_a_million_tokens(tmp_path):
    result = arm_result(join(read_run(write_run(tmp_path, "kvtier", joules_per_s=50))))
    assert result.energy_j == pytest.approx(50 * result.seconds, rel=0.01)
    assert result.energy_source == "processor"
    cost = unit_cost(result, Prices(machine_hour=2.0, kwh=0.3))
    kwh = result.energy_j / 3.6e6
    assert cost["per_million_output_tokens"] == pytest.approx((2 * result.seconds / 3600 + kwh * 0.3) / 320 * 1e6)
    assert cost["per_million_tokens"] < cost["per_million_output_tokens"]
    assert cost["kwh_per_million_output_tokens"] == pytest.approx(kwh / 320 * 1e6)
    unknown = unit_cost(replace(result, energy_j=None), Prices(machine_hour=2.0, kwh=0.3))
    assert (unknown["per_million_output_tokens"], unknown["kwh_per_million_output_tokens"]) == (None, None)
    assert unit_cost(replace(result, energy_j=None), Prices(machine_hour=2.0))["per_million_output_tokens"] > 0


def test_the_joined_rows_lie_beside_the_files(run):
    write_joined(run, join(read_run(run)))
    rows = [json.loads(line) for line in (run / "joined.jsonl").read_text().splitlines()]
    assert len(rows) == REQUESTS
    assert rows[0]["tokens_by_place"] == {"computed": 832, "resident": 256}
    assert "at_s" in json.loads((run / "seconds.json").read_text())


def counter(folder, name):
    """The counter's last value in the samples."""
    return json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])["metrics"].get(name, 0)


def test_real_runs_of_three_arms_add_up_to_the_counters_of_their_servers():
    """18 requests and a warm-up on vLLM. Some loads of the arm kvtier were cut; vLLM counts their tokens as loaded."""
    joined = {run.files.arm: run for run in join_runs(sorted(GOLDEN.iterdir()))}
    results = {name: arm_result(run) for name, run in joined.items()}
    for result in results.values():
        assert (result.requests, result.failed, result.wrong_sums, result.unmatched) == (18, 0, 0, 0)
        assert sum(result.tokens_by_place.values()) == result.prompt_tokens == 24570
    warm_up = 491
    assert results["none"].tokens_by_place == {"computed": 19962, "resident": 4608}
    assert counter(GOLDEN / "none-0", SOURCE_COUNTERS["computed"]) == 19962 + warm_up
    assert counter(GOLDEN / "none-0", SOURCE_COUNTERS["resident"]) == 4608
    assert set(results["native"].tokens_by_place) == {"computed", "resident", "external"}
    assert results["native"].computed_tokens + warm_up == counter(GOLDEN / "native-0", SOURCE_COUNTERS["computed"])
    for place in ("host", "disk"):
        loaded = counter(GOLDEN / "kvtier-0", f'vllm:kvtier_load_tokens_total{{place="{place}"}}')
        assert results["kvtier"].tokens_by_place[place] == loaded > 0
    cut = {it.id: it for it in joined["kvtier"].requests}["m-0-1"]
    assert cut.tokens_by_place == {"computed": 1109, "resident": 256}
    assert cut.load_s > 0.1
    assert cut.queue_s < 0.01  # vLLM counts the load as queueing
    assert {it.id for it in joined["kvtier"].requests if it.turn and it.regret_s is None} == set()
    assert token_rates(joined["kvtier"]).keys() == {"host", "disk"}


def test_a_figure_of_half_a_run_is_unknown(tmp_path):
    run = write_run(tmp_path, "kvtier", joules_per_s=50)
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    change(run / "samples.jsonl", lambda row: row.update(gpu={"watts": 300.0, "utilisation": 0.5}))
    assert arm_result(join(read_run(run))).energy_source == "GPU and processor"
    (run / "samples.jsonl").write_text("".join(lines[: len(lines) // 2]))
    change(run / "samples.jsonl", lambda row: row.update(gpu={"watts": 300.0, "utilisation": 0.5}))
    result = arm_result(join(read_run(run)))
    assert (result.cpu_s, result.read_bytes, result.written_bytes, result.energy_j) == (None, None, None, None)
    change(
        run / "samples.jsonl", lambda row: row.update(cpu_s=None) if row["time_s"] > serve_runs.BEGAN_S + 3 else None
    )
    columns = join(read_run(run)).seconds
    assert columns["cpu_cores"][-1] is None
    assert columns["cpu_cores"][0] == pytest.approx(0.9)


def test_writes_after_the_last_answer_count(run):
    before = arm_result(join(read_run(run))).written_bytes
    last = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    with (run / "samples.jsonl").open("a") as file:
        file.write(
            json.dumps(last | {"time_s": last["time_s"] + 3, "written_bytes": last["written_bytes"] + 7777}) + "\n"
        )
    assert arm_result(join(read_run(run))).written_bytes == before + 7777


def test_a_run_that_sent_nothing_took_no_time(run):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"measured_from_s": None, "status": "failed"}))
    (run / "requests.jsonl").unlink()
    joined = join(read_run(run))
    result = arm_result(joined)
    assert (result.seconds, result.requests, joined.seconds) == (0, 0, {})
    assert (result.requests_per_s, result.cpu_s, result.ttft_ms["p50"]) == (None, pytest.approx(0), None)


def test_computed_tokens_of_some_requests_are_no_total(run):
    rows = (run / "engine.jsonl").read_text().splitlines(keepends=True)
    (run / "engine.jsonl").write_text("".join(rows[::2]))
    joined = join(read_run(run))
    lost = joined.requests[1]
    assert (lost.tokens_by_place, lost.prefill_s, lost.queue_s) == (None, None, None)
    assert lost.ttft_s is not None
    result = arm_result(joined)
    assert (result.unmatched, result.computed_tokens) == (8, None)
    assert result.tokens_by_place["computed"] > 0


def test_regret_is_unknown_without_the_log_of_the_arm_without_a_connector(tmp_path, plain):
    (plain / "engine.jsonl").unlink()
    _, own = join_runs([plain, write_run(tmp_path, "kvtier", users=6, tier_ratio=1)])
    assert all(it.regret_s is None for it in own.requests)


def test_time_that_failed_requests_took_is_in_the_rates(run):
    """A server that answers some requests and then hangs is not as fast as if it had stopped there."""
    before = arm_result(join(read_run(run)))
    late_s = json.loads((run / "run.json").read_text())["ended_s"] + 60
    change(run / "requests.jsonl", lambda row: row.update(error="timeout", first_s=None, ended_s=late_s), key="u3t3")
    result = arm_result(join(read_run(run)))
    assert result.seconds == pytest.approx(before.seconds + 60)
    assert result.output_tokens_per_s == pytest.approx(20 * 15 / result.seconds)
    assert result.cpu_s is None  # the samples end a minute before


def test_json_has_the_names_of_the_contract_at_its_top(tmp_path, capsys):
    runs = join_runs([write_run(tmp_path, arm) for arm in ("none", "kvtier")])
    print_json(serve_record(runs, settings={}, seed=1, conditions={})["results"])
    for arm in json.loads(capsys.readouterr().out)["arms"]:
        assert set(arm) >= CONTRACT
        assert set(arm["ttft_ms"]) == set(arm["tpot_ms"]) == {"p50", "p95", "p99"}
        counted = ("repetition", "requests", "failed", "computed_tokens", "read_bytes", "written_bytes", "rss_bytes")
        assert {type(arm[name]) for name in counted} == {int}
        assert arm["energy_j"] is None


def test_a_slow_prefill_after_the_best_choice_is_no_regret(tmp_path, plain):
    """The arm kvtier stores while it computes; what that takes is no fault of a choice."""
    fast = write_run(tmp_path, "kvtier", tier_ratio=0.1)
    change(fast / "engine.jsonl", lambda row: row.update(prefill_s=1.9 * row["prefill_s"]))
    _, joined = join_runs([plain, fast])
    regrets = [it.regret_s for it in joined.requests if it.turn]
    assert regrets == [0] * 12


def test_a_request_that_computes_what_a_fast_drive_offers_has_a_regret(tmp_path, plain):
    fast = write_run(tmp_path, "kvtier", tier_ratio=0.1)
    prompt = 1256
    took_s = serve_runs.prefill_s(prompt - 256, 256)
    change(fast / "engine.jsonl", lambda row: row.update(cached_tokens=256, prefill_s=took_s), key="u2t2")
    change(fast / "kvtier.jsonl", lambda row: row.update(loaded_tokens={}, loaded_bytes=0, load_s=0), key="u2t2")
    _, joined = join_runs([plain, fast])
    (refused,) = [it for it in joined.requests if it.id == "u2t2"]
    assert (refused.prompt_tokens, refused.offered_tokens) == (prompt, {"disk": 896})
    best_s = 896 * 0.1 * TOKEN_S + serve_runs.prefill_s(prompt - 1152, 1152)
    assert refused.regret_s == pytest.approx(took_s - best_s, rel=0.05)
