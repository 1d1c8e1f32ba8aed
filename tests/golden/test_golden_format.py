"""FORMAT.md and the code say the same: its worked example is read from the document and compared byte for byte."""

import re
from pathlib import Path

import pytest
import worked_example as example
from test_golden_identity import made

from kvtier.codec.frame import OPEN_SCRATCH_BYTES, frame_bytes, head_bytes, unpack_in_place, verify_frame
from kvtier.codec.frame_header import ENTRY, ENTRY_BYTES, FIXED_BYTES, MAGIC, SECTIONS_MAX, VERSION
from kvtier.errors import CorruptChunkError
from kvtier.keys.fingerprint import canonical_json

DOCUMENT = (Path(__file__).parents[2] / "FORMAT.md").read_text()


def block(label: str) -> str:
    """The fenced block that the document calls `label`."""
    (found,) = re.findall(rf"^```\w+ {label}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    return found


def undumped(text: str) -> bytes:
    data = bytearray()
    repeats = False
    for line in text.splitlines():
        if line == "*":
            repeats = True
            continue
        at, _, digits = line.partition("  ")
        while repeats and len(data) < int(at, 16):
            data += data[-16:]
        assert len(data) == int(at, 16), f"line {line!r} is not where it says"
        repeats = False
        data += bytes.fromhex(digits)
    return bytes(data)


def test_the_documents_frame_is_what_the_code_makes():
    assert undumped(block("frame")) == example.frame()


def test_the_documents_frame_is_read():
    frame = undumped(block("frame"))
    head = verify_frame(frame)
    assert head.identity == example.IDENTITY
    assert [(section.layer, section.raw_bytes, section.offset) for section in head.sections] == [
        (0, 12, 4096),
        (0, 8, 4108),
        (1, 5, 8192),
    ]
    slot = bytearray(frame)
    unpack_in_place(
        memoryview(slot), len(frame), example.GROUP, example.IDENTITY, memoryview(bytearray(OPEN_SCRATCH_BYTES))
    )
    assert slot == frame


def test_a_frame_that_differs_from_the_documents_in_one_digit_is_refused():
    text = block("frame")
    assert "10 11 12 13" in text
    with pytest.raises(CorruptChunkError):
        verify_frame(undumped(text.replace("10 11 12 13", "10 11 12 14")))


def test_the_documents_digests_are_what_the_code_makes():
    rows = [re.split(r"  +", line) for line in block("digests").splitlines()]
    assert {name: bytes.fromhex(digits) for name, digits in rows} == made()


def test_the_documents_json_is_what_the_code_hashes():
    fingerprint = example.FINGERPRINT
    fields = {
        "version": 1,
        "weights": fingerprint.weights.hex(),
        "revision": fingerprint.revision,
        "attention": fingerprint.attention,
        "rope": fingerprint.rope,
        "dtype": fingerprint.dtype,
        "epoch": fingerprint.epoch,
        "other": fingerprint.other,
    }
    assert block("fingerprint").strip().encode() == canonical_json(fields)


def test_the_documents_tables_have_the_codes_widths():
    width = {"u32": 4, "u64": 8}
    for heading, total in (("Fixed part:", FIXED_BYTES), ("Entry of the section table:", ENTRY_BYTES)):
        table = DOCUMENT.partition(heading)[2].strip().partition("\n\n")[0]
        position = 0
        for row in table.splitlines()[2:]:
            at, size = (cell.strip() for cell in row.strip("|").split("|")[:2])
            assert int(at) == position, row
            position += width.get(size) or int(size)
        assert position == total
    assert ENTRY.itemsize == ENTRY_BYTES
    assert f"Format version: **{VERSION}**" in DOCUMENT
    assert MAGIC.hex(" ") in DOCUMENT
    assert f"1 .. {SECTIONS_MAX:,}" in DOCUMENT


def test_slot_sizes_are_the_documents():
    assert (head_bytes(example.GROUP), frame_bytes(example.GROUP)) == (4096, 12_288)


def test_a_zstandard_section_of_today_is_readable_for_ever():
    pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
    from kvtier.codec.zstd import Zstd

    into = bytearray(b"\xa5" * 4096)
    Zstd().decode(memoryview(bytes.fromhex("28b52ffd60000f4d00001000000100fbf70116")), memoryview(into), "bytes")
    assert into == bytes(4096)


def test_lossy_sections_of_today_are_readable_for_ever():
    """16 tokens of 2 channels, n and 1 - 2n, in bf16; the first four may be exact."""
    pytest.importorskip("torch", reason="torch is not installed")
    import numpy as np

    from kvtier.codec.registry import lossy
    from kvtier.layout import Axes, Cut

    numbers = np.array([[n, 1 - 2 * n] for n in range(16)], np.float32)
    raw = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    sizes = "7c7c7d" + "7f" * 13
    for name, kind, exact, stored in (
        ("int4", "values", 0, "40000000000000000000e8c1803f1e40" + sizes + "409f58896877736ac826d925ea14fb03"),
        (
            "int4",
            "values",
            4,
            "4000000004000000" + raw[:16].hex() + "8040e8c13c3fbc3f" + "7f" * 12 + "50af718e837ca45b0b040c030e010f00",
        ),
        ("int4", "keys", 0, "40000000000000000000e8c1f83e783f807fa25dc43be61900ff916eb34cd52af708ff00"),
        (
            "k8v4",
            "values",
            0,
            "40000000000000000000e8c1f83e993f" + sizes + "802fa112c1fee6d4063b915cb33ad528f707ff00",
        ),
        (
            "k8v4",
            "keys",
            0,
            "40000000000000000000e8c1f23d723e20dfa85631ceb946cc33f00f00ff649bec13658afd02cc33f00fff00",
        ),
    ):
        into = bytearray(b"\xa5" * len(raw))
        cut = Cut(0, 0, len(raw), "bf16", kind, Axes(("token", "channel"), (16, 2)))
        lossy(name).decode(memoryview(bytes.fromhex(stored)), memoryview(into), cut)
        assert into[: 4 * exact] == raw[: 4 * exact]
        found = (np.frombuffer(into, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(16, 2)
        assert np.abs(found - numbers).max() <= 1.25
