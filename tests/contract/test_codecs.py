"""Every codec through the shared contract suite."""

from importlib import import_module

import pytest

from kvtier.codec import lossy, registry
from kvtier.codec.base import Codec, LossyCodec
from kvtier.layout import Element
from kvtier.testing.codec_contract import CodecContract, LossyCodecContract


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


@pytest.fixture(params=["numba", "torch"])
def kernels(request, monkeypatch):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    module = import_module(f"kvtier.codec.lossy_{request.param}")
    monkeypatch.setattr(lossy, "load_kernels", lambda _package: module)


@pytest.mark.usefixtures("kernels")
class TestInt4(LossyCodecContract):
    def make(self) -> LossyCodec:
        return registry.lossy("int4")


@pytest.mark.usefixtures("kernels")
class TestK8V4(LossyCodecContract):
    def make(self) -> LossyCodec:
        return registry.lossy("k8v4")


class Coarse(lossy.Int4):
    """A wrong codec: it restores the values of every second byte one step too high."""

    def decode(self, stored, into, cut):
        changed = bytearray(stored)
        changed[-1:] = bytes([changed[-1] ^ 1])
        super().decode(memoryview(changed), into, cut)


class Drifts(lossy.Int4):
    """A wrong codec: each time that it codes, it adds a little."""

    def encode(self, raw, into, cut, *, is_first):
        used = super().encode(raw, into, cut, is_first=is_first)
        if used < len(raw):
            into[used - len(raw) // 16 : used] = bytes(min(0xFF, it + 1) for it in into[used - len(raw) // 16 : used])
        return used


@pytest.mark.parametrize(
    ("codec", "check"),
    [
        (Coarse, "test_keeps_its_bound_in_any_arrangement"),
        (Drifts, "test_coding_again_ten_times_adds_a_hundredth_of_the_error_at_most"),
    ],
)
def test_the_suite_sees_a_wrong_lossy_codec(codec, check):
    contract = type("Broken", (LossyCodecContract,), {"make": lambda _self: codec()})()
    with pytest.raises(AssertionError):
        getattr(contract, check)()


def test_the_suite_sees_a_codec_that_forgets_the_scales_of_tokens(monkeypatch):
    lossy_torch = pytest.importorskip("kvtier.codec.lossy_torch", reason="torch is not installed")
    monkeypatch.setattr(lossy_torch, "OTHERS", 1)
    contract = type("Broken", (LossyCodecContract,), {"make": lambda _self: lossy.Int4("torch")})()
    with pytest.raises(AssertionError):
        contract.test_coding_again_ten_times_adds_a_hundredth_of_the_error_at_most()


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
