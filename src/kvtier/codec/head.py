"""The head of a frame, as in FORMAT.md. `pack_head` writes it and `read_head` reads it.

`read_head` needs no model, so that any frame can be inspected; `expect` then compares the head with the wanted object.
No field is used before it is checked.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import CorruptChunkError, UnreadableChunkError, other_version
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, Part, align_up
from kvtier.types import ObjectName

MAGIC: Final = b"\x89KVT\r\n\x1a\n"
"""First bytes of a frame. As in PNG, a transfer that converts line ends or strips the eighth bit breaks them."""

VERSION: Final = 2
FIXED_BYTES: Final = 256
ENTRY_BYTES: Final = 32
SECTIONS_MAX: Final = 1 << 16
RAW_ID: Final = 0

Table = npt.NDArray[np.void]
"""A section table; its fields are those of `ENTRY`."""

ENTRY: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("checksum", "<u8"),
        ("raw_bytes", "<u4"),
        ("stored_bytes", "<u4"),
        ("layer", "<u4"),
        ("codec", "<u4"),
    ]
)

#                        magic version header checksum frame raw codec sections, 4 digests, depth..group part, reserved
_FIXED = struct.Struct("<8s    I       I      Q        Q     Q   I     I         32s32s32s32s III 6I 44s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 16
_VERSION = struct.Struct("<I")
_VERSION_AT = 8
_IDENTITY = struct.Struct("<32s32s32s32s III 6I")
_IDENTITY_AT, _COMPARED_STOP, _IDENTITY_STOP = 48, 144, 212
_FEW = 8
_WORDS = ENTRY_BYTES // 8  # of an entry; its checksum is the second
DIGEST_BYTES: Final = 32
_NO_PARENT = bytes(DIGEST_BYTES)
_RESERVED = bytes(44)
_COUNT_MAX = (1 << 32) - 1
_NO_PART = Part(0, 1)


class Identity(NamedTuple):
    """The object that a frame holds. Readers compare the first three fields; the others help to rebuild an index."""

    name: ObjectName
    fingerprint: bytes
    """32 bytes, `Fingerprint.digest`."""
    layout_digest: bytes
    """32 bytes, `KvLayout.digest(group)`."""
    parent: ObjectName | None = None
    """The preceding object of the prefix; None at the start, for groups without history, or if unknown."""
    depth: int = 0
    """Number of preceding objects."""
    tokens: int = 0
    """Tokens of the chunk."""
    group: int = 0
    part: Part = _NO_PART
    """Layers and heads of the group."""


class Section(NamedTuple):
    """One entry of a section table."""

    layer: int
    payload_offset: int
    raw_bytes: int
    offset: int
    """Offset in the frame."""
    stored_bytes: int
    extent_bytes: int
    """Stored bytes and padding: covered by the checksum."""
    checksum: int
    codec: int


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A frame's head that has passed every check that needs no model."""

    version: int
    header_bytes: int
    frame_bytes: int
    raw_bytes: int
    """Bytes of the payload, including padding."""
    codec: int
    """The requested codec; single sections may be raw."""
    identity: Identity
    table: Table = field(repr=False)
    _payload_offsets: npt.NDArray[np.int64] = field(repr=False)

    @property
    def sections(self) -> list[Section]:
        """All sections, in order."""
        rows: list[tuple[int, ...]] = self.table.tolist()
        return [
            Section(layer, at, raw_bytes, offset, stored_bytes, align_up(stored_bytes), checksum, codec)
            for at, (offset, checksum, raw_bytes, stored_bytes, layer, codec) in zip(
                self._payload_offsets.tolist(), rows, strict=True
            )
        ]

    @property
    def layers(self) -> int:
        """Layers of the payload."""
        return int(self.table["layer"][-1]) + 1


class FrameLayout(NamedTuple):
    """The parts that all raw frames of one group share."""

    header_bytes: int
    frame_bytes: int
    table: Table
    """Complete except for the checksums, which are 0."""
    extents: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each section with its padding."""
    paddings: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each padding that is not empty."""
    blank: bytes
    """The head of a raw frame, with zeros in the fields that differ."""


@lru_cache(maxsize=256)
def frame_layout(group: GroupLayout) -> FrameLayout:
    """The raw frame of `group`.

    Raises:
        ValueError: the group has more than `SECTIONS_MAX` sections.
    """
    count = len(group.sections)
    if count > SECTIONS_MAX:
        raise ValueError(f"a frame has at most {SECTIONS_MAX} sections, this group has {count}: use smaller chunks")
    header_bytes = align_up(FIXED_BYTES + ENTRY_BYTES * count)
    rows = [(header_bytes + at, 0, size, size, layer, RAW_ID) for layer, at, size in group.sections]
    table = np.array(rows, ENTRY)
    frame_bytes = header_bytes + group.payload_bytes
    extents = tuple((row[0], row[0] + align_up(row[2])) for row in rows)
    paddings = tuple((row[0] + row[2], stop) for row, (_, stop) in zip(rows, extents, strict=True))
    return FrameLayout(
        header_bytes,
        frame_bytes,
        table,
        extents,
        tuple((start, stop) for start, stop in paddings if start < stop),
        _blank_head(RAW_ID, table, frame_bytes, group.payload_bytes),
    )


def _blank_head(codec: int, table: Table, frame_bytes: int, raw_bytes: int) -> bytes:
    """A head without identity and checksum."""
    header_bytes, count = align_up(FIXED_BYTES + ENTRY_BYTES * len(table)), len(table)
    fixed = _FIXED.pack(
        MAGIC, VERSION, header_bytes, 0, frame_bytes, raw_bytes, codec, count,
        *[_NO_PARENT] * 4, *[0] * 9, _RESERVED,
    )  # fmt: skip
    return (fixed + table.tobytes()).ljust(header_bytes, b"\0")


def pack_head(identity: Identity, codec: int, table: Table, frame_bytes: int, raw_bytes: int) -> bytes:
    """The head of a frame with its checksum; its length is a multiple of `ALIGNMENT`.

    Raises:
        ValueError: a digest is not 32 bytes, or a number does not fit in four.
    """
    head = bytearray(_blank_head(codec, table, frame_bytes, raw_bytes))
    _IDENTITY.pack_into(head, _IDENTITY_AT, *_identity_fields(identity))
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(head))
    return bytes(head)


def pack_raw_head(identity: Identity, layout: FrameLayout, checksums: Sequence[int]) -> bytearray:
    """A fast `pack_head` for raw frames, from the checksums of the sections.

    Raises:
        ValueError: a digest is not 32 bytes, or a number does not fit in four.
    """
    head = bytearray(layout.blank)
    _IDENTITY.pack_into(head, _IDENTITY_AT, *_identity_fields(identity))
    _fill_in(head, checksums)
    return head


def is_raw_head(front: memoryview, layout: FrameLayout, identity: Identity, checksums: Sequence[int]) -> bool:
    """Whether `front` begins with exactly the head that `pack_raw_head` would make for `identity`.

    Fields that are not compared (parent, depth and so on) are taken from `front`.
    """
    actual = front[: layout.header_bytes].tobytes()
    if actual[_IDENTITY_AT:_COMPARED_STOP] != identity.name + identity.fingerprint + identity.layout_digest:
        return False
    head = bytearray(layout.blank)
    head[_IDENTITY_AT:_IDENTITY_STOP] = actual[_IDENTITY_AT:_IDENTITY_STOP]
    _fill_in(head, checksums)
    return bytes(head) == actual


def _fill_in(head: bytearray, checksums: Sequence[int]) -> None:
    """Write the checksums of a raw frame's sections, and last that of the head."""
    if len(checksums) <= _FEW:  # below this, creating an array costs more
        for number, checksum in enumerate(checksums):
            _CHECKSUM.pack_into(head, FIXED_BYTES + 8 + ENTRY_BYTES * number, checksum)
    else:
        np.frombuffer(head, "<u8", _WORDS * len(checksums), FIXED_BYTES)[1::_WORDS] = checksums
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(head))


def _identity_fields(identity: Identity) -> tuple[bytes | int, ...]:
    """The fields of a head that identify the object."""
    name, fingerprint, layout_digest, parent, depth, tokens, group, part = identity
    parent = parent or _NO_PARENT
    if not len(name) == len(fingerprint) == len(layout_digest) == len(parent) == DIGEST_BYTES:
        lengths = [len(digest) for digest in (name, fingerprint, layout_digest, parent)]
        raise ValueError(f"digests of an identity must have {DIGEST_BYTES} bytes, got {lengths}")
    counts = (depth, tokens, group, *part)
    if min(counts) < 0 or max(counts) > _COUNT_MAX:
        raise ValueError(f"depth, tokens, group and part must be in 0..{_COUNT_MAX}, got {counts}")
    return (name, fingerprint, layout_digest, parent, *counts)


def head_bytes_of(front: memoryview | bytes) -> int:
    """Bytes that `read_head` needs, from the first `FIXED_BYTES` bytes of a frame.

    Raises:
        CorruptChunkError: the bytes are not the start of a frame.
        UnreadableChunkError: they are of an unknown version, and its head is not of this version's length.
    """
    if len(front) < FIXED_BYTES:
        raise CorruptChunkError(b"", f"cut off: {len(front)} bytes, a frame has at least {FIXED_BYTES}")
    magic, version, header_bytes, _, _, _, _, count, name, *_ = _FIXED.unpack_from(front)
    if magic != MAGIC:
        raise CorruptChunkError(b"", "wrong magic: not a frame")
    is_counted = 1 <= count <= SECTIONS_MAX
    if is_counted and header_bytes == align_up(FIXED_BYTES + ENTRY_BYTES * count):
        return header_bytes
    if version != VERSION:
        raise _of_version(version)
    if not is_counted:
        raise CorruptChunkError(name, f"section count {count} is not in 1..{SECTIONS_MAX}")
    raise CorruptChunkError(name, f"header of {header_bytes} bytes does not fit {count} sections")


def _of_version(version: int) -> UnreadableChunkError:
    return UnreadableChunkError(b"", other_version(version, VERSION))


def read_head(front: memoryview | bytes) -> Head:
    """Parse and check the head at the front of `front`, without a model.

    Args:
        front: at least `head_bytes_of(front)` bytes; bytes after the head are ignored.

    Raises:
        CorruptChunkError: the head is truncated, damaged, or inconsistent.
        UnreadableChunkError: it is of an unknown version, and not a head of this one whose version was damaged.
    """
    header_bytes = head_bytes_of(front)
    _, version, _, checksum, frame_bytes, raw_bytes, codec, count, *digests = _FIXED.unpack_from(front)
    name, fingerprint, layout_digest, parent, depth, tokens, group, *part, reserved = digests
    if len(front) < header_bytes and version == VERSION:
        raise CorruptChunkError(name, f"cut off: {len(front)} bytes of a header of {header_bytes}")
    head = bytearray(front[:header_bytes])
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, 0)
    _VERSION.pack_into(head, _VERSION_AT, VERSION)
    is_right = xxhash.xxh3_64_intdigest(head) == checksum
    if version != VERSION and not is_right:
        raise _of_version(version)
    if version != VERSION or not is_right:
        raise CorruptChunkError(name, "header checksum does not match")
    if reserved != _RESERVED or head.rstrip(b"\0")[FIXED_BYTES + ENTRY_BYTES * count :]:
        raise CorruptChunkError(name, "reserved bytes of the header are not zero")
    table: Table = np.frombuffer(head, ENTRY, count, FIXED_BYTES)
    payload_offsets = _check_table(name, table, codec, (header_bytes, frame_bytes, raw_bytes))
    parent_name = ObjectName(parent) if parent != _NO_PARENT else None
    identity = Identity(ObjectName(name), fingerprint, layout_digest, parent_name, depth, tokens, group, Part(*part))
    return Head(version, header_bytes, frame_bytes, raw_bytes, codec, identity, table, payload_offsets)


def expect(head: Head, group: GroupLayout, identity: Identity) -> None:
    """Compare a head with the wanted object.

    Raises:
        CorruptChunkError: it is of another object, which no reader finds under this name, or contradicts its layout.
        UnreadableChunkError: it is of another model or layout.
    """
    found = head.identity
    for what, got, wanted, error in (
        ("object name", found.name, identity.name, CorruptChunkError),
        ("fingerprint", found.fingerprint, identity.fingerprint, UnreadableChunkError),
        ("layout digest", found.layout_digest, identity.layout_digest, UnreadableChunkError),
    ):
        if got != wanted:
            raise error(identity.name, f"wrong {what} {got.hex()[:12]}, expected {wanted.hex()[:12]}")
    wanted_table = frame_layout(group).table
    if len(head.table) != len(wanted_table) or any(
        (head.table[column] != wanted_table[column]).any() for column in ("layer", "raw_bytes")
    ):
        raise CorruptChunkError(identity.name, "section table is not that of the layout")


def _check_table(name: bytes, table: Table, codec: int, sizes: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Check the consistency of a section table; returns the payload offset of each section.

    The lengths determine all offsets, so sections can neither overlap nor lie outside the frame.
    """
    header_bytes, frame_bytes, raw_bytes = sizes
    raw, stored, layer = (table[column].astype(np.int64) for column in ("raw_bytes", "stored_bytes", "layer"))
    is_raw = table["codec"] == RAW_ID
    if raw.min() < 1 or raw.max() > SECTION_BYTES_MAX:
        raise CorruptChunkError(name, f"a section's raw length is not in 1..{SECTION_BYTES_MAX}")
    if not (is_raw | (table["codec"] == codec)).all():
        raise CorruptChunkError(name, "a section has another codec than the frame")
    if not np.where(is_raw, stored == raw, (stored >= 1) & (stored < raw)).all():
        raise CorruptChunkError(name, "a section's stored length does not fit its raw length and codec")
    steps = np.diff(layer)
    if layer[0] != 0 or not ((steps == 0) | (steps == 1)).all():
        raise CorruptChunkError(name, "the sections' layers do not count up from 0")
    if (raw[:-1][steps == 0] % ALIGNMENT).any():
        raise CorruptChunkError(name, "a section that does not end its layer has an odd length")
    offsets, stop = _laid_out(stored, header_bytes)
    payload_offsets, payload_stop = _laid_out(raw, 0)
    if (table["offset"] != offsets.astype(np.uint64)).any():
        raise CorruptChunkError(name, "the sections' offsets do not follow from their lengths")
    if frame_bytes != stop:
        raise CorruptChunkError(name, f"frame of {frame_bytes} bytes, but its sections end at {stop}")
    if raw_bytes != payload_stop:
        raise CorruptChunkError(name, f"payload of {raw_bytes} bytes, but its sections end at {payload_stop}")
    return payload_offsets


def _laid_out(lengths: npt.NDArray[np.int64], start: int) -> tuple[npt.NDArray[np.int64], int]:
    """Offsets of pieces that begin at `start` and are padded to `ALIGNMENT`, and the end of the last padding."""
    padded: npt.NDArray[np.int64] = (lengths + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    stops: npt.NDArray[Any] = start + np.cumsum(padded)
    return stops - padded, int(stops[-1])
