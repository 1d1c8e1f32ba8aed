"""A plan's report and charts: self-contained, with the plan's figures; its curves are what they claim."""

import re

import pytest
from tests.unit.report.test_report import check_page

from kvtier.plan.plan import make_plan
from kvtier.plan.read_inputs import load
from kvtier.plan.report import (
    cost_curves,
    crossing,
    plan_report,
    single_prompt_curves,
    ttft_curves,
)

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
    assert "<h1>Tiers serve 250 users within 1 s on average to the first token (95 % within " in page
    assert page.index("<h1>") < page.index("Time to first token against the load") < page.index("Binding limit")
    assert page.index("Binding limit") < page.index("Gains of tiers") < page.index("Assumptions")
    texts = [it for it in re.findall(r">([^<]{40,})<", page.partition("Assumptions")[0]) if "{stroke" not in it]
    assert len(texts) > 20
    assert sorted(texts) == sorted(set(texts))


def test_the_curves_meet_the_limit_where_the_plan_says(plan):
    limit_s = plan.inputs.target.ttft_s
    for curve, side in zip(ttft_curves(plan), (plan.alone, plan.tiered), strict=True):
        below = [users for users, seconds in zip(curve.x, curve.y, strict=True) if seconds <= limit_s]
        assert max(below) <= side.users_at_ttft <= max(below) + curve.x[0] * 1.01


def test_computing_and_fetching_cross_where_they_are_equal():
    values = {
        "model.name": "deepseek-r1",
        "model.tp": 8,
        "model.weights": "fp8",
        "gpu.name": "b200-sxm",
        "shared.capacity_bytes": 10**15,
        "shared.adapter_bytes_per_s": 15e9,
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
