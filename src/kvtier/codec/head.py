"""The head of a frame: what FORMAT.md says about it, as code. Written by `pack_head`, read by `read_head`.

`read_head` expects nothing of a frame but that it is one, so that a frame can be inspected with no model at hand;
`expect` then compares it with what a reader wants. Nothing that a head says is used before it is checked.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import CorruptChunkError
from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, align_up
from kvtier.types import ObjectName

MAGIC: Final = b"\x89KVT\r\n\x1a\n"
"""Like PNG's: a transfer that changes line ends or strips the eighth bit breaks it."""

VERSION: Final = 1
FIXED_BYTES: Final = 256
ENTRY_BYTES: Final = 32
SECTIONS_MAX: Final = 1 << 16
RAW_ID: Final = 0

Table = npt.NDArray[np.void]
"""A section table; its fields are `ENTRY`'s."""

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

#                        magic version header checksum frame raw codec sections, 4 digests, parent..rank, reserved
_FIXED = struct.Struct("<8s    I       I      Q        Q     Q   I     I         32s32s32s32s IIII 64s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 16
_IDENTITY = struct.Struct("<32s32s32s32s IIII")
_IDENTITY_AT, _COMPARED_STOP, _IDENTITY_STOP = 48, 144, 192
_FEW = 8
_WORDS = ENTRY_BYTES // 8  # of an entry; its checksum is the second
DIGEST_BYTES: Final = 32
_NO_PARENT = bytes(DIGEST_BYTES)
_RESERVED = bytes(64)
_COUNT_MAX = (1 << 32) - 1


class Identity(NamedTuple):
    """Which object a frame holds. A reader compares the first three; the rest helps whoever rebuilds an index."""

    name: ObjectName
    fingerprint: bytes
    """32 bytes, `Fingerprint.digest`."""
    layout_digest: bytes
    """32 bytes, `KvLayout.digest(group)`."""
    parent: ObjectName | None = None
    """The object before it in its prefix; None at the start, for other than history groups, or if unknown."""
    depth: int = 0
    """Objects before it in its prefix."""
    tokens: int = 0
    """Tokens that the chunk covers."""
    group: int = 0
    rank: int = 0


class Section(NamedTuple):
    """One entry of a section table."""

    layer: int
    payload_offset: int
    raw_bytes: int
    offset: int
    """In the frame."""
    stored_bytes: int
    extent_bytes: int
    """Stored bytes and their padding: what the checksum covers, and what a read must bring."""
    checksum: int
    codec: int


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A frame's head that has passed every check that needs no model."""

    version: int
    header_bytes: int
    frame_bytes: int
    raw_bytes: int
    """Bytes of the payload, padding included."""
    codec: int
    """The codec asked for; single sections may be raw all the same."""
    identity: Identity
    table: Table = field(repr=False)
    _payload_offsets: npt.NDArray[np.int64] = field(repr=False)

    @property
    def sections(self) -> list[Section]:
        """All sections, in order."""
        return self.sections_of(0, self.layers)

    @property
    def layers(self) -> int:
        """How many layers the payload has."""
        return int(self.table["layer"][-1]) + 1

    def sections_of(self, start_layer: int, stop_layer: int) -> list[Section]:
        """The sections of layers `start_layer` up to, but without, `stop_layer`.

        Raises:
            ValueError: no such layers, or none.
        """
        start, stop = self._rows(start_layer, stop_layer)
        rows: list[tuple[int, ...]] = self.table[start:stop].tolist()
        offsets: list[int] = self._payload_offsets[start:stop].tolist()
        return [
            Section(layer, at, raw_bytes, offset, stored_bytes, align_up(stored_bytes), checksum, codec)
            for at, (offset, checksum, raw_bytes, stored_bytes, layer, codec) in zip(offsets, rows, strict=True)
        ]

    def span(self, start_layer: int, stop_layer: int) -> tuple[int, int]:
        """(offset, length) in the frame of layers `start_layer` up to, but without, `stop_layer`.

        Both are multiples of `ALIGNMENT`. Ask for several layers at once: an I/O below 1 MiB is mostly latency.

        Raises:
            ValueError: no such layers, or none.
        """
        start, stop = self._rows(start_layer, stop_layer)
        offset, last = int(self.table["offset"][start]), self.table[stop - 1]
        return offset, int(last["offset"]) + align_up(int(last["stored_bytes"])) - offset

    def _rows(self, start_layer: int, stop_layer: int) -> tuple[int, int]:
        if not 0 <= start_layer < stop_layer <= self.layers:
            raise ValueError(f"layers {start_layer}..{stop_layer} must be a part of 0..{self.layers}, not empty")
        start, stop = np.searchsorted(self.table["layer"], (start_layer, stop_layer))
        return int(start), int(stop)


class Plan(NamedTuple):
    """What is the same for all raw frames of one group."""

    header_bytes: int
    frame_bytes: int
    table: Table
    """Complete but for the checksums, which are 0."""
    extents: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each section with its padding."""
    paddings: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each piece of padding that is not empty."""
    blank: bytes
    """The head of every raw frame, all that differs between them set to 0."""


@lru_cache(maxsize=256)
def plan(group: GroupLayout) -> Plan:
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
    fixed = _FIXED.pack(
        MAGIC, VERSION, header_bytes, 0, frame_bytes, group.payload_bytes, RAW_ID, count,
        *[_NO_PARENT] * 4, *[0] * 4, _RESERVED,
    )  # fmt: skip
    extents = tuple((row[0], row[0] + align_up(row[2])) for row in rows)
    paddings = tuple((row[0] + row[2], stop) for row, (_, stop) in zip(rows, extents, strict=True))
    return Plan(
        header_bytes,
        frame_bytes,
        table,
        extents,
        tuple((start, stop) for start, stop in paddings if start < stop),
        (fixed + table.tobytes()).ljust(header_bytes, b"\0"),
    )


def pack_head(identity: Identity, codec: int, table: Table, frame_bytes: int, raw_bytes: int) -> bytes:
    """The head of a frame, checksum included; its length is a multiple of `ALIGNMENT`.

    Raises:
        ValueError: a digest that is not 32 bytes, or a number that does not fit in four.
    """
    header_bytes = align_up(FIXED_BYTES + ENTRY_BYTES * len(table))
    head = bytearray((bytes(FIXED_BYTES) + table.tobytes()).ljust(header_bytes, b"\0"))
    _finish(head, identity, codec, len(table), frame_bytes, raw_bytes)
    return bytes(head)


def pack_raw_head(identity: Identity, known: Plan, checksums: Sequence[int]) -> bytearray:
    """`pack_head` of a raw frame with these checksums of its sections, in a fraction of the time.

    Raises:
        ValueError: a digest that is not 32 bytes, or a number that does not fit in four.
    """
    head = bytearray(known.blank)
    _IDENTITY.pack_into(head, _IDENTITY_AT, *_told(identity))
    _fill_in(head, checksums)
    return head


def is_raw_head(front: memoryview, known: Plan, identity: Identity, checksums: Sequence[int]) -> bool:
    """Whether `front` begins, byte for byte, with what `pack_raw_head` makes for the object `identity`.

    What a reader does not compare (parent, depth and so on) is taken from there.
    """
    told = front[: known.header_bytes].tobytes()
    if told[_IDENTITY_AT:_COMPARED_STOP] != identity.name + identity.fingerprint + identity.layout_digest:
        return False
    head = bytearray(known.blank)
    head[_IDENTITY_AT:_IDENTITY_STOP] = told[_IDENTITY_AT:_IDENTITY_STOP]
    _fill_in(head, checksums)
    return bytes(head) == told


def _fill_in(head: bytearray, checksums: Sequence[int]) -> None:
    """The checksums of a raw frame's sections, and last that of its head."""
    if len(checksums) <= _FEW:  # then the set-up of an array costs more
        for number, checksum in enumerate(checksums):
            _CHECKSUM.pack_into(head, FIXED_BYTES + 8 + ENTRY_BYTES * number, checksum)
    else:
        np.frombuffer(head, "<u8", _WORDS * len(checksums), FIXED_BYTES)[1::_WORDS] = checksums
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(head))


def _finish(head: bytearray, identity: Identity, codec: int, count: int, frame_bytes: int, raw_bytes: int) -> None:
    """Fill in what stands before the section table; last the checksum of it all."""
    _FIXED.pack_into(
        head, 0, MAGIC, VERSION, len(head), 0, frame_bytes, raw_bytes, codec, count, *_told(identity), _RESERVED
    )
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(head))


def _told(identity: Identity) -> tuple[bytes, bytes, bytes, bytes, int, int, int, int]:
    """What a head says of `identity`."""
    name, fingerprint, layout_digest, parent, depth, tokens, group, rank = identity
    parent = parent or _NO_PARENT
    if not len(name) == len(fingerprint) == len(layout_digest) == len(parent) == DIGEST_BYTES:
        lengths = [len(digest) for digest in (name, fingerprint, layout_digest, parent)]
        raise ValueError(f"digests of an identity must have {DIGEST_BYTES} bytes, got {lengths}")
    counts = (depth, tokens, group, rank)
    if min(counts) < 0 or max(counts) > _COUNT_MAX:
        raise ValueError(f"depth, tokens, group and rank must be in 0..{_COUNT_MAX}, got {counts}")
    return name, fingerprint, layout_digest, parent, depth, tokens, group, rank


def head_bytes_told(front: memoryview | bytes) -> int:
    """How many bytes `read_head` needs, as told by a frame's first `FIXED_BYTES` bytes.

    Raises:
        CorruptChunkError: these bytes begin no frame of a version that is known here.
    """
    if len(front) < FIXED_BYTES:
        raise CorruptChunkError(b"", f"cut off: {len(front)} bytes, a frame has at least {FIXED_BYTES}")
    magic, version, header_bytes, _, _, _, _, count, name, *_ = _FIXED.unpack_from(front)
    if magic != MAGIC:
        raise CorruptChunkError(b"", "wrong magic: not a frame")
    if version != VERSION:
        raise CorruptChunkError(b"", f"unknown version {version}; known here: {VERSION}")
    if not 1 <= count <= SECTIONS_MAX:
        raise CorruptChunkError(name, f"section count {count} is not in 1..{SECTIONS_MAX}")
    if header_bytes != align_up(FIXED_BYTES + ENTRY_BYTES * count):
        raise CorruptChunkError(name, f"header of {header_bytes} bytes does not fit {count} sections")
    return header_bytes


def read_head(front: memoryview | bytes) -> Head:
    """Parse and check the head at the front of `front`, expecting nothing but that it is one.

    Args:
        front: at least as many bytes as `head_bytes_told` says; whatever follows the head is ignored.

    Raises:
        CorruptChunkError: it is cut off, of an unknown version, damaged, or contradicts itself.
    """
    header_bytes = head_bytes_told(front)
    _, version, _, checksum, frame_bytes, raw_bytes, codec, count, *digests = _FIXED.unpack_from(front)
    name, fingerprint, layout_digest, parent, depth, tokens, group, rank, reserved = digests
    if len(front) < header_bytes:
        raise CorruptChunkError(name, f"cut off: {len(front)} bytes of a header of {header_bytes}")
    head = bytearray(front[:header_bytes])
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, 0)
    if xxhash.xxh3_64_intdigest(head) != checksum:
        raise CorruptChunkError(name, "header checksum does not match")
    if reserved != _RESERVED or head.rstrip(b"\0")[FIXED_BYTES + ENTRY_BYTES * count :]:
        raise CorruptChunkError(name, "reserved bytes of the header are not zero")
    table: Table = np.frombuffer(head, ENTRY, count, FIXED_BYTES)
    payload_offsets = _check_table(name, table, codec, (header_bytes, frame_bytes, raw_bytes))
    known_parent = ObjectName(parent) if parent != _NO_PARENT else None
    identity = Identity(ObjectName(name), fingerprint, layout_digest, known_parent, depth, tokens, group, rank)
    return Head(version, header_bytes, frame_bytes, raw_bytes, codec, identity, table, payload_offsets)


def expect(head: Head, group: GroupLayout, identity: Identity) -> None:
    """Compare a head with the object that was asked for.

    Raises:
        CorruptChunkError: it is another object's, another model's, or of another layout.
    """
    found = head.identity
    for what, got, wanted in (
        ("object name", found.name, identity.name),
        ("fingerprint", found.fingerprint, identity.fingerprint),
        ("layout digest", found.layout_digest, identity.layout_digest),
    ):
        if got != wanted:
            raise CorruptChunkError(identity.name, f"wrong {what} {got.hex()[:12]}, expected {wanted.hex()[:12]}")
    wanted_table = plan(group).table
    if len(head.table) != len(wanted_table) or any(
        (head.table[column] != wanted_table[column]).any() for column in ("layer", "raw_bytes")
    ):
        raise CorruptChunkError(identity.name, "section table is not that of the layout")


def _check_table(name: bytes, table: Table, codec: int, sizes: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Check what a section table says about itself; returns the payload offset of each section.

    Everything is compared with the one table that these lengths allow, so nothing can overlap or lie outside.
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
    """Where pieces lie that begin at `start` and are each padded to `ALIGNMENT`; and where the last padding ends."""
    padded: npt.NDArray[np.int64] = (lengths + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    stops: npt.NDArray[Any] = start + np.cumsum(padded)
    return stops - padded, int(stops[-1])
