"""Seal the payload in a slot into a frame, and open a frame into a payload.

A slot is contiguous host memory: head room of `head_bytes(group)`, then the payload. A raw frame is the slot itself, so
sealing and opening copy nothing. Other codecs write to scratch memory and decode within the slot. An encoded section
never begins after its place in the payload, so decoding from the last section to the first overwrites no unread bytes.
FORMAT.md specifies the bytes. Each byte is covered by exactly one checksum.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.codec.head import (
    ENTRY,
    RAW_ID,
    FrameLayout,
    Head,
    Identity,
    Section,
    expect,
    frame_layout,
    is_raw_head,
    pack_head,
    pack_raw_head,
    read_head,
)  # fmt: skip
from kvtier.errors import ConfigError, CorruptChunkError, UnreadableChunkError
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, align_up

OPEN_SCRATCH_BYTES = SECTION_BYTES_MAX
"""Scratch memory that `open_in_place` needs."""

_ZEROS = bytes(ALIGNMENT)


def head_bytes(group: GroupLayout) -> int:
    """Bytes of head room in a slot of `group`; a multiple of `ALIGNMENT`.

    Raises:
        ValueError: the group has too many sections for a frame.
    """
    return frame_layout(group).header_bytes


def frame_bytes(group: GroupLayout) -> int:
    """Bytes of a slot of `group`: the raw frame, which is the longest frame."""
    return frame_layout(group).frame_bytes


def seal_scratch_bytes(group: GroupLayout, codec: Codec) -> int:
    """Bytes of scratch memory that `seal` needs; 0 for raw. Direct I/O needs it page-aligned."""
    if codec.id == RAW_ID:
        return 0
    # Each section is encoded right after the previous one, with room for the codec's bound.
    return frame_bytes(group) + align_up(max(codec.bound(length) for _, _, length in group.sections))


def section_checksums(slot: memoryview, group: GroupLayout) -> list[int]:
    """XXH3-64 of each section of the payload in `slot`, for `seal`. Padding in the payload is set to zero.

    Raises:
        ValueError: slot has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    for start, stop in layout.paddings:
        slot[start:stop] = _ZEROS[: stop - start]
    return _checksums(slot, layout)


def seal(
    slot: memoryview,
    group: GroupLayout,
    identity: Identity,
    codec: Codec,
    scratch: memoryview | None = None,
    checksums: Sequence[int] | None = None,
) -> memoryview:
    """Make a frame of the payload in `slot`.

    Padding in the payload is set to zero, and for raw the head room is written. The layers' bytes are never written. So
    other threads may read them, or seal the same slot with the same identity.

    Args:
        slot: head room and payload, `frame_bytes(group)` writable bytes.
        group: layout of the payload.
        identity: the object.
        codec: tried on each section; sections that it does not make smaller stay raw.
        scratch: at least `seal_scratch_bytes(group, codec)` bytes; None for raw.
        checksums: `section_checksums` of this payload, if they are known. Only raw uses them.

    Returns:
        The frame, a multiple of `ALIGNMENT`: all of `slot` for raw, otherwise the front of `scratch`.

    Raises:
        ValueError: slot, scratch or identity has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    for start, stop in layout.paddings:
        slot[start:stop] = _ZEROS[: stop - start]
    if codec.id == RAW_ID:
        known = _checksums(slot, layout) if checksums is None else checksums
        # One assignment: another thread may write the same frame to another tier.
        slot[: layout.header_bytes] = pack_raw_head(identity, layout, known)
        return slot
    needed = seal_scratch_bytes(group, codec)
    if scratch is None or len(scratch) < needed:
        raise ValueError(f"scratch must have at least {needed} bytes, has {0 if scratch is None else len(scratch)}")
    return _seal_encoded(slot, group, identity, codec, scratch)


def open_in_place(
    slot: memoryview, stored_bytes: int, group: GroupLayout, identity: Identity, scratch: memoryview
) -> None:
    """Verify the frame at the front of `slot` and leave the raw payload in the slot.

    A raw frame stays in place. The padding in the payload is zero afterwards.

    Args:
        slot: `frame_bytes(group)` writable bytes, of which the first `stored_bytes` were read.
        stored_bytes: bytes that the tier returned.
        group: the expected layout.
        identity: the expected object; only name, fingerprint and layout digest are compared.
        scratch: at least `OPEN_SCRATCH_BYTES`.

    Raises:
        CorruptChunkError: the bytes are damaged or not the whole frame of this object. The payload is undefined.
        UnreadableChunkError: the codec or the version is not known here, or the fingerprint or layout is another one.
            The payload is undefined.
        ValueError: slot or scratch has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    if len(scratch) < OPEN_SCRATCH_BYTES:
        raise ValueError(f"scratch must have at least {OPEN_SCRATCH_BYTES} bytes, has {len(scratch)}")
    if not 0 <= stored_bytes <= len(slot):
        raise CorruptChunkError(identity.name, f"{stored_bytes} bytes stored, a frame here has at most {len(slot)}")
    # A payload and an identity have only one raw frame, so comparing heads is every check at once. Fields that are not
    # compared (parent, depth and so on) are taken from the frame.
    if stored_bytes == len(slot) and is_raw_head(slot, layout, identity, _checksums(slot, layout)):
        return
    # Encoded or damaged: the full check tells which.
    head = read_head(slot[:stored_bytes])
    expect(head, group, identity)
    if head.frame_bytes != stored_bytes:
        raise CorruptChunkError(identity.name, f"{stored_bytes} bytes stored of a frame of {head.frame_bytes}")
    _verify_sections(slot, head)  # before the codec: damage is found without it
    _unpack(slot, head, codec_of(head), scratch)


def verify_frame(frame: memoryview | bytes) -> Head:
    """Check a whole frame without a model: its head, its length and the checksum of every section.

    Raises:
        CorruptChunkError: it is damaged, truncated or too long.
        UnreadableChunkError: it is of an unknown version.
    """
    view = memoryview(frame)
    head = read_head(view)
    if head.frame_bytes != len(view):
        raise CorruptChunkError(head.identity.name, f"{len(view)} bytes stored of a frame of {head.frame_bytes}")
    _verify_sections(view, head)
    return head


def _verify_sections(frame: memoryview, head: Head) -> None:
    for section in head.sections:
        verify_section(head, section, frame[section.offset : section.offset + section.extent_bytes])


def verify_section(head: Head, section: Section, extent: memoryview) -> None:
    """Check the stored bytes and padding of one section.

    Raises:
        CorruptChunkError: the checksum does not match.
    """
    if xxhash.xxh3_64_intdigest(extent) != section.checksum:
        raise CorruptChunkError(head.identity.name, f"checksum of the section at {section.offset} does not match")


def codec_of(head: Head) -> Codec:
    """The codec that decodes the encoded sections of a frame; raw if it has none.

    Raises:
        UnreadableChunkError: the codec or its package is not installed here.
    """
    number = int(head.table["codec"].max())  # each section has 0 or the frame's
    try:
        return registry.by_id(number)
    except ConfigError as error:
        raise UnreadableChunkError(head.identity.name, f"codec {number} is not installed here: {error}") from error


def _checksums(slot: memoryview, layout: FrameLayout) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(slot[start:stop]) for start, stop in layout.extents]


def _seal_encoded(
    slot: memoryview, group: GroupLayout, identity: Identity, codec: Codec, scratch: memoryview
) -> memoryview:
    layout = frame_layout(group)
    rows: list[tuple[int, int, int, int, int, int]] = []
    position = layout.header_bytes
    for (layer, _, raw_bytes), (start, stop) in zip(group.sections, layout.extents, strict=True):
        stored_bytes = codec.encode(
            slot[start : start + raw_bytes], scratch[position : position + codec.bound(raw_bytes)], "bytes"
        )
        extent_bytes = align_up(stored_bytes)
        codec_id = codec.id
        # Saving less than the alignment does not make the frame smaller, and decoding would cost time.
        if extent_bytes >= stop - start:
            stored_bytes, extent_bytes, codec_id = raw_bytes, stop - start, RAW_ID
            scratch[position : position + raw_bytes] = slot[start : start + raw_bytes]
        end = position + extent_bytes
        scratch[position + stored_bytes : end] = _ZEROS[: extent_bytes - stored_bytes]
        checksum = xxhash.xxh3_64_intdigest(scratch[position:end])
        rows.append((position, checksum, raw_bytes, stored_bytes, layer, codec_id))
        position = end
    head = pack_head(identity, codec.id, np.array(rows, ENTRY), position, group.payload_bytes)
    scratch[: layout.header_bytes] = head
    return scratch[:position]


def _unpack(slot: memoryview, head: Head, codec: Codec, scratch: memoryview) -> None:
    """Decode a verified frame within its slot, from the last section to the first."""
    for section in reversed(head.sections):
        extent = slot[section.offset : section.offset + section.extent_bytes]
        start = head.header_bytes + section.payload_offset
        target = slot[start : start + align_up(section.raw_bytes)]
        if section.codec == RAW_ID:
            target[:] = extent  # overlap is fine: the assignment acts like a copy
            continue
        stored = extent[: section.stored_bytes]
        if section.offset + section.stored_bytes > start:
            scratch[: section.stored_bytes] = stored
            stored = scratch[: section.stored_bytes]
        try:
            codec.decode(stored, target[: section.raw_bytes], "bytes")
        except ValueError as error:
            raise CorruptChunkError(head.identity.name, f"section of layer {section.layer}: {error}") from error
        target[section.raw_bytes :] = _ZEROS[: len(target) - section.raw_bytes]


def _check_slot(slot: memoryview, layout: FrameLayout) -> None:
    if slot.readonly or slot.format != "B" or len(slot) != layout.frame_bytes:
        raise ValueError(
            f"a slot must be {layout.frame_bytes} writable bytes, "
            f"got {slot.nbytes} of format {slot.format!r}{', read-only' if slot.readonly else ''}"
        )
