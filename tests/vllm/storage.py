"""What lies in a store's directory, changed behind kvtier's back."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from kvtier.codec.frame_header import FIXED_BYTES, RAW_ID, finish_head, read_head


def objects(directory: Path) -> list[Path]:
    """The files of all objects."""
    return sorted(path for path in (directory / "objects").rglob("*") if path.is_file())


def flip_a_bit(directory: Path) -> int:
    """Damage the last byte but 100 of every object; how many there are."""
    return damage_behind(directory, 0)


def truncate(directory: Path) -> int:
    """Cut every object in half; how many there are."""
    found = objects(directory)
    for path in found:
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size // 2 // 4096 * 4096)
    return len(found)


def damage_behind(directory: Path, depth: int) -> int:
    """Damage every object that has `depth` or more before it in its prefix; how many there are."""
    count = 0
    for path, frame in _frames(directory):
        if read_head(memoryview(frame)).identity.depth >= depth:
            frame[-100] ^= 1
            path.write_bytes(frame)
            count += 1
    return count


def remove(directory: Path, first_head: int, depth: int, first_layer: int = 0) -> int:
    """Remove the objects of one rank, that with `first_head` and `first_layer`, with `depth` others before them.

    The index, which still knows them, goes, too. Returns how many there were.
    """
    count = 0
    for path, frame in _frames(directory):
        identity = read_head(memoryview(frame)).identity
        if (identity.part.first_layer, identity.part.first_head, identity.depth) == (first_layer, first_head, depth):
            path.unlink()
            count += 1
    (directory / "index").unlink()
    return count


def corrupt(directory: Path, depth: int | None = None) -> int:
    """Rotate the bytes of every section by a quarter of its length plus 100, with valid checksums; how many objects.

    Attention does not notice whole tokens that change places, since K holds the position; the 100 bytes break tokens.

    Args:
        directory: of the store.
        depth: only objects with so many others before them in their prefix are changed; None: all.
    """
    count = 0
    for path, frame in _frames(directory):
        head = read_head(memoryview(frame))
        if depth not in (None, head.identity.depth):
            continue
        assert head.codecs == [RAW_ID]
        table = head.table.copy()
        for row, section in zip(table, head.sections, strict=True):
            start, stop = section.offset, section.offset + section.raw_bytes
            rolled = np.roll(np.frombuffer(frame, np.uint8, section.raw_bytes, start), section.raw_bytes // 4 + 100)
            frame[start:stop] = rolled.tobytes()
            row["checksum"] = xxhash.xxh3_64_intdigest(frame[start : section.offset + section.extent_bytes])
        front = bytearray(frame[: head.header_bytes])
        front[FIXED_BYTES : FIXED_BYTES + table.nbytes] = table.tobytes()
        finish_head(front)
        frame[: head.header_bytes] = front
        path.write_bytes(frame)
        count += 1
    return count


def heads(directory: Path) -> list[tuple[int, int, int]]:
    """(group, first head, depth) of every object."""
    result = [read_head(memoryview(frame)).identity for _, frame in _frames(directory)]
    return sorted((it.group, it.part.first_head, it.depth) for it in result)


def codecs(directory: Path) -> list[set[int]]:
    """Ids of the codecs of every object's sections."""
    return [set(read_head(memoryview(frame)).codecs) for _, frame in _frames(directory)]


def shares(directory: Path) -> list[tuple[int, str]]:
    """(depth, part) of every object."""
    result = [read_head(memoryview(frame)).identity for _, frame in _frames(directory)]
    return sorted((it.depth, it.part.text) for it in result)


def _frames(directory: Path) -> Iterator[tuple[Path, bytearray]]:
    for path in objects(directory):
        yield path, bytearray(path.read_bytes())
