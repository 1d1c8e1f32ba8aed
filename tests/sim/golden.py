"""Digests of the core's decisions in tens of thousands of seeds: `python -m tests.sim.golden`.

Prints what `tests/golden/simulator.json` holds. Recorded once, from the commit named there; a change of the core that
is meant to change no decision has to leave every digest as it is.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from tests.sim.run import run
from tests.sim.scenario import draw

BLOCK = 1000
QUICK = 200
VARIANTS = {"all admitted": 20, "as drawn": 2}
"""How many blocks of seeds are recorded; whether the scenario's admission policy refuses objects."""


def digest(variant: str, seeds: Iterable[int]) -> str:
    """One digest of the traces of `seeds`.

    Raises:
        AssertionError: a seed fails.
    """
    total = blake2b(digest_size=16)
    for seed in seeds:
        overrides: dict[str, object] = {}
        if variant == "all admitted":
            overrides["faults"] = replace(draw(seed).faults, refused=0.0)
        report = run(seed, has_digest=True, **overrides)
        assert report.is_good, f"seed {seed}, {variant}: {report.failure}\n{report.where}"
        total.update(report.digest.encode())
    return total.hexdigest()


def main() -> None:
    """Print the record."""
    record = {
        variant: {
            "quick": digest(variant, range(QUICK)),
            "blocks": [digest(variant, range(block * BLOCK, (block + 1) * BLOCK)) for block in range(blocks)],
        }
        for variant, blocks in VARIANTS.items()
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
