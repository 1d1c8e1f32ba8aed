"""From a configuration to the caches of each layer: one reader for each family of models with fields of its own.

Other model types are read as plain attention, MLA or a mix of windows, by the fields they have. A reader marks the
fields that it understands. A field that is left and looks as if it described a cache is an error: a wrong size is worse
than none.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TypeVar

from kvtier.errors import ConfigError
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
    "exaone4": 4,
    "olmo3": 4,
}
"""Default interval of full-attention layers between windowed ones, as in Transformers."""

_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types in which `sliding_window` applies to every layer."""

_ENCODERS = {
    "albert", "bert", "bert-generation", "big_bird", "camembert", "clip", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie", "esm", "eurobert", "hubert", "layoutlm", "layoutlmv3", "longformer", "modernbert",
    "mpnet", "new", "nomic_bert", "rembert", "roberta", "roformer", "siglip", "siglip2", "vit", "wav2vec2",
    "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
"""Model types that read all tokens at once and keep no KV."""

_FIELDS_NAMED = 8
"""Fields that the message about unknown ones names."""

_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Numbers of draft layers."""

_WINDOW_FIELDS = (
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window", "max_window_layers",
)  # fmt: skip
_MLA_FIELDS = (
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "num_key_value_heads",
    "head_dim", "mla_use_nope", "mla_scale_q_lora", "mla_scale_kv_lora",
)  # fmt: skip
_INDEX_FIELDS = (
    "index_n_heads",
    "index_topk",
    "index_topk_freq",
    "index_skip_topk_offset",
    "indexer_rope_interleave",
    "index_share_for_mtp_iteration",
)
_LINEAR_FIELDS = ("group_norm_size", "linear_silu", "linear_rope", "linear_mode")
"""Fields that a reader understands without needing their values."""

_Item = TypeVar("_Item")


def read_layers(config: ModelConfig) -> Layers:
    """The caches of each layer of `config`; remarks about them go to `config.notes`.

    Raises:
        ConfigError: a field is missing, wrong, contradicts another, or may describe a cache and is not understood.
    """
    model_type = config.text("model_type")
    _refuse_other_kinds(config, model_type)
    config.defaults = class_defaults(model_type, is_part=config.is_part)
    is_params = not model_type and {"dim", "n_layers", "n_heads"} <= config.values.keys()
    layers = (_mistral_params if is_params else _READERS.get(model_type, _plain))(config)
    drafts = max(config.integer(key, 0, least=0) for key in _DRAFTS)
    config.know("num_attention_heads", "is_causal")
    unknown = config.unknown()
    if unknown:
        raise ConfigError(
            f"{config.origin}: not understood for model type {model_type!r}: {_listed(unknown)}; "
            "these fields may change what is cached"
        )
    if drafts:
        plural = "s for speculative decoding are" if drafts > 1 else " for speculative decoding is"
        config.notes.append(f"{drafts} draft layer{plural} not counted; engines that keep a draft's KV add it.")
    if config.assumed:
        names = ", ".join(dict.fromkeys(config.assumed))
        config.notes.append(f"The file omits {names}: the defaults of class {model_type} in Transformers stand in.")
    return layers


def class_defaults(model_type: str, *, is_part: bool) -> Mapping[str, object]:
    """Values of fields that a file of this type omits, as Transformers fills them in.

    A file of its own states its shape: only the head dimension and the rule for the KV heads stand in there.
    """
    found = all_class_defaults().get(model_type, {})
    if is_part:
        return found
    return {key: value for key, value in found.items() if key == "head_dim" or isinstance(value, str)}


@cache
def all_class_defaults() -> Mapping[str, Mapping[str, object]]:
    """Model type to field to value; a text is the name of the field whose value stands in."""
    return tomllib.loads((files("kvtier.size") / "class_defaults.toml").read_text(encoding="utf-8"))


def _refuse_other_kinds(config: ModelConfig, model_type: str) -> None:
    """Refuse models that keep no KV for each token, with the reason."""
    names = config.texts("architectures") or []
    if model_type.startswith("rwkv"):
        raise config.wrong("model_type", "RWKV keeps a state and no KV, and its states are not known here")
    if config.flag("is_encoder_decoder"):
        raise config.wrong("is_encoder_decoder", "the KV of encoder-decoders depends on two lengths; not supported")
    is_encoder = any(name.endswith(("ForMaskedLM", "EncoderModel")) for name in names)
    if model_type in _ENCODERS or is_encoder or config.values.get("is_causal") is False:
        raise config.wrong("model_type", "an encoder reads all tokens at once and keeps no KV")
    config.know("use_bidirectional_attention")
    if config.values.get("use_bidirectional_attention") is True:
        raise config.wrong("use_bidirectional_attention", "an encoder reads all tokens at once and keeps no KV")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FIELDS_NAMED} more" if len(names) > _FIELDS_NAMED else ""
    return ", ".join(repr(name) for name in names[:_FIELDS_NAMED]) + more


def _plain(config: ModelConfig) -> Layers:
    """Attention or MLA in every layer, with windows and chunks by the layer types."""
    if set(config.integers("attn_type_list") or ()) - {1}:
        raise config.wrong("attn_type_list", "a model of this type must have attention (1) in every layer")
    types = _layer_types(config)
    if _is_mla(config):
        (latents,) = _mla(config)
        return _with_indexers(config, [(_typed(config, latents, kind),) for kind in types])
    heads = config.integers("num_key_value_heads_per_layer")
    if heads is not None:
        config.know("num_key_value_heads")
        changes = [
            {"num_key_value_heads": each}
            for each in _per_layer(config, "num_key_value_heads_per_layer", heads, len(types))
        ]
        configs = [config.changed(change, "num_key_value_heads_per_layer") for change in changes]
    else:
        configs = _layer_configs(config)
    each_layer = zip(configs, types, strict=True)
    return _shared(config, [(_typed(layer, _attention(layer), kind),) for layer, kind in each_layer], types)


def _layer_configs(config: ModelConfig) -> list[ModelConfig]:
    """The configuration of each layer: `config` with the changes of `per_layer_config`."""
    count = _layer_count(config)
    if not config.has("per_layer_config"):
        return [config] * count
    part = config.child("per_layer_config")
    part.know(*part.values)  # the configuration of each layer has a record of its own
    changes = part.values
    strange = next((key for key in changes if not key.isdecimal() or int(key) >= count), None)
    if strange is not None:
        raise config.wrong("per_layer_config", f"{strange!r} is none of the {count} layers")
    layers = [config] * count
    for key, change in changes.items():
        layers[int(key)] = config.changed(change, f"per_layer_config.{key}")
    return layers


def _typed(config: ModelConfig, cache: LayerCache, kind: str) -> LayerCache:
    if kind in {"full_attention", "attention", "global_attention", "deepseek_sparse_attention", "indexed_attention"}:
        return cache
    if kind in {"sliding_attention", "local_attention"}:
        tokens, most = config.integer("sliding_window"), config.optional_integer("max_position_embeddings")
        return cache if most is not None and tokens >= most else caches.window(cache, tokens)
    if kind == "chunked_attention":
        return caches.chunked(cache, config.integer("attention_chunk_size"))
    raise config.wrong("layer_types", f"{kind!r} is not known here for model type {config.text('model_type')!r}")


def _layer_types(config: ModelConfig) -> list[str]:
    """The type of each layer: as listed, or by the rule of the model type."""
    count, model_type = _layer_count(config), config.text("model_type")
    listed = config.texts("layer_types")
    if listed is not None:
        config.know(*_WINDOW_FIELDS, "global_attn_every_n_layers", "full_attention_interval")
        return _per_layer(config, "layer_types", listed, count)
    if not config.has("sliding_window"):
        if model_type in _PATTERNS.keys() | _ALL_WINDOWED and "sliding_window" not in config.values:
            raise config.wrong("sliding_window", f"models of type {model_type!r} state it, or null for none")
        config.know(*_WINDOW_FIELDS)
        return ["full_attention"] * count
    if config.has("use_sliding_window"):  # Qwen2 and Qwen3: the layers from max_window_layers on
        first = config.integer("max_window_layers", least=0) if config.flag("use_sliding_window") else count
        config.know(*_WINDOW_FIELDS)
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    if model_type in _ALL_WINDOWED:
        return ["sliding_attention"] * count
    if isinstance(config.values.get("sliding_window_pattern"), str):  # EXAONE 4: LLLG
        letters = config.text("sliding_window_pattern")
        if set(letters) - {"L", "G"}:
            raise config.wrong("sliding_window_pattern", "it must be a number, or of the letters L and G")
        return [
            "full_attention" if letters[layer % len(letters)] == "G" else "sliding_attention" for layer in range(count)
        ]
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
    kept_heads = _kv_heads(config, heads, kv_heads)
    if heads % kept_heads:
        raise config.wrong(kv_heads, f"it must divide num_attention_heads, which is {heads}")
    if config.has(head_dim):
        return caches.full(kept_heads, config.integer(head_dim))
    hidden = config.integer("hidden_size")
    if hidden % heads:
        raise config.wrong("hidden_size", f"without {head_dim} it must be a multiple of num_attention_heads, {heads}")
    return caches.full(kept_heads, hidden // heads)


def _kv_heads(config: ModelConfig, heads: int, field: str) -> int:
    """KV heads of a layer. Only a known field or class says that every head keeps its own."""
    kind = config.text("attention_head_type")
    is_one, is_all = kind == "multiquery" or config.flag("multi_query"), kind == "multihead"
    if config.has(field) and not (is_one or is_all):
        return config.integer(field)
    if is_one or is_all:
        kept = 1 if is_one else heads
        if config.states(field) and config.integer(field) != kept:
            raise config.wrong(field, f"it contradicts attention_head_type or multi_query, by which it is {kept}")
        return kept
    config.know("num_attention_heads", "head_dim", "layer_types")
    unknown = config.unknown()
    hint = f"; not understood: {_listed(unknown)}" if unknown else ""
    raise ConfigError(f"{config.origin}: {field} is missing, so the number of KV heads is not known{hint}")


def _is_mla(config: ModelConfig) -> bool:
    """Whether the attention is MLA, which `use_mla` may turn off."""
    if config.has("kv_lora_rank") and config.flag("use_mla", default=True):
        return True
    config.know("use_mla")
    if config.values.get("use_mla") is False:
        config.know("kv_lora_rank", *_MLA_FIELDS)
    return False


def _mla(config: ModelConfig) -> tuple[LayerCache, ...]:
    config.know(*_MLA_FIELDS)
    return (caches.mla(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", least=0)),)


def _with_indexers(config: ModelConfig, layers: Layers) -> Layers:
    """MLA layers with the keys of their indexers, where the model has some."""
    if not config.has("index_head_dim"):
        return layers
    config.know(*_INDEX_FIELDS)
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
        names = ("num_key_value_heads", "head_dim")
        own = [layer.values.get(name) != config.values.get(name) for name in names]  # by per_layer_config
        heads, dim = (
            wide if config.has(wide) and not is_own else name
            for name, wide, is_own in zip(names, ("num_global_key_value_heads", "global_head_dim"), own, strict=True)
        )
        wide = _attention(layer, heads, dim)
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
    config.know("attention_chunk_size", "swa_num_attention_heads")
    pattern = config.integers("hybrid_layer_pattern")
    return [
        (windowed if is_windowed else wide,)
        for is_windowed in _per_layer(config, "hybrid_layer_pattern", pattern, _layer_count(config))
    ]


def _falcon(config: ModelConfig) -> Layers:
    """Falcon and GPT BigCode: one KV head, unless Falcon's new decoder sets another number."""
    heads = config.integer("num_attention_heads")
    kept_heads = 1 if config.flag("multi_query", default=True) else heads
    config.know(
        "num_kv_heads", "num_key_value_heads"
    )  # the class writes them, and ignores them without the new decoder
    if config.flag("new_decoder_architecture"):
        kept_heads = config.integer("num_kv_heads", heads)
    return [(caches.full(kept_heads, config.integer("hidden_size") // heads),)] * _layer_count(config)


def _minimax_m3(config: ModelConfig) -> Layers:
    """MiniMax M3: GQA in every layer, and index keys where the attention is sparse."""
    sparse = config.child("sparse_attention_config")
    plain, index = _attention(config), caches.indexer(sparse.integer("sparse_index_dim"))
    marks = sparse.integers("sparse_attention_freq")
    sparse.know(*sparse.values)
    return [
        (plain, index) if is_sparse else (plain,)
        for is_sparse in _per_layer(sparse, "sparse_attention_freq", marks, _layer_count(config))
    ]


def _deepseek_v4(config: ModelConfig) -> Layers:
    """DeepSeek V4: compressed latents at two rates, an indexer beside the finer one, a window in every layer."""
    ratios, count = config.integers("compress_ratios") or [], _layer_count(config)
    config.know("num_key_value_heads", "q_lora_rank", "o_lora_rank", "o_groups", "qk_nope_head_dim", *_INDEX_FIELDS)
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
        **dict.fromkeys(("linear_attention", "mamba", "M", "conv"), (state,)),
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
    config.know("activation_situ_linear_beta", "attn_res_block_size", "mla_use_output_gate")
    config.know(
        "layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"
    )  # as in linear_attn_config
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
    attention = _attention(config)
    return _hybrid(config, field, types, attention, state)


def _falcon_h1(config: ModelConfig) -> Layers:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    config.know("mamba_d_ssm", "attention_in_multiplier", "mamba_use_mlp")
    return [(_attention(config), _mamba2_of(config))] * _layer_count(config)


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
    config.know("block_size")
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


def _mpt(config: ModelConfig) -> Layers:
    """MPT and DBRX: the KV heads are in `attn_config`."""
    inner = config.child("attn_config")
    heads, kind = config.integer("num_attention_heads"), inner.text("attn_type", "multihead_attention")
    kept = inner.optional_integer("kv_n_heads")
    config.know("num_key_value_heads")
    by_kind = {"multihead_attention": heads, "multiquery_attention": 1}.get(kind)
    if config.text("model_type") == "dbrx" or kind == "grouped_query_attention":
        by_kind = inner.integer("kv_n_heads")
    if (
        by_kind is None
        or {kept or by_kind, config.values.get("num_key_value_heads") or by_kind} != {by_kind}
        or heads % by_kind
    ):
        raise inner.wrong("kv_n_heads", f"with attn_type {kind!r} it does not fit {heads} heads")
    hidden = config.integer("hidden_size")
    if hidden % heads:
        raise config.wrong("hidden_size", f"it must be a multiple of num_attention_heads, {heads}")
    return [(caches.full(by_kind, hidden // heads),)] * _layer_count(config)


def _chatglm(config: ModelConfig) -> Layers:
    """ChatGLM: KV heads are groups of heads from the second version on; in the first, every head keeps its own."""
    heads = config.integer("num_attention_heads")
    kept = config.integer("multi_query_group_num") if config.flag("multi_query_attention") else heads
    if not config.has("multi_query_attention") and not config.flag("position_encoding_2d"):
        raise config.wrong("multi_query_attention", "ChatGLM 2 and later state it; ChatGLM states position_encoding_2d")
    config.know("multi_query_group_num")
    attention = _attention(config.changed({"num_key_value_heads": kept}, "multi_query_group_num"))
    return [(attention,)] * _layer_count(config)


def _recurrent_gemma(config: ModelConfig) -> Layers:
    """RecurrentGemma: a linear recurrence in two layers of three, a window in the third."""
    pattern, count = config.texts("block_types") or ["recurrent", "recurrent", "attention"], _layer_count(config)
    width = config.integer("lru_width", config.integer("hidden_size"))
    config.know("_block_types")
    windowed = caches.window(_attention(config), config.integer("attention_window_size"))
    state = caches.rg_lru(width, config.integer("conv1d_width"))
    types = [pattern[layer % len(pattern)] for layer in range(count)]
    if set(types) - {"recurrent", "attention"}:
        raise config.wrong("block_types", "it must be a list of recurrent and attention")
    return [(state if kind == "recurrent" else windowed,) for kind in types]


def _hunyuan(config: ModelConfig) -> Layers:
    """Hunyuan: with cross-layer attention, one layer of `cla_share_factor` keeps KV for those that follow it."""
    plain = _plain(config)
    every = config.integer("cla_share_factor") if config.flag("use_cla") else 1
    config.know("cla_share_factor")
    return [caches_ if layer % every == 0 else (caches.shared(),) for layer, caches_ in enumerate(plain)]


def _mamba2_of(config: ModelConfig) -> LayerCache:
    """The state of Falcon-H1, Bamba and Granite 4; a head dimension of ``auto`` is inner size / heads."""
    heads = config.integer("mamba_n_heads")
    expand = config.integer("mamba_expand", 2)
    if config.values.get("mamba_d_head") == "auto":
        config.know("mamba_d_head")
        inner = expand * config.integer("hidden_size")
        if inner % heads:
            raise config.wrong("mamba_n_heads", f"it must divide mamba_expand x hidden_size, which is {inner}")
        dim = inner // heads
    else:
        dim = config.integer("mamba_d_head")
    states, groups, kernel = (config.integer(key) for key in ("mamba_d_state", "mamba_n_groups", "mamba_d_conv"))
    return caches.mamba2(heads, dim, states, groups, kernel, THIRTY_TWO_BITS)


def _bamba(config: ModelConfig) -> Layers:
    """Bamba: attention in the layers listed, Mamba-2 in the others."""
    full, count = config.integers("attn_layer_indices"), _layer_count(config)
    if full is None or not all(layer < count for layer in full):
        raise config.wrong("attn_layer_indices", f"it must list layers below {count}")
    state, attention = _mamba2_of(config), _attention(config)
    return [(attention if layer in set(full) else state,) for layer in range(count)]


def _granite_hybrid(config: ModelConfig) -> Layers:
    """Granite 4: Mamba-2 and attention layers as listed; some models have attention alone."""
    types = _per_layer(config, "layer_types", config.texts("layer_types"), _layer_count(config))
    state = _mamba2_of(config)
    return _hybrid(config, "layer_types", types, _attention(config), state)


def _zamba2(config: ModelConfig) -> Layers:
    """Zamba2: Mamba-2 in every layer, and before some of them a shared attention over twice the hidden size."""
    heads, hidden, count = config.integer("num_attention_heads"), config.integer("hidden_size"), _layer_count(config)
    mamba_heads, inner = config.integer("n_mamba_heads"), config.integer("mamba_expand") * hidden
    types = _per_layer(config, "layers_block_type", config.texts("layers_block_type"), count)
    if set(types) - {"mamba", "linear_attention", "hybrid"}:
        raise config.wrong("layers_block_type", "it must be a list of mamba or linear_attention, and hybrid")
    dim = config.integer("attention_head_dim", 2 * hidden // heads)
    if inner % mamba_heads or dim != 2 * hidden // heads or (2 * hidden) % heads:
        raise config.wrong("attention_head_dim", "it must be 2 x hidden_size / num_attention_heads")
    config.know(
        "attention_hidden_size", "hybrid_layer_ids", "kv_channels", "mamba_headdim", "num_mem_blocks",
        "num_query_groups", "use_shared_attention_adapter", "use_shared_mlp_adapter", "head_dim",
    )  # fmt: skip
    states, groups, kernel = (config.integer(key) for key in ("mamba_d_state", "mamba_ngroups", "mamba_d_conv"))
    state = caches.mamba2(mamba_heads, inner // mamba_heads, states, groups, kernel, THIRTY_TWO_BITS)
    attention = caches.full(_kv_heads(config, heads, "num_key_value_heads"), dim)
    return [(attention, state) if kind == "hybrid" else (state,) for kind in types]


def _lfm2(config: ModelConfig) -> Layers:
    """LFM2: attention in some layers, a short convolution in the others."""
    count, types, full = _layer_count(config), config.texts("layer_types"), config.integers("full_attn_idxs")
    if types is None and full is not None:
        types = ["full_attention" if layer in set(full) else "conv" for layer in range(count)]
    types = _per_layer(config, "layer_types", types, count)
    state = caches.short_convolution(
        config.integer("conv_dim", config.integer("hidden_size")), config.integer("conv_L_cache")
    )
    config.know("block_dim", "conv_dim_out", "num_heads")
    return _hybrid(config, "layer_types", types, _attention(config), state)


def _longcat(config: ModelConfig) -> Layers:
    """LongCat-Flash: two MLA in every layer."""
    config.know("num_hidden_layers", "attention_method", "kv_channels")
    return [_mla(config)] * (2 * config.integer("num_layers", most=LAYERS_MAX // 2))


def _mllama(config: ModelConfig) -> Layers:
    """Llama 3.2 Vision: some layers attend to the image alone."""
    count, attention = _layer_count(config), _attention(config)
    cross = config.integers("cross_attention_layers")
    if cross is None or not all(layer < count for layer in cross):
        raise config.wrong("cross_attention_layers", f"it must list layers below {count}")
    config.notes.append(
        f"{len(set(cross))} layers attend to images: each keeps keys and values, 2 x {attention.kv_heads} x "
        f"{attention.head_dim} elements, for every token of an image, which the sizes leave out."
    )
    return [(caches.cross() if layer in set(cross) else attention,) for layer in range(count)]


def _gpt_neo(config: ModelConfig) -> Layers:
    """GPT-Neo: full and windowed layers in turn; every head keeps its own KV."""
    count, heads, hidden = _layer_count(config), config.integer("num_heads"), config.integer("hidden_size")
    types = _per_layer(config, "attention_layers", config.texts("attention_layers"), count)
    config.know("attention_types")  # the same, as runs of layers
    if set(types) - {"global", "local"} or hidden % heads:
        raise config.wrong(
            "attention_layers", "it must be a list of global and local, and num_heads divide hidden_size"
        )
    cache = caches.full(heads, hidden // heads)
    windowed = caches.window(cache, config.integer("window_size"))
    return [(cache if kind == "global" else windowed,) for kind in types]


def _step3p5(config: ModelConfig) -> Layers:
    """Step 3.5: windowed layers have heads of their own; the types of draft layers follow those of the model."""
    count, types = _layer_count(config), config.texts("layer_types") or []
    other = config.child("attention_other_setting")
    other.know("num_attention_heads")
    if len(types) < count or other.text("attention_type") != "sliding_attention":
        raise config.wrong("layer_types", f"it must list {count} layers, and attention_other_setting the windowed ones")
    cache = caches.full(other.integer("num_key_value_heads"), other.integer("head_dim"))
    windowed, plain = _typed(config, cache, "sliding_attention"), _attention(config)
    return [(windowed if kind == "sliding_attention" else _typed(config, plain, kind),) for kind in types[:count]]


def _ouro(config: ModelConfig) -> Layers:
    """Ouro: the layers run several times for each token, and every pass keeps KV of its own."""
    return _plain(config) * config.integer("total_ut_steps", most=64)


def _bailing(config: ModelConfig) -> Layers:
    """Ling and Ring: GQA or MLA in the last layer of each group; lightning or Kimi delta attention in the others."""
    count, group, listed = _layer_count(config), config.integer("layer_group_size"), config.texts("layer_types")
    types = _every_nth(count, group, "linear_attention")
    if count % group or listed not in (None, types):
        raise config.wrong("layer_group_size", f"it must divide num_hidden_layers = {count} and fit layer_types")
    heads, is_kda = config.integer("num_attention_heads"), config.has(_KDA_KERNEL)
    dim = config.integer("linear_head_dim", config.integer("head_dim"))  # Transformers saves another head_dim
    if is_kda == config.has("group_norm_size"):
        raise config.wrong(
            "layer_group_size", f"exactly one of {_KDA_KERNEL} and group_norm_size tells the linear layers"
        )
    config.know(
        *_LINEAR_FIELDS,
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
        "kda_lower_bound",
        "kda_safe_gate",
        "no_kda_lora",
        "layer_norm_type",
    )
    state = (
        caches.kda(heads, dim, config.integer(_KDA_KERNEL), 4) if is_kda else caches.lightning(heads, dim, SIXTEEN_BITS)
    )
    attention = _mla(config)[0] if _is_mla(config) else _attention(config)
    return _hybrid(config, "layer_types", types, attention, state)


_KDA_KERNEL = "short_conv_kernel_size"


def _mistral_params(config: ModelConfig) -> Layers:
    """Mistral's own params.json: a window, where stated, is that of every layer."""
    cache = _mla(config)[0] if _is_mla(config) else _attention(config)
    kind = "sliding_attention" if config.has("sliding_window") else "full_attention"
    return [(_typed(config, cache, kind),)] * _layer_count(config)


_READERS: dict[str, Callable[[ModelConfig], Layers]] = {
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "bamba": _bamba,
    "chatglm": _chatglm,
    "dbrx": _mpt,
    "deepseek_ref": _deepseek_v4,
    "deepseek_v4": _deepseek_v4,
    "falcon": _falcon,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba1,
    "gemma4_text": _gemma4,
    "gpt_bigcode": _falcon,
    "gpt_neo": _gpt_neo,
    "granitemoehybrid": _granite_hybrid,
    "hunyuan": _hunyuan,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "mimo_v2_flash": _mimo_v2,
    "minimax": _minimax_text,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "minimax_text_01": _minimax_text,
    "mllama_text_model": _mllama,
    "mpt": _mpt,
    "nemotron-nas": _nemotron_nas,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _qwen_hybrid,
    "ouro": _ouro,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
    "recurrent_gemma": _recurrent_gemma,
    "step3p5": _step3p5,
    "zamba2": _zamba2,
}
