"""Changes frames behind kvtier's back, and corrects their checksums."""

import struct
from itertools import pairwise

import numpy as np
import xxhash

from kvtier.codec.frame_header import FIXED_BYTES, read_head
from kvtier.layout import align_up


def patched(frame: bytes, at: int, code: str, value: int) -> bytes:
    """Change one number of `frame`, and correct the header's checksum."""
    changed = bytearray(frame)
    struct.pack_into(f"<{code}", changed, at, value)
    (header_bytes,) = struct.unpack_from("<I", frame, 12)
    struct.pack_into("<Q", changed, 16, 0)
    struct.pack_into("<Q", changed, 16, xxhash.xxh3_64_intdigest(bytes(changed[:header_bytes])))
    return bytes(changed)


def of_codec(frame: bytes, number: int) -> bytes:
    """Return `frame` as a codec with that id might have written it, with matching checksums."""
    head = read_head(frame)
    table = head.table.copy()
    table["codec"], table["stored_bytes"] = number, table["raw_bytes"] - 1
    stops = head.header_bytes + np.cumsum(table["stored_bytes"])
    table["offset"] = stops - table["stored_bytes"]
    changed = bytearray(frame[: align_up(int(stops[-1]))])
    extents = pairwise([*table["offset"].tolist(), len(changed)])
    table["checksum"] = [xxhash.xxh3_64_intdigest(bytes(changed[start:stop])) for start, stop in extents]
    changed[FIXED_BYTES : FIXED_BYTES + table.nbytes] = table.tobytes()
    return patched(bytes(changed), 24, "Q", len(changed))


def rechecked(frame: bytes) -> bytes:
    """Correct all checksums, as a writer without the key can do."""
    head = read_head(patched(frame, 8, "I", 3))
    changed = bytearray(frame)
    for row, section in enumerate(head.sections):
        extent = bytes(frame[section.offset : section.offset + section.extent_bytes])
        struct.pack_into("<Q", changed, 256 + 48 * row + 8, xxhash.xxh3_64_intdigest(extent))
    return patched(bytes(changed), 8, "I", 3)
