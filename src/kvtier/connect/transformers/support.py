"""Checks whether models and calls are supported.

`attach` refuses an unsupported model. An unsupported call is computed without the cache, and its report says why.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from kvtier.connect.transformers.caches import (
    Argument,
    CachedLayer,
    CacheShape,
    Layer,
    Model,
    group_layers,
    integers,
)
from kvtier.errors import UnsupportedModelError

_ALLOWED = "allowed: decoder-only models whose layers have full or sliding-window attention and transformers' own cache"
_PROBE_TOKENS = 6
_PROBE_COMMON = 3
_LEAK_MAX = 0.1
"""Largest allowed relative change of a token's KV by later tokens. The change is 0, except for rounding in mixtures of
experts: their matrix shapes depend on the routing of all tokens. Attention to later tokens changes KV much more."""


def check_model(model: object) -> Model:
    """Refuse a model by its class and configuration, before anything is computed.

    Raises:
        UnsupportedModelError: the model is refused. The message gives the reason and the allowed models.
    """
    if not isinstance(model, PreTrainedModel):
        hint = "; for a peft model pass model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers PreTrainedModel{hint}; {_ALLOWED}")
    checked: Model = model
    name = type(checked).__name__
    config = checked.config
    decoder = config.get_text_config(decoder=True)
    if not checked.can_generate():
        raise UnsupportedModelError(f"{name} cannot generate text; {_ALLOWED}")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model, whose KV depends on the encoder; {_ALLOWED}")
    if getattr(decoder, "add_cross_attention", False):
        raise UnsupportedModelError(f"{name} has cross-attention, whose KV depends on another input; {_ALLOWED}")
    looks_ahead = getattr(decoder, "use_bidirectional_attention", None) in {True, "all"}
    if looks_ahead or not getattr(decoder, "is_causal", True):
        raise UnsupportedModelError(
            f"{name} attends to later tokens, so the KV of a prefix cannot be reused; {_ALLOWED}"
        )
    is_chunked = "chunked_attention" in (getattr(decoder, "layer_types", None) or ())
    if is_chunked or getattr(decoder, "attention_chunk_size", None):
        raise UnsupportedModelError(f"{name} has chunked attention, which is not supported yet; {_ALLOWED}")
    if checked.generation_config.cache_implementation not in _DYNAMIC:
        raise UnsupportedModelError(
            f"{name}.generation_config.cache_implementation is {checked.generation_config.cache_implementation!r}; "
            "allowed: None or 'dynamic'"
        )
    return checked


_DYNAMIC = (None, "dynamic", "hybrid")  # the library itself reads "hybrid" as None
_SERVED_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer}


def inspect_cache(model: Model) -> CacheShape:
    """Find the layers of the model's cache by running the model twice on a few tokens.

    Raises:
        UnsupportedModelError: a layer's cache has an unsupported class, or later tokens change the KV of earlier ones.
    """
    name = type(model).__name__
    decoder = model.config.get_text_config(decoder=True)
    try:
        cache = DynamicCache(config=decoder)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: transformers has no dynamic cache for this model: {error}; {_ALLOWED}"
        ) from error
    for index, layer in enumerate(cache.layers):
        # A layer that has no KV, or uses another layer's KV, has a DummyLayer.
        kind = type(layer)
        if kind not in _SERVED_LAYERS and kind.__name__ != "DummyLayer":
            raise UnsupportedModelError(f"{name}: layer {index} has a cache of class {kind.__name__}; {_ALLOWED}")
    first, second = (_probe(model, DynamicCache(config=decoder), variant) for variant in (0, 1))
    probed: list[Layer] = list(first.layers)
    layers = [_cached_layer(name, index, layer) for index, layer in enumerate(probed) if layer.keys is not None]
    if not layers:
        raise UnsupportedModelError(f"{name}: no layer put anything in the cache; {_ALLOWED}")
    leak = max(_difference(a, b) for a, b in zip(first.layers, second.layers, strict=True))
    if not leak <= _LEAK_MAX:
        raise UnsupportedModelError(
            f"{name}: the KV of a token changes by {leak:.0%} with the tokens after it, so the KV of a prefix cannot "
            f"be reused; {_ALLOWED}"
        )
    return group_layers(decoder, layers)


def _probe(model: Model, cache: DynamicCache, variant: int) -> DynamicCache:
    """Return the cache after a few tokens, the last of which depend on `variant`."""
    tokens = _plain_tokens(model, _PROBE_TOKENS + 3)
    last = tokens[_PROBE_COMMON:_PROBE_TOKENS] if variant == 0 else tokens[_PROBE_TOKENS:]
    input_ids = torch.tensor([tokens[:_PROBE_COMMON] + last], device=model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=input_ids, past_key_values=cache, use_cache=True, return_dict=True)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot read {_PROBE_TOKENS} tokens into a dynamic cache: {error}; {_ALLOWED}"
        ) from error
    if output.get("past_key_values") is not cache:
        raise UnsupportedModelError(f"{type(model).__name__} does not use the cache that it is given; {_ALLOWED}")
    return cache


def _plain_tokens(model: Model, count: int) -> list[int]:
    """Return tokens without a special meaning, so that a multimodal model does not expect an image."""
    config = model.config
    fields = {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}
    special = {value for name, value in fields.items() if name.endswith(("_token_id", "_token_index"))}
    size = config.get_text_config(decoder=True).vocab_size
    plain = [token for token in range(min(size, 1000)) if token not in special]
    return [plain[(position * 7 + 3) % len(plain)] for position in range(count)]


def _cached_layer(name: str, index: int, layer: Layer) -> CachedLayer:
    keys, values = cast("torch.Tensor", layer.keys), cast("torch.Tensor", layer.values)
    if keys.ndim != 4 or values.ndim != 4 or keys.dtype != values.dtype or keys.shape[-2] != values.shape[-2]:
        raise UnsupportedModelError(
            f"{name}: layer {index} has K {tuple(keys.shape)} {keys.dtype} and V {tuple(values.shape)} {values.dtype}; "
            "allowed: [batch, heads, tokens, dim] of one dtype"
        )
    if keys.device.type not in {"cpu", "cuda"} or values.device != keys.device:
        raise UnsupportedModelError(f"{name}: layer {index} is on device {keys.device}; allowed: cpu or cuda")
    window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
    if window is not None and window < 2:
        raise UnsupportedModelError(
            f"{name}: layer {index} has a sliding window of {window}; allowed: at least 2 tokens"
        )
    return CachedLayer(
        index=index,
        window=window,
        key_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_heads=values.shape[1],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        device=keys.device,
    )


def _difference(first: Layer, second: Layer) -> float:
    """Return the relative difference of two runs in their common tokens. Window layers may lack the first tokens."""
    if first.keys is None:
        return 0.0
    seen = first.keys.shape[-2] - (_PROBE_TOKENS - _PROBE_COMMON)
    if seen < 1:
        return 0.0
    worst = 0.0
    for a, b in ((first.keys, second.keys), (first.values, second.values)):
        left, right = a[..., :seen, :].float(), b[..., :seen, :].float()
        size = float(left.norm())
        worst = max(worst, float((left - right).norm()) / size if size else 0.0)
    return worst


@dataclass(frozen=True, slots=True)
class Options:
    """A call's generation options.

    As in the library, a value comes from the arguments, else from the given configuration, else from the model's own.
    """

    arguments: Mapping[str, Argument]
    given: GenerationConfig | None
    own: GenerationConfig

    def get(self, name: str) -> Argument:
        """Return the value of one option."""
        if name in self.arguments:
            return self.arguments[name]
        value = getattr(self.given, name, None)
        return value if value is not None else getattr(self.own, name, None)

    def tokens(self, name: str) -> frozenset[int]:
        """Return the token ids that an option names: one, several or none."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if isinstance(value, torch.Tensor):
            return frozenset(integers(value.reshape(-1)))
        return frozenset(cast("list[int]", value) if isinstance(value, (list, tuple, set)) else [int(value)])

    def total_tokens(self, prompt_columns: int) -> int:
        """Return how many columns the prompt and the generated tokens occupy at most."""
        new_tokens = self.get("max_new_tokens")
        if new_tokens is not None:
            return prompt_columns + int(new_tokens)
        length = self.get("max_length")
        # The library's default is 20 new tokens.
        return max(int(length), prompt_columns + 1) if length is not None else prompt_columns + 20


_GENERATE_ARGUMENTS = {
    *inspect.signature(vars(GenerationMixin)["generate"]).parameters,
    *("input_ids", "attention_mask", "past_key_values", "use_cache", "tokenizer", "return_dict"),
}  # fmt: skip
"""Arguments of `generate` that are not inputs of the model, or are checked elsewhere."""

_OFF: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "assistant_model": (None,),
    "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "custom_generate": (None,),
    "synced_gpus": (None, False),
    "cache_implementation": _DYNAMIC,
    "output_hidden_states": (None, False),
    "output_attentions": (None, False),
}
"""Options that the cache does not support, with the values that turn them off."""


_IN_PIECES_SINCE = (5, 23)
"""The first release whose chunked prefill continues a filled cache correctly. 5.17 generates wrong tokens."""

CONTINUES_IN_PIECES = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= _IN_PIECES_SINCE


def reason_against(model: Model, options: Options) -> str:
    """Return why a call with these options is computed without the cache; empty if it can be cached."""
    return _reason_in_options(options) or _reason_around(model)


def _reason_in_options(options: Options) -> str:
    arguments = options.arguments
    if arguments.get("past_key_values") is not None:
        return "past_key_values was given, so the call has its own cache"
    if options.get("use_cache") is False:
        return "use_cache is False"
    for name, allowed in _OFF.items():
        value = options.get(name)
        if not any(value is item or (isinstance(item, (int, float, str)) and value == item) for item in allowed):
            shown = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)
            return f"{name} is {shown}; allowed: {' or '.join(map(repr, allowed))}"
    pieces = options.get("prefill_chunk_size")
    if pieces is not None and not CONTINUES_IN_PIECES:
        return (
            f"prefill_chunk_size is {pieces}, and this release of transformers then computes the prompt from its first "
            f"token; allowed: None, or transformers {'.'.join(map(str, _IN_PIECES_SINCE))} or later"
        )
    for name, value in arguments.items():
        if value is not None and name not in _GENERATE_ARGUMENTS and not hasattr(options.own, name):
            return f"the model input {name!r} was given, on which KV may depend; allowed: input_ids and attention_mask"
    return ""


def _reason_around(model: Model) -> str:
    if model.training:
        return "the model is in training mode; call model.eval()"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, so KV depends on the caller's context"
    processes = torch.distributed
    if processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1:
        return "torch.distributed runs with several processes"
    return ""


def padding_mask(input_ids: torch.Tensor, options: Options) -> torch.Tensor:
    """Return the given attention mask, or the mask that the library infers from padding tokens.

    The library infers no mask if the padding token is also an end token.
    """
    given = options.arguments.get("attention_mask")
    if isinstance(given, torch.Tensor):
        return given
    pads, ends = options.tokens("pad_token_id"), options.tokens("eos_token_id")
    if not pads or pads & ends:
        return torch.ones_like(input_ids)
    return input_ids.ne(next(iter(pads))).long()


def accepts_padding(model: Model) -> bool:
    """Return whether padding leaves a row's KV unchanged, because positions are an input derived from the mask."""
    return "position_ids" in inspect.signature(model.forward).parameters
