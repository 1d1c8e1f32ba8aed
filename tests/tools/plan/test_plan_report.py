"""A plan's report and charts: self-contained, with the plan's figures; its curves are what they claim."""

import re
from dataclasses import replace
from itertools import combinations

import pytest
from tests import browser
from tests.tools.charts.test_report import check_page
from tests.tools.plan.plans import planned

from kvtier.tools.charts.chart import Curve, Rule, svg
from kvtier.tools.plan.charts import answer_chart, cost_curves, crossing, single_prompt_curves, ttft_curves
from kvtier.tools.plan.plan import make_plan
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.report import plan_report

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def plan():
    return make_plan(load(example="samsung"))


def test_the_page_begins_with_the_finding_and_repeats_no_sentence(plan):
    page = plan_report(plan).html()
    check_page(page)
    assert page.count("<svg") == 4
    for text in ("llama-3.1-8b on 8 x h100-nvl", "traffic.history_tokens", "[[tiers]]"):
        assert text in page
    assert "<h1>240 users fit on 8 x h100-nvl with local drives; they need " in page
    alone, tiered = (int(it.users) for it in (plan.alone, plan.tiered))
    assert f"serve {tiered} users with local drives ({tiered / alone:.2f}x) and {alone} with GPU memory alone" in page
    places = ["<h1>", "What 240 users need", "Time to first token against the load", "Binding limit", "Most users with"]
    found = [page.index(it) for it in (*places, "Gains of tiers", "Assumptions")]
    assert found == sorted(found)
    texts = [it for it in re.findall(r">([^<]{40,})<", page.partition("Assumptions")[0]) if "{stroke" not in it]
    assert len(texts) > 20
    assert sorted(texts) == sorted(set(texts))


def test_the_curves_meet_the_limit_where_the_plan_says(plan):
    limit_s = plan.inputs.target.ttft_s
    for curve, side in zip(ttft_curves(plan), (plan.alone, plan.tiered), strict=True):
        below = [users for users, seconds in zip(curve.x, curve.y, strict=True) if seconds <= limit_s]
        assert max(below) <= side.users_at_ttft <= max(below) + curve.x[0] * 1.01


def test_a_dot_lies_on_its_curve_if_another_limit_is_tighter(plan):
    """The curve is the mean, and 95 % of first tokens have less time than the mean allows."""
    target = replace(plan.inputs.target, ttft_p95_s=plan.inputs.target.ttft_s)
    plan = make_plan(replace(plan.inputs, target=target))
    curves, dots = [], []
    for it in answer_chart(plan)["ttft"].marks:
        if isinstance(it, Curve):
            (dots if it.marker else curves).append(it)
    for curve, dot, side in zip(curves, dots, plan.arms, strict=True):
        below = [users for users, seconds in zip(curve.x, curve.y, strict=True) if seconds <= target.ttft_s]
        assert max(below) <= dot.x[0] <= max(below) + curve.x[0] * 1.01
        assert side.users_at_ttft < dot.x[0] * 0.99


def hidden(chart):
    """Pairs of curves that a reader cannot tell apart: drawn alike, or the later over the earlier without a gap."""
    curves = [it for it in chart.marks if isinstance(it, Curve) and it.label]
    for before, after in combinations(curves, 2):
        low, high = max(before.x[0], after.x[0]), min(before.x[-1], after.x[-1])
        xs = [low + (high - low) * step / 50 for step in range(51)]
        apart = [abs(at(before, x) / at(after, x) - 1) > 0.05 for x in xs]
        is_covered = after.width >= before.width and after.dash == "-"
        if sum(apart) < 25 and (is_covered or (before.dash, before.width) == (after.dash, after.width)):
            yield before.label, after.label


def at(curve, x):
    place = next((n for n, it in enumerate(curve.x) if it >= x), len(curve.x) - 1)
    return curve.y[place]


@pytest.mark.parametrize("users", [80, 500])
def test_no_line_of_a_chart_hides_another_and_no_text_floats(users):
    """Loads from host memory and from drives take as long; the energy of a load is the same with tiers and without."""
    report = plan_report(planned("llama-3.3-70b", traffic__users=users))
    charts = {name: chart for section in report.sections for name, chart in section.charts().items()}
    assert {name: list(hidden(chart)) for name, chart in charts.items()} == {name: [] for name in charts}
    prompt = charts["prompt"]
    alike = replace(prompt, marks=[replace(it, dash="-", width=2.2) for it in prompt.marks])
    assert list(hidden(alike)) == [("from host memory", "from local drives")]  # the control
    for name in ("ttft", "cost"):
        chart = charts[name]
        curves = [it for it in chart.marks if isinstance(it, Curve) and it.label]
        assert [it.label.partition(":")[0] for it in curves] == [
            "GPU memory alone", "with host memory", "with local drives",
        ]  # fmt: skip
        # The axis, and so every tick, ends where the last curve ends.
        assert (chart.x.least, chart.x.most) == (0, max(it.x[-1] for it in curves))
        assert all(isinstance(it, Curve | Rule) and not getattr(it, "end", "") for it in chart.marks)
    assert any(isinstance(it, Rule) and it.is_vertical for it in charts["ttft"].marks) == (users == 80)


TEXT = re.compile(r'<text style="[^"]*font-size: ([\d.]+)px[^"]*text-anchor: (\w+)[^"]*"([^>]*)>([^<]+)</text>')
SHARE = 0.6
"""Width of a letter over the size of its font, on average."""


def boxes(picture):
    """Left, top, right and bottom of each level text of an SVG."""
    for size, anchor, places, text in TEXT.findall(picture):
        x, y = (float(re.search(rf' {name}="([-\d.]+)"', places)[1]) for name in "xy")
        width = SHARE * float(size) * len(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if "rotate(-90" not in places:
            yield text, left, y - float(size), left + width, y


def overlapping(picture):
    found = list(boxes(picture))
    assert len(found) > 10
    return [
        (a[0], b[0]) for a, b in combinations(found, 2) if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]
    ]


@pytest.mark.parametrize("users", [80, 97])
def test_no_text_of_a_chart_covers_another_or_leaves_the_picture(users):
    """94 and 100 users are near each other; their figures stood beside their dots."""
    report = plan_report(planned("llama-3.3-70b", traffic__users=users))
    for section in report.sections:
        for name, chart in section.charts().items():
            picture = svg(chart, name)
            assert overlapping(picture) == []
            width = float(re.search(r'viewBox="0 0 ([\d.]+)', picture)[1])
            assert [it[0] for it in boxes(picture) if it[1] < 0 or it[3] > width] == []
            moved = re.sub(r' x="[-\d.]+"', ' x="50"', picture)
            assert overlapping(moved)  # the control


def test_the_page_of_a_plan_fits_a_phone_and_breaks_no_word(tmp_path, plan):
    path = tmp_path / "plan.html"
    path.write_text(plan_report(plan).html())
    assert browser.overflow(path, width=390) == 0
    assert browser.broken_words(path, width=390) == 0
    path.write_text(path.read_text().replace("td.name{overflow-wrap:normal}", ""))
    assert browser.broken_words(path, width=390) > 0  # the control


def test_computing_and_fetching_cross_where_they_are_equal():
    values = {
        "model.name": "deepseek-r1",
        "model.tp": 8,
        "model.weights": "fp8",
        "gpu.name": "b200-sxm",
        "shared.capacity_bytes": 10**15,
        "shared.adapter_bytes_per_s": 15e9,
        "software.copies": 0,
    }
    plan = make_plan(load(options=values), with_sensitivities=False)
    computed, *fetched = single_prompt_curves(plan)
    network = next(it for it in fetched if it.colour == "shared")
    place = crossing(computed, network)
    assert network.y[place] < computed.y[place]
    assert network.y[place - 1] >= computed.y[place - 1]
    assert crossing(computed, computed) is None


def test_costs_are_energy_without_prices_and_money_with():
    free = make_plan(load(options={"model.name": "llama-3.1-8b"}), with_sensitivities=False)
    paid = make_plan(load(options={"model.name": "llama-3.1-8b", "price.gpu": 20_000.0}), with_sensitivities=False)
    for plan in (free, paid):
        for curve in cost_curves(plan):
            assert curve.y[0] > 10 * curve.y[-1] > 0
    side = free.tiered
    kwh = cost_curves(free)[1].y[-1]
    assert kwh == pytest.approx(1e6 / (side.throughput_per_s * 100) / 3600 * 7.2, rel=0.1)  # about 7.2 kW
