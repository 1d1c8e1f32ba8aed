"""The formulas agree with each other and with kvtier's chunk layout, for any shape of model."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from kvtier.tools import size
from kvtier.tools.size.caches import NAMED
from kvtier.tools.size.sizes import TierCapacity, pipeline_stages

powers = st.sampled_from([1, 2, 4, 8, 16])
dims = st.sampled_from([16, 32, 64, 80, 128, 256])
counts = st.integers(1, 24)
tokens = st.integers(1, 1 << 20)
names = st.sampled_from(size.names())
formats = st.sampled_from([name for name in NAMED if "mla" not in name] + ["int8:g64", "int4:g64", "int4:g128:sym"])


def of(config: dict[str, Any], **how: Any) -> size.KvSize:
    return size.of(size.from_config(config, "drawn"), **how)


def plain(layers: int, heads: int, keep: int, dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keep, "head_dim": dim, **more
    }  # fmt: skip


@st.composite
def windowed(draw: st.DrawFn) -> dict[str, Any]:
    layers, keep = draw(counts), draw(powers)
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
    more = {"layer_types": kinds, "sliding_window": draw(st.integers(1, 5000))}
    return plain(layers, keep * draw(powers), keep, draw(dims), **more)


@st.composite
def hybrid(draw: st.DrawFn) -> dict[str, Any]:
    return plain(
        draw(counts) * 4, 16, draw(powers), draw(dims), model_type="qwen3_next",
        linear_num_key_heads=16, linear_num_value_heads=16 * draw(powers), linear_key_head_dim=draw(dims),
        linear_value_head_dim=draw(dims), linear_conv_kernel_dim=draw(st.integers(1, 8)),
    )  # fmt: skip


@given(counts, powers, powers, dims)
def test_gqa_is_mha_over_the_group(layers, keep, group, dim):
    heads = keep * group
    assert (
        of(plain(layers, heads, keep, dim)).bytes_per_token * group
        == of(plain(layers, heads, heads, dim)).bytes_per_token
    )


@given(counts, powers, dims, formats)
def test_one_kv_head_of_a_latents_width_is_mla_twice(layers, heads, dim, dtype):
    """MLA has no factor 2: key and value are one."""
    mla = {"num_hidden_layers": layers, "num_attention_heads": heads, "kv_lora_rank": dim, "qk_rope_head_dim": 0}
    assert 2 * of(mla, dtype=dtype).bytes_per_token == of(plain(layers, heads, 1, dim), dtype=dtype).bytes_per_token


@given(names, powers)
def test_ranks_sum_to_the_minimum_or_to_copies(name, tp):
    model = size.model(name)
    assume(not model.attention_heads or model.attention_heads % tp == 0)
    assume(all(cache.can_be_split(tp) for cache, _ in model.runs))
    one, kv = size.of(model), size.of(model, tp=tp)
    assert kv.bytes_per_token == one.bytes_per_token
    assert one.duplication == 1
    assert 1 <= kv.duplication <= tp
    fewest = min((cache.kv_heads for cache, _ in model.runs if cache.kv_heads), default=tp)
    assert (kv.duplication > 1) == (fewest < tp)
    assert kv.session_bytes(4096) == one.session_bytes(4096)
    assert kv.session_bytes_stored(4096) >= one.session_bytes_stored(4096)


@given(names, st.integers(1, 16))
def test_stages_hold_every_layer_once(name, pp):
    layers = len(size.model(name).layers)
    stages = pipeline_stages(layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)
    kv = size.of(name, pp=pp)
    assert kv.bytes_per_token_stored == kv.bytes_per_token


@given(windowed(), tokens)
def test_a_window_longer_than_the_context_is_full_attention(config, count):
    whole = {**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    kv, full = of(config), of(whole)
    assert kv.bytes_per_token == full.bytes_per_token == full.bytes_per_token_growing
    assert kv.session_bytes_stored(count) == full.session_bytes(count)
    if count <= config["sliding_window"]:
        assert kv.session_bytes(count) == full.session_bytes(count)
    else:
        assert kv.session_bytes(count) == kv.bytes_per_token_growing * count + kv.bytes_per_session_constant


@given(windowed() | hybrid(), tokens, tokens)
def test_more_tokens_never_take_less(config, few, many):
    kv, (few, many) = of(config), sorted((few, many))
    assert kv.session_bytes(few) <= kv.session_bytes(many)
    assert kv.session_bytes_stored(few) <= kv.session_bytes_stored(many)
    assert kv.session_bytes(many) <= kv.session_bytes_stored(many)


@given(hybrid(), tokens)
def test_a_state_does_not_grow_and_no_format_changes_it(config, count):
    kv = of(config)
    assert kv.bytes_per_session_constant == kv.state_bytes
    assert kv.session_bytes(count) - kv.state_bytes == kv.bytes_per_token * count
    assert of(config, dtype="int4:g64").state_bytes == kv.state_bytes


@given(windowed(), formats, st.integers(1, 300))
def test_a_grouped_format_adds_its_scales(config, dtype, group):
    """A grouped format lies between its bare bits and the same with a group for every element."""
    kv, bare = of(config, dtype=f"int4:g{group}"), of(config, dtype="fp4").bytes_per_token
    assert bare < kv.bytes_per_token <= bare * 9
    assert kv.bytes_per_token >= of(config, dtype=f"int4:g{group + 1}").bytes_per_token
    assert of(config, dtype=dtype).bytes_per_token >= bare


@given(names, st.sampled_from([16, 64, 256, 1000, 4096]), st.sampled_from(["bf16", "fp8", "nvfp4"]))
def test_a_chunk_is_its_tokens_and_an_object_is_aligned(name, chunk_tokens, dtype):
    kv = size.of(name, chunk_tokens=chunk_tokens, dtype=dtype)
    kept = {cache: cache.tokens_in_store(chunk_tokens) for cache, _ in kv.model.runs}
    exact = sum(count * cache.token_bytes(kv.form) * kept[cache] for cache, count in kv.model.runs)
    assert all(kept[it] == chunk_tokens for it in kept if it.window is None or it.window > chunk_tokens)
    assert exact <= kv.chunk_bytes_per_rank < exact + sum(each.layers for each in kv.objects)
    for each in kv.objects:
        assert each.bytes <= each.padded_bytes < each.bytes + 4096 * each.layers
        assert each.padded_bytes % 4096 == each.frame_bytes % 4096 == 0
        assert each.frame_bytes > each.padded_bytes


@given(st.integers(2, 12), st.integers(0, 11), powers, dims)
def test_shared_layers_have_no_cache(layers, shared, keep, dim):
    assume(shared < layers)
    config = plain(layers, keep, keep, dim, num_kv_shared_layers=shared)
    assert of(config).bytes_per_token == of(plain(layers - shared, keep, keep, dim)).bytes_per_token


@given(names, st.sampled_from(["bytes_per_token", "bytes_per_token_growing", "bytes_per_session_constant"]))
def test_the_layers_add_up(name, field):
    kv = size.of(name)
    windows = sum(layer.bytes_per_token * (layer.cache.window or 0) for layer in kv.layers)
    sums = {
        "bytes_per_token": sum(layer.bytes_per_token for layer in kv.layers),
        "bytes_per_token_growing": sum(layer.bytes_per_token for layer in kv.layers if layer.cache.window is None),
        "bytes_per_session_constant": windows + kv.state_bytes,
    }
    assert getattr(kv, field) == sums[field]


@given(names, st.sampled_from([16, 256, 1000]), tokens, st.integers(1, 10**14))
def test_a_tier_never_holds_more_tokens_than_its_bytes(name, chunk_tokens, count, capacity_bytes):
    """A session's last partial chunk is not stored, so it neither takes bytes nor counts."""
    kv = size.of(name, chunk_tokens=chunk_tokens)
    chunk = sum(each.frame_bytes for each in kv.objects if each.rule != "state")
    snapshot = sum(each.frame_bytes for each in kv.objects if each.rule == "state")
    held = TierCapacity(kv=kv, capacity_bytes=capacity_bytes).held(count)
    assert held.tokens % chunk_tokens == 0
    assert held.tokens // chunk_tokens * chunk + held.sessions * snapshot <= capacity_bytes
    assert held.tokens >= held.sessions * (count // chunk_tokens * chunk_tokens)
    more = TierCapacity(kv=kv, capacity_bytes=capacity_bytes + chunk).held(count)
    assert more.tokens >= held.tokens
