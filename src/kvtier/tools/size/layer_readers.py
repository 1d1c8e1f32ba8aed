"""Read the parts that most families have in common: attention, MLA and windows.

Each function marks the fields that it understands. `kvtier.tools.size.families` refuses the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.tools.size import caches
from kvtier.tools.size.caches import LayerCache
from kvtier.tools.size.model_config import LAYERS_MAX, WAY_ON, ModelConfig

Layers = list[tuple[LayerCache, ...]]
"""The caches of each layer, in layer order."""

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
"""Default of Transformers: one in this many layers has full attention instead of a window."""

_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types in which `sliding_window` applies to every layer."""

_WINDOW_FIELDS = (
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window", "max_window_layers",
)  # fmt: skip

_PATTERN_FIELDS = ("global_attn_every_n_layers", "full_attention_interval", "prefix_dense_sliding_window_pattern")
"""Fields from which the class derives `layer_types` if the file does not list the types."""

_MLA_FIELDS = (
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
    "v_head_dim", "head_dim", "mla_use_nope", "mla_scale_q_lora", "mla_scale_kv_lora",
)  # fmt: skip

_FULL = {
    "full_attention", "attention", "global_attention", "deepseek_sparse_attention", "indexed_attention",
    "reference_sliding_attention",
}  # fmt: skip
"""Layer types that keep all tokens of a prompt. The last one drops only generated tokens."""

INDEX_FIELDS = (
    "index_n_heads",
    "index_topk",
    "index_topk_freq",
    "index_skip_topk_offset",
    "indexer_rope_interleave",
    "index_share_for_mtp_iteration",
)

_FIELDS_NAMED = 8
"""Maximum number of fields that the message about unknown fields names."""

_Item = TypeVar("_Item")


def read_plain(config: ModelConfig) -> Layers:
    """Read attention or MLA in every layer, with windows and chunks by layer type."""
    config.refuse_if(
        set(config.integers("attn_type_list") or ()) - {1},
        "attn_type_list",
        "a model of this type must have attention (1) in every layer",
    )
    types = read_layer_types(config)
    if has_mla(config):
        each_layer = list(zip(read_layer_configs(config), types, strict=True))
        windowed = [layer for layer, kind in each_layer if kind == "sliding_attention"]
        config.refuse_if(
            config.text("model_type").startswith("dots3_note")
            and not all(layer.alters("kv_lora_rank") for layer in windowed),
            "per_layer_config",
            "it must state kv_lora_rank for each windowed layer, since their latents differ from the others'",
        )
        layers = _with_indexers(config, [(with_kind(layer, read_mla(layer)[0], kind),) for layer, kind in each_layer])
        config.refuse_if(
            config.text("model_type").startswith("mistral_large4") and not config.has("kv_source_layers"),
            "kv_source_layers",
            "models of this type state which layers share a latent",
        )
        sources = config.integers("kv_source_layers") or list(range(len(layers)))
        each_source = list(enumerate(one_for_each_layer(config, "kv_source_layers", sources, len(layers))))
        config.refuse_if(
            any(source > number or sources[source] != source for number, source in each_source),
            "kv_source_layers",
            "each must be the layer itself, or an earlier one that is its own",
        )
        return [
            layers[number] if source == number else (caches.shared(), *layers[number][1:])
            for number, source in each_source
        ]
    heads = config.integers("num_key_value_heads_per_layer")
    if heads is not None:
        config.know("num_key_value_heads")
        changes = [
            {"num_key_value_heads": each}
            for each in one_for_each_layer(config, "num_key_value_heads_per_layer", heads, len(types))
        ]
        configs = [config.changed(change, "num_key_value_heads_per_layer") for change in changes]
    else:
        configs = read_layer_configs(config)
    each_layer = zip(configs, types, strict=True)
    return with_shared(config, [(with_kind(layer, read_attention(layer), kind),) for layer, kind in each_layer], types)


def read_layer_configs(config: ModelConfig) -> list[ModelConfig]:
    """Return the configuration of each layer: `config` with the changes of `per_layer_config`."""
    count = read_layer_count(config)
    if not config.has("per_layer_config"):
        return [config] * count
    part = config.child("per_layer_config")
    part.know(*part.values)  # each layer's configuration records its own fields
    changes = part.values
    strange = next((key for key in changes if not key.isdecimal() or int(key) >= count), None)
    config.refuse_if(strange is not None, "per_layer_config", f"{strange!r} is not one of the {count} layers")
    layers = [config] * count
    for key, change in changes.items():
        layers[int(key)] = config.changed(change, f"per_layer_config.{key}")
    return layers


def with_kind(config: ModelConfig, cache: LayerCache, kind: str) -> LayerCache:
    """Return `cache` for the tokens that a layer of type `kind` keeps: all tokens, a window or a chunk."""
    if kind in _FULL:
        return cache
    if kind in {"sliding_attention", "local_attention"}:
        return with_window(config, cache, "sliding_window")
    if kind == "chunked_attention":
        return with_window(config, cache, "attention_chunk_size", caches.chunked)
    type_ = config.text("model_type")
    raise config.wrong("layer_types", f"{kind!r} is not known here for model type {type_!r}; {WAY_ON}")


def with_window(
    config: ModelConfig, cache: LayerCache, field: str, kind: Callable[[LayerCache, int], LayerCache] = caches.window
) -> LayerCache:
    """Return `cache` with the window of `field`, or `cache` itself if the window is as long as the context."""
    return cache if _is_whole_context(config, field) else kind(cache, config.integer(field))


def _is_whole_context(config: ModelConfig, field: str) -> bool:
    most = config.optional_integer("max_position_embeddings")
    return most is not None and config.integer(field) >= most


def read_layer_types(config: ModelConfig) -> list[str]:
    """Read the type of each layer from the list, or derive it with the rule of the model type."""
    count, model_type = read_layer_count(config), config.text("model_type")
    listed = config.texts("layer_types")
    if listed is not None:
        config.know(*_WINDOW_FIELDS, *_PATTERN_FIELDS)
        return one_for_each_layer(config, "layer_types", listed, count)
    if not config.has("sliding_window"):
        config.refuse_if(
            model_type in _PATTERNS.keys() | _ALL_WINDOWED and "sliding_window" not in config.values,
            "sliding_window",
            f"models of type {model_type!r} state it, or null for none",
        )
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
        config.refuse_if(
            not letters or set(letters) - {"L", "G"},
            "sliding_window_pattern",
            "it must be a number, or a string of the letters L and G",
        )
        return [
            "full_attention" if letters[layer % len(letters)] == "G" else "sliding_attention" for layer in range(count)
        ]
    every = config.integer("sliding_window_pattern", _PATTERNS.get(model_type, 0), least=0)
    if not every and _is_whole_context(config, "sliding_window"):
        return ["full_attention"] * count
    which = f"layer_types or sliding_window_pattern must say which layers have it; {WAY_ON}"
    config.refuse_if(not every, "sliding_window", which)
    return every_nth(count, every, "sliding_attention")


def every_nth(count: int, every: int, other: str) -> list[str]:
    """Return the types of `count` layers: full attention in every n-th layer, `other` in the rest."""
    return [other if (layer + 1) % every else "full_attention" for layer in range(count)]


def one_for_each_layer(config: ModelConfig, key: str, items: list[_Item] | None, count: int) -> list[_Item]:
    """Return `items` of the field `key`, after a check that there is one for each of `count` layers."""
    if items is None or len(items) != count:
        entries = "" if items is None else f"it has {len(items)} entries and "
        raise config.wrong(key, f"{entries}it must have num_hidden_layers = {count} of them")
    return items


def by_type(
    config: ModelConfig, field: str, types: Sequence[str], caches_of: Mapping[str, tuple[LayerCache, ...]]
) -> Layers:
    """Return the caches of each layer, by the type that `field` lists."""
    unknown = next((kind for kind in types if kind not in caches_of), None)
    config.refuse_if(
        unknown is not None,
        field,
        f"layer type {unknown!r} is not known here; allowed: {', '.join(caches_of)}; {WAY_ON}",
    )
    return [caches_of[kind] for kind in types]


def read_layer_count(config: ModelConfig) -> int:
    """Return the number of layers."""
    return config.integer("num_hidden_layers", most=LAYERS_MAX)


def read_layer_numbers(config: ModelConfig, field: str, count: int) -> set[int]:
    """Return the numbers of the layers that `field` lists."""
    layers = config.integers(field) or []
    config.refuse_if(
        not config.has(field) or not all(layer < count for layer in layers), field, f"it must list layers below {count}"
    )
    return set(layers)


def read_head_dim(config: ModelConfig, heads: int) -> int:
    """Return hidden size / heads, which is the head dimension if the file states none."""
    hidden = config.integer("hidden_size")
    config.refuse_if(
        hidden % heads, "hidden_size", f"without head_dim it must be a multiple of the attention heads, {heads}"
    )
    return hidden // heads


def read_attention(
    config: ModelConfig, kv_heads: str = "num_key_value_heads", head_dim: str = "head_dim"
) -> LayerCache:
    """Read keys and values from the named fields. Without `head_dim`, the head dimension is hidden size / heads."""
    heads = config.integer("num_attention_heads")
    kept_heads = read_kv_heads(config, heads, kv_heads)
    config.refuse_if(heads % kept_heads, kv_heads, f"it must divide num_attention_heads, which is {heads}")
    return caches.full(kept_heads, config.integer(head_dim) if config.has(head_dim) else read_head_dim(config, heads))


def read_kv_heads(config: ModelConfig, heads: int, field: str) -> int:
    """Return the number of KV heads. Only a known field or class may imply that every head keeps its own KV."""
    kind = config.text("attention_head_type")
    is_one, is_all = kind == "multiquery" or config.flag("multi_query"), kind == "multihead"
    if config.has(field) and not (is_one or is_all):
        return config.integer(field)
    if is_one or is_all:
        kept = 1 if is_one else heads
        config.refuse_if(
            config.states(field) and config.integer(field) != kept,
            field,
            f"it contradicts attention_head_type or multi_query, by which it is {kept}",
        )
        return kept
    config.know("num_attention_heads", "head_dim", "layer_types")
    unknown = config.unknown()
    hint = f"; not understood: {name_list(unknown)}" if unknown else ""
    raise ConfigError(f"{config.origin}: {field} is missing, so the number of KV heads is not known{hint}")


def has_mla(config: ModelConfig) -> bool:
    """Return whether the attention is MLA, which `use_mla` may turn off."""
    if config.has("kv_lora_rank") and config.flag("use_mla", default=True):
        return True
    config.know("use_mla")
    if config.values.get("use_mla") is False:
        config.know("kv_lora_rank", *_MLA_FIELDS)
    return False


def read_mla(config: ModelConfig) -> tuple[LayerCache, ...]:
    """Read the latent of a layer."""
    config.know(*_MLA_FIELDS)
    return (caches.mla(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", least=0)),)


def _with_indexers(config: ModelConfig, layers: Layers) -> Layers:
    """Add index keys to the MLA layers that have their own indexer and no window."""
    if not config.has("index_head_dim"):
        return layers
    own, index = read_indexers(config, len(layers)), caches.indexer(config.integer("index_head_dim"))
    return [
        (*layer, index) if has_index and layer[0].window is None else layer
        for layer, has_index in zip(layers, own, strict=True)
    ]


def read_indexers(config: ModelConfig, count: int) -> list[bool]:
    """Return for each layer whether it has its own indexer, by a list, the letters F and S, or an interval."""
    config.know(*INDEX_FIELDS)
    every, offset = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2, least=0)
    by_rule = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(count)]
    letters = {"F": "full", "S": "shared"}
    by_letters = [letters.get(letter, letter) for letter in config.text("index_topk_pattern")]
    types = config.texts("indexer_types") or by_letters or by_rule
    config.refuse_if(
        len(types) != count or not set(types) <= {"full", "shared"},
        "indexer_types" if config.has("indexer_types") else "index_topk_pattern",
        f"it must have {count} entries, each full or shared",
    )
    if "shared" in types:
        shared = types.count("shared")
        config.notes.append(f"{shared} layers use the choice of an earlier indexer and keep no index keys.")
    return [kind == "full" for kind in types]


def with_shared(config: ModelConfig, layers: Layers, types: Sequence[str]) -> Layers:
    """Let the last `num_kv_shared_layers` layers read the KV of earlier layers of their type."""
    count = config.integer("num_kv_shared_layers", 0, least=0, most=LAYERS_MAX)
    own = len(layers) - count
    config.refuse_if(
        count and (own < 1 or not set(types[own:]) <= set(types[:own])),
        "num_kv_shared_layers",
        f"of {len(layers)} layers, too few keep a KV to share",
    )
    return [*layers[:own], *([(caches.shared(),)] * count)]


def name_list(names: Sequence[str]) -> str:
    """Quote names for a message. If there are many, quote only the first few."""
    more = f" and {len(names) - _FIELDS_NAMED} more" if len(names) > _FIELDS_NAMED else ""
    return ", ".join(repr(name) for name in names[:_FIELDS_NAMED]) + more
