"""Several ranks as one: a command is done once all ranks have done it, and fails if one fails."""

import json
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.completions import taking
from tests.memory_tier import MemoryTier
from tests.refusals import refuses
from tests.rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    Engine,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)
from tests.system import until

from kvtier.codec.frame import frame_bytes
from kvtier.config.sections import JournalConfig
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.keys.object_names import object_name
from kvtier.layout import KvLayout
from kvtier.observe.metric_definitions import CAPACITY_BYTES, EVICTIONS, HELD_BYTES, STUCK_QUEUES, WRITE_BYTES
from kvtier.observe.metrics import Metrics
from kvtier.policy.registry import make_evictor
from kvtier.runtime import rank_group as module
from kvtier.runtime.arena import Arena, chunk_bytes, slots_for
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion, TierView
from kvtier.runtime.mover import Mover
from kvtier.runtime.observers.transfer_metrics import TierGauges
from kvtier.runtime.open import open_core
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_group import RankGroup, merged
from kvtier.runtime.rank_server import ProtocolError, RankServer, connect
from kvtier.runtime.session import Session
from kvtier.tier.base import UNKNOWN
from kvtier.types import (
    SEVERITY,
    Cancel,
    ChunkKey,
    Direction,
    Drop,
    Figures,
    Outcome,
    Probe,
    Recall,
    RecallPage,
    Transfer,
)

SLOTS = 8


def session_of(engines, tiers, remote=(), layout=LAYOUT):
    movers = [
        Mover(
            CommandRunner(
                layout=layout.on_rank(rank, 2),
                model=FINGERPRINT[:16],
                arena=Arena(layout, (SLOTS,) * len(layout.groups)),
                copier=engine.copier(),
                tiers={"below": tiers[rank]},
            )
        )
        for rank, engine in enumerate(engines)
    ]
    group = RankGroup(movers, remote)
    cache = Cache(
        layout=layout,
        slots=(SLOTS,) * len(layout.groups),
        tiers=[TierRules(name="below", is_remote="below" in remote)],
        evictor=lambda: make_evictor("lru"),
    )
    return Session(cache, group)


def name_on(rank, key):
    return object_name(key, 0, LAYOUT.on_rank(rank, 2).part(0), LAYOUT.digest(0))


def memory_tiers():
    return [MemoryTier("below", capacity_bytes=64 << 20) for _ in range(2)]


def engines_of(first_seed, blocks=64):
    return [Engine(blocks, seed=first_seed + rank) for rank in range(2)]


def keep(prefix, engines, tiers, layout=LAYOUT):
    """A session that stores `prefix` in `tiers` and is closed."""
    session = session_of(engines, tiers, layout=layout)
    stored(session, "a", prefix, places_of(range(len(prefix.keys)), range(len(layout.groups))))
    session.close()


# ---- the whole stack -----------------------------------------------------------------------------------------------


def opened(directory, engines, journal=None):
    settings = replace(config(directory, host_chunks=16), journal=JournalConfig(path=journal))
    ranks = [
        open_rank(settings, LAYOUT, FINGERPRINT, engine.copier(), rank=rank, ranks=len(engines))
        for rank, engine in enumerate(engines)
    ]
    servers = [RankServer(rank, lambda _note: None) for rank in ranks]
    below = connect([server.handshake for server in reversed(servers)])

    def close(seconds):
        for rank, server in zip(ranks, servers, strict=True):
            rank.close(seconds)
            assert server.close()

    return open_core(settings, LAYOUT, FINGERPRINT, below, on_close=close)


@pytest.mark.parametrize("count", [1, 2])
def test_the_journal_counts_payload_and_frames_of_all_ranks(tmp_path, count):
    kv = opened(tmp_path / "kv", engines_of(1)[:count], journal=tmp_path / "journal")
    stored(kv.session, "a", prefix_of(3, kv.root), places_of(range(3)))
    kv.session.close()
    (file,) = (tmp_path / "journal").iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert len(written) == 3 * len(LAYOUT.groups)
    for line in written:
        of_rank = sum(LAYOUT.groups[line["group"]].layer_bytes)
        assert line["payload_bytes"] == count * of_rank
        assert line["bytes"] == count * frame_bytes(LAYOUT.groups[line["group"]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_one_rank_lacks_is_no_hit(rank):
    tiers = memory_tiers()
    prefix = prefix_of(4)
    keep(prefix, engines_of(1), tiers)
    tiers[rank].delete(name_on(rank, prefix.keys[2]))
    second = session_of(engines_of(11), tiers)
    assert looked_up(second, "b", prefix).tokens == 2 * CHUNK_TOKENS
    second.close()


@pytest.mark.parametrize(("rank", "found"), [(0, 2), (1, 4)])
def test_in_a_remote_tier_a_rank_that_lacks_a_chunk_shortens_the_load(rank, found):
    history = KvLayout(CHUNK_TOKENS, LAYOUT.groups[:1])
    tiers = memory_tiers()
    sources, targets = engines_of(1), engines_of(11)
    prefix = prefix_of(4)
    keep(prefix, sources, tiers, history)
    tiers[rank].delete(name_on(rank, prefix.keys[2]))
    second = session_of(targets, tiers, remote={"below"}, layout=history)
    answer = looked_up(second, "b", prefix)
    assert answer.tokens == found * CHUNK_TOKENS, "rank 0 answers for both"
    done = loaded(second, "b", prefix, answer.tokens, places_of(range(found), (0,)))
    assert done.tokens == 2 * CHUNK_TOKENS
    for source, target in zip(sources, targets, strict=True):
        assert target.same(source, places_of(range(2), (0,)))
    second.release("b")
    # The next store heals it.
    assert stored(second, "c", prefix, places_of(range(4), (0,))).stored == 4
    assert second.close().flushed
    assert tiers[rank].contains([name_on(rank, prefix.keys[2])]) == [True]


def test_a_damaged_copy_on_one_rank_is_dropped_on_all():
    tiers = memory_tiers()
    prefix = prefix_of(1)
    keep(prefix, engines_of(1), tiers)
    name = name_on(1, prefix.keys[0])
    frame = bytearray(1 << 20)
    size = tiers[1].read(name, memoryview(frame))
    frame[size - 1] ^= 1
    tiers[1].delete(name)
    tiers[1].write(name, memoryview(frame)[:size], UNKNOWN)
    second = session_of(engines_of(11), tiers)
    assert looked_up(second, "b", prefix).tokens == CHUNK_TOKENS
    assert loaded(second, "b", prefix, CHUNK_TOKENS, load_places(CHUNK_TOKENS)).tokens == 0
    names = [name_on(rank, prefix.keys[0]) for rank in (0, 1)]
    # Before the end of the session: closing does not wait for drops that have not begun.
    until(lambda: not any(tier.contains([it])[0] for tier, it in zip(tiers, names, strict=True)))
    second.close()


# ---- the group alone -----------------------------------------------------------------------------------------------


class Scripted:
    """A rank whose completions are made by the test."""

    lost = ""

    def __init__(self):
        self.commands = []
        self.notes = []
        self.send_note = self.notes.append
        self.is_behind = False

    def submit(self, *commands):
        self.commands += commands

    def complete_to(self, put, ready):
        self.put, self.ready = put, ready

    def flush(self):
        return not self.is_behind

    def close(self, deadline_s):
        return True

    def answer(self, position=0, **about):
        command = self.commands.pop(position)
        self.put(Completion(command, **{"outcome": Outcome.DONE} | about))


def a_transfer(number=1):
    return Transfer(
        number, Direction.PROMOTE, ChunkKey(bytes(32)), 0, 0, "below", None, (), None, 0, float("inf"), None
    )


@pytest.fixture
def ranks():
    return Scripted(), Scripted()


def test_a_command_is_answered_once_when_all_have_answered(ranks):
    group = taking(RankGroup(ranks))
    first, second = a_transfer(1), a_transfer(2)
    group.submit(first)
    group.submit(second)
    ranks[0].answer(seconds=1.0, size_bytes=10)
    ranks[1].answer(1)
    assert group.take() == []
    ranks[1].answer(waited_s=2.0, size_bytes=5)
    (completion,) = group.take()
    assert completion.command is first
    assert completion == Completion(first, Outcome.DONE, size_bytes=15, seconds=1.0, waited_s=2.0)
    ranks[0].answer()
    assert [completion.command for completion in group.take()] == [second]
    assert group.take() == []


def test_an_answer_that_was_not_taken_counts_only_when_it_is_given_again(ranks, monkeypatch):
    """A rank whose answer counted twice would end a command that another rank still works on."""
    group = taking(RankGroup(ranks))
    group.submit(command := a_transfer())
    real = module.merged
    monkeypatch.setattr(module, "merged", None)
    ranks[0].answer()
    with pytest.raises(TypeError):
        ranks[1].put(Completion(command, Outcome.DONE))
    assert group.take() == []
    monkeypatch.setattr(module, "merged", real)
    ranks[1].put(Completion(command, Outcome.FAILED))
    assert [completion.outcome for completion in group.take()] == [Outcome.FAILED]


def test_without_another_thread_the_ranks_are_closed_all_the_same(ranks, monkeypatch):
    def no_thread(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert RankGroup(ranks).close(1.0)


def test_equal_drops_are_separate_commands(ranks):
    group = taking(RankGroup(ranks))
    twins = [Drop("below", ChunkKey(bytes(32)), 0) for _ in range(2)]
    for drop in twins:
        group.submit(drop)
    for rank in ranks:
        rank.answer()
    (completion,) = group.take()
    assert completion.command is twins[0]
    for rank in ranks:
        rank.answer()
    assert len(group.take()) == 1


def test_one_lost_rank_is_the_loss_of_all(ranks):
    group = taking(RankGroup(ranks))
    assert group.lost == ""
    ranks[1].lost = "rank 1 is lost"
    assert group.lost == "rank 1 is lost"


def a_probe(number=1, tier="below", objects=2):
    return Probe(number, tier, ((ChunkKey(bytes(32)), 0),) * objects, float("inf"))


def test_in_a_remote_tier_one_rank_probes_for_all(ranks):
    group = taking(RankGroup(ranks, {"below"}))
    commands = [a_probe(1), a_transfer(2), Cancel((7,)), a_probe(3, "local"), a_probe(4, objects=0)]
    group.submit(*commands)
    assert ranks[0].commands == commands
    assert ranks[1].commands == commands[1:4]
    ranks[0].answer(present=(True, False))
    assert [(it.command.id, it.present) for it in group.take()] == [(1, (True, False))]


def test_rank_0_recalls_for_all(ranks):
    group = taking(RankGroup(ranks))
    commands = [Recall("below", 0, 1, 0), a_transfer(2)]
    group.submit(*commands)
    assert ranks[0].commands == commands
    assert ranks[1].commands == commands[1:]
    page = RecallPage((), is_last=True)
    ranks[0].answer(page=page)
    assert [it.page for it in group.take()] == [page]


def test_a_remote_tier_is_probed_by_the_rank_that_failed_last(ranks):
    """Otherwise a tier that one rank cannot reach would be taken for healthy again and again."""
    group = taking(RankGroup(ranks, {"below"}))
    group.submit(a_transfer(1))
    ranks[1].answer(outcome=Outcome.FAILED, is_tier_fault=True)
    ranks[0].answer()
    (completion,) = group.take()
    assert completion.outcome is Outcome.FAILED
    group.submit(a_probe(2, objects=0))
    assert [len(rank.commands) for rank in ranks] == [0, 1]
    ranks[1].answer(outcome=Outcome.FAILED)  # no fault of the tier
    group.submit(a_transfer(3))
    ranks[0].answer(outcome=Outcome.FAILED, is_tier_fault=True)
    group.submit(a_probe(4))
    assert [each.id for each in ranks[0].commands] == [4]


def test_a_slow_rank_shortens_a_wait(ranks):
    group = taking(RankGroup(ranks))
    began_s = time.monotonic()
    ranks[1].is_behind = True
    assert group.take(DEADLINE_S) == []
    assert time.monotonic() - began_s < DEADLINE_S / 2


def test_a_rank_that_hangs_does_not_hold_up_the_closing_of_others(ranks):
    hold = threading.Event()
    closed = []
    ranks[0].close = lambda _deadline_s: hold.wait(DEADLINE_S)
    ranks[1].close = lambda deadline_s: closed.append(deadline_s) or True
    began_s = time.monotonic()
    assert not RankGroup(ranks).close(0.05)
    assert time.monotonic() - began_s < DEADLINE_S / 2
    assert closed == [0.05]
    hold.set()


outcomes = st.sampled_from(list(Outcome))
settled_ = st.builds(
    Completion,
    st.just(a_transfer()),
    outcomes,
    st.just(()),
    st.integers(0, 100),
    st.floats(0, 10),
    st.floats(0, 10),
    st.text(max_size=3),
    st.booleans(),
    page=st.none(),
)


@given(settled_, settled_, settled_)
def test_the_order_of_answers_does_not_matter(one, two, three):
    def facts(completion):
        return completion._replace(detail="")  # between equally bad ones either reason will do

    assert facts(merged(one, two)) == facts(merged(two, one))
    assert facts(merged(merged(one, two), three)) == facts(merged(one, merged(two, three)))
    together = merged(one, two)
    assert SEVERITY[together.outcome] == max(SEVERITY[one.outcome], SEVERITY[two.outcome])
    assert together.detail in {each.detail for each in (one, two) if each.outcome is together.outcome}
    assert together.is_tier_fault == (one.is_tier_fault or two.is_tier_fault)


# ---- ranks that fit together ---------------------------------------------------------------------------------------


@pytest.fixture
def servers(tmp_path):
    started = []

    def start(*numbers, ranks=2, host_chunks=16):
        for number in numbers:
            settings = config(tmp_path / "kv", host_chunks=host_chunks)
            rank = open_rank(settings, LAYOUT, FINGERPRINT, Engine(64).copier(), rank=number, ranks=ranks)
            started.append((rank, RankServer(rank, lambda _note: None)))
        return [server.handshake for _, server in started]

    yield start
    for rank, server in started:
        rank.close(DEADLINE_S)
        assert server.close(DEADLINE_S)


def test_host_memory_is_divided_among_the_ranks(servers):
    assert connect(servers(0, 1)).slots == slots_for(LAYOUT, config(None, host_chunks=16).host.capacity_bytes // 2)


def test_too_little_host_memory_for_all_ranks_is_refused():
    with refuses("host.capacity_bytes", "too small", value="100", allowed="at least "):
        slots_for(LAYOUT, 100, 2 * chunk_bytes(LAYOUT))


@pytest.mark.parametrize("numbers", [(0,), (1,), (0, 0)])
def test_missing_ranks_are_refused(servers, numbers):
    with pytest.raises(ProtocolError, match="expected 0 to 1"):
        connect(servers(*numbers))


def test_no_ranks_are_refused():
    with pytest.raises(ProtocolError, match="sent a handshake"):
        connect([])


def test_ranks_with_other_settings_are_refused(servers):
    servers(0)
    with pytest.raises(ProtocolError, match=r"rank 1 has .* slots .* the same settings"):
        connect(servers(1, host_chunks=80))


def test_remote_tiers_are_named_in_the_handshake(servers):
    executor = taking(connect([handshake | {"remote": ["directory"]} for handshake in servers(0, 1)]).executor)
    executor.submit(a_probe(1, "directory"))
    executor.submit(a_probe(2, "directory"))
    assert len(executor.take(DEADLINE_S)) >= 1
    assert executor._asked == {"directory": 0}


def test_ranks_that_disagree_on_remote_tiers_are_refused(servers):
    first, second = servers(0, 1)
    with pytest.raises(ProtocolError, match="the same settings"):
        connect([first, second | {"remote": ["directory"]}])


def test_a_foreign_handshake_is_refused_without_showing_the_key(servers):
    (handshake,) = servers(0, ranks=1)
    with pytest.raises(ProtocolError, match="fields address, key") as refused:
        connect([handshake | {"slots": None}])
    assert handshake["key"] not in str(refused.value)


def test_fill_levels_add_over_ranks_and_a_common_store_counts_once():
    ranks = [{name: TierView() for name in ("own", "one")} for _ in range(3)]
    metrics = Metrics()
    gauges = TierGauges(metrics, ranks, lambda _: True, {"one"})
    for rank, (view, used_bytes) in enumerate(((ranks[0], 10), (ranks[1], 30))):  # the third has not reported
        for each in view.values():
            each.figures = Figures(used_bytes, 100 - rank, 5, {"frames": 7})
            each.stuck_queues = lambda rank=rank: rank
    gauges()
    gauges()
    held = {name: metrics.get(HELD_BYTES, place=name) for name in ("own", "one")}
    assert held == {"own": 40, "one": 30}
    assert {name: metrics.get(CAPACITY_BYTES, place=name) for name in held} == {"own": 199, "one": 99}
    ranks[0]["own"].figures = Figures(0, 100, 1, {"frames": 1})  # opened anew
    ranks[1]["own"].figures = Figures(30, 99, 9, {"frames": 9})
    gauges()
    gauges()
    assert {name: metrics.get(EVICTIONS, place=name) for name in held} == {"own": 14, "one": 10}
    assert metrics.get(WRITE_BYTES, tier="own", what="frames") == 16
    assert metrics.get(STUCK_QUEUES, tier="own") == 1
    assert all(view.is_up for rank in ranks for view in rank.values())
