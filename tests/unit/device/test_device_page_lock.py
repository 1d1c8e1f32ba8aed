"""Host memory is page-locked after the start, in whole slots, and unlocked at the end; an error is logged once.

The driver is a double. It gives errors from any call on, blocks, raises, and keeps an error for the calling thread, as
CUDA does. The sessions are real: whatever the driver does, they store and load, and end in time.
"""

import gc
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import rig
from tests.system import until

from kvtier.device import page_lock as module
from kvtier.device.page_lock import cuda_page_lock
from kvtier.errors import ConfigError
from kvtier.runtime import arena
from kvtier.runtime.open import open_session

WAIT_S = 30.0
UNIT = 1000
TOKENS = 4 * rig.CHUNK_TOKENS


class Registrar:
    """A driver.

    Args:
        parts: calls of `register` that succeed; later ones fail.
        code: of the error; an exception is raised.
        unlock_code: of the first call of `unregister`; an exception is raised by each.
    """

    def __init__(self, parts: int = 10**6, code: int | Exception = 2, unlock_code: int | Exception = 0) -> None:
        self.parts, self.code, self.unlock_code = parts, code, unlock_code
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.locked: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []
        self._last = threading.local()

    @property
    def last_error(self) -> int:
        """`cudaGetLastError` of the calling thread, which torch looks at after its own calls, and raises."""
        return getattr(self._last, "code", 0)

    def register(self, address: int, size_bytes: int) -> int:
        self.registered.append((address, size_bytes))
        assert self.may_go_on.wait(WAIT_S)
        if isinstance(self.code, Exception) and len(self.registered) > self.parts:
            raise self.code
        code = self.code if len(self.registered) > self.parts else 0
        known = tuple(self.locked.items())  # two mappings are locked by two threads
        if any(address < start + size and start < address + size_bytes for start, size in known):
            code = 712
        if not code:
            self.locked[address] = size_bytes
        return self._kept(code)

    def unregister(self, address: int) -> int:
        assert self.may_go_on.wait(WAIT_S)
        if isinstance(self.unlock_code, Exception):
            raise self.unlock_code
        code, self.unlock_code = self.unlock_code, 0
        return self._kept(code or (0 if self.locked.pop(address, None) else 713))

    def _kept(self, code: int) -> int:
        self._last.code = code or self.last_error
        return code


@contextmanager
def session(registrar: Registrar, mode: str = "auto", directory: Path | None = None) -> Iterator[rig.Engine]:
    """A session whose memory `registrar` locks. It stores a prompt, and loads it into the engine that this yields."""
    engine = rig.Engine(64, seed=3)
    opened = open_session(
        rig.config(directory), rig.LAYOUT, rig.FINGERPRINT, engine.copier(), page_lock=cuda_page_lock(mode, registrar)
    )
    try:
        chunks = range(4)
        rig.stored(opened.session, "s", rig.prefix_of(4), rig.places_of(chunks))
        kept = [[layer.copy() for layer in group] for group in engine.groups]
        for layer in (layer for group in engine.groups for layer in group):
            layer[:] = 0
        assert rig.loaded(opened.session, "l", rig.prefix_of(4), TOKENS, rig.load_places(TOKENS)).tokens == TOKENS
        before = rig.Engine(64)
        before.groups = kept
        assert engine.same(before, rig.load_places(TOKENS))
        yield engine
    finally:
        opened.session.close(5.0)
        del opened
        gc.collect()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What page-locking has logged."""
    return [it.getMessage() for it in caplog.records if it.name in (module.__name__, "kvtier.runtime.arena")]


def mapped(addresses: Iterable[int]) -> list[int]:
    """Those of `addresses` at which this process has memory."""
    ranges = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [it for it in addresses if any(int(start, 16) <= it < int(end, 16) for start, end in ranges)]


def threads() -> list[threading.Thread]:
    """The threads that lock."""
    return [it for it in threading.enumerate() if it.name == "kvtier page lock"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 3500)
    monkeypatch.setattr(module, "_told", set(), raising=False)


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
    unlock = lock(0, 10_000, unit)
    assert registrar.registered == parts
    unlock()


def test_the_start_does_not_wait_and_the_end_stops_it() -> None:
    registrar = Registrar()
    registrar.may_go_on.clear()
    lock = cuda_page_lock("auto", registrar)
    assert lock is not None
    unlock = lock(0, 10 * UNIT, UNIT)
    until(lambda: registrar.registered)
    assert not registrar.locked
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


# ---- a session, whatever the driver does -----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, 3], ids=["at once", "in the middle"])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (801, "CUDA error 801 (not supported here)"),
        (1, "CUDA error 1 (invalid value)"),
        (2, "CUDA error 2 (out of memory)"),
        (RuntimeError("no driver"), "no driver"),
    ],
)
def test_an_engine_works_unpinned_and_says_so_once(
    code: int | Exception, text: str, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar(parts, code)
    with caplog.at_level(logging.INFO), session(registrar), session(registrar):
        until(lambda: len(registrar.registered) >= parts + 1)
        until(lambda: lines(caplog))
    until(lambda: not threads())
    (line,) = lines(caplog)  # of four mappings in two sessions
    assert text in line
    assert "slower, but correct" in line
    assert not registrar.locked
    assert not registrar.last_error


def test_without_an_error_nothing_is_said_and_all_is_locked(caplog: pytest.LogCaptureFixture) -> None:
    registrar = Registrar()
    with caplog.at_level(logging.INFO), session(registrar):
        until(lambda: sum(registrar.locked.values()) > 900_000)
    until(lambda: not threads())
    assert not lines(caplog)
    assert not registrar.locked


def test_a_driver_that_blocks_delays_nothing_and_its_memory_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_DEADLINE_S", 0.2)
    registrar = Registrar()
    registrar.may_go_on.clear()
    with caplog.at_level(logging.INFO), session(registrar):
        until(lambda: len(registrar.registered) == 2)
        addresses = [address for address, _ in registrar.registered]
        assert not lines(caplog)
    said = lines(caplog)
    assert mapped(addresses) == addresses, "the driver works on memory that is gone"
    assert len(said) == 2
    assert all("did not return within 0.2 s" in line for line in said)
    registrar.may_go_on.set()
    until(lambda: not threads())
    assert not registrar.locked, "what was locked late is unlocked"
    assert len(registrar.registered) == 2, "a part that had not begun must not begin"


def test_a_driver_that_hangs_while_it_unlocks_keeps_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNLOCK_DEADLINE_S", 0.2)
    registrar = Registrar()
    with session(registrar):
        until(lambda: sum(registrar.locked.values()) > 900_000)
        registrar.may_go_on.clear()
    said = lines(caplog)
    assert mapped(registrar.locked) == list(registrar.locked)
    assert len(said) == 2
    assert all("has unlocked nothing for 0.2 s" in line for line in said)
    registrar.may_go_on.set()
    until(lambda: not threads())
    assert not registrar.locked


def test_memory_that_is_not_mapped_any_more_is_seen() -> None:
    registrar, kept = Registrar(), list(arena._kept)
    with session(registrar):
        until(lambda: sum(registrar.locked.values()) > 900_000)
        addresses = [address for address, _ in tuple(registrar.registered)]
        assert mapped(addresses) == addresses
    assert arena._kept == kept
    assert mapped(addresses) != addresses, "other memory may lie at some of them by now"


@pytest.mark.parametrize(
    ("code", "text", "mappings"), [(1, "CUDA error 1 at 0x", 1), (RuntimeError("no driver"), "no driver", 2)]
)
def test_memory_that_cannot_be_unlocked_stays_and_no_error_is_left_to_the_engine(
    code: int | Exception, text: str, mappings: int, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar(unlock_code=code)
    with session(registrar):
        until(lambda: sum(registrar.locked.values()) > 900_000)
    until(lambda: not threads())
    said = lines(caplog)
    assert registrar.locked
    assert mapped(registrar.locked) == list(registrar.locked)
    assert len(registrar.locked) == 1 or mappings == 2, "the other parts are unlocked"
    assert len(said) == mappings, "one for each mapping"
    assert all(text in line for line in said)
    assert not registrar.last_error, "torch would raise it in this thread"


def test_with_mode_on_a_start_that_waits_says_what_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORD_S", 0.05)
    registrar = Registrar()
    registrar.may_go_on.clear()
    unlocks: list[Callable[[], None]] = []
    lock = cuda_page_lock("on", registrar)
    assert lock is not None
    starting = threading.Thread(target=lambda: unlocks.append(lock(0, 8 << 20, 1 << 20)))
    starting.start()
    until(lambda: lines(caplog))
    assert not unlocks
    registrar.may_go_on.set()
    starting.join(WAIT_S)
    (line,) = lines(caplog)
    assert line.startswith(
        "host.page_lock = on: the start waits; 0 of 8 MiB of host memory are page-locked after 0.05 s"
    )
    unlocks[0]()
    assert not registrar.locked


@pytest.mark.parametrize("code", [801, RuntimeError("no driver")])
def test_with_mode_on_an_error_is_said_by_the_exception_only(
    code: int | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar(2, code)
    with pytest.raises(ConfigError, match=r"host\.page_lock = on"), session(registrar, "on"):
        pass
    assert not lines(caplog)
    assert not registrar.locked


def test_two_locks_of_one_range_leave_it_to_the_first(caplog: pytest.LogCaptureFixture) -> None:
    registrar = Registrar()
    lock = cuda_page_lock("auto", registrar)
    assert lock is not None
    first = lock(70_000, 10 * UNIT, UNIT)
    until(lambda: len(registrar.locked) == 4)
    second = lock(70_000, 10 * UNIT, UNIT)
    until(lambda: lines(caplog))
    second()
    assert "CUDA error 712 (already registered)" in lines(caplog)[0]
    assert len(registrar.locked) == 4
    first()
    assert not registrar.locked


@pytest.mark.parametrize("unit", [0, 4096, (3 << 20) + 4096, (256 << 20) - 4096, (256 << 20) + 4096, 1 << 30])
def test_ranges_above_64_gib_are_covered_in_whole_slots(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 256 << 20)
    size = 96 << 30 if not unit else (96 << 30) // unit * unit
    registrar = Registrar()
    lock = cuda_page_lock("on", registrar)
    assert lock is not None
    unlock = lock(1 << 46, size, unit)
    end = 1 << 46
    for address, part in registrar.registered:
        assert address == end
        assert unit == 0 or part % unit == 0
        assert unit == 0 or 0 < part <= max(256 << 20, unit)
        end += part
    assert end == (1 << 46) + size
    unlock()
    assert not registrar.locked


KILLED = """
import sys
from pathlib import Path
from tests.system import until
from tests.unit.device.test_device_page_lock import Registrar, session

registrar = Registrar()
registrar.may_go_on.clear()
with session(registrar, directory=Path(sys.argv[1])):
    until(lambda: registrar.registered)
    print("locking" if not registrar.locked else "not locking", flush=True)
    sys.stdin.read()
"""


def test_a_process_killed_while_it_locks_leaves_its_objects(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "kv")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locking\n"
    objects = tmp_path / "kv" / "objects"
    until(lambda: sum(len(it.name) == 64 for it in objects.rglob("*")) == 8, "the objects are not written")
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=WAIT_S)
    assert child.returncode == -signal.SIGKILL
    engine = rig.Engine(64, seed=4)
    again = open_session(
        rig.config(tmp_path / "kv"),
        *(rig.LAYOUT, rig.FINGERPRINT, engine.copier()),
        page_lock=cuda_page_lock("auto", Registrar()),
    )
    try:
        assert rig.looked_up(again.session, "q", rig.prefix_of(4)).tokens == TOKENS
        assert rig.loaded(again.session, "l", rig.prefix_of(4), TOKENS, rig.load_places(TOKENS)).tokens == TOKENS
        assert engine.same(rig.Engine(64, seed=3), rig.load_places(TOKENS))
    finally:
        again.session.close(5.0)
