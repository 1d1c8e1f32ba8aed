"""Compaction: a store that is not in use gives back what it takes beyond need."""

import numpy as np

from kvtier.layout import align_up
from kvtier.tier.direct import aligned_buffer
from kvtier.tier.disk_pool import Pool
from kvtier.tier.disk_segment import Segment

COMPACT_SHARE = 0.5
"""Segments that are fuller than that are not worth copying."""


class CompactPool(Pool):
    """A pool that can be compacted."""

    def compact(self) -> None:
        """Copy together what is left in segments that are mostly empty, and give back all that hold nothing.

        What the file system gave is enough for it: nothing grows, and nothing but room is given up.

        Raises:
            OSError: the device or the file system fails.
            TierError: segments are being turned, or the index is being written, for longer than the deadline.
        """
        with self._turning():
            for segment in sorted(self._full, key=self._held_bytes):
                if self._held_bytes(segment) > COMPACT_SHARE * segment.size_bytes or not self._copy_all(segment):
                    break
                self.sync()  # or a crash could forget both copies
                if self._empty(segment):
                    self._full.remove(segment)
                    self._spare.append(segment)
            while self._spare:
                self._remove(self._spare[-1])

    def _copy_all(self, segment: Segment) -> bool:
        """Copy forward all that `segment` holds, as far as it can be read; False when there is no room for it."""
        with self._lock:
            rows = self._table.rows_in(segment.number, segment.rows)
            sizes = self._table.sizes(rows).tolist()
        scratch = aligned_buffer(align_up(max(sizes, default=1)))
        for row, size_bytes in zip(rows.tolist(), sizes, strict=True):
            if self._filling is None or not self._filling.has_room(size_bytes):
                spare = self._next() if self._spare else None
                if spare is None:
                    return False
                self._fill(spare)
            self._copy(row, segment, scratch)
        return True

    def _held_bytes(self, segment: Segment) -> int:
        with self._lock:
            return int(self._table.sizes(self._table.rows_in(segment.number, segment.rows)).sum(dtype=np.int64))
