"""A segment: a preallocated file of frames, with their index at its end.

Shared fields change only under the pool's lock. I/O runs outside the lock, on pinned extents.
"""

import errno
import logging
import os
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.disk.format import (
    BLOCK_BYTES,
    ENTRY,
    Blocks,
    Entries,
    Header,
    are_sound,
    blocks_for,
    entries_in,
    name_words,
    pack_blocks,
    pack_header,
    read_blocks,
    read_header,
)  # fmt: skip
from kvtier.tier.files.direct import aligned_buffer
from kvtier.tier.files.safe_open import Descriptor, open_file

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20
"""Number of bytes per read, from the end of the file, while the index is loaded."""


def file_name(number: int) -> str:
    """Return the file name of segment `number`."""
    return f"{number:08d}.segment"


class Segment:
    """An open segment file.

    Args:
        folder: descriptor of the directory of segments.
        number: number of the segment.
        direct_io: open with O_DIRECT.
        read_only: open read-only.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """

    def __init__(self, folder: int, number: int, *, direct_io: bool, read_only: bool = False) -> None:
        self.name = file_name(number)
        self.number = number
        self.direct_io = direct_io
        self.header: Header | None = None
        self.rows = array("I")
        """Rows of the objects written here, including those removed since."""
        self.pending: dict[bytes, tuple[int, int]] = {}
        """(first block, size) of objects that are not yet in an index block."""
        self.next_block = 1
        """First block of the next frame."""
        self.index_blocks = 0
        """Number of index blocks written at the end of the file."""
        self.writers = 0
        """Number of writes in flight."""
        self.pins = 0
        """Number of reads, copies and index writes in flight."""
        self.is_leaving = False
        """Whether the segment is being evicted, so that unpinning notifies the pool."""
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_DIRECT if direct_io else 0)
        descriptor, status = open_file(self.name, flags, folder)
        self._descriptor = Descriptor(descriptor)
        self.size_bytes = status.st_size

    @property
    def generation(self) -> int:
        """Generation in the header; 0 if the segment is empty."""
        return 0 if self.header is None else self.header.generation

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the device.

        Raises:
            OSError: the file system fails.
        """
        return os.fstat(self._descriptor.fileno()).st_blocks * 512

    def is_in(self, folder: int) -> bool:
        """Return whether the file still has its name in `folder`.

        Raises:
            OSError: the file system fails.
        """
        try:
            status = os.stat(self.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(self._descriptor.fileno()))

    def take(self, size_bytes: int) -> int | None:
        """Take an extent for a frame of `size_bytes`; return its first block, or None if none fits.

        Call this under the lock. The call also reserves index blocks for pending objects, and one for each write in
        flight, because a sync may run between any two writes.
        """
        if not self.has_room(size_bytes):
            return None
        block = self.next_block
        self.next_block += align_up(size_bytes) // ALIGNMENT
        self.writers += 1
        return block

    def has_room(self, size_bytes: int) -> bool:
        """Return whether an extent for a frame of `size_bytes` fits. Call this under the lock."""
        index_blocks = self.index_blocks + blocks_for(len(self.pending)) + self.writers + 1
        return self.next_block + align_up(size_bytes) // ALIGNMENT <= self.size_bytes // BLOCK_BYTES - index_blocks

    def take_pending(self) -> dict[bytes, tuple[int, int]]:
        """Take the pending objects, whose index blocks then count as written. Call this under the lock."""
        pending, self.pending = self.pending, {}
        self.index_blocks += blocks_for(len(pending))
        return pending

    def begin(self, store_id: bytes, generation: int) -> None:
        """Write a new header, which discards all objects. The segment must not be in use.

        Raises:
            OSError: the device fails. The segment is then also empty.
        """
        self.header = None
        self.rows = array("I")
        self.pending = {}
        self.next_block, self.index_blocks = 1, 0
        header = Header(store_id, generation, self.size_bytes)
        self._write_block(pack_header(header), 0)
        self.header = header

    def read(self, into: memoryview, offset: int) -> int:
        """Read from `offset` until `into` is full. Return the byte count, lower only if the file is truncated.

        Raises:
            OSError: the device fails.
        """
        if offset % ALIGNMENT == 0 and into.nbytes % ALIGNMENT == 0:
            try:
                return self._read_whole(into, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        # The caller's buffer is unaligned, unlike slots.
        start, stop = offset // ALIGNMENT * ALIGNMENT, align_up(offset + into.nbytes)
        around = aligned_buffer(stop - start)
        count = self._read_whole(around, start)
        part = around[offset - start : offset - start + into.nbytes][: max(0, count - (offset - start))]
        into[: part.nbytes] = part
        return part.nbytes

    def write(self, frame: memoryview, offset: int) -> None:
        """Write `frame` at `offset`, a multiple of 4096, zero-padded to the next multiple.

        Raises:
            OSError: the device fails.
        """
        if frame.nbytes % ALIGNMENT == 0:
            try:
                self._write_file(frame, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                return
        padded = aligned_buffer(align_up(frame.nbytes))
        padded[: frame.nbytes] = frame
        self._write_file(padded, offset)

    def read_run(self, views: Sequence[memoryview], offset: int) -> bool:
        """Fill `views` from `offset` in one call. Return False if they were not read whole.

        The caller then reads each frame separately, which reports the reason.
        """
        try:
            return os.preadv(self._descriptor.fileno(), views, offset) == sum(view.nbytes for view in views)
        except OSError:
            return False

    def write_run(self, frames: Sequence[memoryview], offset: int) -> bool:
        """Write `frames` contiguously from `offset` in one call. Return False if they were not written whole."""
        try:
            return os.pwritev(self._descriptor.fileno(), frames, offset) == sum(frame.nbytes for frame in frames)
        except OSError:
            return False

    def write_index(self, pending: dict[bytes, tuple[int, int]], stop_number: int) -> None:
        """Make the frames durable, then write index blocks for `pending`; the last is number `stop_number` - 1.

        Raises:
            OSError: the device fails.
        """
        if self.header is None:
            return
        entries = np.zeros(len(pending), ENTRY)
        entries["name"] = np.frombuffer(b"".join(pending), "<u8").reshape(-1, 4)
        entries["block"], entries["size_bytes"] = zip(*pending.values(), strict=True)
        blocks = pack_blocks(self.header, stop_number - blocks_for(len(entries)), entries)
        self.flush()
        # Index blocks grow downward.
        packed = aligned_buffer(len(blocks) * BLOCK_BYTES)
        packed[:] = b"".join(reversed(blocks))
        self._write_file(packed, self.size_bytes - stop_number * BLOCK_BYTES)
        self.flush()

    def flush(self) -> None:
        """Make writes durable.

        Raises:
            OSError: the device fails.
        """
        os.fdatasync(self._descriptor.fileno())

    def load(self, store_id: bytes) -> Entries | str:
        """Read the header and index. Return the entries in writing order, or the reason why the segment is empty.

        Raises:
            OSError: the device fails.
        """
        return self.load_header(store_id) or self.load_index()

    def load_header(self, store_id: bytes) -> str:
        """Read the header. Return "", or the reason why the segment is empty. EIO counts as damage.

        Raises:
            OSError: the device fails with another error.
        """
        try:
            header = read_header(self._block_at(0))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return "its header cannot be read"
        if isinstance(header, str):
            return header
        if header.store_id != store_id or header.segment_bytes != self.size_bytes:
            return "of another store or size"
        self.header = header
        return ""

    def load_index(self) -> Entries:
        """Read the index of a segment whose header was read. Return the entries in writing order.

        Frames can then be appended. A segment whose index cannot be read (EIO) counts as empty, because the end of
        its index is unknown.

        Raises:
            OSError: the device fails with another error.
        """
        try:
            pieces = list(self._index())
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            logger.warning("segment %s counts as empty: its index cannot be read", self.name)
            pieces = []
        self.index_blocks = int(pieces[-1]["number"][-1]) + 1 if pieces else 0
        entries = np.concatenate(list(map(entries_in, pieces))) if pieces else np.zeros(0, ENTRY)
        is_sound = are_sound(entries, self.size_bytes)
        if not is_sound.all():
            entries = entries[is_sound]
        if len(entries):
            stops = entries["block"] + (entries["size_bytes"].astype(np.int64) + ALIGNMENT - 1) // ALIGNMENT
            self.next_block = max(1, int(stops.max()))
        return entries

    def blank(self, name: bytes, block: int) -> None:
        """Blank the entry of `name` at `block` in the index on the device.

        Raises:
            OSError: the device fails.
        """
        header = self.header
        if header is None:
            return
        words = name_words(name)
        for blocks in self._index():
            entries = blocks["entries"]
            hits = (entries["name"] == words).all(axis=2) & (entries["block"] == block) & (entries["size_bytes"] > 0)
            for at in np.flatnonzero(hits.any(axis=1)).tolist():
                kept = entries_in(blocks[at : at + 1])
                kept["size_bytes"][hits[at, : len(kept)]] = 0
                number = int(blocks["number"][at])
                self._write_block(pack_blocks(header, number, kept)[0], self.size_bytes - (number + 1) * BLOCK_BYTES)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._descriptor.close()

    def _index(self) -> Iterator[Blocks]:
        """Yield the valid index blocks, in pieces from the end of the file, until a piece has none."""
        if self.header is None:
            return
        stop = self.size_bytes
        piece = aligned_buffer(min(_TAIL_BYTES, align_up(self.size_bytes)))
        while stop > BLOCK_BYTES:
            start = max(BLOCK_BYTES, stop - piece.nbytes)
            view = piece[: stop - start]
            if self._read_whole(view, start) < view.nbytes:
                return
            blocks = read_blocks(self.header, (self.size_bytes - stop) // BLOCK_BYTES, view)
            if not len(blocks):
                return
            yield blocks
            stop = start

    def _block_at(self, offset: int) -> memoryview:
        block = aligned_buffer(BLOCK_BYTES)
        return block[: self._read_whole(block, offset)]

    def _write_block(self, packed: bytes, offset: int) -> None:
        block = aligned_buffer(BLOCK_BYTES)
        block[:] = packed
        self._write_file(block, offset)

    def _read_whole(self, into: memoryview, offset: int) -> int:
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._descriptor.fileno(), [into[done:]], offset + done)
            done += count
            if count == 0 or done % ALIGNMENT:  # a truncated file
                break
        return done

    def _write_file(self, frame: memoryview, offset: int) -> None:
        done = 0
        while done < frame.nbytes:
            count = os.pwritev(self._descriptor.fileno(), [frame[done:]], offset + done)
            done += count
            if count == 0 or done % ALIGNMENT:
                raise OSError(f"only {done} of {frame.nbytes} bytes were written")
