"""On-disk structures of the disk tier: segment headers and index blocks (FORMAT.md, Disk tier).

    header | frame | frame | frame ...            free            ... index block 1 | index block 0
    0        4096                                                                       the segment's end

Frames grow from the front and index blocks from the end. A segment is full when they would meet. A block is written
once, so a crash cannot damage earlier entries; only `DiskTier.delete` blanks an entry in place.

A block is valid only if its checksum matches and it has the generation of its segment's header.
"""

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import other_version
from kvtier.layout import ALIGNMENT

VERSION: Final = 1
HEADER_MAGIC: Final = b"kvt\x89segm"
BLOCK_MAGIC: Final = b"kvt\x89indx"
BLOCK_BYTES: Final = ALIGNMENT
STORE_ID_BYTES: Final = 16
GENERATION_MAX: Final = (1 << 63) - 1
"""Nanoseconds from 1970 to the year 2262."""

ENTRY: Final = np.dtype(
    [("name", "<u8", (4,)), ("block", "<u4"), ("size_bytes", "<u4"), ("reserved", "<u8")]
)  # 48 bytes, with the name as four words
ENTRIES_PER_BLOCK: Final = 84

Entries = npt.NDArray[np.void]
"""Rows of `ENTRY`. `block` counts units of 4096 bytes from the segment's start. `size_bytes` is 0 in a blanked
entry."""

BLOCK: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("count", "<u4"),
        ("store_id", "<u8", (2,)),
        ("generation", "<u8"),
        ("number", "<u4"),
        ("reserved", "<u4"),
        ("checksum", "<u8"),
        ("reserved_too", "<u8"),
        ("entries", ENTRY, (ENTRIES_PER_BLOCK,)),
    ]
)  # `_BLOCK` and its entries, to parse many blocks together

Blocks = npt.NDArray[np.void]
"""Rows of `BLOCK`."""

#                         magic version reserved store-id generation segment_bytes checksum
_HEADER = struct.Struct("<8s    I       I        16s      Q          Q             Q")
#                         magic version count    store-id generation number reserved checksum reserved
_BLOCK = struct.Struct("<8s     I       I        16s      Q          I      I        Q        8s")
_CHECKSUM = struct.Struct("<Q")
_HEADER_CHECKSUM_AT = 48
_BLOCK_CHECKSUM_AT = 48


SEGMENT_BYTES_MIN: Final = 4 * BLOCK_BYTES
"""Enough for a header, a frame of one block and two index blocks."""

SEGMENT_BYTES_MAX: Final = BLOCK_BYTES << 32
"""A larger segment would have blocks whose numbers exceed the 32 bits of an entry."""


SEGMENTS_WANTED: Final = 64


class Header(NamedTuple):
    """Content of a segment's first block."""

    store_id: bytes
    generation: int
    """Orders segments by start time, and never repeats within a store. 0 means none."""
    segment_bytes: int


def pack_header(header: Header) -> bytes:
    """Pack the first block of a segment."""
    packed = bytearray(
        _HEADER.pack(HEADER_MAGIC, VERSION, 0, header.store_id, header.generation, header.segment_bytes, 0)
    )
    packed = packed.ljust(BLOCK_BYTES, b"\0")
    _CHECKSUM.pack_into(packed, _HEADER_CHECKSUM_AT, xxhash.xxh3_64_intdigest(packed))
    return bytes(packed)


def read_header(block: memoryview | bytes) -> Header | str:
    """Return the header in `block`, or the reason why it is invalid."""
    if len(block) != BLOCK_BYTES:
        return f"{len(block)} bytes"
    magic, version, _, store_id, generation, segment_bytes, checksum = _HEADER.unpack_from(block)
    if magic != HEADER_MAGIC:
        return "not begun" if not any(block) else "wrong magic number"
    if version != VERSION:
        return other_version(version, VERSION)
    if _checksum(block, _HEADER_CHECKSUM_AT) != checksum:
        return "checksum does not match"
    if not 0 < generation <= GENERATION_MAX or not is_segment_size(segment_bytes):
        return f"generation {generation} or size {segment_bytes} is out of range"
    return Header(store_id, generation, segment_bytes)


def is_foreign(block: bytes) -> bool:
    """Return whether `block`, the first of a file, was written by anything but this version of the disk tier."""
    magic, version = _HEADER.unpack_from(block.ljust(BLOCK_BYTES, b"\0"))[:2]
    return any(block) and (magic != HEADER_MAGIC or version != VERSION)


def is_segment_size(size_bytes: int) -> bool:
    """Return whether `size_bytes` is a valid segment size."""
    return SEGMENT_BYTES_MIN <= size_bytes <= SEGMENT_BYTES_MAX and size_bytes % ALIGNMENT == 0


def segment_bytes_for(capacity_bytes: int) -> int:
    """Return the default segment size of a new store."""
    least = min(64 << 20, capacity_bytes // 4)
    # The size is slightly below an even share, so that the file system's own blocks do not cost a whole segment.
    wanted = min(max(capacity_bytes // SEGMENTS_WANTED, least), 1 << 30) * 1023 // 1024
    return max(wanted // ALIGNMENT * ALIGNMENT, SEGMENT_BYTES_MIN)


def pack_blocks(header: Header, first_number: int, entries: Entries) -> list[bytes]:
    """Pack index blocks for all `entries`, numbered from `first_number`."""
    blocks: list[bytes] = []
    for start in range(0, len(entries), ENTRIES_PER_BLOCK):
        part = entries[start : start + ENTRIES_PER_BLOCK]
        number = first_number + len(blocks)
        packed = bytearray(
            _BLOCK.pack(BLOCK_MAGIC, VERSION, len(part), header.store_id, header.generation, number, 0, 0, bytes(8))
        )
        packed += part.tobytes()
        packed = packed.ljust(BLOCK_BYTES, b"\0")
        _CHECKSUM.pack_into(packed, _BLOCK_CHECKSUM_AT, xxhash.xxh3_64_intdigest(packed))
        blocks.append(bytes(packed))
    return blocks


def read_blocks(header: Header, first_number: int, packed: memoryview | bytes) -> Blocks:
    """Return the valid index blocks in `packed`, ordered by number.

    Args:
        header: header of their segment.
        first_number: number of the last block in `packed`.
        packed: whole blocks in device order, the highest number first.
    """
    rows = np.frombuffer(packed, np.uint8).reshape(-1, BLOCK_BYTES)[::-1].copy()
    blocks = rows.view(BLOCK).reshape(-1)
    numbers = first_number + np.arange(len(blocks))
    store_id = np.frombuffer(header.store_id, "<u8")
    is_sound = (blocks["magic"] == int.from_bytes(BLOCK_MAGIC, "little")) & (blocks["version"] == VERSION)
    is_sound &= (blocks["generation"] == header.generation) & (blocks["number"] == numbers)
    is_sound &= (blocks["store_id"] == store_id).all(axis=1)
    is_sound &= (blocks["count"] >= 1) & (blocks["count"] <= ENTRIES_PER_BLOCK)
    checksums = blocks["checksum"].copy()
    blocks["checksum"] = 0
    for at in np.flatnonzero(is_sound).tolist():
        is_sound[at] = xxhash.xxh3_64_intdigest(rows[at]) == checksums[at]
    return blocks if is_sound.all() else blocks[is_sound]


def entries_in(blocks: Blocks) -> Entries:
    """Return all entries of `blocks`, in order."""
    if (blocks["count"] == ENTRIES_PER_BLOCK).all():
        return blocks["entries"].reshape(-1)
    is_used = np.arange(ENTRIES_PER_BLOCK) < blocks["count"][:, np.newaxis]
    return blocks["entries"][is_used]


def names_in(entries: Entries) -> list[bytes]:
    """Return the name of each entry."""
    packed = np.ascontiguousarray(entries["name"]).tobytes()
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


def blocks_for(entry_count: int) -> int:
    """Return the number of index blocks for `entry_count` entries."""
    return -(-entry_count // ENTRIES_PER_BLOCK)


def are_sound(entries: Entries, segment_bytes: int) -> npt.NDArray[np.bool_]:
    """Return for each entry whether its frame lies after the header and within a segment of this size."""
    start = entries["block"].astype(np.int64) * ALIGNMENT
    size = entries["size_bytes"].astype(np.int64)
    return (size > 0) & (start >= BLOCK_BYTES) & (start + size <= segment_bytes - BLOCK_BYTES)


def name_words(name: bytes) -> npt.NDArray[np.uint64]:
    """Return a name as four words."""
    return np.frombuffer(name, "<u8")


def _checksum(block: memoryview | bytes, at: int) -> int:
    copy = bytearray(block)
    _CHECKSUM.pack_into(copy, at, 0)
    return xxhash.xxh3_64_intdigest(copy)
