"""The circuit breaker of a tier: when it opens, when it tries again, when it closes."""

from kvtier.core.tier_state import RETRY_SECONDS_MAX, CircuitBreaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = CircuitBreaker(failures_max=2, retry_s=1.0)
    assert not breaker.failed(0.0, 1)
    assert not breaker.succeeded()
    assert not breaker.failed(0.0, 1)
    assert breaker.is_up()
    assert breaker.allows(0.0)
    assert breaker.failed(0.0, 1)
    assert not breaker.is_up()
    assert not breaker.allows(0.5)


def test_after_its_rest_one_trial_is_let_through() -> None:
    breaker = CircuitBreaker(failures_max=1, retry_s=1.0)
    breaker.failed(0.0, 1)
    assert breaker.allows(1.0)
    breaker.attempted(9)
    assert not breaker.allows(1.0)
    breaker.inconclusive(9)
    assert breaker.allows(1.0)
    breaker.attempted(9)
    assert breaker.succeeded(), "it came back"
    assert breaker.allows(1.0)
    breaker.attempted(9)
    assert not breaker.trial


def test_each_failed_trial_doubles_the_rest_up_to_a_minute() -> None:
    breaker = CircuitBreaker(failures_max=1, retry_s=1.0)
    assert breaker.failed(0.0, 1)
    now_s, rests = 0.0, []
    for _ in range(10):
        now_s = breaker.retry_at_s
        breaker.attempted(9)
        assert not breaker.failed(now_s, 9), "it is down already"
        rests.append(breaker.retry_at_s - now_s)
    assert rests[:4] == [2.0, 4.0, 8.0, 16.0]
    assert rests[-1] == RETRY_SECONDS_MAX


def test_an_old_operation_that_is_no_trial_changes_nothing() -> None:
    breaker = CircuitBreaker(failures_max=1, retry_s=1.0)
    breaker.failed(0.0, 1)
    assert not breaker.failed(0.5, 2)
    assert breaker.retry_at_s == 1.0
    breaker.attempted(9)
    breaker.inconclusive(2)
    assert not breaker.failed(1.0, 3)
    assert not breaker.allows(1.0), "the trial is under way"
    assert not breaker.failed(1.5, 9)
    assert breaker.retry_at_s == 3.5
