"""The codecs `split`: every bit comes back, the size follows from the numbers, and what is damaged is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.layout import ELEMENT_BYTES, SECTION_BYTES_MAX

pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")

CODECS = [registry.by_name("split"), registry.by_name("split2")]
each = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
elements = st.sampled_from(sorted(ELEMENT_BYTES))
# Any bits: few values, or some of all; NaN payloads, infinities, denormals and the negative zero among them.
patterns = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.lists(
        st.sampled_from([b"\x80\x3f", b"\xc1\x7f", b"\x80\xff", b"\x01\x00", b"\x00\x80", b"\x12\xbe"]), min_size=1
    ).map(b"".join),
)


def encoded(codec: Codec, raw: bytes, element: str) -> bytes:
    into = memoryview(bytearray(codec.bound(len(raw))))
    return bytes(into[: codec.encode(memoryview(raw), into, element)])


def decoded(codec: Codec, stored: bytes, length: int, element: str) -> bytes:
    into = bytearray(length)
    codec.decode(memoryview(stored), memoryview(into), element)
    return bytes(into)


def normal(count: int, seed: int = 0) -> bytes:
    """Normally distributed bf16."""
    drawn = np.random.default_rng(seed).standard_normal(count).astype("<f4")
    return (drawn.view("<u4") >> 16).astype("<u2").tobytes()


@each
@given(raw=patterns, times=st.integers(1, 40), element=elements)
def test_any_bits_come_back_and_are_coded_the_same_way_again(codec, raw, times, element):
    content = raw * times
    content = content[: len(content) // ELEMENT_BYTES[element] * ELEMENT_BYTES[element]] or bytes(4)
    stored = encoded(codec, content, element)
    assert len(stored) <= codec.bound(len(content))
    assert decoded(codec, stored, len(content), element) == content
    assert encoded(codec, content, element) == stored


@each
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_all_patterns_of_two_bytes_among_numbers_come_back(codec, element):
    raw = np.arange(1 << 16, dtype="<u2").tobytes() + normal(1 << 18)
    stored = encoded(codec, raw, element)
    assert len(stored) < len(raw)
    assert decoded(codec, stored, len(raw), element) == raw


@each
@pytest.mark.parametrize("length", range(1, 65))
def test_small_sections_come_back(codec, length):
    for element, size in ELEMENT_BYTES.items():
        if length % size == 0:
            for raw in (bytes(length), normal(length)[:length]):
                assert decoded(codec, encoded(codec, raw, element), length, element) == raw


@pytest.mark.parametrize(("name", "most"), [("split", 0.705), ("split2", 0.668)])
def test_numbers_take_what_their_exponents_need(name, most):
    """The exponents of a normal distribution hold 2.55 of 8 bits: 0.659 of the bytes at best."""
    raw = normal(SECTION_BYTES_MAX // 2)
    stored = encoded(registry.by_name(name), raw, "bf16")
    assert 0.659 < len(stored) / len(raw) < most
    shuffled = np.random.default_rng(1).permutation(np.frombuffer(raw, "<u2")).tobytes()
    assert len(encoded(registry.by_name(name), shuffled, "bf16")) == pytest.approx(len(stored), rel=0.002)


@pytest.mark.parametrize("width", range(1, 8))
def test_codes_of_every_width_come_back(width):
    """A byte rotated left is its head; the heads take all values of a window of this width, and some do not."""
    draw = np.random.default_rng(width)
    heads = (draw.integers(0, (1 << width) - 1, 4001) + 77).astype(np.uint8)
    heads[::211] = 76
    raw = ((heads >> 1) | (heads << 7)).tobytes()
    stored = encoded(registry.by_name("split"), raw, "fp8e4m3")
    assert (stored[8], stored[9]) == (width, 77)
    assert len(stored) == 16 + width * 501 + 19
    assert decoded(registry.by_name("split"), stored, len(raw), "fp8e4m3") == raw


def test_the_bytes_of_a_coded_section():
    """As the module describes them. Numbers of 1.0 in 64 elements; number 63, with k = 7 and j = 7, is -2 ** 100."""
    raw = struct.pack("<64H", *[0x3F80] * 63, 0xF180)
    fields = struct.pack("<II", 2, 128)
    lows = bytes(63) + b"\x01"  # the mantissa is 0, the sign is below it
    codes = bytes(7) + b"\x80"  # one bit each: 1 is an escape
    coded = struct.pack("<BBHI", 1, 127, 0, 1) + codes + b"\xe3"  # exponents with their bias of 127
    assert encoded(registry.by_name("split"), raw, "bf16") == fields + lows + coded
    assert decoded(registry.by_name("split"), fields + lows + coded, 128, "bf16") == raw


@each
@given(data=st.data())
def test_damage_ends_in_a_value_error_or_in_bytes_of_the_right_length(codec, data):
    raw = normal(2000)
    stored = bytearray(encoded(codec, raw, "bf16"))
    assert len(stored) < len(raw)
    at = data.draw(st.one_of(st.integers(0, 15), st.integers(0, len(stored) - 1)))
    stored[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded(codec, bytes(stored), len(raw), "bf16")
    except ValueError:
        return
    assert at >= 8


def test_fields_that_do_not_fit_are_refused():
    split = registry.by_name("split")
    raw = normal(2000)
    stored = encoded(split, raw, "bf16")
    lows = 8 + 2000
    for at, value, message in (
        (0, 3, "cannot fill"),
        (0, 1, "cannot fill"),
        (4, 1, "cannot fill"),
        (lows, 0, "do not hold"),
        (lows, 8, "do not hold"),
        (lows + 2, 1, "do not hold"),
        (lows + 4, 0xFF, "do not hold"),
    ):
        damaged = bytearray(stored)
        damaged[at] = value
        with pytest.raises(ValueError, match=message):
            decoded(split, bytes(damaged), len(raw), "bf16")
    with pytest.raises(ValueError, match="cannot fill 4000 of fp32"):
        decoded(split, stored, len(raw), "fp32")
    with pytest.raises(ValueError, match="too few"):
        decoded(split, stored[:100], len(raw), "bf16")
    damaged = bytearray(stored)
    damaged[lows + 8 : lows + 100] = b"\xff" * 92
    with pytest.raises(ValueError, match="escapes are stated"):
        decoded(split, bytes(damaged), len(raw), "bf16")


def test_a_zstandard_frame_of_another_size_is_refused_before_it_is_decompressed():
    import zstandard

    huge = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    stored = struct.pack("<II", 2, 4000) + bytes(2000) + huge
    with pytest.raises(ValueError, match="content of 268435456 bytes cannot fill 2000"):
        decoded(registry.by_name("split2"), stored, 4000, "bf16")
