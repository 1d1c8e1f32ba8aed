"""The circuit breaker of a tier: when it opens, when it tries again, when it closes."""

from kvtier.core.health import RETRY_SECONDS_MAX, Health


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    health = Health(failures_max=2, retry_s=1.0)
    assert not health.failed(0.0)
    assert not health.succeeded()
    assert not health.failed(0.0)
    assert health.is_up()
    assert health.may_ask(0.0)
    assert health.failed(0.0)
    assert not health.is_up()
    assert not health.may_ask(0.5)


def test_after_its_rest_one_trial_is_let_through() -> None:
    health = Health(failures_max=1, retry_s=1.0)
    health.failed(0.0)
    assert health.may_ask(1.0)
    health.asked()
    assert not health.may_ask(1.0)
    health.unanswered()
    assert health.may_ask(1.0)
    health.asked()
    assert health.succeeded(), "it came back"
    assert health.may_ask(1.0)
    health.asked()
    assert not health.is_trial


def test_each_failed_trial_doubles_the_rest_up_to_a_minute() -> None:
    health = Health(failures_max=1, retry_s=1.0)
    assert health.failed(0.0)
    now_s, rests = 0.0, []
    for _ in range(10):
        now_s = health.closed_until_s
        health.asked()
        assert not health.failed(now_s), "it is down already"
        rests.append(health.closed_until_s - now_s)
    assert rests[:4] == [2.0, 4.0, 8.0, 16.0]
    assert rests[-1] == RETRY_SECONDS_MAX


def test_an_old_failure_that_is_no_trial_changes_nothing() -> None:
    health = Health(failures_max=1, retry_s=1.0)
    health.failed(0.0)
    assert not health.failed(0.5)
    assert health.closed_until_s == 1.0
