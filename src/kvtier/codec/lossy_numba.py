"""The lossy codecs in numba: loops over rows of channels, which its compiler turns into vector instructions.

The import compiles all kernels, or loads them from numba's cache. They release the GIL, and allocate a few rows only.
Loops index slices from 0 and compute in 32 bits, because the compiler vectorizes no others.
"""

# numba has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import math
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

from kvtier.codec.lossy import HALF_STEP, STEP_MIN, TOLERANCES, Array, Form
from kvtier.layout import ELEMENT_BYTES

_STEP_MIN, _HALF_STEP = f32(STEP_MIN), f32(HALF_STEP)
_TO_INTEGER = f32(1.5 * 2**23)
"""A small number plus this is rounded to an integer, whose bits are the lowest of the sum."""
_LIMITS = {"bf16": f32(2.0**128 - 2.0**120), "fp16": f32(65504), "fp32": np.finfo(f32).max}


class _Shape(NamedTuple):
    """What a kernel needs to know of a side. Sizes are in numbers, and places of stored scales and codes in bytes."""

    origin: int
    head_step: int
    heads: int
    tokens: int
    channels: int
    token_group: int
    """0 if each token has its own scales."""
    channel_group: int
    piece: int
    """The longest run of codes whose low halves have one group, and whose high halves have one group."""
    lows_at: int
    steps_at: int
    codes_at: int


def encode(raw: memoryview, stored: memoryview, form: Form) -> bool:
    """Code finite numbers, or return False if a scale or a decoded number would not be finite."""
    numbers, (places, shapes) = _numbers(raw, form)
    out, limit = np.frombuffer(stored, u8), _LIMITS[form.element]
    return _is_finite(numbers) and all(
        _ENCODERS[side[:2]](numbers, out, places, shape, limit) for side, shape in zip(form.sides, shapes, strict=True)
    )


def decode(stored: memoryview, into: memoryview, form: Form) -> None:
    """Restore the numbers."""
    given = np.frombuffer(stored.toreadonly(), u8)
    numbers, (places, shapes) = np.frombuffer(into, f"<u{ELEMENT_BYTES[form.element]}"), _shapes(form, form.steps)
    is_copied = form.element == "fp16" or not numbers.flags.aligned
    if is_copied:
        numbers = np.empty(len(numbers), np.uint16 if form.element == "bf16" else u32)
        places, shapes = _shapes(form, _steps(form))
    for side, shape in zip(form.sides, shapes, strict=True):
        _DECODERS[side[:2]](given, numbers, places, shape, numbers.dtype.type(0))
    if is_copied:
        if form.element == "fp16":
            with np.errstate(all="ignore"):  # exact tokens may be anything
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

    Numbers of fp16, and those that are not aligned in memory, are copied.
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
    """Return the distances of neighbours, as `form.steps` does, in a copy in the order of `form.view`."""
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
        _Shape(
            origin=number * side_step,
            head_step=head_step,
            heads=form.heads,
            tokens=form.tokens,
            channels=form.channels,
            token_group=side.token_group if side.is_by_channel else 0,
            channel_group=form.channel_group,
            piece=math.gcd(form.channels // 2, form.channel_group),
            lows_at=side.scales_at,
            steps_at=side.scales_at + (2 * side.groups if side.bits == 4 else 0),
            codes_at=side.codes_at,
        )
        for number, side in enumerate(form.sides)
    ]
    return places, shapes


def _number(bits: int) -> f32: ...


@overload(_number, inline="always", strict=False)
def _number_of(bits: types.Integer) -> Callable[..., Any]:
    """Return the number that has these bits in memory. The shift is a constant, or the compiler would use 64 bits."""
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
    """Turn the bits of a number into an integer that sorts as the number does, and back."""
    return i32(bits ^ i32(i32(bits >> i32(31)) & i32(0x7FFFFFFF)))


_SHAPE = types.NamedUniTuple(types.intp, len(_Shape._fields), _Shape)
_KINDS = (types.uint16, types.uint32)
_PLACES = types.Array(types.intp, 1, "C", readonly=True)
_GIVEN = types.Array(types.uint8, 1, "C", readonly=True)


_NUMBERS = [types.Array(it, 1, "C", readonly=True) for it in _KINDS]
_ENCODER = [types.boolean(it, types.Array(types.uint8, 1, "C"), _PLACES, _SHAPE, types.float32) for it in _NUMBERS]
_DECODER = [types.void(_GIVEN, types.Array(it, 1, "C"), _PLACES, _SHAPE, it) for it in _KINDS]


def _kernel(signatures: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for all signatures, or load it from numba's cache.

    The cache lies beside this file, in the user's cache folder, or in the folder `NUMBA_CACHE_DIR`.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signatures, nogil=True, error_model="numpy", cache=True)(function)
        except Exception:  # noqa: BLE001 - no folder can be written, the drive is full, or the cache is damaged
            return njit(signatures, nogil=True, error_model="numpy")(function)

    return compiled


# Kernels pass no slices to functions, because numba counts references to them, which takes longer than a row.


@_kernel([types.boolean(it) for it in _NUMBERS])
def _is_finite(numbers: Array) -> bool:
    largest = u32(0)
    for number in range(len(numbers)):
        largest = max(largest, u32(f32(_number(numbers[number])).view(u32) & u32(0x7FFFFFFF)))
    return bool(largest < u32(0x7F800000))


@_kernel(_ENCODER)
def _encode_channels(numbers: Array, stored: Array, places: Array, shape: _Shape, limit: f32) -> bool:
    """Code a side in 4 bits, with scales for each channel."""
    half = shape.channels // 2
    low, high, inverse = np.zeros(shape.channels, f32), np.zeros(shape.channels, f32), np.zeros(shape.channels, f32)
    low0, low1, inverse0, inverse1 = low[:half], low[half:], inverse[:half], inverse[half:]
    scale = 0
    for head in range(shape.heads):
        origin = shape.origin + head * shape.head_step
        for first in range(0, shape.tokens, shape.token_group):
            last = min(first + shape.token_group, shape.tokens)
            low[:] = np.inf
            high[:] = -np.inf
            for token in range(first, last):
                at = origin + places[token]
                row = numbers[at : at + shape.channels]
                for c in range(shape.channels):
                    x = _number(row[c])
                    low[c] = min(low[c], x)
                    high[c] = max(high[c], x)
            for c in range(shape.channels):
                low[c] = _bf16_below(low[c])
                step = _bf16(max((high[c] - low[c]) / f32(15), _STEP_MIN))
                if not (abs(low[c]) <= limit and abs(f32(15) * step + low[c]) <= limit):
                    return False
                _write(stored, shape.lows_at + 2 * scale, low[c])
                _write(stored, shape.steps_at + 2 * scale, step)
                inverse[c] = f32(1) / step
                scale += 1
            for token in range(first, last):
                at = origin + places[token]
                row0, row1 = numbers[at : at + half], numbers[at + half : at + shape.channels]
                place = shape.codes_at + (head * shape.tokens + token) * half
                codes = stored[place : place + half]
                for c in range(half):
                    code = _code(_number(row0[c]), low0[c], inverse0[c])
                    above = _code(_number(row1[c]), low1[c], inverse1[c])
                    codes[c] = u8(i32(code & i32(15)) | i32(above << i32(4)))
    return True


@_kernel(_ENCODER)
def _encode_tokens(numbers: Array, stored: Array, places: Array, shape: _Shape, limit: f32) -> bool:
    """Code a side in 4 bits, with scales for each token."""
    half, groups = shape.channels // 2, shape.channels // shape.channel_group
    low, inverse = np.zeros(groups, f32), np.zeros(groups, f32)
    scale = 0
    for head in range(shape.heads):
        for token in range(shape.tokens):
            at = shape.origin + head * shape.head_step + places[token]
            for group in range(groups):
                start = at + group * shape.channel_group
                row = numbers[start : start + shape.channel_group]
                least, greatest = i32(0x7FFFFFFF), i32(-0x80000000)
                for c in range(shape.channel_group):
                    rank = _ranked(f32(_number(row[c])).view(i32))
                    least, greatest = min(least, rank), max(greatest, rank)
                bottom = _bf16_below(i32(_ranked(least)).view(f32))
                step = _bf16(max((i32(_ranked(greatest)).view(f32) - bottom) / f32(15), _STEP_MIN))
                if not (abs(bottom) <= limit and abs(f32(15) * step + bottom) <= limit):
                    return False
                _write(stored, shape.lows_at + 2 * scale, bottom)
                _write(stored, shape.steps_at + 2 * scale, step)
                low[group], inverse[group] = bottom, f32(1) / step
                scale += 1
            place = shape.codes_at + (head * shape.tokens + token) * half
            for start in range(0, half, shape.piece):
                group, other = start // shape.channel_group, (start + half) // shape.channel_group
                low0, low1, inverse0, inverse1 = low[group], low[other], inverse[group], inverse[other]
                first, second = at + start, at + half + start
                row0, row1 = numbers[first : first + shape.piece], numbers[second : second + shape.piece]
                codes = stored[place + start : place + start + shape.piece]
                for c in range(shape.piece):
                    code = _code(_number(row0[c]), low0, inverse0)
                    above = _code(_number(row1[c]), low1, inverse1)
                    codes[c] = u8(i32(code & i32(15)) | i32(above << i32(4)))
    return True


@_kernel(_ENCODER)
def _encode_bytes(numbers: Array, stored: Array, places: Array, shape: _Shape, limit: f32) -> bool:
    """Code a side in 8 bits, with a scale for each channel."""
    high, inverse = np.zeros(shape.channels, f32), np.zeros(shape.channels, f32)
    scale = 0
    for head in range(shape.heads):
        origin = shape.origin + head * shape.head_step
        for first in range(0, shape.tokens, shape.token_group):
            last = min(first + shape.token_group, shape.tokens)
            high[:] = 0
            for token in range(first, last):
                at = origin + places[token]
                row = numbers[at : at + shape.channels]
                for c in range(shape.channels):
                    high[c] = max(high[c], abs(_number(row[c])))
            for c in range(shape.channels):
                step = _bf16(max(high[c] / f32(127), _STEP_MIN))
                if not f32(127) * step <= limit:
                    return False
                _write(stored, shape.steps_at + 2 * scale, step)
                inverse[c] = f32(1) / step
                scale += 1
            for token in range(first, last):
                at = origin + places[token]
                row = numbers[at : at + shape.channels]
                place = shape.codes_at + (head * shape.tokens + token) * shape.channels
                codes = stored[place : place + shape.channels]
                for c in range(shape.channels):
                    codes[c] = u8(_code(_number(row[c]), f32(0), inverse[c]))
    return True


@_kernel(_DECODER)
def _decode_channels(stored: Array, numbers: Array, places: Array, shape: _Shape, kind: int) -> None:
    """Restore what `_encode_channels` codes."""
    half = shape.channels // 2
    low, step = np.zeros(shape.channels, f32), np.zeros(shape.channels, f32)
    low0, low1, step0, step1 = low[:half], low[half:], step[:half], step[half:]
    scale = 0
    for head in range(shape.heads):
        origin = shape.origin + head * shape.head_step
        for first in range(0, shape.tokens, shape.token_group):
            for c in range(shape.channels):
                low[c] = _read(stored, shape.lows_at + 2 * scale)
                step[c] = _read(stored, shape.steps_at + 2 * scale)
                scale += 1
            # A loop for each half, because numba counts references to slices that two loops use.
            last = min(first + shape.token_group, shape.tokens)
            for token in range(first, last):
                at = origin + places[token]
                row = numbers[at : at + half]
                place = shape.codes_at + (head * shape.tokens + token) * half
                codes = stored[place : place + half]
                for c in range(half):
                    row[c] = _bits(f32(i32(codes[c] & i32(15))) * step0[c] + low0[c], kind)
            for token in range(first, last):
                at = origin + places[token] + half
                row = numbers[at : at + half]
                place = shape.codes_at + (head * shape.tokens + token) * half
                codes = stored[place : place + half]
                for c in range(half):
                    row[c] = _bits(f32(i32(codes[c] >> i32(4))) * step1[c] + low1[c], kind)


@_kernel(_DECODER)
def _decode_tokens(stored: Array, numbers: Array, places: Array, shape: _Shape, kind: int) -> None:
    """Restore what `_encode_tokens` codes."""
    half, groups = shape.channels // 2, shape.channels // shape.channel_group
    for head in range(shape.heads):
        for token in range(shape.tokens):
            at = shape.origin + head * shape.head_step + places[token]
            row = head * shape.tokens + token
            place = shape.codes_at + row * half
            lows_at, steps_at = shape.lows_at + 2 * row * groups, shape.steps_at + 2 * row * groups
            for start in range(0, half, shape.piece):
                group, other = 2 * (start // shape.channel_group), 2 * ((start + half) // shape.channel_group)
                low0, step0 = _read(stored, lows_at + group), _read(stored, steps_at + group)
                low1, step1 = _read(stored, lows_at + other), _read(stored, steps_at + other)
                first, second = at + start, at + half + start
                row0, row1 = numbers[first : first + shape.piece], numbers[second : second + shape.piece]
                codes = stored[place + start : place + start + shape.piece]
                for c in range(shape.piece):
                    row0[c] = _bits(f32(i32(codes[c] & i32(15))) * step0 + low0, kind)
                    row1[c] = _bits(f32(i32(codes[c] >> i32(4))) * step1 + low1, kind)


@_kernel(_DECODER)
def _decode_bytes(stored: Array, numbers: Array, places: Array, shape: _Shape, kind: int) -> None:
    """Restore what `_encode_bytes` codes."""
    step = np.zeros(shape.channels, f32)
    scale = 0
    for head in range(shape.heads):
        for first in range(0, shape.tokens, shape.token_group):
            for c in range(shape.channels):
                step[c] = _read(stored, shape.steps_at + 2 * scale)
                scale += 1
            for token in range(first, min(first + shape.token_group, shape.tokens)):
                at = shape.origin + head * shape.head_step + places[token]
                row = numbers[at : at + shape.channels]
                place = shape.codes_at + (head * shape.tokens + token) * shape.channels
                codes = stored[place : place + shape.channels]
                for c in range(shape.channels):
                    row[c] = _bits(f32(np.int8(codes[c])) * step[c], kind)


@_kernel([types.intp(_GIVEN, it, it, _PLACES, _SHAPE, types.float32, types.float32) for it in _NUMBERS])
def _wrong(
    stored: Array, before: Array, after: Array, places: Array, shape: _Shape, relative: f32, absolute: f32
) -> int:
    groups = shape.channels if shape.token_group else shape.channels // shape.channel_group
    size = shape.channels // groups
    allowed = np.zeros(shape.channels, f32)
    found, scale = 0, 0
    for head in range(shape.heads):
        for token in range(shape.tokens):
            if not shape.token_group or token % shape.token_group == 0:
                for group in range(groups):
                    half_step = _read(stored, shape.steps_at + 2 * scale) * _HALF_STEP
                    allowed[group * size : (group + 1) * size] = half_step + absolute
                    scale += 1
            at = shape.origin + head * shape.head_step + places[token]
            row, restored = before[at : at + shape.channels], after[at : at + shape.channels]
            near = i32(0)
            for c in range(shape.channels):
                y = _number(restored[c])
                near += i32(abs(_number(row[c]) - y) <= allowed[c] + abs(y) * relative)
            found += shape.channels - near
    return int(found)


_ENCODERS = {(True, 4): _encode_channels, (False, 4): _encode_tokens, (True, 8): _encode_bytes}
_DECODERS = {(True, 4): _decode_channels, (False, 4): _decode_tokens, (True, 8): _decode_bytes}
"""Kernels of a side, by whether its groups are channels, and by bits."""
