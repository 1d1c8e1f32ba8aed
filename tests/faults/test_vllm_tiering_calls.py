"""Lookups and jobs of vLLM's secondary tier while tiers hang: answers in time, and memory that is free afterwards."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.conftest import opened_by
from tests.memory_tier import GatedTier
from tests.object_store_contract import LAYOUT, STAGED, empty_pieces, got, object_id, pieces_of, put
from tests.system import until

from kvtier.connect.vllm.tiering.async_jobs import JOBS_MAX, Calls
from kvtier.core.limits import TierRules
from kvtier.runtime.arena import Arena
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectStore
from kvtier.types import Outcome

FAR_S = 60.0
"""A deadline that no test waits for."""


def guarded(act, otherwise):
    """No call here may raise."""
    del otherwise
    return act()


@pytest.fixture
def tier():
    return GatedTier()


@pytest.fixture
def store(tier):
    def make():
        return ObjectStore(
            layout=LAYOUT,
            name_root=bytes(32),
            model=bytes(16),
            tiers={tier.name: tier},
            rules=[TierRules(name=tier.name, probe_deadline_s=FAR_S, transfer_deadline_s=FAR_S)],
            arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
        )

    for opened in opened_by(make):
        yield opened()
        tier.open_again()


def job(number, *, is_load, request="request"):
    """A job for the object of this number, as vLLM makes it, with its memory."""
    pieces = empty_pieces() if is_load else pieces_of(number)
    context = SimpleNamespace(req_id=request)
    made = SimpleNamespace(job_id=number, keys=[b"%d" % number], is_promotion=is_load, req_context=context)
    return made, [ObjectBytes(object_id(number), pieces)], time.monotonic() + FAR_S


@pytest.mark.parametrize("is_load", [False, True])
def test_drain_ends_what_hangs_and_nothing_touches_its_memory_later(is_load, tier, store):
    if is_load:
        put(store, range(20))
    calls = Calls(store, FAR_S, guarded)
    tier.shut = {"read", "write"}
    jobs = [job(number, is_load=is_load) for number in range(20)]  # more than there are threads
    for each in jobs:
        calls.submit(*each)
    assert tier.hangs.wait(FAR_S)
    began_s = time.monotonic()
    calls.drain(0.1)
    assert time.monotonic() - began_s < 5
    assert sorted((done.job.job_id, *done.keys) for done in calls.finished()) == [(number,) for number in range(20)]
    memory = [piece for _, items, _ in jobs for item in items for piece in item.pieces]
    for piece in memory:
        piece[:] = 0x33
    tier.open_again()
    until(lambda: put(store, range(20)) == [Outcome.DONE] * 20)
    assert got(store, range(20)) == [Outcome.DONE] * 20, "with the bytes of before"
    assert all(np.all(piece == 0x33) for piece in memory)
    calls.close(0.0)


def test_jobs_end_with_the_keys_that_succeeded(store):
    calls = Calls(store, FAR_S, guarded)
    calls.submit(*job(1, is_load=False))
    until(lambda: [done.keys for done in calls.finished()] == [[b"1"]])
    both = job(2, is_load=True)[0]
    both.keys = [b"absent", b"1"]
    memory = [empty_pieces(), empty_pieces()]
    calls.submit(
        both,
        [ObjectBytes(object_id(number), it) for number, it in zip((9, 1), memory, strict=True)],
        job(1, is_load=1)[2],
    )
    until(lambda: [done.keys for done in calls.finished()] == [[b"1"]])
    assert all(map(np.array_equal, memory[1], pieces_of(1)))
    assert all(map(np.array_equal, memory[0], empty_pieces()))
    calls.close(0.0)


def test_a_failed_load_is_returned_when_no_other_load_of_its_request_runs(tier, store):
    """Otherwise vLLM would compute the request, and store nothing of what the other load is to bring."""
    put(store, [1])
    calls = Calls(store, FAR_S, guarded)
    tier.shut = {"read"}
    calls.submit(*job(1, is_load=True))
    assert tier.hangs.wait(FAR_S)
    for number, is_load, request in [(2, True, "request"), (3, True, "another"), (4, False, "request")]:
        made, _, until_s = job(number, is_load=is_load, request=request)
        calls.submit(made, [], until_s)
    assert [done.job.job_id for done in calls.finished()] == [3, 4]
    assert calls.finished() == []
    tier.open_again()
    found = []
    until(lambda: found.extend(calls.finished()) or found)
    assert [(done.job.job_id, *done.keys) for done in found] == [(1, b"1"), (2,)]
    calls.close(0.0)


def test_too_many_jobs_fail_at_once(tier, store):
    calls = Calls(store, FAR_S, guarded)
    tier.shut = {"write"}
    for number in range(JOBS_MAX + 1):
        calls.submit(*job(number, is_load=False))
    assert [done.job.job_id for done in calls.finished()] == [JOBS_MAX]
    calls.close(0.0)


def test_a_system_without_further_threads_refuses_the_start_and_no_later_call(store, monkeypatch):
    calls = Calls(store, FAR_S, guarded)
    before, real, started = set(threading.enumerate()), threading.Thread.start, []

    def start(thread):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Calls(store, FAR_S, guarded)
    assert set(threading.enumerate()) == before
    assert calls.ask("request", b"1.....", lambda: object_id(1), is_prefix=True) is None
    calls.flush()
    calls.submit(*job(1, is_load=False))
    calls.submit(*job(2, is_load=True))
    found = []
    until(lambda: found.extend(done.job.job_id for done in calls.finished()) or sorted(found) == [1, 2])
    calls.close(0.0)


def test_a_lookup_is_answered_in_time_and_a_failed_load_is_a_miss_from_then_on(tier, store):
    put(store, [1, 2])
    calls = Calls(store, 0.5, guarded)

    def ask(request, number, *, is_prefix=True):
        return calls.ask(request, b"%d....." % number, lambda: object_id(number), is_prefix=is_prefix)

    def answers(request, *numbers, is_prefix):
        found = [ask(request, number, is_prefix=is_prefix) for number in numbers]
        calls.flush()
        until(lambda: None not in [ask(request, number, is_prefix=is_prefix) for number in numbers])
        assert found == [None] * len(numbers)
        return [ask(request, number, is_prefix=is_prefix) for number in numbers]

    assert answers("prefix", 1, 9, 2, is_prefix=True) == [True, False, False]
    assert answers("window", 1, 9, 2, is_prefix=False) == [True, False, True]
    calls.miss("prefix", [b"1....."])
    assert ask("prefix", 1) is False
    calls.forget("prefix")
    assert answers("prefix", 1, is_prefix=True) == [True]

    tier.shut = {"contains"}
    began_s = time.monotonic()
    assert answers("hangs", 1, is_prefix=True) == [False]
    assert 0.4 < time.monotonic() - began_s < 5
    calls.close(0.0)
