"""The session's lock under many threads, and its end in every state: each load and store ends once."""

import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.memory_tier import GatedTier, MemoryTier, MischievousTier
from tests.rig import CHUNK_TOKENS, Engine, GatedCopier, load_places, local, places_of, prefix_of
from tests.system import in_child

from kvtier.core.limits import Limits, WritePolicy
from kvtier.runtime import locked_core as module
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.observers.guards import LogLine, Observer
from kvtier.runtime.session import Closed, Session, SessionError
from kvtier.types import Command, LoadDone, Outcome, Presence, RequestId, StoreDone, Tell, Transfer

PATIENCE_S = 60.0
CHUNKS = 3


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads switch as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Callers:
    """Threads that call a session; what they have begun, and what has ended."""

    def __init__(self, session: Session, count: int, rounds: int) -> None:
        self.session, self.rounds = session, rounds
        self.begun: Counter[tuple[type, str]] = Counter()
        self.ended: Counter[tuple[type, str]] = Counter()
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        try:
            for turn in range(self.rounds):
                self._call(draw, f"{number}.{turn}")
        except SessionError:
            return  # it was closed meanwhile
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)

    def _call(self, draw: random.Random, name: str) -> None:
        session, prefix, request = self.session, prefix_of(CHUNKS, seed=draw.randrange(12)), RequestId(name)
        answer = session.lookup(request, prefix, wait_s=draw.choice([0.0, 0.01, 0.2]))
        if answer.tokens and answer.presence is not Presence.PROBING:
            session.load(request, prefix, answer.tokens, load_places(answer.tokens))
            self._note(LoadDone, name)
        session.store(request, prefix, places_of(range(CHUNKS)))
        self._note(StoreDone, name)
        if draw.random() < 0.2:
            session.release(request)
        if draw.random() < 0.1:
            session.expects(f"conversation {name}", None)
        self.poll(0.0)

    def _note(self, kind: type, name: str) -> None:
        with self.lock:
            self.begun[kind, name] += 1

    def poll(self, wait_s: float) -> None:
        for event in self.session.poll(wait_s):
            if isinstance(event, LoadDone | StoreDone):
                with self.lock:
                    self.ended[type(event), event.request] += 1

    def finish(self) -> None:
        """All callers have returned, and all that was begun has ended, once."""
        until_s = time.monotonic() + PATIENCE_S
        for thread in self.threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            assert not thread.is_alive(), "a call does not return"
        assert not self.errors, self.errors
        while self.ended.total() < self.begun.total() and time.monotonic() < until_s:
            self.poll(0.05)
        assert self.ended == self.begun


def opened(tier: MemoryTier, **more: object) -> Session:
    rules = {"probe_deadline_s": 5.0, "transfer_deadline_s": 5.0, "failures": 1000}
    return local(Engine(64).copier(), {"below": tier}, rules=rules, **more)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("hasty")
def test_all_that_many_threads_begin_ends_once(seed: int) -> None:
    session = opened(MischievousTier("below", seed, 64 << 20, 0.002), slots=8)
    callers = Callers(session, 4, 25)
    callers.finish()
    closed = session.close(PATIENCE_S)
    assert not session._is_broken
    assert not session._inbox
    assert closed.lost == 0 or not closed.flushed


def closed_twice(session: Session, deadline_s: float) -> list[Closed]:
    """The answers of two threads that close `session` at once."""
    answers: list[Closed] = []
    closers = [threading.Thread(target=lambda: answers.append(session.close(deadline_s))) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(PATIENCE_S)
    return answers


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("hasty")
def test_two_threads_close_a_busy_session(seed: int) -> None:
    session = opened(MischievousTier("below", seed, 64 << 20, 0.002), slots=8)
    callers = Callers(session, 4, 1000)
    time.sleep(0.05 * seed)
    answers = closed_twice(session, 5.0)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    callers.finish()
    assert not any(thread.name.startswith("kvtier") for thread in threading.enumerate() if thread is session._thread)


# ---- nothing is stranded -------------------------------------------------------------------------------------------


class Scripted:
    """An executor whose commands another thread completes while the next are submitted, under the session's lock."""

    needs_flush = True

    def __init__(self) -> None:
        self.gathers: list[Command] = []
        self.put: Callable[[Completion], None]
        self.ready: Callable[[], None]

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        self.put, self.ready = put, ready

    def submit(self, *commands: Command) -> None:
        earlier, self.gathers = self.gathers, [each for each in commands if isinstance(each, Transfer)]

        def complete() -> None:
            for command in earlier:
                self.put(Completion(command, Outcome.DONE))
            self.ready()

        thread = threading.Thread(target=complete)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a worker waits for the lock"

    def flush(self) -> bool:
        return True

    def close(self, deadline_s: float) -> bool:
        return True


class WithoutThread(Session):
    """A session whose `tick` the test calls."""

    def _start(self) -> None:
        pass


def scripted(executor: type[Scripted] = Scripted) -> Session:
    idle, cache, _ = local(Engine(8).copier(), {})
    idle.close()
    return WithoutThread(cache, executor())


def test_what_is_completed_while_the_lock_is_held_is_settled_by_the_holder() -> None:
    session = scripted()
    session.store(RequestId("a"), prefix_of(1), places_of([0]))
    session.store(RequestId("b"), prefix_of(1, seed=1), places_of([0]))  # completes the first meanwhile
    assert [event.request for event in session.poll()] == ["a"]


def test_a_call_ends_although_completions_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's thread settles what a call leaves; without the bound, the call would settle all of them."""
    session = local(Engine(8).copier(), {})[0]
    settles: list[int] = []
    real, most = Session._settle, 50

    def settle(self: Session, now_s: float) -> None:
        real(self, now_s)
        settles.append(threading.get_ident())
        if len(settles) < most:  # a worker completes meanwhile
            self._inbox.append(Completion(Tell("none", "", None), Outcome.DONE))

    monkeypatch.setattr(Session, "_settle", settle)
    session._inbox.append(Completion(Tell("none", "", None), Outcome.DONE))
    session.lookup(RequestId("a"), prefix_of(1))
    assert settles.count(threading.get_ident()) <= module.READY_ROUNDS + 1
    until_s = time.monotonic() + PATIENCE_S
    while len(settles) < most and time.monotonic() < until_s:
        time.sleep(0.001)
    assert len(settles) == most, "completions are stranded"
    assert session.close().flushed


def test_an_executor_that_completes_while_it_takes_commands_makes_nothing_slow_happen_under_the_lock() -> None:
    """As the mover does with commands that come too late."""

    class Refusing(Scripted):
        def submit(self, *commands: Command) -> None:
            seen.append(session._lock.acquire(blocking=False))
            session._lock.release()
            session._lines.append(LogLine(logging.WARNING, "a line"))
            self.ready()

        def flush(self) -> bool:
            flushed.append(session._holder)
            return True

    seen: list[bool] = []
    flushed: list[int] = []
    held: list[int] = []
    session = scripted(Refusing)
    handler = logging.Handler()
    handler.emit = lambda record: held.append(session._holder)  # type: ignore[method-assign]
    module.logger.addHandler(handler)
    try:
        session._has_sent = True
        session.store(RequestId("a"), prefix_of(1), places_of([0]))
    finally:
        module.logger.removeHandler(handler)
    assert seen
    assert held == [0], "a line is logged under the lock"
    assert not any(flushed), "the executor is flushed under the lock"


def test_calls_after_the_end_leave_nothing_behind() -> None:
    session = local(Engine(8).copier(), {})[0]
    session.close()
    for number in range(100):
        session.release(RequestId(str(number)))
        session.expects(str(number), None)
    assert not session._wishes


# ---- calls inside of a call ----------------------------------------------------------------------------------------


class Inside(Observer):
    """An observer that calls the session under its lock, in the same thread, as a finalizer might."""

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None
        self.errors: list[Exception] = []
        self.is_done = False

    def submitted(self, command: object) -> None:
        call, self.call = self.call, None
        if call is not None:
            try:
                call()
            except SessionError as error:
                self.errors.append(error)
            self.is_done = True


@pytest.mark.parametrize("name", ["release", "expects", "poll", "lookup", "load", "store", "close"])
def test_a_call_inside_of_a_call_neither_hangs_nor_harms(name: str) -> None:
    inside = Inside()
    session = local(Engine(64).copier(), {}, observer=inside)[0]
    a, prefix = RequestId("inner"), prefix_of(1)
    calls: dict[str, Callable[[], object]] = {
        "release": lambda: session.release(a),
        "expects": lambda: session.expects("conversation", None),
        "poll": session.poll,
        "lookup": lambda: session.lookup(a, prefix),
        "load": lambda: session.load(a, prefix, CHUNK_TOKENS, load_places(CHUNK_TOKENS)),
        "store": lambda: session.store(a, prefix, places_of([0])),
        "close": session.close,
    }
    inside.call = calls[name]
    began_s = time.monotonic()
    session.store(RequestId("outer"), prefix, places_of([0]))
    assert inside.is_done
    assert time.monotonic() - began_s < module.CALL_DEADLINE_S / 2
    assert bool(inside.errors) == (name in ("lookup", "load", "store"))
    events = [event for _ in range(3) for event in session.poll(0.1)]
    assert [(type(event), event.request) for event in events] in ([(StoreDone, "outer")], [])
    session.close()
    assert not session._is_broken


def test_a_call_waits_for_a_slow_holder_only_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_DEADLINE_S", 0.05)
    go_on, inside = threading.Event(), Inside()
    session = local(Engine(64).copier(), {}, observer=inside)[0]
    inside.call = lambda: go_on.wait(PATIENCE_S)
    holder = threading.Thread(target=session.store, args=(RequestId("a"), prefix_of(1), places_of([0])))
    holder.start()
    while not session._holder:
        time.sleep(0.001)
    for call in (
        lambda: session.lookup(RequestId("b"), prefix_of(1), wait_s=0.01),
        lambda: session.store(RequestId("b"), prefix_of(1), places_of([0])),
    ):
        with pytest.raises(SessionError):
            call()
    session.release(RequestId("b"))
    assert session.poll() == []
    go_on.set()
    holder.join(PATIENCE_S)
    assert [event.request for event in session.poll(PATIENCE_S)] == ["a"]
    assert session.close().flushed


# ---- the end in every state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["contains", "read", "write", "flush", "copy", "broken"])
def test_two_threads_close_whatever_hangs(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOVER_DEADLINE_S", 0.2)
    tier = GatedTier("below")
    source = Engine(64)
    prefix, places = prefix_of(CHUNKS), places_of(range(CHUNKS))
    if state == "read":
        first = local(source.copier(), {"below": tier})[0]
        first.store(RequestId("a"), prefix, places)
        assert first.close().flushed
    tier.shut = {"write" if state == "flush" else state}
    policy = WritePolicy.BACK if state == "flush" else WritePolicy.THROUGH
    rules = {"probe_deadline_s": 60.0, "transfer_deadline_s": 60.0}
    copier, threads = GatedCopier(source.copier(), tier), Threads(device=1)
    session = local(copier, {"below": tier}, threads=threads, rules=rules, limits=Limits(write_policy=policy))[0]
    wanted: list[str] = []
    waiter = threading.Thread(target=lambda: _ignore(lambda: session.lookup(RequestId("w"), prefix, wait_s=60.0)))
    if state == "read":
        tokens = session.lookup(RequestId("l"), prefix, wait_s=20.0).tokens
        session.load(RequestId("l"), prefix, tokens, load_places(tokens))
        wanted.append("l")
    elif state == "contains":
        waiter.start()
    else:
        session.store(RequestId("s"), prefix, places)
        wanted.append("s")
    if state == "broken":
        session._shut(AssertionError("planted"))
    elif state != "flush":
        assert tier.hangs.wait(20)
    began_s = time.monotonic()
    answers = closed_twice(session, 0.3)
    assert time.monotonic() - began_s < 5.0
    assert len(set(answers)) == 1
    assert answers[0].flushed == (state in ("contains", "read", "copy"))  # what was not gathered is not pending
    assert [event.request for event in session.poll() if isinstance(event, LoadDone | StoreDone)] == wanted
    if state == "contains":
        waiter.join(5.0)
        assert not waiter.is_alive(), "a lookup waits for a closed session"
    tier.open_again()
    assert session.poll(0.1) == []


def _ignore(act: Callable[[], object]) -> None:
    try:
        act()
    except SessionError:
        return


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_may_call_everything_and_harms_nothing() -> None:
    session = opened(MemoryTier("below", capacity_bytes=64 << 20))
    session.store(RequestId("a"), prefix_of(1), places_of([0]))

    def act() -> None:
        session.release(RequestId("a"))
        assert session.close(5.0) == Closed(flushed=False, lost=0)
        with pytest.raises(SessionError):
            session.lookup(RequestId("b"), prefix_of(1))

    with session._lock:  # the child inherits a lock that is held
        assert in_child(act) == 0
    assert [event.request for event in session.poll(PATIENCE_S)] == ["a"]
    assert session.close().flushed
