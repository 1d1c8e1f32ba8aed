"""No two lines of a plan contradict each other: what a buyer recalculates gives what the page says."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tools.plan.plans import planned

from kvtier.errors import ConfigError
from kvtier.report.format import digits
from kvtier.tools.plan.max_load import most_users
from kvtier.tools.plan.operating_point import operate
from kvtier.tools.plan.plan import to_json
from kvtier.tools.plan.plan_text import circumstances, conclusion, heading, in_words, request, verdict
from kvtier.tools.plan.report import needs_table, tables
from kvtier.tools.plan.settings import settings_toml

TRACES = Path(__file__).parents[2] / "golden" / "traces"


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"ttft_s": 0.05}, "--ttft"),
        ({"ttft_s": 0.0, "ttft_p95_s": 0.3}, "--target-p95"),
        ({"ttft_s": 1.0, "ttft_p95_s": 0.3}, "--target-p95"),
        ({"ttft_s": 0.05, "ttft_p95_s": 0.3}, "--ttft and --target-p95"),
        ({"ttft_s": 1.0, "tpot_s": 0.001}, "target.tpot_s"),
    ],
)
def test_more_time_is_an_option_of_the_limit_that_no_gpus_meet(limits, named):
    """It was --ttft beside --target-p95 300ms, and --ttft adds a limit there."""
    changes = {f"target__{name}": value for name, value in limits.items()}
    plan = planned("llama-3.3-70b", model__weights="fp8", **changes)
    (found,) = re.findall(r"more time \((.*?)\) may be", request(plan))
    assert found == named


def test_drives_to_buy_are_enough_for_one_in_each_host():
    """264 GPUs in 33 hosts were to get 17 local drives, and a host without one has none."""
    agents = {"interval_s": 140, "interval_cv": 6.3, "history_tokens": 30_000, "turns": 38}
    agents |= {"question_tokens": 1550, "answer_tokens": 450, "users": 2000}
    changes = {f"traffic__{name}": value for name, value in agents.items()}
    plan = planned("deepseek-v3", gpu__name="h200-sxm", gpu__count=16, **changes)
    (drives,) = (it for it in tables(plan) if it.title.startswith("Drives with local drives"))
    hosts = plan.chosen.need.deployment.hosts
    assert max(plan.drives.drives_for_life, plan.drives.drives_for_bandwidth) < hosts
    assert drives.note.startswith(f"Buy {hosts} drives: ")
    assert f", one for each host {hosts}. " in drives.note


@pytest.mark.parametrize(("count", "average"), [(2, " on average"), (4, " on average"), (5, ""), (10, "")])
def test_drives_that_hosts_cannot_share_evenly_are_shared_on_average(count, average):
    """Two drives gave each of six hosts 4.61 TB, and a note says that a host without a drive has none."""
    plan = planned("llama-3.3-70b", f"disk={count}xpm1753", model__weights="fp8", traffic__users=500)
    hosts = min(it.need.deployment.hosts for it in plan.arms)
    assert verdict(plan).endswith(f"one host gets {digits(count / hosts * 15.36 * 0.9)} TB of local drives{average}.")


def test_engines_of_the_settings_get_all_host_memory_of_the_plan():
    """11 engines with 512 GiB each had 6.05 TB, and the page says that 6.43 TB are needed and 6.6 TB are there."""
    plan = planned(
        "llama-3.3-70b", "host=1TiB", model__weights="fp8", traffic__users=500, host__capacity_bytes=6 * 2**40
    )
    need, text = plan.chosen.need, settings_toml(plan)
    assert (need.gpus, need.deployment.replicas, need.deployment.hosts) == (44, 11, 6)
    assert "# the last host has 1 engine instead of 2; each of its engines gets\n# 2 times these bytes" in text
    each = int(re.search(r'capacity_bytes = "(\d+) GiB"', text)[1]) * 2**30
    assert 11 * each < need.enough_bytes["host"] < (10 + 2) * each == need.deployment.tiers[0].capacity_bytes


def test_write_budgets_of_all_ranks_are_what_the_drives_are_rated_for():
    """12 ranks with a sixteenth each had 92 TB a day, and "the drives then last 5 years" with 123 TB a day."""
    plan = planned("llama-3.3-70b", "disk=8xpm1753", model__weights="fp8", traffic__users=100, gpu__count=12)
    text = settings_toml(plan)
    assert "# the last host has 1 engine instead of 2; each of its engines gets\n# 2 times these bytes" in text
    budget = int(re.search(r"^(?:# )?write_bytes_per_day = (\d+) # of each of 12 ranks", text, re.MULTILINE)[1])
    assert (8 + 2 * 4) * budget == pytest.approx(8 * 15.36e12, rel=1e-5)


def test_settings_without_tiers_are_for_the_load_and_not_for_a_full_server():
    """ "No tier is worth it here" stood below "Worth buying for a full server: host memory"."""
    plan = planned("llama-3.1-8b", "host=64GB", gpu__name="l40s", gpu__count=1, traffic__users=20)
    assert verdict(plan).endswith("Worth buying for a full server: host memory.")
    why = "because tiers save none of the 4 GPUs that they need with a reserve."
    assert request(plan).endswith(f"No tier is worth buying for 20 users, {why}")
    assert "# no tier is worth buying for 20 users\n" in settings_toml(plan)


@pytest.mark.parametrize(
    ("model", "tiers", "changes", "reason"),
    [
        ("deepseek-v3.2", [], {"gpu__name": "h200-sxm"}, "kvtier's vLLM connector does not support sparse attention"),
        ("llama-3.3-70b", ["host=10GB"], {}, "GPU memory alone serves within 10% of the most users."),
        (
            "llama-3.1-8b",
            ["disk=1xpm1753"],
            {"gpu__name": "l40s", "gpu__count": 2, "disk__drive_writes_per_day": 0.05, "example": "prices"},
            "GPU memory alone costs within 10% of the least per user.",
        ),
    ],
)
def test_a_table_of_choices_without_a_mark_says_why(model, tiers, changes, reason):
    """The note said that 'this' marks the fewest tiers within a tenth of the most users, and no row had it."""
    plan = planned(model, *tiers, **changes)
    (found,) = (it for it in tables(plan) if it.title.startswith("Most users"))
    assert not [row for row in found.rows if "this" in row]
    assert f"No row is marked, because {reason}" in found.note
    assert "'This'" not in found.note


def test_a_choice_that_serves_as_many_as_another_is_not_told_again():
    """It was "1.96 queries/s with local drives. With host memory and local drives they serve 1.96"."""
    trace = TRACES / "mooncake_conversation_runs.jsonl.gz"
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__trace=str(trace))
    assert max(it.users for it in plan.choices) == plan.choices[-1].users >= plan.tiered.users
    assert "serve 1.96 queries/s with local drives (1.30x) and 1.51 with GPU memory alone. Worth" in verdict(plan)


@pytest.mark.parametrize(
    ("changes", "remedy", "helps"),
    [
        ({"gpu__count": 1}, "--weights fp4 with up to 8 GPUs", {"model__weights": "fp4", "gpu__count": 8}),
        (
            {"gpu__count": 16, "model__tp": 2},
            "--weights fp4 with a larger --tp",
            {"model__weights": "fp4", "model__tp": 8},
        ),
        ({"gpu__count": 8}, "--weights fp4", {"model__weights": "fp4"}),
    ],
)
def test_a_remedy_of_smaller_weights_names_the_gpus_that_they_need(changes, remedy, helps):
    """One H100 was told --weights fp4 for DeepSeek-V3, whose 377 GB it does not hold either."""
    with pytest.raises(ConfigError, match="for KV next to") as caught:
        planned("deepseek-v3", **changes)
    assert remedy in str(caught.value).partition("; use ")[2].split(", or ")
    assert planned("deepseek-v3", **(changes | helps)).choices


@pytest.mark.parametrize("model", ["falcon-h1-7b", "falcon-mamba-7b"])
def test_the_time_that_unused_states_stay_is_that_of_the_note(model):
    """The note subtracted nine pauses from all KV, which gave 987 s for the 1,080 s of Falcon-H1."""
    plan = planned(model, "host=100GB", gpu__name="h100-sxm", gpu__count=1, traffic__interval_cv=0.0)
    deployment = plan.given.deployment
    load, kv = deployment.workload, deployment.model
    new = load.requests_per_s * load.first_share
    tokens = (load.stored_tokens - load.prefix_tokens) * kv.token_bytes
    snapshots = 10 * kv.state_bytes
    one = tokens + snapshots
    earlier = (load.reusable_tokens - load.prefix_tokens) * kv.token_bytes  # it has grown since
    pauses_s = 20 * (9 * earlier + snapshots) / one
    room = deployment.tiers[0].capacity_bytes - load.prefix_tokens * kv.token_bytes
    found = operate(deployment, load.requests_per_s).residence_s["host"]
    assert found == pytest.approx(room / (new * one) - pauses_s, rel=0.005)
    note = " For the share of snapshots in it, subtract one pause only."
    assert note in needs_table(planned("falcon-h1-7b", gpu__count=1)).note


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({"traffic__users": 80}, "95 users with host memory (1.32x), 100 with local drives (1.40x) and 71 with"),
        ({"gpu__count": 1, "gpu__name": "l40s", "model__name": "llama-3.1-8b"}, "10 users with host memory (1.31x)"),
    ],
)
def test_a_ratio_that_whole_users_do_not_give_says_so(changes, served):
    """10 users instead of 7 were 1.30x, and 20 users of 10 were 1.97x."""
    name = changes.pop("model__name", "llama-3.3-70b")
    plan = planned(name, **({"model__weights": "fp8"} if "70b" in name else {}), **changes)
    assert served in verdict(plan)
    assert " with GPU memory alone. Ratios are of unrounded users. Worth buying" in verdict(plan)
    (limits,) = (it for it in tables(plan) if it.title.startswith("Limits of"))
    assert "Ratios are those of the unrounded figures." in limits.note


def test_a_reserve_never_falls_with_more_users():
    """95 users needed 16 GPUs with a reserve, in copies of TP 8, and 96 users needed 12, in copies of TP 4."""
    before: dict[tuple[str, ...], int] = {}
    for users in (30, 95, 96, 97, 100, 101):
        found = {
            it.tiers: it.reserve.gpus
            for it in planned("llama-3.3-70b", model__weights="fp8", traffic__users=users).arms
        }
        assert all(found[it] >= gpus for it, gpus in before.items())
        before = found


def test_a_tier_never_needs_more_gpus_with_a_reserve_than_none():
    """2 TiB of host memory needed 36 GPUs in copies of TP 4, and GPU memory alone 32 in copies of TP 8."""
    plan = planned("llama-3.3-70b", "host=2TiB", model__weights="fp8", traffic__users=200)
    (row,) = (it for it in needs_table(plan).rows if it[0] == "GPUs with a reserve (70% used)")
    assert row[1:] == ("32", "32 (TP 8)")
    assert plan.arms[1].need.deployment.inputs.model.tp == 4


@pytest.mark.parametrize(
    ("users", "said", "reserve"),
    [
        (30, "No tier is worth buying for 30 users, because 8 x h100-sxm have a reserve without one.", ("8", "8", "8")),
        (50, "No tier is worth buying for 50 users, because 8 x h100-sxm have a reserve without one.", ("8", "8", "8")),
        (60, "one of them. With a reserve they need 8 GPUs instead of 12.", ("12 (TP 4)", "8", "8")),
        (80, "one of them. With a reserve they need 12 GPUs instead of 16.", ("16", "12 (TP 4)", "12 (TP 4)")),
        (100, "because tiers save none of the 16 GPUs that they need with a reserve.", ("16", "16", "16")),
    ],
)
def test_the_line_to_buy_by_decides_what_is_worth_buying(users, said, reserve):
    """No tier was worth buying for 60 users, and the line to buy by was 12 GPUs without tiers and 8 with them."""
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__users=users)
    (row,) = (it for it in needs_table(plan).rows if it[0] == "GPUs with a reserve (70% used)")
    assert request(plan).endswith(said)
    assert row[1:] == reserve


def test_a_saving_that_a_reserve_does_not_have_is_not_worth_buying():
    """55 users need 4 GPUs instead of 8, and 8 with a reserve in each column."""
    plan = planned("qwen3-32b", gpu__count=4, traffic__users=55)
    (row,) = (it for it in needs_table(plan).rows if it[0] == "GPUs with a reserve (70% used)")
    assert request(plan).endswith("because tiers save none of the 8 GPUs that they need with a reserve.")
    assert {it.split()[0] for it in row[1:]} == {"8"}


def test_the_price_of_a_user_says_that_it_is_with_a_reserve():
    """A user cost 614 of "all hardware for 400 users", which was 3 GPUs in the line GPUs and 6 in the price."""
    changes = {"gpu__count": 2, "gpu__name": "h200-sxm", "traffic__users": 400, "traffic__interval_s": 30.0}
    changes |= {"traffic__history_tokens": 8000, "traffic__turns": 5, "target__gpu_used": 0.6, "price__years": 5}
    prices = {"price__gpu": 30_000, "price__server": 60_000, "price__drive": 1500, "price__host_memory_per_gb": 5}
    plan = planned("mistral-nemo-12b", **changes, **prices)
    (host,) = (it for it in plan.arms if it.tiers == ("host",))
    gpus = host.reserve.gpus
    assert gpus > host.need.gpus
    user = (gpus * 30_000 + 60_000 + 2**40 / 1e9 * 5) / 400
    assert f", {digits(user)} with host memory and " in verdict(plan)
    assert verdict(plan).endswith(" with GPU memory alone, with a reserve, in USD over 5 years without energy.")
    (found,) = (it for it in tables(plan) if it.title.startswith("Most users"))
    assert "is that of all hardware for 400 users with a reserve over 5 years, without energy." in found.note


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"traffic__users": 1, "traffic__turns": 1}, "8 x h100-sxm have a reserve without one."),
        (
            {"gpu__name": "mi300x", "gpu__count": 1, "traffic__users": 2134, "traffic__history_tokens": 60_000},
            "tiers save none of the 56 GPUs that they need with a reserve.",
        ),
    ],
)
def test_no_tier_has_a_reason_though_no_column_has_one(changes, why):
    """It was "No tier is worth buying" without a reason where GPU memory alone was the only column."""
    plan = planned("gpt-oss-20b" if "gpu__name" in changes else "llama-3.1-8b", **changes)
    assert len(plan.arms) == 1
    assert request(plan).endswith(f", because {why}")


@pytest.mark.parametrize(("energy", "said"), [(0.15, "with energy"), (0.0, "without energy")])
def test_a_price_with_energy_has_a_price_of_energy(energy, said):
    """Without price.energy_per_kwh both prices were 104,000, and the second was one "with energy"."""
    prices = {"gpu": 8000, "server": 12_000, "drive": 900} | ({"energy_per_kwh": energy} if energy else {})
    changes = {f"price__{name}": value for name, value in prices.items()}
    plan = planned("llama-3.1-8b", "disk=4xpm1753", gpu__name="l40s", gpu__count=4, traffic__users=30, **changes)
    found = needs_table(plan)
    rows = {row[0]: float(row[-1].replace(",", "")) for row in found.rows if "price" in row[0]}
    bill = plan.arms[-1].reserve.cost.watts / 1000 * 3 * 365.25 * 24 * energy
    whole, bare = (rows[f"with a reserve, {it}"] for it in (f"price {said} of 3 years", "price, USD"))
    assert whole - bare == pytest.approx(bill, abs=1)
    assert ("Energy needs price.energy_per_kwh." in found.note) == (not energy)
    assert f" over 3 years {said}." in verdict(plan)
    notes = " ".join(it.note for it in tables(plan))
    assert f"over 3 years, {said}." in notes
    assert "of energy" not in notes


@pytest.mark.parametrize(("ttft_s", "load"), [(0.3, "One user"), (0.001, "The smallest load")])
def test_the_load_that_exceeds_a_limit_is_above_where_it_is_met(ttft_s, load):
    """ "The smallest load exceeds a limit" stood over a load of 5 users that was 9.42 times that limit."""
    plan = planned("qwen3-8b", gpu__name="l40s", gpu__count=1, traffic__users=5, target__ttft_s=ttft_s)
    assert conclusion(plan)[0].startswith(f"{load} exceeds a limit: time to first token")
    assert (plan.binding.users > 0) == (load == "One user")


def test_fewest_gpus_are_not_passed_by_a_step_over_a_host():
    """1,140 users needed 20 GPUs with a reserve and 1,150 needed 18: a step went from 16 GPUs to 20."""
    found = [planned("gpt-oss-120b", gpu__count=3, traffic__users=it).arms[1] for it in (1140, 1150)]
    assert [(it.tiers, it.reserve.gpus, it.reserve.deployment.inputs.model.tp) for it in found] == [
        (("host",), 18, 2)
    ] * 2


def test_gpu_memory_that_a_tier_is_compared_with_is_what_tiers_store_of_it():
    """Host memory held "less than the 194.7 GB of GPU memory", and the GPU has 96 GB."""
    load = {"traffic__users": 12, "traffic__interval_s": 600.0, "traffic__history_tokens": 30_000}
    plan = planned("gemma-3-27b", "disk=1xpm1753", "host=128GiB", gpu__name="rtx-pro-6000", gpu__count=1, **load)
    (row,) = (it for it in needs_table(plan).rows if it[0] == "GPU memory, TB as tiers store it")
    deployment = plan.given.deployment
    assert row[-1] == "0.195"
    assert deployment.kv_bytes < deployment.inputs.gpu.memory_bytes < deployment.gpu_stored_bytes
    said = "host memory holds 137.4 GB, less than the 194.7 GB that GPU memory holds as tiers store it"
    assert said in " ".join(conclusion(plan))


@pytest.mark.parametrize(("tier", "has_drives"), [("s3=100TB", False), ("disk=4xpm1753", True)])
def test_prices_have_worn_drives_only_of_a_plan_with_drives(tier, has_drives):
    """Prices of a plan with shared storage alone had "the drives that replace worn ones"."""
    prices = {"price__gpu": 3000, "price__server": 8000, "price__shared_per_tb": 50, "price__drive": 900}
    plan = planned("llama-3.1-8b", tier, gpu__name="l40s", gpu__count=2, traffic__users=30, **prices)
    (choices,) = (it for it in tables(plan) if it.title.startswith("Most users"))
    for note in (choices.note, needs_table(plan).note):
        assert "no energy" in note or "Prices of tiers are for " in note
        assert ("drives that replace worn ones" in note) == has_drives


@pytest.mark.parametrize(("name", "has_windows"), [("gpt-oss-120b", True), ("llama-3.1-8b", False)])
def test_reads_are_those_of_the_tokens_that_are_found(name, has_windows):
    """1.7 million tokens a second were found on drives, which stored 94 GB of them, and 63 GB/s were read."""
    plan = planned(name, "disk=12xpm1753", traffic__users=2000, traffic__interval_s=60.0)
    deployment = plan.chosen.need.deployment
    load, found = deployment.workload, plan.chosen.need.point.found["disk"]
    note = re.search(r"layers with a window: ([\d.]+) kB a token found, of the ([\d.]+) kB", needs_table(plan).note)
    assert (note is not None) == has_windows
    each = float(note[1]) * 1e3 if note else deployment.model.token_bytes
    assert note is None or float(note[2]) == pytest.approx(deployment.model.token_bytes / 1e3, rel=0.01)
    read = found * load.input_tokens * load.requests_per_s * each
    assert plan.chosen.need.point.read_bytes_per_s["disk"] == pytest.approx(read, rel=0.01)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (
            "gpt-oss-120b",
            {"example": "prices", "gpu__count": 2, "traffic__users": 150, "traffic__history_tokens": 30_000}
            | {"traffic__interval_s": 90.0},
            "Worth buying for 150 users by price per user: host memory or local drives, one of them.",
        ),
        (
            "qwen3-next-80b-a3b",
            {"gpu__count": 4, "traffic__users": 400, "traffic__interval_s": 45.0, "traffic__turns": 20},
            "Worth buying for 400 users: local drives (they last 3.74 years) or host memory, one of them.",
        ),
    ],
)
def test_a_tier_that_passes_the_rule_for_the_load_is_named_though_a_full_server_gains_more_from_another(
    model, changes, said
):
    """Host memory cost 768 a user and drives 779, and only drives were worth buying: host memory had no column."""
    plan = planned(model, **changes)
    assert said in request(plan)
    assert [it.tiers for it in plan.ways] == [("disk",)]
    found = {it.tiers: (it.reserve.gpus, it.reserve.user_price) for it in plan.bought}
    for tier in ("host=1TiB", "disk=4xpm1753"):
        (single,) = planned(model, tier, **changes).bought
        assert found.pop(single.tiers) == (single.reserve.gpus, single.reserve.user_price)
    assert not found
    flags = {tuple(it["tiers"]): it["is_worth_buying_for_load"] for it in to_json(plan)["choices"]}
    assert flags == {(): False, ("host",): True, ("disk",): True, ("host", "disk"): False}


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (
            "deepseek-v3.2",
            {"gpu__name": "h200-sxm", "traffic__users": 100},
            "kvtier's vLLM connector does not support sparse attention such as sparse MLA yet",
        ),
        (
            "deepseek-r1",
            {"gpu__count": 16, "model__tp": 16, "traffic__users": 20},
            "kvtier refuses engines of several nodes",
        ),
        ("llama-3.3-70b", {"model__weights": "fp8", "traffic__users": 80}, None),
    ],
)
def test_what_the_page_forbids_is_not_recommended_to_programs(model, changes, why):
    """The page said "Buy no tier for this plan", and the JSON `is_worth_buying: true`."""
    plan = planned(model, traffic__interval_s=60.0 if why else 20.0, **changes)
    document = to_json(plan)
    assert document["refused"] == why
    assert ("Buy no tier for this plan: " in request(plan)) == (why is not None)
    for name in ("is_worth_buying", "is_worth_buying_for_load"):
        assert any(it[name] for it in document["choices"]) == (why is None)
    assert any(it["worth_it"] for it in document["tiers"] if it["name"] != "gpu") == (why is None)


def test_the_tb_that_are_enough_are_the_least_at_any_size_of_a_copy():
    """It was 0.265 TB for a copy with data-parallel attention, and 0.24 TB were enough for one of TP 4."""
    load = {"gpu__count": 4, "traffic__users": 400, "traffic__interval_s": 45.0, "traffic__turns": 20}
    need = planned("qwen3-next-80b-a3b", "disk=4xpm1753", **load).arms[1].need
    enough = need.enough_bytes["disk"]
    assert (need.gpus, need.deployment.inputs.model.dp_attention) == (4, True)

    def gpus(size):
        again = planned("qwen3-next-80b-a3b", "disk=4xpm1753", disk__capacity_bytes=int(size / 4), **load)
        return again.given.need.gpus

    assert gpus(enough) == 4 < gpus(0.985 * enough)


def test_of_several_tiers_all_that_are_needless_have_0_tb_that_are_enough():
    """Host memory needed 1.1 TB and drives none, and the same GPUs did without a tier."""
    changes = {"software__write_share": 0.5, "traffic__day_share": 0.4, "disk__wear": 1.5}
    plan = planned("llama-4-scout", traffic__users=60, traffic__interval_s=60.0, **changes)
    alone, both = (it.need for it in plan.arms)
    assert alone.gpus == both.gpus
    assert both.enough_bytes == {"host": 0.0, "disk": 0.0}
    assert "With several tiers the slowest is reduced first, " in needs_table(plan).note
    for users, needed in ((260, "host"), (280, "disk")):
        busy = planned("llama-4-scout", traffic__users=users, traffic__interval_s=60.0, **changes).given.need
        enough, host = busy.enough_bytes, busy.deployment.tiers[0]
        assert (0 < enough["host"] < host.capacity_bytes, enough["host"] == host.capacity_bytes) == (
            needed == "host",
            needed == "disk",
        )
        assert (enough["disk"] > 0) == (needed == "disk")


def test_without_returns_no_hits_of_conversations_are_counted():
    """With one query a conversation "98.3% of the reuses" came within 119 s, and 2.45 TB gave 99 % of the hits."""
    plan = planned("qwen3-32b", traffic__users=60, traffic__turns=1)
    assert verdict(plan).endswith(", because only the system prompt repeats, and GPU memory holds it.")
    assert request(plan).endswith("because tiers save none of the 48 GPUs that they need with a reserve.")
    assert not [it for it in tables(plan) if it.title.startswith("KV for a share of the possible hits")]
    document = to_json(plan)
    assert document["capacities"] == []
    prefix_bytes = plan.deployment.workload.prefix_tokens * plan.deployment.model.token_bytes
    assert [it["kv_bytes_for_hits"] for it in document["needs"]] == [pytest.approx(prefix_bytes)]
    held = planned("qwen3-32b", traffic__users=60, traffic__turns=1, software__gpu_reuse=False)
    assert "Beside GPU memory, host memory adds less than 10%, because only the system prompt repeats." in conclusion(
        held
    )
    assert "only the system prompt" not in " ".join(conclusion(planned("qwen3-32b", "host=64GB", traffic__turns=2)))


@pytest.mark.parametrize("reuses", [False, True])
def test_gpu_memory_that_keeps_nothing_has_no_figures_of_kept_kv(reuses):
    """GPU memory held 0.253 TB for 8,773 s, with copies of them in tiers, beside the 0.0986 TB that are enough."""
    tiers = ("s3=50TB", "disk=2x3.84TB?read=10GB/s&write=4GB/s")
    drive = {"disk__drive_writes_per_day": 1, "disk__watts": 12, "gpu__name": "rtx-pro-6000", "gpu__count": 1}
    load = {"traffic__users": 200, "traffic__interval_s": 120.0 if reuses else 40.0}
    plan = planned("gpt-oss-20b", *tiers, software__gpu_reuse=reuses, **load, **drive)
    found = {row[0]: row[1:] for row in needs_table(plan).rows}
    for name in ("GPU memory, TB as tiers store it", "GPU memory, s that unused KV stays"):
        assert ({*found[name]} == {"-"}) != reuses
    note = needs_table(plan).note
    assert ("with copies of what GPU memory holds" in note) == ("GPU memory is counted as" in note) == reuses
    (table,) = (it for it in tables(plan) if it.title.startswith("KV for a share"))
    assert ("between its queries, 569 MB in GPU memory" in table.note) == reuses
    assert (to_json(plan)["alone"]["point"]["residence_s"]["gpu"] > 0) == reuses


def test_a_load_of_a_trace_has_one_number_of_users(tmp_path):
    """5.53 queries a second of a trace were 110 users, and in one line 111."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{it * 10 // 26:02}.{it * 1000 // 26 % 100:02},1000,100" for it in range(80)]
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)) + "\n")
    prices = {"price__gpu": 30_000, "price__server": 60_000}
    changes = {"gpu__name": "l40s", "gpu__count": 2, "traffic__trace": str(path), "traffic__reuse": 0.6}
    plan = planned("llama-3.1-8b", "host=100GB", **changes, **prices, price__host_memory_per_gb=5)
    users = int(plan.requested_users)
    assert plan.requested_users % 1 > 0.5
    assert dict(circumstances(plan))["traffic"].endswith(f", as from {users} users")
    assert in_words(plan, plan.requested_users) == f"{users} users"
    reserve = plan.alone.reserve
    assert reserve.user_price * users == pytest.approx(reserve.cost.total)


@pytest.mark.parametrize(("users", "is_named"), [(98, True), (60, False)])
def test_limits_of_another_way_than_the_loads_name_their_tiers(users, is_named):
    """98 users fitted with local drives, and exceeded the time to first token, which host memory meets for 95."""
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__users=users)
    found = " ".join(conclusion(plan))
    assert ("Binding limit with host memory: " in found) == is_named
    assert ("With host memory, the requested load, 98 users, exceeds: " in found) == is_named
    assert is_named or "Binding limit: " in found


@pytest.mark.parametrize(("users", "is_bought"), [(40, False), (98, True)])
def test_drives_that_are_not_bought_for_a_load_have_no_budget_of_it(users, is_bought):
    """A file for a full server of 100 users capped them at the 73 that the budget of 40 users serves."""
    plan = planned("llama-3.3-70b", "disk=4xpm1753", model__weights="fp8", traffic__users=users)
    (drives,) = (it for it in tables(plan) if it.title.startswith("Drives "))
    assert bool(plan.bought) == is_bought
    assert ("If drives are bought all the same, " in drives.note) != is_bought
    assert is_bought or "\nwrite_bytes_per_day" not in settings_toml(plan)


@pytest.mark.parametrize("written", [0, 1, 50, 99, 100])
def test_the_command_of_the_mix_is_one_that_bench_io_takes(written):
    """`--mix 0/100` was printed, and refused."""
    plan = planned("llama-3.3-70b", "disk=4xpm1753", model__weights="fp8", traffic__users=98)
    writes = (plan.chosen.need or plan.chosen).point.write_bytes_per_s["disk"]
    drives = replace(plan.drives, read_bytes_per_s=writes * (100 - written) / (written or 1e-4))
    (table,) = (it for it in tables(replace(plan, drives=drives)) if it.title.startswith("Drives "))
    (command,) = (row[2] for row in table.rows if row[0] == "mix")
    assert command == ("kvtier bench io" if written in {0, 100} else f"kvtier bench io --mix {100 - written}/{written}")


@pytest.mark.parametrize(("users", "is_kept"), [(80, False), (95, True)])
def test_a_write_budget_that_spends_the_reserve_is_a_comment(users, is_kept):
    """Drives were bought so that 4 GPUs have a reserve for 80 users, and a budget in the settings took it away."""
    plan = planned("gemma-3-27b", gpu__count=2, traffic__users=users)
    need, drives = plan.chosen.need, plan.drives
    assert (drives.users * 0.7 >= users or need.users * 0.7 < users) == is_kept
    lines = [it for it in settings_toml(plan).splitlines() if "write_bytes_per_day" in it or "and serve" in it]
    assert lines[0].startswith("write_bytes_per_day = " if is_kept else "# write_bytes_per_day = ")
    reserve = "" if is_kept else ", without a reserve"
    assert lines[1].startswith(f"# and serve at most {int(drives.users)} users{reserve}; without it ")


@pytest.mark.parametrize("reuse", [0.1, 0.5, 0.9])
def test_what_nothing_reuses_fills_memory_as_fast_as_it_is_computed(reuse):
    """With --reuse 0.5, memory that new KV fills in 173 s kept unused KV for 817 s."""
    load = planned("llama-3.1-8b", gpu__name="l40s", gpu__count=4, traffic__reuse=reuse).deployment.workload
    new = load.input_tokens * (1 - load.reuse) + load.answer_tokens
    for residence_s in (1.0, 10.0, 100.0, 1e4):
        held = load.curve.tokens_held(residence_s, 2.0)
        assert held >= 2.0 * new * residence_s * 0.99
        assert held <= 2.0 * (load.input_tokens + load.answer_tokens) * residence_s * 1.01


def test_a_share_of_reuse_that_the_inputs_have_leaves_the_curve_as_it_is():
    """The curve for a given share counts reused tokens as the model of conversations does."""
    inputs = {"traffic__prefix_tokens": 0, "software__chunk_tokens": 16}
    found = planned("llama-3.1-8b", **inputs).deployment.workload
    again = planned("llama-3.1-8b", **inputs, traffic__reuse=found.reuse).deployment.workload
    for residence_s in (5.0, 20.0, 60.0, 1000.0):
        assert again.curve.tokens_held(residence_s, 1.0) == pytest.approx(
            found.curve.tokens_held(residence_s, 1.0), rel=0.05
        )


def test_limits_of_gpu_memory_are_named_as_it_is_written():
    """`str.capitalize` made "With gpu memory" of it."""
    plan = planned("llama-3.3-70b", model__weights="fp8", traffic__users=120)
    alone = replace(plan, ways=(plan.alone,))
    assert plan.chosen.tiers
    assert any(it.startswith("With GPU memory, the requested load, ") for it in conclusion(alone))


def test_the_heading_and_the_table_of_sizes_name_the_tiers():
    """They said "with tiers" for host memory alone, though drives were given and not worth buying."""
    plan = planned("llama-3.3-70b", model__weights="fp8")
    assert plan.tiered.tiers == ("host",)
    assert plan.given.tiers == ("host", "disk")
    (sizes,) = (it for it in tables(plan) if it.title == "Users by size")
    assert "with host memory" in sizes.columns
    assert "with tiers" not in f"{heading(plan)} {sizes.columns}"


def test_a_full_server_has_no_time_to_first_token():
    """JSON had 8e14 s where it means null: rounding left a full server 1e-15 of its time."""
    deployment = planned("llama-3.1-8b").given.deployment.only(())
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if operate(deployment, middle).gpu_used < 1 else (low, middle)
    assert operate(deployment, low).gpu_used == pytest.approx(1, abs=1e-9)
    assert math.isinf(operate(deployment, low).ttft_s)
    assert operate(deployment, 0.999 * low).ttft_s < 1000


def test_hosts_with_unequal_engines_wear_their_drives_unequally():
    """Five engines of TP 2 in two hosts: drives lasted "241 days", which was 151 in the one with four of them."""
    plan = planned("mistral-nemo-12b", gpu__count=2, traffic__users=150, traffic__reuse=0.6)
    deployment = plan.chosen.need.deployment
    assert (deployment.replicas, deployment.hosts, deployment.inputs.disk.count) == (5, 2, 8)
    full_host = plan.chosen.need.point.write_bytes_per_s["disk"] * 4 / 5 * 86_400
    days = 4 * 15.36e12 * 5 * 365.25 / full_host
    (worn,) = (it for it in conclusion(plan) if "the drives last" in it)
    assert f" days on average, and {days:.0f} days in a host with 4 of the 5 engines. " in worn
    assert "without the system prompt), less the pauses" not in needs_table(plan).note  # --reuse has no conversations
    even = planned("mistral-nemo-12b", gpu__count=2, traffic__users=120, traffic__reuse=0.6)
    assert "on average, and" not in " ".join(conclusion(even))


def test_a_write_budget_that_gains_little_says_what_gpu_memory_alone_serves():
    """It was offered as a way beside more drives, and served 346 users where the GPUs alone serve 332."""
    hardware = {"gpu__name": "b200-sxm", "gpu__count": 8, "model__weights": "fp8", "traffic__users": 700}
    load = {"traffic__interval_s": 120.0, "traffic__history_tokens": 30_000}
    plan = planned("glm-4.5", "host=2TB", "disk=8xpm1763", **hardware, **load)
    need = plan.chosen.need
    alone = most_users(need.deployment.only(()))
    assert alone < plan.drives.users < 1.1 * alone < need.users
    (drives,) = (it for it in tables(plan) if it.title.startswith("Drives "))
    assert drives.note.endswith(
        f"a budget for at most {int(plan.drives.users)} users, against {int(alone)} without drives."
    )


def test_drives_that_are_the_second_alternative_have_their_table():
    """The headline offered host memory or drives that last 3 years, and no line had the drives that last 5."""
    plan = planned(
        "gpt-oss-120b", "host=2TB", "disk=4xpm1753", gpu__count=2, traffic__users=400, traffic__interval_s=60.0
    )
    assert plan.chosen.tiers == ("host",)
    assert "disk" in {name for it in plan.bought for name in it.tiers}
    (found,) = (it for it in tables(plan) if it.title.startswith("Drives with local drives, at 400 users"))
    assert {row[0] for row in found.rows} >= {"mix", "life", "queue depth"}
    assert "Buy " in found.note or "buy " in found.note
    assert to_json(plan)["drives"]["life_years"] == plan.with_drives.chosen.need.life_years
    assert 'kind = "disk"' not in settings_toml(plan)
