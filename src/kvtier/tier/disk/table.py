"""The disk tier's object table: a hash table in plain arrays. Ten million objects take less than 1 GB.

A row is one object: name (32 bytes), segment, first block, size and hits, 45 bytes in all. Slots map names to rows by
open addressing with linear probing, at most half full. A name is a digest, so its first bytes serve as the hash.
Removal shifts later names of the run back and leaves no tombstone, so the table is never rebuilt.

Virtual memory is reserved for `rows_max`; the system allocates pages as rows are used. No lock: the owner has one.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NO_SEGMENT = 0xFFFFFFFF
HITS_MAX = 255
_FEW = 6
"""Up to this many names are looked up one by one, which is faster than array set-up."""

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class ObjectTable:
    """Names with their extents.

    Args:
        rows_max: most names held.
    """

    def __init__(self, rows_max: int) -> None:
        slot_count = 1 << max(4, (2 * rows_max - 1).bit_length())
        self.rows_max = rows_max
        self._mask = slot_count - 1
        self._names = np.zeros((rows_max, 4), np.uint64)
        self._segments = np.zeros(rows_max, np.uint32)
        self._blocks = np.zeros(rows_max, np.uint32)
        self._sizes = np.zeros(rows_max, np.uint32)
        self._hits = np.zeros(rows_max, np.uint8)
        self._slots = np.zeros(slot_count, np.uint32)  # row + 1; 0 is empty
        # Single elements of a memoryview are much faster than of an array.
        self._name_bytes = self._names.data.cast("B")
        self._name_first = self._name_bytes.cast("Q")  # a name's first word is at 4 * row
        self._segment_at = self._segments.data
        self._block_at = self._blocks.data
        self._size_at = self._sizes.data
        self._hits_at = self._hits.data
        self._slot_at = self._slots.data
        self._free = array("I")
        self._used_rows = 0  # rows below were used at least once
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the table is full."""
        return self._count >= self.rows_max

    @property
    def used_rows(self) -> int:
        """Rows from this number on were never used."""
        return self._used_rows

    def find(self, name: bytes) -> int | None:
        """The row of `name`."""
        slots, firsts = self._slot_at, self._name_first
        first = int.from_bytes(name[:8], sys.byteorder)
        position = first & self._mask
        while slot := slots[position]:
            if firsts[4 * slot - 4] == first and self.name(slot - 1) == name:
                return slot - 1
            position = (position + 1) & self._mask
        return None

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """For each of `names`, whether it is in the table."""
        if len(names) <= _FEW:
            return [self.find(name) is not None for name in names]
        words = np.frombuffer(b"".join(names), np.uint64).reshape(-1, 4)
        return (self._find_rows(words)[0] >= 0).tolist()

    def place(self, row: int) -> tuple[int, int, int]:
        """(segment, first block, size in bytes) of the object in `row`."""
        return self._segment_at[row], self._block_at[row], self._size_at[row]

    def name(self, row: int) -> bytes:
        """The name in `row`."""
        return bytes(self._name_bytes[32 * row : 32 * row + 32])

    def use(self, row: int) -> None:
        """Count a read."""
        hits = self._hits_at[row]
        if hits < HITS_MAX:
            self._hits_at[row] = hits + 1

    def put(self, name: bytes, segment: int, block: int, size_bytes: int) -> int:
        """Add `name`, which must be new, to a table that is not full; returns its row."""
        row = self._new_row()
        self._hits_at[row] = 0
        self._name_bytes[32 * row : 32 * row + 32] = name
        self.move(row, segment, block, size_bytes)
        position = self._name_first[4 * row] & self._mask
        while self._slot_at[position]:
            position = (position + 1) & self._mask
        self._slot_at[position] = row + 1
        self._count += 1
        return row

    def move(self, row: int, segment: int, block: int, size_bytes: int) -> None:
        """Set the extent of the object in `row`.

        Halves its hits, so that an object that is no longer read ages.
        """
        self._segment_at[row] = segment
        self._block_at[row] = block
        self._size_at[row] = size_bytes
        self._hits_at[row] >>= 1

    def remove(self, row: int) -> None:
        """Remove the object in `row`."""
        slots, firsts, mask = self._slot_at, self._name_first, self._mask
        position = firsts[4 * row] & mask
        while slots[position] != row + 1:
            position = (position + 1) & mask
        # Backward-shift deletion: a later name whose home slot is not after the gap moves into the gap.
        gap = position
        while True:
            position = (position + 1) & mask
            slot = slots[position]
            if not slot:
                break
            home = firsts[4 * (slot - 1)] & mask
            if (position - home) & mask >= (position - gap) & mask:
                slots[gap] = slot
                gap = position
        slots[gap] = 0
        self._segment_at[row] = NO_SEGMENT
        self._free.append(row)
        self._count -= 1

    def put_many(
        self, names: Words, segment: int, blocks: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint32]
    ) -> Rows:
        """Add many at once; returns their rows. Existing names move, and the last of equal names wins.

        Names that exceed the table are left out.
        """
        in_order = np.sort(names[:, 0])
        if (in_order[1:] == in_order[:-1]).any():  # rare
            return self._put_each(names, segment, blocks, sizes)
        rows, slots = self._find_rows(names)
        fresh = np.flatnonzero(rows < 0)[: self.rows_max - self._count]
        # Usually all are new and take the next unused rows.
        is_plain = len(fresh) == len(names) and not self._free
        start = self._used_rows
        rows[fresh] = self._new_rows(len(fresh))
        known = rows >= 0
        kept = slice(start, start + len(names)) if is_plain else rows[known]
        self._segments[kept] = segment
        self._blocks[kept] = blocks if is_plain else blocks[known]
        self._sizes[kept] = sizes if is_plain else sizes[known]
        self._hits[kept] = 0
        self._names[kept if is_plain else rows[fresh]] = names if is_plain else names[fresh]
        self._take_slots(slots[fresh], rows[fresh])
        self._count += len(fresh)
        return rows[known]

    def rows_in(self, segment: int, rows: "array[int]") -> Rows:
        """The subset of `rows` still in `segment`, ordered by block."""
        candidates = np.unique(np.frombuffer(rows, np.uint32)).astype(np.int64)
        mine = candidates[self._segments[candidates] == segment]
        return mine[np.argsort(self._blocks[mine])]

    def hits(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Reads of each of `rows` since it was written, halved at each move."""
        return self._hits[rows]

    def sizes(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Bytes of each of `rows`."""
        return self._sizes[rows]

    def items(self, start: int, stop: int) -> list[tuple[bytes, int]]:
        """(name, bytes) of the objects in rows `start` to `stop`, exclusive."""
        stop = min(stop, self._used_rows)
        rows = start + np.flatnonzero(self._segments[start:stop] != NO_SEGMENT)
        packed = self._names[rows].tobytes()
        sizes: list[int] = self._sizes[rows].tolist()
        return [(packed[32 * at : 32 * at + 32], size) for at, size in enumerate(sizes)]

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._used_rows += 1
        return self._used_rows - 1

    def _new_rows(self, count: int) -> Rows:
        if self._free:
            return np.array([self._new_row() for _ in range(count)], np.int64)
        self._used_rows += count
        return np.arange(self._used_rows - count, self._used_rows)

    def _find_rows(self, names: Words) -> tuple[Rows, Rows]:
        """The row of each name, -1 when missing, and the slot where its search ended."""
        rows = np.full(len(names), -1, np.int64)
        positions = (names[:, 0] & np.uint64(self._mask)).astype(np.int64)
        searching = np.flatnonzero(self._slots[positions])
        while len(searching):
            slots = self._slots[positions[searching]].astype(np.int64)
            is_match = (self._names[slots - 1] == names[searching]).all(axis=1)
            rows[searching[is_match]] = slots[is_match] - 1
            searching = searching[~is_match]
            positions[searching] = (positions[searching] + 1) & self._mask
            searching = searching[self._slots[positions[searching]] > 0]
        return rows, positions

    def _take_slots(self, positions: Rows, rows: Rows) -> None:
        """Assign each of `rows`, whose names are distinct and new, the first empty slot from its position."""
        marks = (rows + 1).astype(np.uint32)
        while len(marks):
            is_empty = self._slots[positions] == 0
            self._slots[positions[is_empty]] = marks[is_empty]  # of several for one slot the last wins
            unplaced = self._slots[positions] != marks
            marks, positions = marks[unplaced], (positions[unplaced] + 1) & self._mask

    def _put_each(
        self, names: Words, segment: int, blocks: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint32]
    ) -> Rows:
        rows: list[int] = []
        for words, block, size in zip(names, blocks.tolist(), sizes.tolist(), strict=True):
            name = words.tobytes()
            row = self.find(name)
            if row is not None:
                self.move(row, segment, block, size)
            elif self.is_full:
                continue
            else:
                row = self.put(name, segment, block, size)
            rows.append(row)
        return np.array(rows, np.int64)
