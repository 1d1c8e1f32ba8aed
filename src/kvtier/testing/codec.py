"""Contract tests for codecs. Subclass `CodecContract` in a pytest module and give it a `make`."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.codec.base import Codec
from kvtier.layout import ELEMENT_BYTES, SECTION_BYTES_MAX, Element

_LENGTHS = (1, 2, 511, 4095, 4096, 68_608, SECTION_BYTES_MAX)
_GUARD = 64
_FORMS: dict[Element, tuple[str, int]] = {"fp32": ("<f4", 0), "bf16": ("<f4", 2), "fp16": ("<f2", 0)}
"""Of numbers in memory: NumPy's type, and its low bytes that the element does not have."""


class CodecContract:
    """Codecs are lossless and say so, and damaged input never makes them write outside of their buffer.

    Test your codec with::

        class TestMine(CodecContract):
            def make(self) -> Codec:
                return Mine()
    """

    def make(self) -> Codec:
        """A codec; called for each test."""
        raise NotImplementedError

    def test_has_a_name_and_an_id_that_fits_the_frame(self) -> None:
        """A setting refers to the name, a frame to the id."""
        codec = self.make()
        assert codec.name
        assert codec.name == codec.name.lower().strip()
        assert 0 <= codec.id < 1 << 32
        assert codec.is_exact is True, "a codec that does not restore every byte is refused"

    def test_another_instance_decodes(self) -> None:
        """Another process reads what this one wrote. A codec has no arguments and keeps nothing of what it encodes."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in _samples(element):
                into = memoryview(bytearray(len(raw)))
                type(codec)().decode(memoryview(_encoded(codec, raw, element)), into, element)
                assert into == raw, element

    def test_round_trip(self) -> None:
        """Decoding restores any content of any length and element. Memory may be read-only and not aligned."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in _samples(element):
                stored = _encoded(codec, raw, element)
                into = memoryview(bytearray(1 + len(raw)))[1:]
                codec.decode(memoryview(b"\0" + stored)[1:], into, element)
                assert into == raw, element

    def test_stays_within_its_bound_and_leaves_its_input_alone(self) -> None:
        """The frame reserves `bound` bytes."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in _samples(element):
                source = bytearray(raw)
                bound = codec.bound(len(raw))
                into = bytearray(b"\xa5" * (bound + _GUARD))
                used = codec.encode(memoryview(source), memoryview(into)[:bound], element)
                assert 1 <= used <= bound
                assert into[bound:] == b"\xa5" * _GUARD
                assert source == raw

    def test_refuses_another_length(self) -> None:
        """A section that decodes to another length is damaged."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in (bytes(4096), _noise(4096), _numbers(4096, element)):
                stored = memoryview(_encoded(codec, raw, element))
                for length in (0, 1, 4088, 4095, 4097, 4104, 8192):
                    assert _refuses(codec, stored, length, element), f"{length} bytes of {element} accepted"

    def test_refuses_what_is_cut_off_or_continued(self) -> None:
        """A section that is cut off or continued at any position is refused."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in (_noise(2048) + bytes(2048), _numbers(4096, element)):
                stored = memoryview(_encoded(codec, raw, element))
                for cut in {0, 1, 4, len(stored) // 2, len(stored) - 1}:
                    assert _refuses(codec, stored[:cut], len(raw), element), f"cut at {cut} accepted for {element}"
                assert _refuses(codec, memoryview(bytes(stored) + b"\0"), len(raw), element)

    def test_ends_in_value_error_or_not_at_all_on_noise(self) -> None:
        """A codec without checks may accept noise of the right length."""
        codec = self.make()
        draw = random.Random(7)
        for element in ELEMENT_BYTES:
            for raw in (_noise(2048) + bytes(2048), _numbers(4096, element)):
                stored = _encoded(codec, raw, element)
                for _ in range(150):
                    damaged = bytearray(stored)
                    for _ in range(draw.randrange(1, 4)):
                        # Every other one near the front, where lengths are.
                        damaged[draw.randrange(draw.choice((min(24, len(damaged)), len(damaged))))] = draw.randrange(
                            256
                        )
                    _refuses(codec, memoryview(damaged), 4096, element)
                    _refuses(codec, memoryview(draw.randbytes(draw.randrange(1, 200))), 4096, element)

    def test_serves_several_threads_at_once(self) -> None:
        """All mover threads share one instance."""
        codec = self.make()

        def round_trip(seed: int) -> bool:
            raw = random.Random(seed).randbytes(1 << 14) + bytes([seed]) * (1 << 15)
            into = bytearray(len(raw))
            codec.decode(memoryview(_encoded(codec, raw)), memoryview(into), "bytes")
            return bytes(into) == raw

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(round_trip, range(64)))


def _noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def _numbers(length: int, element: Element) -> bytes:
    """Normally distributed numbers of `element`; those of `bytes` and `fp8e4m3` are of `fp8e5m2`."""
    drawn = np.random.default_rng(length).standard_normal(length)
    kind, dropped = _FORMS.get(element, ("<f2", 1))
    whole = drawn.astype(kind).view(np.uint8).reshape(length, -1)
    return whole[:, dropped:].tobytes()[:length]


def _samples(element: Element) -> Iterator[bytes]:
    """Zeros, noise, pairs and numbers of many lengths, and each pattern of two bytes once."""
    yield np.arange(1 << 16, dtype="<u2").tobytes()
    size = ELEMENT_BYTES[element]
    for length in {max(it // size, 1) * size for it in _LENGTHS}:
        yield from (bytes(length), _noise(length), (b"ab" * length)[:length], _numbers(length, element))


def _encoded(codec: Codec, raw: bytes, element: Element = "bytes") -> bytes:
    into = bytearray(1 + codec.bound(len(raw)))
    used = codec.encode(memoryview(b"\0" + raw)[1:], memoryview(into)[1:], element)
    return bytes(into[1 : 1 + used])


def _refuses(codec: Codec, stored: memoryview, length: int, element: Element) -> bool:
    """Whether `decode` raises ValueError. It must not write outside of its buffer."""
    memory = bytearray(b"\xa5" * (length + _GUARD))
    try:
        codec.decode(stored, memoryview(memory)[:length], element)
        refused = False
    except ValueError:
        refused = True
    assert memory[length:] == b"\xa5" * _GUARD
    return refused
