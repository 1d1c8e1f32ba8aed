"""Sealed frames: what comes back, what a writer without the key can do, and what a reader of the bytes learns."""

import random
import struct
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frames import patched, rechecked

from kvtier.codec import frame as frame_module
from kvtier.codec import registry
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Identity,
    Seals,
    frame_bytes,
    head_bytes,
    open_seal,
    pack,
    pack_scratch_bytes,
    reseal,
    unpack_in_place,
    verify_frame,
)
from kvtier.codec.frame_header import EXTRAS_BYTES_MAX, METADATA_BYTES, opened_identity, read_head
from kvtier.errors import CorruptChunkError, UnreadableChunkError
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, History, Part, Run

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

MINE, OLD, THEIRS, STRANGE = (
    SealKey.of(tenant, epoch, bytes([number]) * 32)
    for number, (tenant, epoch) in enumerate([("me", 2), ("me", 1), ("they", 2), ("me", 9)], 1)
)
SEALS = Seals(Keyring([MINE, OLD, THEIRS]), "me", is_demanded=True)
NAME, PARENT = bytes(range(32)), b"\xa5" * 32
IDENTITY = Identity(NAME, b"m" * 16, PARENT, 7, 256, 1, Part(0, 2, 4, 6))
CANARY = bytes(range(64))

sizes = st.one_of(
    st.integers(1, ALIGNMENT),
    st.sampled_from([ALIGNMENT // 2, ALIGNMENT // 2 + 1, SECTION_BYTES_MAX // 2, SECTION_BYTES_MAX // 2 + 1]),
)
runs = st.builds(lambda element, count: Run("kv", element, 2 * count), st.sampled_from(["bf16", "fp8e4m3"]), sizes)
layers = st.lists(runs, min_size=1, max_size=3).map(tuple)
groups = st.lists(layers, min_size=1, max_size=4).map(
    lambda layers: GroupLayout(
        History(), tuple(sum(run.size_bytes for run in layer) for layer in layers), "any", runs=tuple(layers)
    )
)
codecs = st.sampled_from(["raw", "zstd", "split"]).map(registry.by_name)
SMALL = GroupLayout(History(), (6000, 9000), "test", runs=((Run("kv", "bf16", 6000),), (Run("kv", "bf16", 9000),)))


def normal(count: int, seed: int) -> bytes:
    """Bytes of normally distributed bf16 numbers."""
    numbers = np.random.default_rng(seed).standard_normal(count // 2 + 1).astype("<f4")
    return (numbers.view("<u4") >> 16).astype("<u2").tobytes()[:count]


def filled(group: GroupLayout, seed: int) -> tuple[memoryview, bytes, bytearray]:
    """A slot between canaries, its payload with zero padding, and the memory around it."""
    whole = bytearray(CANARY + b"\xee" * frame_bytes(group) + CANARY)
    slot = memoryview(whole)[len(CANARY) : -len(CANARY)]
    payload = bytearray(group.payload_bytes)
    for at, size in zip(group.layer_offsets, group.layer_bytes, strict=True):
        payload[at : at + size] = normal(size, seed)
    at = head_bytes(group)
    for offset, size in zip(group.layer_offsets, group.layer_bytes, strict=True):
        slot[at + offset : at + offset + size] = payload[offset : offset + size]
    return slot, bytes(payload), whole


def sealed(group: GroupLayout = SMALL, codec: str = "raw", key: SealKey | None = MINE, seed: int = 1) -> bytes:
    made, _, _ = filled(group, seed)
    used = registry.by_name(codec)
    scratch = memoryview(bytearray(pack_scratch_bytes(group, used, is_sealed=key is not None)))
    return bytes(pack(made, group, IDENTITY, used, scratch, key=key))


def opened(frame: bytes, group: GroupLayout = SMALL, seals: Seals | None = SEALS, name: bytes = NAME) -> bytes:
    slot, _, whole = filled(group, 99)
    slot[: len(frame)] = frame[: len(slot)]
    scratch = memoryview(bytearray(OPEN_SCRATCH_BYTES))
    try:
        unpack_in_place(slot, len(frame), group, Identity(name), scratch, seals)
    finally:
        assert whole[: len(CANARY)] == whole[-len(CANARY) :] == CANARY
    return bytes(slot[head_bytes(group) :])


def reason(frame: bytes, group: GroupLayout = SMALL, seals: Seals = SEALS, name: bytes = NAME) -> str:
    with pytest.raises(CorruptChunkError) as caught:
        opened(frame, group, seals, name)
    return caught.value.reason


@given(groups, codecs, st.integers(0, 1 << 32), st.sampled_from([MINE, OLD]))
def test_what_was_sealed_comes_back(group, codec, seed, key):
    slot, payload, whole = filled(group, seed)
    scratch = memoryview(bytearray(pack_scratch_bytes(group, codec, is_sealed=True)))
    frame = bytes(pack(slot, group, IDENTITY, codec, scratch, key=key))
    assert whole[: len(CANARY)] == whole[-len(CANARY) :] == CANARY
    assert slot[head_bytes(group) :] == payload, "the slot is read by others meanwhile"
    assert len(frame) <= frame_bytes(group)
    assert len(frame) % ALIGNMENT == 0
    assert opened(frame, group) == payload
    head = verify_frame(frame)
    assert head.identity == Identity(NAME, IDENTITY.model)
    with pytest.raises(UnreadableChunkError, match="key is not known"):
        opened(frame, group, None)


@settings(max_examples=200)
@given(groups, codecs, st.integers(0, 1 << 32), st.data())
def test_any_flipped_bit_is_refused_with_and_without_right_checksums(group, codec, seed, data):
    original = sealed(group, codec.name, seed=seed)
    frame = bytearray(original)
    region = data.draw(st.sampled_from([256 + 48 * len(group.sections), head_bytes(group), len(frame)]))
    at = data.draw(st.integers(0, region - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    if at >= head_bytes(group) and is_padding(bytes(frame), at):
        opened(bytes(frame), group)  # padding is zeroed, whatever it holds
        return
    assert reason(bytes(frame), group) == "damaged"
    try:
        forged = rechecked(bytes(frame))
    except (CorruptChunkError, UnreadableChunkError, struct.error):
        return  # no frame any more
    if forged in {bytes(frame), original}:  # the second: only the version had changed
        return
    if 16 <= at < 24 or (264 <= at < 256 + 48 * len(group.sections) and 8 <= (at - 256) % 48 < 16):
        opened(forged, group)  # only a checksum was wrong
    elif 96 <= at < 112:
        with pytest.raises(UnreadableChunkError, match="key is not known"):
            opened(forged, group)
    elif 48 <= at < 80:
        assert reason(forged, group) == "damaged"  # of another name
        assert reason(forged, group, name=forged[48:80]) == "forged"
    else:
        assert reason(forged, group) in {"forged", "damaged"}


@given(groups, codecs, st.integers(0, 1 << 32), st.sampled_from([OLD, None]))
def test_a_resealed_frame_opens_with_the_new_key_only(group, codec, seed, key):
    slot, payload, _ = filled(group, seed)
    scratch = memoryview(bytearray(pack_scratch_bytes(group, codec, is_sealed=True)))
    frame = memoryview(bytes(pack(slot, group, IDENTITY, codec, scratch, key=key)))
    new = bytes(reseal(frame, SEALS.keyring, MINE, memoryview(bytearray(len(frame) + 7))))
    assert opened(new, group, SEALS._replace(keyring=Keyring([MINE]))) == payload
    with pytest.raises(UnreadableChunkError, match="key is not known"):
        opened(new, group, SEALS._replace(keyring=Keyring([OLD])))
    direct = bytes(pack(slot, group, IDENTITY, codec, scratch, key=MINE))
    places = [[section[:6] for section in read_head(each).sections] for each in (new, frame)]
    assert places[0] == places[1]
    assert verify_frame(new).identity == verify_frame(direct).identity
    texts = [bytes(open_seal(read_head(each), SEALS)[1]) for each in (new, direct)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_only_what_is_intact_and_of_the_same_tenant_is_resealed(codec):
    into = memoryview(bytearray(1 << 20))
    frame = bytearray(sealed(codec=codec, key=OLD))
    frame[read_head(frame).sections[0].offset] ^= 1
    for changed, why in ((bytes(frame), "damaged"), (rechecked(bytes(frame)), "forged")):
        with pytest.raises(CorruptChunkError) as caught:
            reseal(memoryview(changed), SEALS.keyring, MINE, into)
        assert caught.value.reason == why
    with pytest.raises(CorruptChunkError, match="another tenant"):
        reseal(memoryview(sealed(codec=codec, key=THEIRS)), SEALS.keyring, MINE, into)
    with pytest.raises(UnreadableChunkError, match="key is not known"):
        reseal(memoryview(sealed(codec=codec, key=STRANGE)), SEALS.keyring, MINE, into)
    with pytest.raises(ValueError, match="different structures"):
        reseal(memoryview(sealed(codec=codec)), SEALS.keyring, MINE, into[:4096])


def is_padding(frame: bytes, at: int) -> bool:
    return any(section.offset + section.stored_bytes <= at < section.offset + section.extent_bytes
               for section in read_head(frame).sections)  # fmt: skip


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_a_writer_without_the_key_cannot_replace_a_section(codec):
    frame = bytearray(sealed(codec=codec))
    section = read_head(frame).sections[0]
    frame[section.offset : section.offset + 16] = bytes(16)
    assert reason(bytes(frame)) == "damaged"
    assert reason(rechecked(bytes(frame))) == "forged"


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_a_frame_without_a_seal_is_refused_where_a_seal_is_demanded(codec):
    plain = sealed(codec=codec, key=None)
    assert reason(plain) == "unsealed"
    assert opened(plain, seals=SEALS._replace(is_demanded=False)) == opened(sealed(codec=codec))
    stripped = bytearray(sealed(codec=codec))
    stripped[96:144] = bytes(48)
    for row in range(2):
        stripped[256 + 48 * row + 32 : 256 + 48 * row + 48] = bytes(16)
    assert reason(patched(bytes(stripped), 8, "I", 3)) == "unsealed"


def test_without_a_seal_whoever_can_write_is_believed():
    """Checksums tell damage. A store without a seal relies on its permissions."""
    plain = bytearray(sealed(key=None))
    at = head_bytes(SMALL)
    plain[at : at + 16] = CANARY[:16]
    assert reason(bytes(plain), seals=SEALS._replace(is_demanded=False)) == "damaged"
    assert opened(rechecked(bytes(plain)), seals=None)[:16] == CANARY[:16]


def test_a_frame_of_another_tenant_is_foreign_and_one_of_an_unknown_key_is_kept():
    assert reason(sealed(key=THEIRS)) == "foreign"
    with pytest.raises(UnreadableChunkError, match="its key is not known here"):
        opened(sealed(key=STRANGE))
    assert reason(sealed(key=STRANGE)[:-ALIGNMENT]) == "damaged"


def test_sections_of_two_frames_of_one_object_cannot_be_mixed():
    one, other = bytearray(sealed(seed=1)), sealed(seed=2)
    section = read_head(other).sections[1]
    one[section.offset :] = other[section.offset :]
    row = slice(256 + 48, 256 + 96)
    one[row] = other[row]
    assert reason(patched(bytes(one), 8, "I", 3)) == "forged"


def test_a_whole_frame_under_another_name_is_refused():
    frame = sealed()
    assert reason(frame, name=b"\x01" * 32) == "damaged"
    moved = patched(frame[:48] + b"\x01" * 32 + frame[80:], 8, "I", 3)
    assert reason(moved, name=b"\x01" * 32) == "forged"


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_no_two_frames_share_a_key(codec):
    """Not even of one slot: a nonce under one frame key encrypts one message."""
    frames = [sealed(codec=codec) for _ in range(32)]
    assert len({frame[112:144] for frame in frames}) == len(frames)
    sections = [read_head(frame).sections for frame in frames]
    starts = {frame[it.offset : it.offset + 32] for frame, its in zip(frames, sections, strict=True) for it in its}
    assert len(starts) == 2 * len(frames)
    assert len({it.tag for its in sections for it in its}) == 2 * len(frames)


@pytest.mark.parametrize("codec", ["raw", "split"])
def test_nothing_of_the_content_or_the_conversation_is_readable(codec):
    frame, plain = sealed(codec=codec), sealed(codec=codec, key=None)
    assert PARENT in plain  # the control
    assert PARENT not in frame
    assert struct.pack("<II", 7, 256) in plain
    assert struct.pack("<II", 7, 256) not in frame
    for start in range(head_bytes(SMALL), len(plain) - 32, 16):
        piece = plain[start : start + 16]
        assert piece not in frame or not any(piece)


def test_key_and_tenant_are_not_in_a_frame():
    frame = sealed()
    assert MINE.key not in frame
    assert b"they" not in frame


def test_seeded_noise_never_opens():
    draw = random.Random(5)
    frame = sealed()
    for _ in range(300):
        noisy = bytearray(frame)
        for _ in range(draw.randrange(1, 6)):
            noisy[draw.randrange(head_bytes(SMALL), head_bytes(SMALL) + 6000)] ^= draw.randrange(1, 256)
        if noisy != frame:
            assert reason(rechecked(bytes(noisy))) == "forged"


TOKENS = 64
WITH_IDS = replace(SMALL, chunk_tokens=TOKENS)
texts = st.builds(
    lambda seed, extras: random.Random(seed).randbytes(4 * TOKENS) + extras,
    st.integers(),
    st.binary(max_size=EXTRAS_BYTES_MAX),
)
SOME_TEXT = struct.pack(f"<{TOKENS}I", *range(70_000, 70_000 + TOKENS)) + b"adapter"


def with_text(text: bytes, key: SealKey | None = MINE, codec: str = "raw") -> bytes:
    made, _, _ = filled(WITH_IDS, 1)
    used = registry.by_name(codec)
    scratch = memoryview(bytearray(pack_scratch_bytes(WITH_IDS, used, is_sealed=key is not None)))
    return bytes(pack(made, WITH_IDS, IDENTITY._replace(key=b"k" * 32, text=text), used, scratch, key=key))


def identity_in(frame: bytes) -> Identity:
    head = read_head(frame)
    return opened_identity(head, open_seal(head, SEALS)[1])


@given(texts, st.sampled_from(["raw", "split"]))
def test_key_ids_and_extras_come_back_from_the_head_alone_and_after_a_new_seal(text, codec):
    frame = with_text(text, OLD, codec)
    wanted = IDENTITY._replace(key=b"k" * 32, text=text)
    assert identity_in(frame[: head_bytes(WITH_IDS)]) == wanted
    assert opened(frame, WITH_IDS) == filled(WITH_IDS, 1)[1]
    scratch = memoryview(bytearray(len(frame)))
    assert identity_in(bytes(reseal(memoryview(frame), SEALS.keyring, MINE, scratch))) == wanted


def test_without_a_text_the_key_is_not_written_either():
    assert identity_in(with_text(b"")) == IDENTITY
    assert identity_in(sealed()) == IDENTITY


@pytest.mark.parametrize("codec", ["raw", "split", "zstd"])
def test_a_frame_without_a_seal_never_holds_ids_and_a_sealed_one_not_in_plain(codec):
    words = [SOME_TEXT[at : at + 8] for at in range(0, 4 * TOKENS - 8, 4)]
    words += [SOME_TEXT[4 * TOKENS :], b"k" * 32]
    with patch.object(frame_module, "_cipher", lambda *_: Clear()):
        control = with_text(SOME_TEXT, codec=codec)
    assert all(word in control for word in words), "the control: the same frame with a cipher that does nothing"
    for key in (None, MINE):
        frame = with_text(SOME_TEXT, key, codec)
        assert not any(word in frame for word in words)


class Clear:
    def seal(self, _number: int, _associated: bytes, plain: memoryview, into: memoryview) -> bytes:
        into[:] = bytes(plain)
        return b"\1" * 16


def test_a_text_of_another_length_is_refused_by_the_writer():
    for text in (SOME_TEXT[:4], SOME_TEXT[: 4 * TOKENS - 1], SOME_TEXT[: 4 * TOKENS] + bytes(EXTRAS_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match=f"and the text {len(text)}; allowed: 32, and 256 to 644"):
            with_text(text)


def test_a_changed_or_swapped_metadata_block_is_refused():
    frame, other = with_text(SOME_TEXT), with_text(SOME_TEXT)
    block = read_head(frame).metadata
    swapped = patched(frame[: block.start] + other[block] + frame[block.stop :], 8, "I", 3)
    assert reason(swapped, WITH_IDS) == "forged"
    for at in (block.start, block.start + 68, block.start + 108, block.stop - 17, block.stop - 1):
        changed = bytearray(frame)
        changed[at] ^= 1
        with pytest.raises(CorruptChunkError, match="the seal of the head"):
            identity_in(patched(bytes(changed), 8, "I", 3))


@settings(max_examples=300)
@given(st.binary(min_size=400, max_size=METADATA_BYTES - 124 + 4 * TOKENS), st.integers(0, 80), st.integers(0, 600))
def test_a_block_that_a_holder_of_the_key_has_made_up_is_parsed_or_refused(rest, ids, extras):
    """Whatever is sealed: what comes back is whole, or it is refused as damaged."""

    def hostile(head: bytearray, metadata: slice, _identity: Identity) -> None:
        struct.pack_into("<II", head, metadata.start + 68, ids, extras)
        start, stop = metadata.start + 108, metadata.stop - 16
        head[start : start + len(rest[: stop - start])] = rest[: stop - start]

    with patch.object(frame_module, "pack_text", hostile):
        frame = with_text(SOME_TEXT)
    try:
        found = identity_in(frame)
    except CorruptChunkError:
        return
    assert ids in (0, TOKENS)
    assert extras <= EXTRAS_BYTES_MAX
    assert len(found.text) == 4 * ids + extras
    assert not any(rest[len(found.text) :])
