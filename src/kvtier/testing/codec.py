"""Contract tests for codecs. Subclass `CodecContract` in a pytest module and give it a `make`."""

import random
from concurrent.futures import ThreadPoolExecutor

from kvtier.codec.base import Codec
from kvtier.layout import SECTION_BYTES_MAX

_LENGTHS = (1, 2, 511, 4095, 4096, 68_608, SECTION_BYTES_MAX)
_GUARD = 64


class CodecContract:
    """Codecs are lossless, and damaged input never makes them write outside of their buffer.

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

    def test_round_trip(self) -> None:
        """Decoding restores any content of any length. Payloads and stored bytes may be read-only memory."""
        codec = self.make()
        for raw in _samples():
            stored = _encoded(codec, raw)
            into = bytearray(len(raw))
            codec.decode(memoryview(stored), memoryview(into), "bytes")
            assert into == raw

    def test_stays_within_its_bound_and_leaves_its_input_alone(self) -> None:
        """The frame reserves `bound` bytes."""
        codec = self.make()
        for raw in _samples():
            source = bytearray(raw)
            bound = codec.bound(len(raw))
            into = bytearray(b"\xa5" * (bound + _GUARD))
            used = codec.encode(memoryview(source), memoryview(into)[:bound], "bytes")
            assert 1 <= used <= bound
            assert into[bound:] == b"\xa5" * _GUARD
            assert source == raw

    def test_refuses_another_length(self) -> None:
        """A section that decodes to another length is damaged."""
        codec = self.make()
        for raw in (bytes(4096), _noise(4096)):
            stored = memoryview(_encoded(codec, raw))
            for length in (0, 1, 4095, 4097, 8192):
                assert _refuses(codec, stored, length), f"{length} bytes accepted"

    def test_refuses_what_is_cut_off_or_continued(self) -> None:
        """A section that is cut off or continued at any position is refused."""
        codec = self.make()
        raw = _noise(2048) + bytes(2048)
        stored = memoryview(_encoded(codec, raw))
        for cut in {0, 1, 4, len(stored) // 2, len(stored) - 1}:
            assert _refuses(codec, stored[:cut], len(raw)), f"cut at {cut} accepted"
        assert _refuses(codec, memoryview(bytes(stored) + b"\0"), len(raw))

    def test_ends_in_value_error_or_not_at_all_on_noise(self) -> None:
        """A codec without checks may accept noise of the right length."""
        codec = self.make()
        stored = _encoded(codec, _noise(2048) + bytes(2048))
        draw = random.Random(7)
        for _ in range(300):
            damaged = bytearray(stored)
            for _ in range(draw.randrange(1, 4)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            _refuses(codec, memoryview(damaged), 4096)
            _refuses(codec, memoryview(draw.randbytes(draw.randrange(1, 200))), 4096)

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


def _samples() -> list[bytes]:
    return [content for length in _LENGTHS for content in (bytes(length), _noise(length), (b"ab" * length)[:length])]


def _encoded(codec: Codec, raw: bytes) -> bytes:
    into = bytearray(codec.bound(len(raw)))
    return bytes(into[: codec.encode(memoryview(raw), memoryview(into), "bytes")])


def _refuses(codec: Codec, stored: memoryview, length: int) -> bool:
    """Whether `decode` raises ValueError. It must not write outside of its buffer."""
    memory = bytearray(b"\xa5" * (length + _GUARD))
    try:
        codec.decode(stored, memoryview(memory)[:length], "bytes")
        refused = False
    except ValueError:
        refused = True
    assert memory[length:] == b"\xa5" * _GUARD
    return refused
