"""Block ids of any kind as integers, so that the rest works on plain arrays."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Ids, TraceRequest
from kvtier.trace.trace_files import short

OWN_IDS_MAX = 1 << 25
"""Smaller ids are kept; others (hashes, strings) get the numbers -1, -2, ... in the order of their first use."""
RUN_IDS_MAX = 1 << 30
"""Ids in runs are dense numbers, so more of them are kept."""
REQUEST_BLOCKS_MAX = 1 << 20
"""Blocks of one request: with 16 tokens each, 16 million tokens."""
HELD_BLOCKS_MAX = 1 << 28
"""Blocks that a reader holds to sort them: 1 or 2 GiB."""


class Numbering:
    """Maps ids that are not small integers to numbers; one for each reading of a trace."""

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {}

    def numbered(self, ids: Sequence[object]) -> Ids:
        """`ids` as numbers: small integers unchanged, others a negative number for each distinct id.

        Raises:
            ConfigError: there are more than `REQUEST_BLOCKS_MAX`, or one is neither an integer nor a string.
        """
        if len(ids) > REQUEST_BLOCKS_MAX:
            raise ConfigError(f"hash_ids has {len(ids)} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
        try:
            # numpy would make of strings an array as wide as the longest.
            own = np.asarray(array("q", cast("Sequence[int]", ids)))
        except (TypeError, OverflowError):
            own = None
        if own is not None and (not len(own) or (own.min() >= 0 and own.max() < OWN_IDS_MAX)):
            return own
        numbers = self._numbers
        out = np.empty(len(ids), np.int64)
        for place, block in enumerate(ids):
            if isinstance(block, bool) or not isinstance(block, int | str):
                raise ConfigError(f"hash_ids holds {short(block)}; allowed: whole numbers or texts")
            is_own = isinstance(block, int) and 0 <= block < OWN_IDS_MAX
            out[place] = block if is_own else -1 - numbers.setdefault(block, len(numbers))
        return out


def from_runs(runs: object) -> Ids:
    """The ids of a list of [first id, count].

    Raises:
        ConfigError: it is malformed, an id is out of range, or there are more than `REQUEST_BLOCKS_MAX` blocks.
    """
    if not isinstance(runs, list):
        raise ConfigError(f"hash_runs is {short(runs)}; allowed: a list of [first id, count]")
    parts: list[range] = []
    for run in cast("list[Any]", runs):
        match run:
            case [int(first), int(count)] if 0 <= first <= RUN_IDS_MAX - count and count > 0:
                parts.append(range(first, first + count))
            case _:
                raise ConfigError(
                    f"hash_runs holds {short(run)}; allowed: [first id, count from 1], ids below {RUN_IDS_MAX}"
                )
    blocks = sum(map(len, parts))
    if blocks > REQUEST_BLOCKS_MAX:
        raise ConfigError(f"hash_runs has {blocks} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
    if len(parts) == 1:
        return np.arange(parts[0].start, parts[0].stop, dtype=np.int64)
    return np.fromiter(chain.from_iterable(parts), np.int64, blocks)


def blocks_of(line: dict[str, Any], numbering: Numbering) -> Ids:
    """The block ids of a request line, from `hash_ids` or `hash_runs`.

    Raises:
        ConfigError: they are malformed.
        KeyError: there are none.
    """
    if "hash_runs" in line:
        return from_runs(line["hash_runs"])
    ids = line["hash_ids"]
    if not isinstance(ids, list):
        raise ConfigError(f"hash_ids is {short(ids)}; allowed: a list of ids")
    return numbering.numbered(cast("list[object]", ids))


def merge_blocks(blocks: Ids, factor: int) -> Ids:
    """Every `factor` blocks as one. The last id of each names its whole prefix, so it names the larger block."""
    if factor == 1:
        return blocks
    taken = blocks[factor - 1 :: factor]
    return np.append(taken, blocks[-1]) if len(blocks) % factor else taken


def by_time(path: Path, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The requests sorted by time, which all have to be held for that.

    Raises:
        ConfigError: they have more than `HELD_BLOCKS_MAX` blocks; names `path` and the line.
    """
    held: list[TraceRequest] = []
    blocks = 0
    for request in requests:
        blocks += len(request.blocks)
        if blocks > HELD_BLOCKS_MAX:
            raise ConfigError(
                f"trace {path}, line {request.line}: {blocks} blocks up to here, held to be sorted; allowed: at most "
                f"{HELD_BLOCKS_MAX}"
            )
        held.append(request)
    held.sort(key=lambda it: it.time_s)
    return held
