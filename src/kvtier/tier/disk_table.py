"""Where each object lies: a hash table in plain arrays, so that ten million objects take less than a gigabyte.

A row is an object: its name (32 bytes), segment, first block, size and hits, 45 bytes in all. The slots say which row
a name has: open addressing, at most half full, the next slot when one is taken. A name is a digest, so its first bytes
are as good as any hash. Removing moves later names of the run forward instead of leaving a mark, so that the table is
never rebuilt: nobody ever waits for that.

Memory is reserved for `rows_max` at once and taken by the system page by page as rows are used.

No lock: the owner has one.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NO_SEGMENT = 0xFFFFFFFF
HITS_MAX = 255
_FEW = 6
"""Up to so many names are looked up one by one: then plain Python is faster than the set-up of arrays."""

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Table:
    """Names with their places.

    Args:
        rows_max: the most names held.
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
        # One element of an array costs much more than one of a memoryview.
        self._name_bytes = self._names.data.cast("B")
        self._name_first = self._name_bytes.cast("Q")  # of each name the first number is at 4 * row
        self._segment_at = self._segments.data
        self._block_at = self._blocks.data
        self._size_at = self._sizes.data
        self._hits_at = self._hits.data
        self._slot_at = self._slots.data
        self._free = array("I")
        self._used_rows = 0  # rows below have been used at least once
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no further name can be put."""
        return self._count >= self.rows_max

    @property
    def used_rows(self) -> int:
        """Rows from here on have never held anything."""
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
        """For each of `names`, whether it is there."""
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
        """Enter `name`, which must not be there, into a table that is not full; returns its row."""
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
        """The object in `row` lies elsewhere now.

        Its hits are halved, so that what was hot once does not stay for ever.
        """
        self._segment_at[row] = segment
        self._block_at[row] = block
        self._size_at[row] = size_bytes
        self._hits_at[row] >>= 1

    def remove(self, row: int) -> None:
        """Forget the object in `row`."""
        slots, firsts, mask = self._slot_at, self._name_first, self._mask
        position = firsts[4 * row] & mask
        while slots[position] != row + 1:
            position = (position + 1) & mask
        # Close the gap: whoever stands behind it and does not belong behind it moves in, and leaves the next gap.
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
        """Enter many at once; those that are there move, and of equal names the last counts. Their rows.

        Names for which there is no room are left out.
        """
        in_order = np.sort(names[:, 0])
        if (in_order[1:] == in_order[:-1]).any():  # hardly ever; a start must not be slow for it
            return self._put_each(names, segment, blocks, sizes)
        rows, slots = self._find_rows(names)
        fresh = np.flatnonzero(rows < 0)[: self.rows_max - self._count]
        # As a rule all are new, and go to the rows behind those in use.
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
        """Those of `rows` that lie in `segment` still, in the order of their blocks."""
        candidates = np.unique(np.frombuffer(rows, np.uint32)).astype(np.int64)
        mine = candidates[self._segments[candidates] == segment]
        return mine[np.argsort(self._blocks[mine])]

    def hits(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """How often each of `rows` was read since it was written."""
        return self._hits[rows]

    def sizes(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Bytes of each of `rows`."""
        return self._sizes[rows]

    def told(self, start: int, stop: int) -> list[tuple[bytes, int]]:
        """(name, bytes) of the objects in rows `start` up to, but without, `stop`."""
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
        """The row of each of `names`, -1 where it is not there, and the slot where the search ended."""
        rows = np.full(len(names), -1, np.int64)
        positions = (names[:, 0] & np.uint64(self._mask)).astype(np.int64)
        open_ones = np.flatnonzero(self._slots[positions])
        while len(open_ones):
            slots = self._slots[positions[open_ones]].astype(np.int64)
            is_match = (self._names[slots - 1] == names[open_ones]).all(axis=1)
            rows[open_ones[is_match]] = slots[is_match] - 1
            open_ones = open_ones[~is_match]
            positions[open_ones] = (positions[open_ones] + 1) & self._mask
            open_ones = open_ones[self._slots[positions[open_ones]] > 0]
        return rows, positions

    def _take_slots(self, positions: Rows, rows: Rows) -> None:
        """Give each of `rows`, whose names are all different and new, the first empty slot from its position on."""
        marks = (rows + 1).astype(np.uint32)
        while len(marks):
            is_empty = self._slots[positions] == 0
            self._slots[positions[is_empty]] = marks[is_empty]  # of several in one slot the last wins
            lost = self._slots[positions] != marks
            marks, positions = marks[lost], (positions[lost] + 1) & self._mask

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
