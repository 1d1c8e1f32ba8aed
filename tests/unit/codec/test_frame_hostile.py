"""Hostile and damaged frames: each ends in one error, whatever it says, and takes no memory for it.

CorruptChunkError, unless a part of it is not known here that another reader may know: UnreadableChunkError.
"""

import struct
import tracemalloc

import pytest
import xxhash

from kvtier.codec import registry
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Identity,
    frame_bytes,
    pack,
    pack_scratch_bytes,
    read_head,
    unpack_in_place,
    verify_frame,
)
from kvtier.errors import CorruptChunkError, UnreadableChunkError
from kvtier.layout import GroupLayout, History

pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")

GROUP = GroupLayout(History(), (12_288, 5000, (1 << 20) + 8192), "test")
IDENTITY = Identity(b"\x01" * 32, b"\x02" * 16)
SCRATCH = memoryview(bytearray(OPEN_SCRATCH_BYTES))


def frame_of(codec_name: str) -> bytes:
    codec = registry.by_name(codec_name)
    slot = bytearray(frame_bytes(GROUP))
    for position in range(0, len(slot), 64):
        slot[position] = position % 251
    scratch = memoryview(bytearray(pack_scratch_bytes(GROUP, codec)))
    return bytes(pack(memoryview(slot), GROUP, IDENTITY, codec, scratch))


FRAMES = {name: frame_of(name) for name in ("raw", "zstd")}


def resealed(frame: bytes, *patches: tuple[int, str, int], header_bytes: int = 4096) -> bytes:
    """`frame` with numbers changed and the header checksum made right: what an attacker would do."""
    changed = bytearray(frame)
    for position, code, value in patches:
        struct.pack_into(f"<{code}", changed, position, value)
    struct.pack_into("<Q", changed, 16, 0)
    struct.pack_into("<Q", changed, 16, xxhash.xxh3_64_intdigest(bytes(changed[:header_bytes])))
    return bytes(changed)


def entry(row: int, field: str) -> int:
    """Position of a field of the section table."""
    fields = {"offset": 0, "checksum": 8, "raw": 16, "stored": 20, "layer": 24, "codec": 28, "tag": 32}
    return 256 + 48 * row + fields[field]


def refusal(frame: bytes, error: type[CorruptChunkError | UnreadableChunkError] = CorruptChunkError) -> str:
    """What every reader says of `frame`; fails when one does not refuse it."""
    slot = bytearray(frame_bytes(GROUP))
    slot[: len(frame)] = frame[: len(slot)]
    with pytest.raises(error) as caught:
        unpack_in_place(memoryview(slot), len(frame), GROUP, IDENTITY, SCRATCH)
    with pytest.raises(error) as again:
        verify_frame(frame)
    assert again.value.detail == caught.value.detail or len(frame) > len(slot)
    return again.value.detail


@pytest.mark.parametrize("codec", FRAMES)
def test_a_frame_cut_anywhere_is_refused(codec):
    frame = FRAMES[codec]
    for length in [0, 1, 8, 12, 255, 256, 257, 4095, 4096, 4097, 8192, len(frame) - 4096, len(frame) - 1]:
        assert "cut off" in (detail := refusal(frame[:length])) or "bytes are stored of a frame of" in detail


@pytest.mark.parametrize("codec", FRAMES)
def test_a_frame_that_goes_on_is_refused(codec):
    assert "bytes are stored of a frame of" in refusal(FRAMES[codec] + bytes(4096))
    assert "bytes are stored of a frame of" in refusal(FRAMES[codec] + b"\0")


def test_empty_zero_and_foreign_files_are_refused():
    assert "cut off: 0 bytes" in refusal(b"")
    assert "wrong magic" in refusal(bytes(8192))
    assert "wrong magic" in refusal(b"\xff" * 8192)
    assert "wrong magic" in refusal(FRAMES["raw"].replace(b"\r\n", b"\n", 1))


def test_an_impossible_number_of_stored_bytes_is_refused():
    slot = memoryview(bytearray(frame_bytes(GROUP)))
    for stored_bytes in (-1, len(slot) + 1, 1 << 70):
        with pytest.raises(CorruptChunkError, match="bytes are stored"):
            unpack_in_place(slot, stored_bytes, GROUP, IDENTITY, SCRATCH)


@pytest.mark.parametrize("version", [0, 2, 4, 0xFFFFFFFF])
def test_an_unknown_version_is_refused_by_its_number(version):
    told = f"version {version}, {'older' if version < 3 else 'newer'} than the one known here, 3"
    assert told in refusal(resealed(FRAMES["raw"], (8, "I", version)), UnreadableChunkError)
    assert told in refusal(FRAMES["raw"][:8] + struct.pack("<I", version) + bytes(4096), UnreadableChunkError)


SECTIONS = len(GROUP.sections)
LAST = SECTIONS - 1
CASES = [
    ("sections 0", [(44, "I", 0)], "section count 0"),
    ("sections too many", [(44, "I", 65_537)], "section count 65537"),
    ("sections 2**32-1", [(44, "I", 0xFFFFFFFF)], "section count 4294967295"),
    ("one section more", [(44, "I", SECTIONS + 1)], "raw length is not in"),
    ("metadata 0", [(40, "I", 0)], "metadata block of 0 bytes"),
    ("metadata 2**32-1", [(40, "I", 0xFFFFFFFF)], "metadata block of 4294967295 bytes"),
    ("metadata odd", [(40, "I", 514)], "metadata block of 514 bytes"),
    ("metadata of a longer header", [(40, "I", 4096)], "header of 4096 bytes does not fit"),
    ("one section less", [(44, "I", SECTIONS - 1)], "its sections, which end at"),
    ("sections of a longer header", [(44, "I", 65_536)], "header of 4096 bytes does not fit"),
    ("a longer header", [(44, "I", 65_536), (12, "I", 3_149_824)], "cut off"),
    ("header 0", [(12, "I", 0)], "header of 0 bytes"),
    ("header 2**32-1", [(12, "I", 0xFFFFFFFF)], "header of 4294967295 bytes"),
    ("frame length 0", [(24, "Q", 0)], "frame of 0 bytes"),
    ("frame length 2**64-1", [(24, "Q", (1 << 64) - 1)], "frame of 18446744073709551615 bytes"),
    ("payload length 0", [(32, "Q", 0)], "payload of 0 bytes"),
    ("payload length 2**63", [(32, "Q", 1 << 63)], "payload of 9223372036854775808 bytes"),
    ("reserved", [(144, "B", 1)], "reserved bytes"),
    ("reserved end", [(255, "B", 1)], "reserved bytes"),
    ("behind the table", [(4095, "B", 1)], "reserved bytes"),
    ("raw length 0", [(entry(1, "raw"), "I", 0)], "raw length is not in"),
    ("raw length 2**32-1", [(entry(1, "raw"), "I", 0xFFFFFFFF)], "raw length is not in"),
    ("raw length above a section", [(entry(1, "raw"), "I", (1 << 20) + 1)], "raw length is not in"),
    ("stored length 0", [(entry(0, "stored"), "I", 0)], "stored length does not fit"),
    ("stored length 2**32-1", [(entry(0, "stored"), "I", 0xFFFFFFFF)], "stored length does not fit"),
    ("layer before", [(entry(0, "layer"), "I", 1)], "layers do not count up"),
    ("layer gap", [(entry(LAST, "layer"), "I", 4)], "layers do not count up"),
    ("layer back", [(entry(1, "layer"), "I", 0), (entry(2, "layer"), "I", 0xFFFFFFFF)], "layers do not count up"),
    ("a tag without a seal", [(entry(1, "tag"), "B", 1)], "section without a seal has a tag"),
    ("offset 0", [(entry(0, "offset"), "Q", 0)], "offsets do not follow"),
    ("offset past the end", [(entry(LAST, "offset"), "Q", 1 << 40)], "offsets do not follow"),
    ("offset 2**64-1", [(entry(LAST, "offset"), "Q", (1 << 64) - 1)], "offsets do not follow"),
    ("offset 2**64-4096", [(entry(0, "offset"), "Q", (1 << 64) - 4096)], "offsets do not follow"),
    ("overlap", [(entry(1, "offset"), "Q", 4096)], "offsets do not follow"),
    ("checksum", [(entry(0, "checksum"), "Q", 0)], "checksum of the section at byte 4096 does not match"),
]


@pytest.mark.parametrize("codec", FRAMES)
@pytest.mark.parametrize(("patches", "detail"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_head_that_lies_is_refused(codec, patches, detail):
    tracemalloc.start()
    try:
        assert detail in refusal(resealed(FRAMES[codec], *patches))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_raw_section_under_a_codec_is_refused():
    assert "stored length does not fit" in refusal(resealed(FRAMES["raw"], (entry(0, "codec"), "I", 1)))
    patched = resealed(FRAMES["raw"], (entry(0, "codec"), "I", 1), (entry(0, "stored"), "I", 12_287))
    assert "offsets do not follow" in refusal(patched)  # it is packed then


def unknown_codec(frame: bytes, number: int) -> bytes:
    """A packed frame under another codec id."""
    rows = [row for row in range(SECTIONS) if struct.unpack_from("<I", frame, entry(row, "codec"))[0]]
    return resealed(frame, *((entry(row, "codec"), "I", number) for row in rows))


def test_a_codec_that_is_not_known_here_is_refused_by_its_number():
    frame = unknown_codec(FRAMES["zstd"], 40_001)
    verify_frame(frame)  # sound by itself: its checksums match
    slot = memoryview(bytearray(frame_bytes(GROUP)))
    slot[: len(frame)] = frame
    with pytest.raises(UnreadableChunkError, match="unknown codec id 40001; known: raw, zstd"):
        unpack_in_place(slot, len(frame), GROUP, IDENTITY, SCRATCH)


@pytest.mark.parametrize("position", [4096, 4096 + 70, -1])
def test_damage_is_found_without_the_codec(position):
    """Otherwise a damaged object would block its name on every node that lacks the codec."""
    frame = bytearray(unknown_codec(FRAMES["zstd"], 40_001))
    frame[position] ^= 1
    assert "does not match" in refusal(bytes(frame))


def rewritten(frame: bytes, row: int, content: bytes) -> bytes:
    """`frame` with the stored bytes of one section replaced, all checksums made right."""
    section = read_head(frame).sections[row]
    assert len(content) == section.stored_bytes
    changed = bytearray(frame)
    changed[section.offset : section.offset + len(content)] = content
    extent = bytes(changed[section.offset : section.offset + section.extent_bytes])
    return resealed(bytes(changed), (entry(row, "checksum"), "Q", xxhash.xxh3_64_intdigest(extent)))


# A Zstandard frame that says that it holds 1 GiB: magic, descriptor, content size, one block of repeated zeros.
BOMB = bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 1 << 30) + bytes.fromhex("030010 00")


def test_a_section_that_claims_a_gibibyte_takes_no_memory():
    codec = registry.by_name("zstd")
    for length in (0, 4096, 1 << 20):
        into = memoryview(bytearray(length))
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"zstd content of 1073741824 bytes cannot fill {length}"):
                codec.decode(memoryview(BOMB), into, "bytes")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_a_section_that_does_not_decode_is_refused():
    frame = FRAMES["zstd"]
    head = read_head(frame)
    assert head.sections[0].codec == 1
    stored = head.sections[0].stored_bytes
    zstandard = pytest.importorskip("zstandard")
    bomb = BOMB[:stored]
    small = zstandard.ZstdCompressor().compress(b"x").ljust(stored, b"\0")
    for content in (bytes(stored), b"\xff" * stored, bomb.ljust(stored, b"\0"), small):
        hostile = rewritten(frame, 0, content)
        verify_frame(hostile)
        slot = memoryview(bytearray(frame_bytes(GROUP)))
        slot[: len(hostile)] = hostile
        with pytest.raises(CorruptChunkError, match="section of layer 0 cannot be decoded: zstd"):
            unpack_in_place(slot, len(hostile), GROUP, IDENTITY, SCRATCH)


def test_the_shortcut_for_raw_frames_skips_no_check():
    """A head that is resealed after one bit of it was turned opens only where a reader compares nothing."""
    sound = FRAMES["raw"]
    metadata = 256 + 48 * len(GROUP.sections)
    # The checksum, which is made anew; the model; the metadata.
    not_compared = {*range(16, 24), *range(80, 96), *range(metadata, metadata + 512)}
    for at in range(metadata + 512 + 8):
        damaged = bytearray(sound)
        damaged[at] ^= 1
        slot = memoryview(bytearray(resealed(bytes(damaged))))
        if at in not_compared:
            unpack_in_place(slot, len(slot), GROUP, IDENTITY, SCRATCH)
            continue
        is_known = at not in {*range(8, 12), *range(96, 144)}  # the version, the seal
        with pytest.raises(CorruptChunkError if is_known else UnreadableChunkError):
            unpack_in_place(slot, len(slot), GROUP, IDENTITY, SCRATCH)
    with pytest.raises(CorruptChunkError, match="header checksum does not match"):
        unpack_in_place(memoryview(bytearray(sound[:17] + b"\1\1" + sound[19:])), len(sound), GROUP, IDENTITY, SCRATCH)


def test_the_name_of_a_damaged_frame_is_told_where_it_is_known():
    damaged = bytearray(FRAMES["raw"])
    damaged[300] ^= 1
    with pytest.raises(CorruptChunkError) as caught:
        verify_frame(damaged)
    assert caught.value.name == IDENTITY.name
