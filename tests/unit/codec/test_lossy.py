"""Lossy codecs: numba and torch give the same bits, the bytes are as documented, and no wrong number is published."""

import logging
import math
import os
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec import lossy, registry, roundtrip
from kvtier.codec.frame import OPEN_SCRATCH_BYTES, frame_bytes, head_bytes, pack, pack_scratch_bytes, unpack_in_place
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.errors import ConfigError
from kvtier.layout import ELEMENT_BYTES, Axes, Axis, Cut, GroupLayout, History, KvLayout, Run
from kvtier.testing.codec_contract import _elements, _floats, _kv
from kvtier.types import ObjectName

CODECS = {name: registry.lossy(name) for name in registry.lossy_names()}
each = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(roundtrip, "_refused", {})


@st.composite
def sections(draw):
    """A section in any arrangement, and its bytes. Numbers may be biased, denormal, huge, sparse or uneven."""
    inner = [axis for axis in get_args(Axis) if axis not in {"layer", "channel"}]
    names = draw(st.permutations([axis for axis in inner if draw(st.booleans())]))
    sizes = {
        "side": 2,
        "head": draw(st.integers(1, 3)),
        "page": draw(st.integers(1, 9)),
        "token": draw(st.integers(1, 80)),
    }
    channels = draw(st.sampled_from([1, 2, 7, 32, 64, 66, 80, 128, 192]))
    element = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    axes = Axes((*names, "channel"), (*(sizes[name] for name in names), channels))
    kind = "kv" if "side" in names else draw(st.sampled_from(["keys", "values"]))
    cut = Cut(0, 0, math.prod(axes.sizes) * ELEMENT_BYTES[element], element, kind, axes)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    numbers = rng.standard_normal(axes.sizes) * rng.uniform(0.1, 5, channels)
    small, huge = (1e-7, 2e4) if element == "fp16" else (1e-39, 1e38)
    change = draw(st.sampled_from(["none", "biased", "constant", "denormal", "huge", "sparse", "uneven"]))
    with np.errstate(over="ignore"):  # to infinity: such a section is not coded
        numbers = {
            "none": lambda it: it,
            "biased": lambda it: it + 100 * rng.standard_normal(channels),
            "constant": lambda it: np.full_like(it, it.flat[0]),
            "denormal": lambda it: it * small,
            "huge": lambda it: it * huge,
            "sparse": lambda it: it * (rng.random(it.shape) < 0.2),
            "uneven": lambda it: it * np.exp2(rng.integers(-40, 9, (*it.shape[:-1], 1))),
        }[change](numbers)
        return cut, _elements(numbers, element)


def unaligned(content: bytes, by: int) -> memoryview:
    return memoryview(bytearray(by) + bytearray(content))[by:]


@given(sections(), st.sampled_from([*CODECS.values()]), st.booleans(), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_numba_and_torch_give_the_same_bits(section, codec, is_first, by, other):
    for package in ("numba", "torch"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from kvtier.codec import lossy_numba, lossy_torch

    cut, raw = section
    form = codec._form(cut, lossy.EXACT_TOKENS if is_first else 0)
    if form is None:
        return
    found = []
    for kernels, place in ((lossy_numba, by), (lossy_torch, other)):
        stored = unaligned(bytes(form.stored_bytes), place)
        is_coded = kernels.encode(unaligned(raw, place).toreadonly(), stored, form)
        found.append(bytes(stored) if is_coded else None)
    assert found[0] == found[1]
    if found[0] is None:
        return
    decoded = []
    for kernels, place in ((lossy_numba, other), (lossy_torch, by)):
        into = unaligned(bytes(len(raw)), place)
        kernels.decode(unaligned(found[0], place).toreadonly(), into, form)
        form.view(into)[form.exact] = form.view(memoryview(raw))[form.exact]
        decoded.append(bytes(into))
        assert kernels.wrong(memoryview(raw), memoryview(found[0]), into, form) == 0
    assert decoded[0] == decoded[1]
    noise = np.frombuffer(decoded[0], np.uint8) ^ np.random.default_rng(by).choice([0, 0x40], len(raw), p=[0.99, 0.01])
    changed = memoryview(noise.astype(np.uint8).tobytes())
    wrong = [it.wrong(memoryview(raw), memoryview(found[0]), changed, form) for it in (lossy_numba, lossy_torch)]
    assert wrong[0] == wrong[1]


def coded(codec, raw: bytes, cut: Cut, *, is_first: bool = False) -> bytes:
    into = memoryview(bytearray(len(raw)))
    used = codec.encode(memoryview(raw), into, cut, is_first=is_first)
    return bytes(into[:used])


def section(kind, numbers, element="bf16") -> tuple[Cut, bytes]:
    axes = Axes(("token", "channel"), np.shape(numbers))
    raw = _elements(np.array(numbers, float), element)
    return Cut(0, 0, len(raw), element, kind, axes), raw


def test_the_bytes_of_coded_sections():
    """As FORMAT.md describes them: 16 tokens of 2 channels."""
    numbers = [[n, 31 - n] for n in range(16)]
    codes = [it for n in range(16) for it in (n, 15 - n)]
    cut, raw = section("values", numbers)
    found = coded(CODECS["int4"], raw, cut)
    assert found[:16] == bytes.fromhex("40000000 0000 0000 0000 8041 803f 803f")  # lows 0 and 16, steps 1
    assert found[16:] == bytes([127] * 16) + rows(codes, 4)
    numbers[9] = [9 / 256, 22 / 256]
    cut, raw = section("values", numbers)
    found = coded(CODECS["int4"], raw, cut)
    assert found[16:] == bytes([127] * 9 + [119] + [127] * 6) + rows(codes, 4), "one token is scaled by 1/256"
    first = coded(CODECS["int4"], raw, cut, is_first=True)
    assert first[:24] == bytes.fromhex("40000000 0400 0000") + raw[:16]
    assert first[24:32] == bytes.fromhex("8040 8041 3c3f 3c3f")  # lows 4 and 16, steps 11/15
    assert first[44:] == rows([round(it / 11 * 15) for n in range(12) for it in (n, 11 - n)], 4)
    for name, kind, bits in (("int4", "keys", 5), ("k8v4", "keys", 7), ("k8v4", "values", 5)):
        most = 2**bits - 1
        cut, raw = section(kind, [[n, most - n] for n in (most, *range(14), 0)])
        found = coded(CODECS[name], raw, cut)
        assert found[:16] == bytes.fromhex("40000000 0000 0000 0000 0000 803f 803f")
        exponents = bytes([127] * 16 if kind == "values" else [])
        assert found[16:] == exponents + rows([it for n in (most, *range(14), 0) for it in (n, most - n)], bits)
    for kind, group in (("keys", 256), ("values", 128)):
        cut, raw = section(kind, [[n % 16, 15 - n % 16] for n in range(group)] + [[16, 20]])
        found = coded(CODECS["int4"], raw, cut)
        assert found[8:16] == bytes.fromhex("0000 0000 8041 a041"), "the last token is a group of its own"


def rows(codes: list[int], bits: int) -> bytes:
    """The blocks of codes of two channels: four rows of low halves, and a row for each further bit."""
    found = bytearray()
    for start in range(0, len(codes), 16):
        block = [codes[start + it : start + it + 2] or [0, 0] for it in range(0, 16, 2)]
        for token in range(4):
            found += bytes(
                low & 15 | (high & 15) << 4 for low, high in zip(block[token], block[token + 4], strict=True)
            )
        for bit in range(4, bits):
            found += bytes(sum((block[t][c] >> bit & 1) << t for t in range(8)) for c in range(2))
    return bytes(found)


@each
def test_the_values_of_a_small_token_are_exact_to_a_share_of_their_size(codec):
    """Such tokens draw much attention. The error that is allowed is smaller, too."""
    numbers = np.random.default_rng(1).standard_normal((64, 64))
    numbers[7] /= 256
    cut, raw = section("values", numbers)
    decoded = bytearray(len(raw))
    codec.decode(memoryview(coded(codec, raw, cut)), memoryview(decoded), cut)
    far = np.abs(_floats(decoded, "bf16") - _floats(raw, "bf16")).reshape(64, 64)
    assert 0 < far[7].max() < far.max() / 100
    stored, at = coded(codec, raw, cut), 2 * 64 * 7
    decoded[at : at + 2] = _elements(np.array([numbers[7, 0] + far.max() / 2]), "bf16")
    assert codec.error(memoryview(raw), memoryview(stored), memoryview(decoded), cut).startswith("1 numbers differ")


@each
@pytest.mark.parametrize("dim", [64, 128])
def test_whole_frames_have_the_size_that_plans_count_with(codec, dim):
    limit = {"int4": 0.30, "k8v4": 0.41}[codec.name]
    run = Run("kv", "bf16", 2 * 8 * 256 * dim * 2)
    axes = Axes(("side", "head", "token", "channel"), (2, 8, 256, dim))
    layers = 8
    made = GroupLayout(History(), (run.size_bytes,) * layers, "test", runs=((run,),) * layers, axes=((axes,),) * layers)
    group = KvLayout(256, (made,)).of_class(codec.name).groups[0]
    slot, payload = filled(group)
    for depth in (0, 1):
        frame = packed(slot, group, codec, depth)
        assert len(frame) / frame_bytes(group) <= limit + (0.012 if depth == 0 else 0)
        back = memoryview(bytearray(frame_bytes(group)))
        back[: len(frame)] = frame
        scratch = memoryview(bytearray(OPEN_SCRATCH_BYTES))
        unpack_in_place(back, len(frame), group, Identity(ObjectName(bytes(32)), depth=depth), scratch)
        assert bytes(back[head_bytes(group) :]) != payload


def filled(group: GroupLayout) -> tuple[memoryview, bytes]:
    slot = memoryview(bytearray(frame_bytes(group)))
    for cut in group.sections:
        start = head_bytes(group) + cut.offset
        slot[start : start + cut.size_bytes] = _kv(cut, cut.layer)
    return slot, bytes(slot[head_bytes(group) :])


def packed(slot: memoryview, group: GroupLayout, codec, depth: int = 1) -> bytes:
    scratch = memoryview(bytearray(pack_scratch_bytes(group, registry.by_name("split"))))
    identity = Identity(ObjectName(bytes(32)), depth=depth)
    return bytes(pack(slot, group, identity, registry.by_name("split"), scratch, lossy=codec))


class Exceeds(lossy.Int4):
    """A wrong codec: it restores one number in a section too far from the original."""

    def decode(self, stored, into, cut):
        super().decode(stored, into, cut)
        into[len(into) // 2 + 1] ^= 0x40


def test_a_codec_that_exceeds_its_bound_is_refused_and_logged(caplog):
    run = Run("values", "bf16", 256 * 64 * 2)
    axes = Axes(("token", "channel"), (256, 64))
    made = GroupLayout(History(), (run.size_bytes,), "test", runs=((run,),), axes=((axes,),))
    group = KvLayout(256, (made,)).of_class("int4").groups[0]
    slot, _ = filled(group)
    assert len(packed(slot, group, CODECS["int4"])) < frame_bytes(group)
    assert not caplog.records
    assert packed(slot, group, Exceeds()) == bytes(pack(slot, group, Identity(ObjectName(bytes(32)), depth=1), Raw()))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "1 numbers differ by more than their group's step allows" in record.getMessage()
    assert roundtrip.is_refused(CODECS["int4"])


def test_a_group_whose_range_overflows_is_left_to_others():
    """The contract has numbers that are not finite."""
    numbers = np.random.default_rng(1).standard_normal((64, 64))
    numbers[40] = 3.38e38
    cut, raw = section("keys", numbers)
    assert len(coded(CODECS["int4"], raw, cut)) < len(raw)
    numbers[41] = -3.38e38
    cut, raw = section("keys", numbers)
    assert len(coded(CODECS["int4"], raw, cut)) == len(raw)


def test_a_section_of_one_side_says_which():
    """Sections of a run of keys and values end between them if both together are too long."""
    for names, sizes, kinds in (
        (("side", "head", "token", "channel"), (2, 8, 256, 256), ["keys", "values"]),
        (("page", "side", "head", "token", "channel"), (2, 2, 8, 256, 256), ["keys", "values"] * 2),
        (("page", "head", "token", "side", "channel"), (4, 4, 16, 2, 64), ["kv"]),
    ):
        run, axes = Run("kv", "bf16", 2 * math.prod(sizes)), Axes(names, sizes)
        group = GroupLayout(History(), (run.size_bytes,), "test", runs=((run,),), axes=((axes,),)).of_class("int4")
        assert [cut.kind for cut in group.sections] == kinds


def test_without_numba_and_torch_the_error_names_both(monkeypatch):
    monkeypatch.setattr(lossy, "find_spec", lambda _package: None)
    with pytest.raises(ConfigError, match="numba, or torch"):
        lossy.Int4()


def test_defaults_that_an_engine_sets_in_torch_change_no_number():
    """Engines set them for the whole process, some for good."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cuts = [section(kind, np.random.default_rng(1).standard_normal((64, 64)), "fp16") for kind in ("keys", "values")]

    def restored(codec, cut, raw):
        stored, into = coded(codec, raw, cut), memoryview(bytearray(len(raw)))
        codec.decode(memoryview(stored), into, cut)
        return stored, bytes(into)

    def all_restored():
        return [restored(make("torch"), *it) for make in (lossy.Int4, lossy.K8V4) for it in cuts]

    expected = all_restored()
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                assert all_restored() == expected, (dtype, device)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_package_that_cannot_be_loaded_is_replaced_by_the_next(tmp_path, monkeypatch):
    """Releases of numba refuse a NumPy that is newer than they are."""
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script = "from kvtier.codec import lossy; print(lossy.load_kernels().__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "kvtier.codec.lossy_torch\n"
    assert "cannot use the package numba: ImportError: Numba needs NumPy 2.3 or less" in done.stderr


def test_an_engine_without_a_class_compiles_nothing():
    """The codec is known by its id to every reader of frames."""
    script = (
        "import sys; from kvtier.codec import registry; codec = registry.by_id(5); "
        "print(codec.name, 'numba' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "int4 False False\n"
