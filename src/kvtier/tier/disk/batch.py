"""Batched reads and writes of the disk tier, with one index lookup and one system call per run of adjacent frames.

After a failed call, each of its frames is tried alone. So a bad block affects one frame, and the error names it.
"""

from collections.abc import Sequence

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT
from kvtier.tier.base import Read, Write
from kvtier.tier.disk.segment_pool import Extent, Pool


def read_many(pool: Pool, reads: Sequence[Read], *, is_use: bool = True) -> list[int | OSError | TierError | None]:
    """Read frames, adjacent ones in one call. The result of a frame that fails is its error."""
    results: list[int | OSError | TierError | None] = [None] * len(reads)
    extents = pool.locate([read.name for read in reads], is_use=is_use)
    found = {at: extent for at, extent in enumerate(extents) if extent is not None}
    try:
        for run in _runs(found, reads):
            first = found[run[0]]
            is_whole = len(run) > 1 and first.segment.read_run(
                [reads[at].into[: found[at].size_bytes] for at in run], first.offset
            )
            for at in run:
                results[at] = found[at].size_bytes if is_whole else _read_alone(pool, reads[at], found[at])
    finally:
        pool.unpin(extent.segment for extent in found.values())
    return results


def write_many(pool: Pool, writes: Sequence[Write]) -> list[bool | OSError | TierError]:
    """Write frames next to each other, as far as the current segment has room.

    Args:
        pool: the store's pool.
        writes: admitted frames that do not exist yet.
    """
    results: list[bool | OSError | TierError] = []
    while len(results) < len(writes):
        rest = writes[len(results) :]
        is_run = len(rest) > 1 and all(write.frame.nbytes % ALIGNMENT == 0 for write in rest)
        extents = pool.take_here([write.frame.nbytes for write in rest]) if is_run else []
        frames = [write.frame.cast("B") for write, _ in zip(rest, extents, strict=False)]
        if extents and extents[0].segment.write_run(frames, extents[0].offset):
            results += pool.put((extent, write.name) for extent, write in zip(extents, rest, strict=False))
        else:
            pool.abandon(extents)
            results += [_write_alone(pool, write) for write in rest[: max(1, len(extents))]]
    return results


def _read_alone(pool: Pool, read: Read, extent: Extent) -> int | OSError | TierError | None:
    wanted = read.into.cast("B")[: max(0, extent.size_bytes - read.offset)]
    try:
        count = extent.segment.read(wanted, extent.offset + read.offset) if wanted.nbytes else 0
        if count == wanted.nbytes:
            return count
        pool.remove(read.name)  # the file was truncated
    except (OSError, TierError) as error:
        return error.with_traceback(None)  # its stack frames refer to the buffer
    return None


def _write_alone(pool: Pool, write: Write) -> bool | OSError | TierError:
    """Write one frame, into the next segment when the current one is full."""
    try:
        extent = pool.take(write.frame.nbytes)
        if extent is None:
            return False
        try:
            extent.segment.write(write.frame.cast("B"), extent.offset)
        except BaseException:
            pool.abandon([extent])
            raise
        return pool.put([(extent, write.name)])[0]
    except (OSError, TierError) as error:
        return error.with_traceback(None)  # as in `_read_alone`


def _runs(found: dict[int, Extent], reads: Sequence[Read]) -> list[list[int]]:
    """Return indices into `reads`, grouped by adjacent frames. A frame that is not read whole forms its own group."""
    runs: list[list[int]] = []
    follows: tuple[int, int] | None = None  # (segment, offset) after the run
    for at in sorted(found, key=lambda at: (found[at].segment.number, found[at].block)):
        extent = found[at]
        is_whole = reads[at].offset == 0 and reads[at].into.nbytes >= extent.size_bytes
        is_fit = is_whole and extent.size_bytes % ALIGNMENT == 0
        if is_fit and follows == (extent.segment.number, extent.offset):
            runs[-1].append(at)
        else:
            runs.append([at])
        follows = (extent.segment.number, extent.offset + extent.size_bytes) if is_fit else None
    return runs
