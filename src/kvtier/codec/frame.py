"""Packs the payload in a slot into a frame, and unpacks a frame into a payload.

A slot is contiguous host memory: head room of `head_bytes(group)`, then the payload. A raw frame is the slot itself, so
packing and unpacking copy nothing. Other codecs write to scratch memory, one section right after the other, and decode
within the slot. No section begins after its place in the payload, so decoding from the last section to the first
overwrites no unread bytes. FORMAT.md specifies the bytes. Each byte is covered by exactly one checksum.
"""

import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import xxhash

from kvtier.codec import registry, roundtrip
from kvtier.codec.base import Codec, LossyCodec
from kvtier.codec.frame_header import (
    ENTRY,
    FIXED_BYTES,
    METADATA_NUMBER,
    NO_SEAL,
    RAW_ID,
    SALT_BYTES,
    SEAL,
    TAG_BYTES,
    FrameLayout,
    Head,
    Identity,
    Section,
    Table,
    expect,
    finish_head,
    frame_layout,
    is_raw_head,
    pack_head,
    pack_raw_head,
    pack_text,
    read_head,
)  # fmt: skip
from kvtier.errors import ConfigError, CorruptChunkError, UnreadableChunkError
from kvtier.keys.seal_keys import CHECK_BYTES, Keyring, SealKey
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, Cut, GroupLayout, align_up

EXTENT_BYTES_MAX = SECTION_BYTES_MAX + ALIGNMENT
"""Bytes of the longest section with the padding after it."""

if TYPE_CHECKING:
    from kvtier.codec.seal import FrameCipher

OPEN_SCRATCH_BYTES = EXTENT_BYTES_MAX
"""Bytes of scratch memory that `unpack_in_place` requires."""

_ZEROS = bytes(ALIGNMENT)
_ASSOCIATED = struct.Struct("<III")  # a section's number, codec and raw length


class Seals(NamedTuple):
    """Which sealed frames a reader opens, and whether it accepts frames without a seal."""

    keyring: Keyring
    tenant: str | None = ""
    """The reader's tenant. Frames of other tenants are refused. None opens frames of all tenants, for an inspection."""
    is_demanded: bool = False
    """Whether a frame without a seal is refused."""


def head_bytes(group: GroupLayout) -> int:
    """Return the number of bytes of head room in a slot of `group`; a multiple of `ALIGNMENT`.

    Raises:
        ValueError: the group has too many sections for a frame.
    """
    return frame_layout(group).header_bytes


def frame_bytes(group: GroupLayout) -> int:
    """Return the size of a slot of `group` in bytes. A slot holds a raw frame, which is the longest frame."""
    return frame_layout(group).frame_bytes


def pack_scratch_bytes(group: GroupLayout, codec: Codec, *, is_sealed: bool = False) -> int:
    """Return how many bytes of scratch memory `pack` requires; 0 for raw without a seal.

    The memory must be page-aligned for direct I/O.
    """
    if codec.id == RAW_ID:
        return frame_bytes(group) if is_sealed else 0
    # Each section is encoded right after the previous one, with room for the codec's bound, and decoded at the end.
    longest = max(codec.bound(cut.size_bytes) for cut in group.sections)
    return frame_bytes(group) + align_up(longest) + align_up(_longest_section(group))


def section_checksums(slot: memoryview, group: GroupLayout) -> list[int]:
    """Return the XXH3-64 of each section of the payload in `slot`, for `pack`. Set the payload's padding to zero.

    Raises:
        ValueError: `slot` has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    for start, stop in layout.paddings:
        slot[start:stop] = _ZEROS[: stop - start]
    return _checksums(slot, layout)


def pack(
    slot: memoryview,
    group: GroupLayout,
    identity: Identity,
    codec: Codec,
    scratch: memoryview | None = None,
    checksums: Sequence[int] | None = None,
    key: SealKey | None = None,
    lossy: LossyCodec | None = None,
) -> memoryview:
    """Make a frame of the payload in `slot`.

    Padding in the payload is set to zero, and a raw frame's head goes into the head room. The layers' bytes are never
    written, so other threads may read them, or pack the same slot with the same identity.

    Args:
        slot: head room and payload, `frame_bytes(group)` writable bytes.
        group: layout of the payload.
        identity: the object. Its key and text go into sealed frames only.
        codec: tried on each section, and verified to restore it. A section that it does not shrink stays raw, and so
            does a frame that it does not shrink by `ALIGNMENT`. A codec that changes bytes or fails is logged and not
            used again, and the frame is raw.
        scratch: at least `pack_scratch_bytes(group, codec)` bytes; None for raw without a seal.
        checksums: `section_checksums` of this payload, if they are known. Only raw frames without a seal use them.
        key: seals the frame, with a new salt; None for no seal.
        lossy: encodes the sections that have axes. `codec` encodes the others, and those that `lossy` cannot. If
            either is refused, the frame is raw.

    Returns:
        The frame, a multiple of `ALIGNMENT`: all of `slot` for a raw one without a seal, otherwise the front of
        `scratch`.

    Raises:
        ConfigError: the package for the seal is missing.
        ValueError: slot, scratch or identity has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    for start, stop in layout.paddings:
        slot[start:stop] = _ZEROS[: stop - start]
    needed = pack_scratch_bytes(group, codec, is_sealed=key is not None)
    if needed and (scratch is None or len(scratch) < needed):
        raise ValueError(f"scratch must have at least {needed} bytes, has {0 if scratch is None else len(scratch)}")
    room = slot[:0] if scratch is None else scratch
    is_raw = codec.id == RAW_ID or roundtrip.is_refused(codec) or (lossy is not None and roundtrip.is_refused(lossy))
    is_first = identity.depth == 0
    packed = None if is_raw else _packed(slot, group, codec, lossy, room[:needed], is_first=is_first)
    if packed is None and key is None:
        known = _checksums(slot, layout) if checksums is None else checksums
        # A single assignment, because another thread may write the same frame to another tier.
        slot[: layout.header_bytes] = pack_raw_head(identity, layout, known)
        return slot
    table, frame = packed or (layout.table.copy(), room[: layout.frame_bytes])
    head = pack_head(identity, layout, table, len(frame))
    if key is not None and identity.text:
        pack_text(head, layout.metadata, identity)
    _finish(frame, slot if packed is None else frame, head, layout.metadata, table, key, identity.name)
    return frame


def unpack_in_place(
    slot: memoryview,
    stored_bytes: int,
    group: GroupLayout,
    identity: Identity,
    scratch: memoryview,
    seals: Seals | None = None,
) -> None:
    """Verify the frame at the front of `slot` and leave the raw payload in the slot.

    A raw frame stays in place. The padding in the payload is zero afterwards.

    Args:
        slot: `frame_bytes(group)` writable bytes, of which the first `stored_bytes` were read.
        stored_bytes: bytes that the tier returned.
        group: the expected layout.
        identity: the expected object. Only the name is compared; it covers model and layout.
        scratch: at least `OPEN_SCRATCH_BYTES`.
        seals: the seals to open; None opens none.

    Raises:
        CorruptChunkError: the bytes are damaged, forged, or not the whole frame of this object. The payload is
            undefined.
        UnreadableChunkError: the codec, the version or the key is not known here. The payload is undefined.
        ValueError: slot or scratch has the wrong size.
    """
    layout = frame_layout(group)
    _check_slot(slot, layout)
    if len(scratch) < OPEN_SCRATCH_BYTES:
        raise ValueError(f"scratch must have at least {OPEN_SCRATCH_BYTES} bytes, has {len(scratch)}")
    if not 0 <= stored_bytes <= len(slot):
        raise CorruptChunkError(
            identity.name, f"{stored_bytes} bytes are stored, but a frame here has at most {len(slot)}"
        )
    # A payload and a name have exactly one raw frame, so comparing the heads makes every check. Fields that are not
    # compared (model, parent, depth and so on) are taken from the frame.
    is_demanded = seals is not None and seals.is_demanded
    may_be_raw = stored_bytes == len(slot) and bytes(slot[SEAL]) == NO_SEAL and not is_demanded
    if may_be_raw and is_raw_head(slot, layout, identity, _checksums(slot, layout)):
        return
    # The frame is encoded or damaged. The full check finds out which.
    head = read_head(slot[:stored_bytes])
    expect(head, group, identity)
    if head.frame_bytes != stored_bytes:
        raise CorruptChunkError(identity.name, f"{stored_bytes} bytes are stored of a frame of {head.frame_bytes}")
    if not head.seal:
        _verify_sections(slot, head)  # before looking up codecs, because damage is found without them
        if is_demanded:
            raise CorruptChunkError(identity.name, "it has no seal, but this tier requires one", "unsealed")
    cipher = open_seal(head, seals)[0] if head.seal else None  # also before looking up codecs
    _unpack(slot, head, group, decoders_of(head), scratch, cipher)


def reseal(frame: memoryview, keyring: Keyring, key: SealKey, scratch: memoryview) -> memoryview:
    """Seal a stored frame with another key and a new salt. This requires neither the frame's layout nor its codecs.

    Everything is verified first. Sections stay encoded, so the new frame has the same length.

    Args:
        frame: the whole frame, sealed or not. It is not written.
        keyring: holds the key of a sealed `frame`.
        key: the key to seal with, of the same tenant.
        scratch: memory at least as long as `frame` that does not overlap it.

    Returns:
        The new frame, the front of `scratch`.

    Raises:
        ConfigError: the package for the seal is missing.
        CorruptChunkError: `frame` is damaged, forged, or of another tenant.
        UnreadableChunkError: its version or its key is not known here.
        ValueError: scratch is too small.
    """
    head = verify_frame(frame)
    new, new_head = scratch[: len(frame)], bytearray(head.head)
    new[:] = frame
    if head.seal:
        cipher, text = open_seal(head, Seals(keyring, key.tenant))
        for number, section in enumerate(head.sections):
            open_section(cipher, head, number, section, new[section.offset : section.offset + section.extent_bytes])
        new_head[head.metadata.start : head.metadata.stop - TAG_BYTES] = text
    _finish(new, new, new_head, head.metadata, head.table.copy(), key, head.identity.name)
    return new


def verify_frame(frame: memoryview | bytes) -> Head:
    """Check a whole frame without a model: its head, its length and the checksum of every section.

    Raises:
        CorruptChunkError: the frame is damaged, truncated or too long.
        UnreadableChunkError: its version is unknown.
    """
    view = memoryview(frame)
    head = read_head(view)
    if head.frame_bytes != len(view):
        raise CorruptChunkError(head.identity.name, f"{len(view)} bytes are stored of a frame of {head.frame_bytes}")
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
        raise CorruptChunkError(
            head.identity.name, f"the checksum of the section at byte {section.offset} does not match"
        )


Decoder = Callable[[memoryview, memoryview, Cut], None]
"""Decodes a section: its stored bytes, the memory that it fills, and its cut. Raises ValueError if it cannot."""


def decoders_of(head: Head) -> dict[int, Decoder]:
    """Return the decoders of a frame's sections, by the ids of their codecs.

    Raises:
        UnreadableChunkError: a codec or its package is not installed here, or the codec was refused.
    """
    found: dict[int, Decoder] = {}
    for number in head.codecs:
        try:
            codec = registry.by_id(number)
        except ConfigError as error:
            detail = f"codec {number} is not installed here: {error}"
            raise UnreadableChunkError(head.identity.name, detail, "codec") from error
        if roundtrip.is_refused(codec):
            raise UnreadableChunkError(head.identity.name, f"codec {number} has changed bytes or failed", "codec")
        found[number] = partial(decode_section, codec)
    return found


def decode_section(codec: Codec | LossyCodec, stored: memoryview, into: memoryview, cut: Cut) -> None:
    """Decode a section so that it fills `into`.

    Raises:
        ValueError: `stored` is invalid, or lossy in an engine that stores this section exactly.
    """
    if codec.is_exact:
        cast("Codec", codec).decode(stored, into, cut.element)
    elif cut.axes is not None:
        cast("LossyCodec", codec).decode(stored, into, cut)
    else:
        raise ValueError(f"it is coded with {codec.name}, but this engine stores exact KV")


def _checksums(slot: memoryview, layout: FrameLayout) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(slot[start:stop]) for start, stop in layout.extents]


def _cipher(key: SealKey, salt: bytes, name: bytes) -> "FrameCipher":
    from kvtier.codec.seal import FrameCipher  # noqa: PLC0415 - an optional package

    return FrameCipher(key, salt, name)


def _finish(
    frame: memoryview,
    source: memoryview,
    head: bytearray,
    metadata: slice,
    table: Table,
    key: SealKey | None,
    name: bytes,
) -> None:
    """Seal the sections with a new salt, if there is a key, and complete the head at the front of `frame`.

    Args:
        frame: receives the sealed sections and the head.
        source: holds the plain sections at their offsets. It is `frame`, or the slot of a raw frame.
        head: the head, with plain metadata and a checksum of zero.
        metadata: place of the metadata block.
        table: receives checksums and tags.
        key: the key to seal with; None for no seal.
        name: name of the object.
    """
    cipher, tags, checksums = None, list[bytes](), list[int]()
    if key is not None:
        cipher = _cipher(key, salt := secrets.token_bytes(SALT_BYTES), name)
        head[SEAL] = key.check + salt
    for number, (row, (start, stop)) in enumerate(zip(table.tolist(), _extents(table, len(frame)), strict=True)):
        if cipher is not None:
            _, _, raw_bytes, stored_bytes, _, codec, _ = row
            end = start + stored_bytes
            associated = _ASSOCIATED.pack(number, codec, raw_bytes)
            tags.append(cipher.seal(number, associated, source[start:end], frame[start:end]))
            frame[end:stop] = _ZEROS[: stop - end]
        checksums.append(xxhash.xxh3_64_intdigest(frame[start:stop]))  # the section is still in the CPU cache
    table["checksum"] = checksums
    if tags:
        table["tag"] = np.frombuffer(b"".join(tags), table["tag"].dtype)
    head[FIXED_BYTES : metadata.start] = table.tobytes()
    if cipher is not None:
        block = memoryview(head)[metadata]
        text, before = block[:-TAG_BYTES], bytes(head[: metadata.start])
        block[-TAG_BYTES:] = cipher.seal(METADATA_NUMBER, before, text, text)
    finish_head(head)
    frame[: len(head)] = head


def open_seal(head: Head, seals: Seals | None) -> "tuple[FrameCipher, memoryview]":
    """Return the cipher of a sealed frame, and its metadata in plain text without the tag.

    Raises:
        ConfigError: the package for the seal is missing.
        UnreadableChunkError: the frame's key is not known here.
        CorruptChunkError: the frame is of another tenant, or forged.
    """
    name = head.identity.name
    key = None if seals is None else seals.keyring.knows(head.seal[:CHECK_BYTES])
    if seals is None or key is None:
        raise UnreadableChunkError(name, "it is sealed, and its key is not known here", "key")
    if seals.tenant not in {None, key.tenant}:
        raise CorruptChunkError(name, "it is sealed for another tenant", "foreign")
    cipher = _cipher(key, head.seal[CHECK_BYTES:], name)
    before, block = head.head[: head.metadata.start], memoryview(bytearray(head.head[head.metadata]))
    text, tag = block[:-TAG_BYTES], bytes(block[-TAG_BYTES:])
    if not cipher.open(METADATA_NUMBER, before, text, text, tag):
        raise CorruptChunkError(name, "the seal of the head does not match", "forged")
    return cipher, text


def open_section(cipher: "FrameCipher", head: Head, number: int, section: Section, extent: memoryview) -> None:
    """Verify the seal of one section and decrypt it in place.

    Args:
        cipher: from `open_seal`.
        head: head of the frame.
        number: number of the section.
        section: its entry in the table.
        extent: its stored bytes and padding.

    Raises:
        CorruptChunkError: the section is damaged or forged. Its bytes are unchanged.
    """
    stored, associated = extent[: section.stored_bytes], _ASSOCIATED.pack(number, section.codec, section.raw_bytes)
    if not cipher.open(number, associated, stored, stored, section.tag):
        verify_section(head, section, extent)
        raise CorruptChunkError(head.identity.name, f"the seal of section {number} does not match", "forged")


def _packed(
    slot: memoryview,
    group: GroupLayout,
    codec: Codec,
    lossy: LossyCodec | None,
    scratch: memoryview,
    *,
    is_first: bool,
) -> tuple[Table, memoryview] | None:
    """Encode the sections into `scratch`. Return a table without checksums, and the frame without a head.

    Return None if the frame would not be `ALIGNMENT` shorter than the raw one, or if the codec is refused.
    """
    layout = frame_layout(group)
    rows: list[tuple[int, int, int, int, int, int, bytes]] = []
    position, end = layout.header_bytes, len(scratch) - align_up(_longest_section(group))
    scratch, back = scratch[:end], scratch[end:]
    for cut, (start, _) in zip(group.sections, layout.extents, strict=True):
        raw_bytes = stored_bytes = cut.size_bytes
        raw = slot[start : start + raw_bytes]
        into = scratch[position : position + codec.bound(raw_bytes)]
        codec_id = codec.id
        try:
            if lossy is not None and cut.axes is not None:
                begins = is_first and cut.first_token == 0
                stored_bytes = roundtrip.encoded_lossy(lossy, raw, into, back[:raw_bytes], cut, is_first=begins)
                codec_id = lossy.id
            if stored_bytes >= raw_bytes:
                stored_bytes, codec_id = roundtrip.encoded(codec, raw, into, back[:raw_bytes], cut.element), codec.id
        except roundtrip.InexactError:
            return None
        if stored_bytes >= raw_bytes:
            stored_bytes, codec_id = raw_bytes, RAW_ID
            scratch[position : position + raw_bytes] = raw
        rows.append((position, 0, raw_bytes, stored_bytes, cut.layer, codec_id, b""))
        position += stored_bytes
    end = align_up(position)
    if end >= layout.frame_bytes or not any(row[5] for row in rows):
        return None
    scratch[position:end] = _ZEROS[: end - position]
    return np.array(rows, ENTRY), scratch[:end]


def _longest_section(group: GroupLayout) -> int:
    return max(cut.size_bytes for cut in group.sections)


def _extents(table: Table, frame_bytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each section with the padding after it."""
    starts: list[int] = table["offset"].tolist()
    return list(pairwise([*starts, frame_bytes]))


def _unpack(
    slot: memoryview,
    head: Head,
    group: GroupLayout,
    decoders: Mapping[int, Decoder],
    scratch: memoryview,
    cipher: "FrameCipher | None",
) -> None:
    """Decode a verified or sealed frame within its slot, from the last section to the first."""
    places = list(zip(head.sections, group.sections, frame_layout(group).extents, strict=True))
    for number, (section, cut, (start, stop)) in reversed(list(enumerate(places))):
        end = start + section.raw_bytes
        stored = slot[section.offset : section.offset + section.stored_bytes]
        if cipher is not None:
            open_section(cipher, head, number, section, slot[section.offset : section.offset + section.extent_bytes])
        if section.codec == RAW_ID:
            slot[start:end] = stored  # the memory may overlap, because the assignment acts like a copy
        else:
            if section.offset + section.stored_bytes > start:
                scratch[: section.stored_bytes] = stored
                stored = scratch[: section.stored_bytes]
            try:
                decoders[section.codec](stored, slot[start:end], cut)
            except ValueError as error:
                raise CorruptChunkError(
                    head.identity.name, f"the section of layer {section.layer} cannot be decoded: {error}"
                ) from error
        slot[end:stop] = _ZEROS[: stop - end]


def _check_slot(slot: memoryview, layout: FrameLayout) -> None:
    if slot.readonly or slot.format != "B" or len(slot) != layout.frame_bytes:
        raise ValueError(
            f"a slot must be {layout.frame_bytes} writable bytes, "
            f"got {slot.nbytes} of format {slot.format!r}{', read-only' if slot.readonly else ''}"
        )
