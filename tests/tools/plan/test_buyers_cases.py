"""Buyers' cases: a command line, and its figures by plain arithmetic that shares no code with the plan.

Bytes, rates, lives and prices are compared; step times are not, since they depend on what an engine reaches. Where a
figure follows from the hits at the load, the case makes them certain: GPU memory reuses nothing, or pauses are equal.
"""

import json
import math
import re

import pytest

from kvtier.cli.main import run

EXACT = 1e-9
"""Sums and products of the same numbers: only the order of the operations differs."""
STAYS = 1e-3
"""A table of 600 steps over 7 decades gives the residence time that a share of hits needs."""
DAY_S, YEAR_S = 86_400, 365.25 * 86_400
PM1753 = 15.36e12
"""Bytes of one drive, rated for one drive write a day in five years."""
CERTAIN = ("--system", "0", "--set", "software.gpu_reuse=false", "--set", "traffic.interval_cv=0")
"""All KV comes from the tiers, and later queries find all of it or nothing."""


@pytest.fixture
def answer(capsys, monkeypatch):
    """The JSON of a command line, without sensitivities, which take most of the time."""
    monkeypatch.setattr("kvtier.tools.plan.plan.sensitivities", lambda *_: [])

    def planned(line, *more):
        assert run(["plan", *line.split(), *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return planned


def need(document, *tiers):
    return next(it for it in document["needs"] if it["tiers"] == list(tiers))


def conversation(history=20_000, question=100, output=100, turns=10, system=0):
    """Mean tokens of a query in whole chunks of 256: those that an earlier one left, and those that it adds."""
    prompts = [system + history + question + turn * (question + output) for turn in range(turns)]
    stored = [(it + output) // 256 * 256 for it in prompts[:-1]]
    return sum(stored) / turns, (prompts[-1] + output) // 256 * 256 / turns


def gpu_bytes(count, memory, weights, copies):
    """GPU memory for KV: 92 % of it without 3.5 GiB a GPU, and without the weights of each copy."""
    return count * (memory * 0.92 - 3.5 * 2**30) - copies * weights


def drive_years(drives, written_per_s):
    return drives * PM1753 * 5 * 365.25 / (written_per_s * DAY_S * 365.25)


def test_1_a_small_model_with_host_memory(answer):
    """80 users of an 8B fit: 4 queries/s, each with 131,072 bytes a token."""
    plan = answer("llama-3.1-8b --users 80 --tier host=1TiB --tp 1", *CERTAIN)
    found = need(plan, "host")
    token = 32 * 2 * 8 * 128 * 2
    stored, new = conversation()
    assert (plan["bytes_per_token_stored"], found["gpus"], found["hosts"]) == (token, 8, 1)
    assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(8, 80 * 2**30, 8e9 * 2, 8), rel=EXACT)
    assert found["tier_bytes"] == {"host": 2**40}
    assert found["read_bytes_per_s"]["host"] == pytest.approx(4 * stored * token, rel=EXACT)
    assert found["read_burst_bytes_per_s"]["host"] == pytest.approx(2 * 4 * stored * token, rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(4 * new * token, rel=EXACT)
    assert found["hit_rate"] == pytest.approx(stored / 21_000, rel=EXACT)
    assert found["output_tokens_per_s"] == 400


def test_2_a_large_model_above_what_fits(answer):
    """500 users of a 70B need more hosts, and each brings its four drives; all figures are at 25 queries/s."""
    plan = answer("llama-3.3-70b --users 500 --ttft 4s --set host.capacity_bytes=0", *CERTAIN)
    found, alone = need(plan, "disk"), need(plan)
    token = 80 * 2 * 8 * 128 * 2
    stored, new = conversation()
    assert plan["is_overloaded"]
    assert found["users"] == alone["users"] == 500 <= found["users_at_most"]
    assert found["hosts"] == math.ceil(found["gpus"] / 8) > 1
    assert found["gpus"] < alone["gpus"]
    assert found["drives"] == 4 * found["hosts"]
    assert found["tier_bytes"]["disk"] == pytest.approx(found["drives"] * PM1753 * 0.9, rel=EXACT)
    written = 25 * new * token
    assert found["read_bytes_per_s"]["disk"] == pytest.approx(25 * stored * token, rel=EXACT)
    assert found["write_bytes_per_s"]["disk"] == pytest.approx(written, rel=EXACT)
    assert found["drive_life_years"] == pytest.approx(drive_years(found["drives"], written), rel=EXACT)
    copies = found["gpus"] // found["tp"]
    assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(found["gpus"], 80 * 2**30, 140e9, copies), rel=EXACT)
    # Idle GPUs take 15 % of 700 W, and a host takes 1,500 W besides them.
    fixed = 1500 * found["gpus"] / 8 + found["drives"] * 21.34
    assert fixed + 0.15 * 700 * found["gpus"] <= found["watts"] <= fixed + 700 * found["gpus"]


def test_3_what_two_gpus_and_their_tiers_cost(answer):
    """Ten users of a 32B on two H200: the sum of two GPUs, a server, host memory by the GB and drives that wear."""
    prices = "price.gpu=30000 price.server=40000 price.host_memory_per_gb=6 price.drive=2000 price.years=4"
    sets = [part for it in prices.split() for part in ("--set", it)]
    line = "qwen3-32b --gpu 2xh200-sxm --tp 2 --users 10 --ttft 5s --tier disk=3xpm1753 --tier host=500GB"
    plan = answer(line, *CERTAIN, *sets)
    token = 64 * 2 * 8 * 128 * 2
    _, new = conversation()
    written = 0.5 * new * token
    years = drive_years(3, written)
    worn = 3 * 2000 * max(4 / years - 1, 0)
    tiers = {(): 0, ("host",): 3_000, ("disk",): 6_000 + worn, ("host", "disk"): 9_000 + worn}
    assert plan["bytes_per_token_stored"] == token
    # Drives serve as many users, and wear makes each user of a full server over a tenth dearer, but not each of ten.
    drives = answer(line.removesuffix(" --tier host=500GB"), *CERTAIN, *sets)
    assert [it["tiers"] for it in (*plan["needs"], *drives["needs"])] == [[], ["host"], ["disk"], [], ["disk"]]
    for found in (*plan["needs"], *drives["needs"]):
        assert (found["hosts"], found["users"]) == (1, 10)
        by_hand = found["gpus"] * 30_000 + 40_000 + tiers[tuple(found["tiers"])]
        assert found["price"] == pytest.approx(by_hand, rel=EXACT)
    # The price of a choice is that of its tiers, at the most users that they serve.
    bought = {tuple(it["tiers"]): it["price"] for it in plan["choices"]}
    most = next(it for it in plan["choices"] if it["tiers"] == ["disk"])
    assert (bought[()], bought["host",]) == (0, 3000)
    assert bought["disk",] == pytest.approx(6000 * max(4 / most["drive_life_years"], 1), rel=EXACT)


def test_4_one_latent_on_eight_ranks_is_stored_eight_times(answer):
    """DeepSeek-R1 keeps 61 x (512 + 64) numbers a token; all 8 ranks share one copy in a tier, or each stores them."""
    line = "deepseek-r1 --gpu 8xh200-sxm --weights fp8 --tp 8 --users 20 --interval 60s --tier disk=4xpm1753"
    each, shared = answer(line, *CERTAIN, "--set", "software.copies=0"), answer(line, *CERTAIN)
    stored, new = conversation()
    for plan, copies in ((each, 8), (shared, 1)):
        token, found = copies * 61 * (512 + 64) * 2, need(plan, "disk")
        written = 20 / 60 * new * token
        assert plan["bytes_per_token_stored"] == token
        assert found["read_bytes_per_s"]["disk"] == pytest.approx(20 / 60 * stored * token, rel=EXACT)
        assert found["write_bytes_per_s"]["disk"] == pytest.approx(written, rel=EXACT)
        assert found["drive_life_years"] == pytest.approx(drive_years(4, written), rel=EXACT)
        assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(8, 151_397_597_184, 671e9, 1), rel=EXACT)


def test_5_windows_are_stored_in_every_chunk_and_loaded_once(answer):
    """GPT-OSS: of 18 of 36 layers a load needs the last 128 tokens, a store keeps 128 of every 256."""
    line = "gpt-oss-120b --weights fp4 --gpu 2xh100-sxm --tp 2 --users 30 --tier host=2TB"
    found = need(answer(line, *CERTAIN), "host")
    half = 18 * 2 * 8 * 64 * 2
    stored, new = conversation()
    later = 9 / 10
    assert found["read_bytes_per_s"]["host"] == pytest.approx(1.5 * half * (stored + later * 128), rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(1.5 * 1.5 * half * new, rel=EXACT)


def test_6_a_hybrid_stores_a_snapshot_with_each_query(answer):
    """Qwen3-Next: 12 of 48 layers attend; the states of the other 36 are written with a query and read with a hit."""
    line = "qwen3-next-80b-a3b --weights fp8 --gpu 4xh100-sxm --tp 2 --users 40 --tier host=1TB"
    found = need(answer(line, *CERTAIN), "host")
    token = 12 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    stored, new = conversation()
    assert found["read_bytes_per_s"]["host"] == pytest.approx(2 * (stored * token + 0.9 * state), rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(2 * (new * token + state), rel=EXACT)


def test_7_the_room_for_a_share_of_the_hits(answer):
    """Conversations of 40,000 tokens, equal pauses of 5 minutes: each user's stay for one pause, ended ones too."""
    line = "llama-3.1-8b --users 600 --interval 300s --history 40000 --turns 20 --system 0 --tier disk=10xpm1753"
    plan = answer(line, "--set", "traffic.interval_cv=0")
    prompts = [40_100 + turn * 200 for turn in range(20)]
    left, whole = (sum((it + 100) // chunk * chunk for it in prompts) / 20 for chunk in (1, 256))
    assert [it["tiers"] for it in plan["needs"]] == [[], ["disk"]]
    for found, held in zip(plan["needs"], (left, whole), strict=True):  # tiers store whole chunks
        assert found["kv_bytes_for_hits"] == pytest.approx(600 * held * 131_072, rel=STAYS)


def test_8_a_trace_gives_rate_and_reuse(answer, tmp_path):
    """100 conversations of two queries, one begun each second: the second query, 60 s later, reads 8 blocks."""
    requests = [
        {"timestamp": 1000.0 * (second + 60 * turn), "input_length": 512 * (8 + 2 * turn), "output_length": 50,
         "hash_ids": [second * 100 + block for block in range(8 + 2 * turn)]}
        for second in range(100) for turn in range(2)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(it) + "\n" for it in sorted(requests, key=lambda it: it["timestamp"])))
    line = f"llama-3.1-8b --gpu 1xh100-sxm --trace {path} --tier host=1TB --set software.gpu_reuse=false"
    plan = answer(line)
    rate = 200 / 159  # 200 queries from 0 to 159 s
    found, token = need(plan, "host"), 131_072
    assert plan["traffic"]["requests_per_s"] == pytest.approx(rate, rel=EXACT)
    assert plan["traffic"]["input_tokens"] == 512 * 9
    assert plan["traffic"]["reusable_share"] == pytest.approx(8 / 18, rel=EXACT)
    assert found["read_bytes_per_s"]["host"] == pytest.approx(rate / 2 * 8 * 512 * token, rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(rate * (512 * (9 - 4) + 50 - 127.5) * token, rel=EXACT)
    assert f"queries/s fit on {found['gpus']} x h100-sxm" in plan["request"]


def test_9_gpus_that_are_too_slow_for_one_user(answer):
    """One L4 serves nobody in a second: the GPUs that 100 users need hold the weights, and no tier is praised."""
    plan = answer("llama-3.1-8b --gpu l4 --users 100")
    assert plan["is_overloaded"]
    assert [it["is_worth_buying"] for it in plan["choices"][1:]] == [False] * 3
    assert "orth buying" not in plan["verdict"]
    assert [it["tiers"] for it in plan["needs"]] == [[], ["host"], ["disk"]]
    for found in plan["needs"]:
        copies = found["gpus"] // found["tp"]
        assert found["users"] == 100 <= found["users_at_most"]
        assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(found["gpus"], 24 * 2**30, 16e9, copies), rel=EXACT)
        partial = sum((22_100 - 900 + 200 * turn) % 256 for turn in range(10)) / 10
        written = 5 * (22_000 * (1 - found["hit_rate"]) + 100 - partial) * 131_072  # what is not found is new
        assert list(found["write_bytes_per_s"].values()) == [pytest.approx(written, rel=EXACT)] * len(found["tiers"])
        hosts = "one host" if found["gpus"] <= 8 else f"{math.ceil(found['gpus'] / 8)} hosts"
        assert f" {found['gpus']} GPUs in {hosts}" in plan["request"]


def test_10_drives_for_the_wanted_life(answer):
    """Half of the load on average over a day doubles the life; seven years need drives in proportion."""
    line = "llama-3.3-70b --users 60 --tier disk=4xpm1753 --set target.life_years=7"
    full, half = answer(line, *CERTAIN), answer(line, *CERTAIN, "--set", "traffic.day_share=0.5")
    _, new = conversation()
    written = 3 * new * 327_680
    years = drive_years(4, written)
    for plan, times in ((full, 1), (half, 2)):
        assert need(plan, "disk")["drive_life_years"] == pytest.approx(times * years, rel=EXACT)
        assert plan["drives"]["drives_for_life"] == math.ceil(4 * 7 / (times * years))
        assert plan["drives"]["writes_per_day"] == pytest.approx(written / times * DAY_S / (4 * PM1753), rel=EXACT)
        assert any("7 years need" in it for it in plan["conclusion"])


def test_11_windows_longer_than_a_chunk_are_stored_in_full_and_loaded_in_part(answer):
    """Gemma 3 on one L4: 8 of 48 layers attend to all tokens; of 40, a load needs the last 1,024 tokens."""
    line = "gemma-3-12b --gpu l4 --weights fp8 --users 4 --interval 60s --ttft 20s"
    plan = answer(f"{line} --tier disk=1x3.84TB?read=6GB/s&write=3GB/s", *CERTAIN)
    found, layer = need(plan, "disk"), 2 * 8 * 256 * 2
    stored, new = conversation()
    written = 4 / 60 * new * 48 * layer
    assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(1, 24 * 2**30, 12e9, 1), rel=EXACT)
    read = 4 / 60 * (stored * 8 + 0.9 * 1024 * 40) * layer
    assert found["read_bytes_per_s"]["disk"] == pytest.approx(read, rel=EXACT)
    assert found["write_bytes_per_s"]["disk"] == pytest.approx(written, rel=EXACT)
    assert found["drive_life_years"] == pytest.approx(drive_years(3.84 / 15.36, written), rel=EXACT)


EUROS = "price.gpu=28000 price.server=45000 price.drive=2200 price.shared_per_tb=120 price.years=5"


def test_12_latents_and_states_of_several_hosts_on_one_total_of_drives(answer):
    """Kimi K3: 24 of 93 layers keep one latent for 8 ranks; each later query reads and each query writes 69 states."""
    line = "kimi-k3 --gpu 16xgb300 --weights fp4 --users 1500 --interval 300s --history 30000 --turns 20"
    sets = [part for it in EUROS.split() for part in ("--set", it)]
    more = "--question 1000 --answer 500 --ttft 4s --tier disk=200TB?read=400GB/s&write=200GB/s"
    found = need(answer(f"{line} {more}", *CERTAIN, *sets), "disk")
    token, state = 24 * (512 + 64) * 2, 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    stored, new = conversation(30_000, 1000, 500, 20)
    written = 5 * (new * token + state)
    years = drive_years(200 / 15.36, written)
    assert found["hosts"] == math.ceil(found["gpus"] / 8)
    assert (found["drives"], found["tier_bytes"]["disk"]) == (1, pytest.approx(180e12, rel=EXACT))
    assert found["read_bytes_per_s"]["disk"] == pytest.approx(5 * (stored * token + 0.95 * state), rel=EXACT)
    assert found["write_bytes_per_s"]["disk"] == pytest.approx(written, rel=EXACT)
    assert found["drive_life_years"] == pytest.approx(years, rel=EXACT)
    price = found["gpus"] * 28_000 + found["hosts"] * 45_000 + 2200 * max(5 / years, 1)
    assert found["price"] == pytest.approx(price, rel=EXACT)


def test_13_a_store_that_many_hosts_share_costs_its_total(answer):
    """20,000 users of a 405B: the store's terabytes are bought once, and no host of the many brings its own."""
    line = "llama-3.1-405b --gpu 32xmi300x --weights fp8 --users 20000 --interval 600s --history 12000 --turns 8"
    sets = [part for it in EUROS.split() for part in ("--set", it)]
    more = "--question 300 --answer 400 --ttft 5s --tier shared_directory=2000TB?read=900GB/s&write=200GB/s"
    found, token = need(answer(f"{line} {more}", *CERTAIN, *sets), "shared"), 126 * 2 * 8 * 128 * 2
    stored, new = conversation(12_000, 300, 400, 8)
    assert found["tier_bytes"] == {"shared": 2000e12}
    assert found["hosts"] == found["gpus"] / 8 > 4
    assert found["read_bytes_per_s"]["shared"] == pytest.approx(20_000 / 600 * stored * token, rel=EXACT)
    written = 20_000 / 600 * new * token
    assert found["write_bytes_per_s"]["shared"] == pytest.approx(written, rel=EXACT)
    assert found["price"] == pytest.approx(found["gpus"] * 28_000 + found["hosts"] * 45_000 + 2000 * 120, rel=EXACT)
    fixed, gpus = 1500 * found["hosts"], 750 * found["gpus"]
    assert fixed + 0.15 * gpus <= found["watts"] <= fixed + gpus


PRICES = "price.gpu=30000 price.server=40000 price.drive=2000 price.energy_per_kwh=0.2 price.years=3"
"""All prices but that of host memory."""


@pytest.mark.parametrize(("memory", "buys"), [(6, True), (20, True), (150, False)])
def test_with_prices_the_verdict_is_by_the_price_of_a_user(answer, memory, buys):
    """Host memory serves 1.23 times the users; at 1.13 times the price of a user it was still named as worth buying."""
    sets = [part for it in f"{PRICES} price.host_memory_per_gb={memory}".split() for part in ("--set", it)]
    plan = answer("llama-3.3-70b --users 50 --tier host=1TiB", *sets)
    alone, host = plan["choices"]
    each = {}
    for it, arm in ((alone, plan["alone"]), (host, plan["tiered"] if buys else None)):
        bought = 8 * 30_000 + 40_000 + (2**40 / 1e9 * memory if it["tiers"] else 0)
        watts = arm["cost_at_most"]["watts"] if arm else 7_100  # busy GPUs, and 1,500 W besides
        each[tuple(it["tiers"])] = (bought + watts / 1000 * 0.2 * 3 * 365.25 * 24) / math.floor(it["users"])
        assert it["user_price"] == pytest.approx(each[tuple(it["tiers"])], rel=EXACT if arm else 0.02)
    assert host["users"] > 1.1 * alone["users"]
    assert (each["host",] < each[()] / 1.1) == buys
    assert host["is_worth_buying"] == buys
    start = "Worth buying for a full server by price per user: host memory for "
    start = start if buys else "No tier is worth buying for a full server by price per user,"
    assert start in plan["verdict"]
    if not buys:
        assert (
            f"a user then costs {host['user_price']:,.0f} USD instead of {alone['user_price']:,.0f}" in plan["verdict"]
        )
        assert any("host memory is not worth the price, because a user then costs" in it for it in plan["conclusion"])
        assert "capacity_bytes" not in plan["settings"]


def test_without_a_price_the_verdict_is_by_users_and_no_column_has_prices(capsys):
    """It had the columns price and for each more, with a zero for GPU memory alone."""
    assert run(["plan", "llama-3.3-70b"]) == 0
    text = capsys.readouterr().out
    (heads,) = (line for line in text.splitlines() if line.startswith("tiers  "))
    assert heads.split() == ["tiers", "users", "drives,", "years", "if", "full"]
    assert "Worth buying for a full server: host memory" in text.replace("\n", " ")
    assert "with your prices" not in text


def test_settings_take_the_tiers_that_need_the_fewest_gpus(answer):
    """5,000 users: 512 GiB of host memory in all are less than the GPU memory of 74 GPUs; 8 drives and 52 GPUs do."""
    line = "gpt-oss-120b --gpu 2xh100-nvl --users 5000 --tier host=512GiB --tier disk=8xpm1763 --tier s3=1000TB"
    plan = answer(line)
    assert plan["choices"][1]["is_worth_buying"]  # the verdict of 2 GPUs is host memory, or one of the others
    gpus = {tuple(it["tiers"]): it["gpus"] for it in plan["needs"]}
    assert gpus["host",] > gpus["disk",] == min(gpus.values())
    assert f"# for 5,000 users on {gpus['disk',]} x h100-nvl" in plan["settings"]
    assert 'kind = "disk"' in plan["settings"]
    assert "[host]" not in plan["settings"]


def test_a_reserve_is_in_whole_copies_and_names_their_size(answer, capsys):
    """80 users need TP 8 and, at 70 % use, 12 GPUs stood below without a word: three copies of TP 4."""
    plan = answer("llama-3.3-70b --weights fp8")
    assert [it["tp"] for it in plan["needs"]] == [4, 8, 8]
    assert [(plan[it]["gpus_needed"], plan[it]["tp_needed"]) for it in ("tiered", "alone")] == [(12, 4), (16, 4)]
    assert run(["plan", "llama-3.3-70b", "--weights", "fp8"]) == 0
    assert re.search(r"GPUs with a reserve \(70% used\) +16 +12 \(TP 4\) +12 \(TP 4\)\n", capsys.readouterr().out)


def test_gains_divide_the_users_and_not_their_whole_numbers(answer):
    plan = answer("qwen3-32b --gpu 2xh200-sxm --tp 2 --users 10 --ttft 5s --tier host=500GB", *CERTAIN)
    alone, host = (it["users"] for it in plan["choices"])
    assert f"({host / alone:.2f}x)" in plan["verdict"]
    assert f"({host // 1 / (alone // 1):.2f}x)" not in plan["verdict"]


def test_other_gpus_are_planned_at_their_own_size(capsys):
    """Two GPUs serve most users at TP 2, four at TP 4; a change of the number kept TP 2."""

    def planned(count):
        assert run(["plan", "llama-3.1-8b", "--gpu", f"{count}xh100-sxm", "--users", "4", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    two, four = planned(2), planned(4)
    gpus = next(it for it in two["sensitivity"] if it["name"] == "gpu.count")
    assert (two["tp_with_tiers"], four["tp_with_tiers"], gpus["higher"]) == (2, 4, 4)
    assert gpus["users_higher"] == pytest.approx(four["users_with_tiers"], rel=1e-6)
