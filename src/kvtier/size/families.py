"""From a configuration to what each layer keeps: one reader for each family of models that has its own fields.

A model type without a reader of its own is read as plain attention, MLA or a mix of windows, by the fields it has. A
field that speaks of a cache we do not know is an error: a wrong size is worse than none.
"""

from collections.abc import Callable, Sequence

from kvtier.size import kinds
from kvtier.size.config import LAYERS_MAX, Config
from kvtier.size.kinds import SIXTEEN_BITS, THIRTY_TWO_BITS, Cache

Layers = list[tuple[Cache, ...]]
"""What each layer keeps, in the order of the layers."""

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
"""Where a config says no more: every n-th layer sees everything, the others a window (as Transformers has it)."""

_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""A sliding window, where there is one, is every layer's."""

_FOREIGN = (
    "attn_layer_period", "block_types", "cla_share_factor", "compress_ratios", "conv_L_cache", "index_kpool",
    "hybrid_override_pattern", "kv_source_layer_ids", "kv_source_layers", "layers_block_type", "linear_attn_config",
    "linear_num_value_heads", "mamba_d_state", "multi_query", "multi_query_group_num", "recurrent_block_type",
    "sconv_kernel_size", "sparse_attention_config", "ssm_cfg", "ssm_state_size", "state_size", "swa_kv_lora_rank",
)  # fmt: skip
"""Fields that speak of caches only some readers know."""


def read(config: Config) -> tuple[Layers, list[str]]:
    """What each layer of `config` keeps, and what one should know about it.

    Raises:
        ConfigError: a field is missing, wrong, contradicts another, or speaks of a cache we do not know.
    """
    notes: list[str] = []
    model_type = config.text("model_type")
    reader = _READERS.get(model_type)
    if config.has("per_layer_config") and reader not in {None, _gemma4}:
        raise config.wrong("per_layer_config", f"it is not known here for model type {model_type!r}")
    if reader is None:
        foreign = next((key for key in _FOREIGN if config.values.get(key)), None)
        if foreign is not None:
            known = ", ".join(sorted(_READERS))
            why = f"what a model of type {model_type!r} keeps for it is not known here; types with a reader: {known}"
            raise config.wrong(foreign, why)
        reader = _plain
    layers = reader(config, notes)
    drafts = max(config.integer(key, 0, least=0) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if drafts:
        plural = "s for speculative decoding are" if drafts > 1 else " for speculative decoding is"
        notes.append(f"{drafts} draft layer{plural} not counted; engines that keep a draft's KV add it.")
    return layers, notes


def _plain(config: Config, notes: list[str]) -> Layers:
    """Attention or MLA in every layer, windows and chunks where the layer types say so."""
    count = _layer_count(config)
    if config.has("attn_type_list") and set(config.integers("attn_type_list") or ()) != {1}:
        raise config.wrong("attn_type_list", "a model of this type must have attention (1) in every layer")
    types = _layer_types(config, count)
    if config.has("kv_lora_rank"):
        return _with_indexers(config, [_mla(config)] * count, notes)
    layers = [(_typed(each, _attention(each), kind),) for each, kind in zip(_each(config, count), types, strict=True)]
    return _shared(layers, types, config)


def _each(config: Config, count: int) -> list[Config]:
    """The configuration of each layer: `config`, with what `per_layer_config` changes of it."""
    if not config.has("per_layer_config"):
        return [config] * count
    changes = config.child("per_layer_config").values
    strange = next((key for key in changes if not key.isdecimal() or int(key) >= count), None)
    if strange is not None:
        raise config.wrong("per_layer_config", f"{strange!r} is none of the {count} layers")
    by_layer = {int(key): change for key, change in changes.items()}  # written "05" as well as "5"
    return [config.changed(by_layer.get(layer, {}), f"per_layer_config.{layer}") for layer in range(count)]


def _typed(config: Config, cache: Cache, kind: str) -> Cache:
    if kind in {"full_attention", "attention", "global_attention", "deepseek_sparse_attention"}:
        return cache
    if kind in {"sliding_attention", "local_attention"}:
        return kinds.window(cache, config.integer("sliding_window"))
    if kind == "chunked_attention":
        return kinds.chunked(cache, config.integer("attention_chunk_size"))
    raise config.wrong("layer_types", f"{kind!r} is not known here for model type {config.text('model_type')!r}")


def _layer_types(config: Config, count: int) -> list[str]:
    """The type of each layer: as listed, or by the rule that the model type has."""
    listed = config.texts("layer_types")
    if listed is not None:
        if len(listed) != count:
            raise config.wrong("layer_types", f"it has {len(listed)} entries and num_hidden_layers is {count}")
        return listed
    model_type = config.text("model_type")
    if not config.has("sliding_window"):
        return ["full_attention"] * count
    if config.has("use_sliding_window"):  # Qwen2 and Qwen3: the layers from max_window_layers on
        first = config.integer("max_window_layers", 0, least=0) if config.flag("use_sliding_window") else count
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    if model_type in _ALL_WINDOWED:
        return ["sliding_attention"] * count
    every = config.integer("sliding_window_pattern", _PATTERNS.get(model_type, 0), least=0)
    if not every:
        raise config.wrong("sliding_window", "layer_types or sliding_window_pattern must say which layers have it")
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(count)]


def _layer_count(config: Config) -> int:
    return config.integer("num_hidden_layers", most=LAYERS_MAX)


def _attention(config: Config, kv_heads: str = "num_key_value_heads", head_dim: str = "head_dim") -> Cache:
    """Keys and values by the fields named; the head dimension is read, and divided only where it is absent."""
    heads = config.integer("num_attention_heads")
    keep = config.integer(kv_heads, heads)
    if heads % keep:
        raise config.wrong(kv_heads, f"it must divide num_attention_heads, which is {heads}")
    if not config.has(head_dim):
        hidden = config.integer("hidden_size")
        if hidden % heads:
            raise config.wrong(
                "hidden_size", f"without {head_dim} it must be a multiple of num_attention_heads, {heads}"
            )
        return kinds.full(keep, hidden // heads)
    return kinds.full(keep, config.integer(head_dim))


def _mla(config: Config) -> tuple[Cache, ...]:
    return (kinds.mla(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", least=0)),)


def _with_indexers(config: Config, layers: Layers, notes: list[str]) -> Layers:
    """MLA layers with the keys of their indexers, where the model has some."""
    if not config.has("index_head_dim"):
        return layers
    types = config.texts("indexer_types") or ["full"] * len(layers)
    if len(types) != len(layers) or not set(types) <= {"full", "shared"}:
        raise config.wrong("indexer_types", f"it must have {len(layers)} entries, each full or shared")
    index = kinds.indexer(config.integer("index_head_dim"))
    if "shared" in types:
        notes.append(f"{types.count('shared')} layers use the choice of an earlier indexer and keep no index keys.")
    return [(*layer, index) if kind == "full" else layer for layer, kind in zip(layers, types, strict=True)]


def _shared(layers: Layers, types: Sequence[str], config: Config) -> Layers:
    """The last `num_kv_shared_layers` read the KV of earlier layers of their type."""
    count = config.integer("num_kv_shared_layers", 0, least=0, most=LAYERS_MAX)
    if not count:
        return layers
    own = len(layers) - count
    if own < 1 or not set(types[own:]) <= set(types[:own]):
        raise config.wrong("num_kv_shared_layers", f"of {len(layers)} layers, too few are left that keep a KV to share")
    return [*layers[:own], *([(kinds.shared(),)] * count)]


def _gemma4(config: Config, notes: list[str]) -> Layers:
    """Gemma 4: wide heads in the global layers, perhaps with the key as value; perhaps shared layers."""
    is_one = config.flag("attention_k_eq_v")
    if is_one:
        notes.append(
            "A global layer's value is its key, so one suffices; engines that keep the rotated key store both."
        )
    types = _layer_types(config, _layer_count(config))
    layers: Layers = []
    for each, kind in zip(_each(config, len(types)), types, strict=True):
        if kind != "full_attention":
            layers.append((_typed(each, _attention(each), kind),))
            continue
        heads = "num_global_key_value_heads" if config.has("num_global_key_value_heads") else "num_key_value_heads"
        wide = _attention(each, heads, "global_head_dim" if config.has("global_head_dim") else "head_dim")
        layers.append((kinds.one_for_both(wide) if is_one else wide,))
    return _shared(layers, types, config)


def _llama4(config: Config, notes: list[str]) -> Layers:
    """Llama 4: layers with rotary embedding see their chunk, every fourth sees everything."""
    del notes
    count = _layer_count(config)
    types = config.texts("layer_types")
    if types is None:
        rotary = config.integers("no_rope_layers") or [int((layer + 1) % 4 != 0) for layer in range(count)]
        types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]
    if len(types) != count:
        raise config.wrong("no_rope_layers", f"it has {len(types)} entries and num_hidden_layers is {count}")
    return [(_typed(config, _attention(config), kind),) for kind in types]


def _mimo_v2(config: Config, notes: list[str]) -> Layers:
    """MiMo V2: other heads and dimensions in the windowed layers, and values narrower than keys."""
    del notes
    wide = kinds.full(config.integer("num_key_value_heads"), config.integer("head_dim"), config.integer("v_head_dim"))
    narrow = kinds.full(
        config.integer("swa_num_key_value_heads"), config.integer("swa_head_dim"), config.integer("swa_v_head_dim")
    )
    windowed = kinds.window(narrow, config.integer("sliding_window"))
    pattern = config.integers("hybrid_layer_pattern") or []
    if len(pattern) != _layer_count(config):
        raise config.wrong("hybrid_layer_pattern", f"it must have num_hidden_layers = {_layer_count(config)} entries")
    return [(windowed if is_windowed else wide,) for is_windowed in pattern]


def _falcon(config: Config, notes: list[str]) -> Layers:
    """Falcon and GPT BigCode: one KV head, unless Falcon's new decoder says otherwise."""
    del notes
    heads = config.integer("num_attention_heads")
    keep = 1 if config.flag("multi_query", default=True) else heads
    if config.flag("new_decoder_architecture"):
        keep = config.integer("num_kv_heads", heads)
    return [(kinds.full(keep, config.integer("hidden_size") // heads),)] * _layer_count(config)


def _minimax_m3(config: Config, notes: list[str]) -> Layers:
    """MiniMax M3: GQA everywhere, and index keys where the attention is sparse."""
    del notes
    sparse = config.child("sparse_attention_config")
    marks = sparse.integers("sparse_attention_freq") or []
    if len(marks) != _layer_count(config):
        raise sparse.wrong("sparse_attention_freq", f"it must have num_hidden_layers = {_layer_count(config)} entries")
    plain, index = _attention(config), kinds.indexer(sparse.integer("sparse_index_dim"))
    return [(plain, index) if is_sparse else (plain,) for is_sparse in marks]


def _deepseek_v4(config: Config, notes: list[str]) -> Layers:
    """DeepSeek V4: compressed latents at two rates, an indexer beside the finer one, a window in every layer."""
    ratios, count = config.integers("compress_ratios") or [], _layer_count(config)
    if len(ratios) < count:
        raise config.wrong("compress_ratios", f"it must have at least num_hidden_layers = {count} entries")
    dim, rotary = config.integer("head_dim"), config.integer("qk_rope_head_dim")
    if rotary >= dim:
        raise config.wrong("qk_rope_head_dim", f"it must be less than head_dim, which is {dim}")
    window = kinds.latent_window(dim, rotary, config.integer("sliding_window"))
    layers: Layers = []
    for ratio in ratios[:count]:
        kept = (kinds.compressed(dim, rotary, ratio),) if ratio else ()
        index = (kinds.indexer(config.integer("index_head_dim"), ratio),) if ratio == 4 else ()
        layers.append((*kept, *index, window))
    notes.append("What compressors hold of an unfinished entry, less than one entry a layer, is not counted.")
    return layers


def _state_bytes(config: Config, *keys: str) -> int:
    key = next((key for key in keys if config.has(key)), "")
    if not key:
        return THIRTY_TWO_BITS  # as the reference kernels keep it
    if config.text(key) not in _STATE_BYTES:
        raise config.wrong(key, f"it must be one of {', '.join(_STATE_BYTES)}")
    return _STATE_BYTES[config.text(key)]


def _hybrid(types: Sequence[str], *, attention: tuple[Cache, ...], state: Cache, field: str, config: Config) -> Layers:
    """Layers by type: attention, state, both, or neither (an MLP alone)."""
    by_type: dict[str, tuple[Cache, ...]] = {
        **dict.fromkeys(("full_attention", "attention", "*"), attention),
        **dict.fromkeys(("linear_attention", "mamba", "M"), (state,)),
        **dict.fromkeys(("moe", "mlp", "E", "-"), ()),
    }
    unknown = next((kind for kind in types if kind not in by_type), None)
    if unknown is not None:
        raise config.wrong(field, f"layer type {unknown!r} is not known here")
    return [by_type[kind] for kind in types]


def _qwen_hybrid(config: Config, notes: list[str]) -> Layers:
    """Qwen3-Next and 3.5: a gated delta net in three layers of four."""
    del notes
    count, types = _layer_count(config), config.texts("layer_types")
    every = config.integer("full_attention_interval", 4)
    by_rule = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
    types = by_rule if types is None else types
    if len(types) != count or (config.has("full_attention_interval") and types != by_rule):
        raise config.wrong(
            "layer_types", f"it contradicts num_hidden_layers = {count} or full_attention_interval = {every}"
        )
    state = kinds.gated_delta_net(
        (config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")),
        (config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")),
        config.integer("linear_conv_kernel_dim", least=1),
        _state_bytes(config, "mamba_ssm_dtype"),
    )
    return _hybrid(types, attention=(_attention(config),), state=state, field="layer_types", config=config)


def _kimi(config: Config, notes: list[str]) -> Layers:
    """Kimi Linear and K3: MLA in every fourth layer, Kimi delta attention in the others."""
    del notes
    linear, count = config.child("linear_attn_config"), _layer_count(config)
    whole, delta = linear.integers("full_attn_layers") or [], linear.integers("kda_layers") or []
    if sorted(whole + delta) != list(range(1, count + 1)):
        raise linear.wrong("kda_layers", f"with full_attn_layers it must name each of the layers 1 to {count} once")
    state = kinds.kda(
        linear.integer("num_heads"), linear.integer("head_dim"), linear.integer("short_conv_kernel_size"), 4
    )
    layers = _mla(config)
    return [layers if layer in whole else (state,) for layer in range(1, count + 1)]


def _nemotron_h(config: Config, notes: list[str]) -> Layers:
    """Nemotron-H: Mamba-2, attention and MLP layers in the order of a pattern."""
    del notes
    field = "hybrid_override_pattern" if config.has("hybrid_override_pattern") else "layers_block_type"
    types = list(config.text(field)) if field == "hybrid_override_pattern" else config.texts(field) or []
    if len(types) != config.integer("num_hidden_layers", len(types) or None, most=LAYERS_MAX):
        raise config.wrong(field, f"it has {len(types)} entries and num_hidden_layers is {_layer_count(config)}")
    state = kinds.mamba2(
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        _state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    dim = "head_dim" if config.has("head_dim") else "attention_head_dim"
    return _hybrid(types, attention=(_attention(config, head_dim=dim),), state=state, field=field, config=config)


def _falcon_h1(config: Config, notes: list[str]) -> Layers:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    del notes
    state = kinds.mamba2(
        config.integer("mamba_n_heads"),
        config.integer("mamba_d_head"),
        config.integer("mamba_d_state"),
        config.integer("mamba_n_groups"),
        config.integer("mamba_d_conv"),
        _state_bytes(config),
    )
    return [(_attention(config), state)] * _layer_count(config)


def _jamba(config: Config, notes: list[str]) -> Layers:
    """Jamba: one attention in every so many layers, Mamba in the others."""
    del notes
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise config.wrong("attn_layer_offset", f"it must be less than attn_layer_period, which is {period}")
    state = kinds.mamba1(
        config.integer("mamba_expand") * config.integer("hidden_size"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        _state_bytes(config),
    )
    types = ["attention" if layer % period == offset else "mamba" for layer in range(_layer_count(config))]
    return _hybrid(types, attention=(_attention(config),), state=state, field="attn_layer_period", config=config)


def _mamba1(config: Config, notes: list[str]) -> Layers:
    """Mamba alone: no KV at all."""
    del notes
    inner = config.integer("intermediate_size", config.integer("expand", 2) * config.integer("hidden_size"))
    state = kinds.mamba1(inner, config.integer("state_size"), config.integer("conv_kernel"), _state_bytes(config))
    return [(state,)] * _layer_count(config)


def _mamba2(config: Config, notes: list[str]) -> Layers:
    """Mamba-2 alone: no KV at all."""
    del notes
    state = kinds.mamba2(
        config.integer("num_heads"),
        config.integer("head_dim"),
        config.integer("state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        _state_bytes(config),
    )
    return [(state,)] * _layer_count(config)


def _minimax_text(config: Config, notes: list[str]) -> Layers:
    """MiniMax-01: lightning attention in seven layers of eight."""
    del notes
    field = "layer_types" if config.has("layer_types") else "attn_type_list"
    types = config.texts("layer_types") or [
        "full_attention" if is_full else "linear_attention" for is_full in config.integers("attn_type_list") or []
    ]
    if len(types) != _layer_count(config):
        raise config.wrong(field, f"it must have num_hidden_layers = {_layer_count(config)} entries")
    attention = _attention(config)
    state = kinds.lightning(config.integer("num_attention_heads"), attention.parts[0].size, SIXTEEN_BITS)
    return _hybrid(types, attention=(attention,), state=state, field=field, config=config)


def _nemotron_nas(config: Config, notes: list[str]) -> Layers:
    """Nemotron found by architecture search: each layer has its own group size, or no attention at all."""
    del notes
    blocks, heads = config.objects("block_configs") or [], config.integer("num_attention_heads")
    if len(blocks) != _layer_count(config):
        raise config.wrong("block_configs", f"it must have num_hidden_layers = {_layer_count(config)} entries")
    dim = config.integer("hidden_size") // heads
    layers: Layers = []
    for block in blocks:
        attention = block.child("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            layers.append(())
            continue
        layers.append((kinds.full(heads // attention.integer("n_heads_in_group", most=heads), dim),))
    return layers


_READERS: dict[str, Callable[[Config, list[str]], Layers]] = {
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
