"""Admission: what is seen once is not written, and remembering it is bounded."""

import pytest

from kvtier.errors import ConfigError
from kvtier.policy.admission import AdmitAll, SecondSight
from kvtier.testing.policy import held


def test_admit_all_admits():
    assert AdmitAll().admit(held(1), "disk")


def test_the_second_sight_is_admitted_and_so_is_every_later_one():
    admitter = SecondSight(memory_count=10)
    assert [admitter.admit(held(1), "disk") for _ in range(4)] == [False, True, True, True]


def test_places_are_told_apart():
    admitter = SecondSight(memory_count=10)
    assert not admitter.admit(held(1), "host")
    assert not admitter.admit(held(1), "disk")
    assert admitter.admit(held(1), "disk")


def test_memory_is_bounded_and_forgets_whom_it_saw_longest_ago():
    admitter = SecondSight(memory_count=3)
    for number in (1, 2, 3):
        admitter.admit(held(number), "disk")
    assert admitter.admit(held(1), "disk")  # a new sight: 2 is the oldest now
    admitter.admit(held(4), "disk")
    assert len(admitter) == 3
    assert admitter.admit(held(1), "disk")
    assert not admitter.admit(held(2), "disk")


def test_an_impossible_memory_is_refused():
    with pytest.raises(ConfigError, match=r"memory_count must be at least 1, got 0"):
        SecondSight(memory_count=0)
