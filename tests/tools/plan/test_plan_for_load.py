"""One load, one conclusion: what the users need decides what is worth buying, and the printed size is enough."""

import gzip
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest
from tests.tools.plan.plans import planned

from kvtier.errors import ConfigError
from kvtier.report.format import digits
from kvtier.tools.plan.plan_text import conclusion, request, verdict
from kvtier.tools.plan.report import needs_table, tables
from kvtier.tools.plan.settings import settings_toml
from kvtier.tools.plan.tier_demand import drive_load

ROOT = Path(__file__).parents[3]
BUYING = ROOT / "docs" / "buying.md"
AGENT_SESSIONS = ROOT / "tests" / "golden" / "traces" / "claude_code_17sessions.jsonl.gz"
AGENT_LINE = re.compile(r"^kvtier plan deepseek-v3 --gpu 8xh200-sxm --users 500 (--interval .*)$", re.MULTILINE)
AGENTS = {
    "gpu__name": "h200-sxm",
    "traffic__history_tokens": 60_000,
    "traffic__turns": 30,
    "traffic__question_tokens": 1000,
    "traffic__answer_tokens": 300,
}


LINE = "GPU memory, TB as tiers store it"


def need(plan, *tiers):
    return next(it.need for it in (*plan.arms, plan.given) if it.tiers == tiers)


def rows(plan):
    return {row[0]: row[1:] for row in needs_table(plan).rows}


def drives(plan):
    return next(it for it in tables(plan) if it.title.startswith("Drives"))


@pytest.mark.parametrize("tier", ["host=3.92TB", "s3=3.92TB"])
def test_a_tier_that_saves_no_gpus_is_not_worth_buying_for_the_load(tier):
    """Tiers saved no GPUs at this load, and were "worth buying" for a server that had the tier of all 7 hosts."""
    plan = planned("llama-3.3-70b", tier, model__weights="fp8", traffic__users=500)
    name = "host memory" if tier.startswith("host") else "shared storage"
    assert need(plan).gpus == next(it.need.gpus for it in plan.arms if it.tiers)
    why = "because tiers save none of the 80 GPUs that they need with a reserve."
    assert f" No tier is worth buying for 500 users, {why}" in request(plan)
    assert ("in each host, and all given tiers, " in request(plan)) == tier.startswith("host")
    assert "orth buying" not in verdict(plan)
    assert "8 x h100-sxm with all of these tiers serve " in verdict(plan)
    assert verdict(plan).endswith(f"share them: one host gets {3920 / need(plan).deployment.hosts:.0f} GB of {name}.")
    assert "# no tier is worth buying for 500 users\n" in settings_toml(plan)
    assert not [it for it in conclusion(plan) if "90 %" in it]


@pytest.mark.parametrize("tier", ["s3=2TB", "disk=2xpm1753"])
def test_a_host_gets_a_share_of_tiers_only_where_some_are_worth_it(tier):
    """It was "8 x h20 with all of these tiers serve 33 users with GPU memory alone", and "one host gets 1 TB"."""
    gpus = {"gpu__name": "h20", "model__weights": "fp8"}
    plan = planned("command-a", tier, **gpus, traffic__users=40, traffic__interval_s=30.0, target__ttft_s=4.0)
    assert need(plan).deployment.hosts == 2 > plan.deployment.hosts
    assert "8 x h20 serve 33 users with GPU memory alone" in verdict(plan)
    assert "No tier is worth buying for a full server, because " in verdict(plan)
    assert "one host gets" not in verdict(plan)


def test_given_totals_that_stay_while_hosts_grow_say_what_the_same_in_each_host_would_save():
    """It was "No tier is worth buying", as 8 drives of one host were shared by 8 hosts; 24 of 3 hosts were enough."""
    inputs = {"gpu__name": "mi300x", "gpu__count": 8, "traffic__users": 20000, "traffic__interval_s": 120.0}
    plan = planned("gpt-oss-120b", "host=2TiB", "disk=8xbm1743", example="prices", **inputs)
    hosts = plan.grown_gpus // 8
    totals = f"{2.199 * hosts:.1f} TB of host memory and {8 * hosts} drives"
    assert f"{plan.grown_gpus} GPUs in {hosts} hosts would be enough: give --tier the totals of {totals}." in request(
        plan
    )
    assert plan.grown_gpus < min(it.need_gpus for it in plan.arms)
    tiers = (f"host={2 * hosts}TiB", f"disk={8 * hosts}xbm1743")
    grown = planned("gpt-oss-120b", *tiers, example="prices", **inputs)
    assert grown.given.gpus_least == plan.grown_gpus
    assert grown.grown_gpus is None
    default = planned("gpt-oss-120b", example="prices", **inputs)
    assert "given totals" not in request(default)


def test_unused_kv_stays_for_capacity_by_the_kv_and_snapshots_of_a_conversation():
    """By the note drives kept 2.08 GB of a conversation for 32,400 s; with its ten snapshots that is 17,700 s."""
    load = {"traffic__users": 1200, "traffic__interval_s": 90.0, "traffic__history_tokens": 60000}
    plan = planned("qwen3.5-397b-a17b", "disk=8xd7-ps1030", gpu__name="h200-sxm", target__ttft_s=1.5, **load)
    at, turns = need(plan, "disk").deployment, plan.inputs.traffic.turns
    size, states = at.model.stored_bytes(at.workload.session_tokens), at.model.state_bytes
    kept = size - at.workload.prefix_tokens * at.model.token_bytes + (turns - 1) * states
    begun_per_s = at.workload.requests_per_s / turns
    stays_s = at.tiers[-1].capacity_bytes / (begun_per_s * kept) - (turns - 1) * 90
    assert need(plan, "disk").point.residence_s["disk"] == pytest.approx(stays_s, rel=0.03)
    said = "Each query also leaves 1 snapshot of the recurrent states (192 MB each) in that KV; "
    assert said in needs_table(plan).note
    assert "snapshot" not in needs_table(planned("llama-3.1-8b")).note


@pytest.mark.parametrize(("count", "is_few"), [(4, True), (64, False)])
def test_fewer_drives_than_hosts_are_not_in_every_host(count, is_few):
    plan = planned("llama-3.3-70b", f"disk={count}xpm1753", model__weights="fp8", traffic__users=500)
    assert ("There are fewer drives than hosts, " in needs_table(plan).note) == is_few


@pytest.mark.parametrize("write", [10, 40])
def test_a_line_of_writes_that_a_tier_cannot_take_has_a_note(write):
    """The store's own 10 GB/s stood as the load's writes; the load computes 28 GB/s of KV, and the rest is dropped."""
    hardware = {"gpu__name": "gb300", "model__weights": "fp8", "traffic__users": 3000, "target__ttft_s": 2.0}
    load = {"traffic__interval_s": 300.0, "traffic__history_tokens": 12_000}
    plan = planned("glm-4.5", f"s3=500TB?read=20GB/s&write={write}GB/s", **hardware, **load)
    point = need(plan, "shared").point
    partial = sum((13_200 + 200 * turn) % 256 for turn in range(10)) / 10
    new = 10 * (14_000 * (1 - point.hit_rate) + 100 - partial) * 92 * 2 * 8 * 128 * 2
    written = point.write_bytes_per_s["shared"]
    assert written == pytest.approx(min(new, write * 1e9), rel=1e-6)
    text = f"Only {written / new:.0%} of new KV is written to shared storage in time."
    assert (text in needs_table(plan).note) == (write == 10)
    assert ("in time" in needs_table(plan).note) == (write == 10)


def test_tiers_are_not_worth_buying_where_the_given_gpus_have_a_reserve_without_one():
    """Four GPUs serve 200 users without drives, which found 0.0 % there, and were "worth buying for 200 users"."""
    tier = "disk=1x20TB?read=2GB/s&write=1GB/s"
    changes = {"gpu__name": "l40s", "traffic__interval_s": 30.0, "traffic__history_tokens": 6000}
    four, one = (planned("gpt-oss-20b", tier, **changes, gpu__count=it, traffic__users=200) for it in (4, 1))
    assert need(four, "disk").point.found["disk"] < 0.001
    assert "(1 would be enough with local drives, 2 with GPU memory alone)" in request(four)
    assert request(four).endswith("No tier is worth buying for 200 users, because 4 x l40s have a reserve without one.")
    assert (need(one).gpus, need(one, "disk").gpus) == (2, 1)
    assert rows(one)["GPUs with a reserve (70% used)"] == ("2", "2")
    assert request(one).endswith("because tiers save none of the 2 GPUs that they need with a reserve.")


def test_the_load_of_a_full_server_keeps_its_verdict():
    """The control: with the same tier, users that fit on one server get what the server's verdict says."""
    plan = planned("llama-3.3-70b", "host=3.92TB", model__weights="fp8", traffic__users=95)
    assert "Worth buying for 95 users: host memory. With a reserve they need 12 GPUs " in request(plan)
    assert verdict(plan).endswith("Worth buying for a full server: host memory.")
    assert "[host]" in settings_toml(plan)


def test_tiers_that_save_gpus_are_worth_buying_though_a_full_server_gains_nothing():
    """500 agents needed 504 GPUs instead of 576, and no tier was worth buying."""
    plan = planned("deepseek-v3", **(AGENTS | {"traffic__history_tokens": 66_000}), traffic__users=500)
    assert [it.tiers for it in plan.ways] == [()]
    assert need(plan).gpus > 1.1 * need(plan, "host").gpus
    bought = "Worth buying for 500 users: host memory or local drives, one of them."
    assert request(plan).endswith(f"{bought} With a reserve they need 848 GPUs instead of 952.")
    assert "No tier is worth buying for a full server" in verdict(plan)
    assert "[host]" in settings_toml(plan)


def test_less_than_a_plans_error_is_no_gain():
    """One server of 38 was saved with drives that last a month, and they were worth buying."""
    plan = planned("llama-3.1-70b", "disk=2xpm1753", traffic__users=2000)
    tiered, alone = (int(it) for it in rows(plan)["GPUs with a reserve (70% used)"][::-1])
    assert need(plan, "disk").gpus < need(plan).gpus
    assert alone < 1.1 * tiered
    saved = f"{'less than 10%' if tiered < alone else 'none'} of the {alone} GPUs that they need with a reserve"
    assert f"No tier is worth buying for 2,000 users, because tiers save {saved}. The given totals" in request(plan)
    assert 'kind = "disk"' not in settings_toml(plan)


def test_drives_that_wear_out_are_named_with_their_life():
    worn, lasting = (
        planned("llama-3.3-70b", "disk=4xpm1753", disk__drive_writes_per_day=rating, model__weights="fp8")
        for rating in (1.0, 100.0)
    )
    reserve = "With a reserve they need 12 GPUs instead of 16."
    assert re.search(rf"Worth buying for 80 users: local drives \(they last \d+ days\)\. {reserve}$", request(worn))
    assert request(lasting).endswith(f"Worth buying for 80 users: local drives. {reserve}")


@pytest.mark.parametrize(
    ("model", "gpus", "why"),
    [
        ("deepseek-v3", {"gpu__count": 16}, "kvtier refuses engines of several nodes"),
        ("deepseek-v3.2", {"gpu__name": "h200-sxm"}, "does not support sparse attention such as sparse MLA yet"),
    ],
)
def test_what_kvtier_refuses_is_said_in_the_first_paragraph(model, gpus, why):
    plan = planned(model, traffic__users=500, **gpus)
    assert request(plan).endswith(f"{why}.")
    assert "Buy no tier for this plan: " in request(plan)
    assert "orth buying" not in request(plan) + verdict(plan)
    assert why in settings_toml(plan)
    (choices,) = (it for it in tables(plan) if it.title.startswith("Most users"))
    assert {row[3] for row in choices.rows} == {""}
    assert "Worth buying for 500 users: " in request(planned("deepseek-v3", gpu__name="h200-sxm", traffic__users=500))


@pytest.mark.parametrize(
    ("model", "count", "changes"),
    [
        ("llama-3.3-70b", 500, {"model__weights": "fp8"}),
        ("llama-3.1-70b", 2000, {}),
        ("deepseek-v3", 500, {"gpu__name": "h200-sxm"}),
        ("deepseek-v3", 500, AGENTS),
        ("gpt-oss-120b", 3000, {"traffic__interval_s": 60.0}),
        ("qwen3-next-80b-a3b", 2000, {}),
    ],
)
def test_the_printed_size_of_a_tier_gives_the_printed_gpus(model, count, changes):
    """The page said that users needed 3.92 TB; with these they needed as many GPUs as without a tier."""
    plan = planned(model, traffic__users=count, **changes)
    found, tried = rows(plan), 0
    for column, arm in enumerate(plan.arms):
        for tier, name in (("host", "host memory"), ("disk", "local drives")):
            if arm.tiers != (tier,):
                continue
            enough = float(found[f"{name}, TB that are enough"][column].replace(",", ""))
            disk, kinds = arm.need.deployment.inputs.disk, {"host": "host={}", "s3": "s3={}"}
            reads, writes = (disk.count * it for it in (disk.read_bytes_per_s, disk.write_bytes_per_s))
            kinds = kinds if tier == "host" else {"disk": f"disk={{}}?read={reads:.0f}B/s&write={writes:.0f}B/s"}
            for kind, text in kinds.items():
                bought = planned(model, text.format(f"{enough * 1e12:.0f}"), traffic__users=count, **changes)
                (small,) = (it.need for it in bought.arms if it.tiers)
                assert small.gpus == arm.need.gpus, (kind, enough)
                if kind == "disk" and enough:  # "and last in proportion to their size"
                    assert "last in proportion to their size" in needs_table(plan).note
                    shorter = enough * 1e12 / disk.count / disk.capacity_bytes
                    assert small.life_years == pytest.approx(arm.need.life_years * shorter, rel=0.05)
            tried += 1
            if not enough:
                continue
            fewer = planned(model, kinds[tier].format(f"{enough * 0.9e12:.0f}"), traffic__users=count, **changes)
            assert next((it.need.gpus for it in fewer.arms if it.tiers), 10**9) > arm.need.gpus
    assert tried


def test_a_load_that_the_given_gpus_serve_with_their_tiers_fits_though_the_gain_is_small():
    """3,000 users did "not fit on 304 x l40s", which "serve 3,027 with local drives"."""
    hardware = {"gpu__name": "l40s", "gpu__count": 304}
    plan, more = (planned("llama-3.1-8b", "disk=26.3TB", traffic__users=it, **hardware) for it in (3000, 3100))
    assert request(plan).startswith("3,000 users fit on 304 x l40s with local drives (302 would be enough); they need ")
    assert request(plan).endswith("because tiers save less than 10% of the 440 GPUs that they need with a reserve.")
    assert need(plan, "disk").gpus == 304 < need(plan).gpus
    assert not plan.is_overloaded
    assert more.is_overloaded
    assert request(more).startswith("3,100 users do not fit on 304 x l40s: ")


def test_gpu_memory_counts_as_tiers_store_it_and_says_so():
    """0.84 TB of one copy stood beside 3.72 TB of eight; GPU memory held 66.5 % of the prompts' tokens.

    The line was "TB for KV" where tiers store windows in every chunk: 38.6 GB of a GPU that has 25.8 GB.
    """
    plan = planned("deepseek-v3", gpu__name="h200-sxm", traffic__users=500)
    deployment = need(plan, "host").deployment
    assert float(rows(plan)[LINE][1]) * 8e12 == pytest.approx(deployment.kv_bytes * deployment.replicas, rel=0.01)
    plain = need(planned("llama-3.3-70b"))
    assert plain.deployment.gpu_stored_bytes == pytest.approx(plain.deployment.kv_bytes * plain.deployment.replicas)
    windows = planned("gemma-3-12b", gpu__name="l4", gpu__count=1, model__weights="fp8", traffic__users=1)
    # 48 layers of every token, and in GPU memory the last 1,024 tokens of 40 of them.
    stored, held = 22_200 * 48 * 8192, 22_200 * 8 * 8192 + 1024 * 40 * 8192
    assert float(rows(windows)[LINE][0]) == pytest.approx(
        need(windows).deployment.kv_bytes * stored / held / 1e12, rel=0.01
    )
    assert float(rows(windows)[LINE][0]) * 1e12 > 24 * 2**30


@pytest.mark.parametrize(
    ("model", "tier", "why"),
    [
        (
            "deepseek-v3",
            "host=40GB",
            "host memory holds 40 GB, less than the 51.65 GB that GPU memory holds as tiers store it.",
        ),
        ("deepseek-v3", "host=200GB", "of the reuses come within that."),
        (
            "mixtral-8x22b",
            "host=1TiB",
            "host memory holds 1.1 TB, less than the 1.101 TB that GPU memory holds as tiers store it.",
        ),
    ],
)
def test_a_tier_is_called_smaller_than_gpu_memory_only_where_it_stores_less(model, tier, why):
    """200 GB of one latent each were "less than the 413 GB of GPU memory", which holds eight of each."""
    gpu = {"gpu__name": "mi300x" if model == "mixtral-8x22b" else "h200-sxm", "model__tp": 8}
    load = {"traffic__users": 10, "traffic__interval_s": 2.0, "traffic__history_tokens": 1500}
    assert verdict(planned(model, tier, **gpu, **load)).endswith(why)


def test_fewer_writes_say_how_many_users_they_serve():
    """It was "Or keep 120 and write less", which serves 1,669 of the 2,000 users."""
    plan = planned("llama-3.1-70b", traffic__users=2000)
    assert plan.drives.users < 2000
    share, served = re.search(
        r"write ([\d.]+)% of new KV, a budget for at most ([\d,]+) users\b", drives(plan).note
    ).groups()
    assert (float(share), served) == (round(plan.drives.write_share * 100, 1), f"{math.floor(plan.drives.users):,}")
    buy = int(re.search(r"[Bb]uy (\d+) drives", drives(plan).note)[1])
    bought = planned("llama-3.1-70b", f"disk={buy}xpm1753", traffic__users=2000)
    assert need(bought, "disk").gpus == need(plan, "disk").gpus
    assert need(bought, "disk").life_years >= 5
    assert "they last" not in request(bought)


@pytest.mark.parametrize(
    ("model", "count", "hardware"),
    [
        ("qwen3-32b", 300, {"gpu__count": 24, "disk__count": 8}),
        ("qwen3-32b", 250, {"gpu__count": 24, "disk__count": 8}),
        ("llama-3.3-70b", 500, {"gpu__count": 40, "disk__count": 20, "model__weights": "fp8"}),
    ],
)
def test_the_printed_share_of_a_write_budget_gives_the_wanted_years_and_itself(model, count, hardware):
    """With 15.5% of new KV drives lasted 3.12 years, as fewer hits compute more, and 302 users were 299."""
    first = planned(model, host__capacity_bytes=0, traffic__users=count, **hardware)
    share, served = first.drives.write_share, math.floor(first.drives.users)
    plan = planned(
        model,
        host__capacity_bytes=0,
        traffic__users=min(count, served),
        software__write_share=float(f"{share:.3f}"),
        **hardware,
    )
    assert need(plan, "disk").gpus == hardware["gpu__count"]
    found = need(plan, "disk")
    again = drive_load(found.deployment, found.point, found.enough_bytes["disk"])
    assert 5 <= again.life_years < 5.1
    assert again.write_share == pytest.approx(share)
    assert math.floor(again.users) == served


def test_a_share_that_lasts_only_at_a_lower_load_names_it_or_is_not_printed():
    """It was "life 2.6 years" beside "to last 5 years, write 100.0% of new KV", which is what gives 2.6 years."""
    slow = {"traffic__interval_s": 300.0, "target__ttft_p95_s": 8.0}
    plan = planned("kimi-k2", gpu__name="b300-sxm", gpu__count=8, traffic__users=5000, **slow)
    served = f"{math.floor(plan.drives.users):,} users"
    assert plan.drives.life_years < 5
    assert plan.drives.write_share is None
    assert drives(plan).rows[-1][2] == f"5 years: serve at most {served}"
    assert drives(plan).note.endswith(f"Or keep these and serve at most {served}.")
    fewer = planned("llama-3.1-70b", traffic__users=2000)
    assert drives(fewer).rows[-1][2].endswith(f"% at {math.floor(fewer.drives.users):,} users")
    worn = planned("llama-3.1-8b", disk__drive_writes_per_day=0.001)
    assert re.search(r"5 years: write [\d.]+% of new KV$", drives(worn).rows[-1][2])


@pytest.mark.parametrize(("rated", "is_worn"), [(2.0, True), (50.0, False)])
def test_drives_that_wear_out_are_kept_and_replaced_as_the_price_counts(rated, is_worn):
    """A verdict with the price of 4 drives, and of those that replace them, was followed by "Buy 50 drives"."""
    plan = planned("llama-3.3-70b", example="prices", model__weights="fp8", disk__drive_writes_per_day=rated,
                   traffic__users=500, host__capacity_bytes=0)  # fmt: skip
    need, price = plan.chosen.need, plan.inputs.price
    count = need.deployment.inputs.disk.count
    paid = count * price.drive * max(1, price.years / need.life_years)
    kept = f"Keep the {count} drives of the plan and replace each after "
    cost = f", {digits(count / need.life_years)} a year, for {digits(paid)} {price.currency} in 3 years. Or buy "
    assert drives(plan).note.startswith(kept) == (cost in drives(plan).note) == is_worn
    assert ("and the price replaces worn ones)" in request(plan)) == is_worn
    assert drives(plan).note.endswith(f"The plan counts {count}.") != is_worn


def test_figures_of_a_user_are_said_to_be_of_whole_users():
    """11,017 and 8,592 are of 7 and 10 users, and their ratio was said to be of the unrounded 7.89 and 10.30."""
    plan = planned(gpu__name="l40s", gpu__count=1, traffic__users=1, example="prices")
    (gains,) = (it for it in tables(plan) if it.title.startswith("Gains"))
    (price,) = (row for row in gains.rows if row[0].startswith("price of a user"))
    assert price[1] == digits(plan.alone.choice.cost.total / math.floor(plan.alone.users))
    assert gains.note.endswith("Ratios are those of the unrounded figures. Figures of a user divide by whole users.")


def test_the_mark_of_what_is_worth_buying_is_for_the_load_that_prices_are_for():
    """Prices were for 500 users, and 'this' was said to be for full GPUs."""
    for count, column in ((500, "for 500 users"), (60, "if full")):
        plan = planned("llama-3.3-70b", example="prices", model__weights="fp8", traffic__users=count)
        (choices,) = (it for it in tables(plan) if it.title.startswith("Most users"))
        assert choices.columns[3] == column
        assert plan.prices_load == (count == 500)
        assert (
            f"'This' marks what is worth buying {column}".replace("if full", "if these GPUs are full") in choices.note
        )


def shared(plan):
    return next(it for it in plan.given.deployment.tiers if it.name == "shared")


def test_rates_of_a_shared_store_are_its_own_and_reads_do_not_limit_writes():
    """`write=` was refused, and `read=50GB/s` also limited the writes of 38 hosts to 50 GB/s."""
    network = 50e9
    for text, rates in {
        "": (network, network),
        "?read=20GB/s": (20e9, network),
        "?write=7GB/s": (network, 7e9),
    }.items():
        found = shared(planned("llama-3.3-70b", f"s3=50TB{text}"))
        assert (found.read_bytes_per_s, found.write_bytes_per_s) == rates
    noted = [
        "Shared storage is as fast here as the network adapters of the hosts"
        in needs_table(planned("llama-3.3-70b", f"s3=50TB{text}", traffic__users=60)).note
        for text in ("", "?read=20GB/s")
    ]
    assert noted == [True, False]


@pytest.mark.parametrize(
    ("model", "changes", "helps", "not_named"),
    [
        ("deepseek-v3", {}, {"model__weights": "fp4"}, "--dtype"),
        ("deepseek-v3", {"gpu__count": 16, "model__tp": 4}, {"model__tp": 16}, "--dtype"),
        ("llama-3.3-70b", {"gpu__count": 2, "traffic__history_tokens": 100_000}, {"gpu__count": 4}, "a larger --tp"),
    ],
)
def test_the_remedy_of_a_model_that_does_not_fit_names_options_that_help(model, changes, helps, not_named):
    """It named a kv_dtype, which is no option, for weights that leave 0.0 GB; and model.tp, which was not given."""
    with pytest.raises(ConfigError, match="for KV next to") as caught:
        planned(model, **changes)
    text = str(caught.value)
    assert ("model.tp = " in text) == ("model__tp" in changes)
    assert not_named not in text
    assert "; use larger GPUs (--gpu)" in text
    option = {"model__weights": "--weights fp4", "model__tp": "a larger --tp", "gpu__count": "at least 4 GPUs (--gpu)"}
    assert all(option[it] in text for it in helps)
    assert planned(model, **(changes | helps)).choices
    # 8 L4 have 160 GB, and a 405B in fp4 has 228 GB: neither more of them in a host nor fp4 was enough.
    far = "at least 64 GPUs (--gpu) in engines of several nodes, which kvtier refuses"
    with pytest.raises(ConfigError, match=re.escape(f"; use larger GPUs (--gpu), or {far}") + "$"):
        planned("llama-3.1-405b", gpu__name="l4", gpu__count=2)
    assert planned("llama-3.1-405b", gpu__name="l4", gpu__count=64).choices
    with pytest.raises(ConfigError, match="for KV next to"):
        planned("llama-3.1-405b", gpu__name="l4", gpu__count=56)


def test_a_gain_that_whole_users_make_large_has_its_figures():
    """3 users with GPU memory alone and 4 with drives, which "add less than 10%"."""
    plan = planned("deepseek-v3", **AGENTS, traffic__users=500, traffic__interval_s=10.0)
    alone, given = plan.alone.choice, plan.given.choice
    assert given.whole_users > alone.whole_users
    assert given.users < 1.1 * alone.users
    text = " ".join(conclusion(plan))
    shown = re.search(r"add less than 10% \(([\d.]+) users instead of ([\d.]+)\)", text)
    assert float(shown[2]) == pytest.approx(alone.users, abs=0.01)
    assert float(shown[1]) < 1.1 * float(shown[2])  # 143 users instead of 130 were exactly 10 %


def test_the_pages_line_for_coding_agents_is_that_of_the_published_sessions():
    """No page said what a coding agent sends. The line has the lengths and pauses of 17 sessions."""
    with gzip.open(AGENT_SESSIONS, "rt", encoding="utf-8") as lines:
        sessions = [json.loads(it)["requests"] for it in lines]
    queries = [[it for it in session if "requests" not in it] for session in sessions]
    pauses = [b["t"] - a["t"] for session in queries for a, b in pairwise(session)]
    growth = [b["in"] - a["in"] for session in queries for a, b in pairwise(session)]
    line = AGENT_LINE.search(BUYING.read_text())[1]
    given = dict(re.findall(r"(--[a-z]+|traffic\.[a-z_]+)[ =]([0-9.]+s?)", line))
    assert float(given["--turns"]) == pytest.approx(mean(map(len, queries)), rel=0.03)
    assert float(given["--history"]) + 1000 == pytest.approx(mean(it[0]["in"] for it in queries), rel=0.03)
    assert float(given["--question"]) + float(given["--answer"]) == pytest.approx(mean(growth), rel=0.03)
    assert float(given["--answer"]) == pytest.approx(mean(it["out"] for session in queries for it in session), rel=0.03)
    assert float(given["--interval"].rstrip("s")) == pytest.approx(mean(pauses), rel=0.03)
    spread = math.exp(math.log1p(float(given["traffic.interval_cv"]) ** 2) / 2)
    assert float(given["--interval"].rstrip("s")) / spread == pytest.approx(median(pauses), rel=0.03)
