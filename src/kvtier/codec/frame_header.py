"""The head of a frame, as in FORMAT.md. `pack_head` writes it and `read_head` reads it.

`read_head` requires neither a model nor a key, so that any frame can be inspected. `expect` then compares the head with
the wanted object. No field is used before it is checked.
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

VERSION: Final = 3
FIXED_BYTES: Final = 256
ENTRY_BYTES: Final = 48
SECTIONS_MAX: Final = 1 << 16
RAW_ID: Final = 0
TAG_BYTES: Final = 16
SALT_BYTES: Final = 32
METADATA_NUMBER: Final = SECTIONS_MAX
"""The metadata block's message number in the seal. Sections have the numbers below it."""

METADATA_BYTES: Final = 512
"""Size of the metadata block with its tag, but without token ids."""
TOKENS_MAX: Final = 1 << 20
"""Maximum number of tokens of a chunk whose ids fit in a metadata block."""
EXTRAS_BYTES_MAX: Final = 388
"""Maximum bytes of extras in a metadata block."""

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
        ("tag", "V16"),
    ]
)

#                        magic version header checksum frame raw metadata sections, name model key-check salt reserved
_FIXED = struct.Struct("<8s    I       I      Q        Q     Q   I        I         32s  16s   16s       32s  112s")
_METADATA = struct.Struct("<32s III 6I II 32s")  # parent, depth tokens group, part, counts of ids and extras, key
_TEXT = struct.Struct("<II 32s")  # the last three fields of `_METADATA`
_TEXT_AT = _METADATA.size - _TEXT.size
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 16
_VERSION = struct.Struct("<I")
_VERSION_AT = 8
_NAME_AT, _SEAL_AT, _SEAL_STOP = 48, 96, 144
SEAL: Final = slice(_SEAL_AT, _SEAL_STOP)
"""Place of the key check and the salt."""
_FEW = 8
_WORDS = ENTRY_BYTES // 8  # u64 words of an entry; its checksum is the second
DIGEST_BYTES: Final = 32
MODEL_BYTES: Final = 16
NO_SEAL: Final = bytes(_SEAL_STOP - _SEAL_AT)
_NO_PARENT = bytes(DIGEST_BYTES)
_RESERVED = bytes(112)
_COUNT_MAX = (1 << 32) - 1
_NO_PART = Part(0, 1)


class Identity(NamedTuple):
    """The object that a frame holds. Readers compare the name. The other fields help to rebuild an index."""

    name: ObjectName
    model: bytes = bytes(MODEL_BYTES)
    """16 bytes, `keys.secret.model_id`."""
    parent: ObjectName | None = None
    """The preceding object of the prefix; None at the start, for groups without history, or if unknown."""
    depth: int = 0
    """Number of preceding objects."""
    tokens: int = 0
    """Number of tokens in the chunk."""
    group: int = 0
    part: Part = _NO_PART
    """The part of the group that the object holds, such as its layers and heads."""
    key: bytes = b""
    """Key of the chunk. Only a sealed frame with a text has it."""
    text: bytes = b""
    """Ids of all tokens of the chunk, u32 each, then at most `EXTRAS_BYTES_MAX` bytes of extras. Empty if the frame has
    no text; only a sealed frame can have one."""


class Section(NamedTuple):
    """One entry of a section table."""

    layer: int
    payload_offset: int
    raw_bytes: int
    offset: int
    """Offset in the frame."""
    stored_bytes: int
    extent_bytes: int
    """Stored bytes and the padding after them."""
    checksum: int
    codec: int
    tag: bytes = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A frame's head that has passed every check that requires neither model nor key."""

    version: int
    header_bytes: int
    frame_bytes: int
    raw_bytes: int
    """Bytes of the payload, including padding."""
    identity: Identity
    """The object. For a sealed frame, it contains only name and model."""
    metadata: slice
    """Place of the metadata block in the frame."""
    seal: bytes
    """Key check (16 bytes) and salt (32 bytes) of a sealed frame; otherwise empty."""
    table: Table = field(repr=False)
    _payload_offsets: npt.NDArray[np.int64] = field(repr=False)
    head: bytes = field(repr=False)
    """The bytes of the head, with zeros as checksum."""

    @property
    def sections(self) -> list[Section]:
        """All sections, in order."""
        rows: list[tuple[Any, ...]] = self.table.tolist()
        stops = [*(row[0] for row in rows[1:]), self.frame_bytes]
        return [
            Section(layer, at, raw_bytes, offset, stored_bytes, stop - offset, checksum, codec, tag)
            for at, stop, (offset, checksum, raw_bytes, stored_bytes, layer, codec, tag) in zip(
                self._payload_offsets.tolist(), stops, rows, strict=True
            )
        ]

    @property
    def layers(self) -> int:
        """Number of layers in the payload."""
        return int(self.table["layer"][-1]) + 1

    @property
    def codecs(self) -> list[int]:
        """Ids of the sections' codecs, without repetitions."""
        return np.unique(self.table["codec"]).tolist()


class FrameLayout(NamedTuple):
    """The parts that all raw frames of one group share."""

    header_bytes: int
    frame_bytes: int
    raw_bytes: int
    """Bytes of the payload, including padding."""
    metadata: slice
    """Place of the metadata block in the frame."""
    table: Table
    """The section table, complete except for checksums and tags, which are 0."""
    extents: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each section with its padding."""
    paddings: tuple[tuple[int, int], ...]
    """(start, stop) in the frame of each padding that is not empty."""
    blank: bytes
    """The head of a raw frame, with zeros in the fields that differ."""


@lru_cache(maxsize=256)
def frame_layout(group: GroupLayout) -> FrameLayout:
    """Return the layout of the raw frames of `group`.

    Raises:
        ValueError: the group has more than `SECTIONS_MAX` sections, or a chunk more than `TOKENS_MAX` tokens.
    """
    cuts, count = group.sections, len(group.sections)
    if count > SECTIONS_MAX:
        raise ValueError(f"a frame has at most {SECTIONS_MAX} sections, but this group has {count}: use smaller chunks")
    if group.chunk_tokens > TOKENS_MAX:
        raise ValueError(f"a chunk has at most {TOKENS_MAX} tokens, but this one has {group.chunk_tokens}")
    metadata = slice(FIXED_BYTES + ENTRY_BYTES * count, _metadata_stop(count, group.chunk_tokens))
    header_bytes = align_up(metadata.stop)
    rows = [(header_bytes + cut.offset, 0, cut.size_bytes, cut.size_bytes, cut.layer, RAW_ID, b"") for cut in cuts]
    starts = [row[0] for row in rows]
    frame_bytes = header_bytes + group.payload_bytes
    extents = tuple(zip(starts, [*starts[1:], frame_bytes], strict=True))
    paddings = [(row[0] + row[2], stop) for row, (_, stop) in zip(rows, extents, strict=True)]
    table = np.array(rows, ENTRY)
    return FrameLayout(
        header_bytes,
        frame_bytes,
        group.payload_bytes,
        metadata,
        table,
        extents,
        tuple((start, stop) for start, stop in paddings if start < stop),
        _blank_head(table, (header_bytes, frame_bytes, group.payload_bytes, metadata.stop - metadata.start)),
    )


def _metadata_stop(sections: int, ids: int) -> int:
    return FIXED_BYTES + ENTRY_BYTES * sections + METADATA_BYTES + 4 * ids


def _blank_head(table: Table, sizes: tuple[int, int, int, int]) -> bytes:
    """Return a head in which identity, metadata and checksum are zero."""
    header_bytes, frame_bytes, raw_bytes, metadata_bytes = sizes
    fixed = _FIXED.pack(
        MAGIC, VERSION, header_bytes, 0, frame_bytes, raw_bytes, metadata_bytes, len(table),
        b"", b"", b"", b"", _RESERVED,
    )  # fmt: skip
    return (fixed + table.tobytes()).ljust(header_bytes, b"\0")


def pack_head(identity: Identity, layout: FrameLayout, table: Table, frame_bytes: int) -> bytearray:
    """Return the head of a frame, to be completed by `finish_head`. Its length is a multiple of `ALIGNMENT`.

    Raises:
        ValueError: a digest has the wrong length, or a number does not fit in four bytes.
    """
    metadata_bytes = layout.metadata.stop - layout.metadata.start
    head = bytearray(_blank_head(table, (layout.header_bytes, frame_bytes, layout.raw_bytes, metadata_bytes)))
    _pack_identity(head, layout, identity)
    return head


def finish_head(head: bytearray) -> None:
    """Write the checksum of the head. The head must not change afterwards."""
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, 0)
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(head))


def pack_raw_head(identity: Identity, layout: FrameLayout, checksums: Sequence[int]) -> bytearray:
    """Return the finished head of a raw frame, from its sections' checksums. This is faster than `pack_head`.

    Raises:
        ValueError: a digest has the wrong length, or a number does not fit in four bytes.
    """
    head = bytearray(layout.blank)
    _pack_identity(head, layout, identity)
    _fill_in(head, checksums)
    return head


def is_raw_head(front: memoryview, layout: FrameLayout, identity: Identity, checksums: Sequence[int]) -> bool:
    """Return whether `front` begins with the head that `pack_raw_head` would make for the object of `identity`.

    Model and metadata are not compared, but taken from `front`.
    """
    actual = front[: layout.header_bytes].tobytes()
    if actual[_NAME_AT : _NAME_AT + DIGEST_BYTES] != identity.name:
        return False
    head = bytearray(layout.blank)
    head[_NAME_AT:_SEAL_AT] = actual[_NAME_AT:_SEAL_AT]
    head[layout.metadata] = actual[layout.metadata]
    _fill_in(head, checksums)
    return bytes(head) == actual


def _fill_in(head: bytearray, checksums: Sequence[int]) -> None:
    """Write the checksums of a raw frame's sections, then the head's own."""
    if len(checksums) <= _FEW:  # for so few, creating an array costs more
        for number, checksum in enumerate(checksums):
            _CHECKSUM.pack_into(head, FIXED_BYTES + 8 + ENTRY_BYTES * number, checksum)
    else:
        np.frombuffer(head, "<u8", _WORDS * len(checksums), FIXED_BYTES)[1::_WORDS] = checksums
    finish_head(head)


def _pack_identity(head: bytearray, layout: FrameLayout, identity: Identity) -> None:
    name, model, parent, depth, tokens, group, part, _, _ = identity
    parent = parent or _NO_PARENT
    lengths = (len(name), len(model), len(parent))
    if lengths != (DIGEST_BYTES, MODEL_BYTES, DIGEST_BYTES):
        raise ValueError(f"name, model and parent of an identity must have 32, 16 and 32 bytes, got {lengths}")
    counts = (depth, tokens, group, *part)
    if min(counts) < 0 or max(counts) > _COUNT_MAX:
        raise ValueError(f"depth, tokens, group and part must be in 0..{_COUNT_MAX}, got {counts}")
    head[_NAME_AT:_SEAL_AT] = name + model
    _METADATA.pack_into(head, layout.metadata.start, parent, *counts, 0, 0, b"")


def pack_text(head: bytearray, metadata: slice, identity: Identity) -> None:
    """Write key, token ids and extras into the plain metadata of a frame that is sealed afterwards.

    Raises:
        ValueError: the key has the wrong length, or the text is not that of a full chunk.
    """
    ids_bytes = metadata.stop - metadata.start - METADATA_BYTES
    extras_bytes = len(identity.text) - ids_bytes
    if len(identity.key) != DIGEST_BYTES or not ids_bytes or not 0 <= extras_bytes <= EXTRAS_BYTES_MAX:
        raise ValueError(
            f"the key has {len(identity.key)} bytes and the text {len(identity.text)}; allowed: {DIGEST_BYTES}, and "
            f"{ids_bytes} to {ids_bytes + EXTRAS_BYTES_MAX}"
        )
    _TEXT.pack_into(head, metadata.start + _TEXT_AT, ids_bytes // 4, extras_bytes, identity.key)
    start = metadata.start + _METADATA.size
    head[start : start + len(identity.text)] = identity.text


def head_bytes_of(front: memoryview | bytes) -> int:
    """Tell from the first `FIXED_BYTES` bytes of a frame how many bytes `read_head` requires.

    Raises:
        CorruptChunkError: the bytes are not the start of a frame.
        UnreadableChunkError: the version is unknown, and the head's length does not fit this version either.
    """
    if len(front) < FIXED_BYTES:
        raise CorruptChunkError(b"", f"cut off: {len(front)} bytes, but a frame has at least {FIXED_BYTES}")
    magic, version, header_bytes, _, _, _, metadata_bytes, count, name, *_ = _FIXED.unpack_from(front)
    if magic != MAGIC:
        raise CorruptChunkError(b"", "wrong magic number: not a frame")
    ids, odd = divmod(metadata_bytes - METADATA_BYTES, 4)
    is_counted, has_metadata = 1 <= count <= SECTIONS_MAX, not odd and 0 <= ids <= TOKENS_MAX
    if is_counted and has_metadata and header_bytes == align_up(_metadata_stop(count, ids)):
        return header_bytes
    if version != VERSION:
        raise _of_version(version)
    if not is_counted:
        raise CorruptChunkError(name, f"its section count {count} is not in 1..{SECTIONS_MAX}")
    if not has_metadata:
        raise CorruptChunkError(name, f"its metadata block of {metadata_bytes} bytes is invalid")
    raise CorruptChunkError(name, f"its header of {header_bytes} bytes does not fit {count} sections and {ids} ids")


def _of_version(version: int) -> UnreadableChunkError:
    return UnreadableChunkError(b"", other_version(version, VERSION), "version", version)


def read_head(front: memoryview | bytes) -> Head:
    """Parse and check the head at the front of `front`, without a model or a key.

    Args:
        front: at least `head_bytes_of(front)` bytes; bytes after the head are ignored.

    Raises:
        CorruptChunkError: the head is truncated, damaged, or inconsistent.
        UnreadableChunkError: the version is unknown. If only the version field of a head is damaged, the head counts as
            damaged instead.
    """
    header_bytes = head_bytes_of(front)
    fixed = _FIXED.unpack_from(front)
    _, version, _, checksum, frame_bytes, raw_bytes, metadata_bytes, count, name, model, check, salt, reserved = fixed
    if len(front) < header_bytes and version == VERSION:
        raise CorruptChunkError(name, f"cut off: {len(front)} bytes of a header of {header_bytes}")
    head = bytearray(front[:header_bytes])
    _CHECKSUM.pack_into(head, _CHECKSUM_AT, 0)
    _VERSION.pack_into(head, _VERSION_AT, VERSION)
    is_right = xxhash.xxh3_64_intdigest(head) == checksum
    if version != VERSION and not is_right:
        raise _of_version(version)
    if version != VERSION or not is_right:
        raise CorruptChunkError(name, "its header checksum does not match")
    metadata = slice(FIXED_BYTES + ENTRY_BYTES * count, FIXED_BYTES + ENTRY_BYTES * count + metadata_bytes)
    if reserved != _RESERVED or head.rstrip(b"\0")[metadata.stop :]:
        raise CorruptChunkError(name, "the reserved bytes of its header are not zero")
    table: Table = np.frombuffer(head, ENTRY, count, FIXED_BYTES)
    payload_offsets = _check_table(name, table, (header_bytes, frame_bytes, raw_bytes))
    seal = check + salt
    identity = Identity(ObjectName(name), model)
    if seal == NO_SEAL:
        seal, identity = b"", _with_metadata(identity, head[metadata])
        if any(table["tag"].tobytes()):
            raise CorruptChunkError(name, "a section without a seal has a tag")
    return Head(
        version, header_bytes, frame_bytes, raw_bytes, identity, metadata, seal, table, payload_offsets, bytes(head)
    )


def _with_metadata(identity: Identity, block: bytearray) -> Identity:
    parent, depth, tokens, group, *part, _, _, _ = _METADATA.unpack_from(block)
    return Identity(*identity[:2], ObjectName(parent) if any(parent) else None, depth, tokens, group, Part(*part))


def opened_identity(head: Head, metadata: memoryview) -> Identity:
    """Return the identity in the head of a sealed frame, from its decrypted metadata.

    Args:
        head: head of the frame.
        metadata: its plain metadata without the tag, from `frame.open_seal`.

    Raises:
        CorruptChunkError: the counts of ids and extras break their rules, or the bytes after them are not zero.
    """
    block = bytearray(metadata)
    ids, extras_bytes, key = _TEXT.unpack_from(block, _TEXT_AT)
    full = (head.metadata.stop - head.metadata.start - METADATA_BYTES) // 4
    start = _METADATA.size
    stop = start + 4 * ids + extras_bytes
    if ids not in (0, full) or extras_bytes > (EXTRAS_BYTES_MAX if ids else 0) or any(block[stop:]):
        raise CorruptChunkError(
            head.identity.name, f"its metadata with {ids} ids and {extras_bytes} bytes of extras is invalid"
        )
    return _with_metadata(head.identity, block)._replace(key=key if ids else b"", text=bytes(block[start:stop]))


def expect(head: Head, group: GroupLayout, identity: Identity) -> None:
    """Compare a head with the wanted object.

    Raises:
        CorruptChunkError: the head belongs to another object, or contradicts the layout. A name stands for one object
            in one layout, so no reader can use such a frame under this name.
    """
    if head.identity.name != identity.name:
        found, wanted = head.identity.name.hex()[:12], identity.name.hex()[:12]
        raise CorruptChunkError(identity.name, f"it has the wrong object name {found} instead of {wanted}")
    wanted = frame_layout(group)
    if head.metadata != wanted.metadata or any(
        (head.table[column] != wanted.table[column]).any() for column in ("layer", "raw_bytes")
    ):
        raise CorruptChunkError(identity.name, "its section table does not match the layout")


def _check_table(name: bytes, table: Table, sizes: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Check that a section table is consistent, and return the payload offset of each section.

    The lengths determine all offsets, so sections can neither overlap nor lie outside the frame.
    """
    header_bytes, frame_bytes, raw_bytes = sizes
    raw, stored, layer = (table[column].astype(np.int64) for column in ("raw_bytes", "stored_bytes", "layer"))
    is_raw = table["codec"] == RAW_ID
    if raw.min() < 1 or raw.max() > SECTION_BYTES_MAX:
        raise CorruptChunkError(name, f"a section's raw length is not in 1..{SECTION_BYTES_MAX}")
    if not np.where(is_raw, stored == raw, (stored >= 1) & (stored < raw)).all():
        raise CorruptChunkError(name, "a section's stored length does not fit its raw length and codec")
    steps = np.diff(layer)
    if layer[0] != 0 or not ((steps == 0) | (steps == 1)).all():
        raise CorruptChunkError(name, "the sections' layers do not count up from 0")
    payload_offsets, payload_bytes = _in_slot(raw, steps)
    if is_raw.all():
        offsets, stop = header_bytes + payload_offsets, header_bytes + payload_bytes
    else:
        ends: npt.NDArray[Any] = header_bytes + np.cumsum(stored)
        offsets, stop = ends - stored, align_up(int(ends[-1]))
    if (table["offset"] != offsets.astype(np.uint64)).any():
        raise CorruptChunkError(name, "the sections' offsets do not follow from their lengths")
    if frame_bytes != stop:
        raise CorruptChunkError(
            name, f"its frame of {frame_bytes} bytes does not fit its sections, which end at {stop}"
        )
    if raw_bytes != payload_bytes:
        raise CorruptChunkError(
            name, f"its payload of {raw_bytes} bytes does not fit its sections, which end at {payload_bytes}"
        )
    return payload_offsets


def _in_slot(raw: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Return the sections' offsets in a payload with layers at multiples of `ALIGNMENT`, and the payload's length."""
    firsts = np.concatenate(([0], np.flatnonzero(steps) + 1))  # the first section of each layer
    layers: npt.NDArray[np.int64] = np.add.reduceat(raw, firsts)
    padded: npt.NDArray[np.int64] = -layers % ALIGNMENT
    before: npt.NDArray[Any] = np.cumsum(padded) - padded  # padding of the layers before
    counts = np.diff(np.concatenate((firsts, [len(raw)])))
    stops: npt.NDArray[Any] = np.cumsum(raw)
    return stops - raw + np.repeat(before, counts), int(stops[-1] + padded.sum())
