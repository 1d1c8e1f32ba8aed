"""A handler of a signal that raises, at every instruction of a load and a store: only the caller gets it."""

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from tests.memory_tier import MemoryTier
from tests.rig import CHUNK_TOKENS, LAYOUT, Engine, load_places, local, places_of, prefix_of
from tests.system import until

from kvtier.runtime.session import Session
from kvtier.testing.host_copier import HostCopier
from kvtier.types import LoadDone, RequestId, StoreDone

CHUNKS = 2
PARTS = 16
DEADLINE_S = 20.0
ENDS = {"load": LoadDone, "store": StoreDone}


class TimeLimitError(Exception):
    """What a test harness raises in its handler of SIGALRM."""


def times_out(_number: int, _frame: object) -> None:
    raise TimeLimitError


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM], ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises; that of Ctrl-C is Python's."""
    before = signal.signal(signal.SIGALRM, times_out)
    yield request.param
    assert signal.signal(signal.SIGALRM, before) is times_out, "not put back"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "not put back"


class Interrupt:
    """Sends a signal before the k-th instruction of a call; 0: counts them only."""

    def __init__(self, k: int, number: signal.Signals) -> None:
        self.k, self.count, self.where = k, 0, ""
        self.number = number

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        if self.count == self.k and not self.where:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            signal.raise_signal(self.number)
        return self


class World:
    """A session, and the engine that calls it."""

    def __init__(self) -> None:
        tiers = {"below": MemoryTier("below", capacity_bytes=64 << 20)}
        self.session: Session
        self.session, self.cache, _ = local(HostCopier(LAYOUT, Engine(32).groups), tiers)
        self.numbers = iter(range(1 << 30))
        self.ended: Counter[tuple[type, str]] = Counter()

    def call(self, kind: str, name: str, number: int) -> None:
        prefix, request = prefix_of(CHUNKS, seed=number % 5), RequestId(name)
        if kind == "load":
            self.session.load(request, prefix, CHUNKS * CHUNK_TOKENS, load_places(CHUNKS * CHUNK_TOKENS))
        else:
            self.session.store(request, prefix, places_of(range(CHUNKS)))

    def settle(self, about: str) -> None:
        """Wait until all that has begun has ended."""
        events = self.session._events
        until(lambda: not events._loads and not events._stores, f"no event: {about}", DEADLINE_S)
        with self.session._lock:  # an event is queued under the lock
            heard = self.session.poll()
        self.ended.update((type(event), event.request) for event in heard if isinstance(event, LoadDone | StoreDone))

    def interrupted(self, kind: str, k: int, sent: signal.Signals) -> Interrupt:
        """Interrupt a call at its k-th instruction, and call again."""
        number = next(self.numbers)
        name, planted, is_raised = f"{kind} {number}", Interrupt(k, sent), False
        sys.settrace(planted)
        try:
            self.call(kind, name, number)
        except (KeyboardInterrupt, TimeLimitError):
            is_raised = True
        finally:
            sys.settrace(None)
        about = f"{kind}, instruction {k}, {planted.where}"
        assert is_raised == bool(planted.where), f"swallowed: {about}"
        self.settle(about)
        assert not self.session._is_broken, f"shut: {about}"
        before = self.ended[ENDS[kind], name]
        assert before <= 1, about
        self.call(kind, name, number)
        self.settle(about)
        assert self.ended[ENDS[kind], name] == before + 1, about
        with self.session._lock:
            self.cache.check()
        return planted


@pytest.fixture
def world():
    made = World()
    yield made
    gc.enable()
    assert made.session.close().flushed is not made.session._is_broken


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))])
@pytest.mark.parametrize("kind", ENDS)
def test_an_interrupt_reaches_the_caller_and_the_session_goes_on(kind, part, world, number):
    world.interrupted(kind, 0, number)
    k = part + 1
    while world.interrupted(kind, k, number).where:
        k += PARTS
    assert k > 300


@pytest.mark.parametrize("is_held_back", [True, False])
def test_the_handler_of_an_engine_is_called_once_after_the_call(is_held_back, world, monkeypatch):
    """As vLLM's, which raises SystemExit. Inside the call, it shuts the session."""
    if not is_held_back:
        monkeypatch.setattr(Session, "_uninterrupted", lambda _self, call, *arguments: call(*arguments))
    heard, store = [], world.cache.store

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        store(*arguments)

    monkeypatch.setattr(world.cache, "store", interrupted)
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number) or sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            world.call("store", "here", 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    assert world.session._is_broken is not is_held_back


def test_of_several_signals_in_one_call_each_handler_is_called_although_one_raises(world, monkeypatch):
    heard, store = [], world.cache.store
    wanted = {signal.SIGALRM: times_out, signal.SIGUSR1: lambda *_: heard.append("usr1"), signal.SIGHUP: times_out}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}

    def interrupted(*arguments: Any) -> None:
        for number in wanted:
            signal.raise_signal(number)
        store(*arguments)

    monkeypatch.setattr(world.cache, "store", interrupted)
    try:
        with pytest.raises(TimeLimitError) as error:
            world.call("store", "here", 2)
    finally:
        now = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert now == wanted
    assert heard == ["usr1"]
    assert isinstance(error.value.__context__, TimeLimitError)
    assert not world.session._is_broken


def test_a_real_signal_leaves_the_session_at_work(world):
    """As a terminal sends it, at any time. Python loses what is raised while it collects garbage."""
    raised = 0
    gc.collect()
    gc.disable()
    for number in range(60):
        has_begun, is_over = threading.Event(), threading.Event()

        def interrupt(pause_s: float, has_begun: threading.Event, is_over: threading.Event) -> None:
            has_begun.wait()
            time.sleep(pause_s)
            os.kill(os.getpid(), signal.SIGINT)
            is_over.set()

        thread = threading.Thread(target=interrupt, args=(number * 2e-5, has_begun, is_over))
        thread.start()
        try:
            has_begun.set()
            while not is_over.is_set():
                world.call("store", f"{number} {next(world.numbers)}", number)
            time.sleep(1)
        except KeyboardInterrupt:
            raised += 1
        thread.join()
        world.settle(f"signal {number}")
        assert not world.session._is_broken
    assert raised == 60
    with world.session._lock:
        world.cache.check()
