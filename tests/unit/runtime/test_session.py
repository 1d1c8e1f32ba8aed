"""The session with all real parts: engine blocks, core, mover, arena, frame, directory; and after errors."""

import logging
import threading
import time
from dataclasses import replace

import pytest
from tests.memory_tier import GatedTier, MemoryTier
from tests.metric_values import values_of
from tests.refusals import refuses
from tests.rig import (
    CHUNK_TOKENS,
    FINGERPRINT,
    Engine,
    GatedCopier,
    config,
    ended,
    load_places,
    loaded,
    local,
    looked_up,
    opened,
    places_of,
    prefix_of,
    stored,
)
from tests.system import until

from kvtier.config.sections import StoreConfig
from kvtier.core import operations, tier_searches
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, WritePolicy
from kvtier.layout import Axes, GroupLayout, History, KvLayout, Run
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime import locked_core as module
from kvtier.runtime import session_events
from kvtier.runtime.executor import Threads
from kvtier.runtime.observers.guards import Feature, Guards, Observer
from kvtier.runtime.open import choose_chunk_tokens, open_session
from kvtier.runtime.session import SessionError
from kvtier.runtime.session_events import SessionEvents
from kvtier.types import LoadDone, Presence, Probe, RequestId, StoreDone


def test_what_was_stored_comes_back_after_a_restart(tmp_path):
    source = Engine(64, seed=1)
    first = opened(tmp_path / "kv", source)
    prefix = prefix_of(6, first.root)
    assert stored(first.session, "a", prefix, places_of(range(6))) == StoreDone(RequestId("a"), stored=12, dropped=0)
    assert first.session.close().flushed

    target = Engine(64, seed=2)
    second = opened(tmp_path / "kv", target)
    assert second.root == first.root
    answer = looked_up(second.session, "b", prefix)
    assert (answer.tokens, answer.ready_tokens, answer.presence) == (6 * CHUNK_TOKENS, 0, Presence.ARRIVING)
    done = loaded(second.session, "b", prefix, answer.tokens, load_places(answer.tokens))
    assert done.tokens == 6 * CHUNK_TOKENS
    assert done.sources == (("directory", 6 * CHUNK_TOKENS),)
    assert target.same(source, load_places(answer.tokens))
    assert looked_up(second.session, "c", prefix).ready_tokens == 6 * CHUNK_TOKENS  # the next one finds it in memory
    second.session.close()


def test_a_prefix_larger_than_host_memory_is_stored_and_restored_in_full(tmp_path):
    chunks = 200
    source, target = Engine(1000, seed=1), Engine(1000, seed=2)
    first = opened(tmp_path / "kv", source, host_chunks=40)
    prefix = prefix_of(chunks, first.root)
    assert stored(first.session, "a", prefix, places_of(range(chunks))).dropped == 0
    assert first.session.close().flushed
    second = opened(tmp_path / "kv", target, host_chunks=40)
    tokens = chunks * CHUNK_TOKENS
    assert looked_up(second.session, "b", prefix).tokens == tokens
    assert loaded(second.session, "b", prefix, tokens, load_places(tokens)).tokens == tokens
    assert target.same(source, load_places(tokens))
    second.session.close()


def test_write_back_flushes_at_close():
    tier = MemoryTier("below", capacity_bytes=64 << 20)
    session, _, _ = local(Engine(64).copier(), {"below": tier}, limits=Limits(write_policy=WritePolicy.BACK))
    stored(session, "a", prefix_of(3), places_of(range(3)))
    assert tier.object_count == 0
    closed = session.close()
    assert (closed.flushed, closed.lost) == (True, 0)
    assert tier.object_count == 6


def test_a_closed_session_takes_no_calls():
    session, _, _ = local(Engine(64).copier(), {})
    session.close()
    for call in (
        lambda: session.lookup(RequestId("a"), prefix_of(2)),
        lambda: session.load(RequestId("a"), prefix_of(2), 32, load_places(32)),
        lambda: session.store(RequestId("a"), prefix_of(2), places_of(range(2))),
    ):
        with pytest.raises(SessionError):
            call()
    session.release(RequestId("a"))
    session.expects("conversation", None)
    assert session.poll() == []
    assert session.close().flushed


def test_bad_arguments_raise_in_the_caller():
    session, _, _ = local(Engine(64).copier(), {})
    with pytest.raises(ValueError, match="not a boundary"):
        session.load(RequestId("a"), prefix_of(2), 17, [])
    with pytest.raises(ValueError, match="outside the prefix"):
        session.store(RequestId("a"), prefix_of(2), places_of([7]))
    assert stored(session, "a", prefix_of(2), places_of(range(2))).stored == 4  # and all goes on
    with session._lock:  # so that nothing completes the load
        session.load(RequestId("b"), prefix_of(2), 32, load_places(32))
        with pytest.raises(ValueError, match="'b' has a load under way"):
            session.load(RequestId("b"), prefix_of(2), 32, load_places(32))
    assert [event.tokens for event in session.poll(20.0)] == [32]  # only what was begun is answered
    assert session.close().flushed
    assert session.poll() == []


def test_after_an_internal_error_running_copies_end_and_everything_else_fails(monkeypatch, caplog):
    gate = GatedTier("gathers", shut=["copy"])
    monkeypatch.setattr(module, "MOVER_DEADLINE_S", 0.05)
    session, _, _ = local(
        GatedCopier(Engine(64).copier(), gate), {}, threads=Threads(device=1), limits=Limits(stores_in_flight=1)
    )
    try:
        session.store(RequestId("a"), prefix_of(1), places_of(range(1)))
        session.store(RequestId("b"), prefix_of(1, seed=1), places_of(range(1)))
        assert gate.hangs.wait(20)
        monkeypatch.setattr(Cache, "expects", None)
        session.expects("conversation", None)
        assert session.poll(20.0) == [StoreDone(RequestId("b"), 0, 2)]  # its gather has not begun
        assert session.poll(0.2) == []
        gate.open_again()
        assert session.poll(20.0) == [StoreDone(RequestId("a"), 0, 2)]
    finally:
        gate.open_again()
    assert not session.close().flushed
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_after_an_internal_error_a_copy_is_awaited_until_its_deadline(monkeypatch):
    gate = GatedTier("gathers", shut=["copy"])
    monkeypatch.setattr(module, "MOVER_DEADLINE_S", 0.05)
    monkeypatch.setattr(module, "COPY_DEADLINE_S", 0.05)
    session, _, _ = local(GatedCopier(Engine(64).copier(), gate), {})
    try:
        session.store(RequestId("a"), prefix_of(1), places_of(range(1)))
        assert gate.hangs.wait(20)
        monkeypatch.setattr(Cache, "expects", None)
        session.expects("conversation", None)
        assert session.poll(20.0) == [StoreDone(RequestId("a"), 0, 2)]
    finally:
        gate.open_again()
    session.close()


def test_a_session_that_was_shut_waits_and_does_not_spin(monkeypatch):
    session, _, _ = local(Engine(64).copier(), {})
    monkeypatch.setattr(Cache, "release", None)
    session.release(RequestId("a"))
    ticks = []
    tick = session.tick
    monkeypatch.setattr(session, "tick", lambda: ticks.append(0) or tick())
    while not session._is_broken:
        time.sleep(0.001)
    assert session.lookup(RequestId("b"), prefix_of(2)).presence is Presence.ABSENT
    time.sleep(0.3)
    assert len(ticks) < 20
    session.close()


@pytest.mark.parametrize("method", ["_settle", "_work", "ready", "tick"])
def test_an_internal_error_of_the_session_ends_the_cache_only(monkeypatch, caplog, method):
    session, _, _ = local(Engine(64).copier(), {})
    stored(session, "a", prefix_of(2), places_of(range(2)))
    real = getattr(session, method)
    mistakes = iter([RuntimeError("planted")])

    def wrong(*arguments):
        for mistake in mistakes:
            raise mistake
        return real(*arguments)

    monkeypatch.setattr(session, method, wrong)
    while not session._is_broken:
        session.load(RequestId("b"), prefix_of(2), 32, load_places(32))
        ended(session, "b", LoadDone)
    assert session.lookup(RequestId("c"), prefix_of(2)).presence is Presence.ABSENT
    session.store(RequestId("d"), prefix_of(2), places_of(range(2)))
    ended(session, "d", StoreDone)
    session.close()
    assert "internal error" in caplog.text


def test_without_polls_the_oldest_events_are_dropped_with_a_warning(monkeypatch):
    monkeypatch.setattr(session_events, "EVENTS_MAX", 3)
    guards = Guards()
    events = SessionEvents(Metrics(), guards)
    for number in range(6):
        events.begin_store(RequestId(str(number)), [])
        events.publish(StoreDone(RequestId(str(number)), 0, 0))
    assert [event.request for event in events.poll(0.0)] == ["3", "4", "5"]
    assert [line.level for line in guards.lines] == [logging.WARNING]


def test_a_lookup_waits_for_the_probe_up_to_its_wait_s():
    tier = GatedTier("below", shut=["contains"])
    session, _, _ = local(Engine(8).copier(), {"below": tier}, rules={"probe_deadline_s": 60.0})
    assert session.lookup(RequestId("a"), prefix_of(2), wait_s=0.01).presence is Presence.PROBING
    threading.Timer(0.05, tier.open_again).start()
    assert session.lookup(RequestId("a"), prefix_of(2), wait_s=60.0).presence is Presence.ABSENT
    session.close()


def test_other_calls_go_on_while_a_lookup_waits():
    tier = GatedTier("below", shut=["contains"])
    session, _, _ = local(Engine(8).copier(), {"below": tier}, rules={"probe_deadline_s": 60.0})
    waiter = threading.Thread(target=session.lookup, args=(RequestId("a"), prefix_of(2)), kwargs={"wait_s": 60.0})
    waiter.start()
    assert tier.hangs.wait(20)
    assert stored(session, "b", prefix_of(1, seed=1), places_of(range(1))).stored == 2
    assert waiter.is_alive()
    tier.open_again()
    waiter.join(20)
    assert not waiter.is_alive()
    session.close()


@pytest.mark.parametrize(
    ("bounded", "name", "text"),
    [
        (tier_searches, "REQUESTS_MAX", "1 requests are open"),
        (operations, "WAITING_MAX", "1 objects of stores wait for slots"),
    ],
)
def test_a_bound_that_is_reached_is_logged_once(caplog, monkeypatch, bounded, name, text):
    for each in (bounded, module):
        monkeypatch.setattr(each, name, 1)
    tier = MemoryTier("below", capacity_bytes=64 << 20)
    session, cache, _ = local(Engine(64).copier(), {"below": tier}, slots=2)
    for number in range(3):
        looked_up(session, f"a{number}", prefix_of(2, seed=number))
        stored(session, f"b{number}", prefix_of(2, seed=number), places_of(range(2)))
    session._next_second_s = 0.0
    session.tick()
    assert (cache.counters.unprobed if bounded is tier_searches else cache.counters.unqueued) > 1
    (record,) = caplog.records
    assert record.getMessage().startswith(text)
    session.close()


def objects(store):
    """Files of the objects in a directory's store."""
    return [file for file in (store / "objects").rglob("*") if file.is_file()]


def test_stores_reach_the_tier_while_the_engine_idles(tmp_path):
    kv = opened(tmp_path / "kv", Engine(64))
    stored(kv.session, "a", prefix_of(3, kv.root), places_of(range(3)))
    until(lambda: len(objects(tmp_path / "kv")) == 6)
    kv.session.close()


def test_announced_tokens_are_counted_once_per_request(tmp_path):
    kv = opened(tmp_path / "kv", Engine(64))
    prefix = prefix_of(2, kv.root)
    stored(kv.session, "a", prefix, places_of(range(2)))
    for _ in range(2):
        answer = kv.session.lookup(RequestId("b"), prefix_of(4, kv.root), announced_tokens=10**9, wait_s=60.0)
        assert answer.tokens == prefix.tokens
    kv.session.lookup(RequestId("c"), prefix, wait_s=60.0)
    counted = [kv.metrics.get(table.ANNOUNCED_TOKENS, result=result) for result in ("found", "missing")]
    assert counted == [prefix.tokens, prefix.tokens]
    kv.session.close()


def test_metrics_tell_what_happened(tmp_path):
    kv = opened(tmp_path / "kv", Engine(64))
    prefix = prefix_of(2, kv.root)
    stored(kv.session, "a", prefix, places_of(range(2)))
    looked_up(kv.session, "b", prefix)
    looked_up(kv.session, "b", prefix)
    loaded(kv.session, "b", prefix, 32, load_places(32))

    def used_bytes():
        return sum(-(-file.stat().st_size // 4096) * 4096 for file in objects(tmp_path / "kv"))

    # The metrics have of the directory what its threads saw a second ago.
    until(lambda: 0 < kv.metrics.get(table.HELD_BYTES, place="directory") == used_bytes())
    values = values_of(kv.metrics)
    assert kv.metrics.get(table.HELD_BYTES, place="host") > 0
    assert values['kvtier_load_tokens_total{place="host"}'] == 32
    assert values['kvtier_lookup_tokens_total{result="ready"}'] == 32
    assert values['kvtier_store_chunks_total{result="held"}'] == 4
    assert values['kvtier_transfers_total{link="gather",outcome="done"}'] == 4
    kv.session.close()


def test_an_engine_with_a_lossy_class_says_so_at_its_start_and_counts_its_loads(tmp_path, caplog):
    kind = GroupLayout(
        History(),
        (4096,),
        "test/lossy",
        runs=((Run("keys", "bf16", 4096),),),
        axes=((Axes(("token", "channel"), (16, 128)),),),
    )
    layout, prefix = KvLayout(16, (kind,)), prefix_of(2)
    for loss in ("none", "int4"):
        settings = replace(config(tmp_path / loss), store=StoreConfig(loss=loss))
        engine = Engine(64, layout=layout)
        kv = open_session(settings, layout, FINGERPRINT, engine.copier())
        stored(kv.session, "a", prefix, places_of(range(2), (0,)))
        looked_up(kv.session, "b", prefix)
        loaded(kv.session, "b", prefix, 32, places_of(range(2), (0,)))
        found = [kv.metrics.get(table.LOSSY_LOAD_TOKENS, loss=it) for it in ("int4", "k8v4")]
        told = [it for it in caplog.messages if "with loss" in it]
        assert found == [32 * (loss == "int4"), 0]
        assert [it.split(":")[0] for it in told] == ["this engine stores KV with loss (int4)"] * (loss != "none")
        kv.session.close()


def test_the_observer_gets_every_command_and_completion_under_the_lock():
    seen, sessions = [], []

    def see(what, command):
        if not isinstance(command, Probe) or command.objects:  # not a health check
            seen.append((what, command, all(session._holder for session in sessions)))

    class Recorder(Observer):
        def submitted(self, command):
            see("submitted", command)

        def completed(self, completion):
            see("completed", completion.command)

    tier = MemoryTier("below", capacity_bytes=64 << 20)
    session, _, _ = local(Engine(64).copier(), {"below": tier}, observer=Recorder())
    sessions.append(session)
    looked_up(session, "a", prefix_of(2))
    stored(session, "a", prefix_of(2), places_of(range(2)))
    assert session.close().flushed
    submitted = [command for what, command, _ in seen if what == "submitted"]
    assert len(submitted) == 1 + 4 + 4  # a probe, gathers, demotes
    completions = [command for what, command, _ in seen if what == "completed"]
    assert sorted(map(id, completions)) == sorted(map(id, submitted))
    assert all(is_inside for _, _, is_inside in seen)


@pytest.mark.parametrize(("feature", "again"), [(Feature.EVENTS, False), (Feature.METRICS, True)])
def test_an_observer_that_raises_loses_a_record_or_ends_with_its_feature(feature, again):
    seen = []

    class Failing(Observer):
        def submitted(self, command):
            seen.append(command)
            raise ValueError("of an observer")

    session, _, _ = local(Engine(64).copier(), {})
    session.guards.register(feature, Failing())
    for seed in range(3):
        prefix = prefix_of(2, seed=seed)
        assert stored(session, f"write {seed}", prefix, places_of(range(2))).stored == 4
        done = loaded(session, f"read {seed}", prefix, prefix.tokens, load_places(prefix.tokens))
        assert done.tokens == prefix.tokens
    assert (len(seen) > 1) == again
    assert session.close().flushed


@pytest.mark.parametrize(("wanted", "alignment", "expected"), [(0, 1, 256), (0, 16, 256), (0, 96, 288), (64, 16, 64)])
def test_chunk_tokens_follow_the_engine(wanted, alignment, expected):
    assert choose_chunk_tokens(wanted, alignment) == expected


def test_chunk_tokens_that_cut_a_block_are_refused():
    with refuses("store.chunk_tokens", value="100", allowed="0, or a multiple of 16"):
        choose_chunk_tokens(100, 16)
