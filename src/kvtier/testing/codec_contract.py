"""Contract tests for codecs. Subclass `CodecContract` in a pytest module and override `make`."""

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from kvtier.codec.base import Codec, LossyCodec
from kvtier.layout import ELEMENT_BYTES, LOSSY_ELEMENTS, SECTION_BYTES_MAX, Axes, Cut, Element, RunKind

_LENGTHS = (1, 2, 511, 4095, 4096, 68_608, SECTION_BYTES_MAX)
_GUARD = 64
_FORMS: dict[Element, tuple[str, int]] = {"fp32": ("<f4", 0), "bf16": ("<f4", 2), "fp16": ("<f2", 0)}
"""The form of each element in memory: NumPy's type, and the number of its low bytes that the element drops."""


class CodecContract:
    """A codec is lossless, and its `is_exact` says so. Damaged input never makes it write outside its buffer.

    Test your codec with::

        class TestMine(CodecContract):
            def make(self) -> Codec:
                return Mine()
    """

    def make(self) -> Codec:
        """Return a codec. Each test calls this."""
        raise NotImplementedError

    def test_has_a_name_and_an_id_that_fits_the_frame(self) -> None:
        """Settings refer to the name, and frames refer to the id."""
        codec = self.make()
        assert codec.name
        assert codec.name == codec.name.lower().strip()
        assert 0 <= codec.id < 1 << 32
        assert codec.is_exact is True, "kvtier refuses a codec that does not restore every byte"

    def test_another_instance_decodes(self) -> None:
        """Another process can decode sections that this one encoded. The constructor needs no arguments."""
        codec = self.make()
        for element in ELEMENT_BYTES:
            for raw in _samples(element):
                into = memoryview(bytearray(len(raw)))
                type(codec)().decode(memoryview(_encoded(codec, raw, element)), into, element)
                assert into == raw, element

    def test_round_trip(self) -> None:
        """Decoding restores any bytes of any length and element. Memory may be read-only or unaligned."""
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
        """A section that is truncated or extended at any position is refused."""
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
                        # About half of the damaged bytes are near the front, where the lengths are.
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


class LossyCodecContract:
    """A lossy codec stays within its own error bound, and coding its output again changes almost nothing."""

    def make(self) -> LossyCodec:
        """Return a codec. Each test calls this."""
        raise NotImplementedError

    def test_says_that_it_is_lossy(self) -> None:
        """Engines without a lossy class never use a lossy codec."""
        assert self.make().is_exact is False

    def test_keeps_its_bound_in_any_arrangement(self) -> None:
        """Memory may be read-only and unaligned. The codec writes only to its output and does not change its input."""
        codec = self.make()
        for cut in _cuts():
            raw = _kv(cut)
            for is_first in (False, True):
                into = bytearray(b"\xa5" * (1 + len(raw) + _GUARD))
                room = memoryview(into)[1 : 1 + len(raw)]
                source = bytearray(b"\0" + raw)
                used = codec.encode(memoryview(source)[1:].toreadonly(), room, cut, is_first=is_first)
                assert 0 < used < len(raw), cut
                assert into[:1] + into[1 + len(raw) :] == b"\xa5" * (1 + _GUARD)
                assert source[1:] == raw
                stored = room[:used].toreadonly()
                decoded = memoryview(_decoded(type(codec)(), stored, len(raw), cut, at=1))
                assert not codec.error(memoryview(raw), stored, decoded, cut), cut
                assert codec.error(memoryview(_kv(cut, seed=2)), stored, decoded, cut), (
                    "the codec reports no error for other numbers"
                )

    def test_coding_again_ten_times_adds_a_hundredth_of_the_error_at_most(self) -> None:
        """Frames move between tiers, and turns are stored again. Tokens of any size keep their scales."""
        codec = self.make()
        for cut, is_uneven in product(_cuts(), (False, True)):
            raw = decoded = _kv(cut, is_uneven=is_uneven)
            errors: list[float] = []
            for _ in range(11):
                decoded = _decoded(codec, _coded(codec, decoded, cut), len(raw), cut)
                errors.append(float(np.mean((_floats(raw, cut.element) - _floats(decoded, cut.element)) ** 2)))
            assert 0 < errors[-1] <= 1.01 * errors[0], (cut, errors)

    def test_leaves_what_is_not_finite_to_other_codecs(self) -> None:
        """One number that is not finite would spoil its whole group."""
        codec = self.make()
        for cut in _cuts():
            for value in (math.nan, math.inf, -math.inf):
                raw = bytearray(_kv(cut))
                width = ELEMENT_BYTES[cut.element]
                at = len(raw) // 2 // width * width
                raw[at : at + width] = _elements(np.array([value]), cut.element)
                assert _coded(codec, bytes(raw), cut) == b"", f"{value} was coded"

    def test_refuses_what_does_not_fit(self) -> None:
        """Lengths and the fields before the numbers must match exactly."""
        codec = self.make()
        for cut in _cuts():
            raw = _kv(cut)
            stored = _coded(codec, raw, cut)
            wrong = [stored[:at] for at in (0, 1, 7, 8, len(stored) // 2, len(stored) - 1)] + [stored + b"\0"]
            for at in range(8):
                wrong += [stored[:at] + bytes([stored[at] ^ bit]) + stored[at + 1 :] for bit in (1, 4, 0x80)]
            for it in wrong:
                assert _refuses(codec, it, len(raw), cut), cut
            for length in (0, len(raw) - 2, len(raw) + 2):
                assert _refuses(codec, stored, length, cut), cut

    def test_ends_in_value_error_or_not_at_all_on_noise(self) -> None:
        """A codec may accept damage within the numbers, because checksums detect it."""
        codec = self.make()
        draw = random.Random(7)
        for cut in _cuts():
            raw = _kv(cut)
            stored = _coded(codec, raw, cut)
            for _ in range(30):
                damaged = bytearray(stored)
                for _ in range(draw.randrange(1, 200)):
                    damaged[draw.randrange(len(damaged))] = draw.randrange(256)
                _refuses(codec, bytes(damaged), len(raw), cut)

    def test_serves_several_threads_at_once(self) -> None:
        """All mover threads share one instance."""
        codec = self.make()
        cut = next(_cuts())

        def coded(seed: int) -> bytes:
            return _coded(codec, _kv(cut, seed), cut)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(coded, range(32))) == [coded(seed) for seed in range(32)]


def _cuts() -> Iterator[Cut]:
    """Yield sections in the arrangements of engines, for each element."""
    arrangements: list[tuple[RunKind, Axes]] = [
        ("kv", Axes(("side", "head", "token", "channel"), (2, 2, 256, 64))),
        ("kv", Axes(("page", "token", "head", "side", "channel"), (9, 16, 2, 2, 128))),
        ("keys", Axes(("page", "head", "token", "channel"), (5, 3, 16, 80))),
        ("values", Axes(("token", "head", "channel"), (70, 1, 192))),
    ]
    for element in sorted(LOSSY_ELEMENTS):
        for kind, axes in arrangements:
            yield Cut(0, 0, math.prod(axes.sizes) * ELEMENT_BYTES[element], element, kind, axes)


def _kv(cut: Cut, seed: int = 1, *, is_uneven: bool = False) -> bytes:
    """Return random KV like a model's: channels differ in magnitude, and some have a large mean.

    If `is_uneven`, about every fourth token is larger or smaller by a factor of up to 16.
    """
    assert cut.axes is not None
    draw = np.random.default_rng(seed)
    channels = cut.axes.size("channel")
    size, mean = draw.uniform(0.2, 3, channels), draw.standard_normal(channels) * 8 * (draw.random(channels) < 0.2)
    numbers = draw.standard_normal(cut.axes.sizes) * size + mean
    if is_uneven:
        sizes = [it if name in {"page", "token"} else 1 for name, it in zip(cut.axes.names, numbers.shape, strict=True)]
        numbers *= np.exp2(draw.uniform(-4, 4, sizes) * (draw.random(sizes) < 0.25))
    return _elements(numbers, cut.element)


def _elements(numbers: np.typing.NDArray[np.float64], element: Element) -> bytes:
    """Return numbers as `element` in memory. For `bytes` and `fp8e4m3`, return `fp8e5m2` numbers."""
    kind, dropped = _FORMS.get(element, ("<f2", 1))
    whole = numbers.astype(kind).reshape(-1)
    return whole.view(np.uint8).reshape(len(whole), -1)[:, dropped:].tobytes()


def _floats(raw: bytes, element: Element) -> np.typing.NDArray[np.float64]:
    if element == "bf16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(raw, _FORMS[element][0]).astype(np.float64)


def _coded(codec: LossyCodec, raw: bytes, cut: Cut) -> bytes:
    """Return the stored section; empty if it is not coded."""
    into = memoryview(bytearray(len(raw)))
    used = codec.encode(memoryview(raw), into, cut, is_first=False)
    return bytes(into[:used]) if used < len(raw) else b""


def _noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def _numbers(length: int, element: Element) -> bytes:
    """Return normally distributed numbers in the form of `_elements`."""
    return _elements(np.random.default_rng(length).standard_normal(length), element)[:length]


def _samples(element: Element) -> Iterator[bytes]:
    """Yield zeros, noise, pairs and numbers of many lengths, and each pattern of two bytes once."""
    yield np.arange(1 << 16, dtype="<u2").tobytes()
    size = ELEMENT_BYTES[element]
    for length in {max(it // size, 1) * size for it in _LENGTHS}:
        yield from (bytes(length), _noise(length), (b"ab" * length)[:length], _numbers(length, element))


def _encoded(codec: Codec, raw: bytes, element: Element = "bytes") -> bytes:
    into = bytearray(1 + codec.bound(len(raw)))
    used = codec.encode(memoryview(b"\0" + raw)[1:], memoryview(into)[1:], element)
    return bytes(into[1 : 1 + used])


def _decoded(codec: Any, stored: bytes | memoryview, length: int, about: Element | Cut, *, at: int = 0) -> bytes:  # noqa: ANN401 - of either interface
    """Decode into `length` bytes, `at` bytes after an aligned address. `decode` must not write outside them."""
    memory = bytearray(b"\xa5" * (at + length + _GUARD))
    try:
        codec.decode(memoryview(stored), memoryview(memory)[at : at + length], about)
    finally:
        assert memory[:at] + memory[at + length :] == b"\xa5" * (at + _GUARD)
    return bytes(memory[at : at + length])


def _refuses(codec: Codec | LossyCodec, stored: bytes | memoryview, length: int, about: Element | Cut) -> bool:
    """Return whether `decode` raises ValueError."""
    try:
        _decoded(codec, stored, length, about)
    except ValueError:
        return True
    return False
