"""Stores and restores KV in one form: through a lossy codec of kvtier, or through a reference.

The codecs run in real frames with the layout of Transformers. The references are not codecs of kvtier. They prove that
the measures detect a loss.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, cast

import torch

from kvtier.codec import registry
from kvtier.codec.frame import OPEN_SCRATCH_BYTES, frame_bytes, head_bytes, pack, pack_scratch_bytes, unpack_in_place
from kvtier.codec.frame_header import Identity
from kvtier.connect.transformers.caches import CachedLayer, group_layers
from kvtier.layout import GroupLayout, Loss
from kvtier.types import ObjectName

CHUNK_TOKENS = 256
GROUP = 32
"""Numbers that share a scale in the 2-bit reference."""


class Restored(NamedTuple):
    """KV that was stored in one form and restored."""

    kv: torch.Tensor
    ratio: float
    """Stored bytes as a share of the raw ones. For a codec, whole frames count; a reference has no headers."""


def restored(kv: torch.Tensor, form: str, depth: int = 0) -> Restored:
    """Store whole chunks of KV in a form, and restore the chunks.

    Args:
        kv: keys and values in bf16, [layers, 2, KV heads, tokens, channels].
        form: a lossy codec, or one of `REFERENCES`.
        depth: number of chunks of the prompt before the given ones.
    """
    if form in REFERENCES:
        chunks = kv.float().unflatten(3, (-1, CHUNK_TOKENS))
        numbers, bits = REFERENCES[form](chunks)
        return Restored(numbers.flatten(3, 4).bfloat16(), bits / 16)
    (exact, codec), parts = registry.coders(form), kv.split(CHUNK_TOKENS, 3)
    layers, _, heads, _, channels = kv.shape
    group = _group(layers, heads, channels, form)
    slot, scratch = (memoryview(bytearray(it)) for it in (frame_bytes(group), pack_scratch_bytes(group, exact)))
    payload = torch.frombuffer(slot, dtype=torch.bfloat16, offset=head_bytes(group)).view(parts[0].shape)
    found: list[torch.Tensor] = []
    stored_bytes = 0
    for number, part in enumerate(parts, depth):
        identity = Identity(ObjectName(bytes(32)), depth=number)
        payload.copy_(part)
        frame = bytes(pack(slot, group, identity, exact, scratch, lossy=codec))
        slot[: len(frame)] = frame
        unpack_in_place(slot, len(frame), group, identity, memoryview(bytearray(OPEN_SCRATCH_BYTES)))
        stored_bytes += len(frame)
        found.append(payload.clone())
    return Restored(torch.cat(found, 3), stored_bytes / len(parts) / len(slot))


@cache
def _group(layers: int, heads: int, channels: int, loss: str) -> GroupLayout:
    like = [
        CachedLayer(it, None, heads, channels, heads, channels, torch.bfloat16, torch.device("cpu"))
        for it in range(layers)
    ]
    return group_layers(None, like).layout(CHUNK_TOKENS).of_class(cast("Loss", loss)).groups[0]


def _fp8(chunks: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Round to E4M3. The keys and the values of a head have one scale each per chunk."""
    scale = (chunks.abs().amax((-1, -2), keepdim=True) / 448).clamp_min(1e-12)
    return (chunks / scale).to(torch.float8_e4m3fn).float() * scale, 8 + 16 / chunks[0, 0, 0, 0].numel()


def _rotated(chunks: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Rotate each token's numbers at random, and round the results to the 16 best levels for a normal distribution."""
    channels = chunks.shape[-1]
    rotation = torch.linalg.qr(torch.randn(channels, channels, generator=torch.Generator().manual_seed(1))).Q
    norm = chunks.norm(dim=-1, keepdim=True).bfloat16().float().clamp_min(1e-12) / math.sqrt(channels)
    levels = _normal_levels(16)
    nearest = torch.bucketize(chunks / norm @ rotation, (levels[1:] + levels[:-1]) / 2)
    return levels[nearest] @ rotation.T * norm, 4 + 16 / channels


@cache
def _normal_levels(count: int) -> torch.Tensor:
    """Return the levels with the least mean squared error for a normal distribution, by Lloyd's method."""
    numbers = torch.special.ndtri((torch.arange(1 << 12) + 0.5) / (1 << 12))
    levels = torch.linspace(-2.5, 2.5, count)
    for _ in range(200):
        cells = torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2)
        levels = torch.zeros(count).index_add_(0, cells, numbers) / torch.bincount(cells, minlength=count)
    return levels


def _two_bits(chunks: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Round to 4 levels: keys by channel in groups of tokens, values by token in groups of channels."""
    keys, values = chunks.unbind(1)
    return torch.stack((_steps(keys, -2), _steps(values, -1)), 1), 2 + 32 / GROUP


def _steps(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    groups = numbers.unflatten(axis, (-1, GROUP))
    low = groups.amin(axis, keepdim=True)
    step = ((groups.amax(axis, keepdim=True) - low) / 3).bfloat16().float().clamp_min(1e-12)
    return (((groups - low) / step).round().clamp(0, 3) * step + low).reshape(numbers.shape)


REFERENCES: Mapping[str, Callable[[torch.Tensor], tuple[torch.Tensor, float]]] = {
    "fp8": _fp8,
    "rotation": _rotated,
    "int2": _two_bits,
}
"""Functions that round chunks, [layers, 2, KV heads, chunks, tokens, channels], and also return the bits per number."""
