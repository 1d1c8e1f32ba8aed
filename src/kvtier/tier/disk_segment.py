"""One segment: a preallocated file, its frames, and the index of these at its end.

The fields that several threads share are changed under the pool's lock alone; I/O happens outside of it, on extents
that a pin keeps from being given to others.
"""

# Descriptors.

import errno
import logging
import os
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.layout import ALIGNMENT, align_up
from kvtier.tier.aio import Run
from kvtier.tier.direct import aligned_buffer
from kvtier.tier.disk_format import (
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
from kvtier.tier.safe_open import Descriptor, open_file

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20
"""How much of a segment's end is read at once when its index is looked for."""


def file_name(number: int) -> str:
    """Of segment `number`."""
    return f"{number:08d}.segment"


class Segment:
    """A segment file that is open.

    Args:
        folder: descriptor of the directory of segments.
        number: which it is, in the table of objects, and by the name of its file.
        direct_io: open it with O_DIRECT.
        read_only: open it for reading alone.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, folder: int, number: int, *, direct_io: bool, read_only: bool = False) -> None:
        self._descriptor: Descriptor | None = None
        self.name = file_name(number)
        self.number = number
        self.direct_io = direct_io
        self.header: Header | None = None
        self.rows = array("I")
        """Rows of objects that were put here; some have left since."""
        self.pending: dict[bytes, tuple[int, int]] = {}
        """(first block, size) of the objects that no index block names yet."""
        self.next_block = 1
        """Where the next frame goes."""
        self.index_blocks = 0
        """Written so far, counted from the end."""
        self.writers = 0
        """Writes under way into extents of this segment."""
        self.pins = 0
        """Reads, copies and index writes under way."""
        self.is_leaving = False
        """It is about to be begun anew: whoever unpins it says so to the pool."""
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_DIRECT if direct_io else 0)
        descriptor, self._status = open_file(self.name, flags, folder)
        self._descriptor = Descriptor(descriptor)
        self.size_bytes = self._status.st_size

    def __del__(self) -> None:
        # Of a pool that another has replaced: whoever still reads or writes keeps the segment, and so its descriptor.
        self.close()

    @property
    def generation(self) -> int:
        """Of the header; 0 when the segment holds nothing."""
        return 0 if self.header is None else self.header.generation

    def allocated_bytes(self, folder: int) -> int | None:
        """What the file takes on the device; None when it is not the one of its name in the directory `folder`.

        Raises:
            OSError: the file system fails.
        """
        try:
            status = os.stat(self.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_blocks * 512 if os.path.samestat(status, self._status) else None

    def take(self, size_bytes: int) -> int | None:
        """The first block of an extent for a frame of `size_bytes`; None when it does not fit. Under the lock.

        Room for the index is kept: blocks for what is pending, and one for each write under way, because a sync may
        come between any two of them.
        """
        if not self.has_room(size_bytes):
            return None
        block = self.next_block
        self.next_block += align_up(size_bytes) // ALIGNMENT
        self.writers += 1
        return block

    def has_room(self, size_bytes: int) -> bool:
        """Whether an extent for a frame of `size_bytes` fits. Under the lock."""
        index_blocks = self.index_blocks + blocks_for(len(self.pending)) + self.writers + 1
        return self.next_block + align_up(size_bytes) // ALIGNMENT <= self.size_bytes // BLOCK_BYTES - index_blocks

    def take_pending(self) -> dict[bytes, tuple[int, int]]:
        """What index blocks are to be written for now; they count as written. Under the lock."""
        pending, self.pending = self.pending, {}
        self.index_blocks += blocks_for(len(pending))
        return pending

    def begin(self, store_id: bytes, generation: int) -> None:
        """Write a new header: all that the segment held is gone. Nobody else may use it meanwhile.

        Raises:
            OSError: the device fails. The segment then still holds nothing.
        """
        self.header = None
        self.rows = array("I")
        self.pending = {}
        self.next_block, self.index_blocks = 1, 0
        header = Header(store_id, generation, self.size_bytes)
        self._write_block(pack_header(header), 0)
        self.header = header

    def read(self, into: memoryview, offset: int) -> int:
        """Read from `offset` in the file until `into` is full; fewer bytes only when the file was cut off.

        Raises:
            OSError: the device fails.
        """
        if offset % ALIGNMENT == 0 and into.nbytes % ALIGNMENT == 0:
            try:
                return self._read_whole(into, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        # Memory that is not aligned, as a caller's own may be; a slot's always is.
        start, stop = offset // ALIGNMENT * ALIGNMENT, align_up(offset + into.nbytes)
        around = aligned_buffer(stop - start)
        count = self._read_whole(around, start)
        part = around[offset - start : offset - start + into.nbytes][: max(0, count - (offset - start))]
        into[: part.nbytes] = part
        return part.nbytes

    def write(self, frame: memoryview, offset: int) -> None:
        """Write `frame` at `offset`, a multiple of 4096, and zeros behind it up to the next.

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

    def run(self, views: Sequence[memoryview], offset: int) -> Run:
        """What to ask for, to fill `views` with the bytes from `offset` on.

        Raises:
            OSError: the segment is closed.
        """
        return Run(self._live(), views, offset)

    def read_run(self, run: Run) -> bool:
        """Read `run` of this segment in one call; whether that was possible.

        When not, some may be read. Whoever then reads each by itself learns which are not, and why.
        """
        try:
            return os.preadv(*run) == sum(view.nbytes for view in run.views)
        except OSError:
            return False

    def write_run(self, frames: Sequence[memoryview], offset: int) -> bool:
        """Write `frames` side by side from `offset` on, in one call; whether that was possible, like `read_run`."""
        try:
            return os.pwritev(self._live(), frames, offset) == sum(frame.nbytes for frame in frames)
        except OSError:
            return False

    def write_index(self, pending: dict[bytes, tuple[int, int]], stop_number: int) -> None:
        """Write index blocks for `pending`; the last gets number `stop_number` - 1. The frames are on the device first.

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
        # The last block lies foremost.
        packed = aligned_buffer(len(blocks) * BLOCK_BYTES)
        packed[:] = b"".join(reversed(blocks))
        self._write_file(packed, self.size_bytes - stop_number * BLOCK_BYTES)
        self.flush()

    def flush(self) -> None:
        """Make the device keep what was written.

        Raises:
            OSError: the device fails.
        """
        os.fdatasync(self._live())

    def load(self, store_id: bytes) -> Entries | str:
        """Read header and index; the entries in the order they were written, or why there are none.

        Raises:
            OSError: the device fails.
        """
        return self.load_header(store_id) or self.load_index()

    def load_header(self, store_id: bytes) -> str:
        """Read the header; why the segment holds nothing, or "". A block that cannot be read is a damaged one.

        Raises:
            OSError: the device fails otherwise.
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
        """Read the index of a segment whose header was read; the entries in the order they were written.

        Afterwards frames can be written behind those of the entries. There are none when a block cannot be read: where
        the index ends is not known then.

        Raises:
            OSError: the device fails otherwise.
        """
        try:
            pieces = list(self._index())
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            logger.warning("segment %s holds nothing: its index cannot be read", self.name)
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
        """Take the frame of `name` that begins at `block` out of the index on the device: no start finds it again.

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
        """Close the file. Twice is fine."""
        if self._descriptor is not None:
            self._descriptor.close()

    def _index(self) -> Iterator[Blocks]:
        """The sound index blocks, in pieces read from the end on, until a whole piece holds none."""
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
            count = os.preadv(self._live(), [into[done:]], offset + done)
            done += count
            if count == 0 or done % ALIGNMENT:  # the end of a file that was cut off
                break
        return done

    def _write_file(self, frame: memoryview, offset: int) -> None:
        done = 0
        while done < frame.nbytes:
            count = os.pwritev(self._live(), [frame[done:]], offset + done)
            done += count
            if count == 0 or done % ALIGNMENT:
                raise OSError(f"{done} of {frame.nbytes} bytes written")

    def _live(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the segment is closed")
        return self._descriptor.fileno()
