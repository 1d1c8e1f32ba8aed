"""A fault that repeats is one line in a while, and none is forgotten in the count."""

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


def test_the_first_of_each_kind_at_once_then_one_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = FaultLog(10.0, clock)
    for number in range(5):
        log.tell("read", f"fault {number}")
        log.tell("write", f"fault {number}")
    assert _lines(caplog) == ["read: fault 0", "write: fault 0"]
    clock.now_s = 9.9
    log.tell("read", "still")
    assert _lines(caplog) == []
    clock.now_s = 10.0
    log.tell("read", "still")
    assert _lines(caplog) == ["read: still (and 5 more like it before)"]
    clock.now_s = 20.0
    log.tell("read", "again")
    assert _lines(caplog) == ["read: again"]


def test_kinds_without_end_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(10.0, _Clock())
    for number in range(KINDS_MAX + 50):
        log.tell(f"kind {number}", "x")
    assert len(_lines(caplog)) == KINDS_MAX + 1
