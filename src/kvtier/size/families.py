"""From a configuration to the caches of each layer: one reader for each family of models with fields of its own.

Other model types are read as plain attention, MLA or a mix of windows, by the fields they have. A field that describes
an unknown cache is an error: a wrong size is worse than none.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.size import caches
from kvtier.size.caches import SIXTEEN_BITS, THIRTY_TWO_BITS, LayerCache
from kvtier.size.model_config import LAYERS_MAX, ModelConfig

Layers = list[tuple[LayerCache, ...]]
"""The caches of each layer, in the order of the layers."""

_STATE_BYTES = {"float32": THIRTY_TWO_BITS, "bfloat16": SIXTEEN_BITS, "float16": SIXTEEN_BITS}

_PATTERNS: dict[str, int] = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
}
"""Default interval of full-attention layers between windowed ones, as in Transformers."""

_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types in which `sliding_window` applies to every layer."""

_FOREIGN = (
    "attn_layer_period", "block_types", "cla_share_factor", "compress_ratios", "conv_L_cache", "index_kpool",
    "hybrid_override_pattern", "kv_source_layer_ids", "kv_source_layers", "layers_block_type", "linear_attn_config",
    "linear_num_value_heads", "mamba_d_state", "multi_query", "multi_query_group_num", "recurrent_block_type",
    "sconv_kernel_size", "sparse_attention_config", "ssm_cfg", "ssm_state_size", "state_size", "swa_kv_lora_rank",
)  # fmt: skip
"""Fields that describe caches which only some readers know."""

_Item = TypeVar("_Item")


def read_layers(config: ModelConfig) -> Layers:
    """The caches of each layer of `config`; remarks about them go to `config.notes`.

    Raises:
        ConfigError: a field is missing, wrong, contradicts another, or describes an unknown cache.
    """
    model_type = config.text("model_type")
    reader = _READERS.get(model_type)
    if config.has("per_layer_config") and reader not in {None, _gemma4}:
        raise config.wrong("per_layer_config", f"it is not known here for model type {model_type!r}")
    if reader is None:
        foreign = next((key for key in _FOREIGN if config.values.get(key)), None)
        if foreign is not None:
            known = ", ".join(sorted(_READERS))
            why = f"the cache of a model of type {model_type!r} is not known here; types with a reader: {known}"
            raise config.wrong(foreign, why)
        reader = _plain
    layers = reader(config)
    drafts = max(config.integer(key, 0, least=0) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if drafts:
        plural = "s for speculative decoding are" if drafts > 1 else " for speculative decoding is"
        config.notes.append(f"{drafts} draft layer{plural} not counted; engines that keep a draft's KV add it.")
    return layers


def _plain(config: ModelConfig) -> Layers:
    """Attention or MLA in every layer, with windows and chunks by the layer types."""
    if set(config.integers("attn_type_list") or ()) - {1}:
        raise config.wrong("attn_type_list", "a model of this type must have attention (1) in every layer")
    types = _layer_types(config)
    if config.has("kv_lora_rank"):
        return _with_indexers(config, [_mla(config)] * len(types))
    each_layer = zip(_layer_configs(config), types, strict=True)
    return _shared(config, [(_typed(layer, _attention(layer), kind),) for layer, kind in each_layer], types)


def _layer_configs(config: ModelConfig) -> list[ModelConfig]:
    """The configuration of each layer: `config` with the changes of `per_layer_config`."""
    count = _layer_count(config)
    if not config.has("per_layer_config"):
        return [config] * count
    changes = config.child("per_layer_config").values
    strange = next((key for key in changes if not key.isdecimal() or int(key) >= count), None)
    if strange is not None:
        raise config.wrong("per_layer_config", f"{strange!r} is none of the {count} layers")
    layers = [config] * count
    for key, change in changes.items():
        layers[int(key)] = config.changed(change, f"per_layer_config.{key}")
    return layers


def _typed(config: ModelConfig, cache: LayerCache, kind: str) -> LayerCache:
    if kind in {"full_attention", "attention", "global_attention", "deepseek_sparse_attention"}:
        return cache
    if kind in {"sliding_attention", "local_attention"}:
        return caches.window(cache, config.integer("sliding_window"))
    if kind == "chunked_attention":
        return caches.chunked(cache, config.integer("attention_chunk_size"))
    raise config.wrong("layer_types", f"{kind!r} is not known here for model type {config.text('model_type')!r}")


def _layer_types(config: ModelConfig) -> list[str]:
    """The type of each layer: as listed, or by the rule of the model type."""
    count = _layer_count(config)
    listed = config.texts("layer_types")
    if listed is not None:
        return _per_layer(config, "layer_types", listed, count)
    if not config.has("sliding_window"):
        return ["full_attention"] * count
    if config.has("use_sliding_window"):  # Qwen2 and Qwen3: the layers from max_window_layers on
        first = config.integer("max_window_layers", 0, least=0) if config.flag("use_sliding_window") else count
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    model_type = config.text("model_type")
    if model_type in _ALL_WINDOWED:
        return ["sliding_attention"] * count
    every = config.integer("sliding_window_pattern", _PATTERNS.get(model_type, 0), least=0)
    if not every:
        raise config.wrong("sliding_window", "layer_types or sliding_window_pattern must say which layers have it")
    return _every_nth(count, every, "sliding_attention")


def _every_nth(count: int, every: int, other: str) -> list[str]:
    """Full attention in every n-th layer, `other` in the rest."""
    return [other if (layer + 1) % every else "full_attention" for layer in range(count)]


def _per_layer(config: ModelConfig, key: str, items: list[_Item] | None, count: int) -> list[_Item]:
    """`items` of the field `key`, one for each of `count` layers."""
    if items is None or len(items) != count:
        entries = "" if items is None else f"it has {len(items)} entries and "
        raise config.wrong(key, f"{entries}it must have num_hidden_layers = {count} of them")
    return items


def _layer_count(config: ModelConfig) -> int:
    return config.integer("num_hidden_layers", most=LAYERS_MAX)


def _attention(config: ModelConfig, kv_heads: str = "num_key_value_heads", head_dim: str = "head_dim") -> LayerCache:
    """Keys and values by the fields named; without `head_dim`, hidden size / heads."""
    heads = config.integer("num_attention_heads")
    kept_heads = config.integer(kv_heads, heads)
    if heads % kept_heads:
        raise config.wrong(kv_heads, f"it must divide num_attention_heads, which is {heads}")
    if config.has(head_dim):
        return caches.full(kept_heads, config.integer(head_dim))
    hidden = config.integer("hidden_size")
    if hidden % heads:
        raise config.wrong("hidden_size", f"without {head_dim} it must be a multiple of num_attention_heads, {heads}")
    return caches.full(kept_heads, hidden // heads)


def _mla(config: ModelConfig) -> tuple[LayerCache, ...]:
    return (caches.mla(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", least=0)),)


def _with_indexers(config: ModelConfig, layers: Layers) -> Layers:
    """MLA layers with the keys of their indexers, where the model has some."""
    if not config.has("index_head_dim"):
        return layers
    types = config.texts("indexer_types") or ["full"] * len(layers)
    if len(types) != len(layers) or not set(types) <= {"full", "shared"}:
        raise config.wrong("indexer_types", f"it must have {len(layers)} entries, each full or shared")
    index = caches.indexer(config.integer("index_head_dim"))
    if "shared" in types:
        shared = types.count("shared")
        config.notes.append(f"{shared} layers use the choice of an earlier indexer and keep no index keys.")
    return [(*layer, index) if kind == "full" else layer for layer, kind in zip(layers, types, strict=True)]


def _shared(config: ModelConfig, layers: Layers, types: Sequence[str]) -> Layers:
    """The last `num_kv_shared_layers` read the KV of earlier layers of their type."""
    count = config.integer("num_kv_shared_layers", 0, least=0, most=LAYERS_MAX)
    own = len(layers) - count
    if count and (own < 1 or not set(types[own:]) <= set(types[:own])):
        raise config.wrong("num_kv_shared_layers", f"of {len(layers)} layers, too few keep a KV to share")
    return [*layers[:own], *([(caches.shared(),)] * count)]


def _gemma4(config: ModelConfig) -> Layers:
    """Gemma 4: wide heads in the global layers, perhaps with the key as value; perhaps shared layers."""
    key_is_value = config.flag("attention_k_eq_v")
    if key_is_value:
        config.notes.append(
            "A global layer's value is its key, so one suffices; engines that keep the rotated key store both."
        )
    types = _layer_types(config)
    layers: Layers = []
    for layer, kind in zip(_layer_configs(config), types, strict=True):
        if kind != "full_attention":
            layers.append((_typed(layer, _attention(layer), kind),))
            continue
        heads = "num_global_key_value_heads" if config.has("num_global_key_value_heads") else "num_key_value_heads"
        wide = _attention(layer, heads, "global_head_dim" if config.has("global_head_dim") else "head_dim")
        layers.append((caches.key_as_value(wide) if key_is_value else wide,))
    return _shared(config, layers, types)


def _llama4(config: ModelConfig) -> Layers:
    """Llama 4: chunked attention in layers with rotary embedding, full attention in every fourth layer."""
    count = _layer_count(config)
    types = config.texts("layer_types")
    if types is None:
        rotary = config.integers("no_rope_layers")
        types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary or ()]
        types = types or _every_nth(count, 4, "chunked_attention")
    return [(_typed(config, _attention(config), kind),) for kind in _per_layer(config, "no_rope_layers", types, count)]


def _mimo_v2(config: ModelConfig) -> Layers:
    """MiMo V2: other heads and dimensions in the windowed layers, and values narrower than keys."""
    wide = caches.full(config.integer("num_key_value_heads"), config.integer("head_dim"), config.integer("v_head_dim"))
    narrow = caches.full(
        config.integer("swa_num_key_value_heads"), config.integer("swa_head_dim"), config.integer("swa_v_head_dim")
    )
    windowed = caches.window(narrow, config.integer("sliding_window"))
    pattern = config.integers("hybrid_layer_pattern")
    return [
        (windowed if is_windowed else wide,)
        for is_windowed in _per_layer(config, "hybrid_layer_pattern", pattern, _layer_count(config))
    ]


def _falcon(config: ModelConfig) -> Layers:
    """Falcon and GPT BigCode: one KV head, unless Falcon's new decoder sets another number."""
    heads = config.integer("num_attention_heads")
    kept_heads = 1 if config.flag("multi_query", default=True) else heads
    if config.flag("new_decoder_architecture"):
        kept_heads = config.integer("num_kv_heads", heads)
    return [(caches.full(kept_heads, config.integer("hidden_size") // heads),)] * _layer_count(config)


def _minimax_m3(config: ModelConfig) -> Layers:
    """MiniMax M3: GQA in every layer, and index keys where the attention is sparse."""
    sparse = config.child("sparse_attention_config")
    plain, index = _attention(config), caches.indexer(sparse.integer("sparse_index_dim"))
    marks = sparse.integers("sparse_attention_freq")
    return [
        (plain, index) if is_sparse else (plain,)
        for is_sparse in _per_layer(sparse, "sparse_attention_freq", marks, _layer_count(config))
    ]


def _deepseek_v4(config: ModelConfig) -> Layers:
    """DeepSeek V4: compressed latents at two rates, an indexer beside the finer one, a window in every layer."""
    ratios, count = config.integers("compress_ratios") or [], _layer_count(config)
    if len(ratios) < count:
        raise config.wrong("compress_ratios", f"it must have at least num_hidden_layers = {count} entries")
    dim, rotary = config.integer("head_dim"), config.integer("qk_rope_head_dim")
    if rotary >= dim:
        raise config.wrong("qk_rope_head_dim", f"it must be less than head_dim, which is {dim}")
    window = caches.latent_window(dim, rotary, config.integer("sliding_window"))
    layers: Layers = []
    for ratio in ratios[:count]:
        latents = (caches.compressed(dim, rotary, ratio),) if ratio else ()
        index = (caches.indexer(config.integer("index_head_dim"), ratio),) if ratio == 4 else ()
        layers.append((*latents, *index, window))
    config.notes.append("The unfinished entry of each compressor, less than one entry a layer, is not counted.")
    return layers


def _state_bytes(config: ModelConfig, key: str) -> int:
    """Bytes of a state's element by the field `key`; 4 where it is missing, as in the reference kernels."""
    dtype = config.text(key, "float32")
    if dtype not in _STATE_BYTES:
        raise config.wrong(key, f"it must be one of {', '.join(_STATE_BYTES)}")
    return _STATE_BYTES[dtype]


def _hybrid(config: ModelConfig, field: str, types: Sequence[str], attention: LayerCache, state: LayerCache) -> Layers:
    """Layers by type: attention, state, or neither (an MLP alone)."""
    by_type: dict[str, tuple[LayerCache, ...]] = {
        **dict.fromkeys(("full_attention", "attention", "*"), (attention,)),
        **dict.fromkeys(("linear_attention", "mamba", "M"), (state,)),
        **dict.fromkeys(("moe", "mlp", "E", "-"), ()),
    }
    unknown = next((kind for kind in types if kind not in by_type), None)
    if unknown is not None:
        raise config.wrong(field, f"layer type {unknown!r} is not known here")
    return [by_type[kind] for kind in types]


def _qwen_hybrid(config: ModelConfig) -> Layers:
    """Qwen3-Next and 3.5: a gated delta net in three layers of four."""
    count, listed = _layer_count(config), config.texts("layer_types")
    every = config.integer("full_attention_interval", 4)
    by_rule = _every_nth(count, every, "linear_attention")
    types = by_rule if listed is None else listed
    if len(types) != count or (config.has("full_attention_interval") and types != by_rule):
        raise config.wrong(
            "layer_types", f"it contradicts num_hidden_layers = {count} or full_attention_interval = {every}"
        )
    state = caches.gated_delta_net(
        (config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")),
        (config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")),
        config.integer("linear_conv_kernel_dim", least=1),
        _state_bytes(config, "mamba_ssm_dtype"),
    )
    return _hybrid(config, "layer_types", types, _attention(config), state)


def _kimi(config: ModelConfig) -> Layers:
    """Kimi Linear and K3: MLA in every fourth layer, Kimi delta attention in the others."""
    linear, count = config.child("linear_attn_config"), _layer_count(config)
    full, delta = linear.integers("full_attn_layers") or [], linear.integers("kda_layers") or []
    if sorted(full + delta) != list(range(1, count + 1)):
        raise linear.wrong("kda_layers", f"with full_attn_layers it must name each of the layers 1 to {count} once")
    state = caches.kda(
        linear.integer("num_heads"), linear.integer("head_dim"), linear.integer("short_conv_kernel_size"), 4
    )
    latents = _mla(config)
    return [latents if layer in full else (state,) for layer in range(1, count + 1)]


def _nemotron_h(config: ModelConfig) -> Layers:
    """Nemotron-H: Mamba-2, attention and MLP layers in the order of a pattern."""
    is_pattern = config.has("hybrid_override_pattern")
    field = "hybrid_override_pattern" if is_pattern else "layers_block_type"
    types = list(config.text(field)) if is_pattern else config.texts(field) or []
    if len(types) != config.integer("num_hidden_layers", len(types) or None, most=LAYERS_MAX):
        raise config.wrong(field, f"it has {len(types)} entries and num_hidden_layers is {_layer_count(config)}")
    state = caches.mamba2(
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        _state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    attention = _attention(config, head_dim="head_dim" if config.has("head_dim") else "attention_head_dim")
    return _hybrid(config, field, types, attention, state)


def _falcon_h1(config: ModelConfig) -> Layers:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    state = caches.mamba2(
        config.integer("mamba_n_heads"),
        config.integer("mamba_d_head"),
        config.integer("mamba_d_state"),
        config.integer("mamba_n_groups"),
        config.integer("mamba_d_conv"),
        THIRTY_TWO_BITS,
    )
    return [(_attention(config), state)] * _layer_count(config)


def _jamba(config: ModelConfig) -> Layers:
    """Jamba: attention at a fixed interval of layers, Mamba in the others."""
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise config.wrong("attn_layer_offset", f"it must be less than attn_layer_period, which is {period}")
    state = caches.mamba1(
        config.integer("mamba_expand") * config.integer("hidden_size"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        THIRTY_TWO_BITS,
    )
    attention = _attention(config)
    return [(attention if layer % period == offset else state,) for layer in range(_layer_count(config))]


def _mamba1(config: ModelConfig) -> Layers:
    """Mamba alone: no KV at all."""
    inner = config.integer("intermediate_size", config.integer("expand", 2) * config.integer("hidden_size"))
    state = caches.mamba1(inner, config.integer("state_size"), config.integer("conv_kernel"), THIRTY_TWO_BITS)
    return [(state,)] * _layer_count(config)


def _mamba2(config: ModelConfig) -> Layers:
    """Mamba-2 alone: no KV at all."""
    state = caches.mamba2(
        config.integer("num_heads"),
        config.integer("head_dim"),
        config.integer("state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        THIRTY_TWO_BITS,
    )
    return [(state,)] * _layer_count(config)


def _minimax_text(config: ModelConfig) -> Layers:
    """MiniMax-01: lightning attention in seven layers of eight."""
    field = "layer_types" if config.has("layer_types") else "attn_type_list"
    types = config.texts("layer_types") or [
        "full_attention" if is_full else "linear_attention" for is_full in config.integers("attn_type_list") or []
    ]
    attention = _attention(config)
    state = caches.lightning(config.integer("num_attention_heads"), attention.parts[0].size, SIXTEEN_BITS)
    return _hybrid(config, field, _per_layer(config, field, types, _layer_count(config)), attention, state)


def _nemotron_nas(config: ModelConfig) -> Layers:
    """Nemotron found by architecture search: each layer has its own group size, or no attention at all."""
    heads = config.integer("num_attention_heads")
    dim = config.integer("hidden_size") // heads
    layers: Layers = []
    for block in _per_layer(config, "block_configs", config.objects("block_configs"), _layer_count(config)):
        attention = block.child("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            layers.append(())
        else:
            layers.append((caches.full(heads // attention.integer("n_heads_in_group", most=heads), dim),))
    return layers


_READERS: dict[str, Callable[[ModelConfig], Layers]] = {
    "deepseek_v4": _deepseek_v4,
    "falcon": _falcon,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba1,
    "gemma4_text": _gemma4,
    "gpt_bigcode": _falcon,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "llama4_text": _llama4,
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "mimo_v2_flash": _mimo_v2,
    "minimax": _minimax_text,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "minimax_text_01": _minimax_text,
    "nemotron-nas": _nemotron_nas,
    "nemotron_h": _nemotron_h,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
}
