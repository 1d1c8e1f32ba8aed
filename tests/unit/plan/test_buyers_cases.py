"""Ten buyers' cases: a command line, and its figures by plain arithmetic that shares no code with the plan.

Bytes, rates, lives and prices are compared; step times are not, since they depend on what an engine reaches. Where a
figure follows from the hits at the load, the case makes them certain: GPU memory reuses nothing, or pauses are equal.
"""

import json
import math

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
    monkeypatch.setattr("kvtier.plan.plan.sensitivities", lambda *_: [])

    def planned(line, *more):
        assert run(["plan", *line.split(), *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return planned


def need(document, *tiers):
    return next(it for it in document["needs"] if it["tiers"] == list(tiers))


def conversation(history=20_000, question=100, output=100, turns=10, system=0):
    """Mean tokens of a query: prompt, and what an earlier query left in whole chunks of 256."""
    prompts = [system + history + question + turn * (question + output) for turn in range(turns)]
    stored = [(it + output) // 256 * 256 for it in prompts[:-1]]
    return sum(prompts) / turns, sum(stored) / turns


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
    prompt, stored = conversation()
    assert (plan["bytes_per_token_stored"], found["gpus"], found["hosts"]) == (token, 8, 1)
    assert found["gpu_kv_bytes"] == pytest.approx(gpu_bytes(8, 80 * 2**30, 8e9 * 2, 8), rel=EXACT)
    assert found["tier_bytes"] == {"host": 2**40}
    assert found["read_bytes_per_s"]["host"] == pytest.approx(4 * stored * token, rel=EXACT)
    assert found["read_burst_bytes_per_s"]["host"] == pytest.approx(2 * 4 * stored * token, rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(4 * (prompt - stored + 100) * token, rel=EXACT)
    assert found["hit_rate"] == pytest.approx(stored / prompt, rel=EXACT)
    assert found["output_tokens_per_s"] == 400


def test_2_a_large_model_above_what_fits(answer):
    """500 users of a 70B need more hosts, and each brings its four drives; all figures are at 25 queries/s."""
    plan = answer("llama-3.3-70b --users 500 --ttft 4s --set host.capacity_bytes=0", *CERTAIN)
    found, alone = need(plan, "disk"), need(plan)
    token = 80 * 2 * 8 * 128 * 2
    prompt, stored = conversation()
    assert plan["is_overloaded"]
    assert found["users"] == alone["users"] == 500 <= found["users_at_most"]
    assert found["hosts"] == math.ceil(found["gpus"] / 8) > 1
    assert found["gpus"] < alone["gpus"]
    assert found["drives"] == 4 * found["hosts"]
    assert found["tier_bytes"]["disk"] == pytest.approx(found["drives"] * PM1753 * 0.9, rel=EXACT)
    written = 25 * (prompt - stored + 100) * token
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
    prompt, stored = conversation()
    written = 0.5 * (prompt - stored + 100) * token
    years = drive_years(3, written)
    worn = 3 * 2000 * max(4 / years - 1, 0)
    tiers = {(): 0, ("host",): 3_000, ("disk",): 6_000 + worn, ("host", "disk"): 9_000 + worn}
    assert plan["bytes_per_token_stored"] == token
    assert [it["tiers"] for it in plan["needs"]] == [[], ["host"], ["disk"]]
    for found in plan["needs"]:
        assert (found["hosts"], found["users"]) == (1, 10)
        by_hand = found["gpus"] * 30_000 + 40_000 + tiers[tuple(found["tiers"])]
        assert found["price"] == pytest.approx(by_hand, rel=EXACT)
    # The price of a choice is that of its tiers, at the most users that they serve.
    bought = {tuple(it["tiers"]): it["price"] for it in plan["choices"]}
    most = next(it for it in plan["choices"] if it["tiers"] == ["disk"])
    assert (bought[()], bought["host",]) == (0, 3000)
    assert bought["disk",] == pytest.approx(6000 * max(4 / most["drive_life_years"], 1), rel=EXACT)


def test_4_one_latent_on_eight_ranks_is_stored_eight_times(answer):
    """DeepSeek-R1 keeps 61 x (512 + 64) numbers a token; each of 8 ranks stores them, or all share one copy."""
    line = "deepseek-r1 --gpu 8xh200-sxm --weights fp8 --tp 8 --users 20 --interval 60s --tier disk=4xpm1753"
    each, shared = answer(line, *CERTAIN), answer(line, *CERTAIN, "--set", "software.copies=1")
    prompt, stored = conversation()
    for plan, copies in ((each, 8), (shared, 1)):
        token, found = copies * 61 * (512 + 64) * 2, need(plan, "disk")
        written = 20 / 60 * (prompt - stored + 100) * token
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
    prompt, stored = conversation()
    later = 9 / 10
    assert found["read_bytes_per_s"]["host"] == pytest.approx(1.5 * half * (stored + later * 128), rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(1.5 * 1.5 * half * (prompt - stored + 100), rel=EXACT)


def test_6_a_hybrid_stores_a_snapshot_with_each_query(answer):
    """Qwen3-Next: 12 of 48 layers attend; the states of the other 36 are written with a query and read with a hit."""
    line = "qwen3-next-80b-a3b --weights fp8 --gpu 4xh100-sxm --tp 2 --users 40 --tier host=1TB"
    found = need(answer(line, *CERTAIN), "host")
    token = 12 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    prompt, stored = conversation()
    assert found["read_bytes_per_s"]["host"] == pytest.approx(2 * (stored * token + 0.9 * state), rel=EXACT)
    assert found["write_bytes_per_s"]["host"] == pytest.approx(2 * ((prompt - stored + 100) * token + state), rel=EXACT)


def test_7_the_room_for_a_share_of_the_hits(answer):
    """Conversations of 40,000 tokens, equal pauses of 5 minutes: each user's stay for one pause, ended ones too."""
    line = "llama-3.1-8b --users 600 --interval 300s --history 40000 --turns 20 --system 0 --tier disk=10xpm1753"
    plan = answer(line, "--set", "traffic.interval_cv=0")
    prompts = [40_100 + turn * 200 for turn in range(20)]
    held = 600 * (sum(prompts[1:]) / 19 + 100)
    assert [it["tiers"] for it in plan["needs"]] == [[], ["disk"]]
    for found in plan["needs"]:
        assert found["kv_bytes_for_hits"] == pytest.approx(held * 131_072, rel=STAYS)


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
    assert found["write_bytes_per_s"]["host"] == pytest.approx(rate * (512 * (9 - 4) + 50) * token, rel=EXACT)
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
        written = 5 * (22_000 * (1 - found["hit_rate"]) + 100) * 131_072  # what is not found is new
        assert list(found["write_bytes_per_s"].values()) == [pytest.approx(written, rel=EXACT)] * len(found["tiers"])
        hosts = "one host" if found["gpus"] <= 8 else f"{math.ceil(found['gpus'] / 8)} hosts"
        assert f" {found['gpus']} GPUs in {hosts}" in plan["request"]


def test_10_drives_for_the_wanted_life(answer):
    """Half of the load on average over a day doubles the life; seven years need drives in proportion."""
    line = "llama-3.3-70b --users 60 --tier disk=4xpm1753 --set target.life_years=7"
    full, half = answer(line, *CERTAIN), answer(line, *CERTAIN, "--set", "traffic.day_share=0.5")
    prompt, stored = conversation()
    written = 3 * (prompt - stored + 100) * 327_680
    years = drive_years(4, written)
    for plan, times in ((full, 1), (half, 2)):
        assert need(plan, "disk")["drive_life_years"] == pytest.approx(times * years, rel=EXACT)
        assert plan["drives"]["drives_for_life"] == math.ceil(4 * 7 / (times * years))
        assert plan["drives"]["writes_per_day"] == pytest.approx(written / times * DAY_S / (4 * PM1753), rel=EXACT)
        assert any("7 years need" in it for it in plan["conclusion"])
