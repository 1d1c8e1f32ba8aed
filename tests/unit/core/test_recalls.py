"""When a tier is asked for the chunks that it holds."""

import pytest

from kvtier.core.recall_schedule import ATTEMPTS_MAX, POLL_S, RETRY_S, Recalls
from kvtier.types import Outcome, Recall

DONE, FAILED = Outcome.DONE, Outcome.FAILED


def test_each_tier_is_asked_once_when_it_is_up_until_the_last_record():
    up = {"fast"}
    recalls = Recalls(["fast", "late"], 2)
    (first,) = recalls.due(up.__contains__, 0.0)
    assert first == Recall("fast", 2, 1, 0)
    assert recalls.due(up.__contains__, 9.0) == [], "one question at a time"
    assert recalls.answered(first, DONE, 0, 10.0, is_last=False) == []
    assert recalls.due(up.__contains__, 10.0) == []
    (second,) = recalls.due(up.__contains__, 10.0 + POLL_S)
    (third,) = recalls.answered(second, DONE, 5, 11.0, is_last=False)
    assert third == Recall("fast", 2, 1, 5)
    assert recalls.answered(third, DONE, 2, 11.0, is_last=True) == []
    assert recalls.due(up.__contains__, 99.0) == []
    assert recalls.due({"fast", "late"}.__contains__, 99.0) == [Recall("late", 2, 1, 0)]


def test_failures_begin_anew_ever_later_and_end():
    recalls, now_s = Recalls(["it"], 0), 0.0
    for attempt in range(ATTEMPTS_MAX):
        (command,) = recalls.due(lambda _: True, now_s)
        assert command == Recall("it", 0, attempt + 1, 0)
        assert recalls.answered(command, FAILED, 0, now_s, is_last=False) == []
        assert recalls.due(lambda _: True, now_s + RETRY_S * 2**attempt - 0.1) == []
        now_s += RETRY_S * 2**attempt
    assert recalls.due(lambda _: True, 1e9) == []


@pytest.mark.parametrize(("further", "attempts"), [(1, 3 * ATTEMPTS_MAX), (0, ATTEMPTS_MAX)])
def test_failures_are_in_a_row_unless_there_were_further_records_between_them(further, attempts):
    recalls, now_s = Recalls(["it"], 0), 0.0
    for attempt in range(attempts):
        (command,) = recalls.due(lambda _: True, now_s)
        (following,) = recalls.answered(command, DONE, 5 + further * attempt, now_s, is_last=False)
        assert recalls.answered(following, FAILED, 0, now_s, is_last=False) == []
        assert recalls.due(lambda _: True, now_s + RETRY_S - 0.1) == []
        now_s += RETRY_S if further else RETRY_S * 2**attempt
    assert len(recalls.due(lambda _: True, 1e9)) == further


def test_a_closed_rank_is_not_asked_again():
    recalls = Recalls(["it"], 0)
    (command,) = recalls.due(lambda _: True, 0.0)
    assert recalls.answered(command, Outcome.CANCELLED, 0, 1.0, is_last=False) == []
    assert recalls.due(lambda _: True, 1e9) == []
