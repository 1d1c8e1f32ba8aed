"""A tier that refuses writes says so once, and once that it takes them again."""

import pytest

from kvtier.tier.refusal_log import QUIET_S, RefusalLog

FULL = ("WARNING", "tier far refuses writes: full")
AGAIN = ("INFO", "tier far accepts writes again")


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def log(clock: _Clock, caplog: pytest.LogCaptureFixture) -> RefusalLog:
    caplog.set_level("INFO", "kvtier")
    return RefusalLog("far", clock)


def _lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return lines


def test_a_series_of_refusals_has_two_lines(log, clock, caplog) -> None:
    log.taken()
    for _ in range(1000):
        log.refused("full")
        clock.now_s += 1.0
    assert _lines(caplog) == [FULL]
    clock.now_s += QUIET_S
    for _ in range(3):
        log.taken()
    assert _lines(caplog) == [AGAIN]
    log.refused("full")
    assert _lines(caplog) == [FULL]


def test_a_server_of_several_that_refuses_is_one_series(log, clock, caplog) -> None:
    for _ in range(1000):
        log.refused("full")
        log.taken()
        clock.now_s += QUIET_S / 2
    assert _lines(caplog) == [FULL]


def test_without_a_reason_only_many_in_a_row_are_a_series(log, clock, caplog) -> None:
    for _ in range(100):
        log.refused("full", 3)
        log.refused("full", 3)
        log.taken()
    assert _lines(caplog) == []
    for _ in range(100):
        log.refused("full", 3)
    assert _lines(caplog) == [FULL]
