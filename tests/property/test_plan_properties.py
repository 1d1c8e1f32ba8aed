"""Laws of every plan: more load never needs less, tiers never hurt, and the binding limit determines the answer."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from kvtier.tools.plan.inputs import Inputs
from kvtier.tools.plan.max_load import ceiling, used_shares
from kvtier.tools.plan.operating_point import operate
from kvtier.tools.plan.plan import make_plan, to_json
from kvtier.tools.plan.plan_text import conclusion, heading, names_text, request, verdict
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.report import needs_table, tables
from kvtier.tools.plan.resolve import deployments, resolve
from kvtier.tools.plan.settings import settings_toml
from kvtier.tools.plan.tier_demand import capacity
from kvtier.tools.plan.tier_selection import choices

# Shrinking an example of thirty inputs takes minutes and tells nothing that the inputs themselves do not.
checked = settings(max_examples=25, phases=[Phase.generate])

RELAXED_BY = {
    "time to first token": ("target.ttft_s", 2.0),
    "time per output token": ("target.tpot_s", 2.0),
}
"""Limits with an input of their own, and the factor on it that relaxes them."""


@st.composite
def sites(draw) -> Inputs:
    """Any inputs with a model that fits on every GPU drawn."""
    tp = draw(st.sampled_from([1, 2, 4]))
    return load(
        options={
            "model.name": draw(st.sampled_from(["llama-3.1-8b", "qwen3-8b", "gpt-oss-20b"])),
            "model.tp": tp,
            "gpu.name": draw(st.sampled_from(["h100-sxm", "h200-sxm", "mi300x", "a100-sxm"])),
            "gpu.count": tp * draw(st.integers(1, 8)),
            "traffic.users": draw(st.integers(1, 2000)),
            "traffic.turns": draw(st.integers(1, 30)),
            "traffic.interval_s": draw(st.floats(2, 600)),
            "traffic.interval_cv": draw(st.sampled_from([0.0, 0.3, 1.0, 1.7, 3.0])),
            "traffic.prefix_tokens": draw(st.integers(0, 3000)),
            "traffic.history_tokens": draw(st.integers(0, 20_000)),
            "traffic.question_tokens": draw(st.integers(1, 500)),
            "traffic.answer_tokens": draw(st.integers(1, 500)),
            "target.ttft_s": draw(st.floats(0.05, 10)),
            "target.tpot_s": draw(st.sampled_from([0.0, 0.05, 0.2])),
            "host.capacity_bytes": draw(st.sampled_from([0, 2**36, 2**41])),
            "disk.count": draw(st.integers(0, 12)),
            "disk.read_bytes_per_s": draw(st.floats(1e8, 3e10)),
            "disk.write_bytes_per_s": draw(st.sampled_from([1e8, 1e10])),
            "shared.capacity_bytes": draw(st.sampled_from([0, 0, 10**15])),
            "shared.adapter_bytes_per_s": draw(st.floats(1e8, 1e11)),
            "software.gpu_reuse": draw(st.sampled_from([True, True, False])),
            "software.loads_block": draw(st.sampled_from([False, False, True])),
            "software.load_bytes_per_s": draw(st.sampled_from([1e9, 6e9, 0.0])),
        }
    )


@given(sites(), st.floats(1.01, 50))
@checked
def test_more_users_need_no_less_capacity_and_bandwidth(inputs, times):
    deployment = resolve(inputs)
    more = resolve(inputs.change({"traffic.users": math.ceil(inputs.traffic.users * times)}))
    for share in (0.5, 0.9, 0.99):
        few, many = capacity(deployment, share), capacity(more, share)
        assert many.read_burst_bytes_per_s >= few.read_burst_bytes_per_s
        assert many.bytes >= few.bytes
        assert many.hit_rate == few.hit_rate


@given(sites())
@checked
def test_without_reuse_tiers_gain_nothing(inputs):
    plan = make_plan(inputs.change({"traffic.reuse": 0.0}), with_sensitivities=False)
    assert math.isclose(plan.tiered.users_at_ttft, plan.alone.users_at_ttft, rel_tol=1e-9)
    assert math.isclose(plan.tiered.throughput_users, plan.alone.throughput_users, rel_tol=1e-9)
    assert math.isclose(plan.tiered.ttft_s, plan.alone.ttft_s, rel_tol=1e-9)
    assert plan.tiered.point.hit_rate == 0
    assert sum(plan.tiered.point.read_bytes_per_s.values()) == 0
    assert plan.tiered.cost.tokens_per_s_per_watt <= plan.alone.cost.tokens_per_s_per_watt


@given(sites(), st.floats(0.01, 0.99))
@checked
def test_tiers_never_raise_the_time_to_first_token(inputs, share):
    """Prompts that load more slowly than they compute are computed, so slow drives do no harm."""
    deployment = resolve(inputs)
    most = ceiling(deployment.only(()))
    rate = share * next(it for it in most.limits if it.name == "GPU time").requests_per_s
    alone, tiered = (operate(it, rate) for it in (deployment.only(()), deployment))
    assert tiered.ttft_s <= alone.ttft_s * (1 + 1e-9)
    assert tiered.gpu_used <= alone.gpu_used * (1 + 1e-9)
    assert tiered.hit_rate >= alone.hit_rate - 1e-9


@given(sites())
@checked
def test_only_the_binding_limit_determines_the_answer(inputs):
    """Relaxing it changes the answer; relaxing another does not."""
    top = ceiling(resolve(inputs))
    assume(0 < top.binding.requests_per_s < math.inf)
    for name, (knob, times) in RELAXED_BY.items():
        if name not in {it.name for it in top.serving}:
            continue
        relaxed = inputs.change({knob: inputs.value(knob) * times})
        answer = ceiling(resolve(relaxed)).binding.requests_per_s
        if name == top.binding.name:
            others = [it.requests_per_s for it in top.serving if it.name != name]
            assert answer > top.binding.requests_per_s or min(others) <= top.binding.requests_per_s * (1 + 1e-6)
            assert answer <= min(others) * (1 + 1e-6)  # the next limit holds now
        else:
            assert math.isclose(answer, top.binding.requests_per_s, rel_tol=1e-9)


@given(sites())
@checked
def test_at_the_ceiling_the_binding_limit_is_used_up_and_no_other_is_exceeded(inputs):
    deployment = resolve(inputs)
    top = ceiling(deployment)
    assume(0 < top.binding.requests_per_s < math.inf)
    below, above = (
        used_shares(deployment, operate(deployment, top.binding.requests_per_s * times))
        for times in (1 - 1e-9, 1 + 1e-9)
    )
    assert max(below[it.name] for it in top.serving) <= 1
    assert above[top.binding.name] > 1


@given(sites(), st.floats(0.02, 0.9))
@checked
def test_shares_add_up_and_more_capacity_never_finds_less(inputs, share):
    deployment = resolve(inputs)
    rate = share * deployment.replicas / operate(deployment, 1e-6).gpu_seconds
    point = operate(deployment, rate)
    computed = point.computed_tokens / deployment.workload.input_tokens
    assert math.isclose(point.hit_rate + computed, 1.0, rel_tol=1e-9)
    assert -1e-9 <= point.hit_rate <= deployment.workload.reuse + 1e-9
    larger = resolve(inputs.change({"host.capacity_bytes": 2 * inputs.host.capacity_bytes + 2**38}))
    assume(inputs.host.capacity_bytes)  # a new tier changes where prefixes are loaded from
    assert operate(larger, rate).hit_rate >= point.hit_rate - 1e-9


@given(sites())
@checked
def test_twice_of_everything_serves_twice_as_many(inputs):
    # Without drives: a load is spread over all of them, so more drives also make each load faster.
    single = inputs.change({"traffic.prefix_tokens": 0, "disk.count": 0, "shared.capacity_bytes": 0})
    doubled = single.change(
        {
            "gpu.count": 2 * inputs.gpu.count,
            "host.capacity_bytes": 2 * inputs.host.capacity_bytes,
            "host.channels": 2 * inputs.host.channels,
        }
    )
    for tiers in ((), ("host",)):
        once, twice = (ceiling(resolve(it).only(tiers)) for it in (single, doubled))
        assert math.isclose(twice.binding.requests_per_s, 2 * once.binding.requests_per_s, rel_tol=1e-6)


@given(sites())
@checked
def test_no_plan_exceeds_the_rates_of_its_parts(inputs):
    """At the served load: FLOP/s, memory bandwidth, links and drives, each counted from the requests."""
    plan = make_plan(inputs, with_sensitivities=False)
    for variant in (plan.alone, plan.tiered):
        deployment, point, load = variant.deployment, variant.point, variant.deployment.workload
        gpu, count = deployment.inputs.gpu, deployment.inputs.gpu.count
        flop = 2 * deployment.inputs.model.active_parameters * (point.computed_tokens + load.answer_tokens)
        assert point.requests_per_s * flop <= count * gpu.flops
        decoded = deployment.model.gpu_bytes(load.session_tokens) * load.answer_tokens
        assert point.requests_per_s * decoded <= count * gpu.memory_bytes_per_s
        read = sum(point.read_bytes_per_s.values()) * deployment.model.delivered_ratio
        assert read <= count * gpu.link_bytes_per_s * (1 + 1e-9)
        for tier in deployment.tiers:
            assert point.read_bytes_per_s[tier.name] <= tier.read_bytes_per_s * (1 + 1e-9)
            assert point.write_bytes_per_s[tier.name] <= tier.write_bytes_per_s * (1 + 1e-9)


def stated(text: str) -> list[int]:
    """The users that a verdict states."""
    places = r"([\d,]+)(?: users)? with (?=GPU|host|local|shared)|(?:they serve|it serves) ([\d,]+)\."
    return [int((one or other).replace(",", "")) for one, other in re.findall(places, text)]


def served(plan) -> list[tuple[str, float]]:
    """Every figure of users within the limits of the given GPUs, in the JSON and in the tables."""
    document = to_json(plan)
    found = [(name, document[name]) for name in document if name.startswith("users_with")]
    found += [(f"choice {it['tiers']}", it["users"]) for it in document["choices"]]
    found += [
        (f"size {it['tp']} {name}", it[name]) for it in document["sizes"] for name in it if name.startswith("users_")
    ]
    found += [(arm, document[arm]["users_at_all_limits"]) for arm in ("alone", "tiered")]
    for table in tables(plan):
        if table.title.startswith(("Most users", "Users by size", "Gains")):
            places = [place for place, it in enumerate(table.columns) if it in WITHIN or it.startswith("with ")]
            rows = [
                row for row in table.rows if not table.title.startswith("Gains") or row[0].startswith("users within")
            ]
            found += [
                (f"{table.title} {row[0]}", float(row[place].replace(",", ""))) for row in rows for place in places
            ]
    return [(name, value) for name, value in found if value is not None]


WITHIN = {"users", "GPU memory alone"}
"""Headings of columns with users within the limits."""


@given(sites(), st.integers(1, 5000), st.sampled_from([0.0, 5.0]))
@settings(parent=checked, max_examples=12)
def test_the_verdict_is_the_same_for_any_load_and_no_line_of_the_page_serves_more(inputs, users, price):
    """It was host memory for 80 users of a 70B model, drives for 90, and 94 users of which 101 are too many."""
    prices = {"price.host_memory_per_gb": price, "price.drive": 300 * price, "price.shared_per_tb": 20 * price}
    plan, other = (
        make_plan(inputs.change({"traffic.users": count} | prices), with_sensitivities=False)
        for count in (inputs.traffic.users, users)
    )
    sentence, of_other = (re.split(r"(?<=with GPU memory alone\.) ", verdict(it)) for it in (plan, other))
    is_shared = any(" share them: one host gets " in it[-1] for it in (sentence, of_other))
    assert sentence == of_other or (is_shared and plan.serves_any)
    assert sentence[0].replace(" with all of these tiers", "") == of_other[0].replace(" with all of these tiers", "")
    assert [it.tiers for it in plan.ways] == [it.tiers for it in other.ways]
    most = max(stated(verdict(plan)), default=0)
    figures = served(plan)
    assert len(figures) >= 6 + 2 * len(plan.tiered.choice.sizes)
    assert [(name, value) for name, value in figures if math.floor(value + 1e-6) > most] == []
    # What is worth buying serves as many as anything else, but for a tenth; and a load that fits is within the limits.
    for way in plan.ways:
        assert way.users * 1.1 >= max(it.users for it in plan.choices) or not plan.serves_any
    for arm in (it for it in (*plan.arms, *other.arms) if it.need):
        assert arm.need.users >= arm.need.point.requests_per_s * inputs.traffic.interval_s * (1 - 1e-6)


@given(sites(), st.floats(1.01, 3.0), st.sampled_from([0, 8]))
@settings(parent=checked, max_examples=12)
def test_more_time_to_the_first_token_never_serves_fewer(inputs, times, count):
    """A smaller size within 5 % of the best was planned: more time brought it there, and users fell by 1 %."""
    if count:  # any size of 8 GPUs
        inputs = inputs.change({"gpu.count": count, "model.tp": 0})
    longer = inputs.change({"target.ttft_s": inputs.target.ttft_s * times})
    before, after = (choices(list(deployments(it))) for it in (inputs, longer))
    fewer = [it.tiers for it, more in zip(before, after, strict=True) if math.floor(it.users) > more.users + 1e-6]
    assert fewer == []


@given(sites(), st.sampled_from(["", "prices"]))
@settings(parent=checked, max_examples=12)
def test_settings_take_the_fewest_gpus_of_the_page_and_a_reserve_whole_copies(inputs, example):
    """5,000 users needed 74 GPUs in the settings, with a tier whose total is given, and 52 in another line."""
    prices = load(example=example).price if example else inputs.price
    plan = make_plan(replace(inputs, price=prices), with_sensitivities=False)
    needs = {it.tiers: it.need for it in plan.arms if it.need}
    named = re.search(r"on ([\d,]+) x", next(iter(settings_toml(plan).splitlines()[1:]), ""))
    if needs:
        if plan.bought and not plan.user_prices:
            assert plan.chosen.reserve_gpus == min(it.reserve_gpus for it in plan.arms)
        assert named is None or int(named[1].replace(",", "")) == plan.chosen.need.gpus
    for arm in plan.arms:
        if (found := arm.reserve) is not None:
            whole = found.gpus % found.deployment.inputs.model.tp == 0
            assert found.gpus == arm.need.gpus or (found.gpus > arm.need.gpus and whole)


def plain(users: int, name: str = "llama-3.1-8b", count: int = 8) -> Inputs:
    """The default plan of a model for some users, at the size that the plan finds."""
    return load(options={"model.name": name, "gpu.count": count, "traffic.users": users})


@given(
    st.builds(
        plain,
        st.integers(1, 3000),
        st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "llama-3.3-70b"]),
        st.sampled_from([8, 16]),
    )
)
@settings(parent=checked, max_examples=15, phases=[Phase.explicit, Phase.generate])
@example(plain(530))
@example(plain(520))
@example(plain(545))
@example(plain(285))
def test_all_parts_of_a_page_name_one_size_and_agree_on_whether_the_load_fits(inputs):
    """530 users of an 8B: they fit at TP 4 by the first line and the table, and the conclusion said not, at TP 2."""
    plan = make_plan(inputs, with_sensitivities=False)
    arm = plan.tiered
    row = next(it for it in needs_table(plan).rows if it[0] == "GPUs of a copy")
    needed = {row[1 + place] for place, it in enumerate(plan.arms) if it.tiers == plan.chosen.tiers}
    fits = arm.need is not None and arm.need.gpus <= inputs.gpu.count
    with_tiers = re.escape(names_text(arm.tiers))
    assert bool(re.search(rf"fits? on [^;]*{with_tiers}", request(plan).partition(" need")[0])) == fits
    assert any("exceeds: " in it for it in conclusion(plan)) == (not fits)
    assert (arm.users >= plan.requested_users * (1 - 1e-9)) == fits
    in_settings = re.search(r"engines? \((TP \d+|data-parallel attention on \d+)", settings_toml(plan))[1]
    in_settings = in_settings.replace("data-parallel attention on", "DP attention")
    assert needed == {in_settings} or arm.need is None
    named = heading(plan).replace("data-parallel attention on", "DP attention").partition(": ")[2]
    of_load = re.search(r"(?:^|; for .*: )((?:TP|DP attention) \d+)" if fits else r"; for .*: (.*?),", named)
    assert arm.need is None or of_load[1] == in_settings


@given(
    st.builds(
        plain,
        st.integers(50, 3000),
        st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "llama-3.3-70b", "qwen3-next-80b-a3b"]),
        st.sampled_from([8, 16]),
    )
)
@settings(parent=checked, max_examples=10)
def test_the_tier_that_is_enough_gives_the_gpus_of_the_page_and_is_no_larger_than_planned(inputs):
    """The page said that 500 users needed 3.92 TB, with which they needed the GPUs of a plan without tiers."""
    plan = make_plan(inputs, with_sensitivities=False)
    for arm in (it for it in plan.arms if it.tiers == ("host",) and it.need):
        enough = arm.need.enough_bytes["host"]
        assert enough <= arm.need.deployment.tiers[0].capacity_bytes * 1.01
        bought = inputs.change({"host.capacity_bytes": int(enough), "disk.count": 0}, "--tier")
        again = make_plan(bought, with_sensitivities=False)
        assert min(it.need.gpus for it in again.arms if it.need) == min(arm.need.gpus, plan.alone.need_gpus)


@pytest.mark.parametrize(
    ("name", "count", "loads"),
    [
        ("llama-3.3-70b", 8, (20, 50, 75, 92, 100, 105, 150, 300)),
        ("qwen3-32b", 4, (10, 28, 40, 58, 76, 100, 190, 300)),
        ("gpt-oss-120b", 2, (50, 100, 150, 250, 400, 700, 1100, 1450)),
        ("llama-3.1-8b", 1, (2, 6, 10, 14, 22, 28, 38, 56)),
    ],
)
def test_the_line_with_a_reserve_decides_and_turns_back_only_by_another_copy_with_tiers(name, count, loads):
    """50 users on given GPUs were to buy tiers and 55 not: by the fewest GPUs, which nobody was told to buy."""
    before: dict[tuple[str, ...], float] = {}
    was_bought = False
    for users in loads:
        plan = make_plan(plain(users, name, count), with_sensitivities=False)
        needed = {it.tiers: it.reserve_gpus for it in plan.arms}
        alone, least = needed[()], min(needed.values())
        assert bool(plan.bought) == (alone > 1.1 * least)
        assert all(needed[it.tiers] <= 1.1 * least for it in plan.bought)
        assert alone > count or not plan.bought
        assert all(needed[it] >= gpus for it, gpus in before.items() if it in needed)
        if was_bought and not plan.bought:
            assert least > min(before.values())
        (said,) = re.findall(r"With a reserve they need (.*?) GPUs? instead of ([\d,]+)", request(plan)) or [("", "")]
        assert said == ((" or ".join(str(it) for it in sorted({needed[it.tiers] for it in plan.bought})), f"{alone}")
                        if plan.bought else ("", ""))  # fmt: skip
        before, was_bought = needed, bool(plan.bought)
