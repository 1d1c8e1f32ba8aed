"""The lossy codecs in torch: each block of tokens passes through a few operations on arrays.

Arrays of a side have the shape (heads, tokens, channels), those of a block (heads, tokens, channel groups, channels of
a group). All tensors come from NumPy's arrays, so torch's default type and device have no effect.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator

import numpy as np
import torch

from kvtier.codec.lossy import HALF_STEP, STEP_MIN, TOLERANCES, Array, Form, Side
from kvtier.layout import TOKEN_GROUP

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INFINITE = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}
_BLOCK_NUMBERS = (1 << 15) - 1
_INTS = {2: torch.int16, 4: torch.int32}


def encode(raw: memoryview, stored: memoryview, form: Form) -> bool:
    """Fill `stored` after its head, or return False if a scale or a decoded number would not be finite."""
    limit = torch.finfo(_DTYPES[form.element]).max
    numbers = _numbers(raw, form)
    if np.bitwise_and(numbers, (1 << 8 * numbers.itemsize - 1) - 1).max() >= _INFINITE[form.element]:
        return False
    for side, (lows, steps, codes), its_numbers in zip(form.sides, _parts(stored, form), numbers, strict=True):
        for heads, scales_of, tokens, x in _blocks(its_numbers, side, form):
            dim = 1 if side.is_by_channel else 3
            if side.bits == 8:
                low = torch.from_numpy(np.zeros((), np.float32))
                largest = torch.stack([it.abs().amax(1, keepdim=True) for it in x.split(TOKEN_GROUP, 1)]).amax(0)
                step = _bf16((largest / 127).clamp_min(STEP_MIN))
                top = 127 * step
            else:
                low = _bf16_below(x.amin(dim, keepdim=True)).add_(0)  # no negative zero
                step = _bf16(((x.amax(dim, keepdim=True) - low) / 15).clamp_min(STEP_MIN))
                top = 15 * step + low
                lows[heads, scales_of] = _bits(low).reshape(lows[heads, scales_of].shape)
            if not bool(((top.abs() <= limit) & (low.abs() <= limit)).all()):
                return False
            steps[heads, scales_of] = _bits(step).reshape(steps[heads, scales_of].shape)
            q = x.sub_(low).mul_(1 / step).round_().flatten(2)
            if side.bits == 8:
                codes[heads, tokens] = q.to(torch.int8).view(torch.uint8).numpy()
            else:
                q = q.to(torch.uint8)
                half = form.channels // 2
                codes[heads, tokens] = (q[..., :half] | (q[..., half:] << 4)).numpy()
    return True


def decode(stored: memoryview, into: memoryview, form: Form) -> None:
    """Fill `into`."""
    target = form.view(into)
    whole = np.empty((len(form.sides), form.heads, form.exact_tokens + form.tokens, form.channels), target.dtype)
    for side, parts, its_numbers in zip(form.sides, _parts(stored, form), whole, strict=True):
        room = its_numbers[:, form.exact_tokens :]
        for heads, scales_of, tokens in _slices(side, form):
            low, step, q = _scaled(parts, side, heads, scales_of, tokens, form)
            restored = q.mul_(step).add_(low).flatten(2).to(_DTYPES[form.element])
            room[heads, tokens] = restored.view(_INTS[target.itemsize]).numpy().view(target.dtype)
    target[:] = whole.reshape(target.shape)


def wrong(raw: memoryview, stored: memoryview, decoded: memoryview, form: Form) -> int:
    """Return how many numbers of `decoded` are farther from those of `raw` than `stored` allows."""
    relative, absolute = TOLERANCES[form.element]
    found = 0
    sides = zip(form.sides, _parts(stored, form), _numbers(raw, form), _numbers(decoded, form), strict=True)
    for side, parts, before, after in sides:
        blocks = zip(_blocks(before, side, form), _blocks(after, side, form), strict=True)
        for (heads, scales_of, tokens, x), (*_, y) in blocks:
            _, step, _ = _scaled(parts, side, heads, scales_of, tokens, form)
            allowed = y.abs().mul_(relative).add_(step * HALF_STEP + absolute)
            found += x.numel() - int(torch.count_nonzero(x.sub_(y).abs_() <= allowed))
    return found


def _numbers(memory: memoryview, form: Form) -> Array:
    """Return a copy of a section's numbers as integers, of shape (sides, heads, tokens, channels)."""
    copied = np.array(form.view(memory), order="C")
    return copied.reshape(len(form.sides), form.heads, -1, form.channels)


def _parts(stored: memoryview, form: Form) -> list[tuple[Array, Array, Array]]:
    """Return the lows, steps and codes of each side of a stored section."""
    out = np.frombuffer(stored, np.uint8)
    sides: list[tuple[Array, Array, Array]] = []
    for side in form.sides:
        scales = out[side.scales_at : side.codes_at].view("<u2")
        codes = out[side.codes_at :][: form.heads * form.tokens * form.channels * side.bits // 8]
        shape = (form.heads, -1, form.channels if side.is_by_channel else form.channels // form.channel_group)
        lows, steps = scales[: -side.groups], scales[-side.groups :]
        sides.append(
            (
                lows.reshape(shape) if len(lows) else lows,
                steps.reshape(shape),
                codes.reshape(form.heads, form.tokens, -1),
            )
        )
    return sides


def _slices(side: Side, form: Form) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the heads, scales and tokens of each block. A block covers some heads and `side.token_group` tokens.

    For larger blocks, torch would start threads in each thread that codes. They would mostly wait for a core.
    """
    count = max(_BLOCK_NUMBERS // (side.token_group * form.channels), 1)
    for head in range(0, form.heads, count):
        for number, start in enumerate(range(0, form.tokens, side.token_group)):
            tokens = slice(start, min(start + side.token_group, form.tokens))
            yield slice(head, head + count), slice(number, number + 1) if side.is_by_channel else tokens, tokens


def _blocks(numbers: Array, side: Side, form: Form) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
    """Yield the slices of each block, and the numbers of the block in float32."""
    rest = torch.from_numpy(numbers.view(f"<i{numbers.itemsize}")).view(_DTYPES[form.element])[:, form.exact_tokens :]
    for heads, scales_of, tokens in _slices(side, form):
        yield (
            heads,
            scales_of,
            tokens,
            rest[heads, tokens].to(torch.float32, copy=True).unflatten(2, (-1, form.channel_group)),
        )


def _scaled(
    parts: tuple[Array, Array, Array], side: Side, heads: slice, scales_of: slice, tokens: slice, form: Form
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a block's lows, steps and codes in float32."""
    lows, steps, codes = parts
    coded = codes[heads, tokens]
    groups = form.channels // form.channel_group
    shape = (len(coded), 1, groups, form.channel_group) if side.is_by_channel else (*coded.shape[:2], groups, 1)
    step = _of_bits(steps[heads, scales_of]).reshape(shape)
    if side.bits == 8:
        low, q = torch.from_numpy(np.zeros((), np.float32)), torch.from_numpy(coded.view(np.int8).copy()).float()
    else:
        low = _of_bits(lows[heads, scales_of]).reshape(shape)
        q = torch.from_numpy(np.empty((*coded.shape[:2], form.channels), np.float32))
        half = form.channels // 2
        q[..., :half] = torch.from_numpy(coded & 15)
        q[..., half:] = torch.from_numpy(coded >> 4)
    return low, step, q.view(*coded.shape[:2], groups, form.channel_group)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest bf16."""
    return x.to(torch.bfloat16).float()


def _bf16_below(x: torch.Tensor) -> torch.Tensor:
    """Round down to bf16."""
    bits = x.view(torch.int32)
    return ((bits + (bits >> 31 & 0xFFFF)) & ~0xFFFF).view(torch.float32)


def _bits(x: torch.Tensor) -> Array:
    """Return the bits of bf16 numbers."""
    return x.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def _of_bits(bits: Array) -> torch.Tensor:
    return torch.from_numpy((bits.astype(np.int32) << 16).view(np.float32))
