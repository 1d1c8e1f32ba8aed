"""The core decides as it did: digests of the simulator's traces, recorded before the core was reworked."""

import json
from pathlib import Path

import pytest
from tests.sim.golden import BLOCK, BLOCKS, QUICK, digest

RECORD = json.loads((Path(__file__).parent / "simulator.json").read_text(encoding="utf-8"))


def test_the_first_seeds_decide_as_recorded():
    assert digest(range(QUICK)) == RECORD["quick"]


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(BLOCKS))
def test_all_seeds_decide_as_recorded(block):
    assert digest(range(block * BLOCK, (block + 1) * BLOCK)) == RECORD["blocks"][block]
