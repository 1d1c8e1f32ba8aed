"""Host memory is page-locked after the start, in whole slots, and unlocked at the end; an error is logged once."""

import logging
import threading

import pytest
from tests.system import until

from kvtier.device import page_lock as module
from kvtier.device.page_lock import cuda_page_lock
from kvtier.errors import ConfigError

WAIT_S = 30.0
UNIT = 1000


class Registrar:
    """A driver that can be paused, and fails after `parts` calls."""

    def __init__(self, parts: int = 10**6) -> None:
        self.parts = parts
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.locked: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, size_bytes: int) -> int:
        assert self.may_go_on.wait(WAIT_S)
        self.registered.append((address, size_bytes))
        if len(self.registered) > self.parts:
            return 2
        self.locked[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 1


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 3500)


def test_parts_are_whole_slots_and_cover_everything() -> None:
    registrar = Registrar()
    lock = cuda_page_lock("on", registrar)
    assert lock is not None
    unlock = lock(70_000, 10 * UNIT, UNIT)
    assert registrar.registered == [(70_000, 3000), (73_000, 3000), (76_000, 3000), (79_000, 1000)]
    unlock()
    assert not registrar.locked
    unlock()


@pytest.mark.parametrize(("unit", "parts"), [(0, [(0, 10_000)]), (6000, [(0, 6000), (6000, 4000)])])
def test_without_slots_or_with_large_ones(unit: int, parts: list[tuple[int, int]]) -> None:
    registrar = Registrar()
    lock = cuda_page_lock("on", registrar)
    assert lock is not None
    lock(0, 10_000, unit)
    assert registrar.registered == parts


def test_the_start_does_not_wait_and_the_end_stops_it() -> None:
    registrar = Registrar()
    registrar.may_go_on.clear()
    lock = cuda_page_lock("auto", registrar)
    assert lock is not None
    unlock = lock(0, 10 * UNIT, UNIT)
    assert not registrar.registered
    ended = threading.Thread(target=unlock)
    ended.start()
    registrar.may_go_on.set()
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert not registrar.locked
    assert len(registrar.registered) <= 1, "a lock that has not begun must not begin"


def test_an_error_is_logged_once_and_the_rest_is_used_unlocked(caplog: pytest.LogCaptureFixture) -> None:
    registrar = Registrar(parts=2)
    lock = cuda_page_lock("auto", registrar)
    assert lock is not None
    with caplog.at_level(logging.WARNING):
        unlock = lock(0, 10 << 20, 1 << 20)
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert "2 of 10 MiB" in record.message
    assert "CUDA error 2 (out of memory)" in record.message
    unlock()
    assert not registrar.locked


def test_with_mode_on_an_error_is_raised_and_nothing_stays_locked() -> None:
    registrar = Registrar(parts=1)
    lock = cuda_page_lock("on", registrar)
    assert lock is not None
    with pytest.raises(ConfigError, match=r"host.page_lock = on: 0 of 0 MiB .* a smaller host.capacity_bytes"):
        lock(0, 10 * UNIT, UNIT)
    assert not registrar.locked
    assert cuda_page_lock("off") is None
