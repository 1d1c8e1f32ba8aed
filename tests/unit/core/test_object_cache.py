"""The core of an object store: slots, writes, bad copies; its metrics and health."""

import itertools
from dataclasses import replace

import pytest
from tests.memory_tier import MemoryTier
from tests.metric_values import values_of
from tests.object_store_contract import DEADLINE_S, LAYOUT, STAGED, STAGING_BYTES, got, object_id, put
from tests.system import until

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.core.staging_core import ObjectCache
from kvtier.layout import KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.runtime.arena import Arena
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.types import Direction, Drop, ObjectId, Origin, Outcome, RequestId, Transfer


def opened(tier, layout=LAYOUT):
    return ObjectStore(
        layout=layout,
        name_root=bytes(32),
        model=bytes(16),
        tiers={tier.name: tier},
        rules=[TierRules(name=tier.name)],
        arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
    )


class Core:
    """An `ObjectCache` whose commands a test completes."""

    def __init__(self, *names, slots=8):
        rules = [TierRules(name=name) for name in names]
        self.cache = ObjectCache(layout=LAYOUT, slots=(slots, slots), tiers=rules)
        self.requests = itertools.count()

    def begin(self, call, *objects, now_s=0.0):
        request = RequestId(f"{call} {next(self.requests)}")
        getattr(self.cache, call)(request, objects, [Origin()] * len(objects), now_s)
        return request

    def commands(self, direction=None):
        taken = self.cache.take_commands()
        return (
            taken
            if direction is None
            else [it for it in taken if isinstance(it, Transfer) and it.direction is direction]
        )

    def complete(self, transfers, outcome=Outcome.DONE, now_s=0.0):
        for transfer in transfers:
            self.cache.complete(transfer.id, outcome, now_s)
        self.cache.advance(now_s)

    def outcomes(self, request):
        self.events = [*getattr(self, "events", []), *self.cache.take_events()]
        return next((list(it.outcomes) for it in self.events if it.request == request), None)


def pages(count):
    return [object_id(number) for number in range(count)]


def test_neither_reads_nor_writes_take_all_slots():
    core = Core("memory", slots=8)
    core.begin("get", *pages(20))
    assert len(core.commands(Direction.PROMOTE)) == 6
    core.begin("put", *[object_id(number) for number in range(30, 50)])
    assert len(core.commands(Direction.GATHER)) == 2, "the free ones"
    assert core.cache.host.used(0) == 8
    core.cache.check()


def test_a_put_that_joins_an_overdue_write_is_answered():
    core, page = Core("memory"), object_id(1)
    first = core.begin("put", page)
    core.complete(core.commands(Direction.GATHER))
    (demote,) = core.commands(Direction.DEMOTE)
    core.cache.release(first, 0.1)
    assert core.outcomes(first) == [Outcome.FAILED]
    before = core.begin("put", page, now_s=0.2)
    assert core.outcomes(before) is None
    core.cache.tick(demote.deadline_s)
    assert core.outcomes(before) == [Outcome.FAILED]
    after = core.begin("put", page, now_s=demote.deadline_s)
    assert core.outcomes(after) == [Outcome.FAILED], "its thread may never return"
    core.complete([demote], Outcome.FAILED, demote.deadline_s)
    assert core.cache.host.used(0) == 0


def test_a_write_to_a_slower_tier_gives_its_slot_to_a_put_and_becomes_a_relay():
    core = Core("fast", "slow", slots=4)
    slow = core.cache._tiers["slow"]
    slow.limit[Direction.DEMOTE] = 1
    for number in range(6):
        put = core.begin("put", object_id(number))
        core.complete(core.commands(Direction.GATHER))
        core.complete([it for it in core.commands(Direction.DEMOTE) if it.tier == "fast"])
        assert core.outcomes(put) == [Outcome.DONE]
    assert core.cache.relays_waiting()["slow"] == 3
    core.cache.check()


def test_a_write_to_a_tier_that_is_faster_than_the_keeper_keeps_its_slot():
    core = Core("fast", "slow", slots=4)
    core.cache._tiers["fast"].limit[Direction.DEMOTE] = 1
    for number in range(3):
        put = core.begin("put", object_id(number))
        core.complete(core.commands(Direction.GATHER))
        core.complete([it for it in core.commands(Direction.DEMOTE) if it.tier == "slow"])
        assert core.outcomes(put) == [Outcome.DONE]
    core.begin("put", object_id(9))
    assert core.commands(Direction.GATHER) == [], "no slot until the fast tier has written"
    assert core.cache.counters.relays_dropped == 0


def test_a_tier_without_room_holds_up_no_object_of_another():
    core = Core("fast", "slow", slots=16)
    core.cache._tiers["slow"].limit[Direction.PROMOTE] = 1
    core.begin("get", *pages(8))
    first = core.commands(Direction.PROMOTE)
    core.complete(first[:4], Outcome.ABSENT)
    assert [it.tier for it in core.commands(Direction.PROMOTE)] == ["slow"]
    core.complete(first[4:])
    assert len(core.commands(Direction.SCATTER)) == len(first) - 4
    core.cache.check()


def test_objects_that_have_left_are_not_kept():
    core = Core("fast", "slow")
    for number in range(50):
        core.begin("put", object_id(number))
        while commands := core.commands():
            core.complete([it for it in commands if isinstance(it, Transfer)])
    assert core.cache.pending_count == 0
    assert not any(core.cache._tier_writes._can_wait)
    assert not core.cache._operations.keepers


def test_puts_take_turns():
    core = Core("memory", slots=4)
    large = core.begin("put", *pages(30))
    small = core.begin("put", object_id(99))
    for _ in range(6):
        core.complete(core.commands())
    assert core.outcomes(small) == [Outcome.DONE]
    assert core.cache.requests() == [large]


def test_a_put_waits_for_the_get_that_has_its_object_in_a_slot():
    """What the get has read may be gone from the tier by now, and its slot is one of reads."""
    core, page = Core("memory"), object_id(1)
    core.begin("get", page)
    promotes = core.commands(Direction.PROMOTE)
    put = core.begin("put", page)
    core.complete(promotes)
    (scatter,) = core.commands()
    assert core.outcomes(put) is None
    core.complete([scatter])
    core.complete(core.commands(Direction.GATHER))
    core.complete(core.commands(Direction.DEMOTE))
    assert core.outcomes(put) == [Outcome.DONE]


@pytest.mark.parametrize("by_key", [True, False])
def test_the_run_of_a_remote_tier_counts_objects_of_every_group(by_key):
    """Forty pages in two groups; the second group has the first page only."""
    core = Core("far")
    core.cache._tiers["far"].rules = replace(core.cache._tiers["far"].rules, is_remote=True)
    objects = [ObjectId(it.key, group) for it in pages(40) for group in (0, 1)]
    objects = objects if by_key else sorted(objects, key=lambda it: it.group)
    there = {each for each in objects if each.group == 0 or each == objects[1] or each.key == objects[0].key}
    find = RequestId("find")
    core.cache.lookup_objects(find, objects, 0.0, is_run=True)
    while probes := core.commands():
        for probe in probes:
            core.cache.probed(probe.id, [each in there for each in probe.objects], 0.0)
    run = core.outcomes(find).index(Outcome.ABSENT)
    exact = next(at for at, each in enumerate(objects) if each not in there)
    assert exact <= run <= exact + 2 * by_key, "spaced names miss some holes"


def test_what_is_corrupt_stays_suspect_until_it_is_written_again():
    """The thread that found it may send the drop later, and an older probe may still say that the copy is there."""
    core, bad = Core("memory"), object_id(1)
    tier = core.cache._tiers["memory"]
    get = core.begin("get", bad)
    core.complete(core.commands(Direction.PROMOTE), Outcome.CORRUPT)
    (drop,) = core.commands()
    assert isinstance(drop, Drop)
    assert core.outcomes(get) == [Outcome.CORRUPT]
    core.cache.dropped(drop, Outcome.DONE)
    find = RequestId("find")
    core.cache.lookup_for_put(find, [bad], 0.0)
    assert core.outcomes(find) == [Outcome.ABSENT]
    assert core.commands() == [], "no tier is asked"
    put = core.begin("put", bad)
    core.complete(core.commands(Direction.GATHER))
    core.complete(core.commands(Direction.DEMOTE))
    assert core.outcomes(put) == [Outcome.DONE]
    assert not tier.is_suspect(bad)


def test_metrics_are_those_of_a_session():
    store = opened(MemoryTier("memory", capacity_bytes=64 << 20))
    put(store, range(4))
    got(store, range(6))
    store.leading_run([object_id(0)], DEADLINE_S)
    metrics = store.metrics
    assert metrics.get(table.OBJECTS, way="write", outcome="done") == 4
    assert metrics.get(table.OBJECTS, way="read", outcome="done") == 4
    assert metrics.get(table.OBJECTS, way="read", outcome="absent") == 2
    assert metrics.get(table.TRANSFERS, link="demote", outcome="done") == 4
    assert metrics.get(table.TRANSFERS, link="promote", outcome="absent") == 2
    assert metrics.get(table.TRANSFER_BYTES, link="promote", tier="memory") == 4 * frame_bytes(LAYOUT.groups[0])
    assert metrics.get(table.PROBES, tier="memory", result="answered") == 2, "of the put and of the question"
    assert metrics.get(table.OBJECT_CALL_SECONDS, call="get") == 1
    assert metrics.get(table.TIER_UP, tier="memory", way="read") == 1
    until(lambda: metrics.get(table.HELD_BYTES, place="memory"))
    assert metrics.get(table.CAPACITY_BYTES, place="host") == STAGING_BYTES
    assert metrics.get(table.HELD_BYTES, place="host") == 0
    assert "kvtier_objects_total" in str(values_of(metrics))
    assert metrics.get(table.LOSSY_LOAD_TOKENS, loss="int4") == 0
    store.close()


def test_tokens_that_were_loaded_are_counted_by_class():
    layout = KvLayout(LAYOUT.chunk_tokens, tuple(replace(group, loss="int4") for group in LAYOUT.groups))
    store = opened(MemoryTier("memory", capacity_bytes=64 << 20), layout)
    put(store, range(4))
    put(store, range(4), group=1)
    got(store, range(6))
    got(store, range(4), group=1)
    assert store.metrics.get(table.LOSSY_LOAD_TOKENS, loss="int4") == 4 * LAYOUT.chunk_tokens, "of the first group"
    store.close()


def test_health_names_each_tier_and_its_figures():
    tier = MemoryTier("memory", capacity_bytes=64 << 20)
    store = opened(tier)
    put(store, range(4))
    until(lambda: store.health()["memory"].figures.used_bytes == tier.used_bytes)
    assert store.health()["memory"][:2] == (True, True)
    assert put(store, [1]) == [Outcome.DONE], "an object that is there is not staged again"
    assert store.metrics.get(table.TRANSFERS, link="demote", outcome="done") == 4
    store.close()
