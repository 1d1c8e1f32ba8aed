"""Digests of the core's decisions in tens of thousands of seeds: `python -m tests.sim.golden`.

Prints what `tests/golden/simulator.json` holds. Seeds with one lower tier at most were recorded before the hierarchy of
tiers, which changed no decision in them, and those with several after it. All were recorded again when estimates of
links took whole rounds, which changed the seconds of load options, and those with several when relays took slots on
demand, and relays without a staging area were dropped. A change of the core that is meant to change no decision leaves
every digest as it is.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b

from tests.sim.run import run
from tests.sim.scenario import draw

BLOCK = 1000
QUICK = 200
BLOCKS = 20


def digest(seeds: Iterable[int], *, has_several: bool) -> str:
    """One digest of the traces of those `seeds` that have several lower tiers, or of those that have one at most.

    Raises:
        AssertionError: a seed fails.
    """
    total = blake2b(digest_size=16)
    for seed in seeds:
        if (len(draw(seed).tiers) > 1) is not has_several:
            continue
        report = run(seed, has_digest=True)
        assert report.is_good, f"seed {seed}: {report.failure}\n{report.where}"
        total.update(report.digest.encode())
    return total.hexdigest()


def main() -> None:
    """Print the record."""
    record = {
        name: {
            "quick": digest(range(QUICK), has_several=has_several),
            "blocks": [
                digest(range(block * BLOCK, (block + 1) * BLOCK), has_several=has_several) for block in range(BLOCKS)
            ],
        }
        for name, has_several in (("one tier", False), ("several tiers", True))
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
