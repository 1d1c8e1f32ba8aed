"""The k-th call in a session raises, for every k: everything that was begun ends, and once."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from tests.core_driver import prefix_of
from tests.rig import Raise, Site

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.layout import GroupLayout, History, KvLayout, Window
from kvtier.observe.metrics import Metrics
from kvtier.policy.registry import make_evictor
from kvtier.runtime.executor import Completion
from kvtier.runtime.observers.guards import Feature, Guards
from kvtier.runtime.observers.transfer_metrics import CommandCounters, Gauges
from kvtier.runtime.session import Session, SessionError
from kvtier.types import (
    Cancel,
    ChunkKey,
    Command,
    Direction,
    Drop,
    Event,
    LoadDone,
    NextTurn,
    Outcome,
    Place,
    Prefix,
    Presence,
    Probe,
    RequestId,
    StoreDone,
    Tell,
    Transfer,
)

CHUNK = 4
LAYOUT = KvLayout(CHUNK, (GroupLayout(History(), (64,), "test"), GroupLayout(Window(CHUNK), (64,), "test")))
ERRORS: Sequence[type[Exception]] = (AssertionError, RuntimeError, KeyError, OSError, MemoryError)
ENTRANCES = {
    Session.lookup, Session.load, Session.store, Session.release, Session.expects, Session.poll, Session.close,
    Session.tick, Session.ready,
}  # fmt: skip
"""What raises in them before they do anything is the caller's to see: nothing has begun. The session's thread
catches it in `tick`, and the mover in `ready`."""


_ENTRANCE_CODES = {method.__code__ for method in ENTRANCES}


def is_entrance(frame: FrameType) -> bool:
    return frame.f_code in _ENTRANCE_CODES


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


class Instant:
    """A mover without threads: `step` completes the submitted commands, and copies one step later."""

    needs_flush = True

    def __init__(self, held: set[tuple[ChunkKey, int]]) -> None:
        self.held = held
        self.waiting: list[Any] = []
        self.running: list[Transfer] = []
        self.fails: set[Direction] = set()
        self.is_driven = False
        """Whether `flush` makes a step, so that a session that waits in `close` gets on."""
        self.is_closed = False
        self.put: Callable[[Completion], None]
        self.ready: Callable[[], None]

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        self.put, self.ready = put, ready

    def submit(self, *commands: Command) -> None:
        # A cancel comes too late: every command has begun.
        self.waiting += [command for command in commands if not isinstance(command, Cancel)]

    def step(self) -> None:
        """Complete what was submitted, and the copies that the last step has begun."""
        for copy in self.running:
            self.put(Completion(copy, Outcome.FAILED if copy.direction in self.fails else Outcome.DONE))
        waiting, self.waiting, self.running = self.waiting, [], []
        for command in waiting:
            if isinstance(command, Transfer) and command.direction in (Direction.GATHER, Direction.SCATTER):
                self.running.append(command)
            else:
                self.put(self._below(command))
        self.ready()

    def _below(self, command: Any) -> Completion:
        if isinstance(command, Probe):
            return Completion(command, Outcome.DONE, present=tuple(item in self.held for item in command.objects))
        if isinstance(command, Drop | Tell):
            return Completion(command, Outcome.DONE)
        item = (command.key, command.group)
        if command.direction in self.fails:
            return Completion(command, Outcome.CORRUPT if command.direction is Direction.PROMOTE else Outcome.FAILED)
        if command.direction is Direction.DEMOTE:
            self.held.add(item)
        return Completion(command, Outcome.DONE if item in self.held else Outcome.ABSENT)

    def flush(self) -> bool:
        if self.is_driven:
            self.step()
        return True

    def close(self, deadline_s: float) -> bool:
        self.is_closed = True
        self.running.clear()
        return True

    @property
    def copied(self) -> set[RequestId | None]:
        """Requests whose blocks are being copied."""
        return {copy.request for copy in self.running}


class WithoutThread(Session):
    """A session whose `tick` the test calls."""

    def _start(self) -> None:
        pass


class Recording:
    """One session, and the engine that calls it, with its open and ended requests."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.mover = Instant({(key, group) for key in prefix_of("xyz").keys for group in (0, 1)})
        metrics, guards = Metrics(), Guards()
        cache = Cache(
            layout=LAYOUT,
            slots=(8, 8),
            tiers=[TierRules(name="disk")],
            evictor=lambda: make_evictor("adaptive"),
            limits=Limits(load_deadline_s=1.0, store_deadline_s=0.5),
        )
        guards.register(Feature.METRICS, CommandCounters(metrics))
        guards.register(Feature.METRICS, Gauges(metrics, cache, [LAYOUT], []))
        self.closed_below: list[float] = []
        self.session = WithoutThread(
            cache,
            self.mover,
            on_close=self.closed_below.append,
            metrics=metrics,
            guards=guards,
            clock=self.clock,
        )
        self.begun: Counter[tuple[type, str]] = Counter()
        self.ended: Counter[tuple[type, str]] = Counter()
        self.refused: list[BaseException] = []

    def act(self, act: Callable[[], Any]) -> Any:
        """A call of the engine. An exception counts as a refused call."""
        try:
            return act()
        except ERRORS as error:
            self.refused.append(error)
            return None

    def poll(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.act(self.mover.step)
            self.act(self.session.tick)
            self.heard(self.act(self.session.poll) or ())

    def heard(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, LoadDone | StoreDone):
                assert event.request not in self.mover.copied, "answered while its blocks are being copied"
                self.ended[type(event), event.request] += 1

    def lookup(self, request: str, prefix: Prefix) -> int:
        for _ in range(4):
            answer = self.act(lambda: self.session.lookup(RequestId(request), prefix))
            if answer is None or answer.presence is not Presence.PROBING:
                return 0 if answer is None else answer.tokens
            self.act(self.mover.step)
        return 0

    def load(self, request: str, prefix: Prefix, chunks: int) -> None:
        places = [Place(0, chunk, (chunk,)) for chunk in range(chunks)] + [Place(1, chunks - 1, (chunks,))]
        self._begin(LoadDone, request, lambda: self.session.load(RequestId(request), prefix, chunks * CHUNK, places))

    def store(self, request: str, prefix: Prefix) -> None:
        places = [Place(group, chunk, (chunk,)) for chunk in range(len(prefix.keys)) for group in (0, 1)]
        self._begin(StoreDone, request, lambda: self.session.store(RequestId(request), prefix, places))

    def _begin(self, kind: type, request: str, act: Callable[[], None]) -> None:
        refused = len(self.refused)
        self.act(act)
        if len(self.refused) == refused:
            self.begun[kind, request] += 1

    def run(self) -> None:
        """Everything that an engine does with a session."""
        session = self.session
        self.store("s1", prefix_of("abcdef"))
        self.poll(2)
        self.store("s2", prefix_of("abcdefghijkl"))  # larger than host memory: some of it has to wait
        self.poll(4)
        if self.lookup("l1", prefix_of("xyz")):
            self.load("l1", prefix_of("xyz"), 3)
        self.load("l2", prefix_of("xyz"), 2)
        self.store("s3", prefix_of("xyzuvw"))
        self.poll(1)
        self.act(lambda: session.release(RequestId("s2")))
        self.act(lambda: session.expects("conversation", NextTurn.TOOL))
        self.poll(6)
        self.mover.fails = {Direction.PROMOTE, Direction.GATHER, Direction.DEMOTE}
        self.store("s4", prefix_of("mnop"))
        self.load("l3", prefix_of("abc"), 3)
        self.poll(1)
        self.act(lambda: session.release(RequestId("l3")))
        self.poll(3)
        self.mover.fails = set()
        self.load("l4", prefix_of("abcd"), 4)
        self.clock.now_s += 2.0
        self.poll(4)
        self.store("s5", prefix_of("qrst"))

    def end(self) -> None:
        refused = len(self.refused)
        self.mover.is_driven = True
        self.act(self.session.close)
        if len(self.refused) > refused:
            self.session.close()  # it was refused before it began
        self.poll()


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING)
    return


PARTS = 8


def replayed(k: int, error: type[Exception]) -> tuple[Recording, Raise]:
    recording = Recording()
    gc.disable()  # a search for garbage calls `__del__` of anything, at any call
    try:
        with Raise(k, error, is_entrance) as planted:
            recording.run()
            recording.poll(40)
            recording.end()
    finally:
        gc.enable()
    return recording, planted


def check(k: int, error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    if k % 16 == 0:
        gc.collect()  # the traceback of each error holds a whole session, in a cycle
    recording, planted = replayed(k, error)
    about = f"call {k}, {error.__name__} in {planted.where}"
    assert planted.where, f"nothing was raised in call {k}"
    assert recording.ended == recording.begun, about
    assert error is not MemoryError or not recording.session.health_record.failure, about  # it ends by itself
    with pytest.raises(SessionError):
        recording.session.lookup(RequestId("later"), prefix_of("xyz"))
    assert recording.closed_below, about
    assert recording.mover.is_closed, about
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR or "empties" in record.msg]
    assert len(errors) + len(recording.refused) == 1, about
    for record in caplog.records:
        record.exc_info = None  # pytest keeps the records of a test until its end, and each a whole session


def test_nothing_is_refused_and_all_ends_where_nothing_is_raised() -> None:
    recording, planted = replayed(0, AssertionError)
    assert planted.calls == replayed(0, AssertionError)[1].calls, "the k-th call of another run is another one"
    assert not recording.refused
    assert recording.ended == recording.begun
    assert set(recording.begun.values()) == {1}
    assert len(recording.begun) == 9


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))])
def test_all_that_was_begun_ends_whatever_a_call_raises(part: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first call from each site; `make test` takes one part of the sites."""
    first: dict[Site, int] = {}
    for k, site in enumerate(replayed(0, AssertionError)[1].calls, 1):
        first.setdefault(site, k)
    assert len(first) > 200
    for number, k in list(enumerate(first.values()))[part::PARTS]:
        check(k, ERRORS[number % len(ERRORS)], caplog)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ERRORS)
def test_all_that_was_begun_ends_whatever_the_kth_call_raises(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(1, len(replayed(0, error)[1].calls) + 1):
        check(k, error, caplog)
