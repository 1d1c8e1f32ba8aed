"""Buyers' cases: what a plan says, against arithmetic that stands beside it and shares no code with the plan."""

import math
import random
import re
from pathlib import Path

import pytest
from tests.tools.plan.plans import deployed, planned

from kvtier.errors import ConfigError
from kvtier.report.format import decimal, digits, share_text
from kvtier.tools.plan.lossy_classes import EVERY_CLASS, class_plans, loss_table
from kvtier.tools.plan.operating_point import decode_token_s, operate
from kvtier.tools.plan.plan import make_plan, to_json
from kvtier.tools.plan.plan_text import circumstances, conclusion, heading, request, verdict
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.report import needs_table, tables
from kvtier.tools.plan.resolve import resolve
from kvtier.tools.plan.settings import settings_toml

BUYING = Path(__file__).parents[3] / "docs" / "buying.md"
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
USABLE = 0.92, 3_758_096_384
"""Share of GPU memory that the engine takes, and what activations and libraries take of it."""


def tier(plan, name):
    return next(it for it in plan.tiers if it.name == name)


def table(plan, title):
    return next(it for it in tables(plan) if it.title.startswith(title))


def users(plan, *tiers):
    return next(it.users for it in plan.choices if it.tiers == tiers)


def test_70b_on_8_h100_by_hand():
    """The users within 1 s: the mean wait of the queue (Pollaczek-Khinchine), loading and computing add up to 1 s.

    160 all-reduces among 8 GPUs: 12.7 us each, and 7/4 of 16,384 bytes a token at 281 GB/s; 40 us a layer at least.
    """
    plan = planned("llama-3.3-70b")
    point = plan.given.ceiling.point
    flops = 8 * 989e12 * 0.5
    step_s, exchanged_s = 160 * (4.7e-6 + 8e-6), 160 * 7 / 4 * 16_384 / 281e9

    def prefill_s(new, tokens):
        pairs = new * (tokens - new / 2)
        computing = (2 * 70e9 * new + 80 * 64 * 4 * 128 * pairs) / flops
        return max(computing, 80 * 40e-6) + max(new / 8192, 1) * step_s + new * exchanged_s

    # A first prompt of 21,100 tokens finds 768 of the system prompt. A later one has 22,100 on average, and all but
    # the new question of whole chunks: 21,852.4 of its tokens are stored.
    stored = sum((21_200 + 200 * turn) // 256 * 256 for turn in range(9)) / 9
    later_hits = (point.hit_rate * 22_000 - 768) / (stored - 768)
    shares = 0.1, 1 - 0.1 - later_hits, later_hits
    times = prefill_s(21_100 - 768, 21_100), prefill_s(22_100 - 768, 22_100), prefill_s(22_100 - stored, 22_100)
    mean, square = (sum(share * it**power for share, it in zip(shares, times, strict=True)) for power in (1, 2))
    kv_bytes = 22_200 * 327_680
    room = 8 * (80 * 2**30 * USABLE[0] - USABLE[1]) - 140e9
    batch = room // kv_bytes
    token_s = (140e9 / batch + kv_bytes) / (8 * 3.35e12 * 0.8) + (80 * 40e-6 + step_s) / batch + exchanged_s
    rate = plan.given.users / 20
    free = 1 - rate * 100 * token_s
    busy = rate * mean / free
    wait_s = busy / (1 - busy) * square / mean / 2 / free
    assert (math.floor(plan.alone.users), math.floor(plan.given.users)) == (53, 67)
    assert wait_s + mean / free + point.load_s == pytest.approx(1.0, rel=1e-3)


def test_8_hosts_are_8_times_one_host():
    """Host memory, drives, channels and watts are those of each host; a total that is named stays."""
    one, eight = planned("llama-3.3-70b"), planned("llama-3.3-70b", gpu__count=64, traffic__users=640)
    assert eight.given.users == pytest.approx(8 * one.given.users)
    assert eight.given.cost.watts == pytest.approx(8 * one.given.cost.watts)
    inputs = eight.inputs
    assert (inputs.host.capacity_bytes, inputs.disk.count, inputs.power.server_watts) == (8 * 2**40, 32, 8 * 1500)
    assert inputs.origin("disk.count") == "default, for 8 hosts"
    named = planned("llama-3.3-70b", "host=1TiB", gpu__count=64)
    assert (named.inputs.host.capacity_bytes, named.inputs.host.channels) == (2**40, 8 * 16)
    assert planned("llama-3.3-70b", gpu__count=8, host__gpus=4).inputs.disk.count == 2 * 4


def test_one_l4_takes_no_more_power_than_its_share_of_a_server():
    plan = planned("llama-3.1-8b", "host=256GiB", gpu__name="l4", gpu__count=1, traffic__users=1)
    share = 0.15 + 0.85 * plan.tiered.point.gpu_busy  # of an idle GPU, and of a busy one
    assert plan.tiered.cost.watts == pytest.approx(72 * share + 1500 / 8)
    assert resolve(load(options={"model.name": "llama-3.1-8b", "power.pue": 1.5})).inputs.power.server_watts == 1500


def test_a_cold_document_of_120k_tokens_decides_the_size():
    """At TP 8 it takes 9.1 s and 2.0 s of exchange, at TP 2 36 s: within 5 s on average only where most are found."""
    plan = planned(
        "llama-3.3-70b",
        gpu__name="h200-sxm",
        traffic__history_tokens=120_000,
        traffic__interval_s=300.0,
        target__ttft_s=5.0,
    )
    cold_s = (2 * 70e9 * 121_000 + 80 * 64 * 4 * 128 * 121_000**2 / 2) / (8 * 989e12 * 0.5)
    assert cold_s == pytest.approx(9.14, abs=0.01)
    assert plan.deployment.inputs.model.tp == 8
    assert math.floor(plan.tiered.users) == 90
    at_2, _, at_8 = plan.tiered.choice.sizes
    assert at_2.users_with_tiers < at_8.users_with_tiers / 5


def test_deepseek_keeps_one_latent_with_data_parallel_attention():
    """70,272 bytes a token once, not on 8 ranks; each GPU has an eighth of the experts and all other weights."""
    options = {"model.name": "deepseek-r1", "model.tp": 8, "model.weights": "fp8", "gpu.name": "h200-sxm"}
    split, spread = (resolve(load(options=options | {"model.dp_attention": dp})) for dp in (False, True))
    assert (split.model.token_bytes, spread.model.token_bytes) == (70_272, 70_272)
    assert split.model.gpu_bytes(1) == 8 * spread.model.gpu_bytes(1)
    assert (split.replicas, spread.replicas, spread.copies) == (1, 8, 1)
    experts = 671e9 * (1 - 37 / 671) / (1 - 8 / 256)
    room = 151_397_597_184 * USABLE[0] - USABLE[1]
    assert spread.kv_bytes == pytest.approx(room - (671e9 - experts) - experts / 8)
    plan = planned("deepseek-r1", model__weights="fp8", gpu__name="h200-sxm")
    assert {(it.tp, it.dp_attention) for it in plan.tiered.choice.sizes} == {(8, False), (8, True)}
    assert plan.alone.users == pytest.approx(max(it.users_without_tiers for it in plan.tiered.choice.sizes))
    assert plan.tiered.users == pytest.approx(max(it.users_with_tiers for it in plan.tiered.choice.sizes))


def test_a_decode_step_of_kimi_k2_reads_the_experts_of_its_batch():
    """384 experts of which a token uses 8: four tokens use 31.1 of them, 82 of 1,015 GB. It was 35 ms a token.

    Each of 61 layers takes 65 us at least and two all-reduces, of 15.3 us and 7/4 of 14,336 bytes at 387 GB/s.
    """
    deployment = resolve(
        load(options={"model.name": "kimi-k2", "model.tp": 8, "model.weights": "fp8", "gpu.name": "b200-sxm"})
    )
    experts = (1026e9 - 32e9) / (1 - 8 / 384)
    by_hand = 1026e9 - experts + experts * (1 - (1 - 8 / 384) ** 4)
    assert deployment.step_weight_bytes(4) == pytest.approx(by_hand) == pytest.approx(92.8e9, rel=0.01)
    assert deployment.step_weight_bytes(1) == pytest.approx(32e9)
    assert deployment.step_weight_bytes(1e9) == pytest.approx(1026e9)
    slow = operate(deployment, 1e-9).tpot_s
    kv_bytes = 8 * 70_272 * deployment.workload.session_tokens
    layers_s = 61 * (65e-6 + 2 * (15.3e-6 + 7 / 4 * 14_336 / 387e9))
    assert slow == pytest.approx((32e9 + kv_bytes) / (8 * 7.7e12 * 0.8) + layers_s)
    dense = resolve(load(options={"model.name": "llama-3.1-8b"}))
    assert dense.step_weight_bytes(1) == dense.step_weight_bytes(99) == 16e9


def test_experts_of_ones_own_model_come_from_its_config(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, '
        '"head_dim": 128, "hidden_size": 1024, "num_experts": 64, "num_experts_per_tok": 4}'
    )
    options = {"model.name": str(config), "model.parameters": 10e9, "model.active_parameters": 2.5e9}
    deployment = resolve(load(options=options))
    assert deployment.expert_bytes == pytest.approx(20e9 * 0.75 / (1 - 4 / 64))
    assert deployment.step_weight_bytes(1) == pytest.approx(2 * 2.5e9)
    told = resolve(load(options=options | {"model.experts": 8, "model.experts_per_token": 2}))
    assert told.expert_bytes == pytest.approx(20e9)  # three quarters are all that a token skips


def test_drives_with_few_hits_are_not_advised():
    """Host memory keeps KV for minutes, so 0.4 % of the tokens come from drives; 18 of them were advised."""
    plan = planned("llama-3.3-70b")
    disk, host = tier(plan, "disk"), tier(plan, "host")
    assert plan.given.need.point.found["disk"] < 0.005
    assert plan.given.ceiling.point.found["disk"] < 0.015
    assert not disk.worth_it
    assert host.worth_it
    without = planned("llama-3.3-70b", "host=1TiB", model__tp=8)
    assert users(plan, "host") == pytest.approx(without.tiered.users)
    assert without.tiered.users * 1.1 > plan.given.users > users(plan, "host")
    assert users(plan) == pytest.approx(plan.alone.users)
    assert "disk." not in " ".join(conclusion(plan))
    assert 'kind = "disk"' not in settings_toml(plan)
    # From the interval that the plan names on they pay, and at 0.9 of that they do not.
    pays_s = disk.pays_from_interval_s
    for interval_s, pays in ((pays_s, True), (pays_s * 0.9, False)):
        both, one = (
            planned("llama-3.3-70b", *tiers, model__tp=8, traffic__interval_s=interval_s).tiered.users
            for tiers in (("host=1TiB", "disk=4xpm1753"), ("host=1TiB",))
        )
        assert (both > 1.1 * one) == pays


def test_the_price_of_a_choice_and_of_its_users():
    """1.1 TB of memory at 8 and 4 drives at 2,500, 8 GPUs at 25,000 and a server at 50,000; energy at 0.15."""
    plan = planned("llama-3.3-70b", example="prices", traffic__users=60)
    cost = plan.given.cost
    assert cost.bought == pytest.approx(8 * 25_000 + 50_000 + 2**40 / 1e9 * 8 + 4 * 2500)
    per_hour = cost.bought / (3 * 365.25 * 24) + cost.watts / 1000 * 0.15
    assert cost.per_million_output_tokens == pytest.approx(per_hour / 3600 / plan.given.output_tokens_per_s * 1e6)
    host_only = planned("llama-3.3-70b", "host=1TiB", example="prices", model__tp=8, traffic__users=60).tiered
    (row,) = (it for it in table(plan, "Most users").rows if it[0] == "host memory")
    energy = host_only.choice.cost.watts / 1000 * 0.15 * 3 * 365.25 * 24
    assert row[3:] == ("this", "8,796", f"{(8 * 25_000 + 50_000 + 8_796 + energy) / math.floor(host_only.users):,.0f}")
    assert "for 8,796 USD (illustration) or local drives for" in verdict(plan)


def test_gpus_for_the_load_agree_with_the_users_that_they_serve():
    """8 GPUs serve 66 users, so 60 need 8; with a reserve of 30 % 8 of them carry 46, so 60 need 12 or 16."""
    plan = planned("llama-3.3-70b", traffic__users=60)
    assert (plan.tiered.gpus_least, plan.tiered.reserve.gpus) == (8, 16)
    assert request(plan).startswith("60 users fit on 8 x h100-sxm with host memory")
    rows = {row[0]: row[1:] for row in needs_table(plan).rows}
    assert rows["GPUs"][1:] == ("8", "8")
    assert rows["GPUs with a reserve (70% used)"] == ("16", "16", "16")


def test_gpus_for_the_load_are_those_of_the_best_size_of_a_host():
    """One TP 8 serves 66 users: 10 GPUs were five copies of TP 2, of which 62 GPUs were to serve 80."""
    plan = planned("llama-3.3-70b", gpu__count=10, traffic__users=60)
    assert (plan.deployment.inputs.model.tp, plan.deployment.copies, plan.deployment.used_gpus) == (8, 1, 8)
    assert "TP 8, one copy, 2 GPUs idle" in heading(plan)
    # The second host's memory and drives serve no copy, so the users are those of one host. They were 100.
    assert plan.tiered.users == planned("llama-3.3-70b", gpu__count=8, traffic__users=60).tiered.users
    assert (plan.tiered.gpus_least, plan.alone.gpus_least) == (8, 16)
    # An idle GPU draws its idle power: 15 % of it.
    busy = plan.tiered.point.gpu_busy
    watts = 700 * (8 * (0.15 + 0.85 * busy) + 2 * 0.15) + 2 * 1500
    drives = 4 * 25 if any(it.name == "disk" for it in plan.deployment.tiers) else 0
    assert plan.tiered.cost.watts == pytest.approx(watts + drives, rel=0.01)


def test_gpus_for_the_load_are_one_number_in_all_places():
    """No copy on one L4 serves a user; it was 4 in the first line, and 63 in the table. Ten are five of TP 2."""
    plan = planned("llama-3.1-8b", gpu__name="l4", gpu__count=1, traffic__users=20)
    least, alone = plan.given.gpus_least, plan.alone.gpus_least
    for count, is_enough in ((least, True), (least // 2, False)):
        fewer = planned("llama-3.1-8b", gpu__name="l4", gpu__count=count, traffic__users=20)
        assert (fewer.given.users >= 20) == is_enough
    counts = [str(it.need.gpus) for it in plan.arms]
    assert counts == [str(alone), *[str(least)] * (len(counts) - 1)]
    assert needs_table(plan).rows[0] == ("GPUs", *counts)
    assert all(f" {count} GPU" in request(plan) for count in counts)


def test_a_drive_that_writes_too_slowly_drops_the_rest():
    """It has hits for the share of new KV that it writes. What misses is new KV again, so the share falls far."""
    options = {"model.name": "llama-3.1-8b", "model.tp": 1, "disk.count": 1, "host.capacity_bytes": 0}
    options |= {"software.gpu_reuse": False, "traffic.prefix_tokens": 0, "software.skips_slow_loads": False}
    slow, fast = (
        operate(resolve(load(options=options | {"disk.write_bytes_per_s": rate})), 1.0) for rate in (2e8, 1e12)
    )
    share = 2e8 / slow.new_bytes_per_s
    assert slow.write_bytes_per_s["disk"] == 2e8 < fast.write_bytes_per_s["disk"]
    assert 0 < share < 0.2
    assert slow.found["disk"] == pytest.approx(share * fast.found["disk"], rel=0.01)


def test_without_reuse_no_tier_is_worth_it():
    plan = planned("llama-3.1-8b", traffic__turns=1, traffic__prefix_tokens=0)
    assert "# no tier is worth buying for 80 users\n" in settings_toml(plan)
    document = to_json(plan)
    assert document["users_with_tiers"] == pytest.approx(document["users_without_tiers"])
    assert document["binding_limit"] == plan.binding.name
    assert {"name", "why_not", "worth_it"} <= document["tiers"][1].keys()
    assert [it["is_worth_buying"] for it in document["choices"]] == [True, False, False, False]


def test_a_part_of_a_user_is_no_reason_to_buy_a_tier():
    prices = {"price.gpu": 2500, "price.server": 3000, "price.host_memory_per_gb": 6}
    options = {"model.name": "llama-3.1-8b", "gpu.name": "l4", "gpu.count": 1, "traffic.users": 2, "target.ttft_s": 5}
    plan = make_plan(load(options=options | {"host.capacity_bytes": 64 << 30, "disk.count": 0} | prices))
    alone, host = users(plan), users(plan, "host")
    assert 1.1 * alone < host < math.floor(alone) + 1, "more of a user, and not one more"
    assert "No tier is worth buying" in verdict(plan)


@pytest.mark.parametrize(("turns", "columns"), [(1, []), (10, ["with host memory"])])
def test_a_size_has_users_with_tiers_only_where_some_are_worth_it(turns, columns):
    plan = planned("llama-3.3-70b", traffic__turns=turns, traffic__prefix_tokens=0)
    assert list(table(plan, "Users by size").columns)[2:-1] == ["GPU memory alone", *columns]


def test_sensitivities_stay_at_the_size_that_was_found():
    """A fifth more parameters raised the users from 10 to 62, since twice the GPUs held them."""
    plan = make_plan(load(options={"model.name": "llama-3.3-70b"}))
    by_name = {it.name: it for it in plan.sensitivities}
    assert "model.tp" not in by_name
    assert by_name["model.parameters"].users_higher < plan.tiered.users < by_name["model.parameters"].users_lower
    with pytest.raises(ConfigError, match="leave"):
        planned("llama-3.3-70b", model__tp=1)


@pytest.mark.parametrize("load_share", [0.2, 0.5])
def test_the_95th_percentile_is_that_of_a_simulated_queue(load_share):
    """Half of the requests compute their whole prompt. The exponential tail is off by up to 8 % here."""
    options = {"gpu.count": 1, "traffic.turns": 2, "traffic.answer_tokens": 1, "gpu.memory_bytes_per_s": 1e15}
    deployment = resolve(load(options={"model.name": "llama-3.1-8b"} | options))
    rate = load_share / operate(deployment.only(()), 1e-3).gpu_seconds
    point = operate(deployment.only(()), rate)
    shares, services = zip(*point.served_s, strict=True)
    rng, wait, times = random.Random(7), 0.0, []
    for service in rng.choices(services, shares, k=200_000):  # Lindley, 1952
        times.append(wait + service)
        wait = max(wait + service - rng.expovariate(rate), 0.0)
    assert point.ttft_s == pytest.approx(sum(times) / len(times), rel=0.02)
    assert point.ttft_within_s(0.95) == pytest.approx(sorted(times)[190_000], rel=0.08)


def test_full_batches_of_experts_cost_no_more_than_all_weights():
    deployment = resolve(load(options={"model.name": "gpt-oss-120b", "model.weights": "fp4", "model.tp": 8}))
    kv_bytes = deployment.model.gpu_bytes(deployment.workload.session_tokens)
    most = (117e9 * 0.5625 / deployment.batch + kv_bytes) / (8 * 3.35e12 * 0.8)
    most += 36 * (65e-6 + 2 * 12.7e-6) / deployment.batch + 72 * 7 / 4 * 2880 * 2 / 281e9
    assert decode_token_s(deployment) <= most


def test_a_plan_with_its_search_and_sensitivities_computes_few_loads(monkeypatch):
    """Some 0.5 s of processor time; 25,000 loads took 2.3 s, at one size."""
    loads = []
    for module in ("max_load", "plan", "tier_selection"):
        monkeypatch.setattr(f"kvtier.tools.plan.{module}.operate", lambda *a, **k: loads.append(a) or operate(*a, **k))
    plan = make_plan(load(options={"model.name": "gpt-oss-120b", "model.weights": "fp4"}))
    assert len(plan.tiered.choice.sizes) == 7
    assert len(plan.sensitivities) > 40
    assert len(loads) < 3500


def test_drives_that_take_less_than_what_is_reused_give_fewer_hits():
    """DeepSeek-R1 on 8 H200: 106 users with all KV written; what is not written is not found."""
    users = []
    for share in (1.0, 0.135, 0.0):
        plan = planned("deepseek-r1", "disk=4xpm1753", gpu__name="h200-sxm", model__weights="fp8", model__tp=8,
                       software__write_share=share)  # fmt: skip
        users.append(plan.given.users)
    assert users[0] > users[1] > users[2]
    assert users[2] == pytest.approx(plan.alone.users)
    assert plan.given.point.found["disk"] == 0


def test_the_price_of_tiers_has_the_drives_that_replace_worn_ones():
    """Llama-3.1-8B on 8 H100: host memory is not worth it, so 4 drives of 2,500, bought 3 years / their life times."""
    plan = planned("llama-3.1-8b", example="prices", traffic__users=500)
    assert [it.name for it in plan.idle_tiers] == ["host"]
    worn = 10_000 * (3 / plan.choices[2].life_years - 1)  # at the most users, as the users are
    assert worn > 30_000
    cost = plan.tiered.choice.cost
    assert cost.bought == pytest.approx(8 * 25_000 + 50_000 + 10_000 + worn)
    each = (cost.bought + cost.watts / 1000 * 0.15 * 3 * 365.25 * 24) / math.floor(plan.tiered.users)
    (row,) = (it for it in table(plan, "Most users").rows if it[0] == "local drives")
    assert row[3:] == ("this", f"{10_000 + worn:,.0f}", digits(each))
    assert "Prices of tiers are for 8 x h100-sxm at that load, in USD" in table(plan, "Most users").note


def test_the_headline_and_the_cost_are_of_the_tiers_that_are_worth_it():
    """They were of all tiers: 67 users and four drives, which are not worth it; 66 are those of host memory."""
    plan, host = (
        planned("llama-3.3-70b", *tiers, example="prices", model__tp=8, traffic__users=60)
        for tiers in ((), ("host=1TiB",))
    )
    assert plan.tiered.users == host.tiered.users < plan.given.users
    assert plan.tiered.cost == host.tiered.cost
    assert plan.given.cost.bought - plan.tiered.cost.bought == pytest.approx(4 * 2500)
    assert f"8 x h100-sxm serve {math.floor(host.tiered.users)} users with host memory" in verdict(plan)
    assert table(plan, "Gains").columns[2] == "with host memory"
    both = str(math.floor(plan.given.users))
    assert table(plan, "Most users").rows[-1][:2] == ("host memory and local drives", both)
    assert plan.drives is None


def test_cost_and_power_are_of_each_arm_at_its_own_largest_load():
    """They were at 80 users, of which GPU memory alone serves 53 within the limits."""
    plan = planned("llama-3.3-70b", "host=1TiB", example="prices", model__tp=8, traffic__users=60)
    for variant in (plan.alone, plan.tiered):
        rate, found = variant.users / 20, variant.choice.cost
        busy = operate(variant.deployment, rate).gpu_busy
        assert found.watts == pytest.approx(8 * 700 * (0.15 + 0.85 * busy) + 1500)
        per_hour = variant.cost.bought / (3 * 365.25 * 24) + found.watts / 1000 * 0.15
        assert found.per_million_output_tokens == pytest.approx(per_hour / 3600 / (rate * 100) * 1e6)
    gains = table(plan, "Gains")
    assert f"{math.floor(plan.alone.users)} and {math.floor(plan.tiered.users)} users" in gains.title
    power = next(row for row in gains.rows if row[0] == "power of a user, W")
    assert power[2] == digits(plan.tiered.choice.cost.watts / math.floor(plan.tiered.users))


def test_an_overload_says_first_that_the_load_does_not_fit():
    """One L4 computes a prompt in 6 s: 1 TiB of host memory was worth it, and its settings were printed."""
    plan = planned("llama-3.1-8b", "host=1TiB", gpu__name="l4", gpu__count=1, traffic__users=20)
    assert plan.is_overloaded
    least = plan.given.gpus_least
    assert request(plan).startswith(f"20 users do not fit on 1 x l4: they need {plan.arms[-1].need.gpus} GPU")
    assert verdict(plan).startswith("On 1 x l4, not even one user gets a first token within 1 s on average, with or")
    assert "orth buying" not in verdict(plan)
    assert [it.worth_it for it in plan.tiers] == [True, False]
    assert plan.idle_tiers[0].why_not == "no load is within the limits, with it or without"
    assert "[host]" not in settings_toml(plan)
    more = planned("llama-3.1-8b", "host=1TiB", gpu__name="l4", gpu__count=least, traffic__users=20)
    fewer = planned("llama-3.1-8b", "host=1TiB", gpu__name="l4", gpu__count=least // 2, traffic__users=20)
    assert more.tiered.users >= 20 > fewer.tiered.users


def test_an_overload_that_fits_in_part_names_the_users_and_the_gpus():
    plan = planned("llama-3.3-70b", "host=1TiB", traffic__users=300)
    least, alone = plan.tiered.gpus_least, plan.alone.gpus_least
    assert request(plan).split(" The given totals stay ")[0] == (
        f"300 users do not fit on 8 x h100-sxm: they need {least} GPUs in {least // 8} hosts with host memory and "
        f"{alone} GPUs in {alone // 8} hosts with GPU memory alone. No tier is worth buying for 300 "
        "users, because tiers save none of the 64 GPUs that they need with a reserve."
    )
    assert f"serve {math.floor(plan.tiered.users)} users with host memory" in verdict(plan)
    assert "# no tier is worth buying for 300 users\n" in settings_toml(plan)
    # Beyond the limits more tokens a second help nobody.
    late = planned("llama-3.3-70b", "host=1TiB", traffic__users=300, target__ttft_s=0.1)
    assert late.given.output_tokens_per_s > 1.1 * late.alone.output_tokens_per_s
    assert [it.name for it in late.idle_tiers] == ["host"]
    enough = "no number of these GPUs up to 1,000,000 is enough"
    never = f"{enough}, but larger ones, larger copies (--tp) or more time (--ttft) may be."
    assert f"{never} No tier is worth buying for 80 users." in request(planned("llama-3.3-70b", target__ttft_s=0.01))
    # The most users that may be asked for, and those of 80,000 hosts with the drives and channels of each.
    for users in (10**9, 3 * 10**6):
        many = request(planned("llama-3.1-8b", traffic__history_tokens=120_000, traffic__users=users))
        assert many.startswith(f"{users:,} users do not fit on 8 x h100-sxm: ")
        assert (never in many) == (users == 10**9)


def test_steps_other_than_a_fifth_are_named():
    """gpu.count moves by whole copies of the model: from 8 to 16."""
    plan = make_plan(load(options={"model.name": "llama-3.3-70b", "model.tp": 8}))
    rows = {row[0]: row for row in table(plan, "Sensitivity").rows}
    by_name = {it.name: it for it in plan.sensitivities}
    swings = [it.swing for it in plan.sensitivities]
    assert swings == sorted(swings, reverse=True)
    assert rows["gpu.count"][2:] == ("-", f"{math.floor(by_name['gpu.count'].users_higher)} (at 16)")
    assert "(" not in rows["gpu.flops_share"][3]


def test_the_write_budget_is_that_of_one_rank():
    """8 ranks share 4 drives of 1 TB, rated for one write a day in 5 years, that shall last 10."""
    plan = planned(
        "llama-3.1-8b", "disk=4xpm1753", disk__capacity_bytes=10**12, disk__drive_writes_per_day=1.0,
        target__life_years=10.0, software__gpu_reuse=False, traffic__users=200, traffic__interval_s=60.0,
    )  # fmt: skip
    assert plan.drives.write_policy == "budget"
    (line,) = (it for it in settings_toml(plan).splitlines() if "write_bytes_per_day" in it)
    assert int(line.removeprefix("# ").split()[2]) == pytest.approx(4 * 10**12 * 5 / 10 / 8, rel=1e-3)
    assert "# of each of 8 ranks: the drives then last 10 years" in line
    assert line.startswith("# ") == (plan.drives.users < 200 / 0.7)  # the load with its reserve


@pytest.mark.parametrize(("count", "fits"), [(100, True), (5000, False)])
def test_the_life_beside_a_write_budget_is_that_of_the_planned_load(count, fits):
    """Settings for 100 users said "544 for 2.3 years", which is the life at 100; 544 wear drives out in 0.43."""
    plan = planned("llama-3.1-8b", example="prices", traffic__users=count)
    life = {row[0]: row[-1] for row in needs_table(plan).rows}["life of the drives, years"]
    *_, before, last = settings_toml(plan).strip().splitlines()
    (worn,) = [it for it in conclusion(plan) if "the drives last" in it]
    assert plan.drives.write_policy == "budget"
    assert (plan.drives.users >= count) == fits
    assert before.startswith("# write_bytes_per_day = ")
    served = math.floor(plan.drives.users)
    assert last == f"# and serve at most {served:,} users; without it {life} years at {count:,} users"
    if fits:
        assert not plan.bought  # the settings are for a full server, which has more users than the budget
        assert plan.chosen.users > plan.drives.users
        assert "within all limits" not in worn
    else:
        assert f"(then {math.floor(plan.drives.users):,} users within all limits" in worn


def test_the_limit_is_a_mean_and_the_line_has_the_95th_percentile():
    plan = planned("llama-3.3-70b", traffic__users=60)
    point = plan.tiered.ceiling.point
    assert f"Within 1 s on average to the first token (95 % within {point.ttft_within_s(0.95):.3g} s)" in verdict(plan)


def test_hits_and_residences_name_their_load_and_copies_their_meaning():
    plan = planned("llama-3.3-70b", "host=1TiB")
    found = {row[0]: row[1:] for row in needs_table(plan).rows}
    point = plan.tiered.need.point
    assert needs_table(plan).title == "What 80 users need"
    assert found["host memory, s that unused KV stays"] == ("-", digits(point.residence_s["host"]))
    assert found["host memory, prompt tokens found"] == ("-", share_text(point.found["host"]))
    assert found["GPU memory, prompt tokens found"][1] == share_text(point.found["gpu"])
    mla = dict(circumstances(planned("deepseek-r1", model__weights="fp8", gpu__name="h200-sxm", model__tp=8)))
    assert "ranks that cannot split it hold 8 copies, a tier has 1" in mla["KV"]


@pytest.mark.parametrize("prices", ["", "prices"])
def test_one_machine_has_one_verdict(prices):
    """For 80 users it was host memory and not drives, for 90 to 100 drives and not host memory; of 101, 94 did fit."""
    plans = {count: planned("llama-3.3-70b", traffic__users=count, example=prices) for count in LOADS}
    alike = [it for count, it in plans.items() if not (prices and count > 67)]  # more need other GPUs
    (text,) = {verdict(it) for it in alike}
    host, drives = (math.floor(users(plans[80], name)) for name in ("host", "disk"))
    assert f"serve {host} users with host memory" in text
    assert f", {drives} with local drives" in text
    assert "one of them" in text
    served = {"host memory": host, "local drives": drives, "GPU memory alone": math.floor(users(plans[80]))}
    for count, plan in plans.items():
        fits = [name for name, most in served.items() if count <= most]
        start = f"{count} users {'fit on' if fits else 'do not fit on'} 8 x h100-sxm"
        assert request(plan).startswith(f"{start} with {fits[0]}" if fits else f"{start}: they need ")
        assert all(name in request(plan).partition(";")[0] for name in fits)
        assert plan.is_overloaded == (not fits)


LOADS = (40, 53, 60, 66, 67, 80, 90, 94, 97, 100, 101, 141, 500)


@pytest.mark.parametrize("count", [60, 500])
def test_all_that_a_buyer_needs_is_at_the_requested_load(count):
    """With 500 users it stood in four tables at 94, 141 and 500 users."""
    plan = planned("llama-3.3-70b", traffic__users=count, example="prices")
    assert needs_table(plan).title == f"What {count} users need"
    for arm in plan.arms:
        assert arm.need.point.requests_per_s == pytest.approx(count / 20)
        assert arm.need.users >= count
        same = planned(
            "llama-3.3-70b", gpu__count=arm.need.gpus, traffic__users=count,
            model__tp=arm.need.deployment.inputs.model.tp,
        )  # fmt: skip
        assert users(same, *arm.tiers) == pytest.approx(arm.need.users)
    at_load = [it.title for it in tables(plan) if f"{count} users" in it.title]
    assert [it.partition(",")[0].split(f" {count}")[0] for it in at_load] == [
        "Drives with local drives", "KV for a share of the possible hits",
    ]  # fmt: skip
    for found in tables(plan):  # no heading, row or note names a load besides
        assert not re.search(
            r"at [\d,]+ users", " ".join([*found.columns, *(row[0] for row in found.rows), found.note])
        )


def test_a_limit_of_the_95th_percentile_replaces_that_of_the_mean_or_holds_beside_it():
    mean, tail, both = (
        planned("llama-3.3-70b", "host=1TiB", model__tp=8, traffic__users=20, **targets)
        for targets in (
            {},
            {"target__ttft_p95_s": "2s"},
            {"target__ttft_p95_s": "2s", "target__ttft_s": "300ms"},
        )
    )
    assert (mean.inputs.target.ttft_s, mean.inputs.target.ttft_p95_s) == (1, 0)
    assert (tail.inputs.target.ttft_s, tail.inputs.target.ttft_p95_s) == (0, 2)
    assert tail.inputs.origin("target.ttft_s") == "--target-p95"
    assert tail.binding.name == "95 % of first tokens"
    assert tail.tiered.ceiling.point.ttft_within_s(0.95) == pytest.approx(2)
    assert "95 % of first tokens within 2 s, 8 x h100-sxm serve" in verdict(tail)
    assert both.tiered.users < tail.tiered.users < mean.tiered.users
    assert both.binding.name == "time to first token"
    assert both.tiered.ceiling.point.ttft_s == pytest.approx(0.3)
    assert "on average to the first token and with 95 % of first tokens within 2 s" in verdict(both)
    loose = planned("llama-3.3-70b", "host=1TiB", model__tp=8, target__ttft_p95_s="30s")
    assert loose.tiered.users > mean.tiered.users  # the mean's default no longer binds
    names = {it.name for it in make_plan(tail.inputs.change({"model.tp": 8})).sensitivities}
    assert "target.ttft_p95_s" in names
    assert "target.ttft_s" not in names
    with pytest.raises(ConfigError, match="set a limit for one of them"):
        load(options={"target.ttft_s": "0"})


def test_one_of_a_thing_is_written_in_the_singular():
    """It was "1 users fit", "1 x h100-sxm serve 53", and "they need 8 in one host"."""
    plan = planned("llama-3.1-8b", "host=64GiB", gpu__count=1, traffic__users=1)
    assert request(plan).startswith("1 user fits on 1 x h100-sxm with GPU memory alone. ")
    assert "1 x h100-sxm serves " in verdict(plan)
    assert needs_table(plan).title == "What 1 user needs"
    small = planned("llama-3.1-8b", gpu__name="l4", gpu__count=1, traffic__users=1)
    assert re.match(r"1 user does not fit on 1 x l4: it needs \d+ GPUs in one host with ", request(small))
    drives = planned("llama-3.3-70b", "disk=4xpm1753", "s3=500TB", model__weights="fp8", traffic__users=1)
    assert "# no tier is worth buying for 1 user; this is for a full server" in settings_toml(drives)
    assert "because local drives keep KV for " in " ".join(conclusion(drives))
    texts = [request(plan), verdict(plan), *conclusion(plan), heading(plan), *(it.title for it in tables(plan))]
    assert {row[3] for row in table(plan, "KV for a share").rows} == {
        f"{digits(it.tokens / 1e6)} M" for it in plan.capacities
    }
    assert [it for it in texts if re.search(r"\b1 (users|GPUs|hosts|copies)\b", it)] == []


FORTY = "disk=40x15.36TB?read=480GB/s&write=240GB/s"


@pytest.mark.parametrize("tier", [FORTY, "host=10TiB"])
def test_with_prices_the_verdict_for_more_users_is_that_of_their_table(tier):
    """8 GPUs bore the price of all drives, so no tier was worth buying; the table for 500 users said the opposite."""
    options = {"example": "prices", "model__weights": "fp8", "traffic__users": 500}
    plan = planned("llama-3.3-70b", tier, **options)
    rows = {row[0]: row[1:] for row in needs_table(plan).rows}
    alone, tiered = (float(it.replace(",", "")) for it in rows["with a reserve, price with energy of 3 years"])
    assert 1.1 * tiered < alone
    assert "Worth buying for 500 users by price per user: " in request(plan)
    assert rows["with a reserve, price with energy of a user"] == (f"{alone / 500:,.0f}", f"{tiered / 500:,.0f}")
    (bought,) = (row for row in table(plan, "Most users").rows if row[3] == "this")
    assert bought[-1] == f"{tiered / 500:,.0f}"
    # The control: the same drives for users that GPU memory alone serves are charged to the given GPUs.
    few = planned("llama-3.3-70b", tier, **(options | {"traffic__users": 60}))
    assert "for a full server by price per user" in verdict(few)


@pytest.mark.parametrize(("name", "saves"), [("llama-3.1-8b", True), ("qwen3-next-80b-a3b", False)])
def test_tiers_that_save_gpus_are_not_denied_in_the_same_line(name, saves):
    """It was "2 would be enough with local drives; tiers save no GPUs"; GPU memory alone needs 4 of the 8 given."""
    plan = planned(name, traffic__users=100)
    least = {it.tiers: it.gpus_least for it in plan.arms}
    assert (min(least.values()) < least[()] <= 8) == saves
    assert request(plan).endswith("for 100 users, because 8 x h100-sxm have a reserve without one.")


def test_settings_of_an_object_store_say_that_its_place_is_another():
    """`--tier s3=` gave a shared directory without a word."""
    plan = planned("llama-3.1-8b", "s3=1000TB", traffic__interval_s=3600.0, traffic__users=5000)
    assert plan.chosen.tiers == ("shared",)
    assert 'kind = "shared_directory" # s3, valkey and mooncake have a place' in settings_toml(plan)


def test_of_tiers_that_cost_more_for_the_load_the_cheapest_is_compared():
    plan = planned("llama-3.3-70b", example="prices", traffic__users=100)
    prices = {it.tiers: it.reserve.user_price for it in plan.arms}
    assert [*prices] == [(), ("host",)]
    assert prices[()] < prices["host",] < 1.1 * plan.user_prices["disk",]
    for text in (verdict(plan), request(plan)):
        assert "No tier is worth buying for 100 users by price per user" in text


def test_the_drives_of_all_hosts_share_the_commands():
    """192 commands were 48 for each of 4 drives, which are those of one host, beside 20 drives."""
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__users=500)
    count = plan.chosen.need.deployment.inputs.disk.count
    assert count > plan.inputs.disk.count
    rows = {row[0]: row[1:] for row in table(plan, "Drives").rows}
    assert rows["queue depth"][1] == f"{digits(plan.drives.depth / count)} for each of {count} drives"
    point = plan.chosen.need.point
    read, written = point.read_bytes_per_s["disk"], point.write_bytes_per_s["disk"]
    assert (
        rows["mix"][1]
        == f"kvtier bench io --mix {read / (read + written):.0%}".rstrip("%")
        + f"/{round(100 * written / (read + written))}"
    )
    assert f"uy {plan.drives.drives_for_life} drives: capacity needs " in table(plan, "Drives").note


def test_the_engines_of_a_full_host_fit_its_drives():
    """9 engines on 3 hosts had a ninth of 12 drives each, but a host is full with 4 engines and has 4 drives."""
    options = {"gpu__count": 18, "model__tp": 2}
    most = planned("gpt-oss-120b", "disk=12xpm1753", **options).given.users
    plan = planned("gpt-oss-120b", "disk=12xpm1753", **options, traffic__users=int(most) - 5)
    engines, hosts = 9, 3
    text = settings_toml(plan)
    assert f"each of {engines} engines" in text
    (line,) = re.findall(r'capacity_bytes = "(\d+) GiB"', text)
    assert 4 * int(line) * 2**30 == pytest.approx(4 * 15.36e12 * 0.9, rel=1e-3)
    assert hosts * 4 > engines


@pytest.mark.parametrize(("model", "count", "text"), [
    ("deepseek-v3", 16, "# none: kvtier refuses engines of several nodes"),
    ("deepseek-v3.2", 0, "# kvtier's vLLM connector does not support sparse attention such as sparse MLA yet"),
    ("minimax-m2", 0, ""),
])  # fmt: skip
def test_settings_that_the_connector_refuses_have_a_warning(model, count, text):
    gpus = {"gpu__name": "h100-sxm", "gpu__count": 16, "model__tp": 16} if count else {"gpu__name": "h200-sxm"}
    found = settings_toml(planned(model, "host=1TiB", model__weights="fp8", **gpus))
    assert (text in found) == bool(text) or not text
    assert ("does not support" in found or "refuses" in found) == bool(text)
    assert ("chunk_tokens" in found) == (not count)


@pytest.mark.parametrize("count", [8, 16])
def test_settings_of_data_parallel_attention_are_of_one_gpu_and_name_vllms_flags(count):
    """Every GPU is an engine, on any number of hosts. The settings did not say how to start them."""
    plan = planned("gpt-oss-120b", "host=2TiB", gpu__count=count, model__tp=count, model__dp_attention=True,
                   traffic__users=3000, traffic__interval_s=300.0)  # fmt: skip
    text = settings_toml(plan)
    assert f"each of {count} engines" in text
    assert f"# vLLM: --data-parallel-size {count} --data-parallel-size-local 8 --enable-expert-parallel\n" in text
    assert "kvtier refuses --nnodes above 1" in text
    assert f'[host]\ncapacity_bytes = "{2048 // count} GiB"' in text
    assert "vLLM:" not in settings_toml(planned("gpt-oss-120b", model__tp=8))


@pytest.mark.parametrize(
    ("name", "storing", "count"), [("deepseek-v3", 1, 20), ("gpt-oss-120b", 8, 300), ("kimi-linear-48b-a3b", 8, 300)]
)
def test_the_ranks_that_store_fill_the_drives(name, storing, count):
    """One rank of DeepSeek V3 stores for all 8, and the tier gave it an eighth of the drives and of their writes."""
    plan = planned(name, "disk=4xpm1753", gpu__name="h200-sxm", model__tp=8, disk__drive_writes_per_day=0.01,
                   traffic__users=count, software__gpu_reuse=False)  # fmt: skip
    text = settings_toml(plan)
    (capacity,) = re.findall(r'capacity_bytes = "(\d+) GiB"', text)
    of_rank = int(capacity) * 2**30 // 8  # a tier of drives divides its cap among all ranks
    assert storing * of_rank == pytest.approx(4 * 15.36e12 * 0.9, rel=1e-3)
    assert ("a cap for 8 ranks, of which 1 stores: they fill 55.3 TB" in text) == (storing == 1)
    (budget,) = re.findall(r"write_bytes_per_day = (\d+) # of each of (\d+) rank", text)
    assert int(budget[0]) * storing == pytest.approx(4 * 15.36e12 * 0.01, rel=1e-3)
    assert int(budget[1]) == storing


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-3.3-70b", {"model__weights": "fp8"}),
        ("llama-3.3-70b", {"traffic__turns": 3, "traffic__users": 40}),
        ("deepseek-v3", {"gpu__name": "h200-sxm", "traffic__users": 50}),
        ("gpt-oss-120b", {"traffic__users": 500, "traffic__interval_s": 60.0}),
        ("qwen3-next-80b-a3b", {"traffic__users": 300}),
    ],
)
def test_a_tier_keeps_kv_for_the_time_of_the_rule_of_thumb(name, changes):
    """Writes counted partial chunks, and tiers kept conversations of average length: they were up to 9 % apart."""
    plan = planned(name, "disk=4xpm1753", **changes)
    need, traffic = plan.given.need, plan.inputs.traffic
    new_per_s = traffic.users / traffic.interval_s / traffic.turns
    kv = need.deployment.model
    tokens = (21_000 + traffic.turns * 200) // 256 * 256 - 768  # of a finished conversation, in whole chunks
    conversation = tokens * kv.token_bytes + traffic.turns * kv.state_bytes
    pauses_s = (traffic.turns - 1) * traffic.interval_s
    capacity, kept_s = 4 * 15.36e12 * 0.9, need.point.residence_s["disk"]
    assert capacity / (new_per_s * conversation) - pauses_s == pytest.approx(kept_s, rel=0.02)
    assert capacity / need.point.write_bytes_per_s["disk"] - pauses_s == pytest.approx(kept_s, rel=0.02)
    is_said = "A tier that keeps KV for many pauses keeps it unused for its capacity / (new" in needs_table(plan).note
    assert is_said == any(it.tiers for it in plan.arms)


def test_the_pages_example_of_how_long_a_tier_keeps_kv_is_that_of_the_plan():
    plan = planned("llama-3.3-70b", model__weights="fp8")
    need, load = next(it.need for it in plan.arms if it.tiers == ("disk",)), plan.deployment.workload
    new = (load.stored_tokens - load.prefix_tokens) * plan.deployment.model.token_bytes
    row = next(it for it in OPERATIONS.read_text().splitlines() if "How long does a tier" in it)
    capacity = need.deployment.tiers[0].capacity_bytes
    assert (
        f"| {capacity / 1e12:.1f} TB, {load.requests_per_s * load.first_share:g} a second of {new / 1e9:.2f} GB" in row
    )
    assert f"{need.point.residence_s['disk'] / 3600:.1f} hours" in row


def test_the_buyers_page_has_the_figures_of_its_plan():
    """They stayed as they were when the plan's changed."""
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__users=500)
    host, disk = (next(it.need for it in plan.arms if it.tiers == (name,)) for name in ("host", "disk"))
    enough = {it: need.enough_bytes[it] / 1e12 for it, need in (("host", host), ("disk", disk))}
    read, written = disk.point.read_bytes_per_s["disk"], disk.point.write_bytes_per_s["disk"]
    mix = f"{read / (read + written) * 100:.0f}"
    text = BUYING.read_text()
    for said in (
        f"{digits(enough['host'])} TB of host memory for {host.gpus} GPUs, or {digits(enough['disk'])} TB of drives",
        f"`disk={digits(enough['disk'])}TB?read=290GB/s&write=200GB/s`",
        f"Here 20 drives last {disk.life_years * 365.25:.0f} days, and five years need {plan.drives.drives_for_life},",
        f"would last {disk.life_years * 365.25 * enough['disk'] / (20 * 15.36):.0f} days",
        f"{math.floor(plan.drives.users)} instead of 500 here",
        f"three drive writes a day, last {disk.life_years * 2 * 3:.1f} years",
        f"--mix {mix}/{100 - int(mix)} ",
        f"here {mix} %",
        f"here {2 * read / 1e9:.1f} / 20 = {2 * read / 2e10:.1f} GB/s",
    ):
        assert said in text


def test_power_counts_whole_hosts_as_the_price_does():
    """44 GPUs are in 6 hosts, of which each has a server's power; they had that of 5.5."""
    assert planned("llama-3.3-70b", gpu__count=44).inputs.power.server_watts == 6 * 1500


def test_a_load_over_the_limit_is_that_of_the_line():
    """500 users of 121 were "15x", which is the GPU time that a load beyond the limit would take."""
    plan = planned("llama-3.3-70b", traffic__users=500)
    found = table(plan, "Limits")
    assert (found.columns[3], found.note.split(". ")[0]) == ("load / limit", "The load is 500 users")
    for row, limit in zip(found.rows, plan.tiered.ceiling.limits, strict=True):
        if math.isfinite(limit.users):
            assert float(row[3].rstrip("x")) == pytest.approx(500 / limit.users, rel=0.06)


def test_a_reserve_of_a_large_model_is_less_than_another_load():
    """96 GPUs were 8 copies of 12, which did not meet the limit, and 3,048 with a reserve."""
    plan = planned("deepseek-v3", gpu__count=16, traffic__users=200)
    for arm in plan.arms:
        assert arm.need.point.ttft_s <= 1
        assert arm.need.gpus <= arm.reserve.gpus <= 2 * arm.need.gpus


def test_a_line_with_a_share_or_a_price_says_what_it_contains():
    """TB of drives were nine tenths of them, one price had energy and the other not, and they were "over 1 years"."""
    plan = planned("llama-3.3-70b", example="prices", traffic__users=60, price__years=1.0)
    rows = {row[0]: row[1:] for row in needs_table(plan).rows}
    assert digits(4 * 15.36 * 0.9) in rows["local drives, TB for KV (90% of them)"]
    machine = plan.arms[-1].reserve
    energy = machine.cost.watts / 1000 * 0.15 * 365.25 * 24
    whole = float(rows["with a reserve, price with energy of 1 year"][-1].replace(",", ""))
    assert whole == pytest.approx(machine.price + energy, abs=1)
    assert "in 1 year, and no energy" in needs_table(plan).note
    assert "over 1 year with energy" in verdict(plan)
    drives = planned("llama-3.3-70b", "disk=4xpm1753", traffic__users=60)
    assert table(drives, "Drives").rows[-1][-1].startswith("5 years: write ")


def test_snapshots_of_states_are_no_smaller_in_a_class_with_loss():
    """Drives lasted 6.2 years instead of 2.7 with int4, as if it coded the snapshots, which are half of the writes."""
    hybrid = deployed("qwen3.5-397b-a17b", gpu__name="b200-sxm", gpu__count=8, traffic__users=40)
    raw, _, int4 = class_plans(hybrid, EVERY_CLASS)
    new = operate(hybrid, 2.0).new_bytes_per_s
    snapshots = 2.0 * hybrid.model.state_bytes
    assert 0.3 < snapshots / new < 0.9
    assert int4.share * new == pytest.approx(snapshots + (new - snapshots) * 0.294921875, rel=0.001)
    assert int4.life_years == pytest.approx(raw.life_years / int4.share, rel=0.01)


def test_a_class_that_codes_nothing_changes_no_answer():
    """An MLA model's classes stored 100 %, and yet a class "changes answers", with a KL up to 4.8 N."""
    plan = planned("deepseek-v3", gpu__name="h200-sxm", gpu__count=8)
    found = loss_table(plan, class_plans(plan.given.deployment, EVERY_CLASS))
    assert found.note == "A class codes none of this model's KV in this format, so it changes nothing."
    assert [(row[1], row[-1]) for row in found.rows] == [("100%", "exact")] * 3


def test_a_reason_has_the_gpu_memory_of_the_planned_size():
    """GPU memory held 9.854 TB in the reason, which is that at TP 4, and 10.9 TB at the planned TP 8."""
    given = {"gpu__count": 32, "traffic__users": 150, "target__ttft_s": 0.8}
    plan = planned("gemma-3-27b", "host=4TB", "disk=8x7.68TB", example="prices", **given)
    assert plan.given.deployment.inputs.model.tp != plan.alone.deployment.inputs.model.tp
    assert f"less than the {decimal(plan.alone.deployment.gpu_stored_bytes)} that" in tier(plan, "host").why_not


def test_gpu_memory_that_reuses_nothing_keeps_no_part_of_the_hits():
    said = "GPU memory keeps a part of it"
    plans = planned("llama-3.1-8b"), planned("llama-3.1-8b", example="samsung")
    assert [said in table(it, "KV for a share").note for it in plans] == [True, False]


def test_chunks_read_from_drives_are_those_of_the_tokens_found():
    """A load reads the window of a prefix once, so 713 chunks a second were 477 of their stored size."""
    drives = "disk=4x3.84TB?read=28GB/s&write=12GB/s"
    plan = planned("gpt-oss-120b", drives, gpu__count=4, traffic__users=400, traffic__interval_s=90.0)
    need = plan.chosen.need
    found = need.point.found["disk"] * plan.deployment.workload.input_tokens * need.point.requests_per_s
    assert plan.drives.chunk_bytes == 256 * 18 * 2 * 8 * 64 * 2
    assert plan.drives.read_bytes_per_s / plan.drives.chunk_bytes == pytest.approx(found / 256, rel=0.02)


def test_a_larger_copy_may_serve_where_no_number_of_gpus_does():
    """No number of GPUs "up to 1,000,000" was enough, but sizes of more than one host had not been tried."""
    given = {"gpu__name": "h200-sxm", "gpu__count": 32, "target__ttft_s": 3.0, "traffic__users": 4}
    given |= {"traffic__interval_s": 30.0, "traffic__history_tokens": 50_000, "traffic__turns": 6}
    given |= {"traffic__question_tokens": 2000, "traffic__answer_tokens": 800, "model__kv_dtype": "fp8"}
    assert "larger copies (--tp) or more time (--ttft) may be" in request(planned("llama-3.1-405b", "host=0", **given))
    assert planned("llama-3.1-405b", "host=0", model__tp=16, **given).alone.users >= 4
