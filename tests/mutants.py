"""Planted bugs: small patches of the core that the simulator must find."""

from collections.abc import Callable

import pytest
from tests import sim

from kvtier.core import cache

SEEDS = 400
"""A mutant that survives this many seeds means that some promise of the core is not looked at."""

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def blind_checks(patch: Patch) -> None:
    """The core does not notice by itself: the bug has to be seen from outside."""
    patch.setattr(cache.Cache, "check", lambda self: None)


def assert_found(plant: Mutant, patch: Patch) -> None:
    """Plant a bug and run seeds until one fails; a bug that only crashes the patch itself does not count."""
    plant(patch)
    found = next((report for report in map(sim.run, range(SEEDS)) if not report.is_good), None)
    assert found is not None, f"{plant.__name__} survived {SEEDS} seeds"
    assert found.failure is not None
    assert not found.failure.startswith(("TypeError", "AttributeError", "NameError")), found.where
    print(f"{plant.__name__}: seed {found.seed}: {found.failure[:150]}")
