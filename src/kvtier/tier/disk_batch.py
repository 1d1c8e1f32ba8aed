"""Several frames in one go: one visit to the index, and one system call for each run of neighbours in a segment.

A call that fails is repeated for each of its frames alone, so that one bad block costs no other frame, and each error
comes from the call that concerns it alone.
"""

from collections.abc import Callable, Generator, Sequence

from kvtier.errors import TierError
from kvtier.layout import ALIGNMENT
from kvtier.tier.aio import Run, begin_runs
from kvtier.tier.base import Read, Write
from kvtier.tier.disk_pool import Extent, Pool

ReadAlone = Callable[[Read, Extent], int | TierError | None]
WriteAlone = Callable[[Write], bool | TierError]


def reading(pool: Pool, reads: Sequence[Read], alone: ReadAlone) -> Generator[None, None, list[int | TierError | None]]:
    """Read frames where they lie; those that lie side by side together. Yields once, when they have been asked for.

    Args:
        pool: where they are.
        reads: which frames, and where to.
        alone: reads one from its extent.
    """
    told: list[int | TierError | None] = [None] * len(reads)
    found = {at: extent for at, extent in enumerate(pool.find([read.name for read in reads])) if extent is not None}
    try:
        runs = _runs(found, reads)
        asked = [
            found[run[0]].segment.run([reads[at].into[: found[at].size_bytes] for at in run], found[run[0]].offset)
            for run in runs
        ]
        ended = begin_runs(asked) if asked and found[runs[0][0]].segment.direct_io else None
        counts: list[int] | None = None
        try:
            yield
        finally:
            if ended is not None:
                counts = ended()  # in any case: until then the kernel writes where the frames go
        for run, is_whole in zip(runs, _are_whole(runs, asked, counts, found), strict=True):
            for at in run:
                told[at] = found[at].size_bytes if is_whole else alone(reads[at], found[at])
    finally:
        pool.unpin(extent.segment for extent in found.values())
    return told


def write_many(pool: Pool, writes: Sequence[Write], alone: WriteAlone) -> list[bool | TierError]:
    """Write frames side by side, as far as the segment goes that is being filled.

    Args:
        pool: where to.
        writes: frames that are admitted and not there yet.
        alone: writes one, in the next segment where this one is full.
    """
    told: list[bool | TierError] = []
    while len(told) < len(writes):
        rest = writes[len(told) :]
        extents = pool.take_here([write.frame.nbytes for write in rest]) if _are_aligned(rest) else []
        frames = [write.frame.cast("B") for write, _ in zip(rest, extents, strict=False)]
        if extents and extents[0].segment.write_run(frames, extents[0].offset):
            told += pool.put((extent, write.name) for extent, write in zip(extents, rest, strict=False))
        else:
            pool.abandon(extents)
            told += [alone(write) for write in rest[: max(1, len(extents))]]
    return told


def _runs(found: dict[int, Extent], reads: Sequence[Read]) -> list[list[int]]:
    """Places in `reads` of frames that lie side by side; one whose buffer is too small stays alone."""
    runs: list[list[int]] = []
    follows: tuple[int, int] | None = None  # (segment, offset) where the run goes on
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
    runs: Sequence[Sequence[int]], asked: Sequence[Run], counts: Sequence[int] | None, found: dict[int, Extent]
) -> list[bool]:
    """For each of `runs`, whether it was read whole, by what `counts` says; where they have not been read yet, reads.

    One that was not is read again, each of its frames alone.
    """
    if counts is None:
        return [len(run) > 1 and found[run[0]].segment.read_run(it) for run, it in zip(runs, asked, strict=True)]
    sizes = (sum(found[at].size_bytes for at in run) for run in runs)
    return [count == size_bytes for count, size_bytes in zip(counts, sizes, strict=True)]


def _are_aligned(writes: Sequence[Write]) -> bool:
    return all(write.frame.nbytes % ALIGNMENT == 0 for write in writes)
