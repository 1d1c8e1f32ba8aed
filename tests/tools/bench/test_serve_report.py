"""The report of a served benchmark: the answer first, a page that a browser draws, and what limits the figures."""

import json
import re
from dataclasses import asdict, replace

import pytest
from bench.parts.compared import COMPARED, compared
from bench.parts.served_picture import write_picture
from bench.tables import RECORDS
from tests.serve_runs import write_run
from tests.tools.charts.test_report import check_page

from kvtier.tools.bench.serve.regret import join_runs
from kvtier.tools.bench.serve.report import (
    answer_charts,
    arms_table,
    conditions,
    cost_table,
    notes,
    place_charts,
    runs_table,
    series_charts,
    serve_report,
    work_table,
)
from kvtier.tools.bench.serve.results import Prices, arm_result, serve_record
from kvtier.tools.bench.serve.summary import ServeRecord, answer, headline, p50_ms
from kvtier.tools.charts.chart import Curve

CONDITIONS = {
    "model": "random weights",
    "arms": {"none": "no connector", "native": "vLLM's tiering, copies by memcpy of ours", "kvtier": "kvtier"},
}


def record_of(folders):
    record = serve_record(join_runs(folders), settings={}, seed=1, conditions=CONDITIONS)
    return json.loads(json.dumps(record, default=asdict))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    top = tmp_path_factory.mktemp("swept")
    folders = []
    for number in range(2):
        folders.append(write_run(top, "none", repetition=number, users=6, joules_per_s=40))
        for ratio in (0.1, 1, 20):
            for arm in ("native", "kvtier"):
                folders.append(write_run(top, arm, repetition=number, tier_ratio=ratio, users=6, joules_per_s=40))
    return record_of(folders)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    top = tmp_path_factory.mktemp("loaded")
    return record_of(
        [
            write_run(top, arm, load={"requests_per_s": rate}, seconds_between=1 / rate)
            for arm in ("none", "kvtier")
            for rate in (1, 2)
        ]
    )


def only(served, when):
    """The record with some of its runs."""
    return replace(served, results=[it for it in served.results if when(it)])


def changed(served, when, **fields):
    """The record with other figures in some of its runs."""
    return replace(served, results=[replace(it, **fields) if when(it) else it for it in served.results])


def with_p50(served, name, ms, **other):
    """The record with the same median in all runs of one arm."""
    return changed(served, lambda it: it.name == name, ttft_ms={"p50": ms, "p95": ms}, **other)


def test_the_tails_of_first_and_later_tokens_stand_beside_the_medians(swept):
    served = ServeRecord.of(swept)
    figures = {"ttft_ms": {"p50": 100.0, "p95": 200.0, "p99": 345.0}, "tpot_ms": {"p50": 7.0, "p95": 8.0, "p99": 91.0}}
    table = arms_table(changed(served, lambda _: True, **figures))
    at = table.columns.index("TTFT p50, ms")
    assert table.columns[at : at + 5] == ("TTFT p50, ms", "p95, ms", "p99, ms", "ITL p50, ms", "ITL p99, ms")
    assert all(row[at : at + 5] == ("100", "200", "345", "7", "91") for row in table.rows)
    assert len(table.columns) - table.numeric == 3
    assert "ITL" in table.note
    before = {name: {"p50": 100.0, "p95": 200.0} for name in figures}
    table = arms_table(changed(served, lambda _: True, **before))
    assert table.columns[at : at + 3] == ("TTFT p50, ms", "p95, ms", "TPOT, ms")
    assert len(table.columns) - table.numeric == 3


def test_ticks_stand_at_the_loads_that_were_run(loaded):
    charts = answer_charts(ServeRecord.of(loaded))
    assert all(list(chart.x.ticks) == [1, 2] for chart in charts.values())
    assert all({*curve.x} <= {1, 2} for chart in charts.values() for curve in chart.marks if isinstance(curve, Curve))


def test_the_answer_is_the_comparison_at_the_fastest_drive(swept):
    served = ServeRecord.of(swept)
    assert served.top == ((), 0.1)
    ours, theirs = served.at("kvtier", served.top, p50_ms), served.at("none", served.top, p50_ms)
    text = answer(served)
    assert f"against {theirs.median:.3g} ms without ({theirs.median / ours.median:.2g} times as fast; " in text
    assert "over the runs, n = 48 in 2 runs each, load average 0.5 to 1.5)" in text
    assert "With a throttled drive kvtier is faster at R = 0.1 and 1 and is slower at R = 20 (n = 48 or more)." in text
    heading = f"With kvtier the first token comes {theirs.median / ours.median:.2g} times as fast as without ("
    assert headline(served).startswith(heading)
    faster = with_p50(served, "native", ours.median / 3)
    assert ", with native (memcpy stand-in) " in headline(faster)
    without = with_p50(with_p50(only(served, lambda it: it.name != "none"), "native", 1000), "kvtier", 500)
    assert "2 times as fast as with native (memcpy stand-in) (" in headline(without)


def test_without_two_arms_nothing_is_compared(swept):
    served = ServeRecord.of(swept)
    alone = only(served, lambda it: it.name == "kvtier")
    assert answer(alone) == "One arm only: there is nothing to compare with."
    failed = changed(served, lambda it: it.name == "kvtier", status="failed", error="server ended")
    assert "No complete runs of both" in answer(failed)
    assert any("kvtier (repetition 1, R = 0.1) failed: server ended" in note for note in notes(failed))


def test_tables_have_every_arm_and_its_spread(swept):
    served = ServeRecord.of(swept)
    assert [row[0] for row in arms_table(served).rows] == ["none", *["native", "kvtier"] * 3]
    assert (len(work_table(served).rows), len(runs_table(served).rows)) == (7, 14)
    priced = cost_table(replace(served, prices=Prices(machine_hour=3.0, kwh=0.25)))
    assert "3 for an hour of the machine, 0.25 for a kWh. Energy: processor" in priced.note
    assert "-" not in [cell for row in priced.rows for cell in row]
    assert {row[1] for row in cost_table(served).rows} == {"-"}


def test_notes_say_what_was_left_out(swept):
    served = ServeRecord.of(swept)
    assert list(notes(served)) == []
    changed = replace(served.results[0], wrong_sums=2, unmatched=3, failed=4, skipped_lines=5)
    said = " ".join(notes(replace(served, results=[changed])))
    assert re.findall(r"\b([2345]) ", said) == ["2", "3", "4", "5"]


def test_the_page_is_self_contained_and_has_every_part(swept):
    pytest.importorskip("matplotlib")
    page = serve_report(ServeRecord.of(swept, Prices(machine_hour=3.0))).html()
    check_page(page)
    assert len(page) < 2_000_000
    parts = (
        *("Time to first token against the drive", "Speed", "Hits by turn", "Prompt tokens by place"),
        *("Queue depth of the drive", "Cost and energy of a million tokens", "All runs", "Regret of a request"),
    )
    assert [it for it in parts if it not in page] == []


def test_the_charts_follow_what_was_varied(swept, loaded, tmp_path):
    pytest.importorskip("matplotlib")
    by_ratio, by_load = ServeRecord.of(swept), ServeRecord.of(loaded)
    assert list(place_charts(by_ratio)) == ["places", "turns", "turns-ttft"]
    assert {"reads", "depth", "watts"} <= set(series_charts(by_ratio))
    assert "watts" not in series_charts(by_load)
    assert answer_charts(by_ratio)["ttft"].heading.endswith("the drive's speed")
    assert answer_charts(by_load)["ttft"].heading.endswith("load")
    write_picture(tmp_path / "picture.svg", loaded)
    assert "requests/s asked for" in (tmp_path / "picture.svg").read_text()
    one = only(by_load, lambda it: it.load["requests_per_s"] == 2)
    assert answer_charts(one)["ttft"].heading == "Time to first token"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four arms at three loads, the last of them beyond what the server computes."""
    top = tmp_path_factory.mktemp("four")
    folders = [
        write_run(top, arm, users=8, seconds_between=1 / rate,
                  load={"requests_per_s": rate, "share_of_capacity": rate / 2})
        for arm in ("none", "native", "lmcache", "kvtier")
        for rate in (0.5, 1, 3)
    ]  # fmt: skip
    return record_of(folders)


def test_four_arms_are_told_apart_and_the_limit_of_computing_is_drawn(four, tmp_path):
    pytest.importorskip("matplotlib")
    served = ServeRecord.of(four)
    assert served.names == ["none", "native", "lmcache", "kvtier"]
    charts = answer_charts(served)
    assert charts["ttft"].y == replace(charts["ttft-p95"].y, label=charts["ttft"].y.label), "compared by eye"
    *curves, limit = charts["ttft"].marks
    assert (limit.at, limit.is_vertical) == (2, True)
    for looks in ([it.colour for it in curves], [it.marker for it in curves], [str(it.dash) for it in curves]):
        assert len(set(looks)) == 4
    write_picture(tmp_path / "picture.svg", four)
    picture = (tmp_path / "picture.svg").read_text()
    assert [picture.count(f">{name}</text>") for name in ("no offloading", "native", "LMCache", "kvtier")] == [3] * 4
    assert "first token within 1 s" in picture


def test_the_comparison_takes_lmcaches_times_from_a_record_that_has_them(loaded, four):
    others = [json.loads((RECORDS / f"{name}.json").read_text()) for name in COMPARED]
    record = json.loads(json.dumps(four))
    for arm in record["results"]["arms"]:
        arm["ttft_ms"] = {"p50": 1234.0, "p95": 5678.0} if arm["name"] == "lmcache" else arm["ttft_ms"]
    with_it, without = (
        next(line for line in compared(it, *others).splitlines() if "served" in line) for it in (record, loaded)
    )
    assert "| 1,234 / 5,678 ms |" in with_it
    assert "not measured" not in with_it
    assert "not measured" in without


def test_cells_in_which_kvtier_is_behind_are_named(four):
    even = changed(ServeRecord.of(four), lambda _: True, ttft_ms={"p50": 100.0, "p95": 200.0}, goodput_per_s=1.0)
    assert answer(even).endswith("kvtier is nowhere behind by more than 3%.")
    later = changed(
        even, lambda it: it.name == "native" and it.point[0][0][1] == 1, ttft_ms={"p50": 90.0, "p95": 199.0}
    )
    later = changed(later, lambda it: it.name == "lmcache" and it.point[0][0][1] == 3, goodput_per_s=1.5)
    assert answer(later).endswith(
        "kvtier is behind by more than 3% here: median at 1 requests/s, 0.5 of capacity, 100 ms against 90 ms native "
        "(memcpy stand-in); goodput at 3 requests/s, 1.5 of capacity, 1/s against 1.5/s LMCache."
    )
    few = changed(later, lambda _: True, requests=29)
    assert "behind" not in answer(few), "too few requests for a verdict"


@pytest.mark.parametrize(
    ("ours_ms", "words"),
    [
        (1000, "as fast as without"),
        (980, "as fast as without"),
        (960, "1.04 times as fast as without"),
        (500, "2 times as fast as without"),
        (4, "250 times as fast as without"),
        (1045, "1.04 times as slow as without"),
        (3000, "3 times as slow as without"),
    ],
)
def test_the_heading_for_each_outcome(loaded, ours_ms, words):
    served = with_p50(with_p50(ServeRecord.of(loaded), "none", 1000, requests=30), "kvtier", ours_ms, requests=30)
    assert headline(served).startswith(f"With kvtier the first token comes {words} (n = 30 in 1 run each, load")
    assert f"({words.removesuffix(' as without')}; n = 30 in 1 run each, load average 0.5 to 1.5)" in answer(served)


def test_few_requests_have_no_verdict(loaded):
    """1.24 times as slow, of six requests in one run of each."""
    served = with_p50(with_p50(ServeRecord.of(loaded), "none", 1000, requests=40), "kvtier", 1240, requests=6)
    assert headline(served) == "With kvtier and without: too few requests for a verdict (n = 6)"
    assert "times as" not in answer(served)
    assert "(too few requests for a verdict (n = 6))" in answer(served)
    swept_few = replace(served, results=[replace(it, tier_ratio=1.0) for it in served.results])
    assert "kvtier has too few requests for a verdict (n = 6) at R = 1" in answer(swept_few)


def test_a_verdict_says_what_it_rests_on(swept):
    """100 and 120 ms against 150 and 300 ms: 225/110 = 2 times as fast, and 150/100 = 1.5 to 300/120 = 2.5 times."""
    served = ServeRecord.of(swept)
    times = {"kvtier": (100, 120), "none": (150, 300)}
    results = [
        replace(it, ttft_ms={"p50": times[it.name][it.repetition], "p95": 0}, load_average=[0.1, 2.0 + it.repetition],
                loaded_bytes=0 if it.name == "kvtier" else None)
        for it in served.results if it.name in times
    ]  # fmt: skip
    rests = "1.5 to 2.5 over the runs, n = 48 in 2 runs each, load average 0.1 to 3, kvtier loaded nothing"
    assert headline(replace(served, results=results)) == f"With kvtier the first token comes 2 times as fast as without ({rests})"  # fmt: skip  # noqa: E501
    overlapping = [replace(it, ttft_ms={"p50": 90 + 120 * it.repetition, "p95": 0}) if it.name == "none" else it for it in results]  # fmt: skip  # noqa: E501
    assert "comes about as fast as without (0.9 to 1.75 over" in headline(replace(served, results=overlapping))


def test_the_conditions_name_the_rate_that_ran(loaded):
    """Asked for 1 and 2 a second; the preset's 4 did not run, and is not shown."""
    changed = CONDITIONS | {"workload": {"sizes": {"users": 4, "requests_per_s": 4.0}, "seconds": 30}}
    served = replace(ServeRecord.of(loaded), conditions=changed)
    found = dict(conditions(served))
    assert found["workload"] == "sizes users 4, seconds 30"
    assert "cores" in found["machine"]
    ran = {it.load["requests_per_s"]: f"{it.requests_per_s:.3g}" for it in served.results if it.name == "kvtier"}
    assert found["requests a second"].startswith("1 asked for, ran at without ")
    assert f", kvtier {ran[1]}; 2 asked for" in found["requests a second"]
    fixed = replace(served, results=[replace(it, load={}) for it in served.results])
    assert "requests per s 4.0" in dict(conditions(fixed))["workload"]
    assert dict(conditions(fixed))["requests a second"].startswith("4 asked for, ran at")


def test_goodput_is_of_requests_within_the_limit(tmp_path):
    """Of 16 requests the first of each of 4 users computes 832 tokens, in 174 ms; later ones load and take less."""
    (run,) = join_runs([write_run(tmp_path, "kvtier")])
    late = sum((it.ttft_s or 0) > 0.1 for it in run.requests)
    assert late == 4
    result = arm_result(run, 0.1)
    assert result.goodput_per_s == pytest.approx((16 - late) / result.seconds)
    assert arm_result(run).goodput_per_s == result.requests_per_s
    made = serve_record([run], settings={}, seed=1, conditions={}, ttft_limit_s=0.1)
    table = arms_table(ServeRecord.of(json.loads(json.dumps(made, default=asdict))))
    assert table.columns[-1] == "goodput"
    assert "within 0.1 s" in table.note


def test_a_sweep_tells_noise_from_a_difference(swept):
    served = with_p50(with_p50(ServeRecord.of(swept), "none", 1000), "kvtier", 999)
    assert "kvtier is as fast at R = 0.1, 1 and 20 (" in answer(served)
    spread_out = [
        replace(it, ttft_ms={"p50": 200 + 1000 * it.repetition, "p95": 0}) if it.name == "kvtier" else it
        for it in served.results
    ]
    assert "kvtier differs by less than its runs do at R = 0.1, 1 and 20 (" in answer(
        replace(served, results=spread_out)
    )


def test_the_answer_is_at_a_point_that_both_arms_were_measured_at(swept, loaded):
    failed = changed(ServeRecord.of(swept), lambda it: it.tier_ratio == 0.1, status="failed")
    assert failed.top == ((), 1.0)
    assert answer(failed).startswith("At R = 1, with kvtier the median")
    served = ServeRecord.of(loaded)
    assert answer(served).startswith("At 2 requests/s, with kvtier the median")
    failed = changed(served, lambda it: (it.name, it.load["requests_per_s"]) == ("none", 2), status="failed")
    assert answer(failed).startswith("At 1 requests/s, with kvtier the median")


def test_failed_requests_are_beside_the_answer(loaded):
    served = with_p50(ServeRecord.of(loaded), "none", 1000, failed=48)
    assert "Requests that failed are in no figure: without 75.0%, kvtier 0.0%." in answer(served)
    assert "no figure" not in answer(ServeRecord.of(loaded))
    assert any("none (repetition 1, 2 requests/s) 48" in note for note in notes(served))
    nothing = replace(served.results[0], requests=0)
    broken = replace(served.results[0], status="failed", requests=0, failed=18, error="Unknown Reason")
    assert any(
        "failed: 0 of 18 requests completed; Unknown" in note for note in notes(replace(served, results=[broken]))
    )
    assert any("no request succeeded" in note for note in notes(replace(served, results=[nothing])))


def test_turns_have_the_median_of_an_even_number_of_runs(swept):
    served = ServeRecord.of(swept)
    results = [
        replace(
            it, by_turn=[row | {"ttft_ms": {"p50": 100.0 + 200 * it.repetition, "p95": None}} for row in it.by_turn]
        )
        for it in served.results
    ]
    curves = place_charts(replace(served, results=results))["turns-ttft"].marks
    assert {value for curve in curves for value in curve.y} == {200.0}


@pytest.mark.parametrize(("plain_ms", "is_log"), [(900.0, False), (1100.0, True)])
def test_times_that_differ_more_than_tenfold_are_on_a_logarithmic_axis(loaded, plain_ms, is_log):
    served = with_p50(with_p50(ServeRecord.of(loaded), "none", plain_ms), "kvtier", 100.0)
    assert answer_charts(served)["ttft"].y.is_log == is_log


def test_the_points_of_a_line_are_in_the_order_of_the_load(loaded):
    served = ServeRecord.of(loaded)
    run = next(it for it in served.results if it.name == "kvtier")
    results = [replace(run, load={"requests_per_s": rate}) for rate in (8, 1, 6, 2, 5, 3, 7)]
    curves = answer_charts(replace(served, results=results))["ttft"].marks
    assert [curve.x for curve in curves] == [[1, 2, 3, 5, 6, 7, 8]]
