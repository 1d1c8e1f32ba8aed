"""What a plan counts besides the plain case: states, windows, formats, copies, long prompts, slow streams."""

import json
from dataclasses import replace

import pytest
from tests.tools.plan.plans import deployed, planned

from kvtier.errors import ConfigError
from kvtier.report.format import bytes_text
from kvtier.tools import size
from kvtier.tools.plan.max_load import ceiling
from kvtier.tools.plan.operating_point import fetch_s, operate, prefill_s
from kvtier.tools.plan.plan_text import circumstances, request
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.report import tables
from kvtier.tools.plan.resolve import resolve
from kvtier.tools.plan.settings import settings_toml
from kvtier.tools.plan.tier_demand import capacity
from kvtier.tools.size.catalogue import entries
from kvtier.tools.size.sizes import TierCapacity, gpu_capacity

MIB = 2**20


def test_a_snapshot_of_the_states_is_written_with_each_request():
    plain, hybrid = (deployed(name) for name in ("llama-3.1-8b", "qwen3-next-80b-a3b"))
    state = size.of("qwen3-next-80b-a3b", tp=4).state_bytes_stored
    assert (plain.model.state_bytes, hybrid.model.state_bytes) == (0, state)
    assert state > 100 * MIB / 2
    one = operate(hybrid, 1.0)
    tokens = one.computed_tokens + hybrid.workload.answer_tokens - hybrid.workload.partial_tokens
    assert one.write_bytes_per_s["disk"] == pytest.approx(tokens * hybrid.model.token_bytes + state)
    many = operate(deployed("qwen3-next-80b-a3b", software__snapshots=10), 1.0)
    assert many.write_bytes_per_s["disk"] - one.write_bytes_per_s["disk"] == pytest.approx(9 * state)


def test_snapshots_take_capacity_until_a_residence_time_after_their_last_use():
    """Of 10 requests a second, all pauses 20 s: a snapshot stays 20 s until it is read, and then for T more."""
    traffic = {"interval_cv": 0.0, "users": 200, "turns": 1000, "question_tokens": 1, "answer_tokens": 1}
    traffic = {f"traffic__{name}": value for name, value in traffic.items()}
    deployment = deployed("qwen3-next-80b-a3b", **traffic)
    needed = capacity(deployment, 0.95)
    snapshots = 10 * (needed.residence_s + 0.95 * 20)  # of 95 % of the requests a snapshot is read
    without = needed.tokens * deployment.model.token_bytes
    assert needed.residence_s == pytest.approx(20)
    assert needed.bytes - without == pytest.approx(snapshots * deployment.model.state_bytes, rel=0.01)
    # A tier of that size keeps KV for that time, and one without room for the snapshots does not.
    for held, at_least, at_most in ((needed.bytes, 0.99, 1.1), (without, 0.0, 0.95)):
        sized = deployed("qwen3-next-80b-a3b", host__capacity_bytes=int(held), **traffic)
        kept_s = operate(sized, 10.0).residence_s["host"]
        assert at_least * needed.residence_s <= kept_s <= at_most * needed.residence_s


WINDOWED = [name for name in entries() if any(cache.window for cache, _ in size.model(name).runs)]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_plan_of_a_windowed_model_holds_what_its_sizes_hold(name, tp):
    """Sessions of any length in GPU memory, and bytes of a chunk, at any number of ranks."""
    kv, memory_bytes = size.of(name, tp=tp), 4 * 2**40
    deployment = deployed(
        name,
        gpu__memory_bytes=memory_bytes,
        gpu__count=tp,
        model__tp=tp,
        traffic__history_tokens=2000,
        software__copies=0,
    )
    sized = gpu_capacity(kv, memory_bytes, tp, deployment.weight_bytes, in_flight_tokens=0)
    for tokens in (100, 1030, 8000, 50_000):
        planned = deployment.kv_bytes / deployment.model.gpu_bytes(tokens)
        assert int(planned * tokens) == pytest.approx(sized.held(tokens).tokens, rel=1e-9)
    chunk_bytes = deployment.model.token_bytes * deployment.inputs.software.chunk_tokens
    assert chunk_bytes == pytest.approx(tp * kv.chunk_bytes_per_rank, rel=1e-6)


@pytest.mark.parametrize("copies", [0, 1])
def test_each_layer_of_gemma_has_its_own_copies(copies):
    """Gemma 4 31B at TP 8: two copies of the 4 heads of its 10 full layers, one of the 16 of its 50 windowed ones.

    kvtier cannot know which ranks are equal where layers differ in heads, so every rank stores its own.
    """
    stored = 2
    gpu = {"gpu__name": "mi300x", "gpu__memory_bytes": 192 * 10**9, "software__load_bytes_per_s": 1e9}
    traffic = {"traffic__history_tokens": 50_000, "traffic__turns": 5}
    deployment = deployed("gemma-4-31b", model__tp=8, software__copies=copies, **gpu, **traffic)
    full, windowed = 81_920, 819_200  # bytes a token of the layers of each sort
    session = 2 * full * 51_700 + windowed * 1040  # a window of 1,024 is in 65 blocks
    assert deployment.model.gpu_bytes(51_700) == session
    assert session == pytest.approx(9.3e9, rel=0.01)  # 851,968,000 of the windows
    assert int(deployment.kv_bytes / session) == 141
    assert deployment.model.token_bytes == stored * full + windowed
    assert deployment.model.loaded_bytes(50_000) == stored * full * 50_000 + windowed * 1024
    # Every rank receives its heads over its own link.
    tokens = deployment.workload.reusable_tokens
    delivered = 2 * full * tokens + windowed * 1024
    assert deployment.model.loaded_bytes(tokens) / deployment.load_bytes_per_s == pytest.approx(delivered / 8e9)


@pytest.mark.parametrize("name", ["gemma-4-31b", "gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_the_room_for_hits_is_in_the_bytes_of_the_place_that_holds_them(name):
    """GPU memory alone forgets windows and keeps two states; a tier stores each chunk and snapshot."""
    tiered = deployed(name, gpu__name="mi300x", model__tp=8, traffic__prefix_tokens=0)
    alone, load = tiered.only(()), tiered.workload
    in_gpus, in_tiers = capacity(alone, 0.95), capacity(tiered, 0.95)
    assert in_gpus.bytes != pytest.approx(in_tiers.bytes, rel=0.01)
    tokens = in_gpus.bytes / alone.model.gpu_bytes(load.session_tokens) * load.session_tokens
    found = operate(replace(alone, gpu_tokens=tokens), load.requests_per_s)
    assert found.residence_s["gpu"] == pytest.approx(in_gpus.residence_s)
    host = replace(tiered.tiers[0], capacity_bytes=in_tiers.bytes)
    found = operate(replace(tiered, tiers=(host,)), load.requests_per_s)
    assert found.residence_s["host"] == pytest.approx(in_tiers.residence_s)


@pytest.mark.parametrize(("name", "state"), [("falcon-mamba-7b", 36_700_160), ("mamba-codestral-7b", 272_367_616)])
def test_a_model_that_keeps_states_only_is_planned_with_them(name, state):
    """Both were refused. A request stores one state and reads one, whatever its tokens."""
    plan = planned(name, "host=64GiB")
    text = "a constant state of 36.7 MB a user" if state < 1e8 else "a constant state of 272 MB a user"
    assert request(plan).startswith(f"Nothing to offload: {name} keeps {text}. 80 users fit on 8 x h100-sxm with GPU")
    assert dict(circumstances(plan))["KV"].startswith("a constant state, ")
    assert "# no tier is worth buying for 80 users\n" in settings_toml(plan)
    # Of a day's users GPU memory, which keeps each state twice, forgets most; drives keep them.
    seldom = planned(name, "disk=4xpm1753", traffic__users=50_000, traffic__interval_s=600.0, traffic__prefix_tokens=0,
                     traffic__interval_cv=0.0, software__gpu_reuse=False)  # fmt: skip
    point, rate = seldom.given.need.point, 50_000 / 600
    assert seldom.tiered.tiers == ("disk",)
    assert "Nothing to offload" not in request(seldom)
    assert point.read_bytes_per_s["disk"] == pytest.approx(rate * 0.9 * state, rel=1e-3)
    assert point.write_bytes_per_s["disk"] == pytest.approx(rate * state, rel=1e-3)
    kept = capacity(seldom.given.need.deployment, 0.95)
    assert kept.bytes == pytest.approx(rate * state * 2 * 600, rel=0.03)  # read after a pause, and kept for another


def test_a_load_reads_the_last_window_and_a_store_keeps_one_of_every_chunk():
    model = deployed("gpt-oss-20b").model
    half = 24_576  # bytes a token of the 12 layers without a window, and of the 12 with one of 128
    assert model.stored_bytes(20_480) == (1 + 1 / 2) * half * 20_480  # of a chunk of 256 the window
    assert model.loaded_bytes(20_000) == half * 20_000 + half * 128
    assert model.loaded_bytes(100) == model.stored_bytes(100)
    deployment = deployed("gpt-oss-20b", software__load_bytes_per_s=1e9)
    assert fetch_s(deployment, "host", 20_000) == pytest.approx(half * 20_128 / 1e9)


def test_attention_runs_at_the_rate_of_the_kvs_format():
    """FP8 weights double the rate of the products with weights, not that of attention on bf16 KV."""
    tokens = 50_000
    plain, weights, both = (
        deployed("llama-3.1-8b", model__weights=weight, model__kv_dtype=kv)
        for weight, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"))
    )
    attention = plain.model.attention_flop(tokens, tokens) / (989e12 * 0.5)
    linear = prefill_s(plain, tokens, tokens) - attention
    assert attention > 0.2 * linear
    assert prefill_s(weights, tokens, tokens) == pytest.approx(linear / 2 + attention)
    assert prefill_s(both, tokens, tokens) == pytest.approx(linear / 2 + attention / 2)
    widened = deployed("llama-3.1-8b", model__kv_dtype="int8:g64")
    assert prefill_s(widened, tokens, tokens) == prefill_s(plain, tokens, tokens)


def test_a_gpu_of_ones_own_needs_no_rate_for_attention():
    figures = {"memory_bytes": 80 * 10**9, "memory_bytes_per_s": 3e12, "link_bytes_per_s": 50e9, "watts": 500.0}
    own = deployed("llama-3.1-8b", gpu__name="ours", gpu__flops=500e12, **{f"gpu__{k}": v for k, v in figures.items()})
    assert own.attention_flops == own.flops


def test_the_longest_prompt_counts_against_the_context_not_the_mean():
    fits = {"traffic__history_tokens": 100_000, "traffic__question_tokens": 1000, "traffic__turns": 20}
    assert deployed("llama-3.1-8b", **fits).workload.longest_tokens == 1000 + 100_000 + 1000 + 19 * 1100 + 100
    with pytest.raises(ConfigError, match="the longest prompt and its answer have 134,000 tokens"):
        deployed("llama-3.1-8b", **(fits | {"traffic__turns": 30}))


def test_copies_of_a_latent_are_an_input():
    """DeepSeek-R1 on 8 ranks: 8 copies of 70,272 bytes, or one that all ranks receive."""
    each, shared, two = (
        deployed("deepseek-r1", model__weights="fp8", gpu__name="h200-sxm", software__copies=copies)
        for copies in (0, 1, 2)
    )
    assert [it.model.token_bytes for it in (each, shared, two)] == [8 * 70_272, 70_272, 2 * 70_272]
    # Each GPU receives as many bytes over its own link in all of them, and holds as many.
    for other in (shared, two):
        assert fetch_s(other, "host", 20_000) == pytest.approx(fetch_s(each, "host", 20_000))
        assert other.model.gpu_bytes(20_000) == pytest.approx(each.model.gpu_bytes(20_000))
    reads = [operate(it, 1.0) for it in (each, shared)]
    assert reads[0].write_bytes_per_s["disk"] == pytest.approx(8 * reads[1].write_bytes_per_s["disk"], rel=0.01)
    # Heads that ranks do not share have no copies to save.
    assert deployed("llama-3.1-8b", model__tp=8, software__copies=1).model.token_bytes == 131_072


def test_a_windowed_conversation_takes_less_gpu_memory_between_its_queries():
    """`size` counts the tokens of steps under way as well, 1.43 GB: the plan's 853 MB looked like another answer."""
    plan = planned("gpt-oss-120b", traffic__users=700)
    kv, tokens = size.of("gpt-oss-120b", tp=plan.chosen.need.deployment.inputs.model.tp), 23_000
    idle, running = (kv.tp * kv.rank_session_bytes(0, tokens, in_flight) for in_flight in (0, 16_384))
    note = next(it.note for it in tables(plan) if it.title.startswith("KV for a share"))
    assert f"and, between its queries, {bytes_text(idle)} in GPU memory" in note
    assert running > 1.5 * idle


TIERED = [
    ("llama-3.3-70b", 1, 1), ("llama-3.3-70b", 8, 1), ("llama-3.3-70b", 16, 2), ("deepseek-v3", 1, 1),
    ("deepseek-v3", 8, 8), ("gpt-oss-120b", 16, 2), ("qwen3-next-80b-a3b", 4, 2), ("gemma-4-31b", 8, 1),
]  # fmt: skip
"""Model, ranks, and how many times the KV of a token in the tier is on all ranks together."""


@pytest.mark.parametrize(("name", "tp", "shared"), TIERED)
def test_a_tier_holds_as_many_tokens_in_a_size_as_in_a_plan(name, tp, shared):
    """`size` counted the latent of DeepSeek V3 on every rank, 8 times as many bytes as `plan`."""
    kv, room = size.of(name, tp=tp), 10**16
    held = TierCapacity(kv=kv, capacity_bytes=room).held(102_400)
    once, each = (
        deployed(name, gpu__memory_bytes=2**42, gpu__count=tp, model__tp=tp, software__copies=copies).model
        for copies in (1, 0)
    )
    of_plan = room / once.stored_bytes(102_400) * 102_400
    assert held.tokens == pytest.approx(of_plan, rel=1e-2)
    assert each.token_bytes == pytest.approx(shared * once.token_bytes)  # the control: a copy for each rank


def test_the_stream_of_a_load_is_conservative_unless_a_probe_measured_it(tmp_path):
    assert deployed("llama-3.1-8b").load_bytes_per_s == 6e9
    # A faster setting does not exceed the link.
    assert deployed("llama-3.1-8b", software__load_bytes_per_s=1e12).load_bytes_per_s == 64e9 * 0.8
    measure = {"op": "to_gpu", "bytes": 2**24, "depth": 1, "gb_per_s": 21.0, "latency_us_p50": 1, "latency_us_p99": 1}
    record = {"format": 1, "links": [{"name": "gpu", "measures": [measure | {"count": 9}]}]}
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(record))
    probed = resolve(load(options={"model.name": "llama-3.1-8b"}, probe=path))
    assert probed.load_bytes_per_s == 21e9


def test_queue_depth_is_of_the_drives_own_loads():
    """Loads from fast host memory take less time than those from slow drives, and do not lengthen its queue."""
    plan = planned(
        "llama-3.1-8b",
        traffic__users=20,
        host__capacity_bytes=60 * 10**9,
        disk__count=4,
        disk__read_bytes_per_s=6e9,
        software__gpu_reuse=False,
        software__load_bytes_per_s=50e9,
        software__skips_slow_loads=False,
    )
    point = plan.tiered.point
    assert point.read_bytes_per_s["host"] > point.read_bytes_per_s["disk"] > 0
    assert (
        point.loading["disk"] / point.read_bytes_per_s["disk"]
        > 2 * point.loading["host"] / point.read_bytes_per_s["host"]
    )
    assert sum(point.loading.values()) == pytest.approx(point.requests_per_s * point.load_s)
    assert plan.drives.depth == pytest.approx(point.loading["disk"] * 4 * 32)


def test_the_fewest_ranks_hold_the_longest_session_not_the_mean():
    few = deployed("llama-3.3-70b", gpu__name="h200-sxm", traffic__history_tokens=1000)
    assert few.inputs.model.tp == 2
    longest = few.model.gpu_bytes(few.workload.longest_tokens)
    assert few.kv_bytes >= longest
    for tp in (1, 3):
        with pytest.raises(ConfigError):
            deployed("llama-3.3-70b", gpu__name="h200-sxm", traffic__history_tokens=1000, model__tp=tp)


@pytest.mark.parametrize(
    "changes",
    [
        {"traffic__answer_tokens": 1, "traffic__history_tokens": 60_000, "disk__read_bytes_per_s": 1e6},
        {"software__skips_slow_loads": False, "host__capacity_bytes": 0, "disk__read_bytes_per_s": 1e6},
        # Prompts take ten thousand times as long as their answers.
        {"model": "falcon-7b", "traffic__answer_tokens": 1, "traffic__turns": 1, "traffic__history_tokens": 100_000},
        {"traffic__interval_s": 1e7, "traffic__users": 1},
        {"target__ttft_s": 1e-3},
        {"host__capacity_bytes": 2**20, "disk__count": 0},
    ],
)
def test_extremes_are_planned_without_a_division_by_zero(changes):
    plan = planned(changes.pop("model", "llama-3.1-8b"), **changes)
    assert plan.tiered.point.requests_per_s > 0
    assert max(plan.tiered.point.gpu_used, plan.alone.point.gpu_used) <= 1 + 1e-6  # it can be served
    assert plan.tiered.point.hit_rate <= 1


@pytest.mark.parametrize("blocks", [False, True])
def test_planned_loads_never_cost_users(blocks):
    """A common prefix on one slow drive is computed again instead of loaded, and tiers share a pipe fairly."""
    for model, changes in (
        ("gemma-2-9b", {"traffic__turns": 1, "traffic__history_tokens": 1000, "host__capacity_bytes": 0}),
        ("qwen3-235b-a22b", {"traffic__history_tokens": 0, "disk__count": 0, "traffic__arrivals_cv2": 0.0}),
        ("llama-3.1-8b", {"traffic__turns": 2, "disk__read_bytes_per_s": 1e8}),
    ):
        deployment = deployed(
            model, gpu__count=64, disk__read_bytes_per_s=3e9, software__gpu_reuse=False, software__loads_block=blocks,
            **{name: value for name, value in changes.items() if name != "disk__read_bytes_per_s"},
        )  # fmt: skip
        alone, tiered = (ceiling(it).binding.users for it in (deployment.only(()), deployment))
        assert tiered >= alone * (1 - 1e-9)
