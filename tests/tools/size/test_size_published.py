"""Sizes of published configurations, computed by hand: every kind of cache, every format, and the copies of ranks."""

import pytest

from kvtier.tools import size

MIB, GIB = 1 << 20, 1 << 30
TOKENS = 131_072

ROWS = {
    # name: (layers by kind, growing, all layers, windows and states MiB, minimum GiB at 128 Ki, stored GiB at 128 Ki)
    "llama-3.1-8b": ({"full": 32}, 131_072, 131_072, 0, 16.0, 16.0),
    "llama-3.3-70b": ({"full": 80}, 327_680, 327_680, 0, 40.0, 40.0),
    "llama-3.1-70b": ({"full": 80}, 327_680, 327_680, 0, 40.0, 40.0),
    "llama-3.1-405b": ({"full": 126}, 516_096, 516_096, 0, 63.0, 63.0),
    "qwen3-8b": ({"full": 36}, 147_456, 147_456, 0, 18.0, 18.0),
    "qwen3-32b": ({"full": 64}, 262_144, 262_144, 0, 32.0, 32.0),
    "qwen3-235b-a22b": ({"full": 94}, 192_512, 192_512, 0, 23.5, 23.5),
    "gpt-oss-20b": ({"full": 12, "window": 12}, 24_576, 49_152, 3.0, 3.0, 6.0),
    "gpt-oss-120b": ({"full": 18, "window": 18}, 36_864, 73_728, 4.5, 4.5, 9.0),
    "deepseek-r1": ({"mla": 61}, 70_272, 70_272, 0, 8.58, 8.58),
    "deepseek-v3": ({"mla": 61}, 70_272, 70_272, 0, 8.58, 8.58),
    "kimi-k2": ({"mla": 61}, 70_272, 70_272, 0, 8.58, 8.58),
    "glm-5": ({"mla": 78, "indexer": 78}, 109_824, 109_824, 0, 13.4, 13.4),
    "llama-4-maverick": ({"full": 12, "chunked": 36}, 49_152, 196_608, 1152, 7.1, 24.0),
    "gemma-3-27b": ({"full": 10, "window": 52}, 81_920, 507_904, 416, 10.4, 62.0),
    "gemma-3-12b": ({"full": 8, "window": 40}, 65_536, 393_216, 320, 8.3, 48),
    "gemma-3-4b": ({"full": 5, "window": 29}, 20_480, 139_264, 116, 2.6, 17),
    # Engines keep the key and the value of a layer with attention_k_eq_v, twice what the theory needs.
    "gemma-4-26b-a4b": ({"full": 5, "window": 25}, 20_480, 225_280, 200, 2.70, 27.5),
    "gemma-4-31b": ({"full": 10, "window": 50}, 81_920, 901_120, 800, 10.78, 110),
    "qwen3.5-27b": ({"full": 16, "gated_delta_net": 48}, 65_536, 65_536, 147, 8.1, None),
    "qwen3.5-397b-a17b": ({"full": 15, "gated_delta_net": 45}, 30_720, 30_720, 183, 3.9, None),
    "nemotron-3-nano-30b-a3b": ({"full": 6, "mamba2": 23}, 6_144, 6_144, 47, 0.80, None),
    "nemotron-h-56b": ({"full": 10, "mamba2": 54}, 40_960, 40_960, 870, None, None),
    "kimi-k3": ({"mla": 24, "kda": 69}, 27_648, 27_648, 429, 3.8, None),
}


def near(value: float, printed: float) -> bool:
    """Whether `value` agrees with a figure to the three or fewer digits printed."""
    return abs(value - printed) <= max(0.05, printed * 0.012)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_published_table(name):
    kinds, growing, every, constant, minimum, stored = ROWS[name]
    kv = size.of(name)
    counted: dict[str, int] = {}
    for layer in kv.layers:
        counted[layer.cache.kind] = counted.get(layer.cache.kind, 0) + layer.count
    assert counted == kinds
    assert (kv.bytes_per_token_growing, kv.bytes_per_token) == (growing, every)
    assert near(kv.bytes_per_session_constant / MIB, constant)
    assert minimum is None or near(kv.session_bytes(TOKENS) / GIB, minimum)
    assert stored is None or near(kv.session_bytes_stored(TOKENS) / GIB, stored)


def test_deepseek_v4_pro_in_fp8_with_fp4_index_keys():
    kv = size.of("deepseek-v4-pro", dtype="fp8", index_dtype="fp4")
    assert kv.bytes_per_token_growing == 4444
    assert kv.session_bytes(TOKENS) / TOKENS == 4474.5
    assert near(kv.session_bytes(TOKENS) / GIB, 0.55)
    assert round(kv.bytes_per_token_growing * 256 / 1e6, 1) == 1.1  # MB a chunk


def test_glm_5_latents_without_their_indexers():
    latents, indexers = size.of("glm-5").layers
    assert (latents.bytes_per_token, indexers.bytes_per_token) == (89_856, 19_968)


@pytest.mark.parametrize(
    ("name", "dtype", "bytes_per_token"),
    [
        ("glm-5.2", "bf16", 78 * 576 * 2 + 21 * 128 * 2),  # layers that share an indexer keep no keys
        ("deepseek-v3", "fp8_ds_mla", 61 * 656),
        ("deepseek-v3.2", "fp8_ds_mla", 48_068),
        ("deepseek-v3.2", "bf16", 85_888),
        ("deepseek-v3.2", "nvfp4_ds_mla", 61 * (352 + 132)),
        # Heads of 64 with groups of 128: a group for each head, not one for two.
        ("gpt-oss-20b", "int4:g128", 24 * 2 * 8 * (64 / 2 + 4)),
    ],
)
def test_packed_and_shared_layers(name, dtype, bytes_per_token):
    assert size.of(name, dtype=dtype).bytes_per_token == bytes_per_token


def test_deepseek_v4_packed_entries_are_584_bytes():
    layers = size.of("deepseek-v4-pro", dtype="fp8_ds_mla").layers
    window = next(layer for layer in layers if layer.cache.kind == "window")
    assert window.bytes_per_token == 61 * 584


@pytest.mark.parametrize(
    ("dtype", "kib"),
    [
        ("bf16", 320),
        ("fp16", 320),
        ("fp32", 640),
        ("fp8", 160),
        ("int8", 160),
        ("int8:g64", 165),
        ("mxfp4", 85),
        ("nvfp4", 90),
        ("int4:g128:sym", 82.5),
        ("int4:g64", 90),
        ("int4:g32", 100),
        ("int4:g32:asym", 100),
        ("INT4:G64", 90),
        ("float16", 320),
    ],
)
def test_formats_with_their_scales_and_zero_points(dtype, kib):
    assert size.of("llama-3.3-70b", dtype=dtype).bytes_per_token == kib * 1024


@pytest.mark.parametrize(
    ("name", "tp", "times", "stored"),
    [
        ("llama-3.1-8b", 8, 1, 131_072),
        ("llama-3.1-8b", 16, 2, 262_144),
        ("qwen3-235b-a22b", 4, 1, 192_512),
        ("qwen3-235b-a22b", 8, 2, 385_024),
        ("deepseek-r1", 8, 8, 562_176),
        ("falcon-40b", 16, 2, 2 * 122_880),
    ],
)
def test_copies_under_tensor_parallelism(name, tp, times, stored):
    kv = size.of(name, tp=tp)
    assert (kv.duplication, kv.bytes_per_token_stored) == (times, stored)


def test_states_are_shared_by_heads_and_groups_are_copied():
    one, eight, sixteen = (size.of("nemotron-h-56b", tp=tp) for tp in (1, 8, 16))
    assert one.state_bytes_stored == one.state_bytes == eight.state_bytes_stored
    groups = 54 * 3 * 2 * 8 * 256 * 2  # layers, kernel - 1, B and C, groups, states, bytes
    assert sixteen.state_bytes_stored == one.state_bytes + groups


@pytest.mark.parametrize(
    ("name", "chunk", "head"),
    [("llama-3.3-70b", 83_886_080, 8192), ("llama-3.1-8b", 33_554_432, 4096), ("deepseek-r1", 17_989_632, 8192)],
)
def test_chunks_of_256_tokens(name, chunk, head):
    kv = size.of(name)
    assert kv.chunk_bytes_per_rank == chunk
    (stored,) = kv.objects
    assert stored.bytes == stored.padded_bytes == chunk
    assert stored.frame_bytes == chunk + head


def test_small_chunks_pay_for_alignment():
    (stored,) = size.of("deepseek-r1", chunk_tokens=1).objects
    assert stored.bytes == 70_272
    assert stored.padded_bytes == 61 * 4096
    assert stored.overhead > 2


def test_stages_split_layers_and_the_fullest_counts():
    assert size.of("llama-3.1-405b", pp=4).chunk_bytes_per_rank == 32 * 4096 * 256  # 31, 32, 32, 31 of 126 layers
    assert size.of("qwen3-8b", pp=36, tp=8).chunk_bytes_per_rank == 4096 // 8 * 256


def test_an_object_for_each_rule_of_validity():
    rules = [each.rule for each in size.of("gpt-oss-20b").objects]
    assert rules == ["window 128", "history"]
    kv = size.of("qwen3.5-27b")
    state, history = kv.objects
    assert (state.rule, state.bytes, history.rule) == ("state", kv.state_bytes, "history")
    assert kv.chunk_bytes_per_rank == history.bytes


@pytest.mark.parametrize(("chunk_tokens", "kept"), [(64, 64), (128, 128), (256, 128), (1024, 128)])
def test_a_chunk_keeps_no_more_of_a_windowed_layer_than_its_window(chunk_tokens, kept):
    window, history = size.of("gpt-oss-20b", chunk_tokens=chunk_tokens).objects
    assert (window.bytes, history.bytes) == (24_576 * kept, 24_576 * chunk_tokens)


def test_a_class_codes_keys_and_values_of_full_attention():
    """Two scales in bf16 for 256 tokens of a key's channel, and 128 of a value's; a byte for a token's values."""
    llama = size.of("llama-3.1-8b")
    assert llama.stored_share("none") == 1
    assert llama.stored_share("int4") == ((5 + 32 / 256) + (4 + 32 / 128 + 8 / 128)) / 2 / 16
    assert llama.stored_share("k8v4") == ((7 + 32 / 256) + (5 + 32 / 128 + 8 / 128)) / 2 / 16
    # Groups do not fit into smaller chunks, so their scales weigh more.
    assert (
        size.of("llama-3.1-8b", chunk_tokens=16).stored_share("int4")
        == ((5 + 32 / 16) + (4 + 32 / 16 + 8 / 128)) / 2 / 16
    )
    # Windows and latents stay exact, and so does KV of eight bits.
    coded, rest = 81_920, 507_904 - 81_920
    assert size.of("gemma-3-27b").stored_share("int4") == pytest.approx((coded * 0.294921875 + rest) / (coded + rest))
    assert size.of("deepseek-v3").stored_share("int4") == 1
    assert size.of("llama-3.1-8b", dtype="fp8").stored_share("int4") == 1
