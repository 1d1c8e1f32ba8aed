"""Digests of the core's decisions in tens of thousands of seeds: `python -m tests.sim.golden`.

Prints what `tests/golden/simulator.json` holds. Recorded once, from the commit named there; a change of the core that
is meant to change no decision has to leave every digest as it is.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b

from tests.sim.run import run

BLOCK = 1000
QUICK = 200
BLOCKS = 20


def digest(seeds: Iterable[int]) -> str:
    """One digest of the traces of `seeds`.

    Raises:
        AssertionError: a seed fails.
    """
    total = blake2b(digest_size=16)
    for seed in seeds:
        report = run(seed, has_digest=True)
        assert report.is_good, f"seed {seed}: {report.failure}\n{report.where}"
        total.update(report.digest.encode())
    return total.hexdigest()


def main() -> None:
    """Print the record."""
    record = {
        "quick": digest(range(QUICK)),
        "blocks": [digest(range(block * BLOCK, (block + 1) * BLOCK)) for block in range(BLOCKS)],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
