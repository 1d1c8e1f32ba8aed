"""The bars of `bench/documents.py`."""

from collections import defaultdict

import pytest
from bench.documents import NONE, Sums, Table, bound, judged


def table(**changes: float) -> Table:
    """An arm that keeps all bars, with `changes` to its figures."""
    of = {"kl": 0.05, "same": 960, "added_loss": 10, "kept": 198} | changes
    found: Table = defaultdict(Sums)
    for what in ("questions", "text"):
        found[NONE, what] = Sums(kl=[1.0, 3.0], tokens=1000, kl_sum=2000)
        found["k = 8", what] = Sums(
            kl=[of["kl"]], tokens=1000, kl_sum=1000 * of["kl"], same=int(of["same"]), added_loss=of["added_loss"],
            kept=int(of["kept"]), of=200,
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, []),
        ({"kept": 195}, ["loss", "loss_bound"]),
        ({"kl": 0.06}, ["kl_share_questions", "kl_share_text"]),
        ({"same": 940}, ["top1"]),
        ({"added_loss": 30}, ["nll"]),
    ],
)
def test_an_arm_fails_the_bars_that_it_does_not_keep(changes: dict[str, float], fails: list[str]) -> None:
    assert judged(table(**changes), "k = 8")["fails"] == fails


def test_a_control_of_the_first_cases_is_compared_with_the_same_cases() -> None:
    assert judged(table(), "k = 8")["kl_share_text"] == pytest.approx(0.05), "of 1.0, not of the mean of 1.0 and 3.0"


def test_the_bound_is_wilsons() -> None:
    assert bound(4, 200) == pytest.approx(0.0503, abs=1e-4)
    assert bound(0, 200) == pytest.approx(0.0188, abs=1e-4)
