"""Digests of the core's decisions in tens of thousands of seeds: `python -m tests.sim.golden`.

Prints what `tests/golden/simulator.json` holds. Seeds with one lower tier at most were recorded before the hierarchy of
tiers, which changed no decision in them, and those with several after it. All were recorded again when estimates of
links took whole rounds, which changed the seconds of load options, and those with several when relays took slots on
demand, and relays without a staging area were dropped. Announced chunks came later, in runs of their own, which
were recorded again when their searches no longer changed a tier's hit rate. All were recorded again when links had an
estimate of their pauses, when loads no longer waited for a tier whose reads have stopped, and when seeds no longer drew
a number of ranks, which the core does not see. Object stores came last. All but these were recorded again when a
waiting request asked for what has left host memory since its first lookup. Hints that retain, lower and prefetch came
later, in runs of their own, which were recorded again when an object that several hints retain counted for the newest,
and when the end of the highest priority alone counted.

All were recorded again when an object whose read failed was left alone in that tier: only runs in which a read failed
or was late have changed.

A change of the core that is meant to change no decision leaves every digest as it is.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from tests.sim import objects
from tests.sim.run import run
from tests.sim.scenario import draw

BLOCK = 1000
QUICK = 200
BLOCKS = 20


class Kind(NamedTuple):
    """Runs that a digest is for."""

    has_several: bool
    """Seeds with several lower tiers, rather than one at most."""
    announced: float = 0.0
    """See `Scenario`."""
    hinted: float = 0.0
    blocks: int = BLOCKS
    has_objects: bool = False
    """Calls of an object store, in seeds with any number of tiers."""


KINDS = {
    "one tier": Kind(has_several=False),
    "several tiers": Kind(has_several=True),
    "announced": Kind(has_several=True, announced=0.5, blocks=1),
    "hints": Kind(has_several=True, hinted=0.7, blocks=1),
    "objects": Kind(has_several=True, blocks=1, has_objects=True),
}


def digest(seeds: Iterable[int], kind: Kind) -> str:
    """One digest of the traces of those `seeds` that are of this kind.

    Raises:
        AssertionError: a seed fails.
    """
    total = blake2b(digest_size=16)
    for seed in seeds:
        if kind.has_objects:
            report = objects.run(seed, has_digest=True)
        elif (len(draw(seed).tiers) > 1) is kind.has_several:
            report = run(seed, has_digest=True, announced=kind.announced, hinted=kind.hinted)
        else:
            continue
        assert report.is_good, f"seed {seed}: {report.failure}\n{report.where}"
        total.update(report.digest.encode())
    return total.hexdigest()


def main() -> None:
    """Print the record."""
    record = {
        name: {
            "quick": digest(range(QUICK), kind),
            "blocks": [digest(range(block * BLOCK, (block + 1) * BLOCK), kind) for block in range(kind.blocks)],
        }
        for name, kind in KINDS.items()
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
