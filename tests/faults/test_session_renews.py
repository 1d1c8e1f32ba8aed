"""A moment without memory in any call of the core costs what host memory held, and neither a byte nor the session."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import ECONNRESET, EMFILE, ENOMEM
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from tests.memory_tier import GatedTier, MemoryTier
from tests.object_store_contract import LAYOUT as OBJECTS
from tests.object_store_contract import STAGED, empty_pieces, got, object_id, pieces_of, put
from tests.rig import (
    CHUNK_TOKENS,
    Engine,
    ended,
    load_places,
    loaded,
    local,
    looked_up,
    places_of,
    prefix_of,
    stored,
)

import kvtier
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.runtime import locked_core as module
from kvtier.runtime.arena import Arena
from kvtier.runtime.executor import Threads
from kvtier.runtime.locked_core import LockedCore
from kvtier.runtime.observers.guards import ends_by_itself
from kvtier.runtime.session import SessionError
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectStore
from kvtier.types import LoadDone, Outcome, RequestId, StoreDone

CORE = str(Path(kvtier.__file__).parent / "core")
CHUNKS = 4
PATIENCE_S = 10.0
EVERY = 97
"""`make test` raises in every 97th call."""


class Plant:
    """Raises once, in the n-th call of the core from now on, in any thread that starts later and in this one."""

    def __init__(self) -> None:
        self.at = 0
        self.error: BaseException = MemoryError("planted")
        self.calls = 0
        self.is_on = False
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or code.co_flags & CO_GENERATOR or not code.co_filename.startswith(CORE):
            return
        with self._lock:
            self.calls += 1
            is_here = self.calls == self.at
        if is_here:
            raise self.error.with_traceback(None)


@pytest.fixture
def plant() -> Iterator[Plant]:
    planted = Plant()
    threading.setprofile(planted)
    yield planted
    threading.setprofile(None)
    sys.setprofile(None)


class World:
    """A session with too few slots for its three prompts, whose tier gets what host memory cannot hold."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.engine = plant, Engine(16, seed=1)
        self.pages = [[layer.copy() for layer in group] for group in self.engine.groups]
        rules = {"probe_deadline_s": PATIENCE_S, "transfer_deadline_s": PATIENCE_S}
        threads = Threads(device=1, read=1, write=1, probe=1)
        tier = MemoryTier("below", capacity_bytes=64 << 20)
        self.session, self.cache, _ = local(
            self.engine.copier(), {"below": tier}, slots=CHUNKS, rules=rules, threads=threads
        )

    def store(self, seed: int) -> StoreDone | None:
        with suppress(MemoryError):  # in a call that had not begun
            return stored(self.session, f"store {seed}", prefix_of(CHUNKS, seed=seed), places_of(range(CHUNKS)))
        return None

    def load(self, seed: int) -> int:
        """The tokens that are loaded, each byte as it was stored; a load that fails loads none."""
        request, prefix = f"load {seed}", prefix_of(CHUNKS, seed=seed)
        try:
            found = looked_up(self.session, request, prefix)
        except MemoryError:
            return 0
        if not found.tokens:
            return 0
        places = load_places(found.tokens)
        for group in self.engine.groups:
            for layer in group:
                layer[:] = 0
        done = loaded(self.session, request, prefix, found.tokens, places)
        for place in places:
            if (place.chunk + 1) * CHUNK_TOKENS <= done.tokens and (place.group, place.chunk) not in done.failed:
                for layer, pages in zip(self.engine.groups[place.group], self.pages[place.group], strict=True):
                    assert all((layer[block] == pages[block]).all() for block in place.blocks), "wrong bytes"
        for group, pages in zip(self.engine.groups, self.pages, strict=True):
            for layer, wanted in zip(group, pages, strict=True):
                layer[:] = wanted
        return done.tokens

    def run(self) -> None:
        """Gathers, demotions, evictions, promotions and scatters, and the error in the middle of one of them."""
        self.plant.calls, self.plant.is_on = 0, True
        sys.setprofile(self.plant)
        self.store(1)
        self.load(1)
        self.store(2)
        self.store(3)
        self.load(1)
        self.load(2)
        self.plant.is_on = False
        sys.setprofile(None)

    def goes_on(self) -> bool:
        """Whether the next store and the next load work."""
        until_s = time.monotonic() + PATIENCE_S
        while self.session._is_broken and not self.session._is_lasting and time.monotonic() < until_s:
            time.sleep(0.001)
        if self.session._is_broken:
            return False
        done = self.store(9)
        with self.session._lock:  # the session's thread still decides about demotions
            self.cache.check()
        is_stored = done is not None and done.stored == len(places_of(range(CHUNKS)))
        return is_stored and self.load(9) == CHUNKS * CHUNK_TOKENS


def shut_after(plant: Plant, calls: Iterator[int] | range) -> list[int]:
    """The calls of `calls` after whose error a session stays shut, or does not work."""
    shut: list[int] = []
    for plant.at in calls:
        world = World(plant)
        world.run()
        if not world.goes_on():
            shut.append(plant.at)
        world.session.close(PATIENCE_S)
    return shut


def calls_of(plant: Plant) -> int:
    plant.at = 0
    assert shut_after(plant, range(1)) == []
    return plant.calls


def test_no_session_stays_shut_after_a_moment_without_memory(plant: Plant) -> None:
    count = calls_of(plant)
    assert count > 2000
    assert shut_after(plant, range(1, count, EVERY)) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_session_stays_shut_whichever_call_has_no_memory(plant: Plant) -> None:
    assert shut_after(plant, range(1, calls_of(plant))) == []


def test_every_session_stays_shut_after_an_error_that_does_not_end(plant: Plant) -> None:
    plant.error = RuntimeError("planted")
    calls = range(50, calls_of(plant) // 2, 500)
    assert shut_after(plant, calls) == list(calls)


def test_no_object_store_stays_shut_after_a_moment_without_memory(plant: Plant) -> None:
    """The copies of a call whose thread has left end, too."""
    rules, slots = [TierRules(name="below")], (STAGED,) * len(OBJECTS.groups)
    numbers = range(2 * STAGED)
    for plant.at in (0, *range(1, 4000, EVERY)):
        plant.calls = 0
        tiers = {"below": MemoryTier("below", capacity_bytes=64 << 20)}
        arena = Arena(OBJECTS, slots)
        store = ObjectStore(layout=OBJECTS, name_root=bytes(32), model=bytes(16), tiers=tiers, rules=rules, arena=arena)
        plant.is_on = True
        sys.setprofile(plant)
        put(store, numbers)
        memory = [empty_pieces(0) for _ in numbers]
        reads = [ObjectBytes(object_id(number, 0), pieces) for number, pieces in zip(numbers, memory, strict=True)]
        outcomes = store.get_into(reads, PATIENCE_S)
        plant.is_on = False
        sys.setprofile(None)
        for number, outcome, pieces in zip(numbers, outcomes, memory, strict=True):
            if outcome is Outcome.DONE:
                assert all(map(np.array_equal, pieces, pieces_of(number, 0))), plant.at
        waiting(store)
        assert not store._is_broken, plant.at
        assert put(store, numbers) == [Outcome.DONE] * len(numbers), plant.at
        assert got(store, numbers) == [Outcome.DONE] * len(numbers), plant.at
        assert store.close().flushed
        if plant.calls < plant.at:
            break
    assert plant.at > 3 * EVERY


def test_what_ends_by_itself() -> None:
    passing = MemoryError(), RuntimeError("can't start new thread"), OSError(EMFILE, "files"), OSError(ENOMEM, "memory")
    assert all(map(ends_by_itself, passing))
    lasting = RuntimeError("other"), OSError(ECONNRESET, "reset"), TimeoutError("late"), KeyError("can't"), OSError()
    assert not any(map(ends_by_itself, lasting))


# ---- one session in every state ------------------------------------------------------------------------------------


def fail(cache: Cache, error: Exception) -> Callable[..., object]:
    """Let the next lookup of the core raise."""

    def lookup(*_: object, **__: object) -> object:
        del cache.lookup  # type: ignore[attr-defined]
        raise error

    cache.lookup = lookup  # type: ignore[method-assign]
    return lookup


def waiting(session: LockedCore) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while session._is_broken and not session._is_lasting and time.monotonic() < until_s:
        time.sleep(0.001)


def test_a_core_begins_anew_only_after_the_copy_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    tier, engine, prefix = GatedTier("below"), Engine(16), prefix_of(CHUNKS)
    caplog.set_level("INFO")
    tier.shut = {"write"}
    session, cache, _ = local(engine.copier(), {"below": tier}, rules={"transfer_deadline_s": 60.0})
    stored(session, "a", prefix, places_of(range(CHUNKS)))
    assert tier.hangs.wait(PATIENCE_S)
    session.retain(prefix, 60.0)
    fail(cache, MemoryError())
    assert session.lookup(RequestId("b"), prefix).tokens == 0
    session.store(RequestId("c"), prefix, places_of(range(CHUNKS)))
    assert ended(session, "c", StoreDone).stored == 0  # at once, although a write hangs in the tier
    time.sleep(3 * module.COPY_STEP_S)
    assert session._is_broken, "the write reads a slot"
    tier.open_again()
    waiting(session)
    assert session.obstacle == ""
    assert session.host_tokens(prefix) == 0
    assert stored(session, "d", prefix, places_of(range(CHUNKS))).stored
    assert session.host_tokens(prefix) == CHUNKS * CHUNK_TOKENS
    assert [it.levelname for it in caplog.records if it.name == module.__name__] == ["WARNING", "INFO"]
    session.close()


def test_what_does_not_end_in_time_leaves_the_session_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPY_DEADLINE_S", 0.1)
    monkeypatch.setattr(module, "MOVER_DEADLINE_S", 0.1)
    tier, prefix = GatedTier("below"), prefix_of(CHUNKS)
    tier.shut = {"write"}
    session, cache, _ = local(Engine(16).copier(), {"below": tier}, rules={"transfer_deadline_s": 60.0})
    stored(session, "a", prefix, places_of(range(CHUNKS)))
    assert tier.hangs.wait(PATIENCE_S)
    fail(cache, MemoryError())
    session.lookup(RequestId("b"), prefix)
    waiting(session)
    assert session._is_lasting
    assert "still run" in session.obstacle
    tier.open_again()
    session.close()


def test_a_session_that_needs_to_begin_anew_too_often_stays_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    session, cache, _ = local(Engine(16).copier(), {})
    for number in range(module.RENEWALS_MAX + 1):
        assert not session.health_record.failure
        fail(cache, MemoryError(f"number {number}"))
        session.lookup(RequestId(str(number)), prefix_of(1))
        waiting(session)
    assert session.health_record.failure == f"MemoryError: number {module.RENEWALS_MAX}"
    session.close()


def test_a_load_that_failed_before_it_began_does_not_begin_in_the_new_core() -> None:
    """Its thread is slow, and its blocks may be another's by now."""
    session, cache, _ = local(Engine(16).copier(), {})
    stored(session, "a", prefix_of(1), places_of([0]))
    begin, events = session._call, session._events
    begun: list[object] = []

    def late(act: Callable[[float], None], *wait_s: float) -> None:
        begun.extend(events._loads)
        fail(cache, MemoryError())
        begin(lambda _now_s: cache.lookup())  # type: ignore[call-arg]
        waiting(session)
        assert ended(session, "l", LoadDone).tokens == 0
        session._call = begin  # type: ignore[method-assign]
        begin(act, *wait_s)

    session._call = late  # type: ignore[method-assign]
    session.load(RequestId("l"), prefix_of(1), CHUNK_TOKENS, load_places(CHUNK_TOKENS))
    assert begun == ["l"]
    assert not session._is_broken
    assert session.poll(0.05) == []
    assert not cache._operations.loads
    session.close()


def test_a_log_that_raises_shuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session, cache, _ = local(Engine(16).copier(), {})
    monkeypatch.setattr(module.logger, "log", lambda *_, **__: 1 / 0)
    fail(cache, MemoryError())
    session.lookup(RequestId("a"), prefix_of(1))
    waiting(session)
    assert not session._is_broken
    assert session.close().flushed
    with pytest.raises(SessionError):
        session.lookup(RequestId("b"), prefix_of(1))
