"""Which bytes go where: tables of pieces, and their arithmetic.

A piece is a run of bytes that lies in one part of a slot's payload and in one place of the engine's memory. Engines cut
a chunk into many: a layer's head, a block's keys. What copies them sees only the table, so one kernel serves every
engine, dtype and arrangement.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import numpy.typing as npt

Pieces = npt.NDArray[np.int64]
"""[pieces, 3]: (offset in a part of a payload, address in the engine, bytes), or (source, target, bytes)."""

OFFSET, ADDRESS, BYTES = range(3)

WORDS = (8, 4, 2, 1)
"""Bytes are moved in the widest of these words that fits every piece."""


def table(offsets: npt.ArrayLike, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> Pieces:
    """A table of three columns, which are broadcast against each other."""
    columns = np.broadcast_arrays(*(np.asarray(column, np.int64) for column in (offsets, addresses, sizes)))
    return np.stack([column.reshape(-1) for column in columns], axis=1)


def joined(tables: Iterable[Pieces]) -> Pieces:
    """All rows, one table after the other."""
    found = list(tables)
    return np.concatenate(found) if found else np.empty((0, 3), np.int64)


def merged(pieces: Pieces) -> Pieces:
    """The same bytes in as few pieces as possible, in the order of their offsets; empty ones are left out."""
    kept = pieces[pieces[:, BYTES] > 0]
    if len(kept) < 2:
        return kept
    ordered = kept[np.argsort(kept[:, OFFSET], kind="stable")]
    ends = ordered[:-1, :2] + ordered[:-1, BYTES:]
    begins = np.flatnonzero(np.concatenate(([True], (ordered[1:, :2] != ends).any(axis=1))))
    fewer = ordered[begins]
    fewer[:, BYTES] = np.add.reduceat(ordered[:, BYTES], begins)
    return fewer


def is_whole(pieces: Pieces, size_bytes: int) -> bool:
    """Whether merged `pieces` cover a part of `size_bytes` bytes, each byte once."""
    ends = pieces[:, OFFSET] + pieces[:, BYTES]
    begins = np.append(pieces[1:, OFFSET], size_bytes)
    return bool(len(pieces)) and int(pieces[0, OFFSET]) == 0 and bool((ends == begins).all())


def word_bytes(pieces: Pieces) -> int:
    """Bytes of the widest word that divides every number in the table."""
    told = cast("int", np.bitwise_or.reduce(pieces, axis=None))
    return next(word for word in WORDS if int(told) % word == 0)
