"""Readers that turn a configuration into the caches of each layer, one for each family with special fields.

Other model types are read as plain attention, MLA or a mix of windows, depending on their fields. A reader marks the
fields that it understands. If any other field seems to describe a cache, the configuration is refused, because a wrong
size is worse than none.
"""

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

from kvtier.errors import ConfigError
from kvtier.tools.size import caches
from kvtier.tools.size.caches import LayerCache
from kvtier.tools.size.hybrid_families import HYBRID_READERS
from kvtier.tools.size.layer_readers import (
    INDEX_FIELDS,
    Layers,
    by_type,
    every_nth,
    has_mla,
    name_list,
    one_for_each_layer,
    read_attention,
    read_head_dim,
    read_layer_configs,
    read_layer_count,
    read_layer_numbers,
    read_layer_types,
    read_mla,
    read_plain,
    with_kind,
    with_shared,
    with_window,
)
from kvtier.tools.size.model_config import LAYERS_MAX, WAY_ON, ModelConfig

_ENCODERS = {
    "albert", "bert", "bert-generation", "big_bird", "camembert", "clip", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie", "esm", "eurobert", "hubert", "layoutlm", "layoutlmv3", "longformer", "modernbert",
    "mpnet", "new", "nomic_bert", "rembert", "roberta", "roformer", "siglip", "siglip2", "vit", "wav2vec2",
    "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
"""Model types of encoders, which read all tokens together and keep no KV."""

_STATE_ONLY = {
    "comba", "delta_net", "gated_deltanet", "gated_deltaproduct", "gla", "gsa", "hgrn", "hgrn2", "lightnet",
    "linear_attn", "log_linear_mamba2", "mesa_net", "mlstm", "retnet", "xlstm",
}  # fmt: skip
"""Model types whose layers keep only a state: xlstm of Transformers, and types of flash-linear-attention."""

_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields with the number of draft layers."""


def read_layers(config: ModelConfig) -> Layers:
    """Read the caches of each layer, and add remarks about the caches to `config.notes`.

    Raises:
        ConfigError: a field is missing, wrong, contradicts another, or may describe a cache but is not understood.
    """
    model_type = config.text("model_type")
    _refuse_other_kinds(config, model_type)
    config.defaults = class_defaults(model_type, is_part=config.is_part)
    is_params = not model_type and {"dim", "n_layers", "n_heads"} <= config.values.keys()
    layers = (_mistral_params if is_params else _READERS.get(model_type, read_plain))(config)
    drafts = max(config.integer(key, 0, least=0) for key in _DRAFTS)
    config.know("num_attention_heads", "is_causal")
    uses = config.values.get("use_sliding_window", config.defaults.get("use_sliding_window"))
    if uses is False or not config.has("sliding_window"):
        config.know("sliding_window", "use_sliding_window", "max_window_layers")
    unknown = config.unknown()
    if unknown:
        raise ConfigError(
            f"{config.origin}: not understood for model type {model_type!r}: {name_list(unknown)}; "
            f"these fields may change what is cached; {WAY_ON}"
        )
    if drafts:
        plural = "s for speculative decoding are" if drafts > 1 else " for speculative decoding is"
        config.notes.append(f"{drafts} draft layer{plural} not counted; engines that keep a draft's KV add it.")
    if config.assumed:
        names = ", ".join(dict.fromkeys(config.assumed))
        config.notes.append(f"The file omits {names}: the defaults of class {model_type} in Transformers stand in.")
    return layers


def class_defaults(model_type: str, *, is_part: bool) -> Mapping[str, object]:
    """Return the values that Transformers fills in for fields that a file of this type omits.

    A file that is not part of a larger one states its shape, so it gets only the head dimension and the rule for KV
    heads.
    """
    found = all_class_defaults().get(model_type, {})
    if is_part:
        return found
    return {key: value for key, value in found.items() if key == "head_dim" or isinstance(value, str)}


@cache
def all_class_defaults() -> Mapping[str, Mapping[str, object]]:
    """Return the default values of fields, by model type. A string names another field, whose value is used instead."""
    return tomllib.loads((files("kvtier.tools.size") / "class_defaults.toml").read_text(encoding="utf-8"))


def _refuse_other_kinds(config: ModelConfig, model_type: str) -> None:
    """Refuse models that keep no KV per token. The error states the reason."""
    names = config.texts("architectures") or []
    config.refuse_if(
        model_type in _STATE_ONLY or model_type.startswith("rwkv"),
        "model_type",
        "its layers keep a state and no KV, and the size of that state is not known here",
    )
    if not model_type and "ssm_cfg" in config.values:
        raise ConfigError(
            f"{config.origin}: a model of package mamba_ssm (ssm_cfg), which keeps a state and no KV; its file lacks "
            "the state's shape, which the conversion for Transformers (model_type mamba or mamba2) has"
        )
    config.refuse_if(
        config.flag("is_encoder_decoder"),
        "is_encoder_decoder",
        "the KV of encoder-decoders depends on two lengths; not supported",
    )
    is_encoder = any(name.endswith(("ForMaskedLM", "EncoderModel")) for name in names)
    config.refuse_if(
        model_type in _ENCODERS or is_encoder or config.values.get("is_causal") is False,
        "model_type",
        "an encoder reads all tokens at once and keeps no KV",
    )
    config.know("use_bidirectional_attention")
    config.refuse_if(
        config.values.get("use_bidirectional_attention") is True,
        "use_bidirectional_attention",
        "an encoder reads all tokens at once and keeps no KV",
    )


def _gemma4(config: ModelConfig) -> Layers:
    """Read Gemma 4. Layers with full attention may have wider heads than the others, and some layers may share KV."""
    if config.flag("attention_k_eq_v"):
        config.notes.append(
            "The full layers' keys and values come from one projection (attention_k_eq_v). Engines and kvtier's store "
            "keep both, since the key is rotated; the theoretical minimum is half of these layers' bytes."
        )
    types = read_layer_types(config)
    layers: Layers = []
    for layer, kind in zip(read_layer_configs(config), types, strict=True):
        if kind != "full_attention":
            layers.append((with_kind(layer, read_attention(layer), kind),))
            continue
        names = ("num_key_value_heads", "head_dim")
        own = [layer.values.get(name) != config.values.get(name) for name in names]  # replaced by per_layer_config
        heads, dim = (
            wide if config.has(wide) and not is_own else name
            for name, wide, is_own in zip(names, ("num_global_key_value_heads", "global_head_dim"), own, strict=True)
        )
        layers.append((read_attention(layer, heads, dim),))
    return with_shared(config, layers, types)


def _llama4(config: ModelConfig) -> Layers:
    """Read Llama 4. Layers with rotary embedding have chunked attention, the others (one in four) full attention."""
    count = read_layer_count(config)
    types = config.texts("layer_types")
    if types is None:
        rotary = config.integers("no_rope_layers")
        types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary or ()]
        types = types or every_nth(count, 4, "chunked_attention")
    return [
        (with_kind(config, read_attention(config), kind),)
        for kind in one_for_each_layer(config, "no_rope_layers", types, count)
    ]


def _mimo_v2(config: ModelConfig) -> Layers:
    """Read MiMo V2.

    Windowed layers have their own number of KV heads and their own dimensions (the ``swa_`` fields), and values are
    narrower than keys.
    """
    wide = caches.full(config.integer("num_key_value_heads"), config.integer("head_dim"), config.integer("v_head_dim"))
    narrow = caches.full(
        config.integer("swa_num_key_value_heads"), config.integer("swa_head_dim"), config.integer("swa_v_head_dim")
    )
    windowed = with_kind(config, narrow, "sliding_attention")
    config.know("attention_chunk_size", "swa_num_attention_heads")
    pattern = config.integers("hybrid_layer_pattern")
    return [
        (windowed if is_windowed else wide,)
        for is_windowed in one_for_each_layer(config, "hybrid_layer_pattern", pattern, read_layer_count(config))
    ]


def _falcon(config: ModelConfig) -> Layers:
    """Read Falcon and GPT BigCode.

    They have one KV head, unless `multi_query` is false or `new_decoder_architecture` is true.
    """
    heads = config.integer("num_attention_heads")
    kept_heads = 1 if config.flag("multi_query", default=True) else heads
    config.know(
        "num_kv_heads", "num_key_value_heads"
    )  # the class writes these fields, but ignores them without the new decoder
    if config.flag("new_decoder_architecture"):
        kept_heads = config.integer("num_kv_heads", heads)
    return [(caches.full(kept_heads, read_head_dim(config, heads)),)] * read_layer_count(config)


def _minimax_m3(config: ModelConfig) -> Layers:
    """Read MiniMax M3. Every layer has GQA, and layers with sparse attention also keep index keys."""
    sparse = config.child("sparse_attention_config")
    plain, index = read_attention(config), caches.indexer(sparse.integer("sparse_index_dim"))
    marks = sparse.integers("sparse_attention_freq")
    sparse.know(*sparse.values)
    return [
        (plain, index) if is_sparse else (plain,)
        for is_sparse in one_for_each_layer(sparse, "sparse_attention_freq", marks, read_layer_count(config))
    ]


def _deepseek_v4(config: ModelConfig) -> Layers:
    """Read DeepSeek V4: latents compressed at two rates, an indexer for the finer one, and a window in every layer."""
    ratios, count = config.integers("compress_ratios") or [], read_layer_count(config)
    config.know("num_key_value_heads", "q_lora_rank", "o_lora_rank", "o_groups", "qk_nope_head_dim", *INDEX_FIELDS)
    config.refuse_if(
        len(ratios) < count, "compress_ratios", f"it must have at least num_hidden_layers = {count} entries"
    )
    dim, rotary = config.integer("head_dim"), config.integer("qk_rope_head_dim")
    config.refuse_if(rotary >= dim, "qk_rope_head_dim", f"it must be less than head_dim, which is {dim}")
    window = caches.latent_window(dim, rotary, config.integer("sliding_window"))
    layers: Layers = []
    for ratio in ratios[:count]:
        latents = (caches.compressed(dim, rotary, ratio),) if ratio else ()
        index = (caches.indexer(config.integer("index_head_dim"), ratio),) if ratio == 4 else ()
        layers.append((*latents, *index, window))
    config.notes.append("The unfinished entry of each compressor, less than one entry a layer, is not counted.")
    return layers


def _nemotron_nas(config: ModelConfig) -> Layers:
    """Read Nemotron-NAS. Each layer has its own number of query heads per KV head, or no attention."""
    heads = config.integer("num_attention_heads")
    dim = read_head_dim(config, heads)
    layers: Layers = []
    for block in one_for_each_layer(config, "block_configs", config.objects("block_configs"), read_layer_count(config)):
        attention = block.child("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            layers.append(())
        else:
            layers.append((caches.full(heads // attention.integer("n_heads_in_group", most=heads), dim),))
    return layers


def _mpt(config: ModelConfig) -> Layers:
    """Read MPT and DBRX, in which `attn_config` states the number of KV heads."""
    inner = config.child("attn_config")
    heads, kind = config.integer("num_attention_heads"), inner.text("attn_type", "multihead_attention")
    kept = inner.optional_integer("kv_n_heads")
    config.know("num_key_value_heads")
    by_kind = {"multihead_attention": heads, "multiquery_attention": 1}.get(kind, 0)
    if config.text("model_type") == "dbrx" or kind == "grouped_query_attention":
        by_kind = inner.integer("kv_n_heads")
    stated = {kept or by_kind, config.values.get("num_key_value_heads") or by_kind}
    inner.refuse_if(
        stated != {by_kind} or not by_kind or heads % by_kind,
        "kv_n_heads",
        f"with attn_type {kind!r} it does not fit {heads} heads",
    )
    return [(caches.full(by_kind, read_head_dim(config, heads)),)] * read_layer_count(config)


def _chatglm(config: ModelConfig) -> Layers:
    """Read ChatGLM. Groups of heads share KV from the second version on; in the first, every head keeps its own."""
    heads = config.integer("num_attention_heads")
    kept = config.integer("multi_query_group_num") if config.flag("multi_query_attention") else heads
    config.refuse_if(
        not config.has("multi_query_attention") and not config.flag("position_encoding_2d"),
        "multi_query_attention",
        "ChatGLM 2 and later state it; ChatGLM states position_encoding_2d",
    )
    config.know("multi_query_group_num")
    attention = read_attention(config.changed({"num_key_value_heads": kept}, "multi_query_group_num"))
    return [(attention,)] * read_layer_count(config)


def _hunyuan(config: ModelConfig) -> Layers:
    """Read Hunyuan. With cross-layer attention, one layer of every `cla_share_factor` computes KV for the others."""
    if config.flag("use_cla"):
        config.notes.append(
            f"One layer of {config.integer('cla_share_factor')} computes KV for those that follow it (use_cla). The "
            "engines (vLLM's hunyuan_v1, SGLang) keep a copy for each layer; the theoretical minimum is one."
        )
    config.know("cla_share_factor")
    return read_plain(config)


def _longcat(config: ModelConfig) -> Layers:
    """Read LongCat-Flash. Every layer has two MLA attentions."""
    config.know("num_hidden_layers", "attention_method", "kv_channels")
    return [read_mla(config)] * (2 * config.integer("num_layers", most=LAYERS_MAX // 2))


def _mllama(config: ModelConfig) -> Layers:
    """Read Llama 3.2 Vision. Some layers attend only to the image."""
    count, attention = read_layer_count(config), read_attention(config)
    cross = read_layer_numbers(config, "cross_attention_layers", count)
    config.notes.append(
        f"{len(cross)} layers attend to images: each keeps keys and values, 2 x {attention.kv_heads} x "
        f"{attention.head_dim} elements, for every token of an image, which the sizes leave out."
    )
    return [(caches.cross() if layer in cross else attention,) for layer in range(count)]


def _gpt_neo(config: ModelConfig) -> Layers:
    """Read GPT-Neo. Full and windowed layers alternate, and every head keeps its own KV."""
    count, heads = read_layer_count(config), config.integer("num_heads")
    types = one_for_each_layer(config, "attention_layers", config.texts("attention_layers"), count)
    config.know("attention_types")  # repeats attention_layers in the form of runs
    cache = caches.full(heads, read_head_dim(config, heads))
    windowed = with_window(config, cache, "window_size")
    return by_type(config, "attention_layers", types, {"global": (cache,), "local": (windowed,)})


def _step3p5(config: ModelConfig) -> Layers:
    """Read Step 3.5. Windowed layers may have their own KV heads. `layer_types` ends with the types of draft layers."""
    count, types = read_layer_count(config), config.texts("layer_types") or []
    config.know("num_sliding_attention_heads")
    # Transformers drops this field on saving. Windowed layers then have the same heads as full ones.
    is_own = config.has("attention_other_setting")
    other = config.child("attention_other_setting") if is_own else config
    other.know("num_attention_heads")
    config.refuse_if(
        len(types) < count or (is_own and other.text("attention_type") != "sliding_attention"),
        "layer_types",
        f"it must list {count} layers, and attention_other_setting the windowed ones",
    )
    cache = caches.full(other.integer("num_key_value_heads"), other.integer("head_dim"))
    other.refuse_if(other.integer("true_head_dim", cache.head_dim) != cache.head_dim, "true_head_dim", "not head_dim")
    windowed, plain = with_kind(config, cache, "sliding_attention"), read_attention(config)
    return [(windowed if kind == "sliding_attention" else with_kind(config, plain, kind),) for kind in types[:count]]


def _inkling(config: ModelConfig) -> Layers:
    """Read Inkling.

    Windowed layers have their own number of KV heads and their own dimensions. Every layer keeps the last inputs of
    four convolutions.
    """
    count = read_layer_count(config)
    every = {layer for layer in range(count) if (layer + 1) % 6}  # the default of the class
    local = read_layer_numbers(config, "local_layer_ids", count) if config.has("local_layer_ids") else every
    by_ids = ["hybrid_sliding" if layer in local else "hybrid" for layer in range(count)]
    types = one_for_each_layer(config, "layer_types", config.texts("layer_types") or by_ids, count)
    config.know("swa_num_attention_heads", "mtp_local_layer_ids", "number_of_conv_states", "conv_kernel_size")
    kernel = config.integer("conv_kernel_size") if config.flag("use_sconv", default=True) else 1
    by_kind: dict[str, tuple[LayerCache, ...]] = {}
    for kind, prefix in (("hybrid", ""), ("hybrid_sliding", "swa_")):
        heads, key = (config.integer(f"{prefix}{name}") for name in ("num_key_value_heads", "head_dim"))
        value = config.integer(f"{prefix}v_head_dim", key)
        kept = caches.full(heads, key, value)
        kept = with_window(config, kept, "sliding_window") if prefix else kept
        inputs = caches.short_convolution(heads * (key + value) + 2 * config.integer("hidden_size"), kernel, heads)
        by_kind[kind] = (kept, inputs) if kernel > 1 else (kept,)
    config.notes.append(
        "Engines may page the convolutions' inputs as a window of tokens: vLLM then reserves those of the steps under "
        "way, so that fewer sessions fit on its GPUs (vllm#54703)."
    )
    return by_type(config, "layer_types", types, by_kind)


def _ouro(config: ModelConfig) -> Layers:
    """Read Ouro. The layers run several times for each token, and every pass keeps separate KV."""
    return read_plain(config) * config.integer("total_ut_steps", most=64)


def _mistral_params(config: ModelConfig) -> Layers:
    """Read Mistral's own params.json. A stated window applies to every layer."""
    cache = read_mla(config)[0] if has_mla(config) else read_attention(config)
    kind = "sliding_attention" if config.has("sliding_window") else "full_attention"
    return [(with_kind(config, cache, kind),)] * read_layer_count(config)


_READERS: dict[str, Callable[[ModelConfig], Layers]] = {
    **HYBRID_READERS,
    "chatglm": _chatglm,
    "dbrx": _mpt,
    "deepseek_ref": _deepseek_v4,
    "deepseek_v4": _deepseek_v4,
    "falcon": _falcon,
    "gemma4_text": _gemma4,
    "gpt_bigcode": _falcon,
    "gpt_neo": _gpt_neo,
    "hunyuan": _hunyuan,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
    "inkling2_text": _inkling,
    "inkling_mm_model": _inkling,
    "inkling_model": _inkling,
    "inkling_text": _inkling,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mimo_v2_flash": _mimo_v2,
    "minimax_m3": _minimax_m3,
    "minimax_m3_text": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "mllama_text_model": _mllama,
    "mpt": _mpt,
    "nemotron-nas": _nemotron_nas,
    "ouro": _ouro,
    "step3p5": _step3p5,
}
