"""Readers of families with a state: recurrent, convolutional or linear-attention layers, with or without attention."""

from collections.abc import Callable, Sequence

from kvtier.tools.size import caches
from kvtier.tools.size.caches import SIXTEEN_BITS, THIRTY_TWO_BITS, LayerCache
from kvtier.tools.size.layer_readers import (
    Layers,
    by_type,
    every_nth,
    has_mla,
    one_for_each_layer,
    read_attention,
    read_indexers,
    read_kv_heads,
    read_layer_count,
    read_layer_numbers,
    read_mla,
    with_window,
)
from kvtier.tools.size.model_config import LAYERS_MAX, ModelConfig

_STATE_BYTES = {"float32": THIRTY_TWO_BITS, "bfloat16": SIXTEEN_BITS, "float16": SIXTEEN_BITS}

_LINEAR_FIELDS = ("group_norm_size", "linear_silu", "linear_rope", "linear_mode")
"""Fields that a reader understands but does not use."""

_LINEAR_DIMS = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")

_KDA_KERNEL = "short_conv_kernel_size"


def _qwen_hybrid(config: ModelConfig) -> Layers:
    """Read Qwen3-Next and Qwen3.5. By default, three of four layers are gated delta nets."""
    count, listed = read_layer_count(config), config.texts("layer_types")
    every = config.integer("full_attention_interval", 4)
    by_rule = every_nth(count, every, "linear_attention")
    types = by_rule if listed is None else ["full_attention" if it == "indexed_attention" else it for it in listed]
    config.refuse_if(
        len(types) != count or (config.has("full_attention_interval") and types != by_rule),
        "layer_types",
        f"it contradicts num_hidden_layers = {count}"
        + f" or full_attention_interval = {every}" * config.has("full_attention_interval"),
    )
    state = caches.gated_delta_net(
        (config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")),
        (config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")),
        config.integer("linear_conv_kernel_dim", least=1),
        _state_bytes(config, "mamba_ssm_dtype"),
    )
    return _hybrid(config, "layer_types", types, read_attention(config), state)


def _qwen4(config: ModelConfig) -> Layers:
    """Read Qwen4: `_qwen_hybrid` plus one index key for several tokens, and n-gram convolutions in some layers."""
    layers, ids = _qwen_hybrid(config), config.integers("ple_layer_ids")
    has_ngrams = ids is None and config.has("ple_conv_kernel_size")
    config.refuse_if(has_ngrams, "ple_conv_kernel_size", "ple_layer_ids must say which layers have it")
    ngrams = set(ids or ())
    config.know("indexer_n_heads", "indexer_kv_heads", "indexer_budget", "heads_per_ngram", "number_of_conv_states")
    config.know("hc_count", "ple_conv_kernel_size", "ple_layer_ids")
    index: tuple[LayerCache, ...] = ()
    inputs = index
    if config.has("indexer_head_dim") or config.has("indexer_n_heads"):
        index = (caches.indexer(config.integer("indexer_head_dim"), config.integer("indexer_compress_ratio")),)
    if ngrams:
        width = config.integer("hidden_size") * config.integer("hc_count")
        kernel = (config.integer("ple_conv_kernel_size") - 1) * config.integer("ngram_size") + 1
        inputs = (caches.short_convolution(width, kernel, 1),)
    return [
        (*layer, *(() if layer[0].state else index), *(inputs if number in ngrams else ()))
        for number, layer in enumerate(layers, 1)
    ]


def _glm5_next(config: ModelConfig) -> Layers:
    """Read GLM 5.3: Kimi delta attention, and in every fourth layer MLA with an index key per pool of tokens."""
    count = read_layer_count(config)
    types = config.texts("layer_types") or every_nth(count, 4, "linear_attention")
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    part = config
    if config.has("linear_attn_config"):
        part, names = config.child("linear_attn_config"), ("num_heads", "head_dim", _KDA_KERNEL)
        part.know("gate_lower_bound", "safe_gate", "full_attn_layers", "kda_layers")
    heads, dim, kernel = (part.integer(name) for name in names)
    config.know("linear_lower_bound", "index_kpool_always_select_tail", *_LINEAR_DIMS)
    state, latents = (caches.kda(heads, dim, kernel, 4),), read_mla(config)
    index = caches.indexer(config.integer("index_head_dim"), config.integer("index_kpool"))
    own = read_indexers(config, count)
    config.notes.append("The unfinished pool of each indexer, less than one key a layer, is not counted.")
    types = one_for_each_layer(config, "layer_types", types, count)
    caches_of = {"linear_attention": state, **dict.fromkeys(("indexed_attention", "full_attention"), latents)}
    layers = by_type(config, "layer_types", types, caches_of)
    return [
        (*layer, index) if is_own and layer == latents else layer for layer, is_own in zip(layers, own, strict=True)
    ]


def _minimax_text(config: ModelConfig) -> Layers:
    """Read MiniMax-01. Seven of eight layers have lightning attention."""
    field = "layer_types" if config.has("layer_types") else "attn_type_list"
    types = config.texts("layer_types") or [
        "full_attention" if is_full else "linear_attention" for is_full in config.integers("attn_type_list") or []
    ]
    attention = read_attention(config)
    config.know("block_size")
    state = caches.lightning(config.integer("num_attention_heads"), attention.parts[0].size, SIXTEEN_BITS)
    return _hybrid(config, field, one_for_each_layer(config, field, types, read_layer_count(config)), attention, state)


def _bailing(config: ModelConfig) -> Layers:
    """Read Ling and Ring: GQA or MLA in the last layer of a group, lightning or Kimi delta attention in the others."""
    count, group, listed = read_layer_count(config), config.integer("layer_group_size"), config.texts("layer_types")
    types = every_nth(count, group, "linear_attention")
    config.refuse_if(
        count % group or listed not in (None, types),
        "layer_group_size",
        f"it must divide num_hidden_layers = {count} and fit layer_types",
    )
    heads, is_kda = config.integer("num_attention_heads"), config.has(_KDA_KERNEL)
    dim = config.integer("linear_head_dim", config.integer("head_dim"))  # Transformers saves a different head_dim
    config.refuse_if(
        is_kda == config.has("group_norm_size"),
        "layer_group_size",
        f"exactly one of {_KDA_KERNEL} and group_norm_size must state the linear layers",
    )
    config.know(
        *_LINEAR_FIELDS,
        *_LINEAR_DIMS,
        "kda_lower_bound",
        "kda_safe_gate",
        "no_kda_lora",
        "layer_norm_type",
    )
    state = (
        caches.kda(heads, dim, config.integer(_KDA_KERNEL), 4) if is_kda else caches.lightning(heads, dim, SIXTEEN_BITS)
    )
    attention = read_mla(config)[0] if has_mla(config) else read_attention(config)
    return _hybrid(config, "layer_types", types, attention, state)


def _kimi(config: ModelConfig) -> Layers:
    """Read Kimi Linear and K3: MLA in every fourth layer, Kimi delta attention in the others."""
    linear, count = config.child("linear_attn_config"), read_layer_count(config)
    full, delta = linear.integers("full_attn_layers") or [], linear.integers("kda_layers") or []
    linear.refuse_if(
        sorted(full + delta) != list(range(1, count + 1)),
        "kda_layers",
        f"with full_attn_layers it must name each of the layers 1 to {count} once",
    )
    state = caches.kda(
        linear.integer("num_heads"), linear.integer("head_dim"), linear.integer("short_conv_kernel_size"), 4
    )
    latents = read_mla(config)
    config.know("activation_situ_linear_beta", "attn_res_block_size", "mla_use_output_gate")
    config.know("layer_types", *_LINEAR_DIMS)  # they repeat linear_attn_config
    return [latents if layer in full else (state,) for layer in range(1, count + 1)]


def _nemotron_h(config: ModelConfig) -> Layers:
    """Read Nemotron-H: Mamba-2, attention and MLP layers in the order of a pattern."""
    is_pattern = config.has("hybrid_override_pattern")
    field = "hybrid_override_pattern" if is_pattern else "layers_block_type"
    types = list(config.text(field)) if is_pattern else config.texts(field) or []
    if len(types) != config.integer("num_hidden_layers", len(types) or None, most=LAYERS_MAX):
        raise config.wrong(field, f"it has {len(types)} entries and num_hidden_layers is {read_layer_count(config)}")
    state = caches.mamba2(
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        _state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    return _hybrid(config, field, types, read_attention(config), state)


def _falcon_h1(config: ModelConfig) -> Layers:
    """Read Falcon-H1. Every layer has attention and Mamba-2 in parallel."""
    config.know("mamba_d_ssm", "attention_in_multiplier", "mamba_use_mlp")
    return [(read_attention(config), _mamba2_of(config))] * read_layer_count(config)


def _bamba(config: ModelConfig) -> Layers:
    """Read Bamba: attention in the listed layers, Mamba-2 in the others."""
    count = read_layer_count(config)
    full = read_layer_numbers(config, "attn_layer_indices", count)
    state, attention = _mamba2_of(config), read_attention(config)
    return [(attention if layer in full else state,) for layer in range(count)]


def _granite_hybrid(config: ModelConfig) -> Layers:
    """Read Granite 4. A list says which layers are Mamba-2 and which attention; some models have only attention."""
    types = one_for_each_layer(config, "layer_types", config.texts("layer_types"), read_layer_count(config))
    state = _mamba2_of(config)
    return _hybrid(config, "layer_types", types, read_attention(config), state)


def _zamba2(config: ModelConfig) -> Layers:
    """Read Zamba2. All layers have Mamba-2; some begin with a shared attention block over twice the hidden size."""
    heads, hidden, count = (
        config.integer("num_attention_heads"),
        config.integer("hidden_size"),
        read_layer_count(config),
    )
    mamba_heads, inner = config.integer("n_mamba_heads"), config.integer("mamba_expand") * hidden
    types = one_for_each_layer(config, "layers_block_type", config.texts("layers_block_type"), count)
    dim = config.integer("attention_head_dim", 2 * hidden // heads)
    config.refuse_if(
        inner % mamba_heads or dim != 2 * hidden // heads or (2 * hidden) % heads,
        "attention_head_dim",
        "it must be 2 x hidden_size / num_attention_heads",
    )
    config.know(
        "attention_hidden_size", "hybrid_layer_ids", "kv_channels", "mamba_headdim", "num_mem_blocks",
        "num_query_groups", "use_shared_attention_adapter", "use_shared_mlp_adapter", "head_dim",
    )  # fmt: skip
    states, groups, kernel = (config.integer(key) for key in ("mamba_d_state", "mamba_ngroups", "mamba_d_conv"))
    state = caches.mamba2(mamba_heads, inner // mamba_heads, states, groups, kernel, THIRTY_TWO_BITS)
    attention = caches.full(read_kv_heads(config, heads, "num_key_value_heads"), dim)
    caches_of = {"mamba": (state,), "linear_attention": (state,), "hybrid": (attention, state)}
    return by_type(config, "layers_block_type", types, caches_of)


def _jamba(config: ModelConfig) -> Layers:
    """Read Jamba: attention at a fixed interval of layers, Mamba in the others."""
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    config.refuse_if(
        offset >= period, "attn_layer_offset", f"it must be less than attn_layer_period, which is {period}"
    )
    state = caches.mamba1(
        config.integer("mamba_expand") * config.integer("hidden_size"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        THIRTY_TWO_BITS,
    )
    attention = read_attention(config)
    return [(attention if layer % period == offset else state,) for layer in range(read_layer_count(config))]


def _lfm2(config: ModelConfig) -> Layers:
    """Read LFM2: attention in some layers, a short convolution in the others."""
    count, types, full = read_layer_count(config), config.texts("layer_types"), config.integers("full_attn_idxs")
    if types is None and full is not None:
        types = ["full_attention" if layer in set(full) else "conv" for layer in range(count)]
    types = one_for_each_layer(config, "layer_types", types, count)
    state = caches.short_convolution(
        config.integer("conv_dim", config.integer("hidden_size")), config.integer("conv_L_cache", least=2)
    )
    config.know("block_dim", "conv_dim_out", "num_heads")
    return _hybrid(config, "layer_types", types, read_attention(config), state)


def _recurrent_gemma(config: ModelConfig) -> Layers:
    """Read RecurrentGemma: a linear recurrence in two of three layers, attention with a window in the third."""
    pattern, count = config.texts("block_types") or ["recurrent", "recurrent", "attention"], read_layer_count(config)
    width = config.integer("lru_width", config.integer("hidden_size"))
    config.know("_block_types")
    windowed = with_window(config, read_attention(config), "attention_window_size")
    state = caches.rg_lru(width, config.integer("conv1d_width"))
    types = [pattern[layer % len(pattern)] for layer in range(count)]
    return by_type(config, "block_types", types, {"recurrent": (state,), "attention": (windowed,)})


def _mamba1(config: ModelConfig) -> Layers:
    """Read Mamba, which has no KV."""
    inner = config.integer("intermediate_size", config.integer("expand", 2) * config.integer("hidden_size"))
    state = caches.mamba1(inner, config.integer("state_size"), config.integer("conv_kernel"), THIRTY_TWO_BITS)
    return [(state,)] * read_layer_count(config)


def _mamba2(config: ModelConfig) -> Layers:
    """Read Mamba-2, which has no KV."""
    state = caches.mamba2(
        config.integer("num_heads"),
        config.integer("head_dim"),
        config.integer("state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        THIRTY_TWO_BITS,
    )
    return [(state,)] * read_layer_count(config)


def _mamba2_of(config: ModelConfig) -> LayerCache:
    """Return the state of Falcon-H1, Bamba or Granite 4. A head dimension of ``auto`` means inner size / heads."""
    heads = config.integer("mamba_n_heads")
    expand = config.integer("mamba_expand", 2)
    if config.values.get("mamba_d_head") == "auto":
        config.know("mamba_d_head")
        inner = expand * config.integer("hidden_size")
        config.refuse_if(inner % heads, "mamba_n_heads", f"it must divide mamba_expand x hidden_size, which is {inner}")
        dim = inner // heads
    else:
        dim = config.integer("mamba_d_head")
    states, groups, kernel = (config.integer(key) for key in ("mamba_d_state", "mamba_n_groups", "mamba_d_conv"))
    return caches.mamba2(heads, dim, states, groups, kernel, THIRTY_TWO_BITS)


def _state_bytes(config: ModelConfig, key: str) -> int:
    """Return the bytes per element of a state from the field `key`. The default is 4, as in the reference kernels."""
    dtype = config.text(key, "float32")
    config.refuse_if(dtype not in _STATE_BYTES, key, f"it must be one of {', '.join(_STATE_BYTES)}")
    return _STATE_BYTES[dtype]


def _hybrid(config: ModelConfig, field: str, types: Sequence[str], attention: LayerCache, state: LayerCache) -> Layers:
    """Return for each layer the caches of its type: attention, a state, or none for a layer with only an MLP."""
    caches_of: dict[str, tuple[LayerCache, ...]] = {
        **dict.fromkeys(("full_attention", "attention", "*"), (attention,)),
        **dict.fromkeys(("linear_attention", "mamba", "M", "conv"), (state,)),
        **dict.fromkeys(("moe", "mlp", "E", "-"), ()),
    }
    if "sliding_attention" in types:
        caches_of["sliding_attention"] = (with_window(config, attention, "sliding_window"),)
    return by_type(config, field, types, caches_of)


HYBRID_READERS: dict[str, Callable[[ModelConfig], Layers]] = {
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba1,
    "granitemoehybrid": _granite_hybrid,
    "glm5_next_text": _glm5_next,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm2,
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "minimax": _minimax_text,
    "minimax_text_01": _minimax_text,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _qwen_hybrid,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
    "qwen4_exp": _qwen4,
    "qwen4_exp_text": _qwen4,
    "recurrent_gemma": _recurrent_gemma,
    "zamba2": _zamba2,
}
"""The reader of each model type."""
