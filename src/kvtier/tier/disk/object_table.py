"""The disk tier's object table: a dictionary from names to rows, and one column per property.

A row describes one object: its segment, first block, size and hits, in 13 bytes. The dictionary takes about 160 bytes
per name. Neither contains objects that Python's garbage collector visits. The table has no lock, because its owner
has one.

Virtual memory is reserved for `rows_max` rows; the system allocates pages as rows are used.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.policy.name_table import NameTable

NO_SEGMENT = 0xFFFFFFFF
HITS_MAX = 255

Rows = npt.NDArray[np.int64]


class ObjectTable:
    """Names with their extents.

    Args:
        rows_max: maximum number of names.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self._rows: NameTable[int] = NameTable()
        self._names: list[bytes] = []  # by row, for rows used at least once
        self._segments = np.zeros(rows_max, np.uint32)
        self._blocks = np.zeros(rows_max, np.uint32)
        self._sizes = np.zeros(rows_max, np.uint32)
        self._hits = np.zeros(rows_max, np.uint8)
        # Reading single elements is much faster in a memoryview than in an array.
        self._segment_at = self._segments.data
        self._block_at = self._blocks.data
        self._size_at = self._sizes.data
        self._hits_at = self._hits.data
        self._free = array("I")

    def __len__(self) -> int:
        return len(self._names) - len(self._free)

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return len(self) >= self.rows_max

    @property
    def used_rows(self) -> int:
        """Number of rows ever used; later rows were never used."""
        return len(self._names)

    def row(self, name: bytes) -> int | None:
        """Return the row of `name`, or None."""
        return self._rows.get(name)

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        """Return for each of `names` whether it is in the table."""
        return [name in self._rows for name in names]

    def place(self, row: int) -> tuple[int, int, int]:
        """Return the segment, first block and size in bytes of the object in `row`."""
        return self._segment_at[row], self._block_at[row], self._size_at[row]

    def name(self, row: int) -> bytes:
        """Return the name in `row`."""
        return self._names[row]

    def use(self, row: int) -> None:
        """Count a read of the object in `row`."""
        hits = self._hits_at[row]
        if hits < HITS_MAX:
            self._hits_at[row] = hits + 1

    def put(self, name: bytes, segment: int, block: int, size_bytes: int) -> int:
        """Add `name`, which must be new, to a table that is not full. Return its row."""
        if self._free:
            row = self._free.pop()
            self._names[row] = name
        else:
            row = len(self._names)
            self._names.append(name)
        self._hits_at[row] = 0
        self.move(row, segment, block, size_bytes)
        self._rows[name] = row
        return row

    def move(self, row: int, segment: int, block: int, size_bytes: int) -> None:
        """Set the extent of the object in `row`.

        This halves its hits, so that objects that are no longer read age.
        """
        self._segment_at[row] = segment
        self._block_at[row] = block
        self._size_at[row] = size_bytes
        self._hits_at[row] >>= 1

    def remove(self, row: int) -> None:
        """Remove the object in `row`."""
        self._rows.pop(self._names[row])
        self._names[row] = b""
        self._segment_at[row] = NO_SEGMENT
        self._free.append(row)

    def put_many(self, names: Sequence[bytes], segment: int, blocks: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Add many names at once and return their rows. An existing name moves; of equal names, the last one counts.

        A new name is left out if the table is full.
        """
        rows: list[int] = []
        for name, block, size in zip(names, blocks, sizes, strict=True):
            row = self.row(name)
            if row is not None:
                self.move(row, segment, block, size)
            elif self.is_full:
                continue
            else:
                row = self.put(name, segment, block, size)
            rows.append(row)
        return rows

    def rows_in(self, segment: int, rows: "array[int]") -> Rows:
        """Return the `rows` that are still in `segment`, ordered by block."""
        candidates = np.unique(np.frombuffer(rows, np.uint32)).astype(np.int64)
        mine = candidates[self._segments[candidates] == segment]
        return mine[np.argsort(self._blocks[mine])]

    def hits(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Return how often each of `rows` was read since it was written, halved at each move."""
        return self._hits[rows]

    def sizes(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Return the size in bytes of the object in each of `rows`."""
        return self._sizes[rows]

    def items(self, start: int, stop: int) -> list[tuple[bytes, int]]:
        """Return the names and sizes in bytes of the objects in rows `start` to `stop`, exclusive."""
        return [(name, self._size_at[row]) for row, name in enumerate(self._names[start:stop], start) if name]
