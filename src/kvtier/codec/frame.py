"""Seal and open: how the payload in a slot becomes a frame, and a frame that was read becomes a payload again.

A slot is one contiguous piece of host memory: head room of `head_bytes(group)`, then the payload. A raw frame is the
slot itself, so neither way copies anything. Other codecs write to scratch memory and are read within the slot: a packed
section never lies behind its place in the payload, so decoding from the last section to the first overwrites only what
has been used. FORMAT.md specifies the bytes; every one of them is covered by exactly one checksum.
"""

import numpy as np
import xxhash

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.codec.head import (
    ENTRY,
    RAW_ID,
    Head,
    Identity,
    Plan,
    Section,
    expect,
    is_raw_head,
    pack_head,
    pack_raw_head,
    plan,
    read_head,
)  # fmt: skip
from kvtier.errors import ConfigError, CorruptChunkError
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, align_up

OPEN_SCRATCH_BYTES = SECTION_BYTES_MAX
"""Scratch memory that `open_in_place` needs, whatever the frame."""

_ZEROS = bytes(ALIGNMENT)


def head_bytes(group: GroupLayout) -> int:
    """Bytes of head room in a slot of `group`; a multiple of `ALIGNMENT`.

    Raises:
        ValueError: the group has too many sections for a frame.
    """
    return plan(group).header_bytes


def frame_bytes(group: GroupLayout) -> int:
    """Bytes of a slot of `group`, head room and payload: the raw frame, and the most that any frame can have."""
    return plan(group).frame_bytes


def seal_scratch_bytes(group: GroupLayout, codec: Codec) -> int:
    """Bytes of scratch memory that `seal` needs; 0 for raw. For direct I/O it must be page-aligned."""
    if codec.id == RAW_ID:
        return 0
    # A section is encoded right behind the one before, into as much as the codec may need.
    return frame_bytes(group) + align_up(max(codec.bound(length) for _, _, length in group.sections))


def seal(
    slot: memoryview, group: GroupLayout, identity: Identity, codec: Codec, scratch: memoryview | None = None
) -> memoryview:
    """Make a frame of the payload in `slot`.

    Padding in the payload is set to zero, and for raw the head room is written; the layers' bytes are never touched. So
    other threads may read them meanwhile, or seal the same slot with the same identity.

    Args:
        slot: head room and payload, `frame_bytes(group)` writable bytes.
        group: what the payload is.
        identity: which object it is.
        codec: tried on each section; one that it does not make smaller stays raw.
        scratch: at least `seal_scratch_bytes(group, codec)` bytes; None for raw.

    Returns:
        The frame, a multiple of `ALIGNMENT`: all of `slot` for raw, otherwise the front of `scratch`.

    Raises:
        ValueError: a slot, scratch or identity of another size.
    """
    known = plan(group)
    _check_slot(slot, known)
    for start, stop in known.paddings:
        slot[start:stop] = _ZEROS[: stop - start]
    if codec.id == RAW_ID:
        # Written at once and complete: another thread may be writing the same frame to another tier.
        slot[: known.header_bytes] = pack_raw_head(identity, known, _checksums(slot, known))
        return slot
    needed = seal_scratch_bytes(group, codec)
    if scratch is None or len(scratch) < needed:
        raise ValueError(f"scratch must have at least {needed} bytes, has {0 if scratch is None else len(scratch)}")
    return _seal_encoded(slot, group, identity, codec, scratch)


def open_in_place(
    slot: memoryview, stored_bytes: int, group: GroupLayout, identity: Identity, scratch: memoryview
) -> None:
    """Verify the frame at the front of `slot` and leave the raw payload in the slot's payload.

    A raw frame stays where it is. Afterwards padding in the payload is as it was sealed: zero.

    Args:
        slot: `frame_bytes(group)` writable bytes, of which the first `stored_bytes` were read.
        stored_bytes: how many bytes the tier gave.
        group: the layout that is expected.
        identity: the object that is expected; only name, fingerprint and layout digest are compared.
        scratch: at least `OPEN_SCRATCH_BYTES`.

    Raises:
        CorruptChunkError: the bytes are not the whole frame of this object, or damaged. The payload is then undefined.
        ValueError: a slot or scratch of another size.
    """
    known = plan(group)
    _check_slot(slot, known)
    if len(scratch) < OPEN_SCRATCH_BYTES:
        raise ValueError(f"scratch must have at least {OPEN_SCRATCH_BYTES} bytes, has {len(scratch)}")
    if not 0 <= stored_bytes <= len(slot):
        raise CorruptChunkError(identity.name, f"{stored_bytes} bytes stored, a frame here has at most {len(slot)}")
    if stored_bytes == len(slot) and _is_as_sealed(slot, known, identity):
        return
    # Encoded, or damaged: then this says how.
    head = read_head(slot[:stored_bytes])
    expect(head, group, identity)
    if head.frame_bytes != stored_bytes:
        raise CorruptChunkError(identity.name, f"{stored_bytes} bytes stored of a frame of {head.frame_bytes}")
    _unpack(slot, head, scratch)


def open_span(head: Head, start_layer: int, stop_layer: int, stored: memoryview, payload: memoryview) -> None:
    """Verify and decode layers `start_layer` up to, but without, `stop_layer`, whatever of the frame is missing.

    Args:
        head: from `read_head`, and compared with what is wanted by `expect`.
        start_layer: the first layer.
        stop_layer: the layer after the last.
        stored: the frame's bytes of `head.span(start_layer, stop_layer)`.
        payload: a slot's payload, `head.raw_bytes` writable bytes; only these layers and their padding are written.
            Where `stored` lies in the slot at the span's own offset, the sections of a raw frame are in their places
            already and nothing is moved; otherwise the two must not overlap.

    Raises:
        CorruptChunkError: a section is damaged. The layers are then undefined.
        ValueError: no such layers, or a buffer of another size.
    """
    offset, length = head.span(start_layer, stop_layer)
    if len(stored) != length or len(payload) != head.raw_bytes:
        raise ValueError(
            f"stored and payload must have {length} and {head.raw_bytes} bytes, have {len(stored)} and {len(payload)}"
        )
    sections = head.sections_of(start_layer, stop_layer)
    for section in sections:
        start = section.offset - offset
        extent = stored[start : start + section.extent_bytes]
        verify_section(head, section, extent)
        target = payload[section.payload_offset :][: align_up(section.raw_bytes)]
        if section.codec != RAW_ID:
            _decode(head, section, extent[: section.stored_bytes], target)
        elif _address(extent) != _address(target):
            target[:] = extent


def verify_frame(frame: memoryview | bytes) -> Head:
    """Check a whole frame by itself, with no model at hand: its head, its length and the checksum of every section.

    Raises:
        CorruptChunkError: it is damaged, cut off or continued.
    """
    view = memoryview(frame)
    head = read_head(view)
    if head.frame_bytes != len(view):
        raise CorruptChunkError(head.identity.name, f"{len(view)} bytes stored of a frame of {head.frame_bytes}")
    for section in head.sections:
        verify_section(head, section, view[section.offset : section.offset + section.extent_bytes])
    return head


def verify_section(head: Head, section: Section, extent: memoryview) -> None:
    """Check the stored bytes of one section, with the zeros behind them.

    Raises:
        CorruptChunkError: their checksum does not match.
    """
    if xxhash.xxh3_64_intdigest(extent) != section.checksum:
        raise CorruptChunkError(head.identity.name, f"checksum of the section at {section.offset} does not match")


def _checksums(slot: memoryview, known: Plan) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(slot[start:stop]) for start, stop in known.extents]


def _is_as_sealed(slot: memoryview, known: Plan, identity: Identity) -> bool:
    """Whether `slot` holds, byte for byte, the raw frame that `seal` makes of its payload for the object `identity`.

    Then every check has passed at once: there is only one head for a payload and an identity. What a reader does not
    compare (parent, depth and so on) is taken from the frame.
    """
    return is_raw_head(slot, known, identity, _checksums(slot, known))


def _seal_encoded(
    slot: memoryview, group: GroupLayout, identity: Identity, codec: Codec, scratch: memoryview
) -> memoryview:
    known = plan(group)
    rows: list[tuple[int, int, int, int, int, int]] = []
    position = known.header_bytes
    for (layer, _, raw_bytes), (start, stop) in zip(group.sections, known.extents, strict=True):
        stored_bytes = codec.encode(
            slot[start : start + raw_bytes], scratch[position : position + codec.bound(raw_bytes)]
        )
        extent_bytes = align_up(stored_bytes)
        codec_id = codec.id
        # Less than one unit of alignment saves no byte of the frame, so it is not worth decoding.
        if extent_bytes >= stop - start:
            stored_bytes, extent_bytes, codec_id = raw_bytes, stop - start, RAW_ID
            scratch[position : position + raw_bytes] = slot[start : start + raw_bytes]
        end = position + extent_bytes
        scratch[position + stored_bytes : end] = _ZEROS[: extent_bytes - stored_bytes]
        checksum = xxhash.xxh3_64_intdigest(scratch[position:end])
        rows.append((position, checksum, raw_bytes, stored_bytes, layer, codec_id))
        position = end
    head = pack_head(identity, codec.id, np.array(rows, ENTRY), position, group.payload_bytes)
    scratch[: known.header_bytes] = head
    return scratch[:position]


def _unpack(slot: memoryview, head: Head, scratch: memoryview) -> None:
    """Decode a packed frame within its slot, from the last section to the first."""
    for section in reversed(head.sections):
        extent = slot[section.offset : section.offset + section.extent_bytes]
        verify_section(head, section, extent)
        start = head.header_bytes + section.payload_offset
        target = slot[start : start + align_up(section.raw_bytes)]
        if section.codec == RAW_ID:
            target[:] = extent  # may overlap; the assignment moves as if through a copy
            continue
        stored = extent[: section.stored_bytes]
        if section.offset + section.stored_bytes > start:
            scratch[: section.stored_bytes] = stored
            stored = scratch[: section.stored_bytes]
        _decode(head, section, stored, target)


def _decode(head: Head, section: Section, stored: memoryview, target: memoryview) -> None:
    """Decode one section into the front of `target` and set the rest of `target`, its padding, to zero."""
    try:
        registry.by_id(section.codec).decode(stored, target[: section.raw_bytes])
    except (ConfigError, ValueError) as error:
        raise CorruptChunkError(head.identity.name, f"section of layer {section.layer}: {error}") from error
    target[section.raw_bytes :] = _ZEROS[: len(target) - section.raw_bytes]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _check_slot(slot: memoryview, known: Plan) -> None:
    if slot.readonly or slot.format != "B" or len(slot) != known.frame_bytes:
        raise ValueError(
            f"a slot must be {known.frame_bytes} writable bytes, "
            f"got {slot.nbytes} of format {slot.format!r}{', read-only' if slot.readonly else ''}"
        )
