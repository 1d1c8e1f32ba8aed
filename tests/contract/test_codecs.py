"""Every codec through the shared contract suite."""

import pytest

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.layout import Element
from kvtier.testing.codec import CodecContract


class TestRaw(CodecContract):
    def make(self) -> Codec:
        return registry.by_name("raw")


class TestZstd(CodecContract):
    def make(self) -> Codec:
        pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
        return registry.by_name("zstd")


class TestSplit(CodecContract):
    def make(self) -> Codec:
        return registry.by_name("split")


class TestSplit2(CodecContract):
    def make(self) -> Codec:
        pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
        return registry.by_name("split2")


class Shifts:
    """A wrong codec: it loses the last byte. The suite must see it."""

    name = "shifts"
    id = 40_000
    is_exact = False

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        into[: len(raw)] = raw
        return max(len(raw) - 1, 1)

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        into[: len(stored)] = stored


class Turns(Shifts):
    """A wrong codec: it turns the bytes of fp32."""

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        into[: len(raw)] = bytes(raw)[::-1] if element == "fp32" else raw
        return len(raw)

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        into[:] = stored


class BrokenContract(CodecContract):
    def make(self) -> Codec:
        return Shifts()


@pytest.mark.parametrize(
    "check",
    [
        "test_round_trip",
        "test_refuses_another_length",
        "test_refuses_what_is_cut_off_or_continued",
        "test_has_a_name_and_an_id_that_fits_the_frame",
        "test_another_instance_decodes",
    ],
)
def test_the_suite_sees_a_wrong_codec(check):
    with pytest.raises((AssertionError, ValueError)):
        getattr(BrokenContract(), check)()


def test_the_suite_sees_a_codec_that_loses_one_type_of_numbers(monkeypatch):
    monkeypatch.setattr(BrokenContract, "make", lambda _self: Turns())
    with pytest.raises(AssertionError, match="fp32"):
        BrokenContract().test_round_trip()
