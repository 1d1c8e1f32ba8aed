"""Repeated faults are logged once per interval, with their number."""

import pytest

from kvtier.runtime.fault_log import KINDS_MAX, FaultLog


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_first_of_each_kind_is_logged_at_once_then_one_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = FaultLog(10.0, clock)
    for number in range(5):
        log.report("read", f"fault {number}")
        log.report("write", f"fault {number}")
    assert _lines(caplog) == ["read: fault 0", "write: fault 0"]
    clock.now_s = 9.9
    log.report("read", "still")
    assert _lines(caplog) == []
    clock.now_s = 10.0
    log.report("read", "still")
    assert _lines(caplog) == ["read: still (5 similar ones since the last line)"]
    clock.now_s = 20.0
    log.report("read", "again")
    assert _lines(caplog) == ["read: again"]


def test_kinds_beyond_the_limit_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(10.0, _Clock())
    for number in range(KINDS_MAX + 50):
        log.report(f"kind {number}", "x")
    assert len(_lines(caplog)) == KINDS_MAX + 1
