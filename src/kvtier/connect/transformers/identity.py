"""Who a model is: the fingerprint of its weights and settings, and a cheap watch for changes while it is in use.

The weights' digest covers the tensors in memory (`state_dict` and the buffers that it leaves out) or, where the caller
names the checkpoint that they came from, its files. Everything else comes from the model's configuration, which enters
whole but for the fields of `IGNORED_FIELDS`: a field that we do not know may change the numbers, and then a miss is
right.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch

from kvtier.connect.hf_config import UNRELATED_FIELDS, plain
from kvtier.connect.transformers.positions import MovingRope, moving_rope, rope_settings
from kvtier.connect.transformers.upstream import Argument, Model
from kvtier.errors import UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest, checkpoint_files, digest_files, digest_tensors

logger = logging.getLogger(__name__)

IGNORED_FIELDS = UNRELATED_FIELDS | {
    "dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_internal", "rope_parameters", "rope_scaling",
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
}  # fmt: skip
"""Fields that cannot change a token's KV, or that enter on their own."""

ADAPTER_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""What an adapter layer of the peft library says of itself: which adapters count, and how much."""


def weights_digest(model: Model, checkpoint: Path | None, cache_file: Path | None) -> WeightsDigest:
    """The digest of the model's weights, and what it cost.

    Args:
        model: whose tensors are digested when there is no checkpoint.
        checkpoint: file or directory that the weights came from. The caller vouches that the model still has them.
        cache_file: where the digests of checkpoint files are kept.

    Raises:
        ConfigError: the checkpoint cannot be read.
        UnsupportedModelError: the tensors are not in memory, or are of a kind whose bytes cannot be read.
    """
    if checkpoint is not None:
        return digest_files(checkpoint_files(checkpoint), cache_file)
    return digest_tensors(_tensors(model))


def fingerprint(
    model: Model, weights: bytes, *, revision: str = "", epoch: int = 0, dtype: torch.dtype | None = None
) -> Fingerprint:
    """The fingerprint of `model`, given the digest of its weights.

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
        epoch=epoch,
        other={
            "engine": "transformers",
            "config": plain(model.config.to_dict(), IGNORED_FIELDS),
            "adapters": plain(dict(adapter_state(model)), IGNORED_FIELDS),
        },
    )


def adapter_state(model: Model) -> Iterator[tuple[str, object]]:
    """(name, what it says) of each adapter layer.

    The adapters' weights are tensors like others; which of them are active, and with what factor, is told here.
    """
    for name, module in model.named_modules():
        if "scaling" in vars(module):
            yield name, _adapter_fields(module)


def _adapter_fields(module: torch.nn.Module) -> dict[str, object]:
    # Attention layers of many models have a number called scaling, too; for them this is that number.
    return {field: getattr(module, field, None) for field in ADAPTER_STATE}


def _tensors(model: Model) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    rope = moving_rope(model)
    named: dict[str, object] = dict(model.state_dict(keep_vars=True))
    # Buffers that no checkpoint holds: inverse frequencies and the like, but for those that change with the length.
    named |= {name: buffer for name, buffer in model.named_buffers() if not _is_moving(name, rope)}
    seen: set[tuple[int, tuple[int, ...], torch.dtype]] = set()
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            yield name, type(value).__name__, (), memoryview(repr(value).encode())
            continue
        if value.device.type == "meta":
            raise UnsupportedModelError(
                f"weight {name!r} is not in memory (device meta), so the model cannot be told from others; allowed: a "
                "model whose weights are in memory, or attach(..., checkpoint=PATH) with the files they came from"
            )
        tensor = value.detach()
        # Tied weights are digested once, under the first of their names.
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


def _is_moving(name: str, rope: MovingRope | None) -> bool:
    return rope is not None and "inv_freq" in name


_SAMPLED_TENSORS = 16
_SAMPLED_VALUES = 8


class Watch:
    """Notices cheaply that a model is no longer what it was: well under a millisecond for hundreds of tensors.

    It sees every tensor that was replaced, and every change in place that torch counts (all but those through `.data`).
    Of the latter it sees those of a few values of a few tensors, so an update of all weights shows; one of a few
    tensors through `.data` may not, and needs `Attachment.set_epoch`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seen = self._look()
        # Views stay right as long as no tensor moves, which `_look` tells.
        self._views = _sample_views([*model.parameters()])
        self._values = _read(self._views)

    def has_changed(self) -> bool:
        """Whether it has, since this was made."""
        return self._look() != self._seen or _read(self._views) != self._values

    def _look(self) -> tuple[object, ...]:
        config = self._model.config
        seen: list[object] = [
            getattr(config, "_attn_implementation", None),
            str(rope_settings(config.get_text_config(decoder=True))),
        ]
        modules: Iterator[torch.nn.Module] = self._model.modules()
        has_moving_rope = moving_rope(self._model) is not None
        for module in modules:
            held: dict[str, Argument] = vars(module)
            parameters: dict[str, torch.Tensor | None] = held["_parameters"]
            buffers: dict[str, torch.Tensor | None] = held["_buffers"]
            # The same as parameters() and buffers(), in one walk and without names.
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
    """Every n-th value of every n-th tensor, as views."""
    views: list[torch.Tensor] = []
    for tensor in tensors[:: max(1, len(tensors) // _SAMPLED_TENSORS)]:
        if tensor.numel() and tensor.device.type != "meta" and tensor.is_contiguous():
            flat = tensor.detach().view(-1)
            views.append(flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES])
    return views


def _read(views: list[torch.Tensor]) -> list[float]:
    if len({(view.device, view.dtype) for view in views}) > 1:
        views = [view.to("cpu", torch.float32) for view in views]
    # Not a number is not equal to itself, and would look like a change at every call.
    return cast("Argument", torch.cat(views).float().nan_to_num(0.0)).tolist() if views else []
