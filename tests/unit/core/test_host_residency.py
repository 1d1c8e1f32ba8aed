"""The transition table: every move that exists is in it, and every other one is a mistake that is noticed."""

from itertools import product

import pytest

from kvtier.core.host_residency import COMING, READABLE, TRANSITIONS, Change, Residency, after


@pytest.mark.parametrize(("state", "change"), [move for move in product(Residency, Change) if move not in TRANSITIONS])
def test_a_move_that_is_not_in_the_table_raises(state: Residency, change: Change) -> None:
    with pytest.raises(AssertionError, match=f"no transition for {change.name} in {state.name}"):
        after(state, change)


def test_only_an_arrival_makes_a_copy_readable() -> None:
    ways = {(state, change) for (state, change), then in TRANSITIONS.items() if then in READABLE}
    from_outside = {(state, change) for state, change in ways if state not in READABLE}
    assert {change for _, change in from_outside} == {Change.ARRIVED}
    assert {state for state, _ in from_outside} == set(COMING)
