"""Computes digests of the core's decisions in tens of thousands of seeds: `python -m tests.sim.golden`.

It prints the content of `tests/golden/simulator.json`. Seeds with at most one lower tier were recorded before the
hierarchy of tiers, which changed no decision in them. Seeds with several tiers were recorded after it. All were
recorded again when estimates of links took whole rounds, which changed the seconds of load options. Those with several
tiers were recorded again when relays took slots on demand, and relays without a staging area were dropped. Announced
chunks came later, in runs of their own, which were recorded again when their searches no longer changed a tier's hit
rate. All were recorded again when links had an estimate of their pauses, when loads no longer waited for a tier whose
reads have stopped, and when seeds no longer drew a number of ranks, which the core does not see. Object stores came
last. All but these were recorded again when a waiting request asked for what had left host memory since its first
lookup. Hints that retain, lower and prefetch came later, in runs of their own. These were recorded again when the
newest of several hints decided how an object is retained, and when only the end of the highest priority counted.

All were recorded again when an object whose read failed was left alone in that tier. Only runs in which a read failed
or was late changed.

A change of the core that should change no decision must leave every digest as it is.
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
    """The runs that a digest covers."""

    has_several: bool
    """Whether seeds have several lower tiers, or at most one."""
    announced: float = 0.0
    """`Scenario.announced` of the runs."""
    hinted: float = 0.0
    blocks: int = BLOCKS
    has_objects: bool = False
    """Whether the runs are calls of an object store, in seeds with any number of tiers."""


KINDS = {
    "one tier": Kind(has_several=False),
    "several tiers": Kind(has_several=True),
    "announced": Kind(has_several=True, announced=0.5, blocks=1),
    "hints": Kind(has_several=True, hinted=0.7, blocks=1),
    "objects": Kind(has_several=True, blocks=1, has_objects=True),
}


def digest(seeds: Iterable[int], kind: Kind) -> str:
    """Return one digest of the traces of all `seeds` of this kind.

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
