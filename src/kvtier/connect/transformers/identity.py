"""Identifies a model: computes the fingerprint of its weights and settings, and detects changes while it is in use.

The weights' digest covers the tensors in memory (`state_dict` and the buffers that it omits). The digest covers a
checkpoint's files instead if the caller names the checkpoint and a sample of every weight matches. The whole
configuration enters the fingerprint, except `IGNORED_FIELDS`. Unknown fields enter it too, because they may change KV.

Some position encodings depend on the length of the text. With ``dynamic`` and ``longrope`` scaling, a text beyond the
original length has different frequencies from its first token on. So its KV must not be used for a shorter text, or
vice versa. A call is cached only if it stays below that length.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch

from kvtier.connect.fingerprint_exclusions import UNRELATED_FIELDS, plain
from kvtier.connect.transformers.caches import Argument, Model, ModelConfig
from kvtier.connect.transformers.weight_comparison import difference
from kvtier.errors import UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest, checkpoint_files, digest_files, digest_tensors

logger = logging.getLogger(__name__)

IGNORED_FIELDS = UNRELATED_FIELDS | {
    "dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_internal", "rope_parameters", "rope_scaling",
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
}  # fmt: skip
"""Fields that cannot change a token's KV, or that enter the fingerprint separately."""

ADAPTER_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""The state of a peft adapter layer: which adapters are active, and their scaling."""


_ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def rope_settings(config: ModelConfig) -> dict[str, object]:
    """Return the rotary position settings in a decoder's configuration."""
    values = {field: getattr(config, field, None) for field in _ROPE_FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def fixed_rope_tokens(model: Model) -> int | None:
    """Return the length from which the position encoding depends on the text's length; None if it never does."""
    config = model.config.get_text_config(decoder=True)
    lengths = [length for kind, length in _rope_kinds(config) if kind in {"dynamic", "longrope"}]
    return min(lengths) if lengths else None


def _rope_kinds(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield (kind of scaling, original length) for each set of frequencies. Some models have one set per layer type."""
    found: object = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return
    fields = cast("Mapping[str, object]", found)
    nested = [cast("Mapping[str, object]", value) for value in fields.values() if isinstance(value, Mapping)]
    for settings in nested or [fields]:
        kind = str(settings.get("rope_type") or settings.get("type") or "default")
        original = settings.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        # "dynamic" scaling always starts at the model's own maximum.
        length = original if original and kind != "dynamic" else getattr(config, "max_position_embeddings", 0)
        yield kind, int(cast("int", length))


def weights_digest(model: Model, checkpoint: Path | None, cache_file: Path | None) -> WeightsDigest:
    """Return the digest of the model's weights, with the cost of computing it.

    Args:
        model: the model, whose tensors are digested if there is no checkpoint.
        checkpoint: file or directory of the weights. Files that differ from the tensors are not used.
        cache_file: caches the digests of checkpoint files.

    Raises:
        ConfigError: the checkpoint cannot be read.
        UnsupportedModelError: the tensors are not in memory, or their bytes cannot be read.
    """
    if checkpoint is not None:
        files = digest_files(checkpoint_files(checkpoint), cache_file)
        doubt = difference(model, files)
        if not doubt:
            return files
        logger.warning("the weights in memory are digested, because they may not be those of %s: %s", checkpoint, doubt)
    return digest_tensors(_tensors(model))


def fingerprint(model: Model, weights: bytes, *, revision: str = "", dtype: torch.dtype | None = None) -> Fingerprint:
    """Return the fingerprint of `model`, given the digest of its weights.

    Raises:
        ConfigError: a field of the configuration has no canonical form.
    """
    decoder = model.config.get_text_config(decoder=True)
    attention = {"implementation": str(getattr(model.config, "_attn_implementation", None) or "default")}
    if decoder is not model.config:
        attention["decoder_implementation"] = str(getattr(decoder, "_attn_implementation", None) or "default")
    return Fingerprint(
        weights=weights,
        revision=revision,
        attention=attention,
        rope=cast("Mapping[str, object]", plain(rope_settings(decoder), frozenset())),
        dtype=str(dtype or model.dtype).removeprefix("torch."),
        other={
            "engine": "transformers",
            "config": plain(model.config.to_dict(), IGNORED_FIELDS),
            "adapters": plain(dict(adapter_state(model)), IGNORED_FIELDS),
        },
    )


def adapter_state(model: Model) -> Iterator[tuple[str, object]]:
    """Yield (name, state) of each adapter layer. The adapters' weights are part of the weights' digest."""
    for name, module in model.named_modules():
        if "scaling" in vars(module):
            yield name, _adapter_fields(module)


def _adapter_fields(module: torch.nn.Module) -> dict[str, object]:
    # Attention layers of many models have an attribute `scaling`, too: a number, which is then their only state.
    return {field: getattr(module, field, None) for field in ADAPTER_STATE}


def _tensors(model: Model) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    has_moving_rope = fixed_rope_tokens(model) is not None
    named: dict[str, object] = dict(model.state_dict(keep_vars=True))
    # Add buffers that checkpoints omit, such as inverse frequencies, except those that change with the text's length.
    named |= {name: buffer for name, buffer in model.named_buffers() if not (has_moving_rope and "inv_freq" in name)}
    seen: set[tuple[int, tuple[int, ...], torch.dtype]] = set()
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            yield name, type(value).__name__, (), memoryview(repr(value).encode())
            continue
        if value.device.type == "meta":
            raise UnsupportedModelError(
                f"weight {name!r} is not in memory (device meta), so the model cannot be identified; allowed: a "
                "model whose weights are in memory, or attach(..., checkpoint=PATH) with the files they came from"
            )
        tensor = value.detach()
        # Digest tied weights once, under their first name.
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and same in seen:
            continue
        seen.add(same)
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _content(name, tensor)


def _content(name: str, tensor: torch.Tensor) -> memoryview:
    try:
        flat = tensor.contiguous().cpu().reshape(-1)
        return memoryview(cast("bytes", flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedModelError(
            f"the bytes of weight {name!r} ({type(tensor).__name__}, {tensor.dtype}) cannot be read: {error}; allowed: "
            "plain tensors, or attach(..., checkpoint=PATH) with the files they came from"
        ) from error


_SAMPLED_TENSORS = 16
_SAMPLED_VALUES = 8


class ModelWatch:
    """Detects changes of a model, in well under a millisecond for hundreds of tensors.

    It detects every replaced tensor and every in-place change that torch counts. torch does not count changes through
    `.data`; the watch detects them only in a few sampled values. It detects an update of all weights, but may miss an
    update of a few tensors through `.data`. That update requires a new `attach`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seen = self._look()
        # The views stay valid until a tensor moves, which `_look` detects.
        self._views = _sample_views([*model.parameters()])
        self._values = _read(self._views)

    def has_changed(self) -> bool:
        """Return whether the model has changed since the watch was created."""
        return self._look() != self._seen or _read(self._views) != self._values

    def _look(self) -> tuple[object, ...]:
        config = self._model.config
        seen: list[object] = [
            getattr(config, "_attn_implementation", None),
            str(rope_settings(config.get_text_config(decoder=True))),
        ]
        modules: Iterator[torch.nn.Module] = self._model.modules()
        has_moving_rope = fixed_rope_tokens(self._model) is not None
        for module in modules:
            held: dict[str, Argument] = vars(module)
            parameters: dict[str, torch.Tensor | None] = held["_parameters"]
            buffers: dict[str, torch.Tensor | None] = held["_buffers"]
            # These are the same tensors as in parameters() and buffers(), in one pass.
            for tensor in parameters.values():
                if tensor is not None:
                    seen += (tensor.data_ptr(), _version(tensor))
            for name, tensor in buffers.items():
                if tensor is not None and not (has_moving_rope and "inv_freq" in name):
                    seen += (tensor.data_ptr(), _version(tensor))
            if "scaling" in held:
                seen.append(str(_adapter_fields(module)))
        return tuple(seen)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _sample_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a few evenly spaced values in each of a few tensors."""
    views: list[torch.Tensor] = []
    for tensor in tensors[:: max(1, len(tensors) // _SAMPLED_TENSORS)]:
        if tensor.numel() and tensor.device.type != "meta" and tensor.is_contiguous():
            flat = tensor.detach().view(-1)
            views.append(flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES])
    return views


def _read(views: list[torch.Tensor]) -> list[float]:
    if len({(view.device, view.dtype) for view in views}) > 1:
        views = [view.to("cpu", torch.float32) for view in views]
    # NaN is not equal to itself, so it would count as a change in every call.
    return cast("Argument", torch.cat(views).float().nan_to_num(0.0)).tolist() if views else []
