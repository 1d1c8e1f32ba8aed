"""The formulas of a plan: each against a count by hand, an exact law, or a simulation that shares none of its code."""

import heapq
import math
import random
from collections import OrderedDict

import pytest
from tests.tools.plan.plans import deployed, planned

from kvtier.tools.plan.max_load import life_years
from kvtier.tools.plan.operating_point import fetch_s, operate, prefill_s
from kvtier.tools.plan.tier_demand import capacity
from kvtier.tools.plan.workload import lognormal_curve


def test_read_bandwidth_is_queries_times_reused_bytes():
    deployment = deployed(traffic__users=240, traffic__reuse=0.5, target__burst=2.0)
    needed = capacity(deployment, 0.95)
    by_hand = 12 * 0.95 * 0.5 * deployment.workload.input_tokens * 131_072
    assert needed.read_bytes_per_s == pytest.approx(by_hand)
    assert needed.read_burst_bytes_per_s == pytest.approx(2 * by_hand)
    assert needed.hit_rate == pytest.approx(0.95 * 0.5)


def test_prefill_is_two_flop_per_parameter_plus_attention():
    deployment = deployed(model__parameters=8e9, model__active_parameters=7e9, gpu__flops_share=0.5)
    tokens = 20_000
    linear = 2 * 7e9 * tokens
    attention = 32 * 32 * (4 * 128) * tokens * tokens / 2  # layers x heads x (K and V products) x pairs
    assert prefill_s(deployment, tokens, tokens) == pytest.approx((linear + attention) / (989e12 * 0.5))
    # The last tokens attend to all earlier ones; the saving is the prefill of the others.
    first = prefill_s(deployment, tokens - 500, tokens - 500)
    assert prefill_s(deployment, 500, tokens) == pytest.approx(prefill_s(deployment, tokens, tokens) - first)


def test_gpt_oss_windows_save_attention():
    """Half of its layers attend to 128 tokens, so a long prompt costs about half the pairs of tokens."""
    shape = deployed("gpt-oss-20b").model
    full = next(run for run in shape.attention if run.window_tokens is None)
    pairs = 100_000 * 100_000 / 2
    assert shape.attention_flop(100_000, 100_000) == pytest.approx(full.layers * full.flop_per_pair * pairs, rel=0.01)


def test_a_fetch_takes_its_bytes_over_the_slowest_link():
    deployment = deployed(disk__count=1, disk__read_bytes_per_s=5e9, software__load_bytes_per_s=20e9)
    assert fetch_s(deployment, "disk", 1000) == pytest.approx(131_072_000 / 5e9)
    assert fetch_s(deployment, "host", 1000) == pytest.approx(131_072_000 / 20e9)


def test_evenly_spaced_requests_of_one_size_do_not_wait():
    point = operate(deployed(traffic__arrivals_cv2=0.0, traffic__turns=1), 2.0)
    assert point.gpu_used > 0.1
    assert point.wait_s == pytest.approx(0.0, abs=1e-12)


def simulated_lru(rng, users, capacity_sessions, mean_s, cv, turns, accesses):
    """Share of later queries that find their conversation, in an LRU cache of whole conversations."""
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean_s) - sigma * sigma / 2
    events = [(rng.uniform(0, mean_s), user, 0, user) for user in range(users)]
    heapq.heapify(events)
    cache: OrderedDict[int, None] = OrderedDict()
    next_session, later, found = users, 0, 0
    for count in range(accesses):
        time, user, turn, session = heapq.heappop(events)
        if turn and count > accesses // 4:
            later += 1
            found += session in cache
        cache.pop(session, None)
        cache[session] = None
        if len(cache) > capacity_sessions:
            cache.popitem(last=False)
        if turn + 1 == turns:
            session, turn, next_session = next_session, -1, next_session + 1
        heapq.heappush(events, (time + rng.lognormvariate(mu, sigma), user, turn + 1, session))
    return found / later


@pytest.mark.parametrize(("cv", "capacity"), [(0.5, 60), (1.0, 100), (1.7, 40), (1.7, 120), (1.7, 250)])
def test_the_reuse_curve_matches_a_simulated_lru_cache(cv, capacity):
    """200 users with conversations of equal size; `capacity` of them fit."""
    curve = lognormal_curve(30.0, cv, tokens=1.0, last_tokens=1.0, last_share=1 / 8)
    found = curve.found_within(curve.residence(capacity, 200 / 30.0))
    assert found == pytest.approx(simulated_lru(random.Random(3), 200, capacity, 30.0, cv, 8, 60_000), abs=0.03)


def test_users_with_fixed_intervals_hit_always_or_never():
    curve = lognormal_curve(20.0, 0.0, tokens=1.0, last_tokens=1.0, last_share=0.1)
    assert [curve.found_within(curve.residence(users, 10.0)) for users in (150, 199, 201, 400)] == [0, 0, 1, 1]


def test_a_drive_written_at_its_rating_lasts_its_rated_years():
    deployment = deployed(
        disk__count=2, disk__capacity_bytes=10**12, disk__drive_writes_per_day=3.0, disk__rated_years=5.0
    )
    once = operate(deployment, 1.0).write_bytes_per_s["disk"]
    rate = 2e12 * 3 / 86_400 / once
    assert life_years(deployment, rate * once) == pytest.approx(5.0, rel=1e-3)
    assert life_years(deployment, 2 * rate * once) == pytest.approx(2.5, rel=1e-3)


def test_an_hour_of_chat_written_through_wears_ten_drives_ten_times_a_day():
    """Mooncake's conversation trace at 40.9k prompt tokens a second on a 70B model: 8.7 GB/s, 753 TB, 9.8 a day."""
    plan = planned(
        "llama-3.3-70b",
        gpu__count=800,
        model__tp=4,
        traffic__turns=1,
        traffic__history_tokens=10_935,
        traffic__answer_tokens=343,
        traffic__reuse=0.35,
        traffic__interval_s=1.0,
        traffic__users=3,
        disk__count=10,
        disk__capacity_bytes=7_680_000_000_000,
    )
    point = operate(plan.given.deployment, 40_900 / 12_035)
    assert point.write_bytes_per_s["disk"] == pytest.approx(8.7e9, rel=0.05)
    assert point.write_bytes_per_s["disk"] * 86_400 / 76.8e12 == pytest.approx(9.8, rel=0.05)


def test_kv_is_worth_keeping_until_it_costs_as_much_as_computing_it():
    plan = planned(
        model__tp=1,
        price__gpu=20_000.0,
        price__drive=2_000.0,
        price__host_memory_per_gb=5.0,
        disk__filled=1.0,
        disk__count=3,
    )
    tokens = plan.deployment.workload.reusable_tokens
    compute_s = prefill_s(plan.deployment, tokens, tokens) / (tokens * 131_072)  # of one byte
    by_hand = compute_s * plan.inputs.disk.capacity_bytes * 20_000 / 2_000
    rows = {(it.tier, it.instead_of): it.residence_s for it in plan.break_evens}
    assert rows["disk", "computing it again"] == pytest.approx(by_hand)
    assert rows["host", "reading it from a drive"] == pytest.approx(1e9 / 14.5e9 * 2_000 / 5)


def test_cost_is_price_over_years_plus_energy():
    plan = planned(
        price__gpu=25_000.0,
        price__server=50_000.0,
        price__drive=1_000.0,
        price__host_memory_per_gb=4.0,
        price__energy_per_kwh=0.25,
        price__years=3.0,
        power__pue=1.2,
        host__capacity_bytes=10**12,
    )
    hours = 3 * 365.25 * 24
    alone, tiered = plan.alone.cost, plan.given.cost
    assert alone.bought == 8 * 25_000 + 50_000
    assert tiered.bought == alone.bought + 4 * 1_000 + 4_000
    assert tiered.per_hour == pytest.approx(tiered.bought / hours + tiered.watts / 1000 * 0.25)
    output_per_hour = plan.given.output_tokens_per_s * 3600
    assert tiered.per_million_output_tokens == pytest.approx(tiered.per_hour / output_per_hour * 1e6)
    assert tiered.watts - alone.watts == pytest.approx(4 * 21.34 * 1.2, rel=0.2)


def test_without_prices_there_is_no_cost_and_missing_prices_are_listed():
    cost = planned().given.cost
    assert cost.per_hour is None
    assert set(cost.missing) == {"price.gpu", "price.server", "price.host_memory_per_gb", "price.drive"}
