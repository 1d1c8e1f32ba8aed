"""An object store asks tiers in order, and a remote one for few names in few rounds."""

import random
from itertools import pairwise

import pytest

from kvtier.core.limits import TierRules
from kvtier.core.output import Output
from kvtier.core.tier_state import TierStates
from kvtier.runtime.object_search import search
from kvtier.testing.object_store import object_id

NAMES_MAX = 1 + 23 + 23


class Answers:
    """Tiers with the given objects. It counts what each is asked for."""

    def __init__(self, held, remote=(), silent=()):
        rules = [TierRules(name=name, is_remote=name in remote) for name in held]
        self.tiers = TierStates(rules, 64, Output(), ()).all
        self.held = {name: {object_id(number) for number in numbers} for name, numbers in held.items()}
        self.silent = silent
        self.asked = {name: [] for name in held}

    def __call__(self, tier, objects):
        self.asked[tier.name].append(list(objects))
        return None if tier.name in self.silent else [each in self.held[tier.name] for each in objects]

    def search(self, count, *, is_run=True):
        found = search(self.tiers, [object_id(number) for number in range(count)], self, is_run=is_run)
        return [None if tier is None else tier.name for tier in found]


def run_of(found):
    return next((number for number, tier in enumerate(found) if tier is None), len(found))


def test_each_tier_is_asked_for_what_faster_ones_lack():
    answers = Answers({"fast": [0, 1, 4], "slow": [2, 4]})
    assert answers.search(6) == ["fast", "fast", "slow", None, "fast", None]
    assert answers.asked["slow"] == [[object_id(number) for number in (2, 3, 5)]]


def test_a_tier_without_an_answer_is_passed_over():
    assert Answers({"fast": [0, 1], "slow": [0]}, silent=["fast"]).search(2) == ["slow", None]
    assert Answers({"fast": [0], "far": [0, 1]}, remote=["far"], silent=["far"]).search(2) == ["fast", None]


def test_nothing_missing_asks_no_further():
    answers = Answers({"fast": range(5), "slow": range(5)})
    assert answers.search(5) == ["fast"] * 5
    assert answers.asked["slow"] == []
    assert answers.search(0) == []


@pytest.mark.parametrize("count", [1, 2, 3, 24, 25, 100, 553])
def test_the_run_of_a_remote_tier_is_exact_after_three_rounds(count):
    for run in {0, 1, count // 2, count - 1, count, *random.Random(count).choices(range(count + 1), k=20)}:
        answers = Answers({"far": range(run)}, remote=["far"])
        assert run_of(answers.search(count)) == run
        assert len(answers.asked["far"]) <= 3
        assert sum(map(len, answers.asked["far"])) <= NAMES_MAX
        assert not any(first == second for first, second in pairwise(answers.asked["far"])), "a round asks anew"


def test_a_long_run_of_a_remote_tier_is_a_few_too_small_at_most():
    for run in random.Random(1).choices(range(2049), k=200):
        found = run_of(Answers({"far": range(run)}, remote=["far"]).search(2048))
        assert run - 4 < found <= run


def test_a_remote_tier_continues_the_run_of_a_faster_one():
    answers = Answers({"fast": [0, 1, 2, 5], "far": [3, 4, 6, 7]}, remote=["far"])
    assert answers.search(10) == ["fast"] * 3 + ["far", "far", "fast", "far", "far", None, None]


def test_where_every_object_counts_a_remote_tier_is_asked_for_all():
    answers = Answers({"far": [0, 7]}, remote=["far"])
    assert answers.search(8, is_run=False) == ["far", *[None] * 6, "far"]
    assert len(answers.asked["far"]) == 1
