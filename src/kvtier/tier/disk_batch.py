"""Batched reads and writes of the disk tier: one index lookup, one system call per run of adjacent frames.

A failed call is repeated per frame, so that one bad block affects one frame, and its error names that frame.
"""

from collections.abc import Callable, Generator, Sequence

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT
from kvtier.tier.aio import ReadRun, begin_runs
from kvtier.tier.base import Read, Write
from kvtier.tier.disk_pool import Extent, Pool

ReadAlone = Callable[[Read, Extent], int | TierError | None]
WriteAlone = Callable[[Write], bool | TierError]


def reading(pool: Pool, reads: Sequence[Read], alone: ReadAlone) -> Generator[None, None, list[int | TierError | None]]:
    """Read frames, adjacent ones together. Yields once, after the reads are submitted.

    Args:
        pool: of the store.
        reads: names and buffers.
        alone: reads one frame from its extent.
    """
    results: list[int | TierError | None] = [None] * len(reads)
    found = {at: extent for at, extent in enumerate(pool.find([read.name for read in reads])) if extent is not None}
    try:
        runs = _runs(found, reads)
        requests = [
            found[run[0]].segment.run([reads[at].into[: found[at].size_bytes] for at in run], found[run[0]].offset)
            for run in runs
        ]
        ended = begin_runs(requests) if requests and found[runs[0][0]].segment.direct_io else None
        counts: list[int] | None = None
        try:
            yield
        finally:
            if ended is not None:
                counts = ended()  # always: until then the kernel writes to the buffers
        for run, is_whole in zip(runs, _are_whole(runs, requests, counts, found), strict=True):
            for at in run:
                results[at] = found[at].size_bytes if is_whole else alone(reads[at], found[at])
    finally:
        pool.unpin(extent.segment for extent in found.values())
    return results


def write_many(pool: Pool, writes: Sequence[Write], alone: WriteAlone) -> list[bool | TierError]:
    """Write frames adjacent to each other, as far as the current segment goes.

    Args:
        pool: of the store.
        writes: admitted frames that do not exist yet.
        alone: writes one frame, into the next segment when the current one is full.
    """
    results: list[bool | TierError] = []
    while len(results) < len(writes):
        rest = writes[len(results) :]
        extents = pool.take_here([write.frame.nbytes for write in rest]) if _are_aligned(rest) else []
        frames = [write.frame.cast("B") for write, _ in zip(rest, extents, strict=False)]
        if extents and extents[0].segment.write_run(frames, extents[0].offset):
            results += pool.put((extent, write.name) for extent, write in zip(extents, rest, strict=False))
        else:
            pool.abandon(extents)
            results += [alone(write) for write in rest[: max(1, len(extents))]]
    return results


def _runs(found: dict[int, Extent], reads: Sequence[Read]) -> list[list[int]]:
    """Indices into `reads`, grouped by adjacent frames. A frame with too small a buffer is a group of its own."""
    runs: list[list[int]] = []
    follows: tuple[int, int] | None = None  # (segment, offset) after the run
    for at in sorted(found, key=lambda at: (found[at].segment.number, found[at].block)):
        extent = found[at]
        is_fit = extent.size_bytes % ALIGNMENT == 0 and reads[at].into.nbytes >= extent.size_bytes
        if is_fit and follows == (extent.segment.number, extent.offset):
            runs[-1].append(at)
        else:
            runs.append([at])
        follows = (extent.segment.number, extent.offset + extent.size_bytes) if is_fit else None
    return runs


def _are_whole(
    runs: Sequence[Sequence[int]], requests: Sequence[ReadRun], counts: Sequence[int] | None, found: dict[int, Extent]
) -> list[bool]:
    """Tell for each of `runs` whether it was read whole. Without `counts`, runs of several frames are read here.

    The caller reads the frames of a failed run one by one.
    """
    if counts is None:
        return [len(run) > 1 and found[run[0]].segment.read_run(it) for run, it in zip(runs, requests, strict=True)]
    sizes = (sum(found[at].size_bytes for at in run) for run in runs)
    return [count == size_bytes for count, size_bytes in zip(counts, sizes, strict=True)]


def _are_aligned(writes: Sequence[Write]) -> bool:
    return all(write.frame.nbytes % ALIGNMENT == 0 for write in writes)
