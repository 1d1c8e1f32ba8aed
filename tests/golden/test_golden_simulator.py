"""The core decides as it did: digests of the simulator's traces, recorded before the core was reworked."""

import json
from pathlib import Path

import pytest
from tests.sim.golden import BLOCK, QUICK, VARIANTS, digest

RECORD = json.loads((Path(__file__).parent / "simulator.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_seeds_decide_as_recorded(variant):
    assert digest(variant, range(QUICK)) == RECORD[variant]["quick"]


@pytest.mark.nightly
@pytest.mark.parametrize(("variant", "block"), [(name, block) for name in VARIANTS for block in range(VARIANTS[name])])
def test_all_seeds_decide_as_recorded(variant, block):
    first = block * BLOCK
    assert digest(variant, range(first, first + BLOCK)) == RECORD[variant]["blocks"][block]
