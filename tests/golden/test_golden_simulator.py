"""The core decides as it did: digests of the simulator's traces, recorded before the core was reworked."""

import json
from pathlib import Path

import pytest
from tests.sim.golden import BLOCK, KINDS, QUICK, digest

RECORD = json.loads((Path(__file__).parent / "simulator.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("tiers", RECORD)
def test_the_first_seeds_decide_as_recorded(tiers):
    assert digest(range(QUICK), KINDS[tiers]) == RECORD[tiers]["quick"]


@pytest.mark.nightly
@pytest.mark.parametrize(("tiers", "block"), [(name, n) for name, kind in KINDS.items() for n in range(kind.blocks)])
def test_all_seeds_decide_as_recorded(tiers, block):
    seeds = range(block * BLOCK, (block + 1) * BLOCK)
    assert digest(seeds, KINDS[tiers]) == RECORD[tiers]["blocks"][block]
