"""Block ids of any kind as small numbers, so that everything behind a reader works on plain arrays."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Ids
from kvtier.trace.io import short

OWN_IDS_MAX = 1 << 25
"""Ids below are taken as they are; others (hashes, texts) are numbered, from -1 downwards, as they appear."""
RUN_IDS_MAX = 1 << 30
"""Ids in runs: whoever writes runs numbers blocks one after the other."""
REQUEST_BLOCKS_MAX = 1 << 20
"""Blocks of one request: with 16 tokens each, 16 million tokens."""
HELD_BLOCKS_MAX = 1 << 28
"""Blocks of all requests that a reader keeps until their time: 1 or 2 GiB."""


class Numbering:
    """Remembers ids that are no small numbers; one for each reading of a trace."""

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {}

    def numbered(self, ids: Sequence[object]) -> Ids:
        """`ids` as numbers: small ones stay, others get a negative one that stays the same for each id.

        Raises:
            ConfigError: they are more than `REQUEST_BLOCKS_MAX`, or one is neither a whole number nor a text.
        """
        if len(ids) > REQUEST_BLOCKS_MAX:
            raise ConfigError(f"hash_ids has {len(ids)} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
        try:
            # Not numpy's own reading of a list: of texts it would make an array as wide as the longest.
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
            if isinstance(block, int) and 0 <= block < OWN_IDS_MAX:
                out[place] = block
            else:
                out[place] = -1 - numbers.setdefault(block, len(numbers))
        return out


def from_runs(runs: object) -> Ids:
    """The ids of a list of [first id, count].

    Raises:
        ConfigError: it is no such list, an id is negative or too large, a run is empty, or they have more than
            `REQUEST_BLOCKS_MAX` blocks.
    """
    if not isinstance(runs, list):
        raise ConfigError(f"hash_runs is {short(runs)}; allowed: a list of [first id, count]")
    parts: list[Iterable[int]] = []
    blocks = 0
    for run in cast("list[Any]", runs):
        match run:
            case [int(first), int(count)] if 0 <= first <= RUN_IDS_MAX - count and count > 0:
                parts.append(range(first, first + count))
                blocks += count
            case _:
                raise ConfigError(
                    f"hash_runs holds {short(run)}; allowed: [first id, count from 1], ids below {RUN_IDS_MAX}"
                )
    if blocks > REQUEST_BLOCKS_MAX:
        raise ConfigError(f"hash_runs has {blocks} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
    if len(parts) == 1:
        run = parts[0]
        return np.arange(run.start, run.stop, dtype=np.int64) if isinstance(run, range) else np.zeros(0, np.int64)
    return np.fromiter(chain.from_iterable(parts), np.int64, blocks)


def blocks_of(line: dict[str, Any], numbering: Numbering) -> Ids:
    """The block ids of a request line, from `hash_ids` or `hash_runs`.

    Raises:
        ConfigError: there are none, or they are malformed.
    """
    if "hash_runs" in line:
        return from_runs(line["hash_runs"])
    if "hash_ids" not in line:
        raise ConfigError("'hash_ids' is missing")
    ids = line["hash_ids"]
    if not isinstance(ids, list):
        raise ConfigError(f"hash_ids is {short(ids)}; allowed: a list of ids")
    return numbering.numbered(cast("list[object]", ids))


def merged(blocks: Ids, factor: int) -> Ids:
    """Every `factor` blocks as one. The last id of a block names its prefix, so it names the larger block, too."""
    if factor == 1:
        return blocks
    taken = blocks[factor - 1 :: factor]
    return np.append(taken, blocks[-1]) if len(blocks) % factor else taken


def held(blocks: int) -> None:
    """Check how many blocks a reader keeps.

    Raises:
        ConfigError: they are more than `HELD_BLOCKS_MAX`.
    """
    if blocks > HELD_BLOCKS_MAX:
        raise ConfigError(f"{blocks} blocks up to here, all kept to be sorted; allowed: at most {HELD_BLOCKS_MAX}")
