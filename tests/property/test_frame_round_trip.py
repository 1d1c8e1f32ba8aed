"""Whatever the layout, the content and the codec: what was sealed comes back, and one flipped bit is refused."""

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec import frame as frame_module
from kvtier.codec import registry
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Identity,
    frame_bytes,
    head_bytes,
    pack,
    pack_scratch_bytes,
    unpack_in_place,
    verify_frame,
)
from kvtier.errors import CorruptChunkError, UnreadableChunkError
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, History, Part, Run

pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")

SCRATCH = memoryview(bytearray(OPEN_SCRATCH_BYTES))

layer_sizes = st.one_of(
    st.integers(1, 3 * ALIGNMENT),
    st.sampled_from([1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 68_608]),
    st.sampled_from([SECTION_BYTES_MAX - 1, SECTION_BYTES_MAX, SECTION_BYTES_MAX + 1, 2 * SECTION_BYTES_MAX + 5]),
)
runs = st.lists(layer_sizes, min_size=1, max_size=3).map(lambda sizes: tuple(Run("kv", "fp8e5m2", it) for it in sizes))
groups = st.lists(runs, min_size=1, max_size=6).map(
    lambda layers: GroupLayout(
        History(), tuple(sum(run.size_bytes for run in layer) for layer in layers), "any", runs=tuple(layers)
    )
)
codecs = st.sampled_from(["raw", "zstd"]).map(registry.by_name)
contents = st.sampled_from(["noise", "zeros", "mixed"])


def filled(group: GroupLayout, content: str, seed: int) -> tuple[memoryview, bytes]:
    """A slot whose head room and padding are dirty, and its payload with zero padding."""
    draw = random.Random(seed)
    slot = bytearray(draw.randbytes(1) * frame_bytes(group))
    payload = bytearray(group.payload_bytes)
    for _, offset, size, *_ in group.sections:
        noisy = content == "noise" or (content == "mixed" and draw.random() < 0.5)
        piece = draw.randbytes(size) if noisy else bytes(size)
        payload[offset : offset + size] = piece
        start = head_bytes(group) + offset
        slot[start : start + size] = piece
    return memoryview(slot), bytes(payload)


def identity_of(group: GroupLayout, seed: int) -> Identity:
    draw = random.Random(seed)
    parent = draw.randbytes(32) if draw.random() < 0.5 else None
    counts = [draw.randrange(1 << 32) for _ in range(9)]
    return Identity(draw.randbytes(32), draw.randbytes(16), parent, *counts[:3], Part(*counts[3:]))


def sealed(group: GroupLayout, codec, content: str, seed: int) -> tuple[bytes, bytes, Identity]:
    slot, payload = filled(group, content, seed)
    scratch = memoryview(bytearray(b"\xdd" * pack_scratch_bytes(group, codec)))
    identity = identity_of(group, seed)
    return bytes(pack(slot, group, identity, codec, scratch)), payload, identity


@given(groups, codecs, contents, st.integers(0, 1 << 32))
def test_open_gives_back_what_was_sealed(group, codec, content, seed):
    frame, payload, identity = sealed(group, codec, content, seed)
    assert len(frame) <= frame_bytes(group)
    assert len(frame) % ALIGNMENT == 0
    slot = memoryview(bytearray(b"\xbb" * frame_bytes(group)))
    slot[: len(frame)] = frame
    unpack_in_place(slot, len(frame), group, identity, SCRATCH)
    assert slot[head_bytes(group) :] == payload
    assert verify_frame(frame).identity == identity


@settings(max_examples=150)
@given(groups, codecs, contents, st.integers(0, 1 << 32), st.data())
def test_any_flipped_bit_is_refused(group, codec, content, seed, data):
    frame, _, identity = sealed(group, codec, content, seed)
    region = data.draw(st.sampled_from(["header", "anywhere"]))
    position = data.draw(st.integers(0, (256 + 48 * len(group.sections) if region == "header" else len(frame)) - 1))
    damaged = bytearray(frame)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    slot = memoryview(bytearray(frame_bytes(group)))
    slot[: len(damaged)] = damaged
    with pytest.raises(CorruptChunkError):
        unpack_in_place(slot, len(damaged), group, identity, SCRATCH)
    with pytest.raises(CorruptChunkError):
        verify_frame(damaged)


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_every_byte_of_a_small_frame_is_covered(name):
    """Exhaustive where it is cheap: no byte of a frame, padding included, is outside a checksum."""
    group = GroupLayout(History(), (5000, 9), "small")
    frame, _, _ = sealed(group, registry.by_name(name), "zeros", 1)
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptChunkError):
            verify_frame(damaged)


@given(st.integers(0, 1 << 32), st.sampled_from(["raw", "zstd"]), st.integers(1, 40))
def test_heads_of_noise_end_in_one_error_with_and_without_the_shortcut(seed, name, changes):
    """Random numbers in a head whose checksum is right; the shortcut for raw frames decides the same."""
    import struct

    import xxhash

    group = GroupLayout(History(), (5000, 9, SECTION_BYTES_MAX + 1), "small")
    frame, _, identity = sealed(group, registry.by_name(name), "mixed", 1)
    draw = random.Random(seed)
    head = bytearray(frame[: head_bytes(group)])
    for _ in range(changes):
        value = draw.choice([0, 1, 4095, 4096, 8192, 1 << 20, (1 << 32) - 1, draw.randrange(1 << 32)])
        struct.pack_into("<I", head, draw.randrange(2, (256 + 48 * len(group.sections)) // 4) * 4, value)
    struct.pack_into("<Q", head, 16, 0)
    struct.pack_into("<Q", head, 16, xxhash.xxh3_64_intdigest(bytes(head)))
    answers = []
    for shortcut in (frame_module.is_raw_head, lambda *_: False):
        slot = memoryview(bytearray(frame_bytes(group)))
        slot[: len(frame)] = bytes(head) + frame[len(head) :]
        with patch.object(frame_module, "is_raw_head", shortcut):
            try:
                unpack_in_place(slot, len(frame), group, identity, SCRATCH)
                answers.append(bytes(slot))
            except (CorruptChunkError, UnreadableChunkError) as error:
                answers.append(f"{type(error)} {error}")
    assert answers[0] == answers[1]
    if isinstance(answers[0], bytes):
        assert answers[0][:16] == frame[:16]  # only fields that a reader does not compare were changed
