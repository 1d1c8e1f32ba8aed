"""Split: a lossless codec for floating point. It codes only the byte of the exponent, which has few common values.

Each element is rotated left by one bit. Then the exponent is on top and the sign at the bottom. The top byte is the
*head*. In bf16 and fp32 the head is the exponent, in fp16 and fp8 the exponent and the upper mantissa bits. `split`
writes a window of common heads in a few bits, as SplitZip (arXiv 2605.01708) does in 4. `split2` compresses the heads
with Zstandard. The other bytes stay as they are. The order of the elements does not matter. Sections of `bytes` are
coded as elements of one byte.

A stored section, all integers little-endian; n elements of s bytes::

    0      u32      s: 1, 2 or 4; 0: the section follows as it is
    4      u32      raw bytes, n * s
    8      n each   the lowest byte of each rotated element, then the second, and so on: s - 1 planes
           ...      the coded heads

`split` codes heads as follows::

    0      u8       w, bits of a code, 1 to 7
    1      u8       first head of the window
    2      u16      0
    4      u32      number of escapes
    8      w * m    codes; m is n / 8, rounded up
           ...      the heads outside of the window, in order

The code is (head - first) modulo 256 if that is smaller than 2^w - 1; otherwise it is an escape, 2^w - 1. The w * m
bytes are w rows of m. Code k * m + j, with k from 0 to 7, has the bits k * w to k * w + w - 1 of column j, whose lowest
bits are in the first row. Codes after the last element are 0.

`split2` codes heads as one Zstandard frame that states its content's size.
"""

import struct

import numpy as np
import numpy.typing as npt

from kvtier.layout import ELEMENT_BYTES, Element

_HEAD = struct.Struct("<II")
_CODES = struct.Struct("<BBHI")

_SAMPLES = 4096
"""The window is chosen from a sample of at least this many heads, or all if there are fewer. Counting all heads would
take as long as the rest of the encoding."""
_ESCAPE_BITS = 32
"""Bits charged for an escape when the window is chosen. An escape has 8 bits, but coding it takes most of the time."""
_WIDTHS = np.arange(1, 8)[:, None]
_STOPS = np.minimum(np.arange(256) + (1 << _WIDTHS) - 1, 256)
"""End of the window, by width and first head."""

_Bytes = npt.NDArray[np.uint8]


class Split:
    """Codes each head in a fixed number of bits, chosen for each section."""

    name: str = "split"
    id: int = 2
    is_exact: bool = True

    def bound(self, raw_bytes: int) -> int:
        """Return the bytes of the raw section, plus the fields before it."""
        return _HEAD.size + raw_bytes

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        """Code `raw` into the front of `into`. If coding does not shrink it, copy it, which takes `bound` bytes."""
        size = ELEMENT_BYTES[element]
        elements = np.frombuffer(raw, f"<u{size}")
        rotated = elements + elements
        rotated |= elements >> (8 * size - 1)
        coded = self._coded((rotated >> (8 * size - 8)).astype(np.uint8))
        lows_stop = _HEAD.size + len(raw) - len(elements)
        used = lows_stop + len(coded)
        if used >= len(raw):
            _HEAD.pack_into(into, 0, 0, len(raw))
            into[_HEAD.size : _HEAD.size + len(raw)] = raw
            return _HEAD.size + len(raw)
        _HEAD.pack_into(into, 0, size, len(raw))
        out = np.frombuffer(into, np.uint8)
        for place, low in enumerate(out[_HEAD.size : lows_stop].reshape(size - 1, len(elements))):
            np.copyto(low, rotated >> (8 * place) if place else rotated, casting="unsafe")
        out[lows_stop:used] = coded
        return used

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        """Restore the section.

        Raises:
            ValueError: `stored` is damaged, has another length, or has elements of another size.
        """
        size, raw_bytes = _fields(_HEAD, stored)
        if raw_bytes != len(into) or size not in {0, ELEMENT_BYTES[element]} or (size and raw_bytes % size):
            raise ValueError(f"{raw_bytes} bytes in elements of {size} cannot fill {len(into)} of {element}")
        if not size:
            into[:] = stored[_HEAD.size :]  # raises ValueError if the lengths differ
            return
        elements = np.frombuffer(into, f"<u{size}")
        lows_stop = _HEAD.size + raw_bytes - len(elements)
        if len(stored) < lows_stop:
            raise ValueError(f"{len(stored)} bytes are too few for a section of {raw_bytes}")
        rotated = self._heads(stored[lows_stop:], len(elements)).astype(elements.dtype)
        lows = np.frombuffer(stored[_HEAD.size : lows_stop], np.uint8).reshape(size - 1, len(elements))
        for low in lows[::-1]:
            rotated <<= 8
            rotated |= low
        np.multiply(rotated, 1 << (8 * size - 1), out=elements)  # shifts to the left; much faster than << for bytes
        rotated >>= 1
        elements |= rotated

    def _coded(self, heads: _Bytes) -> _Bytes:
        width, first = _window(heads)
        escape, rows = (1 << width) - 1, -(-len(heads) // 8)
        codes = np.zeros(8 * rows, np.uint8)
        np.subtract(heads, first, out=codes[: len(heads)])
        places = np.flatnonzero(codes >= escape)
        codes[places] = escape
        out = np.zeros(_CODES.size + width * rows + len(places), np.uint8)
        _CODES.pack_into(out.data, 0, width, first, 0, len(places))
        packed = out[_CODES.size :][: width * rows].reshape(width, rows)
        for number, row in enumerate(codes.reshape(8, rows)):
            at, shift = divmod(number * width, 8)
            packed[at] |= row * (1 << shift)
            if shift + width > 8:
                packed[at + 1] |= row >> (8 - shift)
        out[_CODES.size + width * rows :] = heads[places]
        return out

    def _heads(self, coded: memoryview, count: int) -> _Bytes:
        """Return `count` heads, or raise ValueError if `coded` does not hold that many."""
        width, first, zeros, escapes = _fields(_CODES, coded)
        rows = -(-count // 8)
        if zeros or not 1 <= width <= 7 or len(coded) != _CODES.size + width * rows + escapes:
            raise ValueError(f"{len(coded)} bytes do not hold {count} heads coded in {width} bits each")
        escape = (1 << width) - 1
        data = np.frombuffer(coded, np.uint8, offset=_CODES.size)
        packed = data[: width * rows].reshape(width, rows)
        codes = np.empty((8, rows), np.uint8)
        for number in range(8):
            at, shift = divmod(number * width, 8)
            np.right_shift(packed[at], shift, out=codes[number])
            if shift + width > 8:
                codes[number] |= packed[at + 1] * (1 << (8 - shift))
        codes &= escape
        heads = codes.reshape(-1)[:count]
        places = np.flatnonzero(heads == escape)
        if len(places) != escapes:
            raise ValueError(f"{escapes} escapes are stated, but {len(places)} were found")
        heads += first
        heads[places] = data[width * rows :]
        return heads


class Split2(Split):
    """Codes heads as a Zstandard frame. The result is smaller than that of `Split`, but requires `zstandard`."""

    name: str = "split2"
    id: int = 3

    def __init__(self) -> None:
        from kvtier.codec.zstd import ENTROPY_ONLY, Zstd  # noqa: PLC0415  an optional package, needed only here

        self._zstd = Zstd(ENTROPY_ONLY)

    def _coded(self, heads: _Bytes) -> _Bytes:
        out = np.empty(self._zstd.bound(len(heads)), np.uint8)
        return out[: self._zstd.encode(heads.data, out.data, "bytes")]

    def _heads(self, coded: memoryview, count: int) -> _Bytes:
        heads = np.empty(count, np.uint8)
        self._zstd.decode(coded, heads.data, "bytes")
        return heads


def _fields(form: struct.Struct, stored: memoryview) -> tuple[int, ...]:
    if len(stored) < form.size:
        raise ValueError(f"{len(stored)} bytes are too few for a section's fields")
    return form.unpack_from(stored)


def _window(heads: _Bytes) -> tuple[int, int]:
    """Choose the window.

    Return the code width and the window's first head that together need the fewest bits for a sample of `heads`, with
    `_ESCAPE_BITS` charged for each head outside of the window.
    """
    # An odd step sees all channels: their number is even, and elements of one channel lie at equal distances.
    sample = heads[:: len(heads) // _SAMPLES | 1]
    below = np.concatenate(([0], np.bincount(sample, minlength=256).cumsum()))
    covered = below.take(_STOPS) - below[:256]
    width, first = divmod(int((_ESCAPE_BITS * covered - len(sample) * _WIDTHS).argmax()), 256)
    return width + 1, first
