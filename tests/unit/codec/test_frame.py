"""Frames: in place for raw, encoded otherwise, and bound to one object."""

import numpy as np
import pytest

from kvtier.codec import frame as frame_module
from kvtier.codec import registry
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Identity,
    frame_bytes,
    head_bytes,
    pack,
    pack_scratch_bytes,
    read_head,
    unpack_in_place,
    verify_frame,
)
from kvtier.codec.frame_header import SECTIONS_MAX, head_bytes_of
from kvtier.codec.raw import Raw
from kvtier.errors import CorruptChunkError
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, Element, GroupLayout, History, Part, Run, align_up

MIB = SECTION_BYTES_MAX
GROUP = GroupLayout(History(), (5000, MIB + 3 * ALIGNMENT + 7, 1, 4096), "test")
IDENTITY = Identity(bytes(range(32)), b"\x02" * 16, b"\x04" * 32, 7, 16, 1, Part(0, 3, 4, 6))
SCRATCH = memoryview(bytearray(OPEN_SCRATCH_BYTES))
HEAD = head_bytes(GROUP)


class Halves:
    """A lossless codec for tests: bytes in pairs that are equal are kept once. Others it makes longer."""

    name = "halves"
    id = 50_000
    is_exact = True

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes + 1

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        content = bytes(raw)
        if len(content) % 2 == 0 and content[::2] == content[1::2]:
            into[: len(content) // 2] = content[::2]
            return len(content) // 2
        into[: len(content)] = content
        into[len(content)] = 0
        return len(content) + 1

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        if 2 * len(stored) != len(into):
            raise ValueError(f"{len(stored)} halves cannot fill {len(into)}")
        into[::2] = stored
        into[1::2] = stored


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    """Known to the registry as if it were one of ours."""
    codec = Halves()
    original = registry.by_id
    monkeypatch.setattr(registry, "by_id", lambda number: codec if number == codec.id else original(number))
    return codec


def payload_of(group: GroupLayout, *, pairs: bool) -> bytes:
    """A payload with zero padding; in pairs, or incompressible."""
    payload = bytearray(group.payload_bytes)
    draw = np.random.default_rng(3)
    for offset, size in zip(group.layer_offsets, group.layer_bytes, strict=True):
        content = draw.integers(0, 256, size, np.uint8)
        payload[offset : offset + size] = (np.repeat(content, 2)[:size] if pairs else content).tobytes()
    return bytes(payload)


def dirty_slot(group: GroupLayout, payload: bytes) -> memoryview:
    """A slot that another chunk was in before: head room and padding are full of it."""
    slot = bytearray(b"\xee" * frame_bytes(group))
    at = head_bytes(group)
    for offset, size in zip(group.layer_offsets, group.layer_bytes, strict=True):
        slot[at + offset : at + offset + size] = payload[offset : offset + size]
    return memoryview(slot)


def sealed(codec, payload: bytes, group: GroupLayout = GROUP, identity: Identity = IDENTITY) -> bytes:
    scratch = memoryview(bytearray(b"\xdd" * pack_scratch_bytes(group, codec)))
    return bytes(pack(dirty_slot(group, payload), group, identity, codec, scratch))


def opened(frame: bytes, group: GroupLayout = GROUP, identity: Identity = IDENTITY) -> bytes:
    slot = bytearray(b"\xbb" * frame_bytes(group))
    slot[: len(frame)] = frame
    unpack_in_place(memoryview(slot), len(frame), group, identity, SCRATCH)
    return bytes(slot[head_bytes(group) :])


def test_sizes_of_a_slot():
    assert HEAD == ALIGNMENT
    assert frame_bytes(GROUP) == HEAD + GROUP.payload_bytes
    assert head_bytes(GroupLayout(History(), (1,) * 70, "many")) == 2 * ALIGNMENT
    with pytest.raises(ValueError, match=f"at most {SECTIONS_MAX} sections, but this group has {SECTIONS_MAX + 1}"):
        head_bytes(GroupLayout(History(), ((SECTIONS_MAX + 1) * MIB,), "huge"))


def test_a_raw_frame_is_its_slot():
    payload = payload_of(GROUP, pairs=False)
    slot = dirty_slot(GROUP, payload)
    frame = pack(slot, GROUP, IDENTITY, Raw())
    assert frame is slot
    assert bytes(frame[HEAD:]) == payload  # padding included, which was dirty
    assert pack_scratch_bytes(GROUP, Raw()) == 0


def test_nothing_of_the_chunk_before_leaks_into_a_frame(halves):
    payload = payload_of(GROUP, pairs=True).replace(b"\xee", b"\0").replace(b"\xdd", b"\0")
    checksums_and_name = 4096
    for codec in (Raw(), halves):
        frame = sealed(codec, payload)
        assert b"\xee" not in frame[checksums_and_name:]
        assert b"\xdd" not in frame[checksums_and_name:]
        assert not any(frame[256 + 48 * len(GROUP.sections) + 512 : HEAD])


def test_sealing_again_gives_the_same_frame_and_leaves_the_layers_alone(halves):
    payload = payload_of(GROUP, pairs=True)
    slot = dirty_slot(GROUP, payload)
    scratch = memoryview(bytearray(pack_scratch_bytes(GROUP, halves)))
    first = bytes(pack(slot, GROUP, IDENTITY, Raw()))
    packed = bytes(pack(slot, GROUP, IDENTITY, halves, scratch))
    assert bytes(pack(slot, GROUP, IDENTITY, Raw())) == first
    assert bytes(pack(slot, GROUP, IDENTITY, halves, scratch)) == packed


def test_a_packed_frame_is_smaller_and_comes_back(halves):
    payload = payload_of(GROUP, pairs=True)
    frame = sealed(halves, payload)
    assert len(frame) < frame_bytes(GROUP)
    assert len(frame) % ALIGNMENT == 0
    assert opened(frame) == payload
    head = read_head(frame)
    # Odd lengths are no pairs.
    assert [section.codec for section in head.sections] == [halves.id, halves.id, 0, 0, halves.id]
    assert [section.stored_bytes for section in head.sections] == [2500, MIB // 2, 3 * ALIGNMENT + 7, 1, 2048]
    assert [section.offset for section in head.sections][:2] == [HEAD, HEAD + 2500]
    assert len(frame) == HEAD + align_up(sum(section.stored_bytes for section in head.sections))


def test_a_frame_that_does_not_shrink_by_a_page_is_raw(halves):
    small = GroupLayout(History(), (4096,), "test")  # 2048 bytes less, and as many pages
    assert sealed(halves, payload_of(small, pairs=True), small) == sealed(Raw(), payload_of(small, pairs=True), small)
    large = GroupLayout(History(), (8000,), "test")
    assert len(sealed(halves, payload_of(large, pairs=True), large)) == frame_bytes(large) - ALIGNMENT


def test_sections_end_where_runs_end():
    runs = (Run("keys", "bf16", 6000), Run("values", "fp8e4m3", MIB + 1)), (Run("bytes", "bytes", 3),)
    group = GroupLayout(History(), (6000 + MIB + 1, 3), "test", runs=runs)
    second = align_up(6000 + MIB + 1)
    assert tuple((it.layer, it.offset, it.size_bytes, it.element) for it in group.sections) == (
        (0, 0, 6000, "bf16"),
        (0, 6000, MIB, "fp8e4m3"),
        (0, 6000 + MIB, 1, "fp8e4m3"),
        (1, second, 3, "bytes"),
    )
    payload = payload_of(group, pairs=True)
    frame = sealed(Raw(), payload, group)
    assert opened(frame, group) == payload
    assert [section.extent_bytes for section in verify_frame(frame).sections] == [6000, MIB, second - 6000 - MIB, 4096]
    for wrong in ((Run("keys", "bf16", 5999), runs[0][1]), (Run("keys", "bf16", 5001), Run("keys", "bytes", 999))):
        with pytest.raises(ValueError, match=r"do not fill layers|its size is not a positive multiple of 2 bytes"):
            GroupLayout(History(), (6000,), "test", runs=(wrong,))


def test_a_head_tells_all_that_was_said():
    head = verify_frame(sealed(Raw(), payload_of(GROUP, pairs=False)))
    assert head.identity == IDENTITY
    assert (head.version, head.header_bytes, head.codecs, head.layers) == (3, HEAD, [0], 4)
    assert (head.frame_bytes, head.raw_bytes) == (frame_bytes(GROUP), GROUP.payload_bytes)
    cuts = [cut[:3] for cut in GROUP.sections]
    assert [(one.layer, one.payload_offset, one.raw_bytes) for one in head.sections] == cuts
    assert all(one.offset == HEAD + one.payload_offset for one in head.sections)
    assert all(one.stored_bytes == one.raw_bytes for one in head.sections)


def test_another_objects_frame_is_refused():
    frame = sealed(Raw(), payload_of(GROUP, pairs=False), identity=IDENTITY._replace(name=b"\x09" * 32))
    with pytest.raises(CorruptChunkError, match="wrong object name 0909") as caught:
        opened(frame)
    assert caught.value.name == IDENTITY.name


def test_what_is_no_identity_is_not_compared():
    frame = sealed(Raw(), payload_of(GROUP, pairs=False))
    assert opened(frame, identity=Identity(IDENTITY.name))


@pytest.mark.parametrize(
    "layers",
    [
        (5000, MIB + 3 * ALIGNMENT + 7, 1, 4095),
        (5000, MIB + 3 * ALIGNMENT + 7, 1),
        (5000, MIB + 3 * ALIGNMENT + 7, 4097),
    ],
)
def test_a_frame_of_other_layers_under_the_same_name_is_refused(layers):
    other = GroupLayout(History(), layers, "test")
    frame = sealed(Raw(), payload_of(other, pairs=False), other)
    with pytest.raises(CorruptChunkError, match="section table does not match the layout"):
        opened(frame)


def test_buffers_of_another_size_are_a_wrong_call(halves):
    payload = payload_of(GROUP, pairs=False)
    slot = dirty_slot(GROUP, payload)
    wrong_calls = [
        lambda: pack(slot[1:], GROUP, IDENTITY, Raw()),
        lambda: pack(slot.toreadonly(), GROUP, IDENTITY, Raw()),
        lambda: pack(slot.cast("b"), GROUP, IDENTITY, Raw()),
        lambda: pack(slot, GROUP, IDENTITY, halves),
        lambda: pack(slot, GROUP, IDENTITY, halves, memoryview(bytearray(pack_scratch_bytes(GROUP, halves) - 1))),
        lambda: unpack_in_place(slot[1:], 0, GROUP, IDENTITY, SCRATCH),
        lambda: unpack_in_place(slot, 0, GROUP, IDENTITY, SCRATCH[1:]),
    ]
    for call in wrong_calls:
        with pytest.raises(ValueError, match="must"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"name": b"short"},
        {"model": bytes(17)},
        {"parent": b"x"},
        {"depth": -1},
        {"part": Part(0, 1 << 32)},
    ],
)
def test_an_identity_that_does_not_fit_is_a_wrong_call(change):
    with pytest.raises(ValueError, match=r"must"):
        sealed(Raw(), payload_of(GROUP, pairs=False), identity=IDENTITY._replace(**change))


def test_the_front_of_a_frame_tells_how_long_its_head_is():
    assert head_bytes_of(sealed(Raw(), payload_of(GROUP, pairs=False))[:256]) == HEAD
    many = GroupLayout(History(), (1,) * 70, "many")
    frame = sealed(Raw(), payload_of(many, pairs=False), many)
    assert head_bytes_of(memoryview(frame)[:256]) == 2 * ALIGNMENT
    with pytest.raises(CorruptChunkError, match="cut off: 4096 bytes of a header of 8192"):
        read_head(frame[:4096])


def test_a_raw_frame_opens_without_its_head_being_taken_apart(monkeypatch):
    """Nor is there another way for it; a frame of pairs is read the long way."""
    monkeypatch.setattr(frame_module, "read_head", None)
    payload = payload_of(GROUP, pairs=True)
    assert opened(sealed(Raw(), payload)) == payload
    with pytest.raises(TypeError):
        opened(sealed(Halves(), payload))
