"""The lossy codecs in numba: loops over rows of channels, which its compiler turns into vector instructions.

The import compiles all kernels, or loads them from numba's cache. They release the GIL, and allocate only a few rows.
Loops index slices from 0, shift by constants, and compute in 8 or 32 bits, because the compiler vectorizes no others.
"""

# numba has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy import float32 as f32
from numpy import int32 as i32
from numpy import uint8 as u8
from numpy import uint32 as u32

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
)
from kvtier.layout import ELEMENT_BYTES

_STEP_MIN, _HALF_STEP = f32(STEP_MIN), f32(HALF_STEP)
_TO_INTEGER = f32(1.5 * 2**23)
"""Adding this to a small number rounds it to an integer, whose bits are the lowest bits of the sum."""
_LIMITS = {"bf16": f32(2.0**128 - 2.0**120), "fp16": f32(65504), "fp32": np.finfo(f32).max}


class _Shape(NamedTuple):
    """Properties of a side for kernels. Sizes are in numbers, and places of stored scales and codes in bytes."""

    origin: int
    head_step: int
    heads: int
    tokens: int
    channels: int
    bits: int
    token_group: int
    lows_at: int
    steps_at: int
    exponents_at: int
    codes_at: int


def encode(raw: memoryview, stored: memoryview, form: Form) -> bool:
    """Code the numbers. Return False if a number is not finite, or a scale or a decoded number would not be."""
    numbers, (places, shapes) = _numbers(raw, form)
    out, limit = np.frombuffer(stored, u8), _LIMITS[form.element]
    for shape in shapes:
        if shape.exponents_at < shape.codes_at:
            _choose(numbers, out, places, shape)
    return all(_encode(numbers, out, places, shape, limit) for shape in shapes)


def decode(stored: memoryview, into: memoryview, form: Form) -> None:
    """Restore the numbers of a section from its stored bytes."""
    given = np.frombuffer(stored.toreadonly(), u8)
    numbers, (places, shapes) = np.frombuffer(into, f"<u{ELEMENT_BYTES[form.element]}"), _shapes(form, form.steps)
    is_copied = form.element == "fp16" or not numbers.flags.aligned
    if is_copied:
        numbers = np.empty(len(numbers), np.uint16 if form.element == "bf16" else u32)
        places, shapes = _shapes(form, _steps(form))
    for shape in shapes:
        _decode(given, numbers, places, shape, numbers.dtype.type(0))
    if is_copied:
        if form.element == "fp16":
            with np.errstate(all="ignore"):  # exact tokens may have any values
                numbers = numbers.view(f32).astype(np.float16).view(np.uint16)
        target = form.view(into)
        target[:] = numbers.reshape(target.shape)


def wrong(raw: memoryview, stored: memoryview, decoded: memoryview, form: Form) -> int:
    """Return how many numbers of `decoded` are farther from those of `raw` than `stored` allows."""
    given = np.frombuffer(stored.toreadonly(), u8)
    both = [_numbers(it, form) for it in (raw, decoded)]
    if both[0][1] is not both[1][1]:
        both = [_numbers(it, form, is_copied=True) for it in (raw, decoded)]
    (before, (places, shapes)), (after, _) = both
    relative, absolute = map(f32, TOLERANCES[form.element])
    return sum(_wrong(given, before, after, places, shape, relative, absolute) for shape in shapes)


_Shapes = tuple[Array, list[_Shape]]
"""The places of a head's tokens, and the shape of each side."""


def _numbers(memory: memoryview, form: Form, *, is_copied: bool = False) -> tuple[Array, _Shapes]:
    """Return a section's numbers as bits of bf16 or float32.

    Numbers of fp16, and numbers that are not aligned in memory, are copied.
    """
    numbers = np.frombuffer(memory.toreadonly(), f"<u{ELEMENT_BYTES[form.element]}")
    if form.element != "fp16" and numbers.flags.aligned and not is_copied:
        return numbers, _shapes(form, form.steps)
    copied = np.array(form.view(memory), order="C").reshape(-1)
    if form.element == "fp16":
        copied = copied.view(np.float16).astype(f32).view(u32)
    copied.flags.writeable = False
    return copied, _shapes(form, _steps(form))


def _steps(form: Form) -> tuple[int, ...]:
    """Return the distances between neighbors, as in `form.steps`, for a copy in the order of `form.view`."""
    page = form.axes.size("token") * form.channels
    head = (form.exact_tokens + form.tokens) * form.channels
    return form.heads * head, head, page, form.channels


@lru_cache(256)
def _shapes(form: Form, steps: tuple[int, ...]) -> _Shapes:
    side_step, head_step, page_step, token_step = steps
    pages, tokens = np.divmod(np.arange(form.exact_tokens, form.exact_tokens + form.tokens), form.axes.size("token"))
    places = pages * page_step + tokens * token_step
    places.flags.writeable = False
    shapes = [
        _Shape(number * side_step, head_step, form.heads, form.tokens, form.channels, *side)
        for number, side in enumerate(form.sides)
    ]
    return places, shapes


def _number(bits: int) -> f32: ...


@overload(_number, inline="always", strict=False)
def _number_of(bits: types.Integer) -> Callable[..., Any]:
    """Return the number that has these bits in memory. The shift is a constant; otherwise the compiler uses 64 bits."""
    if bits == types.uint16:
        return lambda bits: u32(u32(bits) << u32(16)).view(f32)
    return lambda bits: u32(bits).view(f32)


def _bits(number: f32, kind: int) -> int: ...


@overload(_bits, inline="always", strict=False)
def _bits_of(number: types.Float, kind: types.Integer) -> Callable[..., Any]:  # noqa: ARG001
    """Return the bits of a number in memory, after rounding to its element. `kind` has the type of the bits."""
    if kind == types.uint16:
        return lambda number, kind: _bf16_bits(number)  # noqa: ARG005
    return lambda number, kind: f32(number).view(u32)  # noqa: ARG005


@njit(inline="always")
def _bf16_bits(number: f32) -> u32:
    """Round to the nearest bf16, half to even."""
    bits = f32(number).view(u32)
    return u32(u32(bits + u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1))) >> u32(16))


@njit(inline="always")
def _bf16(number: f32) -> f32:
    return u32(_bf16_bits(number) << u32(16)).view(f32)


@njit(inline="always")
def _bf16_below(number: f32) -> f32:
    """Round down to bf16. A negative zero becomes zero."""
    bits = f32(number).view(u32)
    if bits == u32(0x80000000):
        return f32(0)
    return u32(u32(bits + (u32(0xFFFF) if bits >> u32(31) else u32(0))) & u32(0xFFFF0000)).view(f32)


@njit(inline="always")
def _read(stored: Array, at: int) -> f32:
    return u32(u32(u32(stored[at]) << u32(16)) | u32(u32(stored[at + 1]) << u32(24))).view(f32)


@njit(inline="always")
def _write(stored: Array, at: int, scale: f32) -> None:
    stored[at] = u8(f32(scale).view(u32) >> u32(16))
    stored[at + 1] = u8(f32(scale).view(u32) >> u32(24))


@njit(inline="always")
def _code(number: f32, low: f32, inverse: f32) -> i32:
    return f32((number - low) * inverse + _TO_INTEGER).view(i32)


@njit(inline="always")
def _ranked(bits: i32) -> i32:
    """Map the bits of a float to an integer that sorts as the float does.

    The mapping is its own inverse, so a second call returns the bits.
    """
    return i32(bits ^ i32(i32(bits >> i32(31)) & i32(0x7FFFFFFF)))


_SHAPE = types.NamedUniTuple(types.intp, len(_Shape._fields), _Shape)
_KINDS = (types.uint16, types.uint32)
_PLACES = types.Array(types.intp, 1, "C", readonly=True)
_GIVEN = types.Array(types.uint8, 1, "C", readonly=True)
_NUMBERS = [types.Array(it, 1, "C", readonly=True) for it in _KINDS]


def _kernel(signatures: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for all signatures, or load it from numba's cache.

    The cache is next to this file, in the user's cache folder, or in the folder that `NUMBA_CACHE_DIR` names.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signatures, nogil=True, error_model="numpy", cache=True)(function)
        except Exception:  # noqa: BLE001 - no folder can be written, the drive is full, or the cache is damaged
            return njit(signatures, nogil=True, error_model="numpy")(function)

    return compiled


# Kernels pass no slices to functions, because counting references to slices takes numba longer than a row.


@njit(inline="always")
def _pack(codes: Array, stored: Array, place: int, channels: int, bits: int) -> None:
    """Store a block of codes at `place`."""
    half = 4 * channels
    first, other, out = codes[:half], codes[half:], stored[place : place + half]
    for number in range(half):
        out[number] = u8(u8(first[number] & u8(15)) | u8(other[number] << u8(4)))
    for bit in range(4, bits):
        out, mask = stored[place + bit * channels : place + (bit + 1) * channels], u8(1 << bit)
        for token in range(0, BLOCK_TOKENS, 4):
            at, mark = token * channels, 1 << token
            q0, q1 = codes[at : at + channels], codes[at + channels : at + 2 * channels]
            q2, q3 = codes[at + 2 * channels : at + 3 * channels], codes[at + 3 * channels : at + 4 * channels]
            mark0, mark1, mark2, mark3 = u8(mark), u8(2 * mark), u8(4 * mark), u8(8 * mark)
            kept = u8(0) if token == 0 else u8(15)
            for c in range(channels):
                low = (mark0 if u8(q0[c] & mask) else u8(0)) | (mark1 if u8(q1[c] & mask) else u8(0))
                high = (mark2 if u8(q2[c] & mask) else u8(0)) | (mark3 if u8(q3[c] & mask) else u8(0))
                out[c] = u8(u8(out[c] & kept) | u8(u8(low) | u8(high)))


@njit(inline="always")
def _unpack(stored: Array, place: int, codes: Array, channels: int, bits: int) -> None:
    """Read a block of codes that `_pack` stored."""
    half = 4 * channels
    first, other, given = codes[:half], codes[half:], stored[place : place + half]
    for number in range(half):
        first[number] = given[number] & u8(15)
        other[number] = given[number] >> u8(4)
    if bits > 4:
        # A loop for three bits takes little longer than a loop for one bit.
        at0, at1, at2 = place + 4 * channels, place + min(5, bits - 1) * channels, place + min(6, bits - 1) * channels
        row0, row1, row2 = stored[at0 : at0 + channels], stored[at1 : at1 + channels], stored[at2 : at2 + channels]
        bit1, bit2 = u8(32 if bits > 5 else 0), u8(64 if bits > 6 else 0)
        for token in range(BLOCK_TOKENS):
            its, mark = codes[token * channels : (token + 1) * channels], u8(1 << token)
            for c in range(channels):
                further = (u8(16) if u8(row0[c] & mark) else u8(0)) | (bit1 if u8(row1[c] & mark) else u8(0))
                last = bit2 if u8(row2[c] & mark) else u8(0)
                its[c] = u8(its[c] | u8(u8(further) | last))


@njit(inline="always")
def _scales(stored: Array, shape: _Shape) -> Array:
    """Return the scale of each token."""
    found = np.ones(shape.tokens, f32)
    for number in range(shape.codes_at - shape.exponents_at):
        found[number] = u32(u32(stored[shape.exponents_at + number]) << u32(23)).view(f32)
    return found


@njit(inline="always")
def _was_coded(numbers: Array, largest: Array, places: Array, shape: _Shape) -> bool:
    """Return whether the first group of the first head has no more distinct numbers in a channel than codes."""
    levels = 1 << shape.bits
    found = np.zeros(levels, f32)
    for c in range(shape.channels):
        count = 0
        for token in range(min(shape.token_group, shape.tokens)):
            if abs(largest[token]) <= USUAL:
                row, place = numbers[shape.origin + places[token] :], 0
                number = f32(_number(row[c]))
                while place < count and found[place] != number:
                    place += 1
                if place == levels:
                    return False
                found[place] = number
                count = max(count, place + 1)
    return True


@_kernel([types.void(it, types.Array(types.uint8, 1, "C"), _PLACES, _SHAPE) for it in _NUMBERS])
def _choose(numbers: Array, stored: Array, places: Array, shape: _Shape) -> None:  # noqa: C901
    """Write the exponents of the tokens' scales, as `lossy_torch` does."""
    tokens, channels, largest = shape.tokens, shape.channels, np.zeros(shape.tokens, i32)
    for head in range(shape.heads):
        for token in range(tokens):
            at = shape.origin + head * shape.head_step + places[token]
            row = numbers[at : at + channels]
            most = i32(0)
            for c in range(channels):
                most = max(most, i32(f32(_number(row[c])).view(i32) & i32(0x7FFFFFFF)))
            largest[token] = max(largest[token], most)
    largest -= np.sort(largest)[tokens // 2]
    is_found, was_coded = np.zeros(channels, u8), _was_coded(numbers, largest, places, shape)
    for token in range(tokens):
        octaves = largest[token]
        near = min(max((octaves + OCTAVE // 2) >> 23, -SHIFT_MAX), SHIFT_MAX)
        chosen, most = near if abs(octaves) >= SCALED else 0, channels // COPIED
        if was_coded and abs(octaves) > USUAL:
            row = numbers[shape.origin + places[token] : shape.origin + places[token] + channels]
            for shift in (0, near - 1, near, near + 1):
                inverse = i32((BIAS - shift) << 23).view(f32)
                is_found[:] = 0
                for number in range(1, OTHERS):
                    other = min(token ^ number, tokens - 1)
                    if abs(largest[other]) <= USUAL:
                        its = numbers[shape.origin + places[other] : shape.origin + places[other] + channels]
                        for c in range(channels):
                            is_found[c] |= u8(_number(row[c]) * inverse == _number(its[c]))
                found = 0
                for c in range(channels):
                    found += i32(is_found[c]) & i32(_number(row[c]) != f32(0))
                if found > most:
                    chosen, most = shift, found
        stored[shape.exponents_at + token] = BIAS + chosen


@_kernel([types.boolean(it, types.Array(types.uint8, 1, "C"), _PLACES, _SHAPE, types.float32) for it in _NUMBERS])
def _encode(numbers: Array, stored: Array, places: Array, shape: _Shape, limit: f32) -> bool:
    channels, levels = shape.channels, f32((1 << shape.bits) - 1)
    least, greatest = np.zeros(channels, i32), np.zeros(channels, i32)
    low, inverse = np.zeros(channels, f32), np.zeros(channels, f32)
    codes = np.zeros(BLOCK_TOKENS * channels, u8)
    scales = _scales(stored, shape)
    inverses = f32(1) / scales
    scale, place = 0, shape.codes_at
    for head in range(shape.heads):
        origin = shape.origin + head * shape.head_step
        for first in range(0, shape.tokens, shape.token_group):
            last = min(first + shape.token_group, shape.tokens)
            least[:] = 0x7FFFFFFF
            greatest[:] = -0x80000000
            most = f32(0)
            for token in range(first, last):
                row = numbers[origin + places[token] : origin + places[token] + channels]
                most, its_inverse = max(most, scales[token]), inverses[token]
                for c in range(channels):
                    rank = _ranked(f32(_number(row[c]) * its_inverse).view(i32))
                    least[c] = min(least[c], rank)
                    greatest[c] = max(greatest[c], rank)
            for c in range(channels):
                bottom, top = i32(_ranked(least[c])).view(f32), i32(_ranked(greatest[c])).view(f32)
                low[c] = _bf16_below(bottom)
                step = _bf16(max((top - low[c]) / levels, _STEP_MIN))
                # A comparison with NaN is false, so NaN is refused as well.
                is_fine = abs(bottom) * most <= limit and abs(top) * most <= limit and abs(low[c]) * most <= limit
                if not (is_fine and abs(levels * step + low[c]) * most <= limit):
                    return False
                _write(stored, shape.lows_at + 2 * scale, low[c])
                _write(stored, shape.steps_at + 2 * scale, step)
                inverse[c] = f32(1) / step
                scale += 1
            for start in range(first, last, BLOCK_TOKENS):
                codes[min(last - start, BLOCK_TOKENS) * channels :] = 0
                for token in range(start, min(start + BLOCK_TOKENS, last)):
                    row = numbers[origin + places[token] : origin + places[token] + channels]
                    its = codes[(token - start) * channels : (token - start + 1) * channels]
                    its_inverse = inverses[token]
                    for c in range(channels):
                        its[c] = u8(_code(_number(row[c]) * its_inverse, low[c], inverse[c]))
                _pack(codes, stored, place, channels, shape.bits)
                place += shape.bits * channels
    return True


@_kernel([types.void(_GIVEN, types.Array(it, 1, "C"), _PLACES, _SHAPE, it) for it in _KINDS])
def _decode(stored: Array, numbers: Array, places: Array, shape: _Shape, kind: int) -> None:
    channels = shape.channels
    low, step = np.zeros(channels, f32), np.zeros(channels, f32)
    codes = np.zeros(BLOCK_TOKENS * channels, u8)
    scales = _scales(stored, shape)
    scale, place = 0, shape.codes_at
    for head in range(shape.heads):
        origin = shape.origin + head * shape.head_step
        for start in range(0, shape.tokens, BLOCK_TOKENS):
            if start % shape.token_group == 0:
                for c in range(channels):
                    low[c] = _read(stored, shape.lows_at + 2 * scale)
                    step[c] = _read(stored, shape.steps_at + 2 * scale)
                    scale += 1
            _unpack(stored, place, codes, channels, shape.bits)
            place += shape.bits * channels
            for token in range(start, min(start + BLOCK_TOKENS, shape.tokens)):
                row = numbers[origin + places[token] : origin + places[token] + channels]
                its = codes[(token - start) * channels : (token - start + 1) * channels]
                its_scale = scales[token]
                for c in range(channels):
                    row[c] = _bits((f32(i32(its[c])) * step[c] + low[c]) * its_scale, kind)


@_kernel([types.intp(_GIVEN, it, it, _PLACES, _SHAPE, types.float32, types.float32) for it in _NUMBERS])
def _wrong(
    stored: Array, before: Array, after: Array, places: Array, shape: _Shape, relative: f32, absolute: f32
) -> int:
    half_step, scales = np.zeros(shape.channels, f32), _scales(stored, shape)
    found, scale = 0, 0
    for head in range(shape.heads):
        for token in range(shape.tokens):
            if token % shape.token_group == 0:
                for c in range(shape.channels):
                    half_step[c] = _read(stored, shape.steps_at + 2 * scale) * _HALF_STEP
                    scale += 1
            at = shape.origin + head * shape.head_step + places[token]
            row, restored = before[at : at + shape.channels], after[at : at + shape.channels]
            its_scale, near = scales[token], i32(0)
            for c in range(shape.channels):
                y = _number(restored[c])
                allowed = f32(half_step[c] * its_scale + absolute)
                near += i32(abs(_number(row[c]) - y) <= allowed + abs(y) * relative)
            found += shape.channels - near
    return int(found)
