"""Read a model's config.json, with typed access to fields, a record of used fields, and errors that name a field."""

import json
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtier.errors import ConfigError

WAY_ON = "--ignore FIELD reads the file as if FIELD were not there, and says so"
FILE_BYTES_MAX = 4 << 20
_DEPTH_SEARCHED = 8
"""Depth of nested objects to which the search for ignored fields goes."""
DIM_MAX = 1 << 24
LAYERS_MAX = 4096

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("n_kv_heads", "n_head_kv", "num_kv_heads", "kv_n_heads", "num_attention_groups"),
    "sliding_window": ("sliding_window_size",),
    "conv_kernel_size": ("sconv_kernel_size",),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "max_position_embeddings": ("n_positions", "model_max_length", "max_seq_len", "seq_length"),
}
"""Alternative names of fields."""

TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Fields in which multimodal models keep the language model's configuration."""

_CACHE_WORDS = re.compile(
    "attn|attention|head|kv|key|value|quer|qk|mqa|gqa|mla|mha|group|window|sliding|swa|local|global|chunk|linear|latent|"
    "lora_rank|compress|share|sharing|cross|encoder|decoder|ssm|ssd|mamba|state|conv|recur|lru|rnn|wkv|delta|kda|gla|"
    "retention|lightning|loop|repeat|ut_steps|layer|block|pattern|interval|period|sparse|index|hybrid|cla(?!ss)|mem_|"
    "memory|cache|no_op"
)
"""Words in the names of fields that may change the caches."""

_HARMLESS_ENDS = (
    "bias|biases|dropout|drop|layerdrop|pdrop|prob|probs|eps|epsilon|init|initializer|std|id|ids|token|theta|dtype|act|"
    "activation|function|implementation|impl|coef|norm|normalization|layernorm|softcap|softcapping|scale|scaling|"
    "multiplier|multipliers|scalar|token_index|alpha_factor|beta_factor|clip|clip_qkv|clip_val|fp32|loss|loss_weight|ln|(?<!topk_)freq"
)
_HARMLESS_STARTS = (
    "mlp|ffn|router|vision|visual|vit|image|img|mm|audio|video|speech|projector|perceiver|spatial|talker|"
    "code2wav|token2wav|rope|rotary|vocab|tie|tokenizer|torch|auto_map|quant|quantization|compression|norm|layernorm|"
    "layer_norm|embd|embedding|initializer|aux|flash|id2label|label2id|generation|task_specific|adapter|suppress|"
    "problem|hash|num_hash|mtp|vq|mamba_dt|linear_dt|linear_a_log|pruned|pretraining|transformers|deepstack|dt|time_step|output|attention_probs|attention_softmax|"
    "attn_logit|attn_temperature|attn_soft|query_pre_attn|parallel_attn|pooler|classifier|keys_to_ignore|block_ff|"
    "block_auto|block_use|block_ffn|hidden_act|share_expert|shared_expert|shared_experts|_attn_implementation"
)
_EXPERTS = (
    "(is|n|num|routed|shared|first|last|limited|local|dense)_",
    "(moe|experts?)(?!.*(kv|head|attn|attention|window|cache))",
)
_HARMLESS = re.compile(
    f"(.*_)?({_HARMLESS_ENDS})|({_HARMLESS_STARTS})(_.*|config)?|({_EXPERTS[0]})*{_EXPERTS[1]}(_.*|config)?"
)
"""Names that match `_CACHE_WORDS` but change no cache: precision, experts, vocabulary, positions, training."""

_EXPERT_COUNTS = (
    ("n_routed_experts", "num_experts", "num_local_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
)
"""Fields with the number of routed experts, and fields with the number that a token uses."""
_BITS = r'"(num_|w_)?bits": {}\b|"quant_algo": "\w*{}|"load_in_{}bit": true|"quant_method": "({})"'
_FOUR_BITS = re.compile(_BITS.format(4, "(fp4|w4)", 4, "mxfp4|nvfp4"))
_EIGHT_BITS = re.compile(_BITS.format(8, "(fp8|w8)", 8, "fp8|fbgemm_fp8|ptpc_fp8"))
"""Signs of 8 bits in a ``quantization_config``: numbers (compressed-tensors, AWQ, GPTQ), fields (ModelOpt), methods."""
_NOT_WEIGHTS = re.compile("^kv_|activations$")
"""Fields of a ``quantization_config`` that concern KV or activations, not weights."""

_VALUES = {"switch": (bool, str), "number": (int, float), "object": dict}
"""Python types for each kind of value in ``other_fields.toml``."""

_Value = TypeVar("_Value")


class ModelConfig:
    """The fields of one model's configuration. A null field counts as missing.

    Args:
        values: the JSON object.
        origin: file or name, for error messages.
        prefix: text before the names of the fields, such as ``object.``.
    """

    def __init__(self, values: Mapping[str, object], origin: str, prefix: str = "") -> None:
        self.values, self.origin = values, origin
        self.used: dict[str, object] = {}
        """Fields that were read, by name. A field of a nested object is named ``object.field``."""
        self.defaults: Mapping[str, object] = {}
        """Values that the model's class gives to fields that the file omits."""
        self.notes: list[str] = []
        """Remarks about the sizes, from the family's reader."""
        self.assumed: list[str] = []
        """Fields whose values came from `defaults`."""
        self.ignored: Mapping[str, object] = {}
        """Fields that are treated as missing, with their values."""
        self.is_part = False
        """Whether this is part of a larger file. In parts, Transformers writes only what differs from the class."""
        self._prefix = prefix
        self._known: set[str] = set()
        self._own: Mapping[str, object] = values
        self._base: ModelConfig | None = None
        self.parts: list[ModelConfig] = []
        """Other objects whose unknown fields `unknown` also lists."""

    def know(self, *keys: str) -> None:
        """Mark fields as understood, by any of their names, even if no reader uses them."""
        names = {name for key in keys for name in (key, *OTHER_NAMES.get(key, ()))}
        self._known |= names
        if self._base is not None:
            self._base.know(*(names - self._own.keys()))

    def states(self, key: str) -> bool:
        """Return whether the file itself has `key`, by any of its names."""
        return any(self.values.get(name) is not None for name in (key, *OTHER_NAMES.get(key, ())))

    def alters(self, key: str) -> bool:
        """Return whether `changed` made this configuration with another value of `key`."""
        return self._base is not None and self._own.get(key) is not None

    def unknown(self) -> list[str]:
        """Return the names of fields that seem to describe a cache but were not read."""
        found = [
            self._prefix + name
            for key, value in self._own.items()
            if key not in self._known
            for name in _cache_fields(key, value, self.values.get("model_type"))
        ]
        return [*found, *(name for part in self.parts for name in part.unknown())]

    def has(self, key: str) -> bool:
        """Return whether `key` is present."""
        return self._find(key)[1] is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = DIM_MAX) -> int:
        """Return the whole number in field `key`, or `default` if the field is missing.

        Raises:
            ConfigError: the field is missing without a default, not a whole number, or outside `least` to `most`.
        """
        value = self._get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.origin}: {key} is missing; it must be a whole number from {least} to {most}")
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"it must be a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return the whole number in field `key`, or None if the field is missing."""
        return self.integer(key) if self.has(key) else None

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return the boolean in field `key`, or `default` if the field is missing."""
        value = self._typed(key, bool, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str = "") -> str:
        """Return the string in field `key`, or `default` if the field is missing or empty."""
        return self._typed(key, str, "a string") or default

    def texts(self, key: str) -> list[str] | None:
        """Return the list of strings in field `key`; None if the field is missing."""
        return self._list(key, str, "strings")

    def integers(self, key: str) -> list[int] | None:
        """Return the list of non-negative whole numbers in field `key`; None if the field is missing."""
        items = self._list(key, int, "whole numbers")
        self.refuse_if(not all(0 <= item <= DIM_MAX for item in items or ()), key, "it must be a list of whole numbers")
        return items

    def objects(self, key: str) -> list["ModelConfig"]:
        """Return the objects of the list in field `key`; empty if the field is missing."""
        items = cast("list[dict[str, object]] | None", self._list(key, dict, "objects"))
        parts = [
            ModelConfig(item, f"{self.origin}: {key}[{index}]", f"{self._prefix}{key}[{index}].")
            for index, item in enumerate(items or ())
        ]
        self.parts += parts
        return parts

    def child(self, key: str) -> "ModelConfig":
        """Return the object in field `key`. Fields read from it also appear in `used` of this configuration."""
        return self._derived(key, {}, self.values.get(key), "" if key in TEXT_PARTS else f"{key}.")

    def changed(self, changes: object, name: str) -> "ModelConfig":
        """Return a copy with fields replaced by those of `changes`, an object. Errors call the copy `name`."""
        return self._derived(name, self.values, changes, self._prefix)

    def wrong(self, key: str, why: str) -> ConfigError:
        """Return the error for a field with a bad value."""
        return ConfigError(f"{self.origin}: {key} is {_short(self._find(key)[1])}; {why}")

    def refuse_if(self, is_wrong: object, key: str, why: str) -> None:
        """Refuse the value of a field if `is_wrong` is true.

        Raises:
            ConfigError: `is_wrong` is true. The message ends with `why`.
        """
        if is_wrong:
            raise self.wrong(key, why)

    def _derived(self, name: str, base: Mapping[str, object], values: object, prefix: str) -> "ModelConfig":
        if not isinstance(values, dict):
            raise ConfigError(f"{self.origin}: {name} must be an object, got {_short(values)}")
        other = ModelConfig({**base, **cast("dict[str, object]", values)}, f"{self.origin}: {name}")
        other.used, other.notes, other.assumed, other._prefix = self.used, self.notes, self.assumed, prefix
        if base:
            other.defaults, other._base = self.defaults, self
        other._own = cast("dict[str, object]", values)
        self._known.add(name)
        self.parts.append(other)
        return other

    def _find(self, key: str) -> tuple[str, object]:
        """Return the name under which `key` is present, and the value, which is None if `key` is missing."""
        names = (key, *OTHER_NAMES.get(key, ()))
        found = next((name for name in names if self.values.get(name) is not None), None)
        if found is not None:
            return found, self.values[found]
        default = self.defaults.get(key)
        if isinstance(default, str):
            return key, self._find(default)[1]
        return key, None if any(name in self.values for name in names) else default

    def _get(self, key: str) -> object:
        name, value = self._find(key)
        others = OTHER_NAMES.get(key, ())
        for other in others if key != "max_position_embeddings" else ():
            if self.values.get(other) not in (None, value):
                raise self.wrong(key, f"it contradicts {other}, which is {_short(self.values[other])}")
        self.know(key)
        if value is not None:
            self.used[self._prefix + name] = value
            if name not in self.values:
                self.assumed.append(self._prefix + name)
        return value

    def _typed(self, key: str, kind: type[_Value], name: str) -> _Value | None:
        value = self._get(key)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, f"it must be {name}")
        return value

    def _list(self, key: str, kind: type[_Value], name: str) -> list[_Value] | None:
        items = cast("list[_Value] | None", self._typed(key, list, "a list"))
        if items is not None and len(items) > LAYERS_MAX:
            raise ConfigError(f"{self.origin}: {key} has {len(items)} entries; at most {LAYERS_MAX} are allowed")
        self.refuse_if(not all(type(item) is kind for item in items or ()), key, f"it must be a list of {name}")
        return items


def load(path: Path, ignore: Collection[str] = ()) -> ModelConfig:
    """Read the language model's part of a config.json.

    Args:
        path: the file or its folder.
        ignore: fields to treat as missing, as in `language_model`.

    Raises:
        ConfigError: the file is missing, or not a model's configuration.
    """
    names = ("config.json", "params.json") if path.is_dir() else ("",)
    file = next((path / name for name in names if (path / name).exists()), path / names[0])
    try:
        raw = _read(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; it must be a config.json or its folder") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: more than {FILE_BYTES_MAX} bytes; that is not a config.json")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: it must be a JSON object, got {_short(values)}")
    return language_model(ModelConfig(cast("dict[str, object]", values), str(file)), ignore)


def _read(file: Path) -> bytes:
    """Return the bytes of a regular file. Read at most one byte more than allowed."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a FIFO
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        return stream.read(FILE_BYTES_MAX + 1)


def language_model(config: ModelConfig, ignore: Collection[str] = ()) -> ModelConfig:
    """Return the language model's configuration: `config` itself, or one of its `TEXT_PARTS`.

    Fields outside the part that it does not repeat go to its `parts`, so that `unknown` also lists them.

    Args:
        config: configuration of the whole file.
        ignore: fields to treat as missing, named as in error messages: ``object.field``.

    Raises:
        ConfigError: a field to ignore does not exist, or parts are nested too deeply.
    """
    ignored: dict[str, object] = {}
    config = ModelConfig(_without(config.values, ignore, ignored), config.origin)
    if missing := [name for name in ignore if name not in ignored]:
        raise ConfigError(f"{config.origin}: --ignore {missing[0]}: there is no such field")
    _note_format(config)
    if any(isinstance(config.values.get(part), dict) for part in ("talker_config", "tts_config")):
        config.notes.append("The talker, which speaks the answer, keeps KV of its own; the sizes leave it out.")
    beside: list[ModelConfig] = []
    while nested := next((part for part in TEXT_PARTS if isinstance(config.values.get(part), dict)), ""):
        if len(beside) == len(TEXT_PARTS):
            raise ConfigError(f"{config.origin}: parts are nested too deeply")
        outer, config = config, config.child(nested)
        others = {key: value for key, value in outer.values.items() if key != nested}
        beside.append(ModelConfig({k: v for k, v in others.items() if config.values.get(k) != v}, outer.origin))
        config.is_part = True
        if not config.has("model_type"):
            config.values = {**config.values, "model_type": outer.values.get("model_type")}
    config.parts += beside
    config.ignored = ignored
    return config


def _without(
    values: Mapping[str, object], ignore: Collection[str], ignored: dict[str, object], prefix: str = "", depth: int = 0
) -> Mapping[str, object]:
    """Return `values` without the fields in `ignore`, and add these fields to `ignored`."""
    kept: dict[str, object] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"  # a key may be a number if the values come from Python
        if path in ignore:
            ignored[path] = value
        elif isinstance(value, dict) and depth < _DEPTH_SEARCHED:
            inner = "" if key in TEXT_PARTS else f"{path}."
            kept[key] = _without(cast("dict[str, object]", value), ignore, ignored, inner, depth + 1)
        else:
            kept[key] = value
    return kept


def _note_format(config: ModelConfig) -> None:
    """Add a note if a checkpoint has scales for 8-bit KV, because engines may use them without a request."""
    for name in ("quantization_config", "compression_config"):
        part = config.values.get(name)
        fields = cast("dict[str, object]", part) if isinstance(part, dict) else {}
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if fields.get(key):
                config.notes.append(
                    f"The checkpoint has {name}.{key} = {_short(fields[key])}: engines may then keep KV in 8 bits; "
                    "--dtype fp8 gives that size."
                )


def routed_experts(config: ModelConfig) -> tuple[int, int]:
    """Return the routed experts per layer, and the experts that a token uses; zeros unless the file states both."""
    found = [next((it for name in names if type(it := config.values.get(name)) is int), 0) for names in _EXPERT_COUNTS]
    return (found[0], found[1]) if 0 < found[1] <= found[0] else (0, 0)


def weight_format(config: ModelConfig) -> str:
    """Return the format of most weights by the ``quantization_config``: fp4 for four bits, fp8 for eight, else bf16."""
    for part in (config, *config.parts):
        for name in ("quantization_config", "compression_config"):
            fields = part.values.get(name)
            text = json.dumps(fields if isinstance(fields, dict) else {}).lower()
            text = json.dumps(json.loads(text, object_pairs_hook=_of_weights))
            if part.values.get("expert_dtype") == "fp4" or _FOUR_BITS.search(text):
                return "fp4"
            if _EIGHT_BITS.search(text):
                return "fp8"
    return "bf16"


def _of_weights(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Drop the fields that concern KV or activations."""
    return {name: value for name, value in fields if not _NOT_WEIGHTS.search(name)}


@cache
def _harmless_fields() -> Mapping[str, Mapping[str, Any]]:
    """Map each field of ``other_fields.toml`` to its group."""
    document = tomllib.loads((files("kvtier.tools.size") / "other_fields.toml").read_text(encoding="utf-8"))
    return {name: group for group in document["group"] for name in group["names"]}


def _is_harmless(name: str, value: object, model_type: object) -> bool:
    """Return whether the field is known to change no cache, with this value and for this model type."""
    group = _harmless_fields().get(name)
    if group is None or model_type not in group.get("types", [model_type]):
        return _HARMLESS.fullmatch(name.lower()) is not None
    allowed = group["values"]
    if isinstance(allowed, list):
        return value in allowed
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    return allowed == "any" or all(isinstance(item, _VALUES[allowed]) for item in items)


def _cache_fields(key: str, value: object, model_type: object) -> list[str]:
    """Return the names of `key` and of nested fields that have a value and seem to describe a cache."""
    found: list[str] = []
    rest: list[tuple[str, str, object]] = [(key, key, value)]
    while rest:
        path, name, each = rest.pop()
        if each in (None, False, 0, "") or _is_harmless(name, each, model_type):
            continue
        if isinstance(each, dict):
            fields = cast("dict[str, object]", each)
            rest += [(f"{path}.{name}", name, field) for name, field in fields.items()]
        elif isinstance(each, list):
            items = [cast("object", item) for item in cast("list[object]", each) if isinstance(item, dict)]
            rest += [(f"{path}[]", name, item) for item in items[:LAYERS_MAX]]
            found += [path] * (len(items) > LAYERS_MAX)
        is_structural = not isinstance(each, float) or each.is_integer()
        if is_structural and each not in ([], {}) and _CACHE_WORDS.search(name.lower()):
            found.append(path)
    return found


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
