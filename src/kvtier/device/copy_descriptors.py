"""Copy descriptors: tables of (source, target, bytes), and their arithmetic.

A descriptor is a run of bytes that is contiguous in a slot's payload and in the engine's memory. Engines split a chunk
into many runs, such as the keys of one block in one layer. The copy code sees only the table, so one kernel serves
every engine, dtype and memory layout.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import numpy.typing as npt

CopyDescriptors = npt.NDArray[np.int64]
"""int64 [descriptors, 3]: (offset in a part of a payload, address in the engine, bytes), or (source, target, bytes)."""

OFFSET, ADDRESS, BYTES = range(3)

WORDS = (8, 4, 2, 1)
"""Word sizes of the kernel. It uses the widest that divides every number of the table."""


def table(offsets: npt.ArrayLike, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> CopyDescriptors:
    """A table of three columns, broadcast against each other."""
    columns = np.broadcast_arrays(*(np.asarray(column, np.int64) for column in (offsets, addresses, sizes)))
    return np.stack([column.reshape(-1) for column in columns], axis=1)


def joined(tables: Iterable[CopyDescriptors]) -> CopyDescriptors:
    """All rows, in the order of the tables."""
    found = list(tables)
    return np.concatenate(found) if found else np.empty((0, 3), np.int64)


def merged(descriptors: CopyDescriptors) -> CopyDescriptors:
    """The same bytes in the fewest descriptors, ordered by offset. Empty descriptors are omitted."""
    kept = descriptors[descriptors[:, BYTES] > 0]
    if len(kept) < 2:
        return kept
    ordered = kept[np.argsort(kept[:, OFFSET], kind="stable")]
    ends = ordered[:-1, :2] + ordered[:-1, BYTES:]
    begins = np.flatnonzero(np.concatenate(([True], (ordered[1:, :2] != ends).any(axis=1))))
    fewer = ordered[begins]
    fewer[:, BYTES] = np.add.reduceat(ordered[:, BYTES], begins)
    return fewer


def is_whole(descriptors: CopyDescriptors, size_bytes: int) -> bool:
    """Whether merged `descriptors` cover a part of `size_bytes` bytes, each byte once."""
    ends = descriptors[:, OFFSET] + descriptors[:, BYTES]
    begins = np.append(descriptors[1:, OFFSET], size_bytes)
    return bool(len(descriptors)) and int(descriptors[0, OFFSET]) == 0 and bool((ends == begins).all())


def word_bytes(descriptors: CopyDescriptors) -> int:
    """The widest word, in bytes, that divides every number of the table."""
    bits = cast("int", np.bitwise_or.reduce(descriptors, axis=None))
    return next(word for word in WORDS if int(bits) % word == 0)
