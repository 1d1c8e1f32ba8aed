"""The lossy codecs in torch: each piece of a section passes through a few operations on arrays.

Arrays of a side and of a piece have the shape (heads, tokens, channels). All tensors come from NumPy's arrays, so
torch's default type and device have no effect.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator

import numpy as np
import torch

from kvtier.codec.lossy import (
    BIAS,
    BLOCK_TOKENS,
    COPIED,
    HALF_STEP,
    OCTAVE,
    OTHERS,
    SCALED,
    SHIFT_MAX,
    STEP_MIN,
    TOLERANCES,
    USUAL,
    Array,
    Form,
    Side,
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PIECE_NUMBERS = (1 << 15) - 1
_INTS = {2: torch.int16, 4: torch.int32}
_TOKENS = np.arange(BLOCK_TOKENS, dtype=np.uint8)[:, None]
"""Position of each token's bit in the rows that hold the bits of codes beyond the fourth."""


def encode(raw: memoryview, stored: memoryview, form: Form) -> bool:
    """Code the numbers. Return False if a number is not finite, or a scale or a decoded number would not be."""
    limit = torch.finfo(_DTYPES[form.element]).max
    sides = zip(form.sides, _parts(stored, form), _numbers(raw, form), strict=True)
    for side, (lows, steps, chosen, codes), its_numbers in sides:
        if len(chosen):
            magnitudes = np.bitwise_and(its_numbers, (1 << 8 * its_numbers.itemsize - 1) - 1).max((0, 2))
            largest = _floats(magnitudes[form.exact_tokens :], form).view(torch.int32)
            chosen[:] = _exponents(largest.numpy(), its_numbers[0, form.exact_tokens :], side, form)
        for heads, group, tokens, x in _pieces(its_numbers, side, form):
            scale = _scale(chosen, tokens)
            x.mul_(1 / scale)
            least, greatest, levels = x.amin(1, keepdim=True), x.amax(1, keepdim=True), (1 << side.bits) - 1
            low = _bf16_below(least).add_(0)  # no negative zero
            step = _bf16(((greatest - low) / levels).clamp_min(STEP_MIN))
            # A comparison with NaN is false, so NaN is refused as well.
            extremes = least, greatest, low, levels * step + low
            if not all(bool((it.abs() * scale.max() <= limit).all()) for it in extremes):
                return False
            lows[heads, group], steps[heads, group] = _bits(low), _bits(step)
            packed = _packed(x.sub_(low).mul_(1 / step).round_().to(torch.uint8).numpy(), side.bits)
            codes[heads, tokens.start // BLOCK_TOKENS :][:, : packed.shape[1]] = packed
    return True


def decode(stored: memoryview, into: memoryview, form: Form) -> None:
    """Restore the numbers of a section from its stored bytes."""
    target = form.view(into)
    whole = np.empty((len(form.sides), form.heads, form.exact_tokens + form.tokens, form.channels), target.dtype)
    for side, parts, its_numbers in zip(form.sides, _parts(stored, form), whole, strict=True):
        room = its_numbers[:, form.exact_tokens :]
        lows, steps, chosen, codes = parts
        for heads, group, tokens in _slices(side, form):
            packed = codes[heads, tokens.start // BLOCK_TOKENS : -(-tokens.stop // BLOCK_TOKENS)]
            code = torch.from_numpy(_unpacked(packed)[:, : tokens.stop - tokens.start]).float()
            code.mul_(_of_bits(steps[heads, group])).add_(_of_bits(lows[heads, group]))
            restored = code.mul_(_scale(chosen, tokens))
            found = restored.to(_DTYPES[form.element]).view(_INTS[target.itemsize])
            room[heads, tokens] = found.numpy().view(target.dtype)
    target[:] = whole.reshape(target.shape)


def wrong(raw: memoryview, stored: memoryview, decoded: memoryview, form: Form) -> int:
    """Return how many numbers of `decoded` are farther from those of `raw` than `stored` allows."""
    relative, absolute = TOLERANCES[form.element]
    found = 0
    sides = zip(form.sides, _parts(stored, form), _numbers(raw, form), _numbers(decoded, form), strict=True)
    for side, (_, steps, chosen, _), before, after in sides:
        pieces = zip(_pieces(before, side, form), _pieces(after, side, form), strict=True)
        for (heads, group, tokens, x), (*_, y) in pieces:
            half_step = _of_bits(steps[heads, group]) * HALF_STEP * _scale(chosen, tokens)
            allowed = y.abs().mul_(relative).add_(half_step + absolute)
            found += x.numel() - int(torch.count_nonzero(x.sub_(y).abs_() <= allowed))
    return found


def _exponents(largest: Array, head: Array, side: Side, form: Form) -> Array:
    """Choose the exponents of the tokens' scales.

    Most tokens are not scaled, because a scale makes channels with a large mean differ more. A token that was coded
    before gets the same scale again. It is recognized by its scaled numbers: they are among the few distinct numbers
    that other tokens of a coded group have.

    Args:
        largest: the bits, in float32, of each token's largest magnitude.
        head: numbers of one head, of shape (tokens, channels).
        side: the side of the head, with its bits and groups.
        form: the form of the section, with its element.
    """
    octaves = largest - np.sort(largest)[len(largest) // 2]
    near = np.clip((octaves + OCTAVE // 2) >> 23, -SHIFT_MAX, SHIFT_MAX)
    chosen, is_usual = np.where(np.abs(octaves) < SCALED, 0, near), np.abs(octaves) <= USUAL
    group = _floats(head[: side.token_group][is_usual[: side.token_group]], form).sort(0).values
    if bool(((group[1:] != group[:-1]).sum(0) >= 1 << side.bits).any()):
        return (BIAS + chosen).astype(np.uint8)  # no group was coded before
    for token in np.flatnonzero(~is_usual):
        others = np.minimum(token ^ np.arange(1, OTHERS), len(head) - 1)
        numbers = _floats(head[others[is_usual[others]]], form)
        its = _floats(head[token], form)
        most = head.shape[1] // COPIED
        for shift in (0, *range(near[token] - 1, near[token] + 2)):
            found = int(torch.count_nonzero((its * 2.0**-shift == numbers).any(0) & (its != 0)))
            if found > most:
                chosen[token], most = shift, found
    return (BIAS + chosen).astype(np.uint8)


def _numbers(memory: memoryview, form: Form) -> Array:
    """Return a copy of a section's numbers as integers, of shape (sides, heads, tokens, channels)."""
    copied = np.array(form.view(memory), order="C")
    return copied.reshape(len(form.sides), form.heads, -1, form.channels)


def _parts(stored: memoryview, form: Form) -> list[tuple[Array, Array, Array, Array]]:
    """Return the lows, steps, exponents and codes of each side of a stored section.

    Lows and steps have the shape (heads, groups, channels), codes (heads, blocks, bits, channels).
    """
    out = np.frombuffer(stored, np.uint8)
    heads, channels = form.heads, form.channels
    return [
        (
            out[side.lows_at : side.steps_at].view("<u2").reshape(heads, -1, channels),
            out[side.steps_at : side.exponents_at].view("<u2").reshape(heads, -1, channels),
            out[side.exponents_at : side.codes_at],
            out[side.codes_at :][: heads * form.blocks * side.bits * channels].reshape(heads, -1, side.bits, channels),
        )
        for side in form.sides
    ]


def _packed(codes: Array, bits: int) -> Array:
    """Pack codes of shape (heads, tokens, channels) into blocks."""
    heads, tokens, channels = codes.shape
    whole = np.zeros((heads, -(-tokens // BLOCK_TOKENS), BLOCK_TOKENS, channels), np.uint8)
    whole.reshape(heads, -1, channels)[:, :tokens] = codes
    further = [np.bitwise_or.reduce((whole >> bit & 1) << _TOKENS, 2, keepdims=True) for bit in range(4, bits)]
    return np.concatenate((whole[:, :, :4] & 15 | whole[:, :, 4:] << 4, *further), 2)


def _unpacked(packed: Array) -> Array:
    """Return the codes in packed blocks."""
    halves = packed[:, :, :4]
    codes = np.concatenate((halves & 15, halves >> 4), 2)
    for bit in range(4, packed.shape[2]):
        codes |= (packed[:, :, bit : bit + 1] >> _TOKENS & 1) << bit
    return codes.reshape(len(codes), -1, codes.shape[3])


def _slices(side: Side, form: Form) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the heads, group and tokens of each piece. A piece covers some heads and `side.token_group` tokens.

    For larger pieces, each coding thread would start threads of torch, and these would mostly wait for a core.
    """
    count = max(_PIECE_NUMBERS // (side.token_group * form.channels), 1)
    for head in range(0, form.heads, count):
        for number, start in enumerate(range(0, form.tokens, side.token_group)):
            tokens = slice(start, min(start + side.token_group, form.tokens))
            yield slice(head, head + count), slice(number, number + 1), tokens


def _pieces(numbers: Array, side: Side, form: Form) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
    """Yield the slices of each piece, and its numbers in float32."""
    rest = numbers[:, form.exact_tokens :]
    for heads, group, tokens in _slices(side, form):
        yield heads, group, tokens, _floats(rest[heads, tokens], form)


def _floats(numbers: Array, form: Form) -> torch.Tensor:
    """Return a copy of numbers in float32."""
    whole = torch.from_numpy(numbers.view(f"<i{numbers.itemsize}")).view(_DTYPES[form.element])
    return whole.to(torch.float32, copy=True)


def _scale(chosen: Array, tokens: slice) -> torch.Tensor:
    """Return the scales of tokens, of shape (tokens, 1), or 1 for keys."""
    fields = chosen[tokens, None].astype(np.int32) if len(chosen) else np.full((1, 1), 127, np.int32)
    return torch.from_numpy((fields << 23).view(np.float32))


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
