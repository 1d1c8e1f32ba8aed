"""The core decides as it did: digests of the simulator's traces, recorded before the core was reworked."""

import json
from pathlib import Path

import pytest
from tests.sim.golden import BLOCK, BLOCKS, QUICK, digest

RECORD = json.loads((Path(__file__).parent / "simulator.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("tiers", RECORD)
def test_the_first_seeds_decide_as_recorded(tiers):
    assert digest(range(QUICK), has_several=tiers == "several tiers") == RECORD[tiers]["quick"]


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("tiers", RECORD)
def test_all_seeds_decide_as_recorded(tiers, block):
    seeds = range(block * BLOCK, (block + 1) * BLOCK)
    assert digest(seeds, has_several=tiers == "several tiers") == RECORD[tiers]["blocks"][block]
