"""The exchange between GPUs and the floor of a step: what they change, and that published times hold."""

import json

import pytest
from bench.published_steps import compare
from tests.tools.plan.plans import deployed, inputs, planned

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.plan.hardware import catalogue
from kvtier.tools.plan.max_load import best
from kvtier.tools.plan.operating_point import decode_token_s, operate, prefill_s, step_s
from kvtier.tools.plan.plan_text import heading
from kvtier.tools.plan.resolve import deployments, resolve
from kvtier.tools.size import from_config, model, names

NO_LAUNCHES = {"gpu__layer_s": 0.0, "gpu__expert_layer_s": 0.0}
NO_EXCHANGE = {
    "gpu__exchange_latency_s": 1e-12,
    "gpu__exchange_bytes_per_s": 1e16,
    "gpu__exchange_wait_s": 0.0,
    "gpu__dispatch_s": 1e-12,
}


def test_an_8b_is_not_split_over_8_gpus():
    """TP 8 was recommended at 882 us a token: an engine's layer takes 40 us and two all-reduces."""
    plan = planned("llama-3.1-8b")
    assert plan.deployment.inputs.model.tp == 4
    assert plan.tiered.point.tpot_s > 32 * (40e-6 + 2 * 12.2e-6)
    free = planned("llama-3.1-8b", **NO_EXCHANGE, **NO_LAUNCHES)
    assert free.deployment.inputs.model.tp == 8


def test_a_tiny_model_for_one_user_takes_one_gpu():
    """Qwen3-0.6B took TP 8 at 175 us a token: 28 layers of 6 us, with two all-reduces in each."""
    plan = planned("qwen3-0.6b", traffic__users=1)
    assert plan.deployment.inputs.model.tp == 1
    assert plan.tiered.point.tpot_s > 28 * 40e-6
    assert heading(plan).endswith("TP 1, 8 copies (the fewest GPUs that hold the model)")


def test_gpus_behind_pcie_exchange_at_its_measured_rate():
    """8 L4 as TP 8 served 54 users against 2. They send 7/4 of 8 KiB a token 64 times at 1.8 GB/s: 11 s a prompt."""
    plan = planned("llama-3.1-8b", gpu__name="l4")
    users = {it.tp: int(it.users_with_tiers) for it in plan.tiered.choice.sizes}
    assert users == {1: 2, 2: 16, 4: 5, 8: 0}
    assert plan.deployment.inputs.model.tp == 2
    split = deployed(gpu__name="l4", model__tp=8, gpu__count=8)
    sent_s = 64 * 7 / 4 * 8192 * 21_000 / 1.8e9
    assert sent_s > 10
    assert prefill_s(split, 21_000, 21_000) > sent_s
    linked = planned("llama-3.1-8b", gpu__name="l4", gpu__exchange="nvlink4")
    assert linked.deployment.inputs.model.tp > 2


def test_a_size_larger_than_memory_needs_has_its_reason():
    plan = planned("llama-3.3-70b", traffic__users=60)
    assert heading(plan).endswith("TP 8, one copy (TP 4 serves 51 users, 15 fewer)")


@pytest.mark.parametrize("users", [80, 530, 1000])
def test_the_size_that_serves_most_users_is_planned_for_any_load(users):
    """TP 2 serves 521 users of an 8B, TP 4 544, TP 1 427. Sizes within 5 % gave way as --ttft grew, and users fell."""
    plan = planned("llama-3.1-8b", traffic__users=users)
    served = {it.tp: int(it.users_with_tiers) for it in plan.tiered.choice.sizes}
    assert served == {1: 427, 2: 521, 4: 544, 8: 512}
    assert plan.deployment.inputs.model.tp == 4
    assert "(TP 2 serves 521 users, 23 fewer)" in heading(plan)


def test_sizes_that_serve_as_many_whole_users_give_way_to_the_smallest():
    sizes = list(deployments(inputs("llama-3.1-8b")))
    assert best(sizes, [3.2, 3.9, 3.95, 2.0]) is sizes[0]
    assert best(sizes, [3.2, 4.0, 3.95, 2.0]) is sizes[1]
    assert best(sizes, [0.2, 0.3, 0.1, 0.0]) is sizes[1]  # no whole user: the most of one


def test_the_figures_of_an_exchange_are_those_of_the_size_and_visible():
    for tp, latency_s, rate in ((2, 4.2e-6, 262e9), (4, 4.5e-6, 245e9), (8, 4.7e-6, 281e9)):
        found = deployed("llama-3.3-70b", model__tp=tp).inputs
        assert (found.gpu.exchange, found.gpu.exchange_latency_s, found.gpu.exchange_bytes_per_s) == (
            "nvlink4", latency_s, rate,
        )  # fmt: skip
        assert found.origin("gpu.exchange_latency_s") == "catalogue nvlink4"
    own = deployed("llama-3.3-70b", model__tp=8, gpu__exchange_latency_s=9e-6)
    assert (own.inputs.gpu.exchange_latency_s, own.inputs.gpu.exchange_bytes_per_s) == (9e-6, 281e9)
    assert own.exchange_s == pytest.approx(160 * (9e-6 + 8e-6))
    with pytest.raises(
        ConfigError, match=r"gpu.exchange = 'nvlink9' \(from --exchange\): the catalogue has no such exchange"
    ):
        deployed("llama-3.3-70b", model__tp=8, gpu__exchange="nvlink9")
    assert all(gpu.values["exchange"] in catalogue()["exchange"] for gpu in catalogue()["gpu"].values())


def test_gpus_of_several_hosts_exchange_more_slowly():
    near, far = (
        deployed("llama-3.1-405b", gpu__count=16, model__tp=16, host__gpus=gpus, model__weights="fp8")
        for gpus in (16, 8)
    )
    assert far.exchange_s - near.exchange_s == pytest.approx(126 * 2 * 20e-6)
    # In a host as 8 GPUs do; then each GPU's eighth goes to the other host and back by its adapter of 50 GB/s.
    assert near.token_exchange_s == pytest.approx(126 * 2 * 2 * 15 / 16 * 32_768 / 281e9)
    assert far.token_exchange_s == pytest.approx(126 * 2 * 2 * (7 / 8 / 281e9 + 1 / 2 / 8 / 50e9) * 32_768)
    slow = deployed("llama-3.1-405b", gpu__count=16, model__tp=16, model__weights="fp8", gpu__adapter_bytes_per_s=5e9)
    assert slow.token_exchange_s > 3 * far.token_exchange_s
    # One of the 8 copies of a token leaves the host, which sends it on to its GPUs.
    spread = deployed("deepseek-r1", gpu__name="h200-sxm", gpu__count=16, model__tp=16, model__dp_attention=True)
    assert spread.token_exchange_s == pytest.approx(58 * 7168 * 3 * (8 / 281e9 + 1 / 50e9) / 58 * 61)


def test_data_parallel_attention_sends_tokens_to_their_experts():
    """A token of 7,168 goes to 7 of 8 GPUs in one byte and comes back in two: 61 layers, no all-reduce."""
    spread = deployed("deepseek-r1", gpu__name="h200-sxm", model__tp=8, model__dp_attention=True)
    assert spread.token_exchange_s == pytest.approx(61 * 7 * 7168 * 3 / 281e9)
    assert spread.exchange_s == pytest.approx(61 * (27.6e-6 + 2 * 8e-6))
    assert spread.launch_s == pytest.approx(61 * 65e-6)


def test_a_step_takes_as_long_as_its_launches_and_its_exchange():
    one, eight = (deployed("llama-3.1-8b", model__tp=tp) for tp in (1, 8))
    kv_bytes = 131_072 * 1000
    reading = (16e9 + 4 * kv_bytes) / (3.35e12 * 0.8)
    assert step_s(one, 4, 1000) == pytest.approx(reading + 32 * 40e-6)
    exchange = 64 * (4.7e-6 + 8e-6 + 4 * 7 / 4 * 8192 / 281e9)
    assert step_s(eight, 4, 1000) == pytest.approx(reading / 8 + 32 * 40e-6 + exchange)
    assert decode_token_s(eight) == step_s(eight, eight.batch, eight.workload.session_tokens) / eight.batch
    # A short prompt's launches do not hide behind its computing; a long one is a step for each 8,192 tokens.
    assert prefill_s(one, 10, 1000) == pytest.approx(32 * 40e-6)
    long = prefill_s(eight, 80_000, 80_000) - prefill_s(deployed(model__tp=8, **NO_EXCHANGE), 80_000, 80_000)
    assert long == pytest.approx(64 * (80_000 / 8192 * 12.7e-6 + 80_000 * 7 / 4 * 8192 / 281e9), rel=1e-3)


def test_a_step_that_computes_longer_than_it_reads_exchanges_too():
    """The exchange of a large batch hid behind its computing, and the time per token did not know the computing."""
    fast = {"gpu__memory_bytes_per_s": 1e16, "model__tp": 8, **NO_LAUNCHES}
    eight = deployed("llama-3.1-8b", **fast)
    computing, sent = 2 * 8e9 / (8 * 989e12 * 0.5), 64 * 7 / 4 * 8192 / 281e9
    assert step_s(eight, 500, 1000) == pytest.approx(64 * 12.7e-6 + 500 * (computing + sent), rel=1e-3)
    for changes in (fast, {"model__tp": 8}):  # computing decides, or reading
        one = deployed("llama-3.1-8b", traffic__answer_tokens=2000, **changes)
        point = operate(one.only(()), 2.0)
        batch = 2.0 * 2000 * point.tpot_s
        assert batch > 2
        assert point.tpot_s * (1 - 2.0 * point.prefill_s) == pytest.approx(
            step_s(one, batch, one.workload.session_tokens)
        )


@pytest.fixture(scope="module")
def steps():
    return list(compare())


def test_published_times_are_within_the_stated_range(steps):
    held_out = sorted(it.ratio for it in steps if it.is_held_out)
    assert len(held_out) >= 50
    assert 0.6 < held_out[0] < held_out[-1] < 1.25
    assert sorted(abs(it - 1) for it in held_out)[len(held_out) // 2] < 0.08
    assert sum(0.72 <= it <= 1.15 for it in held_out) >= 0.9 * len(held_out)
    assert all(0.6 < it.ratio < 1.25 for it in steps)


@pytest.mark.parametrize("without", [NO_EXCHANGE, NO_LAUNCHES])
def test_without_the_exchange_or_the_floor_published_times_are_out_of_range(steps, without):
    """Negative control: each of both is needed."""
    changed = list(compare(**without))
    assert sum(it.ratio < 0.6 for it in changed) >= 8
    assert all(after.ratio <= before.ratio + 1e-9 for before, after in zip(steps, changed, strict=True))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("gpu", ["b300-sxm", "a100-sxm"])
def test_every_model_of_the_catalogue_can_be_planned(name, gpu):
    """12 of 74 lacked parameters, and fp8 had no rate on an A100. Two keep states only, and were refused."""
    deployment = resolve(inputs(name, gpu__name=gpu, gpu__count=64, traffic__history_tokens=1000, traffic__turns=2))
    assert prefill_s(deployment, 1000, 1000) > 0
    assert operate(deployment, 1.0).hit_rate > 0


@pytest.mark.parametrize(
    ("name", "gpu", "weights", "gigabytes"),
    [
        ("deepseek-r1", "h200-sxm", "fp8", 671),
        ("deepseek-v3", "h200-sxm", "fp8", 671),
        ("gpt-oss-120b", "h100-sxm", "fp4", 65.8),
        ("llama-3.1-8b", "h100-sxm", "bf16", 16),
    ],
)
def test_weights_have_the_format_that_the_checkpoint_ships(capsys, name, gpu, weights, gigabytes):
    """DeepSeek-R1 on 8 H200 was refused: 1,342 GB in bf16."""
    found = deployed(name, gpu__name=gpu)
    assert found.inputs.model.weights == weights
    assert found.inputs.origin("model.weights") == f"model {name}"
    assert found.weight_bytes == pytest.approx(gigabytes * 1e9, rel=1e-3)
    named = deployed(name, gpu__name="b300-sxm", model__weights="bf16")
    assert named.inputs.model.weights == "bf16"
    assert run(["size", name, "--gpu", f"8x{gpu}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["weight_bytes"] == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({}, "bf16"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "fp4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "fp4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "fp4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "fp4"),
        ({"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}, "fp4"),
        ({"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}, "fp8"),
        ({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}, "fp4"),
        ({"quantization_config": {"quant_method": "unknown", "bits": 16}}, "bf16"),
        ({"quantization_config": None}, "bf16"),
        ({"quantization_config": "fp8"}, "bf16"),
    ],
)
def test_a_config_of_ones_own_names_the_format_of_its_weights(tmp_path, fields, weights):
    plain = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024}
    assert from_config(plain | fields, "own").weights == weights
    nested = {"model_type": "llava", "text_config": plain} | fields
    config = tmp_path / "config.json"
    config.write_text(json.dumps(nested))
    found = resolve(inputs(str(config), model__parameters=8e9))
    assert found.inputs.model.weights == weights
    assert resolve(inputs(str(config), model__parameters=8e9, model__weights="fp8")).weight_bytes == 8e9


def test_every_mixture_has_its_experts_and_every_dense_model_none():
    """Where they are unknown a step reads all weights. Gemma's E models look up a part of theirs: no mixture."""
    for name in names():
        found = model(name)
        is_mixture = bool(found.active_billion) and not name.startswith("gemma-4-e")
        assert bool(found.experts[0]) == (is_mixture and name != "minimax-text-01"), name
        assert 0 <= found.experts[1] <= found.experts[0] / 4 or name == "mixtral-8x7b", name


def mla(width, heads, query, nope, value, latent=512, rope=64):
    """Parameters of one layer's latent attention: low ranks of queries and of keys and values, and the output."""
    queries = width * query + query * heads * (nope + rope)
    return queries + width * (latent + rope) + latent * heads * (nope + value) + heads * value * width


def gqa(width, heads, kv_heads, key=128, value=128):
    return width * (heads * key + kv_heads * (key + value) + heads * value)


# Dimensions of the config.json in github.com/ai-dynamo/aiconfigurator, model_configs, at 095f58a5: width; attention of
# all layers; layers of experts, their width and inner width, routed, used and shared experts; inner width of all dense
# MLPs; words.
DIMENSIONS = {
    "deepseek-v3": (7168, 61 * mla(7168, 128, 1536, 128, 128), (58, 7168, 2048, 256, 8, 1), 3 * 18432, 129_280),
    "kimi-k2.5": (7168, 61 * mla(7168, 64, 1536, 128, 128), (60, 7168, 2048, 384, 8, 1), 18432, 163_840),
    "glm-5": (
        6144, 78 * (mla(6144, 64, 2048, 192, 256) + 2048 * 32 * 128), (75, 6144, 2048, 256, 8, 1), 3 * 12288, 154_880,
    ),
    "minimax-m2.5": (3072, 62 * gqa(3072, 48, 8), (62, 3072, 1536, 256, 8, 0), 0, 200_064),
    "minimax-m3": (6144, 60 * gqa(6144, 64, 4), (57, 6144, 3072, 128, 4, 1), 3 * 12288, 200_064),
    "mimo-v2-flash": (
        4096, 9 * gqa(4096, 64, 4, 192) + 39 * gqa(4096, 64, 8, 192), (47, 4096, 2048, 256, 8, 0), 16384, 152_576,
    ),
    # KDA's query, key, value, gate and output; MLA has a gate, too; two matrices lead to half the width and back.
    "kimi-k3": (
        7168,
        69 * 5 * 7168 * 96 * 128 + 24 * (mla(7168, 96, 1536, 128, 128) + 7168 * 96 * 128) + 92 * 2 * 7168 * 3584,
        (92, 3584, 3072, 896, 16, 4),  # two shared experts of the whole width are four of the half
        33792,
        163_840,
    ),
    # Groups of heads share an output of low rank; one head of 512 holds key and value.
    "deepseek-v4-flash": (
        4096, 43 * (4096 * 1536 + 1024 * 64 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096),
        (43, 4096, 2048, 256, 6, 1), 0, 129_280,
    ),
    "deepseek-v4-pro": (
        7168, 61 * (7168 * 2048 + 1536 * 128 * 512 + 128 * 512 * 1024 + 16 * 1024 * 7168),
        (61, 7168, 3072, 384, 6, 1), 0, 129_280,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIMENSIONS)
def test_parameters_add_up_to_the_matrices_of_the_configuration(name):
    """Derived ones, and by the same formula published ones: DeepSeek-V3's 671 and 37 billion."""
    width, attention, (layers, inner_width, inner, routed, used, shared), dense, words = DIMENSIONS[name]
    rest = attention + 3 * width * dense + 2 * width * words
    total, active = (rest + layers * 3 * inner_width * inner * (count + shared) for count in (routed, used))
    found = model(name)
    assert found.parameters_billion == pytest.approx(total / 1e9, rel=0.01)
    assert found.active_billion == pytest.approx(active / 1e9, rel=0.12 if name == "minimax-m3" else 0.06)
    assert found.experts == (routed, used)
